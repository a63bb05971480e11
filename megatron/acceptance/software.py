"""Versions of the Gaudi software that belong together, and those installed. Imports neither torch nor deepspeed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from megatron.acceptance.report import Check, Group
from megatron.devices import count_devices, query_devices


@dataclass(frozen=True)
class Release:
    """A release of the Gaudi software, and what its image for PyTorch holds."""

    software: str
    torch: str
    python: str | None = None
    """None: no published recipe says it."""


# from the vendor's published recipes: vllm-gaudi, optimum-habana, Megatron-LM
RELEASES = (
    Release("1.24.1", "2.11.0", "3.12"),
    Release("1.24.0", "2.10.0", "3.12"),
    Release("1.23.0", "2.9.0"),
    Release("1.22.0", "2.7.1"),
    Release("1.21.0", "2.6.0"),
)
PACKAGES = ("habana-torch-plugin", "torch", "deepspeed", "habana-pyhlml", "transformers", "numpy")
REPORTED = ("PT_HPU_", "PT_ENABLE_", "HABANA_VISIBLE_", "HCCL_", "HL_FP8_", "DEEPSPEED_HPU_")
"""Beginnings of the variables that a report holds."""


def installed(package: str) -> str:
    """Return the version of a distribution, 'none' if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def release_of(version: str) -> Release | None:
    """Return the release that 1.24.1.482, say, is a build of; None for one that is not in the table.

    1.24.2 and later patches, which no published recipe names, count as the newest of their minor release.
    """
    numbers = version.split(".")[:3]
    exact = next((release for release in RELEASES if release.software == ".".join(numbers)), None)
    return exact or next((r for r in RELEASES if r.software.split(".")[:2] == numbers[:2]), None)


def cards() -> list[tuple[str, str, str]]:
    """Return (name, driver, memory in MiB) of each card, by the vendor's hl-smi; [] where that fails."""
    rows = query_devices("hpu", "name", "driver_version", "memory.total", timeout_s=30.0)
    return [(name, driver, memory) for name, driver, memory in rows]


def check_software(devices: int) -> Group:
    """Return the versions found here, and whether they belong together; `devices`: cards of the test."""
    group = Group("software")
    found = cards()
    group.facts = {
        "cards": f"{devices} of {count_devices('hpu')}",
        "card": ", ".join(sorted({name for name, _, _ in found})) or "unknown (no hl-smi)",
        "driver": ", ".join(sorted({driver for _, driver, _ in found})) or "unknown (no hl-smi)",
        "memory, MiB": ", ".join(sorted({memory for _, _, memory in found})) or "unknown (no hl-smi)",
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
        "Linux": platform.release(),
    }
    group.variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(REPORTED)}
    plugin, torch = (group.facts[name] for name in PACKAGES[:2])
    release = release_of(plugin)
    detail = "" if release else f"docs/start/gaudi.md lists no release of habana-torch-plugin {plugin}"
    if release and torch.split("+")[0].split("a")[0] != release.torch:
        detail = f"Gaudi software {release.software} has torch {release.torch}, and torch {torch} is installed"
    group.checks.append(Check("torch is the one of the Gaudi software (0: yes)", float(bool(detail)), 0.0, detail))
    drivers = {".".join(driver.split("-")[0].split(".")[:2]) for _, driver, _ in found}
    if drivers:
        minor = ".".join(plugin.split(".")[:2])
        detail = "" if drivers == {minor} else f"driver {group.facts['driver']}, habana-torch-plugin {plugin}"
        group.checks.append(Check("driver and plugin are of one release (0: yes)", float(bool(detail)), 0.0, detail))
    return group
