"""Waits for the device, collectives and largest operators of one training step."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Counts:
    """Counts of one call. Waits are keyed by operation and the line of code they come from."""

    waits: Counter[str] = field(default_factory=Counter)
    """Reads of a tensor's value, and calls that synchronise with the device."""
    collectives: Counter[str] = field(default_factory=Counter)
    sent_bytes: list[int] = field(default_factory=list)
    """Bytes of this rank's tensors in each collective, in their order."""
    device_syncs: Counter[str] = field(default_factory=Counter)
    """CUDA alone: operations that torch reports as synchronising, by the line of code."""


class _Operators(TorchDispatchMode):
    """Counts reads of values, and collectives, in the stream of operators: forward, backward and update."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function.name().split(".")[0]
        if name == "aten::_local_scalar_dense":
            self._counts.waits[f"item {_caller()}"] += 1
        elif name.startswith("c10d::"):
            self._counts.collectives[name.removeprefix("c10d::").rstrip("_")] += 1
            tensors = [each for each in tree_leaves(arguments[0]) if isinstance(each, torch.Tensor)]
            self._counts.sent_bytes.append(sum(each.nbytes for each in tensors))
        return function(*arguments, **(options or {}))


def _caller() -> str:
    """Return file:line of the code nearest to the operation that is neither torch's nor this file's."""
    torch_folder = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith((torch_folder, "<")):
            return _place(frame.filename, frame.lineno or 0)
    return "?"


def _place(filename: str, line: int) -> str:
    path = Path(filename)
    inside = path.is_relative_to(ROOT) and "site-packages" not in path.parts
    return f"{path.relative_to(ROOT) if inside else '/'.join(path.parts[-3:])}:{line}"


def counted(call: Callable[[], Any]) -> Counts:
    """Call, on CUDA twice, and return the counts.

    On the CPU nothing waits; what would wait on a device is counted all the same.
    """
    from deepspeed.accelerator import get_accelerator

    counts = Counts()
    accelerator = get_accelerator()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **options: Any) -> Any:
            counts.waits[f"{name} {_caller()}"] += 1
            return original(*arguments, **options)

        return wait

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "tolist", noting("tolist", torch.Tensor.tolist)))
        stack.enter_context(patch.object(accelerator, "synchronize", noting("synchronize", accelerator.synchronize)))
        stack.enter_context(_Operators(counts))
        call()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call()
            torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "called a synchronizing" in str(warning.message):  # torch also warns that the mode is a prototype
                counts.device_syncs[_place(warning.filename, warning.lineno)] += 1
    return counts


class AllOperators(TorchDispatchMode):
    """Counts operators: forward, backward and update."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.number += 1
        return function(*arguments, **(options or {}))


def counted_work(call: Callable[[], Any]) -> tuple[int, int]:
    """Call twice, and return the number of Python's function calls on this thread, and of torch's operators."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection calls finalizers
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    with AllOperators() as operators:
        call()
    return calls, operators.number


def live_objects() -> int:
    """Return the number of Python's objects."""
    gc.collect()
    return len(gc.get_objects())


def largest_operators(call: Callable[[], Any], number: int = 10) -> list[tuple[str, float, float, int]]:
    """Return (name, milliseconds, share, calls) of the operators or kernels with the most time of their own."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        call()
        if on_cuda:
            torch.cuda.synchronize()

    def own_us(event: Any) -> float:
        if not on_cuda:
            return float(event.self_cpu_time_total)
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        return float(event.self_device_time_total) if is_kernel else 0.0

    events = sorted(profile.key_averages(), key=own_us, reverse=True)
    total_us = sum(own_us(event) for event in events) or 1.0
    return [(event.key, own_us(event) / 1000, own_us(event) / total_us, event.count) for event in events[:number]]
