"""Devices of this machine, without torch: by their files, the tools of their drivers, and the packages installed."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# variables that restrict the devices of a process and its children
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}

NO_PLUGIN = (
    "habana_frameworks.torch is not installed; it comes with the image or the installer of the Gaudi software, never "
    "by pip from the public index (docs/start/gaudi.md)"
)
PRODUCTS = {
    "bf16": {"avx512_bf16", "amx_bf16", "avx_ne_convert"},
    "fp16": {"avx512_fp16", "amx_fp16", "avx_ne_convert"},
}
"""Processor flags of Linux, one of which oneDNN needs for products of a precision; with AVX-512 alone it has those of
bf16 too, which take six times as long as float32's. Source: oneDNN's page on CPU dispatcher control."""
MAX_CPU_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN's limit of its instructions, with which another processor can be simulated."""
WIDENED = "this CPU has no {} products; they are computed in float32"
LIMITS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
WITHOUT_PRODUCTS = {limit: {"bf16", "fp16"} for limit in LIMITS_WITHOUT_BF16} | {"AVX512_CORE_BF16": {"fp16"}}
"""Those that a limit takes away."""
BLOCKWISE_LENGTHS = range(256, 1025)
"""Tokens that megatron/models/blockwise_attention.py is faster for. Measured at powers of two: at 128 in float32, and
at 2,048, torch's kernel takes no more time."""
SEEN_BY = {"cuda": "nvidia-smi", "hpu": "hl-smi"}
"""Command that lists the devices of a kind."""


def detect_device(*, allow_hpu: bool = True) -> str:
    """Return the first available one of hpu, cuda and cpu by device files and installed packages, without torch."""
    if allow_hpu and count_devices("hpu") and has_gaudi_plugin():
        return "hpu"
    return "cuda" if count_devices("cuda") and _torch_has_cuda() else "cpu"


def has_gaudi_plugin() -> bool:
    try:
        return importlib.util.find_spec("habana_frameworks.torch") is not None
    except ModuleNotFoundError:
        return False


def count_devices(device: str) -> int:
    """Return the number of accelerators of a kind that are visible on this machine."""
    if VISIBLE[device] in os.environ:
        names = [name.strip() for name in os.environ[VISIBLE[device]].split(",")]
        if device == "hpu":
            return len(set(names) - {""})
        # CUDA ends the list at the first name of no device, and takes a repeated one for an error
        names = list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))
        return len(names) if len(set(names)) == len(names) else 0
    if device == "cuda":
        nvidia = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]
        return len(nvidia) or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")))
    accelerators = [path for path in Path("/dev/accel").glob("accel[0-9]*") if path.name[5:].isdecimal()]
    return len(accelerators) or len([path for path in Path("/dev").glob("hl[0-9]*") if path.name[2:].isdecimal()])


def query_devices(device: str, *fields: str, timeout_s: float = 20.0) -> list[list[str]]:
    """Return these fields of each device of a kind on this machine, by its driver's tool; [] where that fails."""
    asked = ",".join(fields)
    if device == "hpu":  # as Habana's own scripts write it, and its page on hl-smi lists it
        query = ["hl-smi", "-Q", asked, "-f", "csv,noheader,nounits"]
    else:
        query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]) is None:
        return []
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]
    return rows if all(len(row) == len(fields) for row in rows) else []


def defer_backends() -> None:
    """Keep torch from loading backends of devices when it is imported; `choose_device` loads the one of the device.

    For a rank, before anything imports torch: in eager mode the Gaudi software registers to be loaded by that import
    (the entry point `torch.backends`). It then chooses the rank's module, and reads its variables, once: the rank
    must know its place by then, and `set_backend_variables` must have set them.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def set_backend_variables(variables: Mapping[str, str]) -> None:
    """Set variables of the Gaudi software for this process unless they are set. No effect without the software."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if not missing or not has_gaudi_plugin():
        return
    if "habana_frameworks.torch" in sys.modules:
        logging.getLogger(__name__).warning(
            "habana_frameworks.torch was loaded before this run could set %s, and may not read it; import it later, or "
            "set the variable where you launch",
            " and ".join(f"{name}={value}" for name, value in missing.items()),
        )
    os.environ.update(missing)


def device_memory_bytes(device: str) -> int | None:
    """Return the memory of this machine's smallest device of a kind, from its driver's tool; None where that fails."""
    try:
        rows = [] if device == "cpu" else query_devices(device, "memory.total", timeout_s=5.0)
        return min(int(size) for (size,) in rows) * 2**20
    except ValueError:  # a plan without a verdict is better than none
        return None


