"""A number that each rank has, as all of them together: its least, its mean, its most, and who has that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class RankStats:
    """Over the ranks that have the number."""

    min: float
    mean: float
    max: float
    max_rank: int
    """The first that has the most."""


def gather_stats(mine: Mapping[str, float], ctx: ParallelContext) -> dict[str, RankStats]:
    """What all ranks have under each key, on rank 0; nothing on the others. NaN: this rank has no such number.

    Collective, over the host's network: it waits for no device. Every rank passes the same keys in the same order. A
    key that no rank has a number for is left out.
    """
    import torch

    numbers = torch.tensor(list(mine.values()), dtype=torch.float64)
    gathered = [numbers]
    if ctx.world_size > 1:
        import torch.distributed as dist

        gathered = [torch.empty_like(numbers) for _ in range(ctx.world_size)] if ctx.rank == 0 else []
        dist.gather(numbers, gathered or None, dst=0, group=ctx.control_group)
    if ctx.rank != 0:
        return {}
    table = torch.stack(gathered).tolist()
    found = {}
    for column, key in enumerate(mine):
        had = [(row[column], rank) for rank, row in enumerate(table) if not math.isnan(row[column])]
        if had:
            most, holder = max(had, key=lambda each: each[0])
            values = [value for value, _ in had]
            found[key] = RankStats(min(values), sum(values) / len(values), most, holder)
    return found
