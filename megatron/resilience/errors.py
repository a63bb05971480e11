"""A fault that one rank meets ends the run on all of them, at once, with its message."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from typing import TypeVar

from megatron.accelerator import DeviceError
from megatron.checkpoint.format import CheckpointError
from megatron.config.options import ConfigError
from megatron.data.indexed import DataError
from megatron.exit_codes import ABORTED, FAILED, REFUSED
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import LayoutError

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Another rank met a fault, and says which. `status`: what that one ends with."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class TrainingAborted(RuntimeError):
    """The guard ends the run, on every rank alike: going on would waste the machine or spoil the checkpoints."""


class PeerLostError(RuntimeError):
    """A collective failed because another rank has gone. An empty message: all there is to say has been said."""


USER_FAULTS = (ConfigError, DataError, CheckpointError, LayoutError, DeviceError, OSError, OtherRankFailed)
# Of a file system or a network, not of what the user asked for.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}


def exit_status(error: Exception) -> int:
    """What a process ends with that met this fault: REFUSED where another try would meet it too."""
    if isinstance(error, OtherRankFailed):
        return error.status
    if isinstance(error, TrainingAborted):
        return ABORTED
    if isinstance(error, OSError) and error.errno in PASSING:
        return FAILED
    return REFUSED if isinstance(error, USER_FAULTS) else FAILED


def raise_on_all_ranks(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """action() on every rank; if it raises on any, it raises on all. Collective, not for inside `action`.

    The ranks that met no fault raise OtherRankFailed, which names the first that did.
    """
    result, fault = None, None
    try:
        result = action()
    except Exception as error:
        fault = error
    mine = None
    if fault is not None:
        mine = f"rank {ctx.rank} on {socket.gethostname()} failed: {fault}", exit_status(fault)
    told = ctx.gather_objects(mine)
    if fault is not None:
        raise fault
    if faults := [one for one in told if one is not None]:
        raise OtherRankFailed(*faults[0])
    return result  # type: ignore[return-value]


# the words of gloo's transport and of NCCL's and HCCL's watchdogs; their errors have no type of their own
_LOST = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|NCCL|HCCL|Broken pipe")


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as it does where another rank has ended."""
    import torch.distributed as dist

    if isinstance(error, OSError):  # of a file or a pipe
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))
