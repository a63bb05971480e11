"""Devices by their records: those of the package, one from outside that trains through the launcher, unknown ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime import devices
from megatron.runtime.device import DeviceError
from megatron.runtime.device_cpu import CPU
from megatron.runtime.device_cuda import CUDA
from megatron.runtime.device_hpu import HPU
from megatron.weights.model import config_of_source
from tests import runs
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import os
from pathlib import Path

from megatron.runtime.device import Device, MemoryUse


def missing() -> str:
    """Called by each rank that chooses this device, and by nobody else."""
    Path(f"asked_{os.environ['RANK']}").write_text(os.environ["MEGATRON_DEVICE"])
    return ""


BENCH = Device(
    name="bench",
    accelerator="cpu",
    torch_type="cpu",
    collectives="gloo",
    missing=missing,
    is_host=True,
    waits_are_costly=False,
    pointwise="eager",
    memory=lambda: MemoryUse(3 * 2**30, 5 * 2**30, 7 * 2**30),
    chip_name=lambda: "BENCH 2",
    peaks=(("BENCH", 0.001),),
    software=lambda: {"device": "BENCH 2"},
)
ABSENT = Device(
    name="absent", accelerator="cpu", torch_type="cpu", collectives="gloo", missing=lambda: "its cable is out"
)
OTHER = 1


def wrong(accelerator="cpu", torch_type="cpu", collectives="gloo"):
    return Device(name="wrong", accelerator=accelerator, torch_type=torch_type, collectives=collectives, missing=str)


NO_ACCELERATOR = wrong(accelerator="abacus")
NO_TYPE = wrong(torch_type="abacus")
OTHER_TYPE = wrong(torch_type="cuda")
NO_COLLECTIVES = wrong(collectives="pigeons")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with records of devices and a dataset."""
    (tmp_path / "outside.py").write_text(MODULE)
    runs.write_dataset(tmp_path / "text")
    return tmp_path


def launched(folder: Path, device: str, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Train so many ranks for two steps through the launcher, with the device that is given."""
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    environment |= {"PYTHONPATH": f"{folder}:{ROOT}"}
    flags = [*runs.TINY.split(), "--data-path", "text", "--train-iters", "2", "--results-dir", "out"]
    command = [sys.executable, "-m", "megatron.cli.launch", "--devices-per-node", str(num_ranks), "--", *flags]
    return subprocess.run(
        [*command, "--device", device], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
    )


def test_a_device_from_outside_the_package_trains_on_every_rank(folder: Path) -> None:
    done = launched(folder, "outside:BENCH", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(folder / f"asked_{rank}").read_text() for rank in range(2)] == ["outside:BENCH"] * 2
    rows = runs.rows(folder / "out")
    assert len(rows) == 2
    # what the CPU's record could not have answered
    assert all(row["total_memory_available (GB)"] == 7 for row in rows)
    assert all(row["mfu"] > 0 for row in rows)
    record = json.loads((folder / "out" / "run.json").read_text())
    assert "BENCH 2" in json.dumps(record)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "parallel.device='tpu': must be auto, hpu, cuda, cpu, or your own as package.module:RECORD"),
        pytest.param(
            "outside:NONE",
            "parallel.device='outside:NONE': cannot be loaded: AttributeError: module 'outside' has no",
            marks=pytest.mark.slow,
        ),
        ("outside:OTHER", "parallel.device='outside:OTHER': is a int; give a megatron.runtime.device.Device"),
        ("outside:ABSENT", "device outside:ABSENT is not there: its cable is out"),
        pytest.param(
            "outside:NO_ACCELERATOR",
            "device outside:NO_ACCELERATOR: its accelerator='abacus' cannot be had: DS_ACCEL",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "outside:NO_TYPE",
            "device outside:NO_TYPE: its torch_type='abacus' is not that of its tensors, which is cpu",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "outside:OTHER_TYPE",
            "its torch_type='cuda' is not that of its tensors, which is cpu; correct the record",
            marks=pytest.mark.slow,
        ),
        (
            "outside:NO_COLLECTIVES",
            "its collectives='pigeons' is not a backend of this torch.distributed; use gloo, or",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_by_name(folder: Path, device: str, said: str) -> None:
    done = launched(folder, device, 1)
    assert done.returncode != 0
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stdout + done.stderr
    assert not (folder / "asked_0").exists()


def test_a_process_answers_by_the_record_that_was_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    devices._imported.cache_clear()
    variables = devices.rank_variables("outside:BENCH")
    assert variables == {"DS_ACCELERATOR": "cpu", "MEGATRON_DEVICE": "outside:BENCH"}
    assert devices.rank_variables("cuda") == {"DS_ACCELERATOR": "cuda"}
    assert devices.rank_variables("auto") == {}
    assert devices.device_of("cpu") is CPU
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bench = devices.find_device("outside:BENCH")
    assert bench is not CPU
    assert devices.device_of("cpu") is bench
    assert devices.device_of_accelerator("cpu") is bench
    assert devices.launched_device() is bench
    assert devices.name_of(bench) == "outside:BENCH"
    assert devices.device_of("cuda") is CUDA
    monkeypatch.setenv("DS_ACCELERATOR", "hpu")  # chosen since, by DeepSpeed's own name
    assert devices.launched_device() is HPU


def test_the_weights_of_a_device_that_is_not_here_are_read(tmp_path: Path) -> None:
    for device, expected in (("gone:RECORD", "auto"), ("hpu", "hpu")):
        stored = {"parallel": {"device": device, "tensor_model_parallel_size": 2}}
        source: Any = SimpleNamespace(config=None, metadata={"config": stored}, folder=tmp_path)
        parallel = config_of_source(source).parallel
        assert (parallel.device, parallel.tensor_model_parallel_size) == (expected, 2)


def test_devices_of_the_package_have_different_names() -> None:
    assert [devices.find_device(device.name) for device in devices.DEVICES] == list(devices.DEVICES)
    assert devices.planned_device("auto") is CUDA
    assert not devices.device_of("meta").is_host
    with pytest.raises(DeviceError, match="must be auto, hpu, cuda, cpu"):
        devices.find_device("auto")
