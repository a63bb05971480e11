"""Messages from rank to rank that are received whole, or not at all, and the one place where work is waited for.

Shapes: S tokens, B rows, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext

MOST_SENDS = 4
"""Messages that a rank may have under way: each keeps its tensor."""
_MARK = 0x7FA5
"""Last 16 bits of a marked buffer: in a floating-point one a NaN that no arithmetic gives."""


# The `wait` of a work is native code without a frame in Python. The watchdog recognises this function, and so can
# distinguish a rank that waits for others from one that hangs.
def wait_for(works: Iterable[Any]) -> None:
    """Wait until each `torch.distributed.Work` is done."""
    for work in works:
        work.wait()


class MessageError(RuntimeError):
    """A message has another shape than its receiver expects: a fault of this program, not of its user."""


def check_shape(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise MessageError unless a tensor to send has this shape and dtype."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise MessageError(
            f"a message of {tuple(tensor.shape)} {tensor.dtype} is to be sent where {tuple(shape)} {dtype} is expected"
        )


# gloo gives a receiver a message that is shorter than its buffer without a word, and what lies in the rest would be
# computed with. So a sender compares the shape with the one that both sides derive, and a receiver marks the last
# number of its buffer, which a whole message overwrites. That costs some 30 microseconds a message.
def mark(buffer: Tensor) -> None:
    """Mark the last number of a buffer that a message is to fill. It is contiguous, of 16 bits or more a number."""
    if buffer.is_cpu and buffer.numel():
        buffer.view(-1)[-1:].view(torch.int16)[-1] = _MARK


def check_filled(buffer: Tensor) -> None:
    """Raise MessageError if a marked buffer has not been filled to its end.

    On a CPU alone: on other devices it would make the host wait, and their backends have no shorter messages.
    """
    if buffer.is_cpu and buffer.numel() and int(buffer.view(-1)[-1:].view(torch.int16)[-1]) == _MARK:
        raise MessageError(f"a message for {tuple(buffer.shape)} {buffer.dtype} was shorter; nothing of it is used")


class Receipt(NamedTuple):
    """A tensor that is being received."""

    buffer: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Return the tensor once it is whole. Raises MessageError."""
        wait_for([self.work])
        check_filled(self.buffer)
        return self.buffer


def post_receive(buffer: Tensor, rank: int, **options: Any) -> Receipt:
    """Have a buffer filled in the background. `options`: `group` and `tag` of torch.distributed."""
    mark(buffer)
    return Receipt(buffer, dist.irecv(buffer, rank, **options))


def receive(buffer: Tensor, rank: int, **options: Any) -> Tensor:
    """Return the buffer, filled. `options`: `group` and `tag` of torch.distributed. Raises MessageError."""
    mark(buffer)
    dist.recv(buffer, rank, **options)
    check_filled(buffer)
    return buffer


class Exchange(NamedTuple):
    """A message to one rank and one from another, both under way."""

    works: list[Any]
    sent: Tensor | None
    """Kept until it has been sent."""
    buffer: Tensor | None

    def wait(self) -> Tensor | None:
        """Return what was received once it is whole, and what was sent is gone. Raises MessageError."""
        wait_for(self.works)
        if self.buffer is not None:
            check_filled(self.buffer)
        return self.buffer


def post_exchange(
    message: Tensor | None, destination: int, buffer: Tensor | None, source: int, group: dist.ProcessGroup | None
) -> Exchange:
    """Send a contiguous message, and have a buffer filled, in the background. None: nothing is sent or received.

    The ranks are of the world. Both in one call: of a device's backend one without the other may wait for it.
    """
    operations = []
    if message is not None:
        operations.append(dist.P2POp(dist.isend, message, destination, group))
    if buffer is not None:
        mark(buffer)
        operations.append(dist.P2POp(dist.irecv, buffer, source, group))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Exchange(works, message, buffer)


class Sends:
    """Messages under way, of which at most `most` keep their tensors."""

    def __init__(self, most: int = MOST_SENDS) -> None:
        self._most = most
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, rank: int, **options: Any) -> None:
        """Send a contiguous tensor in the background. `options`: `group` and `tag` of torch.distributed."""
        self._sending.append((dist.isend(tensor, rank, **options), tensor))
        while len(self._sending) > self._most:
            self._end_oldest()

    def end(self) -> None:
        """Wait until all has been received."""
        while self._sending:
            self._end_oldest()

    def _end_oldest(self) -> None:
        wait_for([self._sending.popleft()[0]])


class StageMessages:
    """Hidden states [S, B, H] from the stage before, and to the next one, of a model that computes without training."""

    def __init__(self, ctx: ParallelContext, hidden_size: int, dtype: torch.dtype) -> None:
        self._ctx, self._hidden_size, self._dtype = ctx, hidden_size, dtype
        self._sends = Sends()

    def receive(self, num_tokens: int, num_rows: int) -> Tensor:
        """Return what the stage before sends. Raises MessageError."""
        shape = num_tokens, num_rows, self._hidden_size
        buffer = torch.empty(shape, dtype=self._dtype, device=self._ctx.device)
        return receive(buffer, self._neighbour(-1))

    def send(self, hidden: Tensor, num_tokens: int, num_rows: int) -> None:
        """Send to the next stage, which receives as many tokens and rows. Raises MessageError."""
        check_shape(hidden, (num_tokens, num_rows, self._hidden_size), self._dtype)
        self._sends.send(hidden.contiguous(), self._neighbour(1))

    def end(self) -> None:
        """Wait until what was sent has been received."""
        self._sends.end()

    def _neighbour(self, step: int) -> int:
        ctx = self._ctx
        return ctx.rank_at(stage=ctx.stage + step)
