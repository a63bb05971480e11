"""Measurement of each rank's own work, which shows a slow rank: the whole step takes equally long on all of them.

Own work is the forward and backward passes, the update, and the wait for the rank's own data, without the waits for
other ranks in between (parallel/phase_clock.py). Each rank keeps the times of its last steps; the log line gathers
their medians to rank 0, which compares them (rank_times.py).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence

from megatron.observability.rank_times import StragglerStats, gather_numbers, straggler_stats
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.plan.pipeline import stage_work
from megatron.resilience.rank_record import OWN_PHASES, RankPlace, RankRecord

WINDOW = 16
"""Steps whose median is compared, and first steps that a rank is later compared with."""
WARM_UP = 1
"""First steps that are not counted: they allocate and compile."""
NUM_TIMES = len(OWN_PHASES) + 1
"""Times of a step that travel: those of OWN_PHASES, and that of all of it."""


class Straggler:
    """Measures this rank's training steps once it is created. Collective."""

    def __init__(self, ctx: ParallelContext, config: Config, num_trained: int):
        """`num_trained`: trained parameters that this rank updates."""
        self._ctx = ctx
        self._times: deque[list[float]] = deque(maxlen=WINDOW)
        self._positions: deque[int] = deque(maxlen=WINDOW)
        self._earlier: list[float] | None = None
        self._left_out = WARM_UP
        # off until here: runs without the line pay nothing for it
        ctx.state.clock.start(ctx.device)
        flops = stage_work(config)
        # what does not change travels once; a log line then gathers numbers alone
        self._blanks = [
            RankRecord(place, work=(*flops[place.stage], float(trained), 0.0))
            for place, trained in ctx.gather_objects((RankPlace.of(ctx), num_trained))
        ]

    def count_step(self, num_positions: int) -> None:
        """Count a step that the clock has measured; `num_positions`: of the data that this rank has read for it."""
        self._positions.append(num_positions)

    def read(self) -> StragglerStats | None:
        """Return the statistics over all ranks' last steps on rank 0; None elsewhere, and before the second step.

        Collective over the host's network. The device must have ended the last step.
        """
        for step in self._ctx.state.clock.read():
            if self._left_out:
                self._left_out -= 1
                continue
            self._times.append([step.get(name, 0.0) for name in OWN_PHASES] + [sum(step.values())])
            # kept for good: a rank that becomes slower and slower is compared with its first steps
            if self._earlier is None and len(self._times) == WINDOW:
                self._earlier = _medians(self._times)
        # every rank sends as many numbers, known or not
        unknown = [math.nan] * NUM_TIMES
        recent, earlier = _medians(self._times) or unknown, self._earlier or unknown
        mine = [len(self._times), sum(self._positions), *recent, *earlier]
        table = gather_numbers(mine, self._ctx)
        if not table or not self._times:
            return None
        return straggler_stats([_of_row(blank, row) for blank, row in zip(self._blanks, table, strict=True)])


def _medians(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each time; nothing without a step."""
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _of_row(blank: RankRecord, row: Sequence[float]) -> RankRecord:
    """Return a rank's record with the numbers that it sent."""
    num_steps, positions, *times = row
    recent, earlier = times[:NUM_TIMES], times[NUM_TIMES:]
    return dataclasses.replace(
        blank,
        own=tuple(recent[:-1]),
        earlier=None if math.isnan(earlier[0]) else tuple(earlier[:-1]),  # not known in the first steps
        step_s=recent[-1],
        num_steps=int(num_steps),
        positions=positions,
    )
