"""A fault that one rank meets ends the run on all of them, at once, with its message."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from megatron.accelerator import DeviceError
from megatron.checkpoint.store import CheckpointError
from megatron.config import ConfigError
from megatron.data.indexed import DataError
from megatron.parallel.context import LayoutError, ParallelContext

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Another rank met a fault, and says which."""


class GaveUp(RuntimeError):
    """The guard ends the run, on every rank alike: going on would waste the machine or spoil the checkpoints."""


USER_FAULTS = (ConfigError, DataError, CheckpointError, LayoutError, DeviceError, OSError, OtherRankFailed)


def together(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """action() on every rank; if it raises on any, it raises on all. Collective, not for inside `action`.

    The ranks that met no fault raise OtherRankFailed, which names the first that did.
    """
    result, fault = None, None
    try:
        result = action()
    except Exception as error:
        fault = error
    told = ctx.gather_objects(None if fault is None else f"rank {ctx.rank} on {socket.gethostname()} failed: {fault}")
    if fault is not None:
        raise fault
    if faults := [message for message in told if message is not None]:
        raise OtherRankFailed(faults[0])
    return result  # type: ignore[return-value]
