"""Measurement of each rank's own work, which shows a slow rank: the whole step takes equally long on all of them.

Own work is the forward and backward passes, the update, and the wait for the rank's own data, without the waits for
other ranks in between (parallel/phase_clock.py). Each rank keeps the times of its last steps; the log line gathers
their medians to rank 0, which compares them (rank_times.py).
"""

from __future__ import annotations

import math
import socket
import statistics
from collections import deque
from collections.abc import Sequence

from megatron.config.options import Config
from megatron.observability.rank_stats import gather_numbers
from megatron.observability.rank_times import OWN_PHASES, RankPlace, RankTimes, StragglerStats, straggler_stats
from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import WAIT
from megatron.planning.pipeline import stage_work

WINDOW = 16
"""Steps whose median is compared, and first steps that a rank is later compared with."""
WARM_UP = 1
"""First steps that are not counted: they allocate and compile."""
COLUMNS = (*OWN_PHASES, WAIT, "step")


class Straggler:
    """Measures this rank's training steps once it is created. Collective."""

    def __init__(self, ctx: ParallelContext, config: Config, num_trained: int):
        """`num_trained`: trained parameters that this rank updates."""
        self._ctx = ctx
        self._times: deque[list[float]] = deque(maxlen=WINDOW)
        self._positions: deque[int] = deque(maxlen=WINDOW)
        self._earlier: list[float] | None = None
        self._left_out = WARM_UP
        ctx.clock.start(ctx.device)
        own = (socket.gethostname(), str(ctx.device), ctx.stage, ctx.grad_rank, num_trained)
        flops = stage_work(config)
        self._places = [
            RankPlace(rank, host, device, stage, replica, (*flops[stage], float(trained), 0.0))
            for rank, (host, device, stage, replica, trained) in enumerate(ctx.gather_objects(own))
        ]

    def count_step(self, num_positions: int) -> None:
        """Count a step that the clock has measured; `num_positions`: of the data that this rank has read for it."""
        self._positions.append(num_positions)

    def read(self) -> StragglerStats | None:
        """Return the statistics over all ranks' last steps on rank 0; None elsewhere, and before the second step.

        Collective over the host's network. The device must have ended the last step.
        """
        for step in self._ctx.clock.read():
            if self._left_out:
                self._left_out -= 1
                continue
            self._times.append([step.get(name, 0.0) for name in COLUMNS[:-1]] + [sum(step.values())])
            if self._earlier is None and len(self._times) == WINDOW:
                self._earlier = _medians(self._times)
        unknown = [math.nan] * len(COLUMNS)
        recent = _medians(self._times) if self._times else unknown
        earlier = unknown if self._earlier is None else self._earlier
        mine = [len(self._times), sum(self._positions), *recent, *earlier]
        table = gather_numbers(mine, self._ctx)
        if not table or not self._times:
            return None
        return straggler_stats([_of_row(place, row) for place, row in zip(self._places, table, strict=True)])


def _medians(times: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _of_row(place: RankPlace, row: Sequence[float]) -> RankTimes:
    num_steps, positions, *times = row
    recent, earlier = times[: len(COLUMNS)], times[len(COLUMNS) :]
    own = slice(len(OWN_PHASES))
    return RankTimes(
        place,
        tuple(recent[own]),
        None if math.isnan(earlier[0]) else tuple(earlier[own]),
        recent[COLUMNS.index(WAIT)],
        recent[-1],
        int(num_steps),
        positions,
    )
