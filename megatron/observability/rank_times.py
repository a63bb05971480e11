"""Numbers over the ranks: minimum, mean and maximum of each, and the slow ranks among their own times of a step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.options.config import Config
from megatron.parallel.phase_clock import BACKWARD, DATA, FORWARD
from megatron.plan.pipeline import stage_work
from megatron.resilience.rank_record import OWN_PHASES, RankPlace, RankRecord, Times
from megatron.runtime.commands import first_of

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

    # on the host: counts and seconds of long runs need more digits than float32 has
    numbers = torch.tensor(mine, dtype=torch.float64)
    if ctx.world_size == 1:
        return [numbers.tolist()]
    import torch.distributed as dist

    if ctx.rank != 0:
        dist.gather(numbers, dst=0, group=ctx.control_group)
        return []
    gathered = [torch.empty_like(numbers) for _ in range(ctx.world_size)]
    dist.gather(numbers, gathered, dst=0, group=ctx.control_group)
    return torch.stack(gathered).tolist()  # type: ignore[no-any-return]


def gather_stats(mine: Mapping[str, float], ctx: ParallelContext) -> dict[str, RankStats]:
    """Return the statistics of each key on rank 0, and {} on the others. NaN: this rank has no such number.

    Every rank passes the same keys in the same order. A key that no rank has a number for is left out. Collective over
    the host's network: it does not wait for a device.
    """
    table = gather_numbers(list(mine.values()), ctx)
    stats: dict[str, RankStats] = {}
    if not table:
        return stats
    for key, column in zip(mine, zip(*table, strict=True), strict=True):
        # a stage may lack a timer that others have
        had = [(value, rank) for rank, value in enumerate(column) if not math.isnan(value)]
        if had:
            most, holder = max(had, key=lambda each: each[0])
            values = [value for value, _ in had]
            stats[key] = RankStats(min(values), sum(values) / len(values), most, holder)
    return stats


# Times of the ranks' own work, and the search for the rank that holds up the others.
#
# A rank is compared with the other ranks of its pipeline stage, which have the same work; where it is its stage alone,
# with the other stages by the planned FLOPs; and with its own earlier steps, divided by how the others' times have
# changed since. It is named where it takes much longer than expected, and that delays the step.

MIN_STEPS = 4
"""Steps from which on a rank may be named."""
SLOWER = 1.5
"""Own time divided by the expected one, above which a rank is named."""
SLOWER_THAN_PLAN = 2.0
"""The same against the planned FLOPs: stages of equal FLOPs are not equally fast."""
LEAST_DELAY = 0.1
"""Least delay that is named, as a share of the step."""
SHOWN = 4


class Slowness(NamedTuple):
    """Own time of a rank against the one expected of it."""

    place: RankPlace
    ratio: float
    excess_s: float
    phase: str
    """Phase with the largest excess, and its excess."""
    phase_excess_s: float
    basis: str
    """Description of what the time was compared with."""
    is_straggler: bool

    def __str__(self) -> str:
        more = f"{self.phase_excess_s * 1000:+.1f} ms a step"
        return f"{self.place}: {self.phase} {more}, own time {self.ratio:.2f} x {self.basis}"


@dataclasses.dataclass(frozen=True)
class StragglerStats:
    """Seconds a step over all ranks, and the rank that is the slowest for its work."""

    own_time_min_s: float
    own_time_median_s: float
    own_time_max_s: float
    slowest_rank: int
    slowest_host: str
    slowest_ratio: float
    """Its own time divided by the expected one. own_time_max_s may be of another stage, which has more work."""
    slowest_phase: str
    data_wait_max_s: float
    data_wait_rank: int
    data_wait_host: str
    straggler_ranks: tuple[int, ...]
    stragglers: str
    """Text that names the stragglers, their phases and delays; empty: there are none."""

    def __str__(self) -> str:
        low, median, high = (
            f"{seconds * 1000:.1f}" for seconds in (self.own_time_min_s, self.own_time_median_s, self.own_time_max_s)
        )
        text = (
            f"own time (ms): min {low}, median {median}, max {high}"
            f" | slowest: rank {self.slowest_rank} on {self.slowest_host}, {self.slowest_ratio:.2f} x as expected"
            f" | longest wait for data (ms): {self.data_wait_max_s * 1000:.1f} on rank {self.data_wait_rank}"
        )
        if self.stragglers:
            text += f" | straggler: {self.stragglers}"
        return text


def straggler_stats(times: Sequence[RankRecord]) -> StragglerStats:
    """Return the statistics of all ranks' times, given in order of rank."""
    times = _with_equal_data(times)
    found = [slowness(one, [other for other in times if other is not one]) for one in times]
    # a straggler first, even where another rank has a larger ratio that delays nothing
    slowest = max(found, key=lambda each: (each.is_straggler, each.ratio))
    stragglers = sorted((each for each in found if each.is_straggler), key=lambda each: -each.excess_s)
    own = [sum(each.own) for each in times]
    data = OWN_PHASES.index(DATA)
    waiting = max(times, key=lambda each: each.own[data])
    return StragglerStats(
        own_time_min_s=min(own),
        own_time_median_s=statistics.median(own),
        own_time_max_s=max(own),
        slowest_rank=slowest.place.rank,
        slowest_host=slowest.place.host,
        slowest_ratio=slowest.ratio,
        slowest_phase=slowest.phase,
        data_wait_max_s=waiting.own[data],
        data_wait_rank=waiting.place.rank,
        data_wait_host=waiting.place.host,
        straggler_ranks=tuple(each.place.rank for each in stragglers),
        stragglers=first_of([str(each) for each in stragglers], SHOWN, separator="; "),
    )


