"""Additions to DeepSpeed's accelerator: choice of device, memory under one set of keys, HPU steps, peak TFLOP/s.

torch, deepspeed and habana_frameworks are imported inside the functions: `choose_device` must be called before
deepspeed is imported, and a rejected config must not wait for any of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.runtime.device import Device, DeviceError
from megatron.runtime.device_cpu import WIDENED, free_host_memory, missing_products, resident_bytes
from megatron.runtime.devices import CHOSEN, DEVICES, candidates, device_of_accelerator, find_device, rank_variables

# names of Habana's Optimum, for every device; its "GB" are 2^30 bytes
ALLOCATED = "memory_allocated (GB)"
MAX_ALLOCATED = "max_memory_allocated (GB)"
TOTAL = "total_memory_available (GB)"
HOST_RSS = "host_rss (GB)"
HOST_AVAILABLE = "host_memory_available (GB)"
GB = 2**30


# ---------------------------------------------------------------------------------------------------------------------
# Choice


def choose_device(device: str) -> str:
    """Choose a device for this process by name, and set DS_ACCELERATOR. Call it before deepspeed is imported.

    'auto' is the one that the launcher or the user has set in the environment, else the first available one of hpu,
    cuda and cpu. Returns its name. Raises DeviceError if the device is not available, or deepspeed already uses
    another one.
    """
    requested = device
    if device == "auto":
        device, requested = _automatic()
    try:
        record = find_device(device)
    except DeviceError as error:
        raise DeviceError(f"device {requested} {error}") from None
    if missing := _missing(record):
        raise DeviceError(f"device {requested} is not there: {missing}; or use --device cpu, or --device auto")
    # looked up, not imported: an import would let DeepSpeed choose the device
    used = getattr(sys.modules.get("deepspeed.accelerator.real_accelerator"), "ds_accelerator", None)
    if used is not None and used.device_name() != record.accelerator:
        raise DeviceError(
            f"device {requested} comes too late: deepspeed was imported before and uses {used.device_name()}; "
            f"call choose_device first, or set DS_ACCELERATOR={record.accelerator}"
        )
    # of an earlier choice; `rank_variables` sets it for a device from outside alone
    os.environ.pop(CHOSEN, None)
    os.environ.update(rank_variables(device))
    if record not in DEVICES:
        _check_record(record, requested)
    return device


def _check_record(record: Device, requested: str) -> None:
    """Raise DeviceError where DeepSpeed and torch do not have a user's device as its record describes it."""
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
    except ValueError as error:
        fault = f"its accelerator={record.accelerator!r} cannot be had: {error}"
        raise DeviceError(f"device {requested}: {fault}; correct the record") from None
    import torch

    torch_type, backend = torch.device(accelerator.device_name()).type, accelerator.communication_backend_name()
    if record.torch_type != torch_type:
        fault = f"its torch_type={record.torch_type!r} is not that of its tensors, which is {torch_type}"
        raise DeviceError(f"device {requested}: {fault}; correct the record")
    # the backend of DeepSpeed's accelerator may be registered only when DeepSpeed loads it
    if record.collectives != backend and not torch.distributed.is_backend_available(record.collectives):
        fault = f"its collectives={record.collectives!r} is not a backend of this torch.distributed"
        raise DeviceError(f"device {requested}: {fault}; use {backend}, or import what registers it in missing()")


def _automatic() -> tuple[str, str]:
    """Return the name of the device that `auto` means here, and how a message is to call it."""
    if CHOSEN in os.environ:
        return os.environ[CHOSEN], f"{CHOSEN}={os.environ[CHOSEN]}"
    if "DS_ACCELERATOR" in os.environ:
        return os.environ["DS_ACCELERATOR"], f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}"
    name = next(record.name for record in DEVICES if not _missing(record))
    return name, f"auto, that is {name}"


def _missing(record: Device) -> str:
    """Return what this machine lacks for the device, or for so many ranks of this node."""
    if missing := record.missing():
        return missing
    visible, needed = record.visible_variable, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if visible not in os.environ or record.count is None:
        return ""
    left = record.count()
    if left >= needed:
        return ""
    return f"{visible}={os.environ[visible]} leaves {left} of the {needed} devices that the ranks of this node need"


