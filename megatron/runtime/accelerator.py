"""Additions to DeepSpeed's accelerator: choice of device, memory under one set of keys, HPU steps, peak TFLOP/s.

torch, deepspeed and habana_frameworks are imported inside the functions: `choose_device` must be called before
deepspeed is imported, and a rejected config must not wait for any of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import re
import resource
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.runtime.devices import (
    NO_PLUGIN,
    VISIBLE,
    WIDENED,
    count_devices,
    has_gaudi_plugin,
    missing_products,
    set_backend_variables,
)
from megatron.runtime.errors import UserError

# names of Habana's Optimum, for every device; its "GB" are 2^30 bytes
ALLOCATED = "memory_allocated (GB)"
MAX_ALLOCATED = "max_memory_allocated (GB)"
TOTAL = "total_memory_available (GB)"
HOST_RSS = "host_rss (GB)"
HOST_AVAILABLE = "host_memory_available (GB)"
GB = 2**30

# Dense bfloat16 matrix TFLOP/s by device name; the first match counts. NVIDIA quotes most figures with sparsity, which
# doubles them.
PEAK_TFLOPS = (
    (r"\bGB200\b", 2500.0),  # GB200 NVL72 datasheet: 360 PFLOP/s sparse over 72
    (r"\bB200\b", 2250.0),  # HGX B200 datasheet: 36 PFLOP/s sparse over 8
    (r"\bH200 NVL\b", 835.5),  # H200 datasheet: 1,671 sparse
    (r"\bG?H200\b", 989.4),  # H200 datasheet, and GH200's: 1,979 sparse
    (r"\bH100 PCIe\b", 756.5),  # H100 datasheet: 1,513 sparse
    (r"\bH100 NVL\b", 835.5),  # H100 NVL datasheet: 1,671 sparse
    (r"\bH100\b", 989.4),  # H100 SXM; H100 architecture whitepaper, table 3
    (r"\bA100\b", 312.0),  # A100 datasheet, SXM and PCIe alike
    (r"\bL40S\b", 362.05),  # L40S datasheet
    (r"\bA10\b", 125.0),  # A10 datasheet. Not the A10G, another chip
    (r"\bV100-PCIE\b", 112.0),  # V100 datasheet; float16, it has no bfloat16
    (r"\bV100\b", 125.0),  # V100 datasheet, SXM2; float16
    (r"\bRTX 4090\b(?! [DL])", 165.2),  # Ada architecture whitepaper, appendix A, float32 accumulation
    (r"\bGAUDI3\b", 1835.0),  # Intel Gaudi 3 whitepaper, matrix engines, OAM
    (r"\bGAUDI2\b", 432.0),  # Intel Gaudi 3 whitepaper, comparison with Gaudi 2
)


RECIPES_MB = 16384
"""Largest size of a host's compiled graphs; Habana's default of 1024 is less than a large model's."""


class DeviceError(UserError, RuntimeError):
    """The requested device is not available."""


# ---------------------------------------------------------------------------------------------------------------------
# Choice


def choose_device(device: str) -> str:
    """Choose 'hpu', 'cuda' or 'cpu' for this process, and set DS_ACCELERATOR. Call it before deepspeed is imported.

    'auto' is DS_ACCELERATOR if that is set, else the first available one of hpu, cuda and cpu.
    Raises DeviceError if the device is not available, or deepspeed already uses another one.
    """
    requested = device
    if device == "auto":
        device = os.environ.get("DS_ACCELERATOR") or next(name for name in _MISSING if not _MISSING[name]())
        requested = f"DS_ACCELERATOR={device}" if "DS_ACCELERATOR" in os.environ else f"auto, that is {device}"
    if device not in _MISSING:
        raise DeviceError(f"device {requested} is unknown; use {', '.join(_MISSING)} or auto")
    missing = _MISSING[device]()
    if missing:
        raise DeviceError(f"device {requested} is not there: {missing}; or use --device cpu, or --device auto")
    # looked up, not imported: an import would let DeepSpeed choose the device
    used = getattr(sys.modules.get("deepspeed.accelerator.real_accelerator"), "ds_accelerator", None)
    if used is not None and used.device_name() != device:
        raise DeviceError(
            f"device {requested} comes too late: deepspeed was imported before and uses {used.device_name()}; "
            f"call choose_device first, or set DS_ACCELERATOR={device}"
        )
    os.environ["DS_ACCELERATOR"] = device
    return device


def keep_recipes(device: str, results_dir: str | None) -> None:
    """Let HPU keep its compiled graphs in the run's folder, so that a restart does not compile them again.

    One folder a host: ranks of several hosts would lock files over the network. No effect on other devices, nor where
    the user has set PT_HPU_RECIPE_CACHE_CONFIG. Call it before `choose_device`, which loads what reads the variable.
    """
    if results_dir is None or device not in ("hpu", "auto") or not has_gaudi_plugin():
        return
    variable = "PT_HPU_RECIPE_CACHE_CONFIG"
    folder = Path(results_dir).resolve() / "hpu_recipes" / socket.gethostname()
    if "," in str(folder) and variable not in os.environ:
        logging.getLogger(__name__).warning(
            "compiled graphs are not kept for a restart: a comma separates the values of %s, and %s has one; "
            "choose another results_dir",
            *(variable, folder),
        )
        return
    # path, empty it at the start, largest size in MB; source: RecipeCacheConfig of HabanaAI/gaudi-pytorch-bridge
    set_backend_variables({variable: f"{folder},false,{RECIPES_MB}", "PT_HPU_ENABLE_CACHE_METRICS": "1"})


