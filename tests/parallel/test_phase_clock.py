"""A step's own phases are measured without the waits inside them, and nothing outside of training steps."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megatron.parallel import phase_clock
from megatron.parallel.phase_clock import BACKWARD, FORWARD, WAIT, StepClock


class Ticks(phase_clock.HostTicks):
    """Host's clock that moves by hand."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    made = Ticks()
    monkeypatch.setattr(phase_clock, "HostTicks", lambda: made)
    return made


def pass_of(clock: StepClock, ticks: Ticks, name: str, own_s: float, wait_s: float) -> None:
    with clock.phase(name):
        ticks.now_s += own_s
        with clock.phase(WAIT):
            ticks.now_s += wait_s


def test_waits_for_others_are_no_own_time(ticks: Ticks) -> None:
    clock = StepClock()
    clock.start(torch.device("cpu"))
    for factor in (1, 2):
        with clock.step():
            pass_of(clock, ticks, FORWARD, 1.0 * factor, 5.0)
            ticks.now_s += 100.0  # of no phase
            pass_of(clock, ticks, BACKWARD, 2.0 * factor, 7.0)
    expected = [{FORWARD: 1.0, BACKWARD: 2.0, WAIT: 12.0}, {FORWARD: 2.0, BACKWARD: 4.0, WAIT: 12.0}]
    assert clock.read() == expected
    assert clock.read() == []


def test_passes_may_count_whole_while_waits_between_them_are_apart(ticks: Ticks) -> None:
    clock = StepClock()
    clock.start(torch.device("cpu"), divides_passes=False)
    with clock.step():
        pass_of(clock, ticks, FORWARD, 1.0, 5.0)
        with clock.phase(WAIT):
            ticks.now_s += 3.0
        pass_of(clock, ticks, BACKWARD, 2.0, 7.0)
    assert clock.read() == [{FORWARD: 6.0, WAIT: 3.0, BACKWARD: 9.0}]


def test_evaluations_and_steps_that_fail_do_not_count(ticks: Ticks) -> None:
    clock = StepClock()
    pass_of(clock, ticks, FORWARD, 1.0, 1.0)  # not started
    with clock.step():
        pass_of(clock, ticks, FORWARD, 1.0, 1.0)
    assert clock.read() == []
    clock.start(torch.device("cpu"))
    pass_of(clock, ticks, FORWARD, 1.0, 1.0)
    with contextlib.suppress(ArithmeticError), clock.step(), clock.phase(FORWARD):
        raise ArithmeticError
    with clock.step():
        pass_of(clock, ticks, FORWARD, 3.0, 1.0)
    assert clock.read() == [{FORWARD: 3.0, WAIT: 1.0}]
