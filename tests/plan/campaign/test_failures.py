"""Expected time of a run whose devices fail, against closed forms, a simulation and a published run."""

from __future__ import annotations

import math
import random

import pytest

from megatron.plan.campaign.failures import (
    Failures,
    Save,
    best_interval,
    daly_interval,
    duration,
    expected,
    spares,
    young_interval,
)


def simulated_s(interval_s: float, save: Save, failures: Failures, num_segments: int, seed: int) -> float:
    """Seconds until so many segments are saved, by a clock that goes from event to event.

    A save is begun after each interval of training, waits for the one before it, holds up training for a moment, and
    is whole a while later. A failure throws away all but the last whole one.
    """
    chance = random.Random(seed)
    now, saved = 0.0, 0
    fails_at = chance.expovariate(1 / failures.mean_s)
    while saved < num_segments:
        trained, whole_at = saved, list[float]()
        clock = now
        while True:
            trains_until = clock + interval_s
            # the save before it, if it is not whole yet
            begins_at = max([trains_until, *whole_at[-1:]])
            clock = begins_at + save.wait_s
            if clock > fails_at:
                break
            trained += 1
            whole_at.append(clock + save.hidden_s)
        saved += sum(at <= fails_at for at in whole_at)
        now = fails_at
        while True:
            fails_at = now + chance.expovariate(1 / failures.mean_s)
            if fails_at > now + failures.restart_s:
                now += failures.restart_s
                break
            now = fails_at
    return now


@pytest.mark.parametrize(
    ("interval_s", "save", "failures"),
    [
        pytest.param(600.0, Save(60.0), Failures(3600.0, 300.0), id="waits"),
        pytest.param(600.0, Save(5.0, 300.0), Failures(3600.0, 300.0), id="background"),
        pytest.param(200.0, Save(5.0, 300.0), Failures(1800.0, 60.0), id="a save waits for the one before"),
        pytest.param(1500.0, Save(300.0), Failures(1000.0, 900.0), id="often"),
        pytest.param(100.0, Save(0.0), Failures(5000.0, 0.0), id="free"),
    ],
)
def test_the_expected_time_is_that_of_a_simulation(interval_s: float, save: Save, failures: Failures) -> None:
    segments = 40_000
    time = expected(segments * interval_s, interval_s, save, failures)
    assert time is not None
    # the mean of some 10,000 failures: a percent is about two standard deviations of the rarest of these cases
    assert simulated_s(interval_s, save, failures, segments, seed=7) == pytest.approx(time.total_s, rel=0.015)


def test_a_save_that_training_waits_for_takes_dalys_time() -> None:
    length, tau, delta, mean, restart = 1e6, 700.0, 45.0, 5000.0, 400.0
    time = expected(length, tau, Save(delta), Failures(mean, restart))
    assert time is not None
    daly = mean * math.exp(restart / mean) * (math.exp((tau + delta) / mean) - 1) * length / tau
    assert time.total_s == pytest.approx(daly, rel=1e-12)
    assert time.failures == pytest.approx(daly / mean, rel=1e-12)
    assert min(time.saving_s, time.lost_s, time.restarting_s) > 0
    assert time.effective == pytest.approx(length / daly, rel=1e-12)


def test_without_failures_the_time_is_that_of_steps_and_saves() -> None:
    for mean in (math.inf, 1e14):
        time = expected(1000.0, 100.0, Save(2.0), Failures(mean, 60.0))
        assert time is not None
        assert time.total_s == pytest.approx(1020.0, rel=1e-9)
    assert best_interval(Save(2.0), Failures(math.inf, 0.0)) == math.inf


@pytest.mark.parametrize("wait", [0.001, 1.0, 30.0, 900.0, 5000.0])
@pytest.mark.parametrize("mean", [1000.0, 20_000.0, 1e7])
def test_the_best_interval_is_the_best(wait: float, mean: float) -> None:
    save, failures = Save(wait), Failures(mean, 10.0)
    best_s = best_interval(save, failures)
    times = [expected(1e6, best_s * (1 + step / 20), save, failures) for step in range(-5, 6)]
    assert all(time is not None for time in times)
    totals = [time.total_s for time in times if time is not None]
    assert min(totals) == totals[5]