def _missing_hpu() -> str:
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
    return _too_few("hpu")


def _missing_cuda() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" under CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        return f"torch sees no CUDA device{hidden}; nvidia-smi shows which are there"
    return _too_few("cuda")


def _too_few(device: str) -> str:
    """Return what a restriction of visible devices lacks for the ranks of this node."""
    visible, needed = VISIBLE[device], int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if visible not in os.environ or (left := count_devices(device)) >= needed:
        return ""
    return f"{visible}={os.environ[visible]} leaves {left} of the {needed} devices that the ranks of this node need"


def _plugin_version() -> str:
    try:
        return metadata.version("habana-torch-plugin")
    except metadata.PackageNotFoundError:  # built from source
        return "unknown"


# what a device lacks ('': nothing), in the order in which 'auto' tries them
_MISSING = {"hpu": _missing_hpu, "cuda": _missing_cuda, "cpu": lambda: ""}


def _device() -> str:
    """Return the device that DeepSpeed uses."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


# ---------------------------------------------------------------------------------------------------------------------
# Capabilities of a device


def peak_tflops() -> float | None:
    """Return the dense bfloat16 peak of one device in TFLOP/s; None on CPU, unknown devices and MIG slices."""
    device = _device()
    if device == "hpu":
        name = importlib.import_module("habana_frameworks.torch.hpu").get_device_name()
    elif device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    else:
        return None
    return named_peak_tflops(name)


def named_peak_tflops(device_name: str) -> float | None:
    """Return `peak_tflops` of the device with this name in torch."""
    if re.search(r"\bMIG\b", device_name):
        return None  # a slice's share of the chip is not in its name
    return next((tflops for pattern, tflops in PEAK_TFLOPS if re.search(pattern, device_name, re.IGNORECASE)), None)


@dataclass(frozen=True)
class Processor:
    """Capabilities of the CPU of this process, as torch uses them."""

    instructions: str
    """Those that torch's own operators use, as `AVX2`."""
    products: frozenset[str]
    """Those of bf16 and fp16 whose matrix products it has instructions for."""

    def __str__(self) -> str:
        return ", ".join([self.instructions, *(f"products in {precision}" for precision in sorted(self.products))])


@functools.cache
def processor() -> Processor:
    """Return the capabilities of this CPU. Environment variables of torch and oneDNN may limit it."""
    import torch

    has = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    supported = {name for name, operator in has.items() if getattr(torch.ops.mkldnn, operator, lambda: False)()}
    return Processor(torch.backends.cpu.get_cpu_capability(), frozenset(supported - missing_products()))


def widened_line(device: str, precision: str) -> str | None:
    """Return the line that says that products are computed in float32; None where they are not."""
    if device != "cpu" or precision == "fp32" or precision in processor().products:
        return None
    return f"{WIDENED.format(precision)} and rounded once ({processor().instructions})"


def check_precision(device: str, precision: str) -> None:
    """Raise DeviceError if the device cannot train in 'bf16' or 'fp16' ('fp32' always can)."""
    if precision == "fp32":
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = accelerator.is_bf16_supported() if precision == "bf16" else accelerator.is_fp16_supported()
    if not supported:
        other = "bf16 or float32" if precision == "fp16" else "float32"
        raise DeviceError(f"{precision} is not supported on this {device} device; train in {other}")


def set_deterministic(device: str) -> None:
    """Select algorithms that repeat bit for bit; an operator without one raises from here on.

    Call it before the first CUDA operation: cuBLAS reads its setting once. habana_frameworks follows torch's switch
    (its own, hpu.setDeterministic, is deprecated).
    """
    import torch

    if device == "cuda":
        # source: NVIDIA cuBLAS documentation, "Results Reproducibility"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # a debugging aid of torch's that costs a pass over every new tensor; results do not depend on it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# State of a device


def memory_stats() -> dict[str, float]:
    """Return allocated, peak and total memory in units of 2^30 bytes.

    HPU and CUDA: memory of the device, as its allocator counts it. CPU: the resident set of this process, and the
    memory of the host, which its ranks share.
    """
    device = _device()
    if device == "hpu":
        stats = importlib.import_module("habana_frameworks.torch.hpu").memory_stats()
        allocated, peak, total = stats["InUse"], stats["MaxInUse"], stats["Limit"]
    elif device == "cuda":
        import torch

        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        allocated, total = _process(os.getpid()).memory_info().rss, _host_memory()
        # in KiB on Linux, in bytes on macOS (getrusage(2)). The kernel's peak lags; the present may be above it
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peak = max(peak, allocated)
    return {ALLOCATED: allocated / GB, MAX_ALLOCATED: peak / GB, TOTAL: total / GB}


