"""The device layer on the CPU of this machine, and on stand-ins for the devices it lacks.

`habana_frameworks` is the stand-in of tests/habana; none of this ran on a Gaudi.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.runtime import accelerator, device_cuda, device_hpu, devices
from megatron.runtime.device import DeviceError
from megatron.runtime.device_cuda import CUDA
from megatron.runtime.device_hpu import HPU
from tests.habana import stand_in_packages
from tests.ranks import HANG_S

KEYS = ["memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)"]


def stand_in(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


@pytest.fixture(autouse=True)
def _unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """DS_ACCELERATOR and the device DeepSpeed settled on, as in a new process; both are put back afterwards."""
    monkeypatch.setenv("DS_ACCELERATOR", "restored by monkeypatch")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator.real_accelerator", stand_in("real", ds_accelerator=None))


@pytest.fixture
def habana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_in_packages(monkeypatch) as habana:
        yield habana


def run_on(monkeypatch: pytest.MonkeyPatch, device: str, **more: Any) -> None:
    """Let DeepSpeed answer with this device, without importing it."""
    answer = SimpleNamespace(device_name=lambda: device, **more)
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in("deepspeed"))
    module = stand_in("deepspeed.accelerator", get_accelerator=lambda: answer)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)


def with_cuda(monkeypatch: pytest.MonkeyPatch, available: bool = True) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


# ---------------------------------------------------------------------------------------------------------------------
# Choice


def test_auto_prefers_hpu_then_cuda_then_cpu(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    with_cuda(monkeypatch)
    assert accelerator.choose_device("auto") == "hpu"
    monkeypatch.delenv("DS_ACCELERATOR")
    habana.count = 0
    assert accelerator.choose_device("auto") == "cuda"
    monkeypatch.delenv("DS_ACCELERATOR")
    with_cuda(monkeypatch, available=False)
    assert accelerator.choose_device("auto") == "cpu"


@pytest.mark.parametrize("device", ["hpu", "cuda", "cpu"])
def test_choice_is_told_to_deepspeed(monkeypatch: pytest.MonkeyPatch, habana: Any, device: str) -> None:
    with_cuda(monkeypatch)
    assert accelerator.choose_device(device) == device
    assert os.environ["DS_ACCELERATOR"] == device
    assert accelerator.choose_device("auto") == device, "auto keeps to what this process runs on"


def test_hpu_without_habana_frameworks_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    with pytest.raises(DeviceError, match=r"not installed; .*never by pip.*--device cpu"):
        accelerator.choose_device("hpu")
    assert "DS_ACCELERATOR" not in os.environ


def test_a_plugin_that_does_not_load_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for another torch; or the namespace is there by a package of media pipelines alone."""

    def load(name: str) -> ModuleType:
        raise ImportError("libhabana.so: undefined symbol: _ZN5torch")

    monkeypatch.setattr(device_hpu.importlib, "import_module", load)
    version = {"habana-torch-plugin": "1.24.1.482", "torch": "2.13.0"}.__getitem__
    monkeypatch.setattr(device_hpu.metadata, "version", version)
    with pytest.raises(DeviceError, match=r"1.24.1.482 does not load beside torch 2.13.0: libhab.*built"):
        accelerator.choose_device("hpu")


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Error: Compile-time major/minor PyTorch version 2.10.0 differs from run-time 2.13.0."),
        AssertionError("Stock PyTorch version 2.11.0 is not supported in Lazy mode."),
        AttributeError("'NoneType' object has no attribute 'startswith'"),  # its reading of a stock torch's version
    ],
)
def test_what_the_plugin_asserts_of_torch_is_one_message(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(device_hpu.importlib, "import_module", load)
    with pytest.raises(DeviceError, match=rf"{re.escape(str(error))}; .*lazy mode needs Habana's build"):
        accelerator.choose_device("hpu")


def test_operators_that_the_cpu_computed_are_counted_by_name(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    run_on(monkeypatch, "hpu")
    assert accelerator.current().cpu_fallbacks() == {}
    habana.fallbacks["aten::unique"] = 3
    assert accelerator.current().cpu_fallbacks() == {"aten::unique": 3}
    run_on(monkeypatch, "cpu")
    assert accelerator.current().cpu_fallbacks() == {}


def test_the_namespace_alone_is_no_gaudi_software(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "habana_frameworks" / "mediapipe").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(device_hpu, "count_devices", lambda: 8)
    monkeypatch.setattr(device_cuda, "count_devices", lambda: 0)
    assert devices.detect_device() == "cpu"
    with pytest.raises(DeviceError, match=r"habana_frameworks.torch is not installed"):
        accelerator.choose_device("hpu")
    sys.modules.pop("habana_frameworks", None)


@pytest.mark.parametrize(
    ("device", "listed", "count"),
    [
        ("hpu", "4,5,6,7", 4),
        ("hpu", "0,0,1", 2),
        ("hpu", "", 0),
        ("cuda", "4, 5", 2),
        ("cuda", "0,-1,1", 1),
        ("cuda", "0,0", 0),
        ("cuda", "GPU-8932f937,MIG-63feeb45", 2),
    ],
)
def test_devices_are_counted_as_their_libraries_do(
    monkeypatch: pytest.MonkeyPatch, device: str, listed: str, count: int
) -> None:
    record = devices.find_device(device)
    monkeypatch.setenv(record.visible_variable, listed)
    assert record.count is not None
    assert record.count() == count


def test_fewer_modules_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(DeviceError, match="HABANA_VISIBLE_MODULES=4,5 leaves 2 of the 4 devices"):
        accelerator.choose_device("hpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert accelerator.choose_device("hpu") == "hpu"


@pytest.mark.parametrize(
    ("device", "folder", "given", "expected"),
    [
        ("hpu", "out", None, "{out}/hpu_recipes/{host},false,16384"),
        ("auto", "out", None, "{out}/hpu_recipes/{host},false,16384"),
        ("hpu", "out", "/mine,true,64", "/mine,true,64"),
        ("hpu", None, None, None),
        ("hpu", "with,comma", None, None),
        ("cpu", "out", None, None),
    ],
)
def test_compiled_graphs_are_kept_in_the_runs_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    habana: Any,
    caplog: pytest.LogCaptureFixture,
    device: str,
    folder: str | None,
    given: str | None,
    expected: str | None,
) -> None:
    name = "PT_HPU_RECIPE_CACHE_CONFIG"
    monkeypatch.setenv(name, given or "restored by monkeypatch")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PT_HPU_ENABLE_CACHE_METRICS", "1")  # as it sets it, and restored
    monkeypatch.chdir(tmp_path)
    accelerator.keep_compiled_graphs(device, folder)
    place = {"out": tmp_path.resolve() / "out", "host": socket.gethostname()}
    assert os.environ.get(name) == (expected and expected.format(**place))
    assert ("compiled graphs are not kept for a restart" in caplog.text) == (folder == "with,comma")


def test_variables_that_come_after_the_software_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, habana: Any
) -> None:
    for name in ("PT_HPU_RECIPE_CACHE_CONFIG", "PT_HPU_ENABLE_CACHE_METRICS"):
        monkeypatch.setenv(name, "given")
    accelerator.keep_compiled_graphs("hpu", "out")
    assert caplog.text == ""
    monkeypatch.delenv("PT_HPU_ENABLE_CACHE_METRICS")
    accelerator.keep_compiled_graphs("hpu", "out")
    assert (
        "loaded before this run could set PT_HPU_ENABLE_CACHE_METRICS=1, and may not read it; import it" in caplog.text
    )


def test_without_habanas_packages_no_place_for_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    monkeypatch.setattr(os, "environ", {})
    accelerator.keep_compiled_graphs("auto", "out")
    assert os.environ == {}


def test_hpu_without_a_device_names_the_remedy(habana: Any) -> None:
    habana.count = 0
    with pytest.raises(DeviceError, match=r"sees no Gaudi; hl-smi"):
        accelerator.choose_device("hpu")


def test_cuda_hidden_or_not_built_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(DeviceError, match="built without CUDA"):
        accelerator.choose_device("cuda")
    with_cuda(monkeypatch, available=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="under CUDA_VISIBLE_DEVICES=''; nvidia-smi"):
        accelerator.choose_device("cuda")


def test_unknown_device_of_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(DeviceError, match="DS_ACCELERATOR=xpu must be auto, hpu, cuda, cpu, or your own"):
        accelerator.choose_device("auto")


def test_a_choice_after_deepspeed_settled_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    settled = SimpleNamespace(device_name=lambda: "cpu")
    module = stand_in("real", ds_accelerator=settled)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator.real_accelerator", module)
    with pytest.raises(DeviceError, match="too late: deepspeed was imported before and uses cpu"):
        accelerator.choose_device("hpu")
    assert accelerator.choose_device("cpu") == "cpu"


PROGRAM = """
import sys
from megatron.runtime import accelerator
from megatron.runtime.device import Device, DeviceError
from tests.habana import stand_in_packages
assert not {"torch", "deepspeed"} & set(sys.modules), "imported with the module"
chosen = accelerator.choose_device("cpu")
assert "deepspeed" not in sys.modules, "imported by choose_device"
from deepspeed.accelerator import get_accelerator
print(chosen, get_accelerator().device_name(), accelerator.peak_tflops(), accelerator.current().compiled_graphs())
accelerator.current().mark_step()
print(*accelerator.memory_stats(), sep=", ")
try:
    there = Device(name="there", accelerator="cuda", torch_type="cuda", collectives="nccl", missing=str)
    accelerator.DEVICES = (there,)
    accelerator.find_device = lambda name: there
    accelerator.choose_device("there")
except DeviceError as error:
    print("too late" in str(error))
"""


def test_real_deepspeed_follows_the_choice() -> None:
    root = Path(__file__).resolve().parents[2]
    env = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**env, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-3:] == ["cpu cpu None None", ", ".join(KEYS), "True"]


