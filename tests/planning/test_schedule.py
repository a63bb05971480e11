"""The schedules against closed forms, hand-computed points and their invariants."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.options import Config, DataConfig, OptimizerConfig, TrainingConfig
from megatron.config.validation import check
from megatron.planning.schedule import Schedule


def global_batch_size(training: TrainingConfig, consumed_samples: int) -> int:
    return Schedule(training, OptimizerConfig()).global_batch_size(consumed_samples)


def total_iterations(training: TrainingConfig) -> int:
    return Schedule(training, OptimizerConfig()).total_iterations


def total_samples(training: TrainingConfig) -> int:
    return Schedule(training, OptimizerConfig()).total_samples


def learning_rate(optimizer: OptimizerConfig, training: TrainingConfig, consumed_samples: int) -> float:
    return Schedule(training, optimizer).learning_rate(consumed_samples)


def step_by_step(training: TrainingConfig) -> tuple[int, int]:
    """Steps and samples of the whole training, found the slow way."""
    iterations, samples = 0, 0
    while training.train_iters is None or iterations < training.train_iters:
        batch_size = global_batch_size(training, samples)
        if training.train_samples is not None and samples + batch_size > training.train_samples:
            break
        iterations, samples = iterations + 1, samples + batch_size
    return iterations, samples


@st.composite
def trainings(draw: st.DrawFn) -> TrainingConfig:
    increment = draw(st.integers(1, 8))
    start = draw(st.integers(1, 16))
    size = start + increment * draw(st.integers(0, 8))
    ramp = draw(st.none() | st.integers(1, 3000).map(lambda samples: (start, increment, samples)))
    length: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"train_samples": st.integers(1, 5000)}),
            st.fixed_dictionaries({"train_iters": st.integers(1, 500)}),
        )
    )
    return TrainingConfig(global_batch_size=size, rampup_batch_size=ramp, **length)


@given(trainings())
def test_totals_equal_the_steps_taken_one_by_one(training: TrainingConfig) -> None:
    assert (total_iterations(training), total_samples(training)) == step_by_step(training)


@given(trainings())
def test_rampup_ends_within_one_batch_of_train_samples(training: TrainingConfig) -> None:
    assume(training.train_samples is not None)
    assert training.train_samples is not None
    left = training.train_samples - total_samples(training)
    assert 0 <= left < global_batch_size(training, total_samples(training))


@given(trainings(), st.integers(0, 6000))
def test_batch_size_only_grows_and_stays_between_start_and_full(training: TrainingConfig, consumed: int) -> None:
    now, later = global_batch_size(training, consumed), global_batch_size(training, consumed + 1)
    start = training.rampup_batch_size[0] if training.rampup_batch_size else training.global_batch_size
    assert start <= now <= later <= training.global_batch_size


def test_bloom_13b_rampup_as_megatron_computes_it() -> None:
    # 16 16 5_000_000 to 1024: 63 increments of 79365.08 samples each
    training = TrainingConfig(
        global_batch_size=1024, rampup_batch_size=(16, 16, 5_000_000), train_samples=300_000_000, seq_length=2048
    )
    assert [global_batch_size(training, n) for n in (0, 79_365, 79_366, 158_731)] == [16, 16, 32, 48]
    assert [global_batch_size(training, n) for n in (4_920_634, 4_920_635, 4_999_999, 5_000_000)] == [
        992,
        1008,
        1008,
        1024,
    ]
    assert (total_iterations(training), total_samples(training)) == step_by_step(training)
    # 23,456 steps of ramp-up to sample 5,000,528, then (300,000,000 - 5,000,528) // 1024
    assert total_iterations(training) == 311_541


def test_batch_size_at_a_boundary_that_no_float_represents() -> None:
    # a float quotient misses 52 of these: int(5 / (10 / 58)) is 28, not 29
    for samples, levels in itertools.product(range(1, 60), range(1, 60)):
        training = TrainingConfig(global_batch_size=1 + levels, rampup_batch_size=(1, 1, samples), train_samples=10**4)
        for consumed in range(samples):
            assert global_batch_size(training, consumed) == 1 + consumed * levels // samples


def test_train_iters_counts_full_batches() -> None:
    training = TrainingConfig(global_batch_size=24, train_iters=10)
    assert (total_iterations(training), total_samples(training)) == (10, 240)


def test_a_last_partial_batch_is_not_trained() -> None:
    training = TrainingConfig(global_batch_size=24, train_samples=100)
    assert (total_iterations(training), total_samples(training)) == (4, 96)


# ---------------------------------------------------------------------------------------------------------------------
# Learning rate. Peak 1e-3, floor 1e-4, warm-up of 100 samples, min_lr at sample 1100: the decay is 1000 samples long.

TRAINING = TrainingConfig(global_batch_size=10, train_samples=2000)
BASE: dict[str, Any] = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_samples": 100, "lr_decay_samples": 1100}
WSD: dict[str, Any] = {**BASE, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 200}

POINTS = [
    # every style warms up alike
    ("cosine", {}, {0: 0.0, 10: 1e-4, 50: 5e-4, 100: 1e-3}),
    ("constant", {}, {0: 0.0, 50: 5e-4, 100: 1e-3, 1100: 1e-3, 5000: 1e-3}),
    ("linear", {}, {350: 1e-4 + 0.75 * 9e-4, 600: 5.5e-4, 1100: 1e-4, 1101: 1e-4}),
    # (1 + cos 45 degrees) / 2 = 0.853553..., (1 + cos 60 degrees) / 2 = 0.75 is at a third of the decay
    ("cosine", {}, {350: 1e-4 + 0.8535533905932737 * 9e-4, 600: 5.5e-4, 1100: 1e-4, 9999: 1e-4}),
    ("cosine", {"lr_decay_samples": 400}, {200: 1e-4 + 0.75 * 9e-4, 300: 1e-4 + 0.25 * 9e-4}),
    # min_lr at 1100, its last 200 samples decay: the plateau ends at 900
    ("WSD", {"lr_wsd_decay_style": "linear"}, {101: 1e-3, 900: 1e-3, 950: 1e-4 + 0.75 * 9e-4, 1100: 1e-4, 1101: 1e-4}),
    ("WSD", {"lr_wsd_decay_style": "cosine"}, {900: 1e-3, 1000: 5.5e-4, 1100: 1e-4}),
    # 2 x 0.5^0.5 - 1 = 0.414213...
    ("WSD", {"lr_wsd_decay_style": "exponential"}, {900: 1e-3, 1000: 1e-4 + 0.41421356237309515 * 9e-4, 1100: 1e-4}),
]


@pytest.mark.parametrize(("style", "options", "table"), POINTS)
def test_learning_rate_equals_the_table(style: Any, options: dict[str, Any], table: dict[int, float]) -> None:
    optimizer = OptimizerConfig(**{**WSD, "lr_decay_style": style, **options})
    for consumed, expected in table.items():
        assert learning_rate(optimizer, TRAINING, consumed) == pytest.approx(expected, rel=1e-12), consumed


def test_without_warmup_the_first_step_runs_at_the_peak() -> None:
    assert learning_rate(OptimizerConfig(**{**BASE, "lr_warmup_samples": 0}), TRAINING, 0) == 1e-3


def test_unset_decay_lasts_the_whole_training() -> None:
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_decay_style="linear")
    assert learning_rate(optimizer, TRAINING, 1000) == pytest.approx(5.5e-4)
    in_iters = TrainingConfig(global_batch_size=10, train_iters=200)
    assert learning_rate(optimizer, in_iters, 1000) == learning_rate(optimizer, TRAINING, 1000)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_lengths_in_iterations_equal_lengths_in_samples(style: Any) -> None:
    in_samples = OptimizerConfig(**{**WSD, "lr_decay_style": style})
    in_iters = OptimizerConfig(
        lr=1e-3, min_lr=1e-4, lr_decay_style=style, lr_warmup_iters=10, lr_decay_iters=110, lr_wsd_decay_iters=20
    )
    for consumed in range(0, 1300, 7):
        assert learning_rate(in_iters, TRAINING, consumed) == learning_rate(in_samples, TRAINING, consumed)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OptimizerConfig, int, int]:
    """A valid schedule with the sample its warm-up ends at, and the one its decay ends at."""
    warmup = draw(st.integers(0, 500))
    decay_end = warmup + draw(st.integers(1, 2000))
    lr = draw(st.floats(1e-8, 1.0))
    style: Any = draw(st.sampled_from(["constant", "linear", "cosine", "WSD"]))
    last_part: dict[str, Any] = {}
    if style == "WSD":
        last_part["lr_wsd_decay_samples"] = draw(st.integers(1, decay_end - warmup))
        last_part["lr_wsd_decay_style"] = draw(st.sampled_from(["linear", "cosine", "exponential"]))
    optimizer = OptimizerConfig(
        lr=lr,
        min_lr=lr * draw(st.floats(0.0, 1.0)),
        lr_decay_style=style,
        lr_warmup_samples=warmup,
        lr_decay_samples=decay_end,
        **last_part,
    )
    config = Config(training=TRAINING, optimizer=optimizer, data=DataConfig(data_path=("corpus",)))
    assert not check(config, world_size=1)
    return optimizer, warmup, decay_end


@given(schedules(), st.integers(0, 4000))
def test_learning_rate_rises_then_falls_within_its_bounds(schedule: Any, consumed: int) -> None:
    optimizer, warmup, _ = schedule
    now, later = (learning_rate(optimizer, TRAINING, n) for n in (consumed, consumed + 1))
    slack = 1e-12 * optimizer.lr
    assert 0 <= now <= optimizer.lr + slack
    if consumed < warmup:
        assert now < later + slack
    else:
        assert optimizer.min_lr - slack <= later <= now + slack


@given(schedules())
def test_learning_rate_has_no_jump(schedule: Any) -> None:
    optimizer, warmup, decay_end = schedule
    decaying = optimizer.lr_wsd_decay_samples if optimizer.lr_decay_style == "WSD" else decay_end - warmup
    # the steepest of all shapes is the cosine's middle, pi / 2 of the mean slope
    steepest = optimizer.lr * max(1 / warmup if warmup else 0, math.pi / 2 / decaying) * (1 + 1e-9)
    for joint in (warmup, decay_end - (optimizer.lr_wsd_decay_samples or 0), decay_end):
        for consumed in (joint - 1, joint):
            if consumed >= 0:
                now, later = (learning_rate(optimizer, TRAINING, n) for n in (consumed, consumed + 1))
                assert abs(later - now) <= steepest


@given(schedules(), st.integers(1, 10**6))
def test_learning_rate_is_min_lr_after_the_decay(schedule: Any, more: int) -> None:
    optimizer, _, decay_end = schedule
    final = optimizer.lr if optimizer.lr_decay_style == "constant" else optimizer.min_lr
    assert learning_rate(optimizer, TRAINING, decay_end + more) == final
    assert learning_rate(optimizer, TRAINING, decay_end) == pytest.approx(final, rel=1e-9, abs=1e-12 * optimizer.lr)