def free_memory_bytes() -> int:
    """Return what this process may still allocate: of its device, or on a CPU of the host, which its ranks share."""
    if _device() == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    stats = memory_stats()
    return int((stats[TOTAL] - stats[ALLOCATED]) * GB)


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Any:
    """Return the process, cached: to create one costs more than its queries in a step. `pid`: a fork has another."""
    import psutil

    return psutil.Process(pid)


@functools.cache
def _host_memory() -> int:
    """Return the host's memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def memory_details() -> dict[str, float]:
    """Return `memory_stats`, further counts of the allocator, and the resident set and free memory of the host.

    The keys depend on the device only. Does not wait for the device.
    """
    import psutil

    stats = memory_stats()
    device = _device()
    if device == "hpu":
        counted = importlib.import_module("habana_frameworks.torch.hpu").memory_stats()
        # Habana documents neither reserved memory nor retries among them
        stats["max_alloc_size (GB)"] = counted["MaxAllocSize"] / GB
        stats["num_active_allocs"] = float(counted["ActiveAllocs"])
        stats["num_allocs"] = float(counted["NumAllocs"])
        defragmentations = _hpu_metric("memory_defragmentation")
        stats["num_defragmentations"] = float(defragmentations["TotalNumber"])
        stats["num_failed_defragmentations"] = float(
            defragmentations["TotalNumber"] - defragmentations["TotalSuccessful"]
        )
    elif device == "cuda":
        import torch

        counted = torch.cuda.memory_stats()  # empty before the first use of the device
        reserved = counted.get("reserved_bytes.all.current", 0)
        stats["memory_reserved (GB)"] = reserved / GB
        stats["max_memory_reserved (GB)"] = counted.get("reserved_bytes.all.peak", 0) / GB
        # reserved from the device, and in use by no tensor: cached for reuse, or too scattered for it
        stats["memory_fragmentation (GB)"] = (reserved - counted.get("allocated_bytes.all.current", 0)) / GB
        # what torch's allocator does not know of, such as NCCL's buffers, shows here alone
        stats["memory_free (GB)"] = torch.cuda.mem_get_info()[0] / GB
        stats["num_alloc_retries"] = float(counted.get("num_alloc_retries", 0))
        stats["num_ooms"] = float(counted.get("num_ooms", 0))
    stats[HOST_RSS] = _process(os.getpid()).memory_info().rss / GB
    stats[HOST_AVAILABLE] = psutil.virtual_memory().available / GB
    return stats


def software() -> dict[str, str]:
    """Return the device's name and the versions of the software between torch and it; {} on CPU."""
    device = _device()
    if device == "hpu":
        hpu = importlib.import_module("habana_frameworks.torch.hpu")
        return {"device": hpu.get_device_name(), "habana-torch-plugin": _plugin_version()}
    if device == "cuda":
        import torch

        return {
            "device": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return {}


def mark_step() -> None:
    """Launch the recorded operators in HPU's lazy mode. No effect elsewhere."""
    if is_lazy(_device()):
        importlib.import_module("habana_frameworks.torch.core").mark_step()


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, followed by `mark_step` in HPU's lazy mode; elsewhere the function itself.

    For the forward and the backward pass of a microbatch: one graph of a whole step would hold all its microbatches.
    Habana's Megatron-LM marks in the same places (core/pipeline_parallel/schedules.py).
    """
    if not is_lazy(_device()):
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        mark_step()
        return result

    return call


def is_lazy(device: str) -> bool:
    """Return True on an HPU in lazy mode."""
    # its default has changed between releases of habana_frameworks; only it knows
    return device == "hpu" and bool(importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy())


def recompile_count() -> int | None:
    """Return the number of graphs that HPU has compiled in this process; None elsewhere. It grows with new shapes."""
    return int(_hpu_metric("graph_compilation")["TotalNumber"]) if _device() == "hpu" else None


def cpu_fallbacks() -> dict[str, int]:
    """Return the calls of each operator that HPU lacks, so that the CPU computed it, in this process; {} elsewhere."""
    return dict(_hpu_metric("cpu_fallback")["FallbackOps"]) if _device() == "hpu" else {}


def recipe_cache() -> tuple[float, float] | None:
    """Return how often HPU has found a compiled graph in its cache and how often not; None where it does not count."""
    if _device() != "hpu":
        return None
    metric = importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_global("recipe_cache")
    counts = {} if metric is None else dict(metric.stats())  # none without PT_HPU_ENABLE_CACHE_METRICS
    return (float(counts["TotalHit"]), float(counts["TotalMiss"])) if counts else None


def _hpu_metric(name: str) -> dict[str, Any]:
    return dict(importlib.import_module("habana_frameworks.torch.hpu.metrics").metric_global(name).stats())


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed's output


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's output while it builds an engine (topology, config, a line a rank).

    MEGATRON_VERBOSE=1 shows it. Python warnings and exceptions are not suppressed.
    """
    if os.environ.get("MEGATRON_VERBOSE") == "1":
        yield
        return
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # torch 2.13 renamed collectives that DeepSpeed 0.19.8 calls by their old names, each a warning a call site
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\..* is deprecated")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
