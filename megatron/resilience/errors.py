"""Errors that end a run: raised by one rank, they end all ranks at once, with its message."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable
from typing import TypeVar

from megatron.checkpoint.folders import SaveError
from megatron.parallel.context import ParallelContext
from megatron.runtime.commands import ABORTED, FAILED, REFUSED, UserError
from megatron.runtime.descriptors import shortage

T = TypeVar("T")


class OtherRankFailed(UserError, RuntimeError):
    """Error of another rank, which it names. `status`: the exit status of that rank."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class TrainingAborted(RuntimeError):
    """Raised by the guard on every rank alike: to continue would waste time or spoil the checkpoints."""


class PeerLostError(RuntimeError):
    """A collective failed because another rank has ended. The message is empty where the verdict is printed already."""


USER_FAULTS = (UserError, OSError)
# what the system refuses each time: a path, a permission or a call that is wrong. Any other errno may pass
LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV, errno.ENODEV, errno.ENXIO, errno.ENOEXEC, errno.ENOSYS),
    *(errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL),
}
# how Python, pyarrow and Rust's libraries, such as safetensors, write an errno into a message
_ERRNO = re.compile(r"(?:\[[Ee]rrno |os error )(\d+)")


def message_of(error: Exception) -> str:
    """Return the message of a user's fault: of an OSError of one file its path and the reason, without a number."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename2 is None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def exit_status(error: Exception) -> int:
    """Return the exit status of a process that ends by this error: REFUSED where a restart would fail again."""
    if isinstance(error, OtherRankFailed):
        return error.status
    if isinstance(error, TrainingAborted):
        return ABORTED
    # after a failed save a restart goes on from the last checkpoint, and the disk may have room by then
    may_pass = isinstance(error, SaveError) or is_passing(error)
    if isinstance(error, USER_FAULTS) and not may_pass:
        return REFUSED
    return FAILED


def is_passing(error: BaseException) -> bool:
    """Return True if the error is one of a file system, a network or a lack of memory that may not come again.

    So is an error that was raised because of one, whatever its own type.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        if _may_pass(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError | MemoryError):
        return True
    numbers = [int(number) for number in _ERRNO.findall(str(error))]
    if isinstance(error, OSError) and error.errno is not None:
        numbers.append(error.errno)
    return bool(numbers) and LASTING.isdisjoint(numbers)


def raise_on_all_ranks(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """Return action() of every rank; if it raises on any rank, raise on all. Collective; `action` must not be.

    Ranks whose action succeeded raise OtherRankFailed, which names the first that failed.
    """
    try:
        result = action()
    except Exception as error:
        # the others wait in the same collective, so this rank enters it too before it raises
        ctx.gather_objects((f"rank {ctx.rank} on {socket.gethostname()} failed: {error}", exit_status(error)))
        raise
    faults = [fault for fault in ctx.gather_objects(None) if fault is not None]
    if faults:
        raise OtherRankFailed(*faults[0])
    return result


# messages of gloo's transport and of NCCL's and HCCL's watchdogs, whose errors have no type of their own
_LOST = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|NCCL|HCCL|Broken pipe")
# what this process or its machine lacks: the other ranks are lost because of it
_LACKS = re.compile(
    "|".join(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)))
    + "|[Oo]ut of memory|[Uu]nable to find address for|EMFILE|ENFILE"
)


def is_lost_peer(error: BaseException) -> bool:
    """Return True for the error of a collective that failed, as it does where another rank has ended.

    Not where the message says that this process lacks something, such as descriptors.
    """
    import torch.distributed as dist

    if isinstance(error, OSError) or _LACKS.search(str(error)):  # of a file or a pipe, or of this machine
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))


def has_lost_another(error: BaseException) -> bool:
    """Return True where this rank is healthy, and the error is only that another one has ended, or is about to."""
    return shortage() is None and (isinstance(error, OtherRankFailed) or is_lost_peer(error))
