"""The device `hpu` over CPU memory: `install` makes it known to a whole process, `known` for a while.

Where torch is given the device, it computes on the CPU, and hccl is gloo. A tensor says that it is on the CPU, so one
that is on the wrong device is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from habana_frameworks.torch import hpu, stand_in
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
OF_PROCESS = contextlib.ExitStack()
"""Open as long as the process."""


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value.type == "hpu" else value
    return CPU if isinstance(value, str) and value.partition(":")[0] == "hpu" else value


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device:  # a name alone
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(_on_cpu(value) for value in args), **kwargs)


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


@functools.cache
def _register() -> None:
    """Register the device's backends of torch.distributed and torch.compile, which cannot be taken back."""
    if not hasattr(dist.Backend, "HCCL"):  # by an earlier import in this process
        dist.Backend.register_backend("hccl", _gloo, devices=["cpu", "hpu"])
        torch._dynamo.register_backend(lambda graph, inputs: graph, name="hpu_backend")
    torch.hpu = hpu  # type: ignore[attr-defined]


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Let this thread, and those that it starts, compute on the CPU for the device."""
    _register()
    run = threading.Thread.run

    def run_on_cpu(thread: threading.Thread) -> None:
        with OnCpu():  # a mode holds for one thread
            run(thread)

    threading.Thread.run = run_on_cpu  # type: ignore[method-assign, assignment]
    try:
        with OnCpu():
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


def counts() -> Counter[str]:
    """Return the number of calls by name."""
    return Counter(name for name, _ in stand_in.calls)


def _spoil(module: str, name: str) -> None:
    """Let the results of a kernel be a tenth too large."""
    kernel = getattr(importlib.import_module(f"habana_frameworks.torch.{module}"), name)
    apply = kernel.apply
    kernel.apply = staticmethod(lambda *args, **kwargs: apply(*args, **kwargs) * 1.1)


def install() -> None:
    """Make the device known to this process.

    HABANA_STAND_IN_CALLS names a folder where it writes `counts` when it ends, as a rank does, by os._exit.
    HABANA_STAND_IN_WRONG=MODULE:KERNEL makes one wrong.
    """
    OF_PROCESS.enter_context(known())
    if wrong := os.environ.get("HABANA_STAND_IN_WRONG"):
        _spoil(*wrong.split(":"))
    os.register_at_fork(after_in_child=stand_in.calls.clear)
    exit_now, folder = os._exit, os.environ.get("HABANA_STAND_IN_CALLS")

    def end(status: int) -> None:
        if folder is not None:
            name = f"{os.environ.get('RANK', '0')}-{os.getpid()}.json"
            (Path(folder) / name).write_text(json.dumps(counts()))
        exit_now(status)

    os._exit = end  # type: ignore[assignment]
