"""The schedules against closed forms, hand-computed points and their invariants."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.options.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megatron.options.schedule import Schedule
from megatron.settings.validation import check


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


def megatrons_learning_rate(options: dict[str, Any], at: int) -> float:
    """megatron-core's OptimizerParamScheduler.get_lr, as a line through the warm-up and a curve after it."""
    peak, floor, end = options["lr"], options["min_lr"], options["lr_decay_samples"]
    warmup, style = options.get("lr_warmup_samples", 0), options["lr_decay_style"]
    if warmup and at <= warmup:
        return float(np.interp(at, [0, warmup], [options.get("lr_warmup_init", 0.0), peak]))
    if style == "constant":
        return float(peak)
    if at > end:
        return float(floor)
    if style == "inverse-square-root":
        return float(np.fmax(floor, peak / np.sqrt(max(at, 1) / max(warmup, 1))))
    begin = end - options["lr_wsd_decay_samples"] if style == "WSD" else warmup
    x = float(np.interp(at, [begin, end], [0, 1]))
    shape = options["lr_wsd_decay_style"] if style == "WSD" else style
    left = {
        "linear": 1 - x,
        "cosine": np.cos(np.pi * x / 2) ** 2,  # (1 + cos 2a) / 2
        "exponential": np.exp2(1 - x) - 1,
        "minus_sqrt": 1 - x**0.5,
    }[shape]
    return float(floor * (1 - left) + peak * left)


BOUNDARIES = [0, 1, 99, 100, 101, 600, 899, 900, 901, 1000, 1099, 1100, 1101, 9999]
"""Around the end of the warm-up, the begin of WSD's last part, and the end of the decay."""


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("init", [0.0, 2e-4])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_learning_rate_is_megatrons_at_every_boundary(style: str, init: float, warmup: int) -> None:
    for last_part in ("linear", "cosine", "exponential", "minus_sqrt") if style == "WSD" else ("linear",):
        options: dict[str, Any] = {**WSD, "lr_decay_style": style, "lr_wsd_decay_style": last_part}
        options |= {"lr_warmup_init": init, "lr_warmup_samples": warmup}
        for at in BOUNDARIES:
            found = learning_rate(OptimizerConfig(**options), TRAINING, at)
            assert found == pytest.approx(megatrons_learning_rate(options, at), rel=1e-12), (last_part, at)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_a_decoupled_rate_is_megatrons_curve_between_its_own_numbers(style: str) -> None:
    options: dict[str, Any] = {**WSD, "lr_decay_style": style, "lr_warmup_samples": 100, "lr_warmup_init": 1e-5}
    options["lr_wsd_decay_style"] = "cosine"
    own = {**options, "lr": 7e-3, "min_lr": 3e-3}
    given = OptimizerConfig(**options, decoupled_lr=7e-3, decoupled_min_lr=3e-3)
    unset = OptimizerConfig(**options, decoupled_lr=7e-3)
    for at in BOUNDARIES:
        found, of_unset = (Schedule(TRAINING, each).decoupled_learning_rate(at) for each in (given, unset))
        assert found == pytest.approx(megatrons_learning_rate(own, at), rel=1e-12), at
        floor = options["min_lr"]
        assert of_unset == pytest.approx(megatrons_learning_rate({**own, "min_lr": floor}, at), rel=1e-12), at
        assert learning_rate(given, TRAINING, at) == learning_rate(OptimizerConfig(**options), TRAINING, at)
    assert Schedule(TRAINING, OptimizerConfig(**options)).decoupled_learning_rate(0) is None


