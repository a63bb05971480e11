"""Facts that the driver of Gaudi gives of a node: the modules that a run is to use, and the health of a rank's own.

Rank i of a node takes the i-th module of HABANA_VISIBLE_MODULES, without it module i. hl-smi lists the modules; one is
in use if a process holds its device file, or if some of its memory is used, as by a process of another container.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.runtime.device import query_driver

PROC = Path("/proc")
VISIBLE = "HABANA_VISIBLE_MODULES"
DEVICE_FILE = re.compile(r"/dev/(accel/accel|hl)(?P<index>[0-9]+)")
"""A module's device file: the name depends on the driver's release."""
# An idle module reports less than 1 % of its memory as used, which the driver keeps for itself.
IDLE_SHARE = 0.05


@dataclass(frozen=True)
class GaudiModule:
    """A Gaudi of this machine."""

    number: int
    holders: tuple[int, ...]
    """Ids of the processes that hold its device file, of those that this user may see."""
    memory_share: float
    """Part of its memory that is used."""

    @property
    def use(self) -> str:
        """Sign of its use; empty: nothing uses it."""
        if self.holders:
            return f"held by process {', '.join(map(str, self.holders))}"
        if self.memory_share > IDLE_SHARE:
            return f"{self.memory_share:.0%} of its memory is used"
        return ""


def modules() -> list[GaudiModule]:
    """Return the modules of this machine in order; none where hl-smi does not list them."""
    try:
        listed = query_driver(hl_smi("index,module_id,memory.used,memory.total"))
        holders = _holders()
        found = []
        for row in listed:
            # index: of the device file; module: its place on the node's board, by which ranks choose
            index, number, used, total = map(float, row)
            share = used / total if total else 0.0
            found.append(GaudiModule(int(number), tuple(holders.get(int(index), ())), share))
    except (OSError, ValueError):  # the ranks report what they cannot open
        return []
    return sorted(found, key=lambda module: module.number)


def _holders() -> dict[int, list[int]]:
    """Return the processes that have opened each device file, by its index."""
    holders: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            for path in {os.readlink(link) for link in folder.iterdir()}:
                if (file := DEVICE_FILE.fullmatch(path)) is not None:
                    holders.setdefault(int(file["index"]), []).append(int(folder.parent.name))
    return {index: sorted(processes) for index, processes in holders.items()}


def check_modules(ranks: int) -> Iterator[str]:
    """Yield what keeps the ranks of this machine from their modules, all modules in one message."""
    own = os.environ.get("HLS_MODULE_ID")
    if own and ranks > 1:
        yield f"HLS_MODULE_ID={own} gives all {ranks} ranks of a node one module; unset it, and list them in {VISIBLE}"
        return
    source, words = _chosen_modules(ranks)
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        yield f"{source} must be numbers of modules, each once, such as 0,1,2,3; correct it"
        return
    here = {module.number: module for module in modules()}
    # without hl-smi, as in some containers: the ranks themselves report a module that is in use
    if not here:
        return
    needed = [int(word) for word in words[:ranks]]
    problems = list(_problems(needed, here))
    if not problems:
        return
    free = [str(number) for number, module in here.items() if not module.use]
    remedy = "wait, or use fewer devices a node"
    if len(free) >= ranks:
        remedy = f"set {VISIBLE} to {ranks} of them"
    yield (
        f"{source}, so {ranks} ranks need the modules {','.join(map(str, needed))}: {'; '.join(problems)}. Free: "
        f"{','.join(free) or 'none'}; {remedy}"
    )


def _problems(needed: list[int], here: Mapping[int, GaudiModule]) -> Iterator[str]:
    for number in needed:
        if number not in here:
            yield f"{number} is not on this machine"
    for number in needed:
        if number in here and here[number].use:
            yield f"{number} is in use ({here[number].use})"


def _chosen_modules(ranks: int) -> tuple[str, list[str]]:
    """Return what chooses the modules of the ranks, as messages name it, and their numbers as they are written."""
    if given := os.environ.get(VISIBLE):
        return f"{VISIBLE}={given}", [word.strip() for word in given.split(",")]
    if own := os.environ.get("HLS_MODULE_ID"):
        return f"HLS_MODULE_ID={own}", [own]
    return f"{VISIBLE} is not set", [str(number) for number in range(ranks)]


def warn_of_modules(ranks: int) -> Iterator[str]:
    """Yield a list of modules that Habana does not support, and one that restricts nothing."""
    given = os.environ.get(VISIBLE, "")
    words = [word.strip() for word in given.split(",") if word.strip()][:ranks]
    if given and 1 < ranks < 8 and all(word.isdecimal() for word in words):
        numbers = sorted(map(int, words))
        first = min(numbers, default=0)
        is_neighbours = numbers == [*range(first, first + ranks)]
        if ranks not in (2, 4) or first % ranks or not is_neighbours:
            yield (
                f"{VISIBLE}={given}: Habana supports parts of a node of 1, 2 or 4 modules, and of several only 0,1 2,3 "
                "4,5 6,7 0,1,2,3 or 4,5,6,7"
            )
    devices = os.environ.get("HABANA_VISIBLE_DEVICES", "all")
    if devices not in ("", "all", "none") and not given and 0 < devices.count(",") + 1 < len(modules()):
        yield (
            f"HABANA_VISIBLE_DEVICES={devices} chooses the devices of a container when it is made, and restricts no "
            f"process; set {VISIBLE}"
        )


def hl_smi(fields: str) -> list[str]:
    """Return the command that prints fields of each module, as Habana's own scripts write it."""
    return ["hl-smi", "-Q", fields, "-f", "csv,noheader,nounits"]


