"""Gaudi as a device: its software, its graphs, its variables and counts.

Sources: the vendor's page "Run Inference Using HPU Graphs", by which several cards need
PT_HPU_ENABLE_LAZY_COLLECTIVES; habana_frameworks.torch.distributed.hccl, which reads the variable once, when it is
imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.runtime import hpu_driver
from megatron.runtime.device import Chip, Device, MemoryUse

NO_PLUGIN = (
    "habana_frameworks.torch is not installed; it comes with the image or the installer of the Gaudi software, never "
    "by pip from the public index (docs/start/gaudi.md)"
)
LAZY_MODE = "PT_HPU_LAZY_MODE"
LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
ON = ("1", "true")
"""Values that switch the bridge's lazy collectives on, in any case."""
RECIPES_MB = 16384
"""Largest size of a host's compiled graphs; Habana's default of 1024 is less than a large model's."""
GB = 2**30  # as in megatron/runtime/accelerator.py
PEAKS = (
    (r"\bGAUDI3\b", 1835.0),  # Intel Gaudi 3 whitepaper, matrix engines, OAM
    (r"\bGAUDI2\b", 432.0),  # Intel Gaudi 3 whitepaper, comparison with Gaudi 2
)


# ---------------------------------------------------------------------------------------------------------------------
# Presence


def has_gaudi_plugin() -> bool:
    """Return whether Habana's software for torch is installed, without importing it."""
    try:
        return importlib.util.find_spec("habana_frameworks.torch") is not None
    # find_spec imports the parent, habana_frameworks, which may not be there
    except ModuleNotFoundError:
        return False


def count_devices() -> int:
    """Return the number of Gaudis of this machine that this process may use."""
    if hpu_driver.VISIBLE in os.environ:
        names = [name.strip() for name in os.environ[hpu_driver.VISIBLE].split(",")]
        return len(set(names) - {""})
    # newer drivers; older ones have /dev/hl0, /dev/hl1, ...
    accelerators = [path for path in Path("/dev/accel").glob("accel[0-9]*") if path.name[5:].isdecimal()]
    return len(accelerators) or len([path for path in Path("/dev").glob("hl[0-9]*") if path.name[2:].isdecimal()])


def _missing() -> str:
    # habana_frameworks alone proves nothing: packages of media pipelines install that namespace too
    try:
        hpu = importlib.import_module("habana_frameworks.torch.hpu")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("habana_frameworks"):
            return f"habana_frameworks.torch does not load: {error}"
        return NO_PLUGIN
    # it asserts that torch's release is the one it is built for, and in lazy mode that torch is Habana's build; of a
    # version without a local part, as that of a stock torch, it reads an attribute that is not there
    except (ImportError, OSError, AssertionError, AttributeError) as error:
        return (
            f"habana_frameworks.torch {_plugin_version()} does not load beside torch {metadata.version('torch')}: "
            f"{error}; its release is built for one release of torch, and lazy mode needs Habana's build of it "
            "(docs/start/gaudi.md)"
        )
    if not hpu.is_available() or hpu.device_count() == 0:
        return "habana_frameworks sees no Gaudi; hl-smi shows which are there and who holds them"
    return ""


def _missing_software() -> str:
    return NO_PLUGIN if count_devices() and not has_gaudi_plugin() else ""


def _plugin_version() -> str:
    try:
        return metadata.version("habana-torch-plugin")
    except metadata.PackageNotFoundError:  # built from source
        return "unknown"


# ---------------------------------------------------------------------------------------------------------------------
# Variables of its software


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of the Gaudi software for this process unless they are set. No effect without the software."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if not missing or not has_gaudi_plugin():
        return
    # it reads most of its variables once, when it is loaded
    if "habana_frameworks.torch" in sys.modules:
        logging.getLogger(__name__).warning(
            "habana_frameworks.torch was loaded before this run could set %s, and may not read it; import it later, or "
            "set the variable where you launch",
            " and ".join(f"{name}={value}" for name, value in missing.items()),
        )
    os.environ.update(missing)


def _keep_compiled_graphs(results_dir: str) -> None:
    """Keep them in one folder a host: ranks of several hosts would lock files over the network."""
    if not has_gaudi_plugin():
        return
    variable = "PT_HPU_RECIPE_CACHE_CONFIG"
    folder = Path(results_dir).resolve() / "hpu_recipes" / socket.gethostname()
    # the variable's value has no form of quoting
    if "," in str(folder) and variable not in os.environ:
        logging.getLogger(__name__).warning(
            "compiled graphs are not kept for a restart: a comma separates the values of %s, and %s has one; "
            "choose another results_dir",
            *(variable, folder),
        )
        return
    # path, empty it at the start, largest size in MB; source: RecipeCacheConfig of HabanaAI/gaudi-pytorch-bridge
    set_variables({variable: f"{folder},false,{RECIPES_MB}", "PT_HPU_ENABLE_CACHE_METRICS": "1"})


def _graph_variables(tensor_size: int) -> dict[str, str]:
    return {LAZY_COLLECTIVES: "true"} if tensor_size > 1 else {}