def test_inverse_square_root_falls_with_the_root_of_all_samples() -> None:
    optimizer = OptimizerConfig(**{**BASE, "lr_decay_style": "inverse-square-root"})
    points = {100: 1e-3, 400: 5e-4, 900: 1e-3 / 3, 1101: 1e-4}
    assert {at: learning_rate(optimizer, TRAINING, at) for at in points} == pytest.approx(points, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "table"),
    [
        # 1.0 to 3.0 over 2000 samples
        ("constant", {0: 0.7, 1000: 0.7, 2001: 0.7}),
        ("linear", {0: 1.0, 500: 1.5, 1000: 2.0, 1999: 2.999, 2000: 3.0, 2001: 3.0, 9999: 3.0}),
        # (1 + cos 120 degrees) / 2 = 0.25 is at a third of the way
        ("cosine", {0: 1.0, 500: 1 + 2 * 0.14644660940672627, 1000: 2.0, 1500: 1 + 2 * 0.8535533905932737, 2000: 3.0}),
    ],
)
def test_weight_decay_equals_the_table(style: Any, table: dict[int, float]) -> None:
    grows: dict[str, Any] = {} if style == "constant" else {"start_weight_decay": 1.0, "end_weight_decay": 3.0}
    optimizer = OptimizerConfig(weight_decay=0.7, weight_decay_incr_style=style, **grows)
    in_iters = TrainingConfig(global_batch_size=10, train_iters=200)
    for training in (TRAINING, in_iters):
        schedule = Schedule(training, optimizer)
        assert {at: schedule.weight_decay(at) for at in table} == pytest.approx(table, rel=1e-12)


RAMP = TrainingConfig(global_batch_size=24, rampup_batch_size=(8, 8, 100), train_samples=2000)
"""Levels of 50 samples: 7 steps of 8 to sample 56, 3 of 16 to sample 104, then 24."""


def lr_by_step(schedule: Schedule, steps: int) -> list[float]:
    rates, consumed = [], 0
    for _ in range(steps):
        rates.append(schedule.learning_rate(consumed))
        consumed += schedule.global_batch_size(consumed)
    return rates


@pytest.mark.parametrize("warmup", [5, 7, 9, 10, 14])
def test_warmup_in_iterations_is_linear_in_steps_of_any_size(warmup: int) -> None:
    """Under ramp-up, and in epochs whose last batch is small."""
    optimizer = OptimizerConfig(lr=1.0, lr_warmup_init=0.5, lr_warmup_iters=warmup, lr_decay_style="constant")
    epochs = TrainingConfig(global_batch_size=24, num_epochs=9)
    expected = [0.5 + 0.5 * min(1, step / warmup) for step in range(20)]
    for schedule in (Schedule(RAMP, optimizer), Schedule(epochs, optimizer, samples_per_epoch=100)):
        assert lr_by_step(schedule, 20) == pytest.approx(expected, rel=1e-12)


def test_decay_in_iterations_ends_with_that_step_under_rampup() -> None:
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.25, lr_decay_style="linear", lr_decay_iters=12)
    schedule = Schedule(RAMP, optimizer)
    assert schedule.params.lr_decay_samples == 56 + 48 + 2 * 24
    assert lr_by_step(schedule, 13)[12] == 0.25


def test_warmup_fraction_is_of_the_decay() -> None:
    for decay, samples in (({}, 2000), ({"lr_decay_samples": 500}, 500), ({"lr_decay_iters": 70}, 700)):
        rest: dict[str, Any] = {"lr": 1e-3, "lr_decay_style": "linear", **decay}
        given = OptimizerConfig(lr_warmup_samples=samples // 10, **rest)
        for at in (0, samples // 20, samples // 10, samples // 2):
            found = learning_rate(OptimizerConfig(lr_warmup_fraction=0.1, **rest), TRAINING, at)
            assert found == pytest.approx(learning_rate(given, TRAINING, at), rel=1e-12)


def test_a_warmup_longer_than_the_run_is_named_with_the_rate_that_is_reached() -> None:
    """As of a recipe's 25 steps over a few chats: 39 of them are 3 steps, the last from sample 32 of 375 + 24."""
    training = TrainingConfig(global_batch_size=16, num_epochs=1, task="sft")
    schedule = Schedule(training, OptimizerConfig(lr=2e-5, lr_warmup_iters=25), samples_per_epoch=39)
    warning = schedule.unended_warmup()
    assert warning is not None
    assert warning.endswith("its learning rate reaches 1.6e-06 instead of lr=2e-05; lower lr_warmup_iters=25")
    assert schedule.learning_rate(32) == pytest.approx(1.6e-6)
    for kept in (OptimizerConfig(lr_warmup_iters=3), OptimizerConfig()):
        assert Schedule(training, kept, samples_per_epoch=39).unended_warmup() is None


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
