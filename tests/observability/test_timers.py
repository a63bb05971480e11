"""Timers: no moment twice, nothing where they are off, and on a device no wait for it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.observability.console import timer_lines
from megatron.observability.rank_times import RankStats
from megatron.observability.timers import StepTimers
from megatron.parallel import phase_clock as module
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.tasks.objective import CrossEntropy
from megatron.tasks.pretrain import PretrainTask
from megatron.training.build import build_engine
from tests import runs
from tests.ranks import RankPools

CPU = torch.device("cpu")


class Clock:
    """Stand-in for the module's `time`: moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(module, "time", stand_in)
    return stand_in


def means(timers: StepTimers, steps: int) -> dict[str, float]:
    return {name: spread.max for name, spread in timers.read(steps, ParallelContext.single()).items()}


def test_moments_belong_to_the_innermost_phase(clock: Clock) -> None:
    timers = StepTimers(1, CPU)
    for _ in range(2):
        with timers("backward-compute"):
            clock.now_s += 3
            with timers("grads-all-reduce"):
                clock.now_s += 10
            clock.now_s += 4
        clock.now_s += 50  # of no phase
        with timers("forward-send"):
            clock.now_s += 1
    assert means(timers, 2) == {"backward-compute-time": 7.0, "communication-time": 11.0}
    assert means(timers, 2) == {}, "each reading begins anew"


def test_level_2_tells_communication_apart(clock: Clock) -> None:
    timers = StepTimers(2, CPU)
    for name in ("grads-all-reduce", "forward-send", "backward-recv"):
        with timers(name):
            clock.now_s += len(name)
    assert means(timers, 1) == {"grads-all-reduce-time": 16, "forward-send-time": 12, "backward-recv-time": 13}


def test_saves_and_evaluations_are_told_each_and_without_their_insides(clock: Clock) -> None:
    timers = StepTimers(1, CPU)
    for seconds in (2, 4):
        with timers.on_host("evaluate"), timers("forward-compute"):
            clock.now_s += seconds
    with timers.on_host("save-checkpoint"):
        clock.now_s += 5
    with timers("forward-compute"):
        clock.now_s += 8
    assert means(timers, 10) == {"evaluate-time": 3.0, "save-checkpoint-time": 5.0, "forward-compute-time": 0.8}


def test_a_fault_inside_a_phase_ends_it(clock: Clock) -> None:
    timers = StepTimers(1, CPU)

    def fail() -> None:
        clock.now_s += 1
        raise KeyError

    with pytest.raises(KeyError):
        timers.timed("forward-compute", fail)()
    clock.now_s += 5
    with timers("optimizer"):
        clock.now_s += 2
    assert means(timers, 1) == {"forward-compute-time": 1.0, "optimizer-time": 2.0}


def test_level_0_neither_looks_at_the_clock_nor_touches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", None)
    timers = StepTimers(0, CPU)
    with timers("forward-compute"), timers.on_host("batch-generator"):
        pass
    engine = SimpleNamespace()
    timers.watch_pipeline(engine)
    timers.watch_sequential(engine)
    assert vars(engine) == {}
    assert timers.read(1, ParallelContext.single()) == {}


class Stream:
    """Stand-in for a device: events are reached one second after another once someone waits for them."""

    def __init__(self) -> None:
        self.recorded = 0
        self.made = 0
        self.waits = 0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, math.nan

    def record(self) -> None:
        self.stream.recorded += 1
        self.at = self.stream.recorded * 1000.0

    def synchronize(self) -> None:
        self.stream.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_devices_are_timed_by_events_and_waited_for_once_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    import deepspeed.accelerator

    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: SimpleNamespace(Event=stream.event))
    timers = StepTimers(1, torch.device("cuda"))
    for reading in range(3):
        for _ in range(4):
            with timers("backward-compute"), timers("grads-all-reduce"):
                pass
        assert stream.waits == reading
        assert means(timers, 4) == {"backward-compute-time": 2.0, "communication-time": 1.0}
    assert stream.made <= 4 * 4, "events are used again"


def test_table_is_megatrons() -> None:
    table = timer_lines({"forward-compute-time": RankStats(0.0101, 0.02, 0.0305, 1)})
    assert table == (
        "(min, max) time across ranks (ms):\n    forward-compute ................................: (10.10, 30.50)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Against a step's own time


def timed_steps(arguments: str) -> tuple[float, float, dict[str, RankStats]]:
    """Seconds a step by the clock outside, seconds that a slowed loss adds, and what the timers said, on rank 0."""
    config = load_config([*runs.TINY.split(), "--data-path", "none", "--train-iters", "9", *arguments.split()])
    ctx = ParallelContext.build(config.parallel, "cpu")
    pause_s = 0.02

    class SlowLoss(CrossEntropy):
        def loss(self, *inputs: Any) -> Any:
            time.sleep(pause_s)
            return super().loss(*inputs)

    class SlowTask(PretrainTask):
        Objective = SlowLoss

    task = SlowTask(config)
    engine = build_engine(config, ctx, task)
    generator = np.random.default_rng(0)
    batch = [task.data.collate(generator.integers(0, 128, (2, 17))) for _ in range(4 // ctx.num_batch_ranks)]
    engine.train_step(batch, consumed_samples=0, lr=1e-3)  # warms up
    engine.timers.read(1, ctx)
    began_s = time.perf_counter()
    for _ in range(2):
        engine.train_step(batch, consumed_samples=8, lr=1e-3)
    elapsed_s = (time.perf_counter() - began_s) / 2
    return elapsed_s, pause_s * len(batch), engine.timers.read(2, ctx)


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [(1, ""), (1, "--no-pipeline-parallel"), (2, "--no-pipeline-parallel --zero-stage 1"), (2, "--zero-stage 1")],
)
def test_phases_hold_the_loss_and_no_more_than_the_step(ranks: RankPools, world_size: int, arguments: str) -> None:
    elapsed_s, slowed_s, timers = ranks(world_size)(timed_steps, f"{arguments} --timing-log-level 1")[0]
    assert {"forward-compute-time", "backward-compute-time", "optimizer-time"} < set(timers)
    assert timers["forward-compute-time"].min >= slowed_s, "the loss is part of the forward pass"
    if world_size == 2:
        assert timers["communication-time"].min > 0
    else:
        assert sum(spread.max for spread in timers.values()) <= elapsed_s, "no moment is counted twice"
