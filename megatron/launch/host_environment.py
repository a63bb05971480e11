"""Variables that agents on other hosts get: ssh passes on nothing of the environment that a run is launched from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.devices import VISIBLE, count_devices

PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "DEEPSPEED_HPU_",
    "FI_",
    "GLOO_",
    "HABANA_",
    "HCCL_",
    "NCCL_",
    "PT_",
    "TORCH_",
    "TORCHINDUCTOR_",
)
"""Settings of communication libraries and devices."""
NAMES = ("ENABLE_CONSOLE", "GC_KERNEL_PATH", "LD_LIBRARY_PATH", "LOG_LEVEL_ALL", "MEGATRON_VERBOSE")


def sent_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on the hosts. What .deepspeed_env sets too is left to it."""
    theirs = {line.partition("=")[0] for _, _, line in deepspeed_env_lines()}
    return {
        name: value
        for name, value in environment.items()
        if value and name not in theirs and (name in NAMES or name.startswith(PREFIXES))
    }


def deepspeed_env_lines() -> Iterator[tuple[Path, int, str]]:
    """Yield path, number and text of each line of the .deepspeed_env files, which DeepSpeed's launcher sends."""
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from ((path, number, line) for number, line in enumerate(text.splitlines(), start=1))


def deepspeed_env() -> dict[str, str]:
    """Return the variables of the .deepspeed_env files."""
    return {name: value for _, _, line in deepspeed_env_lines() for name, _, value in [line.partition("=")]}


def check_variables(device: str, devices_per_node: int, launcher: str = "pdsh") -> Iterator[str]:
    """Yield the variables that cannot be sent, or that leave a host too few devices."""
    for name, value in sent_variables(os.environ).items():
        if launcher == "pdsh" and ("%" in value or "\n" in value):
            yield (
                f"{name}={value!r} holds a % or a line end, which pdsh would change on its way to the hosts; write it "
                "without, or unset it"
            )
    visible = VISIBLE.get(device, "")
    if os.environ.get(visible) and (left := count_devices(device)) < devices_per_node:
        yield (
            f"{visible}={os.environ[visible]} is sent to all hosts and leaves {left} of the {devices_per_node} devices "
            "that each needs; list more, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
        )