def _graph_faults(option: str, lazy: bool | None, tensor_size: int, environment: Mapping[str, str]) -> Iterator[str]:
    if lazy is False:
        yield f"{option} on HPU needs lazy mode; set {LAZY_MODE}=1 (HL_USE_LAZY_MODE=1), or leave {option} out"
    elif tensor_size > 1:
        # not set: the launcher and the rank will set it
        value = environment.get(LAZY_COLLECTIVES, ON[0])
        if value.lower() not in ON:
            yield (
                f"{LAZY_COLLECTIVES}={value} keeps collectives out of HPU graphs, and {option} with "
                f"tensor_model_parallel_size={tensor_size} has some in them; unset it, or leave {option} out"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Its state


def _memory() -> MemoryUse:
    stats = _hpu().memory_stats()
    return MemoryUse(stats["InUse"], stats["MaxInUse"], stats["Limit"])


def _memory_counts() -> dict[str, float]:
    counted, defragmentations = _hpu().memory_stats(), _metric("memory_defragmentation")
    # Habana documents neither reserved memory nor retries among them
    return {
        "max_alloc_size (GB)": counted["MaxAllocSize"] / GB,
        "num_active_allocs": float(counted["ActiveAllocs"]),
        "num_allocs": float(counted["NumAllocs"]),
        "num_defragmentations": float(defragmentations["TotalNumber"]),
        "num_failed_defragmentations": float(defragmentations["TotalNumber"] - defragmentations["TotalSuccessful"]),
    }


def _health() -> dict[str, float]:
    return hpu_driver.read_health(compiled_graphs(), recipe_cache())


def _health_warning() -> str | None:
    return hpu_driver.driver_warning(_plugin_version())


def _software() -> dict[str, str]:
    return {"device": _hpu().get_device_name(), "habana-torch-plugin": _plugin_version()}


def is_lazy() -> bool:
    """Return whether this process records operators. Imports the Gaudi software."""
    # its default has changed between releases of habana_frameworks; only it knows
    return bool(importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy())


def _mark_step() -> None:
    importlib.import_module("habana_frameworks.torch.core").mark_step()


def compiled_graphs() -> int:
    """Return the number of graphs compiled in this process."""
    return int(_metric("graph_compilation")["TotalNumber"])


def recipe_cache() -> tuple[float, float] | None:
    """Return how often a compiled graph was in the cache and how often not; None where that is not counted."""
    metric = importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_global("recipe_cache")
    counts = {} if metric is None else dict(metric.stats())  # none without PT_HPU_ENABLE_CACHE_METRICS
    return (float(counts["TotalHit"]), float(counts["TotalMiss"])) if counts else None


def _cpu_fallbacks() -> dict[str, int]:
    return dict(_metric("cpu_fallback")["FallbackOps"])


def _metric(name: str) -> dict[str, Any]:
    return dict(importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_global(name).stats())


def _hpu() -> Any:
    return importlib.import_module("habana_frameworks.torch.hpu")


def _adamw() -> Any:
    return importlib.import_module("habana_frameworks.torch.hpex.optimizers").FusedAdamW


HPU = Device(
    name="hpu",
    accelerator="hpu",
    torch_type="hpu",
    collectives="hccl",
    missing=_missing,
    missing_software=_missing_software,
    is_detected=lambda: count_devices() > 0 and has_gaudi_plugin(),
    count=lambda: count_devices(),
    visible_variable=hpu_driver.VISIBLE,
    driver_tool="hl-smi",
    driver_query=hpu_driver.hl_smi,
    check_ranks=hpu_driver.check_modules,
    warn_of_ranks=hpu_driver.warn_of_modules,
    # the driver's own figures, below the round ones of the data sheets (96 and 128 GB)
    chips=(Chip("gaudi2", "Gaudi 2", 94.6), Chip("gaudi3", "Gaudi 3", 126.5)),
    memory=_memory,
    memory_counts=_memory_counts,
    health=_health,
    health_warning=_health_warning,
    chip_name=lambda: str(_hpu().get_device_name()),
    peaks=PEAKS,
    software=_software,
    has_lazy_mode=True,
    is_lazy=is_lazy,
    mark_step=_mark_step,
    compiles_shapes=True,
    static_experts=True,
    compiled_graphs=compiled_graphs,
    cpu_fallbacks=_cpu_fallbacks,
    compiles_layers=True,
    graphs="HPU",
    replays_evaluations=True,
    graph_faults=_graph_faults,
    graph_variables=_graph_variables,
    set_variables=set_variables,
    keep_compiled_graphs=_keep_compiled_graphs,
    attention=frozenset({"sdpa", "fused_hpu"}),
    sdpa_groups="never",
    stores_scores=True,
    pointwise="habana",
    fp8_recipes=("delayed",),
    # float64 never, int64 in lazy mode if PT_ENABLE_INT64_SUPPORT=1: scripts/env_flags.yaml of the bridge
    has_64_bits=False,
    adamw=_adamw,
)
