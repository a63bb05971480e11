"""Steps that take much longer than predicted, and the part and the rank that they lose the time in.

A step is compared with the prediction times the usual ratio of this run, which is the median of the ratios of some
steps; a prediction that is off by a factor is said once. All ranks measure their own parts of each step; those of a
slow one are gathered when the log line is written, and at no other time, so that no step waits.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.observability.prediction import Prediction, detected_machine, predict
from megatron.observability.rank_times import gather_numbers
from megatron.parallel.phase_clock import BACKWARD, DATA, FORWARD, OPTIMIZER, WAIT
from megatron.plan.campaign.failures import duration
from megatron.plan.timing.measured_parts import PASSES, PartSeconds, measurable
from megatron.runtime import accelerator
from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    from megatron.options.config import Config
    from megatron.parallel.context import ParallelContext

SLOW = 1.3
"""Time of a step divided by the usual one above which the step is slow; and that off which a prediction is."""
LEAST_EXCESS_S = 0.02
"""Least excess that is named."""
WARM_UP = 3
"""First steps that are not counted: they allocate and compile."""
WINDOW = 16
"""Steps whose median is the usual time."""
APART = 100
"""Least number of steps between two warnings."""
DISTURBS = 0.05
"""Pause, as a share of a step, after which a step is not counted: a validation or a save leaves caches behind."""
NOTHING, BASELINE = -1, -2
"""Decisions of rank 0 at a log line, beside the index of a slow step."""
SHOWN_SHARE = 0.02
"""Share of a step below which a part is not said."""
EXCHANGE = "exchange and wait"
PARTS = ("compute", EXCHANGE, "data", "the host beside these")


@dataclass
class _Step:
    iteration: int
    seconds: float
    predicted_s: float
    """On rank 0; 1 elsewhere."""
    num_microbatches: int
    is_counted: bool
    parts: tuple[float, ...] = (0.0,) * len(PARTS)
    """Seconds of PARTS."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.predicted_s


class _Excess(NamedTuple):
    """Time of a part beyond the usual, and the rank that has it."""

    seconds: float
    rank: int

    @property
    def milliseconds(self) -> int:
        return round(self.seconds * 1e3)

    def __str__(self) -> str:
        return f"{self.milliseconds:+d} ms"