def keep_compiled_graphs(device: str, results_dir: str | None) -> None:
    """Let the device's software keep its compiled graphs in the run's folder, so that a restart does not compile again.

    Call it before `choose_device`, which loads what reads its variables. No effect where the user has set them.
    """
    if results_dir is None:
        return
    # of `auto` all: which it is shows only once its software is loaded
    for record in candidates(device):
        record.keep_compiled_graphs(results_dir)


def current() -> Device:
    """Return the record of the device that DeepSpeed uses in this process."""
    from deepspeed.accelerator import get_accelerator

    return device_of_accelerator(str(get_accelerator().device_name()))


# ---------------------------------------------------------------------------------------------------------------------
# Capabilities of a device


def peak_tflops() -> float | None:
    """Return the dense bfloat16 peak of one device in TFLOP/s; None on CPU, unknown devices and MIG slices."""
    device = current()
    name = device.chip_name()
    return None if name is None else named_peak_tflops(device, name)


def named_peak_tflops(device: Device, chip_name: str) -> float | None:
    """Return `peak_tflops` of the chip with this name in the device's software."""
    if re.search(r"\bMIG\b", chip_name):
        return None  # a slice's share of the chip is not in its name
    # the first match: more special names come before the chip's own
    return next((tflops for pattern, tflops in device.peaks if re.search(pattern, chip_name, re.IGNORECASE)), None)


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
    # private operators, which a build without oneDNN lacks
    supported = {name for name, operator in has.items() if getattr(torch.ops.mkldnn, operator, lambda: False)()}
    return Processor(torch.backends.cpu.get_cpu_capability(), frozenset(supported - missing_products()))


def widened_line(device: Device, precision: str) -> str | None:
    """Return the line that says that products are computed in float32; None where they are not."""
    if not device.is_host or precision == "fp32" or precision in processor().products:
        return None
    return f"{WIDENED.format(precision)} and rounded once ({processor().instructions})"


def check_precision(device: Device, precision: str) -> None:
    """Raise DeviceError if the device cannot train in 'bf16' or 'fp16' ('fp32' always can)."""
    if precision == "fp32":
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = accelerator.is_bf16_supported() if precision == "bf16" else accelerator.is_fp16_supported()
    if not supported:
        other = "bf16 or float32" if precision == "fp16" else "float32"
        raise DeviceError(f"{precision} is not supported on this {device.name} device; train in {other}")


def set_deterministic(device: Device) -> None:
    """Select algorithms that repeat bit for bit; an operator without one raises from here on.

    Call it before the first operation of the device. habana_frameworks follows torch's switch (its own,
    hpu.setDeterministic, is deprecated).
    """
    import torch

    device.set_deterministic()
    torch.use_deterministic_algorithms(True)
    # a debugging aid of torch's that costs a pass over every new tensor; results do not depend on it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# State of a device


def memory_stats() -> dict[str, float]:
    """Return allocated, peak and total memory in units of 2^30 bytes.

    Memory of the device, as its allocator counts it. CPU: the resident set of this process, and the memory of the host,
    which its ranks share.
    """
    use = current().memory()
    return {ALLOCATED: use.allocated / GB, MAX_ALLOCATED: use.peak / GB, TOTAL: use.total / GB}


def free_memory_bytes() -> int:
    """Return what this process may still allocate: of its device, or on a CPU of the host, which its ranks share."""
    device = current()
    if device.is_host:
        return free_host_memory()
    use = device.memory()
    return use.total - use.allocated


def memory_details() -> dict[str, float]:
    """Return `memory_stats`, further counts of the allocator, and the resident set and free memory of the host.

    The keys depend on the device only. Does not wait for the device.
    """
    stats = memory_stats() | current().memory_counts()
    stats[HOST_RSS] = resident_bytes() / GB
    stats[HOST_AVAILABLE] = free_host_memory() / GB
    return stats


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, followed by a step mark in HPU's lazy mode; elsewhere the function itself.

    For the forward and the backward pass of a microbatch: one graph of a whole step would hold all its microbatches.
    Habana's Megatron-LM marks in the same places (core/pipeline_parallel/schedules.py).
    """
    device = current()
    if not device.is_lazy():
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        device.mark_step()
        return result

    return call


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