# ---------------------------------------------------------------------------------------------------------------------
# Memory, steps, recompilations


def test_memory_on_cpu_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, "cpu")
    before = accelerator.memory_stats()
    # pages of one's own: what malloc gave, it may keep for this process when it is freed
    ballast = mmap.mmap(-1, 64 * 2**20)
    for _ in range(64):
        ballast.write(bytes(2**20))
    held = accelerator.memory_stats()
    ballast.close()
    freed = accelerator.memory_stats()
    assert list(held) == KEYS
    assert held[KEYS[0]] - before[KEYS[0]] == pytest.approx(64 / 1024, rel=0.3)
    assert held[KEYS[0]] - freed[KEYS[0]] == pytest.approx(64 / 1024, rel=0.3)
    assert freed[KEYS[1]] >= 0.99 * held[KEYS[0]], "the peak outlasts what is freed"
    assert held[KEYS[0]] <= held[KEYS[1]] < held[KEYS[2]]


def test_memory_on_hpu_has_habanas_keys_in_gb(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    run_on(monkeypatch, "hpu")
    assert accelerator.memory_stats() == dict(zip(KEYS, (1.5, 2.0, 96.0), strict=True))


def test_memory_on_cuda_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**29)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    sizes = {3: 80 * 2**30}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert accelerator.memory_stats() == dict(zip(KEYS, (0.5, 1.0, 80.0), strict=True))


