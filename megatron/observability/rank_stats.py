"""Minimum, mean and maximum over the ranks of a number that each of them has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class RankStats:
    """Statistics over the ranks that have the number."""

    min: float
    mean: float
    max: float
    max_rank: int
    """First rank that has the maximum."""


def gather_numbers(mine: Sequence[float], ctx: ParallelContext) -> list[list[float]]:
    """Return every rank's numbers, in order of rank, on rank 0, and [] on the others.

    Every rank passes as many. Collective over the host's network: it does not wait for a device.
    """
    import torch

    numbers = torch.tensor(mine, dtype=torch.float64)
    gathered = [numbers]
    if ctx.world_size > 1:
        import torch.distributed as dist

        gathered = [torch.empty_like(numbers) for _ in range(ctx.world_size)] if ctx.rank == 0 else []
        dist.gather(numbers, gathered or None, dst=0, group=ctx.control_group)
    return torch.stack(gathered).tolist() if ctx.rank == 0 else []


def gather_stats(mine: Mapping[str, float], ctx: ParallelContext) -> dict[str, RankStats]:
    """Return the statistics of each key on rank 0, and {} on the others. NaN: this rank has no such number.

    Every rank passes the same keys in the same order. A key that no rank has a number for is left out. Collective over
    the host's network: it does not wait for a device.
    """
    table = gather_numbers(list(mine.values()), ctx)
    found = {}
    for column, key in enumerate(mine if table else ()):
        had = [(row[column], rank) for rank, row in enumerate(table) if not math.isnan(row[column])]
        if had:
            most, holder = max(had, key=lambda each: each[0])
            values = [value for value, _ in had]
            found[key] = RankStats(min(values), sum(values) / len(values), most, holder)
    return found
