"""Parts of matrices to the ranks that orthogonalise them, and parts of the results back: one exchange each way.

A rank's optimizer holds a stretch of a matrix: its tensor-parallel block, or what ZeRO's flat partition cuts out of it.
Each matrix has one owner (plan/matrices.py). What several ranks hold alike, data-parallel ones without ZeRO and
replicas, one of them sends, and all get back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import wait_for
from megatron.parallel.phase_clock import WAIT
from megatron.plan.matrices import Holders, Matrix


@dataclass(frozen=True)
class MatrixPart:
    """A stretch of a matrix that some rank holds."""

    index: int
    """Place of the matrix in the rank's list."""
    rank: int
    cut: int
    """Rank on the axis that cuts the matrix: which of its blocks the stretch is of."""
    start: int
    stop: int
    """[start, stop) of the flattened block."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


def gather_parts(
    matrices: Sequence[Matrix], stretches: Sequence[tuple[int, int]], ctx: ParallelContext, group: Any
) -> list[list[MatrixPart]]:
    """Return for each matrix the parts that ranks hold, in order of rank; `stretches`: this rank's, of its blocks.

    Collective over the ranks of the stage, `group`. Each of them lists as many matrices, of experts its own.
    """
    holders = Holders(ctx)
    own = torch.tensor(stretches, dtype=torch.int32, device=ctx.device).view(-1, 2)
    tables = [own]
    if group is not None:
        tables = [torch.empty_like(own) for _ in holders.stage]
        dist.all_gather(tables, own, group=group)
    by_rank = dict(zip(holders.stage, (table.tolist() for table in tables), strict=True))
    found = []
    for index, matrix in enumerate(matrices):
        parts = []
        for rank in holders.of(matrix):
            start, stop = by_rank[rank][index]
            if stop > start:
                cut, _ = holders.places[rank].cut_of(matrix.shard)
                parts.append(MatrixPart(index, rank, cut, start, stop))
        found.append(parts)
    return found


class Arrival:
    """Numbers on their way from other ranks."""

    def __init__(self, buffer: Tensor, work: Any, ctx: ParallelContext) -> None:
        self._buffer: Tensor | None = buffer
        self._work, self._ctx = work, ctx

    def take(self) -> Tensor:
        """Wait for them, and give their memory to the caller. Once."""
        if self._work is not None:
            with self._ctx.state.clock.phase(WAIT):
                wait_for([self._work])
        buffer, self._buffer, self._work = self._buffer, None, None
        assert buffer is not None
        return buffer


class _Direction:
    """One direction of the exchange: what a rank sends, and what it gets, each by peer and then by matrix."""

    def __init__(
        self, sent: Sequence[tuple[int, MatrixPart]], received: Sequence[tuple[int, MatrixPart]], ranks: Sequence[int]
    ):
        """`sent`, `received`: parts with the rank that they go to, and that they come from."""
        self.sent, self.splits = _ordered(sent, ranks)
        self.received, self.arrivals = _ordered(received, ranks)

    def start(self, buffer: Tensor, group: Any, ctx: ParallelContext) -> Arrival:
        """Send what lies in the buffer."""
        if group is None:
            return Arrival(buffer, None, ctx)
        arrived = buffer.new_empty(sum(self.arrivals))
        work = dist.all_to_all_single(arrived, buffer, self.arrivals, self.splits, group=group, async_op=True)
        return Arrival(arrived, work, ctx)


def _ordered(
    parts: Sequence[tuple[int, MatrixPart]], ranks: Sequence[int]
) -> tuple[list[tuple[MatrixPart, int]], list[int]]:
    """Return the parts with the first number of each in a buffer, and the numbers for each rank."""
    places = {rank: place for place, rank in enumerate(ranks)}
    ordered = sorted(parts, key=lambda pair: (places[pair[0]], pair[1].index))
    begins = itertools.accumulate((part.numel for _, part in ordered), initial=0)
    splits = [0] * len(ranks)
    for rank, part in ordered:
        splits[places[rank]] += part.numel
    return [(part, begin) for (_, part), begin in zip(ordered, begins, strict=False)], splits


class MatrixExchange:
    """The exchange of some of a rank's matrices: those of the parameter groups that are updated together."""

    def __init__(
        self,
        matrices: Mapping[int, Matrix],
        owners: Sequence[int],
        parts: Sequence[Sequence[MatrixPart]],
        ctx: ParallelContext,
        group: Any,
    ) -> None:
        """`matrices`: by their place in the rank's list, which `owners` and `parts` follow."""
        self._matrices, self._ctx, self._group = matrices, ctx, group
        self.alone: list[int] = []
        """Matrices that this rank alone holds and owns."""
        to_owner: list[tuple[int, MatrixPart]] = []
        gathered: list[tuple[int, MatrixPart]] = []
        to_holder: list[tuple[int, MatrixPart]] = []
        returned: list[tuple[int, MatrixPart]] = []
        for index in matrices:
            owner, held = owners[index], parts[index]
            if [part.rank for part in held] == [ctx.rank] == [owner]:
                self.alone.append(index)
                continue
            sources = _sources(held, owner)
            to_owner += [(owner, part) for part in sources if part.rank == ctx.rank]
            returned += [(owner, part) for part in held if part.rank == ctx.rank]
            if owner == ctx.rank:
                gathered += [(part.rank, part) for part in sources]
                to_holder += [(part.rank, part) for part in held]
        ranks = ctx.ranks_of(ctx.stage)
        self._out = _Direction(to_owner, gathered, ranks)
        self._back = _Direction(to_holder, returned, ranks)
        self._owned, self._results = _by_matrix(self._out.received), _by_matrix(self._back.sent)

    def gather(self, read: Callable[[int], Tensor], dtype: torch.dtype) -> Arrival:
        """Send this rank's parts of matrices, which `read` returns, as `dtype`. Collective over the stage."""
        buffer = torch.empty(sum(self._out.splits), dtype=dtype, device=self._ctx.device)
        for part, begin in self._out.sent:
            buffer.narrow(0, begin, part.numel).copy_(read(part.index))
        return self._out.start(buffer, self._group, self._ctx)

    def spread(
        self, message: Arrival, read: Callable[[int], Tensor], compute: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's parts of what `compute` makes of each matrix, by the matrix's place in the rank's list.

        `message` is the result of `gather`. Collective over the stage. Matrices that are here alone have not travelled:
        `read` returns them.
        """
        arrived = message.take()
        dtype = arrived.dtype
        buffer = arrived.new_empty(sum(self._back.splits))
        for index, parts in self._owned.items():
            result = compute(self._assembled(index, parts, arrived))
            for part, begin in self._results[index]:
                buffer.narrow(0, begin, part.numel).copy_(self._block(index, part, result)[part.start : part.stop])
        del arrived
        back = self._back.start(buffer, self._group, self._ctx)
        for index in self.alone:  # while the others' travel
            whole = read(index).view(self._matrices[index].shape)
            yield index, compute(whole.to(dtype)).reshape(-1)
        returned = back.take()
        for part, begin in self._back.received:
            yield part.index, returned.narrow(0, begin, part.numel)

    def _assembled(self, index: int, parts: Sequence[tuple[MatrixPart, int]], arrived: Tensor) -> Tensor:
        """Return a whole matrix, of the parts that lie in `arrived`."""
        matrix = self._matrices[index]
        size = self._ctx.cut_of(matrix.shard)[1]
        blocks = []
        for cut in range(size):
            own = sorted((part.start, begin, part.numel) for part, begin in parts if part.cut == cut)
            stretches = [arrived.narrow(0, begin, numel) for _, begin, numel in own]
            flat = stretches[0] if len(stretches) == 1 else torch.cat(stretches)
            blocks.append(flat.view(matrix.block(size)))
        if size == 1:
            return blocks[0]
        return torch.cat(blocks, dim=matrix.shard.dim or 0)

    def _block(self, index: int, part: MatrixPart, whole: Tensor) -> Tensor:
        """Return the flattened block that a part is of."""
        matrix = self._matrices[index]
        size = self._ctx.cut_of(matrix.shard)[1]
        return whole.chunk(size, dim=matrix.shard.dim or 0)[part.cut].reshape(-1)


def _by_matrix(parts: Sequence[tuple[MatrixPart, int]]) -> dict[int, list[tuple[MatrixPart, int]]]:
    found: dict[int, list[tuple[MatrixPart, int]]] = {}
    for part, begin in parts:
        found.setdefault(part.index, []).append((part, begin))
    return found


def _sources(held: Sequence[MatrixPart], owner: int) -> list[MatrixPart]:
    """Return the parts that make up the matrix, of copies that nearest to its owner."""
    by_stretch: dict[tuple[int, int, int], list[MatrixPart]] = {}
    for part in held:
        by_stretch.setdefault((part.cut, part.start, part.stop), []).append(part)
    return [min(copies, key=lambda part: (abs(part.rank - owner), part.rank)) for copies in by_stretch.values()]