def test_details_on_cpu_are_the_process_and_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, "cpu")
    details = accelerator.memory_details()
    assert list(details) == [*KEYS, "host_rss (GB)", "host_memory_available (GB)"]
    assert details["host_rss (GB)"] == pytest.approx(details[KEYS[0]], rel=0.05)
    assert 0 < details["host_memory_available (GB)"] < details[KEYS[2]]


def test_details_on_hpu_are_what_habana_documents(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    run_on(monkeypatch, "hpu")
    details = accelerator.memory_details()
    assert [details[key] for key in KEYS] == [1.5, 2.0, 96.0]
    assert (details["max_alloc_size (GB)"], details["num_active_allocs"]) == (0.25, 7)
    assert (details["num_allocs"], details["num_defragmentations"], details["num_failed_defragmentations"]) == (
        12,
        0,
        0,
    )
    habana.defragmentations[:] = [5, 3]  # tried, successful
    details = accelerator.memory_details()
    assert (details["num_defragmentations"], details["num_failed_defragmentations"]) == (5, 2)
    assert details["host_rss (GB)"] > 0


def test_details_on_cuda_tell_fragmentation_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, "cuda")
    counted = {
        "reserved_bytes.all.current": 3 * 2**29,
        "reserved_bytes.all.peak": 2**31,
        "allocated_bytes.all.current": 2**30,
        "num_alloc_retries": 4,
        "num_ooms": 1,
    }
    for name, answer in {
        "memory_allocated": 2**30,
        "max_memory_allocated": 2**30,
        "current_device": 0,
        "mem_get_info": (5 * 2**30, 80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counted)
    details = accelerator.memory_details()
    expected = {
        "memory_reserved (GB)": 1.5,
        "max_memory_reserved (GB)": 2.0,
        "memory_fragmentation (GB)": 0.5,
        "memory_free (GB)": 5.0,
        "num_alloc_retries": 4,
        "num_ooms": 1,
    }
    assert {key: details[key] for key in expected} == expected
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)  # before the device is first used
    assert accelerator.memory_details().keys() == details.keys()


