"""The rank that holds up the others is named with the phase, and none where all are as fast as their work allows."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from megatron.observability.rank_times import StragglerStats, straggler_stats
from megatron.resilience.rank_record import RankPlace, RankRecord

WORK = (2.0, 4.0, 10.0, 0.0)
TIMES = (0.2, 0.4, 0.1, 0.0)


def rank(
    number: int,
    own: tuple[float, ...] = TIMES,
    *,
    stage: int = 0,
    work: tuple[float, ...] = WORK,
    earlier: tuple[float, ...] | None = None,
    **options: float,
) -> RankRecord:
    """A rank of a step of one second; each rank of a stage is a replica."""
    place = RankPlace(number, f"node{number}", "cpu", stage, 0, number % 2, number % 2)
    numbers = {"step_s": 1.0, "num_steps": 16, "positions": 64.0} | options
    return RankRecord(place, own=own, earlier=earlier, work=work, **numbers)  # type: ignore[arg-type]


def rank_times(number: int, forward_s: float, *, stage: int = 0, data_s: float = 0.0) -> RankRecord:
    """A rank in the middle of a run, for the tests of what is shown of it."""
    return rank(number, (forward_s, 0.0, 0.0, data_s), stage=stage)


def named(*times: RankRecord) -> tuple[int, ...]:
    return straggler_stats(times).straggler_ranks


@pytest.mark.parametrize(("phase", "index"), [("forward", 0), ("backward", 1), ("optimizer", 2), ("data", 3)])
def test_a_rank_slower_than_its_peers_is_named_with_the_phase(phase: str, index: int) -> None:
    slow = tuple(seconds + (1.0 if place == index else 0.0) for place, seconds in enumerate(TIMES))
    for others in (1, 2, 5):
        stats = straggler_stats([*(rank(number) for number in range(others)), rank(others, slow)])
        assert stats.straggler_ranks == (others,)
        assert stats.slowest_phase == phase
        found = f"{phase} +1000.0 ms a step, own time 2.43 x the other ranks of its stage"
        assert stats.stragglers == f"rank {others} on node{others} (cpu): {found}"
        assert f"| straggler: rank {others} on" in str(stats)


def test_a_rank_alone_in_its_stage_is_named_by_the_work_of_the_others() -> None:
    double = (4.0, 8.0, 20.0, 0.0)
    fair = rank(1, (0.4, 0.8, 0.2, 0.0), stage=1, work=double)
    assert named(rank(0), fair) == ()
    stats = straggler_stats([rank(0), rank(1, (1.0, 1.6, 0.4, 0.0), stage=1, work=double)])
    assert (stats.straggler_ranks, stats.slowest_phase, round(stats.slowest_ratio, 2)) == ((1,), "backward", 2.14)
    # with less work it is not expected to be faster: its operators are as many
    assert named(rank(0), rank(1, stage=1, work=(0.2, 0.4, 1.0, 0.0))) == ()


def test_a_rank_with_more_work_than_its_peers_may_take_longer() -> None:
    """Under a window the ranks that share rows differ: the first places of a row see fewer keys."""
    more = (3.0, 6.0, 10.0, 0.0)
    slower = (0.36, 0.72, 0.1, 0.0)
    assert named(rank(0), rank(1, slower)) == (1,)
    assert named(rank(0), rank(1, slower, work=more)) == ()
    assert named(rank(0), rank(1, (0.6, 1.2, 0.1, 0.0), work=more)) == (1,)


def test_a_rank_that_became_slower_than_the_others_did_is_named() -> None:
    # by its peers and the plan it is not slow enough
    slower = (0.3, 0.6, 0.16, 0.0)
    stats = straggler_stats([rank(0, earlier=TIMES), rank(1, slower, stage=1, earlier=TIMES)])
    assert (stats.straggler_ranks, stats.slowest_phase) == ((1,), "backward")
    assert "its earlier steps" in stats.stragglers
    # all became slower, as with longer sequences or a larger batch
    assert named(rank(0, slower, earlier=TIMES), rank(1, slower, stage=1, earlier=TIMES)) == ()


def test_unequal_data_is_no_slowness() -> None:
    half = (0.1, 0.2, 0.1, 0.0)
    assert named(rank(0, half, positions=32.0), rank(1, positions=64.0)) == ()
    assert named(rank(0, half, positions=64.0), rank(1, positions=64.0)) == (1,)
    # an inner stage reads none: its replica's counts
    inner = [rank(2, half, stage=1, positions=0.0), rank(3, stage=1, positions=0.0)]
    assert named(rank(0, half, positions=32.0), rank(1, positions=64.0), *inner) == ()


def test_none_is_named_after_few_steps_or_for_a_small_delay() -> None:
    slow = (1.0, 1.0, 0.1, 0.0)
    assert named(rank(0), rank(1, slow)) == (1,)
    assert named(rank(0), rank(1, slow, num_steps=3)) == ()
    assert named(rank(0), rank(1, slow, step_s=20.0)) == ()
    assert named(rank(0)) == named(rank(0, slow)) == ()


def test_only_the_slowest_are_listed_and_the_others_counted() -> None:
    slow = [rank(number, (1.0 + number, 0.4, 0.1, 0.0)) for number in range(6)]
    stats = straggler_stats([*slow, *(rank(number) for number in range(6, 20))])
    assert stats.straggler_ranks == (5, 4, 3, 2, 1, 0)
    assert stats.stragglers.startswith("rank 5 on")
    assert stats.stragglers.endswith("; and 2 more")


def test_every_combination_of_times_gives_finite_numbers() -> None:
    for first, second, stage in itertools.product((0.0, 1e-9, 5.0), (0.0, 1e-9, 5.0), (0, 1)):
        times = [rank(0, (first,) * 4, earlier=(second,) * 4), rank(1, (second,) * 4, stage=stage)]
        times.append(dataclasses.replace(times[1], positions=0.0))
        stats: StragglerStats = straggler_stats(times)
        assert all(math.isfinite(value) for value in vars(stats).values() if isinstance(value, float))
