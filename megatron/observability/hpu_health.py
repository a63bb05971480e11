"""Health of a rank's Gaudi: use, temperature and power by the driver's library, and its compiled graphs.

Source: habana-pyhlml 1.24.2 (main.py). Its indices count all Gaudis of the node, unlike torch's: a rank's own is found
by its module.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from megatron.runtime import accelerator

UTILISATION = "utilisation (%)"
TEMPERATURE = "temperature (C)"
POWER = "power (W)"
GRAPHS = "num_compiled_graphs"
CACHE_HITS, CACHE_MISSES = "num_recipe_cache_hits", "num_recipe_cache_misses"


def read_health() -> dict[str, float]:
    """Return this rank's numbers, always under the same keys. NaN: not known here. Does not wait for the device."""
    hits, misses = accelerator.recipe_cache() or (math.nan, math.nan)
    graphs = accelerator.recompile_count()
    return {
        **_readings(),
        GRAPHS: math.nan if graphs is None else float(graphs),
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
            continue
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
    return (hlml, own[0]) if own else None


def driver_warning() -> str | None:
    """Return a warning if this host's driver is of another release than habana_frameworks; None where one is unknown.

    The vendor publishes both as one release.
    """
    opened, plugin = _open(module_id(os.environ)), accelerator.software().get("habana-torch-plugin", "")
    if opened is None:
        return None
    try:
        driver = opened[0].hlmlGetDriverVersion().decode()
    except Exception:  # as above
        return None
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
    modules = [name.strip() for name in environment.get("HABANA_VISIBLE_MODULES", "").split(",") if name.strip()]
    return int(modules[local_rank]) if local_rank < len(modules) else local_rank
