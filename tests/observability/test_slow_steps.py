"""A step that takes longer than usual is named with its part and its rank, and a steady run raises no alarm."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.observability import slow_steps
from megatron.observability.prediction import Prediction, detected_machine
from megatron.observability.slow_steps import APART, WARM_UP, WINDOW, SlowSteps
from megatron.options.config import ConfigError
from megatron.parallel.phase_clock import BACKWARD, DATA, FORWARD, OPTIMIZER, WAIT
from megatron.plan.rates.files import load_rates
from megatron.plan.timing.measured_parts import PartSeconds, measurable, sums_of
from megatron.plan.timing.step import StepParts
from megatron.runtime.devices import find_device
from tests.plan.configs import LLAMA_8B, config

NUM_MICROBATCHES = 4
USUAL = {FORWARD: 0.1, BACKWARD: 0.2, OPTIMIZER: 0.05, WAIT: 0.1, DATA: 0.0}
"""Seconds of a step, of which 0.05 are in no phase."""


@dataclass
class Ranks:
    """Several ranks in one process: rank 0 is the one under test, and the others are as fast as their `slow` says."""

    monkeypatch: pytest.MonkeyPatch
    predicted_s: float = 0.5
    is_steady: bool = True
    others: int = 1
    now_s: float = 0.0
    iteration: int = 0
    said: list[str] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=dict)
    """Excess of rank 1 over its usual phases."""

    def __post_init__(self) -> None:
        step = SimpleNamespace(
            seconds=self.predicted_s, parts=StepParts(compute=0.4, wait=0.1), num_microbatches=NUM_MICROBATCHES
        )
        prediction: Any = SimpleNamespace(is_steady=self.is_steady, first=step, of=lambda *sizes: step)
        ctx: Any = SimpleNamespace(broadcast=lambda number: number)
        self.monkeypatch.setattr(slow_steps.time, "perf_counter", lambda: self.now_s)
        self.monkeypatch.setattr(slow_steps, "gather_numbers", self._gather)
        self.steps = SlowSteps(ctx, prediction, divides_passes=True)

    def _gather(self, mine: list[float], ctx: Any) -> list[list[float]]:
        theirs = [0.0, 0.0, 0.0, 0.0]
        theirs[0] += self.slow.get(FORWARD, 0.0)
        theirs[1] += self.slow.get(WAIT, 0.0)
        theirs[2] += self.slow.get(DATA, 0.0)
        return [mine, theirs]

    def run(self, number: int, *, pause_s: float = 0.0, **excess: float) -> None:
        """So many steps and a log line; `excess` is beyond the usual of a phase of rank 0, in the last step."""
        clocked = []
        for index in range(number):
            phases = dict(USUAL)
            if index == number - 1:
                for name, seconds in excess.items():
                    phases[name] = phases.get(name, 0.0) + seconds
            self.now_s += sum(phases.values()) + 0.05
            clocked.append({name: seconds for name, seconds in phases.items() if name != "other"})
            self.iteration += 1
            self.steps.add(self.iteration, 16, 0, NUM_MICROBATCHES)
            self.now_s += pause_s
            self.steps.pause(pause_s)
        self.said += self.steps.close(clocked)

    def usual(self) -> None:
        self.run(WARM_UP)
        self.run(WINDOW)
        assert self.said == []


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_steady_run_says_nothing(ranks: Ranks) -> None:
    ranks.usual()
    for _ in range(30):
        ranks.run(10)
    assert ranks.said == []


@pytest.mark.parametrize(
    ("phase", "title"),
    [
        (FORWARD, "compute +300 ms on rank 0"),
        (OPTIMIZER, "compute +300 ms on rank 0"),
        (DATA, "data +300 ms on rank 0"),
        ("other", "the host beside these +300 ms on rank 0"),
    ],
)
def test_a_slow_step_is_named_with_its_part(ranks: Ranks, phase: str, title: str) -> None:
    ranks.usual()
    # rank 1 waits meanwhile
    ranks.slow = {WAIT: 0.3}
    ranks.run(10, **{phase: 0.3})
    (said,) = ranks.said
    assert said.startswith("WARNING: step 29 took 800 ms, 1.60 x the usual 500 ms (predicted: 500 ms): " + title)
    assert "exchange and wait +0 ms" in said
    assert said.endswith("1 of the last 10 steps were slow")


def test_the_rank_that_holds_up_the_others_is_named(ranks: Ranks) -> None:
    ranks.usual()
    ranks.slow = {FORWARD: 0.3}
    ranks.run(10, **{WAIT: 0.3})
    (said,) = ranks.said
    assert "compute +300 ms on rank 1; exchange and wait +0 ms" in said


def test_what_all_ranks_wait_for_is_the_exchange(ranks: Ranks) -> None:
    ranks.usual()
    ranks.slow = {WAIT: 0.28}
    ranks.run(10, **{WAIT: 0.3})
    (said,) = ranks.said
    assert "exchange and wait +280 ms; compute +0 ms" in said


def test_warnings_are_apart_and_begin_after_the_first_steps(ranks: Ranks) -> None:
    ranks.run(WARM_UP, **{FORWARD: 20.0})
    ranks.run(WINDOW)
    assert ranks.said == []
    for _ in range(APART // 10 + 1):
        ranks.run(10, **{FORWARD: 0.3})
    assert len(ranks.said) == 2


def test_a_little_slower_is_not_slow(ranks: Ranks) -> None:
    ranks.usual()
    ranks.run(10, **{FORWARD: 0.14})
    assert ranks.said == []
    ranks.run(10, **{FORWARD: 0.16})
    assert len(ranks.said) == 1


def test_steps_after_validations_and_beside_saves_are_not_compared(ranks: Ranks) -> None:
    ranks.usual()
    ranks.run(1, pause_s=3.0)
    ranks.run(1, **{FORWARD: 0.5})
    ranks.steps.is_busy = lambda iteration: True
    ranks.run(5, **{FORWARD: 0.5})
    ranks.steps.is_busy = lambda iteration: False
    assert ranks.said == []
    # the pause itself is no part of a step
    ranks.run(1, pause_s=0.01)
    ranks.run(1, **{FORWARD: 0.3})
    assert "took 800 ms" in ranks.said[0]


@pytest.mark.parametrize(("predicted_s", "factor"), [(0.2, "2.50"), (1.0, "0.50")])
def test_a_prediction_that_is_off_is_said_once_and_steps_are_compared_with_their_own(
    monkeypatch: pytest.MonkeyPatch, predicted_s: float, factor: str
) -> None:
    ranks = Ranks(monkeypatch, predicted_s=predicted_s)
    ranks.run(WARM_UP)
    ranks.run(WINDOW)
    (said,) = ranks.said
    assert said.startswith(f"steps take {factor} x the predicted time: compute 350 ms (predicted: 400 ms)")
    for _ in range(20):
        ranks.run(10)
    assert len(ranks.said) == 1
    ranks.run(10, **{DATA: 0.3})
    assert "1.60 x the usual 500 ms" in ranks.said[1]
    assert "data +300 ms" in ranks.said[1]


def test_what_becomes_slow_for_good_stays_slow(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.usual()
    monkeypatch.setitem(USUAL, FORWARD, 0.4)
    for _ in range(3 * APART // 10):
        ranks.run(10)
    assert len(ranks.said) == 3
    assert "10 of the last 10 steps were slow" in ranks.said[-1]


def test_steps_whose_length_the_data_decides_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, is_steady=False)
    ranks.usual()
    ranks.run(10, **{FORWARD: 3.0})
    assert ranks.said == []
    ranks.steps.add(99, 16, 0, NUM_MICROBATCHES)
    assert ranks.steps.predicted_s == 0.5


def test_a_rollback_forgets_the_steps_that_it_undoes(ranks: Ranks) -> None:
    ranks.usual()
    ranks.now_s += 9.0
    ranks.steps.add(20, 16, 0, NUM_MICROBATCHES)
    ranks.steps.drop()
    assert ranks.steps.close([]) == []


# Predictions


def test_every_part_of_a_step_belongs_to_one_sum() -> None:
    names = [each.name for each in dataclasses.fields(StepParts)]
    parts = StepParts(**{name: float(2**number) for number, name in enumerate(names)})
    assert sum(sums_of(parts).values()) == parts.total
    for divides in (True, False):
        assert measurable(parts, divides_passes=divides).total == parts.total
    shown = measurable(StepParts(compute=1.0, tensor=2.0, messages=4.0, wait=8.0), divides_passes=True)
    assert shown == PartSeconds(1.0, 14.0, 0.0)
    hidden = measurable(StepParts(compute=1.0, tensor=2.0, messages=4.0, wait=8.0), divides_passes=False)
    assert hidden == PartSeconds(3.0, 12.0, 0.0)


@pytest.mark.parametrize(
    ("device", "chip", "machine"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cuda", "NVIDIA H100 PCIe", None),
        ("cuda", "NVIDIA GeForce RTX 4090", None),
        ("hpu", "GAUDI2", "gaudi2"),
        ("hpu", "GAUDI3", "gaudi3"),
        ("cpu", None, None),
    ],
)
def test_a_chip_has_the_rates_of_its_machine(device: str, chip: str | None, machine: str | None) -> None:
    assert detected_machine(find_device(device), chip) == machine


def test_a_run_is_predicted_by_its_sizes_of_now() -> None:
    training = {
        "bf16": True,
        "seq_length": 4096,
        "global_batch_size": 64,
        "rampup_batch_size": (16, 16, 1000),
        "seq_length_stages": (1024, 10),
        "train_samples": 100_000,
    }
    parallel = {"device": "cuda", "tensor_model_parallel_size": 8}
    run = config(LLAMA_8B, training=training, parallel=parallel)
    prediction = Prediction(run, [8], load_rates("h100"))
    assert prediction.is_steady
    assert prediction.line().startswith("predicted: ")
    assert prediction.line().endswith(" by h100, published rates")
    full, ramped = (prediction.of(size, 90_000, None) for size in (64, 16))
    # products of one microbatch are as long
    assert ramped.seconds < 0.3 * full.seconds
    short = prediction.of(64, 0, None)
    assert short.tokens == full.tokens
    assert short.seconds < full.seconds
    assert prediction.of(64, 90_000, None) is full
    with pytest.raises(ConfigError, match="the rates of gaudi2 are those of hpu, but the run is for cuda"):
        Prediction(run, [8], load_rates("gaudi2"))


def test_packed_steps_are_predicted_by_their_microbatches_and_are_no_measure() -> None:
    model = {"architecture": "llama", "position_embedding_type": "rope", "hidden_dropout": 0.0}
    training = {"task": "sft", "num_epochs": 3, "seq_length": 512, "global_batch_size": 64, "bf16": True}
    run = config(model, training=training, sft={"max_batch_len": 2048}, parallel={"device": "cuda"})
    prediction = Prediction(run, [1], load_rates("h100"))
    assert not prediction.is_steady
    assert "steps of this data differ, so that slow ones are not named" in prediction.line()
    ten, twenty = (prediction.of(64, 0, number).parts.compute for number in (10, 20))
    assert twenty == pytest.approx(2 * ten)


def test_wrong_rates_are_refused_by_name(tmp_path: Path) -> None:
    from megatron.plan.rates.files import rates_faults

    assert rates_faults("h100", "cuda") == rates_faults("h100", "auto") == []
    assert "the run is for hpu" in rates_faults("h100", "hpu")[0]
    assert "'h1000' not found" in rates_faults("h1000", "cuda")[0]
    assert "cannot be read" in rates_faults(str(tmp_path / "none.yaml"), "cpu")[0]