class SlowSteps:
    """Compares this rank's steps with their prediction. Collective at log lines.

    `prediction`: on rank 0; None elsewhere. `divides_passes`: the clock sees the exchanges within passes.
    """

    def __init__(self, ctx: ParallelContext, prediction: Prediction | None, *, divides_passes: bool) -> None:
        self._ctx, self._prediction, self._divides_passes = ctx, prediction, divides_passes
        self.is_busy: Callable[[int], bool] = lambda iteration: False
        """Returns whether a save in the background, or a profile, slows the step."""
        self._steps: list[_Step] = []
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._parts: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        """This rank's parts of counted steps, for a microbatch: other ranks know no prediction."""
        self._usual: float | None = None
        """Usual ratio of a step to its prediction; None: not known yet."""
        self._last_s = 0.0
        self._left_out = WARM_UP
        self._said_at = -APART
        self._is_disturbed = False
        self._mark_s = time.perf_counter()

    # Steps

    def restart(self) -> None:
        """Begin to time a step here."""
        self._mark_s = time.perf_counter()

    def drop(self) -> None:
        """Forget the steps since the last log line, which a rollback has undone."""
        self._steps.clear()
        self._is_disturbed = True

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training."""
        self._mark_s += seconds
        self._is_disturbed |= seconds > DISTURBS * self._last_s

    def add(self, iteration: int, global_batch_size: int, consumed_samples: int, num_microbatches: int) -> None:
        """Count a step that has ended; `consumed_samples`: those before it."""
        now_s = time.perf_counter()
        self._last_s, self._mark_s = now_s - self._mark_s, now_s
        predicted_s = 1.0
        if self._prediction is not None:
            predicted_s = self._prediction.of(global_batch_size, consumed_samples, num_microbatches).seconds
        is_counted = not (self._left_out or self._is_disturbed or self.is_busy(iteration))
        self._left_out, self._is_disturbed = max(0, self._left_out - 1), False
        self._steps.append(_Step(iteration, self._last_s, predicted_s, num_microbatches, is_counted))

    # Log lines

    @property
    def predicted_s(self) -> float | None:
        """Mean prediction for the steps since the last log line; None on other ranks than 0."""
        if self._prediction is None or not self._steps:
            return None
        return statistics.mean(step.predicted_s for step in self._steps)

    def close(self, clocked: Sequence[Mapping[str, float]]) -> list[str]:
        """Return what is to be said of the steps since the last log line, on rank 0. Collective.

        `clocked`: the times that the clock has measured of each of them.
        """
        steps, self._steps = self._steps, []
        for step, phases in zip(reversed(steps), reversed(clocked), strict=False):
            parts = astuple(parts_of(phases))
            step.parts = (*parts, step.seconds - sum(parts))
        decision = self._ctx.broadcast(self._decide(steps))
        lines: list[str] = []
        if decision >= 0:
            lines = self._name(steps, decision)
        self._follow(steps)
        if decision == BASELINE:
            lines = self._compare_baseline()
        return lines

    def mean_parts(self, clocked: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the mean parts of steps by their phases, for the row of metrics.jsonl; {} without a step."""
        if not clocked:
            return {}
        parts = [vars(parts_of(phases)) for phases in clocked]
        means = {name: statistics.mean(each[name] for each in parts) for name in parts[0]}
        if not self._divides_passes:
            means = {PASSES: means.pop("compute"), **means}
        return means

    def _decide(self, steps: Sequence[_Step]) -> int:
        """Return rank 0's decision, which all ranks follow."""
        if self._prediction is None or not self._prediction.is_steady or not steps:
            return NOTHING
        if self._usual is None:
            counted = [step.ratio for step in steps if step.is_counted]
            # said once, whatever it is: later steps are compared with it
            return BASELINE if len(self._ratios) + len(counted) >= WINDOW else NOTHING
        slowest = max(range(len(steps)), key=lambda index: steps[index].ratio if steps[index].is_counted else 0.0)
        step = steps[slowest]
        if step.iteration - self._said_at < APART or not self._is_slow(step):
            return NOTHING
        return slowest

    def _is_slow(self, step: _Step) -> bool:
        assert self._usual is not None
        usual_s = self._usual * step.predicted_s
        return step.is_counted and step.seconds > max(SLOW * usual_s, usual_s + LEAST_EXCESS_S)

    def _follow(self, steps: Sequence[_Step]) -> None:
        for step in steps:
            if step.is_counted:
                self._ratios.append(step.ratio)
                self._parts.append(tuple(part / step.num_microbatches for part in step.parts))
        if len(self._ratios) == WINDOW:
            median = statistics.median(self._ratios)
            # the best so far: what becomes slow for good is not usual
            self._usual = median if self._usual is None else min(median, self._usual)

    # What is said

    def _usual_parts(self, num_microbatches: int) -> list[float]:
        """Return this rank's usual parts of a step of so many microbatches."""
        if not self._parts:
            return [0.0] * len(PARTS)
        return [num_microbatches * statistics.median(values) for values in zip(*self._parts, strict=True)]

    def _name(self, steps: Sequence[_Step], index: int) -> list[str]:
        """Return the warning of a slow step: the part with the largest excess, and its rank. Collective."""
        step = steps[index]
        self._said_at = step.iteration
        usual = self._usual_parts(step.num_microbatches)
        rows = gather_numbers([part - other for part, other in zip(step.parts, usual, strict=True)], self._ctx)
        if not rows:
            return []
        assert self._usual is not None
        usual_s = self._usual * step.predicted_s
        excesses = [_excess(number, [row[number] for row in rows]) for number in range(len(PARTS))]
        first, *others = sorted(range(len(PARTS)), key=lambda number: -excesses[number].milliseconds)
        at = "" if PARTS[first] == EXCHANGE else f" on rank {excesses[first].rank}"
        more = ", ".join(f"{self._title(number)} {excesses[number]}" for number in others)
        num_slow = sum(self._is_slow(each) for each in steps)
        return [
            f"WARNING: step {step.iteration} took {duration(step.seconds)}, {step.seconds / usual_s:.2f} x the usual "
            f"{duration(usual_s)} (predicted: {duration(step.predicted_s)}): {self._title(first)} "
            f"{excesses[first]}{at}; {more}; {num_slow} of the last {len(steps)} steps were slow"
        ]

    def _title(self, number: int) -> str:
        if number == 0 and not self._divides_passes:
            return "compute with the exchanges within passes"
        return PARTS[number]

    def _compare_baseline(self) -> list[str]:
        """Return the line on a prediction that is off, by the parts of the rank that computes longest. Collective."""
        num_microbatches = 1 if self._prediction is None else self._prediction.first.num_microbatches
        rows = gather_numbers(self._usual_parts(num_microbatches), self._ctx)
        if not rows or self._prediction is None or self._usual is None or 1 / SLOW < self._usual < SLOW:
            return []
        step = self._prediction.first
        measured = max(rows, key=lambda row: row[0])
        predicted = (*astuple(measurable(step.parts, divides_passes=self._divides_passes)), 0.0)
        parts = ", ".join(
            f"{self._title(number)} {duration(measured[number])} (predicted: {duration(predicted[number])})"
            for number in range(len(PARTS))
            if max(measured[number], predicted[number]) > SHOWN_SHARE * step.seconds
        )
        return [
            f"steps take {self._usual:.2f} x the predicted time: {parts}, on the rank that computes longest; later "
            "steps are compared with these"
        ]


