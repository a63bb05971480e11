"""Copies of states on their way between hosts: to the next one after each copy, and back in a restart.

They travel by gloo, as the control messages of a run do. What arrives is bounded by size, sealed, and checked as any
checkpoint before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.copies import (
    MOST_PART_BYTES,
    TAG,
    RankCopies,
    RankPart,
    allocate,
    part_file,
    read_part,
    write_part,
)
from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.format import rank_file
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed import Work

SIZES_TAG, PART_TAG, FILE_TAG = 2, 3, 4
"""Tags of messages between ranks; the context's own have lower ones."""


class Hosts:
    """Places of the ranks on hosts: as many on each, in order."""

    def __init__(self, ctx: ParallelContext) -> None:
        self.per_host = int(os.environ.get("LOCAL_WORLD_SIZE", ctx.world_size))
        self.count = ctx.world_size // self.per_host
        self.own, self.local_rank = divmod(ctx.rank, self.per_host)
        self.next_rank = (ctx.rank + self.per_host) % ctx.world_size
        """The rank on the next host that keeps this rank's copy too."""
        self.previous_rank = (ctx.rank - self.per_host) % ctx.world_size
        """The rank whose copy this one keeps too."""

    def ranks_of(self, host: int) -> range:
        return range(host * self.per_host, (host + 1) * self.per_host)

    def carrier(self, host: int, of_rank: int) -> int:
        """Return the rank on a host that sends or receives the copy of another rank, so that all take their share."""
        return host * self.per_host + of_rank % self.per_host


class CopyExchange:
    """Sends this rank's copies to the next host, and keeps those of the previous one. Collective in construction."""

    def __init__(self, ctx: ParallelContext, hosts: Hosts, theirs: RankCopies) -> None:
        self._next, self._previous, self.theirs = hosts.next_rank, hosts.previous_rank, theirs
        self._world_size = ctx.world_size
        self.largest_bytes = 0
        """Size of the largest file that may come."""
        # a group of its own: a thread uses it while the ranks train
        rings = [list(range(first, ctx.world_size, hosts.per_host)) for first in range(hosts.per_host)]
        self._group, _ = dist.new_subgroups_by_enumeration(rings, backend="gloo")

    def run(self, step: int, part: bytes, content: Tensor, kept: int | None) -> None:
        """Exchange the copies of an iteration; an empty part: this rank has made none. Raises CheckpointError."""
        sizes = torch.tensor([len(part), len(content)])
        sent = [self._send(sizes, self._next, SIZES_TAG)]
        part_bytes, file_bytes = self._receive(torch.empty_like(sizes), self._previous, SIZES_TAG).tolist()
        target, fault = self._room_for(step, part_bytes, file_bytes, kept)
        # a sender waits until it is received: so it has to know first
        sent.append(self._send(torch.tensor([int(target is not None)]), self._previous, PART_TAG))
        is_wanted = self._receive(torch.empty(1, dtype=torch.int64), self._next, PART_TAG)
        if is_wanted.item():
            sent.append(self._send(as_tensor(part), self._next, FILE_TAG))
            if len(content):
                sent.append(self._send(content, self._next, FILE_TAG))
        if target is not None:
            text = self._receive(torch.empty(part_bytes, dtype=torch.uint8), self._previous, FILE_TAG)
            if file_bytes:
                self._receive(target, self._previous, FILE_TAG)
            self._keep(step, text)
        for work in sent:
            work.wait()
        if fault or not is_wanted.item():
            raise CheckpointError(fault or f"rank {self._next} on the next host did not take it")

    def _room_for(
        self, step: int, part_bytes: int, file_bytes: int, kept: int | None
    ) -> tuple[Tensor | None, str | None]:
        """Return where the copy that comes is to lie; None: it is not wanted, and why."""
        if not part_bytes:
            return None, f"rank {self._previous} on the previous host has made none"
        if not 0 < part_bytes <= MOST_PART_BYTES or not 0 <= file_bytes <= self.largest_bytes:
            return None, f"rank {self._previous} on the previous host sends {part_bytes} and {file_bytes} bytes"
        try:
            return self.theirs.open(step, file_bytes, kept), None
        except OSError as error:
            return None, f"there is no room for that of rank {self._previous}: {error.strerror}"
        except Exception as error:  # of any kind: the neighbour waits for the answer
            return None, f"that of rank {self._previous} cannot be taken: {type(error).__name__}: {error}"

    def _keep(self, step: int, text: Tensor) -> None:
        """Mark what has come as whole. Raises CheckpointError where it is something else."""
        content = bytes(text.numpy())
        part = RankPart.of(content)
        if (part.rank, part.step, part.world_size) != (self._previous, step, self._world_size):
            raise CheckpointError(f"rank {self._previous} sends the copy of rank {part.rank}, iteration {part.step}")
        self.theirs.mark(step, content)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        work = dist.isend(tensor, rank, self._group, tag)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Tensor:
        dist.recv(tensor, rank, self._group, tag)
        return tensor


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bring_missing(
    ctx: ParallelContext, hosts: Hosts, folder: Path, step: int, holders: Mapping[int, Collection[int]]
) -> None:
    """Bring each host the copies of those ranks that it lacks. Collective.

    A new host lacks all, and of three or more each lacks those of all hosts but itself and the one before. It needs
    them: a rank reads its weights from the files of all ranks that share them, and opening a checkpoint checks all.

    `holders`: the hosts that hold the copy of each rank. Raises CheckpointError or OSError on all ranks.
    """
    missing = [(rank, host) for rank in sorted(holders) for host in range(hosts.count) if host not in holders[rank]]
    if not missing:
        return
    copy = folder / f"{TAG}{step}"
    sends = {rank for rank, _ in missing if hosts.carrier(min(holders[rank]), rank) == ctx.rank}
    texts = raise_on_all_ranks(ctx, lambda: {rank: (copy / part_file(rank)).read_bytes() for rank in sends})
    sizes = _sizes_of(ctx, copy, texts)
    comes = [rank for rank, host in missing if hosts.carrier(host, rank) == ctx.rank]
    # all of it before anything is sent: where it has no room, none waits for another
    rooms = raise_on_all_ranks(ctx, lambda: {rank: _room(copy, rank, *sizes[rank]) for rank in comes})
    for rank, host in missing:
        source, target = hosts.carrier(min(holders[rank]), rank), hosts.carrier(host, rank)
        if ctx.rank == source:
            _pass_on(dist.send, (as_tensor(texts[rank]), _file(copy, rank)), target, ctx)
        elif ctx.rank == target:
            text = torch.empty(sizes[rank][0], dtype=torch.uint8)
            _pass_on(dist.recv, (text, rooms[rank]), source, ctx)
            write_part(copy, rank, bytes(text.numpy()))
    raise_on_all_ranks(ctx, lambda: _check(copy, comes))