def missing_products() -> frozenset[str]:
    """Return those of bf16 and fp16 whose products this CPU certainly has no instruction for; read without torch."""
    limit = next((os.environ[name].upper() for name in MAX_CPU_ISA if name in os.environ), "")
    missing = frozenset(WITHOUT_PRODUCTS.get(limit, ()))
    flags = _cpu_flags()
    if not flags:  # another architecture
        return missing
    return missing | {precision for precision, instructions in PRODUCTS.items() if not flags & instructions}


def attends_blockwise(precision: str) -> bool:
    """Return True if this CPU computes attention faster from matrix products than in torch's flash kernel.

    Measured with AVX-512 and its bfloat16 products. With AMX torch's kernel uses that. Read without torch.
    """
    flags = _cpu_flags()
    if precision == "fp32":
        is_limited = os.environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"
        return not is_limited and flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    has_products = "avx512_bf16" in flags and "amx_tile" not in flags and "bf16" not in missing_products()
    return precision == "bf16" and has_products


def _cpu_flags() -> frozenset[str]:
    """Return what Linux says that this processor can do; nothing where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(" ".join(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)).split())


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds, does not import
    if spec is None or spec.origin is None:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of graphs of a device (CUDA graphs, HPU graphs), known before torch and the device's software are loaded.
#
# Sources: the vendor's page "Run Inference Using HPU Graphs", by which several cards need
# PT_HPU_ENABLE_LAZY_COLLECTIVES; habana_frameworks.torch.distributed.hccl, which reads the variable once, when it is
# imported.

DEVICES = ("cuda", "hpu")
"""Devices with graphs."""
LAZY_MODE = "PT_HPU_LAZY_MODE"
LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
ON = ("1", "true")
"""Values that switch the bridge's lazy collectives on, in any case."""


def graph_faults(
    option: str, device: str, *, lazy: bool | None, tensor_size: int, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield what keeps a device from running graphs; nothing for a device that is not chosen yet (`auto`).

    `lazy`: the HPU is in lazy mode; None: it will be. `tensor_size`: ranks whose collectives are part of a graph.
    """
    if device == "auto":
        return
    if device not in DEVICES:
        yield f"{option} is for {' and '.join(DEVICES)} devices, not {device}; leave it out"
    elif device == "hpu" and lazy is False:
        yield f"{option} on HPU needs lazy mode; set {LAZY_MODE}=1 (HL_USE_LAZY_MODE=1), or leave {option} out"
    elif device == "hpu" and tensor_size > 1:
        value = environment.get(LAZY_COLLECTIVES, ON[0])
        if value.lower() not in ON:
            yield (
                f"{LAZY_COLLECTIVES}={value} keeps collectives out of HPU graphs, and {option} with "
                f"tensor_model_parallel_size={tensor_size} has some in them; unset it, or leave {option} out"
            )


def graph_variables(device: str, tensor_size: int) -> dict[str, str]:
    """Return the variables of the Gaudi software with which an HPU's graphs may hold collectives; {} elsewhere."""
    return {LAZY_COLLECTIVES: "true"} if device in ("hpu", "auto") and tensor_size > 1 else {}


def set_graph_variables(device: str, tensor_size: int, *, lazy: bool = False) -> None:
    """Set `graph_variables` for this process unless they are set; with `lazy` lazy mode too.

    No effect without the Gaudi software. Call it before `choose_device`, which loads what reads them.
    """
    if device in ("hpu", "auto"):
        set_backend_variables(graph_variables(device, tensor_size) | ({LAZY_MODE: "1"} if lazy else {}))


# ---------------------------------------------------------------------------------------------------------------------
# Memory of known devices, for the plan.

GIB = 2**30


class KnownDevice(NamedTuple):
    """A device by its name in `device_memory`."""

    title: str
    kind: str
    """hpu or cuda."""
    memory_gib: float
    """Memory that its driver gives to programs."""


# the drivers' own figures, below the round ones of the data sheets (96 and 128 GB; 80, 80 and 141 GB)
KNOWN_DEVICES = {
    "gaudi2": KnownDevice("Gaudi 2", "hpu", 94.6),
    "gaudi3": KnownDevice("Gaudi 3", "hpu", 126.5),
    "a100": KnownDevice("A100 80 GB", "cuda", 79.2),
    "h100": KnownDevice("H100 80 GB", "cuda", 79.2),
    "h200": KnownDevice("H200", "cuda", 139.8),
}


def known_device(text: str | None) -> KnownDevice | None:
    """Return the device of this name, in any case."""
    return KNOWN_DEVICES.get((text or "").lower())


def parse_memory_gib(text: str) -> float | None:
    """Return the GiB of a device's name or of a number; None if it is neither."""
    if (device := known_device(text)) is not None:
        return device.memory_gib
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None