def _excess(number: int, by_rank: Sequence[float]) -> _Excess:
    """Return the excess of a part over all ranks."""
    # all wait for the rank that is held up, which itself waits least: for what all pay
    worst = min(by_rank) if PARTS[number] == EXCHANGE else max(by_rank)
    return _Excess(worst, by_rank.index(worst))


def divides_passes(config: Config, ctx: ParallelContext) -> bool:
    """Return whether the clock is to see the exchanges within passes.

    On a host's clock they cost less than they show. On a device each is two events, and compiled layers hide them.
    """
    if config.logging.log_straggler:
        return True
    return not device_of(ctx.device.type).waits_are_costly and not config.training.torch_compile


def parts_of(phases: Mapping[str, float]) -> PartSeconds:
    """Return the parts of a step by the phases of the clock."""
    compute = sum(phases.get(name, 0.0) for name in (FORWARD, BACKWARD, OPTIMIZER))
    return PartSeconds(compute, phases.get(WAIT, 0.0), phases.get(DATA, 0.0))


def watch_steps(config: Config, ctx: ParallelContext, say: Callable[[str], None]) -> SlowSteps | None:
    """Predict the steps of a run, say so, and return what compares them; None: nothing is predicted. Collective."""
    machine = config.logging.rates
    if machine is None:
        machine = detected_machine(accelerator.current(), accelerator.current().chip_name())
    # of rank 0: hosts may have different chips, and files
    if not ctx.broadcast(machine is not None):
        return None
    hosts = ctx.gather_objects(socket.gethostname())
    prediction = None
    if ctx.rank == 0 and machine is not None:
        prediction = predict(config, list(Counter(hosts).values()), machine, say)
    if not ctx.broadcast(prediction is not None):
        return None
    divides = divides_passes(config, ctx)
    # of log_straggler the clock runs, and divides the passes
    if not config.logging.log_straggler:
        ctx.state.clock.start(ctx.device, divides_passes=divides)
    return SlowSteps(ctx, prediction, divides_passes=divides)