def _sizes_of(ctx: ParallelContext, copy: Path, texts: Mapping[int, bytes]) -> dict[int, tuple[int, int]]:
    """Return the bytes of part and file of each copy that is sent, by rank. `texts`: the parts that this one sends."""
    sizes: dict[int, tuple[int, int]] = {}
    for known in ctx.gather_objects([[rank, len(text), _size(copy, rank)] for rank, text in texts.items()]):
        sizes |= {rank: (part_bytes, file_bytes) for rank, part_bytes, file_bytes in known}
    return sizes


def _pass_on(call: Callable[..., Any], tensors: Sequence[Tensor], rank: int, ctx: ParallelContext) -> None:
    for tensor in tensors:
        if len(tensor):
            call(tensor, rank, ctx.control_group, FILE_TAG)


def _check(copy: Path, ranks: Sequence[int]) -> None:
    for rank in ranks:
        read_part(copy / part_file(rank))


def _size(copy: Path, rank: int) -> int:
    path = copy / rank_file(rank)
    return path.stat().st_size if path.exists() else 0


def _room(copy: Path, rank: int, part_bytes: int, file_bytes: int) -> Tensor:
    if part_bytes > MOST_PART_BYTES:
        raise CheckpointError(f"the part of rank {rank} has {part_bytes} bytes")
    copy.mkdir(exist_ok=True)
    if not file_bytes:
        return torch.empty(0, dtype=torch.uint8)
    (copy / rank_file(rank)).unlink(missing_ok=True)
    return torch.frombuffer(allocate(copy / rank_file(rank), file_bytes), dtype=torch.uint8)


def _file(copy: Path, rank: int) -> Tensor:
    path = copy / rank_file(rank)
    if not path.exists():
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
