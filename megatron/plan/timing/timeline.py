"""Times of the passes of a step: of devices of their own, and of ranks that share the cores of a host. No torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.plan.pipeline_schedules import PassCosts, PipelineSchedule, ScheduledPass, Timed

COMPARED = 32
"""Microbatches over which the time of one in the middle of a step is found, and a little more."""
Slowdown = Callable[[int], float]
"""Factor by which a pass takes longer while so many ranks of its host compute."""


@dataclass(frozen=True)
class Simulated:
    """Times of the passes of a step, of which the middle may be left out: there every p microbatches take as long."""

    schedule: PipelineSchedule
    """The one that was simulated."""
    costs: PassCosts
    ends: list[float]
    """End of each of its `passes`."""
    left_out: float = 0.0
    """Seconds of the microbatches that were not simulated."""
    own_starts: list[float] | None = None
    """Start of each of its passes, where they take longer than they cost."""

    @functools.cached_property
    def starts(self) -> list[float]:
        if self.own_starts is not None:
            return self.own_starts
        passes = zip(self.schedule.passes(), self.ends, strict=True)
        return [end - self.costs(each.stage, each.action.chunk, each.action.kind) for each, end in passes]

    def last(self, stage: int, chunk: int) -> tuple[float, float]:
        """Return start and end of the last pass of a chunk: it completes the gradients."""
        number = _last_passes(self.schedule)[stage, chunk]
        if self.own_starts is not None:
            return self.own_starts[number], self.ends[number]
        kind = self.schedule.passes()[number].action.kind
        return self.ends[number] - self.costs(stage, chunk, kind), self.ends[number]

    def stage_end(self, stage: int) -> float:
        """Return the end of the last pass of a stage, of all microbatches."""
        chunks = range(self.schedule.num_chunks)
        return max(self.last(stage, chunk)[1] for chunk in chunks) + self.left_out

    @property
    def seconds(self) -> float:
        return max(self.ends) + self.left_out

    def timeline(self) -> tuple[Timed, ...]:
        """Return the passes that were simulated."""
        passes = self.schedule.passes()
        times = zip(passes, self.starts, self.ends, strict=True)
        return tuple(Timed(each.stage, each.action, start, end) for each, start, end in times)


def simulate(
    schedule: PipelineSchedule,
    costs: PassCosts,
    message: float,
    hosts: Sequence[dict[int, int]] = (),
    slowdown: Slowdown | None = None,
) -> Simulated:
    """Return the times of a schedule's passes.

    `message`: seconds from the end of a pass until what it sends is on another stage. With `slowdown`, ranks share
    cores: `hosts` has for each stage the number of its ranks on each host.
    """

    def run(shorter: PipelineSchedule) -> Simulated:
        if slowdown is None:
            return Simulated(shorter, costs, shorter.ends(costs, message))
        starts, ends = _SharedCores(shorter, costs, message, hosts, slowdown).run()
        return Simulated(shorter, costs, ends, own_starts=starts)

    p, m = schedule.num_stages, schedule.num_microbatches
    few, rounds = 3 * p + m % p, -(-COMPARED // p)
    if m <= few + rounds * p:
        return run(schedule)
    # beyond the beginning rounds of p microbatches take as long as those before, though not each one alone
    first, second = (run(schedule._replace(num_microbatches=number)) for number in (few, few + rounds * p))
    of_rounds = max(second.ends) - max(first.ends)
    return dataclasses.replace(second, left_out=(m - few - rounds * p) / (rounds * p) * of_rounds)


@functools.lru_cache(maxsize=64)
def _last_passes(schedule: PipelineSchedule) -> dict[tuple[int, int], int]:
    """Return the number of the last pass of each stage and chunk."""
    return {(each.stage, each.action.chunk): number for number, each in enumerate(schedule.passes())}


class _SharedCores:
    """Stages whose ranks share cores: a pass advances by 1 / slowdown of the ranks that compute beside it.

    A stage that waits for another takes no time of the cores.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        costs: PassCosts,
        message: float,
        hosts: Sequence[dict[int, int]],
        slowdown: Slowdown,
    ) -> None:
        self._passes, self._costs, self._message = schedule.passes(), costs, message
        self._hosts, self._slowdown = hosts, slowdown
        self.starts = [0.0] * len(self._passes)
        self.ends = [math.inf] * len(self._passes)
        self._left: list[list[int]] = [[] for _ in range(schedule.num_stages)]
        """Passes that each stage has not started, the next one last."""
        for number in reversed(range(len(self._passes))):
            self._left[self._passes[number].stage].append(number)
        self._running: dict[int, tuple[int, float]] = {}
        """The pass that a stage computes, and what is left of it."""
        self._now = 0.0

    def run(self) -> tuple[list[float], list[float]]:
        """Return starts and ends of the passes."""
        while any(self._left) or self._running:
            arrivals = list(self._start())
            slow = self._slow()
            ends = (self._now + rest * slow[stage] for stage, (_, rest) in self._running.items())
            self._advance(min([*arrivals, *ends]), slow)
        return self.starts, self.ends

    def _start(self) -> Iterator[float]:
        """Start what has all that it needs; yield when the next message of each other stage comes."""
        for stage, numbers in enumerate(self._left):
            if stage in self._running or not numbers:
                continue
            arrived = self._arrival(self._passes[numbers[-1]])
            if arrived <= self._now:
                number = numbers.pop()
                action = self._passes[number].action
                self._running[stage] = number, self._costs(stage, action.chunk, action.kind)
                self.starts[number] = self._now
            elif arrived < math.inf:
                yield arrived

    def _arrival(self, each: ScheduledPass) -> float:
        if each.needed < 0:
            return 0.0
        return self.ends[each.needed] + (self._message if each.travels else 0.0)

    def _slow(self) -> dict[int, float]:
        """Return how many times longer the pass of each stage takes now."""
        busy: Counter[int] = Counter()
        for stage in self._running:
            busy.update(self._hosts[stage])
        return {stage: max(self._slowdown(busy[host]) for host in self._hosts[stage]) for stage in self._running}

    def _advance(self, until: float, slow: dict[int, float]) -> None:
        for stage, (number, rest) in list(self._running.items()):
            rest -= (until - self._now) / slow[stage]
            # what rounding leaves is nothing
            if rest * slow[stage] <= 1e-12 * max(1.0, until):
                self.ends[number] = until
                del self._running[stage]
            else:
                self._running[stage] = number, rest
        self._now = until
