"""Timers of a step's phases (data, forward, backward, communication, optimizer), of saves and of evaluations.

A moment counts for the innermost phase that it is in (parallel/phase_clock.py): a reduction of gradients inside the
backward pass is communication, and is subtracted from the backward pass.

The names are Megatron's. `batch-generator` is the wait for the data, and its transfer to the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.observability.console import TIMER_SUFFIX
from megatron.observability.rank_times import RankStats, gather_stats
from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import DeviceTicks, HostTicks, PhaseClock
from megatron.runtime.devices import device_of

COMMUNICATION = (
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "grads-all-reduce",
    "embedding-grads-all-reduce",
)
"""Timers that level 1 adds up as `communication`."""
PER_STEP = ("batch-generator", "forward-compute", "backward-compute", "communication", *COMMUNICATION, "optimizer")
"""Timers in seconds a step."""
PER_CALL = ("evaluate", "save-checkpoint", "keep-copy")
"""Timers in seconds an evaluation, a save and a copy in memory: the part of these that training waits for."""


class StepTimers:
    """Timers of a rank. Level 0: no timing, and no cost. `marks`: mark every phase in the trace of torch.profiler."""

    def __init__(self, level: int, device: torch.device, *, marks: bool = False) -> None:
        self.level, self._marks = level, marks
        self._host = PhaseClock(HostTicks())
        # on a CPU one clock for both, so that no moment counts twice
        self._device = self._host
        if device_of(device.type).waits_are_costly:  # the device is behind its host
            self._device = PhaseClock(DeviceTicks())
        self._is_training = True
        self._calls = dict.fromkeys(PER_CALL, 0)

    def __call__(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a phase of the training step on the device. Not counted inside an evaluation."""
        # an evaluation runs the same passes, and is a timer by itself
        if self.level == 0 or not self._is_training:
            return self._marked(name, contextlib.nullcontext())
        if self.level == 1 and name in COMMUNICATION:
            return self._marked(name, self._device.phase("communication"))
        return self._marked(name, self._device.phase(name))

    def _marked(
        self, name: str, timer: contextlib.AbstractContextManager[None]
    ) -> contextlib.AbstractContextManager[None]:
        if not self._marks:
            return timer
        return self._both(name, timer)

    @contextlib.contextmanager
    def _both(self, name: str, timer: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with torch.profiler.record_function(name), timer:
            yield

    def on_host(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a phase of the host only: waiting for data, saving, evaluating."""
        if self.level == 0:
            return self._marked(name, contextlib.nullcontext())
        return self._marked(name, self._on_host(name))

    @contextlib.contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        if name in PER_CALL:
            self._calls[name] += 1
        self._is_training = False
        try:
            with self._host.phase(name):
                yield
        finally:
            self._is_training = True

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as a phase."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self(name):
                return function(*arguments, **options)

        return call

    def watch_pipeline(self, engine: Any) -> None:
        """Time the steps of DeepSpeed's pipeline engine from inside, by its table of instructions.

        DeepSpeed's own timers (wall_clock_breakdown) leave out the loss and the reductions of a pipeline, and print
        each step, and it has no hook around either.
        """
        if self.level == 0 and not self._marks:
            return
        table = dict(engine._INSTRUCTION_MAP)
        for instruction, method in table.items():
            if instruction.__name__ in PHASES:
                table[instruction] = self.timed(PHASES[instruction.__name__], method)
        engine._INSTRUCTION_MAP = table

    def watch_sequential(self, engine: Any) -> None:
        """Time the reduction of gradients in DeepSpeed's plain engine."""
        if self.level > 0 or self._marks:
            engine.allreduce_gradients = self.timed("grads-all-reduce", engine.allreduce_gradients)

    def read(self, num_steps: int, ctx: ParallelContext) -> dict[str, RankStats]:
        """Return the seconds of each phase since the previous call on rank 0; {} elsewhere or at level 0. Collective.

        Waits for the device to end the last step. Phases that no rank went through are left out.
        """
        if self.level == 0:
            return {}
        totals_s = self._host.read()
        if self._device is not self._host:
            for name, seconds in self._device.read().items():
                totals_s[name] = totals_s.get(name, 0.0) + seconds
        # NaN, not 0: a phase that this rank does not go through must not be the least of all ranks
        mine = {name: totals_s.get(name, math.nan) / num_steps for name in PER_STEP}
        mine |= {name: totals_s.get(name, math.nan) / max(self._calls[name], 1) for name in PER_CALL}
        self._calls = dict.fromkeys(PER_CALL, 0)
        return {name + TIMER_SUFFIX: spread for name, spread in gather_stats(mine, ctx).items()}


# DeepSpeed's own breakdown omits a pipeline's loss and reductions, prints every step, and has no hooks.
def around(
    function: Callable[..., Any], before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """Return the function with a call before and after it."""

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        result = function(*arguments, **options)
        after()
        return result

    return call


PHASES = {
    "LoadMicroBatch": "batch-generator",
    "ForwardPass": "forward-compute",
    "BackwardPass": "backward-compute",
    "WeightPass": "backward-compute",
    "PostActivation": "forward-recv",
    "PostGrad": "backward-recv",
    "SendActivation": "forward-send",
    "RecvActivation": "forward-recv",
    "SendGrad": "backward-send",
    "RecvGrad": "backward-recv",
    "ReduceGrads": "grads-all-reduce",
    "ReduceTiedGrads": "embedding-grads-all-reduce",
    "OptimizerStep": "optimizer",
}
"""Phases by the names of the instructions of DeepSpeed's pipeline schedule (deepspeed.runtime.pipe.schedule)."""