@pytest.mark.parametrize(("device", "lazy", "marks"), [("hpu", True, 1), ("hpu", False, 0), ("cuda", True, 0)])
def test_mark_step_acts_in_hpus_lazy_mode_only(
    monkeypatch: pytest.MonkeyPatch, habana: Any, device: str, lazy: bool, marks: int
) -> None:
    run_on(monkeypatch, device)
    habana.lazy = lazy
    accelerator.current().mark_step()
    assert len(habana.called("mark_step")) == marks


@pytest.mark.parametrize(("device", "lazy", "marks"), [("hpu", True, 2), ("hpu", False, 0), ("cuda", True, 0)])
def test_marked_functions_launch_their_operators_in_lazy_mode(
    monkeypatch: pytest.MonkeyPatch, habana: Any, device: str, lazy: bool, marks: int
) -> None:
    run_on(monkeypatch, device)
    habana.lazy = lazy
    function = accelerator.marked(lambda x, *, y: x + y)
    assert [function(1, y=2), function(3, y=4)] == [3, 7]
    assert len(habana.called("mark_step")) == marks


def test_recompile_count_is_hpus_graph_compilations(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    run_on(monkeypatch, "hpu")
    assert accelerator.current().compiled_graphs() == 17
    habana.compiled = 18
    assert accelerator.current().compiled_graphs() == 18
    run_on(monkeypatch, "cpu")
    assert accelerator.current().compiled_graphs() is None


# ---------------------------------------------------------------------------------------------------------------------
# What a device can do


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA GeForce RTX 4090", 165),
        ("GAUDI2", 432),
        ("GAUDI3", 1835),
    ],
)
def test_peak_of_known_devices(name: str, tflops: float) -> None:
    device = HPU if name.startswith("GAUDI") else CUDA
    assert accelerator.named_peak_tflops(device, name) == pytest.approx(tflops, abs=1)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "GAUDI",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "Tesla T4",
    ],
)
def test_peak_of_other_devices_is_unknown(name: str) -> None:
    assert [accelerator.named_peak_tflops(device, name) for device in (CUDA, HPU)] == [None, None]


def test_software_is_what_stands_between_torch_and_the_device(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    run_on(monkeypatch, "hpu")
    assert accelerator.current().software() == {"device": "GAUDI2", "habana-torch-plugin": "unknown"}
    monkeypatch.setattr(device_hpu.metadata, "version", lambda name: {"habana-torch-plugin": "1.22.0"}[name])
    assert accelerator.current().software()["habana-torch-plugin"] == "1.22.0"
    run_on(monkeypatch, "cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    expected = {"device": "NVIDIA L40S", "cuda": "12.8", "cudnn": "91002", "nccl": "2.27.3"}
    assert accelerator.current().software() == expected
    run_on(monkeypatch, "cpu")
    assert accelerator.current().software() == {}


def test_peak_asks_the_device_in_use(monkeypatch: pytest.MonkeyPatch, habana: Any) -> None:
    habana.name = "GAUDI3"
    run_on(monkeypatch, "hpu")
    assert accelerator.peak_tflops() == 1835
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    run_on(monkeypatch, "cuda")
    assert accelerator.peak_tflops() == 362.05
    run_on(monkeypatch, "cpu")
    assert accelerator.peak_tflops() is None


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
def test_deterministic_sets_torchs_switch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "restored by monkeypatch")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        accelerator.set_deterministic(devices.find_device(device))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if device == "cuda" else None)
        assert torch.backends.cudnn.benchmark is (device != "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_the_device_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"hpu": 0, "cuda": 0}
    monkeypatch.setattr(device_hpu, "count_devices", lambda: counts["hpu"])
    monkeypatch.setattr(device_cuda, "count_devices", lambda: counts["cuda"])
    monkeypatch.setattr(device_cuda, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(device_hpu, "has_gaudi_plugin", lambda: True)
    assert devices.detect_device() == "cpu"
    counts["cuda"] = 1
    assert devices.detect_device() == "cuda"
    counts["hpu"] = 8
    assert devices.detect_device() == "hpu"
    assert devices.detect_device(allow_hpu=False) == "cuda"