# Median against median. A rank that is its stage alone is compared with the others' FLOPs and with its own past; a
# fraction of the work is not expected to take a fraction of the time, which small models contradict.
def slowness(one: RankRecord, others: Sequence[RankRecord]) -> Slowness:
    """Return a rank's own time against that expected of it, in the way in which it is the slowest."""
    # a single rank has nothing to be compared with
    if not others:
        return _against(one, one.own, "itself", SLOWER)
    peers = [other for other in others if other.place.stage == one.place.stage]
    if peers:
        # peers without the rank itself: of two ranks, a median with it would hide half of its delay
        candidates = [_against(one, _planned(one, peers), "the other ranks of its stage", SLOWER)]
    else:
        candidates = [_against(one, _planned(one, others), "the other stages by their FLOPs", SLOWER_THAN_PLAN)]
    # the others may have become slower too, as by longer rows: only what is beyond that counts
    changes = [sum(other.own) / sum(other.earlier) for other in others if other.earlier and sum(other.earlier) > 0]
    if one.earlier is not None and len(changes) == len(others):
        change = statistics.median(changes)
        candidates.append(_against(one, tuple(change * s for s in one.earlier), "its earlier steps", SLOWER))
    return max(candidates, key=lambda each: (each.is_straggler, each.ratio))


def _against(one: RankRecord, expected: Times, basis: str, limit: float) -> Slowness:
    total_s, expected_s = sum(one.own), sum(expected)
    excess_s = total_s - expected_s
    phase_excess_s, phase = max((s - e, name) for s, e, name in zip(one.own, expected, OWN_PHASES, strict=True))
    ratio = 1.0
    if expected_s > 0:
        ratio = total_s / expected_s
    # a large ratio of a short phase delays no step
    is_straggler = one.num_steps >= MIN_STEPS and ratio > limit and excess_s > LEAST_DELAY * one.step_s
    return Slowness(one.place, ratio, excess_s, phase, phase_excess_s, basis, is_straggler)


def _medians(times: Sequence[RankRecord], of: Callable[[RankRecord], Times]) -> Times:
    return tuple(statistics.median(values) for values in zip(*map(of, times), strict=True))


def _planned(one: RankRecord, others: Sequence[RankRecord]) -> Times:
    """Return the times that the plan expects from those of the other stages.

    Work that is a fraction of the others' is not expected to take that fraction: small models are bound by the number
    of operators, not by their size.
    """

    def scaled(other: RankRecord) -> Times:
        times = []
        for mine, theirs, seconds in zip(one.work, other.work, other.own, strict=True):
            # a phase without counted work, such as data, is expected to take as long
            share = mine / theirs if theirs else 1.0
            times.append(seconds * max(1.0, share))
        return tuple(times)

    return _medians(others, scaled)


def _with_equal_data(times: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the times of passes as if all data-parallel ranks had as many positions: packing makes rows unequal."""
    positions: dict[int, float] = {}
    for each in times:
        positions[each.place.replica] = max(each.positions, positions.get(each.place.replica, 0.0))
    mean = statistics.mean(positions.values())
    # a rank that read nothing in these steps has nothing to be scaled by
    if not all(positions.values()):
        return list(times)

    def scaled(each: RankRecord) -> RankRecord:
        shares = dict.fromkeys((FORWARD, BACKWARD), mean / positions[each.place.replica])
        own = tuple(s * shares.get(phase, 1.0) for s, phase in zip(each.own, OWN_PHASES, strict=True))
        return dataclasses.replace(each, own=own)

    return [scaled(each) for each in times]


# ---------------------------------------------------------------------------------------------------------------------
# This rank's own work, which shows a slow rank: the whole step takes equally long on all of them. It is the forward and
# backward passes, the update, and the wait for the rank's own data, without the waits for other ranks in between
# (parallel/phase_clock.py).

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
        # by its places of a row: under a window the first ones see fewer keys
        flops = stage_work(config, ctx.places(config.training.seq_length))[ctx.stage]
        # what does not change travels once; a log line then gathers numbers alone
        self._blanks = [
            RankRecord(place, work=(*work, 0.0))
            for place, work in ctx.gather_objects((RankPlace.of(ctx), (*flops, float(num_trained))))
        ]

    def count_step(self, num_positions: int) -> None:
        """Count a step that the clock has measured; `num_positions`: of the data that this rank has read for it."""
        self._positions.append(num_positions)

    def read(self, clocked: Sequence[Mapping[str, float]]) -> StragglerStats | None:
        """Return the statistics over all ranks' last steps on rank 0; None elsewhere, and before the second step.

        `clocked`: phases of each step since the last call, as the clock has read them. Collective over the host's
        network.
        """
        for step in clocked:
            if self._left_out:
                self._left_out -= 1
                continue
            self._times.append([step.get(name, 0.0) for name in OWN_PHASES] + [sum(step.values())])
            # kept for good: a rank that becomes slower and slower is compared with its first steps
            if self._earlier is None and len(self._times) == WINDOW:
                self._earlier = _median_times(self._times)
        # every rank sends as many numbers, known or not
        unknown = [math.nan] * NUM_TIMES
        recent, earlier = _median_times(self._times) or unknown, self._earlier or unknown
        mine = [len(self._times), sum(self._positions), *recent, *earlier]
        table = gather_numbers(mine, self._ctx)
        if not table or not self._times:
            return None
        return straggler_stats([_of_row(blank, row) for blank, row in zip(self._blanks, table, strict=True)])


def _median_times(times: Sequence[Sequence[float]]) -> list[float]:
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