def test_young_and_daly_agree_where_saves_are_short_and_part_where_failures_are_frequent() -> None:
    save, rare, frequent = Save(10.0), Failures(1e6, 0.0), Failures(30.0, 0.0)
    best = best_interval(save, rare)
    # their errors by their own orders: Young's is that of the wait, Daly's beyond
    assert young_interval(10.0, 1e6) == pytest.approx(best, rel=5e-3)
    assert daly_interval(10.0, 1e6) == pytest.approx(best, rel=1e-6)
    best = best_interval(save, frequent)
    assert daly_interval(10.0, 30.0) == pytest.approx(best, rel=0.01)
    assert young_interval(10.0, 30.0) > 1.3 * best
    # Daly's own limit: a wait of two means and more
    assert daly_interval(60.0, 30.0) == daly_interval(100.0, 30.0) == 30.0


def test_a_save_in_the_background_is_never_begun_before_the_last_one_is_whole() -> None:
    assert best_interval(Save(0.0, 120.0), Failures(3600.0, 0.0)) == 120.0
    assert best_interval(Save(1.0, 10.0), Failures(3600.0, 0.0)) == best_interval(Save(1.0), Failures(3600.0, 0.0))


def test_a_run_that_fails_before_it_saves_has_no_figures() -> None:
    assert "every 2 min, sooner than a save is written (10 min)" in str(Failures(120, 30).hinder(Save(5, 595)))
    assert "sooner than a restart has ended (5 min)" in str(Failures(120, 300).hinder(Save(5)))
    assert Failures(601, 300).hinder(Save(600)) is None
    # an interval that hardly a life reaches the end of
    assert expected(1e6, 1e5, Save(1.0), Failures(500.0, 1.0)) is None


def test_spares_are_enough_by_counting() -> None:
    chance = random.Random(3)
    for mean, probability in ((0.3, 0.95), (4.0, 0.95), (40.0, 0.99)):
        number = spares(mean, probability)
        # failures of the last day, by their gaps
        counts = []
        for _ in range(20_000):
            at, count = chance.expovariate(mean), 0
            while at < 1:
                count += 1
                at += chance.expovariate(mean)
            counts.append(count)
        assert sum(count <= number for count in counts) / len(counts) >= probability - 0.005
        assert sum(count < number for count in counts) / len(counts) < probability + 0.005
    assert spares(1000.0, 0.5) == pytest.approx(1000, abs=1)


def test_llama_3_trains_effectively_nine_tenths_of_its_time() -> None:
    # 419 unexpected interruptions in 54 days on 16,384 GPUs, more than 90 % effective (arXiv:2407.21783, section 3.3)
    device_mean_s = 54 * 86_400 * 16_384 / 419
    failures = Failures.of_devices(16_384, device_mean_s, restart_s=600.0)
    assert failures.mean_s == pytest.approx(3.1 * 3600, rel=0.01)
    save = Save(wait_s=2.0, hidden_s=60.0)
    best = expected(50 * 86_400, best_interval(save, failures), save, failures)
    assert best is not None
    assert 0.9 < best.effective < 0.95
    assert best.failures == pytest.approx(419, rel=0.05)
    # half an hour to restart would not have been enough
    slow = Failures(failures.mean_s, 1800.0)
    late = expected(50 * 86_400, best_interval(save, slow), save, slow)
    assert late is not None
    assert late.effective < 0.9


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.412, "412 ms"), (0.9999, "1 s"), (61.0, "61 s"), (600.0, "10 min"), (8000.0, "2.22 h"), (1e9, "11,574 days")],
)
def test_durations_have_the_unit_that_shows_them_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text
