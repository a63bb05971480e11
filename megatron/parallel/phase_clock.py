"""Clock that divides a rank's time into phases: its own passes and update, and its waits for data and for other ranks.

A moment belongs to the innermost phase that it lies in, so phases never overlap. On a CPU a phase is timed by the
host's clock, on a device by events in its stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD, OPTIMIZER, DATA, WAIT = "forward", "backward", "optimizer", "data", "wait"
"""Phases of a `StepClock`. `optimizer`: norm and update; `data`: the wait for it; `wait`: for other ranks."""


class HostTicks:
    """Clock of the host."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, spans: list[tuple[str, Any, Any]]) -> list[float]:
        return [end - begin for _, begin, end in spans]


# Events are compared when the log interval reads the loss: no step waits for the device because of a clock, and the
# times are those of the device, not of the host that starts its operators.
class DeviceTicks:
    """Events of the device's current stream, reused. Their times are known once the device has reached them."""

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self._make = get_accelerator().Event
        self._free: list[Any] = []

    def now(self) -> Any:
        if self._free:
            event = self._free.pop()
        else:
            event = self._make(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: list[tuple[str, Any, Any]]) -> list[float]:
        if not spans:
            return []
        spans[-1][2].synchronize()
        found = [begin.elapsed_time(end) / 1000 for _, begin, end in spans]
        # by identity: most events end one span and begin the next
        self._free += {id(event): event for _, *both in spans for event in both}.values()
        return found


def ticks_of(device: torch.device) -> HostTicks | DeviceTicks:
    """Return the ticks by which work on a device is timed."""
    if device_of(device.type).waits_are_costly:
        return DeviceTicks()
    return HostTicks()


class PhaseClock:
    """Divides time into spans, each of the innermost phase at that time."""

    def __init__(self, ticks: HostTicks | DeviceTicks) -> None:
        self._ticks = ticks
        self._phases: list[str] = []
        self._since: Any = None
        self._spans: list[tuple[str, Any, Any]] = []

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _Phase(self, name)

    def begin(self, name: str) -> None:
        self._cut()
        self._phases.append(name)

    def end(self) -> None:
        self._cut()
        self._phases.pop()

    def _cut(self) -> None:
        now = self._ticks.now()
        if self._phases:
            self._spans.append((self._phases[-1], self._since, now))
        self._since = now

    def take_spans(self) -> list[tuple[str, Any, Any]]:
        """Return the spans since the previous call: phase, begin and end. Call it outside all phases."""
        spans, self._spans = self._spans, []
        return spans

    def sum_spans(self, spans: list[tuple[str, Any, Any]]) -> dict[str, float]:
        """Return the seconds of each phase. The device must come to the last span's end."""
        totals_s: dict[str, float] = {}
        for (name, _, _), seconds in zip(spans, self._ticks.seconds(spans), strict=True):
            totals_s[name] = totals_s.get(name, 0.0) + seconds
        return totals_s

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the previous call. Call it outside all phases."""
        return self.sum_spans(self.take_spans())


class _Phase(contextlib.AbstractContextManager[None]):
    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.begin(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.end()


class StepClock:
    """Phases of this rank's training steps. Outside of `step`, in evaluations and saves, and before `start`: nothing.

    `clock.phase(WAIT)` belongs around whatever blocks until other ranks come. On a device two events are recorded for
    each phase.
    """

    def __init__(self) -> None:
        self._clock: PhaseClock | None = None
        self._is_on = self._is_in_pass = False
        self._divides_passes = True
        self._steps: list[list[tuple[str, Any, Any]]] = []

    @property
    def runs(self) -> bool:
        return self._clock is not None

    def start(self, device: torch.device, *, divides_passes: bool = True) -> None:
        """Measure the steps from now on; `divides_passes`: the waits within a forward or backward pass too."""
        self._clock = PhaseClock(ticks_of(device))
        self._divides_passes = divides_passes

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step. One that raises is not counted."""
        if self._clock is None:
            yield
            return
        self._clock.take_spans()  # those of a step that raised
        self._is_on = True
        try:
            yield
            self._steps.append(self._clock.take_spans())
        finally:
            self._is_on = False

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        if not self._is_on or self._is_in_pass or self._clock is None:
            return contextlib.nullcontext()
        if name in (FORWARD, BACKWARD) and not self._divides_passes:
            return self._whole_pass(self._clock.phase(name))
        return self._clock.phase(name)

    @contextlib.contextmanager
    def _whole_pass(self, phase: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Run a pass as one phase, whatever is in it."""
        self._is_in_pass = True
        try:
            with phase:
                yield
        finally:
            self._is_in_pass = False

    def read(self) -> list[dict[str, float]]:
        """Return the seconds of each phase, step by step, since the previous call.

        The device must have ended the last step.
        """
        if self._clock is None:
            return []
        steps, self._steps = self._steps, []
        return [self._clock.sum_spans(spans) for spans in steps]
