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
from collections.abc import Mapping
from pathlib import Path

# variables that restrict the devices of a process and its children
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}

NO_PLUGIN = (
    "habana_frameworks.torch is not installed; it comes with the image or the installer of the Gaudi software, never "
    "by pip from the public index (docs/gaudi.md)"
)
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


def cpu_lacks_float16() -> bool:
    """Return True if this CPU certainly has no float16 arithmetic for torch; read without torch.

    Source: oneDNN's instruction sets avx512_core_fp16, avx10_1_512_amx_fp16 and avx2_vnni_2.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = set(" ".join(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)).split())
    return bool(flags) and not flags & {"avx512_fp16", "amx_fp16", "avx_ne_convert"}


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds, does not import
    if spec is None or spec.origin is None:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))
