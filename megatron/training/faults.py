"""A fault that one rank meets ends the run on all of them, at once, with its message."""

from __future__ import annotations

import re
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


class PeerLostError(RuntimeError):
    """A collective failed because another rank has gone. An empty message: all there is to say has been said."""


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


# the words of gloo's transport and of NCCL's and HCCL's watchdogs; their errors have no type of their own
_LOST = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|NCCL|HCCL|Broken pipe")


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as it does where another rank has ended."""
    import torch.distributed as dist

    if isinstance(error, OSError):  # of a file or a pipe
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))