# ---------------------------------------------------------------------------------------------------------------------
# Use, temperature and power by the driver's library. Source: habana-pyhlml 1.24.2 (main.py). Its indices count all
# Gaudis of the node, unlike torch's: a rank's own is found by its module.

UTILISATION = "utilisation (%)"
TEMPERATURE = "temperature (C)"
POWER = "power (W)"
GRAPHS = "num_compiled_graphs"
CACHE_HITS, CACHE_MISSES = "num_recipe_cache_hits", "num_recipe_cache_misses"


def read_health(compiled_graphs: int, recipe_cache: tuple[float, float] | None) -> dict[str, float]:
    """Return this rank's numbers, always under the same keys. NaN: not known here. Does not wait for the device."""
    hits, misses = recipe_cache or (math.nan, math.nan)
    return {
        **_readings(),
        GRAPHS: float(compiled_graphs),
        CACHE_HITS: hits,
        CACHE_MISSES: misses,
    }


def _readings() -> dict[str, float]:
    found = dict.fromkeys((UTILISATION, TEMPERATURE, POWER), math.nan)
    opened = _open(module_id(os.environ))
    if opened is None:
        return found
    hlml, device = opened
    readers = {
        UTILISATION: lambda: hlml.hlmlDeviceGetUtilizationRates(device).aip,
        TEMPERATURE: lambda: hlml.hlmlDeviceGetTemperature(device, 0),  # HLML_TEMPERATURE_ON_AIP
        POWER: lambda: hlml.hlmlDeviceGetPowerUsage(device) / 1000,
    }
    for key, read in readers.items():
        try:
            found[key] = float(read())
        # its errors are classes that it makes when it is loaded
        except Exception:
            continue  # a number that this device does not give stays NaN
    return found


@functools.cache
def _open(module: int) -> tuple[Any, Any] | None:
    """Return pyhlml and this rank's device in it; None without the package, the driver's library or the device."""
    try:
        hlml = importlib.import_module("pyhlml")
        hlml.hlmlInit()
        devices = [hlml.hlmlDeviceGetHandleByIndex(index) for index in range(hlml.hlmlDeviceGetCount())]
        own = [device for device in devices if hlml.hlmlDeviceGetModuleID(device) == module]
    except Exception:
        return None
    if not own:
        return None
    return hlml, own[0]


def driver_warning(plugin: str) -> str | None:
    """Return a warning if this host's driver is of another release than habana_frameworks; None where one is unknown.

    `plugin`: the release of habana_frameworks. The vendor publishes both as one release.
    """
    opened = _open(module_id(os.environ))
    if opened is None:
        return None
    try:
        driver = opened[0].hlmlGetDriverVersion().decode()
    except Exception:  # as above
        return None
    # major and minor: builds of one release differ behind these
    releases = [re.match(r"\d+\.\d+", version) for version in (driver, plugin)]
    if None in releases or len({found.group() for found in releases if found}) == 1:
        return None
    return (
        f"the driver is of release {driver}, habana-torch-plugin of {plugin}; they belong together: "
        "install the driver of the plugin's release, or the image of the driver's"
    )


def module_id(environment: Mapping[str, str]) -> int:
    """Return the number of the Gaudi on its node that this rank uses, as habana_frameworks chooses it."""
    if given := environment.get("HLS_MODULE_ID"):
        return int(given)
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    listed = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    if local_rank < len(listed):
        return int(listed[local_rank])
    return local_rank
