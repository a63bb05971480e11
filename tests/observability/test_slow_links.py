"""When links are probed, which of them are slow, and which ranks compute longer: without processes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.observability import slow_links
from megatron.observability.slow_links import (
    APART,
    CHECK,
    LinkReport,
    LinkWatch,
    Pace,
    Rated,
    describe,
    longer_ranks,
    rate_links,
)
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.phase_clock import FORWARD, WAIT
from megatron.resilience.link_probe import ACROSS, REPEATS, REPEATS_OF_SECOND, Link, links_of, rounds_of
from megatron.resilience.rank_record import RankPlace

STEP_S, OWN_S = 0.1, 0.08
WITHIN = 50
"""Steps within which a slow link is named."""


def places(layout: Layout, per_host: int) -> list[RankPlace]:
    return [RankPlace(rank, f"node{rank // per_host}", "cpu", 0, 0, 0, 0) for rank in range(layout.world_size)]


def across(*pairs: tuple[int, int]) -> list[Link]:
    return [Link(one, other, "data", ACROSS) for one, other in pairs]


# Links and rounds


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(num_batch_ranks=4), {(0, 1), (1, 2), (2, 3), (0, 3)}),
        (Layout(num_stages=3), {(0, 1), (1, 2), (0, 2)}),
        (Layout(tensor_size=2, num_batch_ranks=2), {(0, 1), (2, 3), (0, 2), (1, 3)}),
        (Layout(num_batch_ranks=2), {(0, 1)}),
        # of replicas the ranks that hold the same shard
        (Layout(num_batch_ranks=4, num_replicas=2), {(0, 1), (2, 3), (0, 2), (1, 3)}),
        (Layout(), set()),
    ],
)
def test_links_are_those_between_neighbours_of_the_groups(layout: Layout, expected: set[tuple[int, int]]) -> None:
    links = links_of(layout, places(layout, per_host=1))
    assert {(link.one, link.other) for link in links} == expected
    assert len(links) == len(expected)


def test_links_within_hosts_are_like_those_at_the_same_places_of_other_hosts() -> None:
    layout = Layout(tensor_size=4, num_batch_ranks=2)
    by_like: dict[str, set[tuple[int, int]]] = {}
    for link in links_of(layout, places(layout, per_host=4)):
        by_like.setdefault(link.like, set()).add((link.one, link.other))
    assert by_like.pop(ACROSS) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert by_like["between local ranks 0 and 1"] == {(0, 1), (4, 5)}
    assert [len(pairs) for pairs in by_like.values()] == [2, 2, 2, 2]


@pytest.mark.parametrize("per_host", [1, 2, 4, 8])
def test_no_two_links_of_a_round_share_a_rank_or_an_interface(per_host: int) -> None:
    layout = Layout(tensor_size=2, num_stages=2, num_batch_ranks=4)
    where = places(layout, per_host)
    links = links_of(layout, where)
    rounds = rounds_of(links, where)
    assert sorted(map(str, itertools.chain(*rounds))) == sorted(map(str, links))
    for members in rounds:
        ranks = [rank for link in members for rank in (link.one, link.other)]
        assert len(ranks) == len(set(ranks))
        assert len({link.is_across_hosts for link in members}) == 1
        if members[0].is_across_hosts:
            hosts = [where[rank].host for rank in ranks]
            assert len(hosts) == len(set(hosts))


# Verdicts


def shares(now: Sequence[float], start: Sequence[float]) -> list[float]:
    """Share of the expected rate of each of these links, which are all alike."""
    links = across(*itertools.pairwise(range(len(now) + 1)))
    rated = rate_links(dict(zip(links, now, strict=True)), dict(zip(links, start, strict=True)))
    found = {each.link: each.share for each in rated}
    return [found[link] for link in links]


@pytest.mark.parametrize(
    ("now", "start", "expected"),
    [
        ([100, 33, 100, 100], [100, 100, 100, 100], [1, 0.33, 1, 1]),
        # slow from the start: by those like it
        ([100, 33, 100, 100], [100, 33, 100, 100], [1, 0.33, 1, 1]),
        # two of four, as of a host in a ring
        ([33, 33, 100, 100], [100, 100, 100, 100], [0.33, 0.33, 1, 1]),
        # all alike, as of a machine that does something else
        ([50, 50, 50, 50], [100, 100, 100, 100], [1, 1, 1, 1]),
        # one alone is compared with itself; faster ones are expected to be as at the start
        ([33], [100], [0.33]),
        ([33, 200], [100, 100], [0.33, 2]),
    ],
)
def test_a_link_is_compared_with_those_like_it_and_with_its_start(
    now: list[float], start: list[float], expected: list[float]
) -> None:
    found = shares(now, start)
    assert [value for value in found if value < 0.9] == pytest.approx([value for value in expected if value < 0.9])
    assert all(value >= 0.99 for value, right in zip(found, expected, strict=True) if right >= 0.99)


def test_the_median_is_that_of_the_others() -> None:
    rates = [3.0, 8.0, 1.0, 9.0, 2.0, 7.0, 7.0]
    for count in range(3, len(rates) + 1):
        for index, share in enumerate(shares(rates[:count], rates[:count])):
            others = rates[:index] + rates[index + 1 : count]
            assert share == pytest.approx(min(1.0, rates[index] / statistics.median_high(others)))


@pytest.mark.parametrize(
    ("step_s", "own_s", "expected"),
    [
        (0.3, [1.0, 0.28, 0.08, 0.08], [0, 1]),
        (0.3, [0.08, 0.28, 0.08, 0.08], [1]),
        (0.3, [0.09, 0.07, 0.08, 0.1], []),  # all wait
        (0.3, [0.28, 0.28, 0.28, 0.28], []),  # larger batches
        (0.1, [0.085, 0.08, 0.08, 0.08], []),  # little
        (0.3, [0.08, 0.28], [1]),
    ],
)
def test_a_rank_that_computes_longer_is_none_of_those_that_wait(
    step_s: float, own_s: list[float], expected: list[int]
) -> None:
    assert longer_ranks(Pace(step_s, own_s), Pace(STEP_S, [OWN_S] * len(own_s))) == expected


def test_a_host_is_named_where_all_its_links_are_slow_and_else_the_pair() -> None:
    links = across((0, 1), (1, 2), (2, 3), (0, 3))
    where = places(Layout(num_batch_ranks=4), per_host=1)

    def said(slow: list[int]) -> str:
        rated = [Rated(link, 30e6 if i in slow else 90e6, 90e6, "the median") for i, link in enumerate(links)]
        return describe([rated[index] for index in slow], rated, where)

    assert said([1]) == "between rank 1 on node1 and rank 2 on node2, 30 MB/s, 0.33 of the median"
    assert said([0, 1]) == "all 2 links of node1 with other hosts, 30 MB/s, 0.33 of the median"
    assert said([0, 2]).count("between") == 2


# The watch


@dataclass
class Probe:
    """Stands for the probe: four links with the seconds of now."""

    num_bytes: int = 10**6
    seconds: list[float] = field(default_factory=lambda: [0.01] * 4)
    probed: list[int] = field(default_factory=list)
    """Repeats of each probe."""

    def __post_init__(self) -> None:
        # of one rank with itself, whose numbers alone are gathered here
        self.rounds = [[Link(0, 0, str(number), ACROSS)] for number in range(4)]

    def measure(self, repeats: int) -> list[float]:
        self.probed.append(repeats)
        return self.seconds


def watched(
    change: Callable[[int, Probe], tuple[float, float]], num_steps: int = 200, interval: int = 0
) -> tuple[list[tuple[int, LinkReport]], Probe]:
    """The probes of a run, by step, whose steps take what `change` returns: seconds of work and of waits."""
    watch = LinkWatch(ParallelContext.single(), interval, sees_waits=True)
    probe = Probe()
    watch._probe = probe  # type: ignore[assignment]
    reports = []
    for step in range(1, num_steps + 1):
        own_s, wait_s = change(step, probe)
        watch.add([{FORWARD: own_s, WAIT: wait_s}])
        if step % CHECK == 0 and (report := watch.check(step)) is not None:
            reports.append((step, report))
    return reports, probe


@pytest.mark.parametrize("begin", range(11, 62))
@pytest.mark.parametrize("interval", [0, 20])
def test_a_link_at_a_third_is_named_within_fifty_steps_of_whichever_it_becomes_slow_at(
    begin: int, interval: int
) -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        if step == begin:
            probe.seconds[2] *= 3
        # a disturbance too, whose probe could use up the time of the next one
        return OWN_S, STEP_S - OWN_S + 0.05 * (step >= begin) + 0.05 * (20 <= step < 40)

    reports, _ = watched(change, interval=interval)
    named = [step for step, report in reports if report.warning]
    assert len(named) == 1, "and once"
    assert begin < named[0] < begin + WITHIN
    assert dict(reports)[named[0]].row["cause"] == "link"
    assert dict(reports)[named[0]].slowest_share == pytest.approx(1 / 3)


def test_a_slow_link_that_delays_no_step_is_found_at_the_interval_alone() -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        probe.seconds[2] = 0.03 if step > 30 else 0.01
        return OWN_S, STEP_S - OWN_S

    assert not any(report.warning for _, report in watched(change)[0])
    assert [step for step, report in watched(change, interval=20)[0] if report.warning] == [60]


def test_one_probe_with_a_slow_link_names_none() -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        # each time another one
        probe.seconds = [0.03 if number == step // 10 % 4 else 0.01 for number in range(4)]
        return OWN_S, 0.1

    reports, probe = watched(change, interval=10)
    assert not any(report.warning for _, report in reports)
    assert REPEATS_OF_SECOND in probe.probed


def test_a_slow_rank_s_links_are_not_named_and_measured_again_once_it_is_not() -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        probe.seconds[2] = 0.03 if step > 30 else 0.01
        return (2 * OWN_S if 30 < step <= 100 else OWN_S), 0.1 if step > 30 else STEP_S - OWN_S

    # alone, nobody else has what would be common to all
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "megatron.observability.slow_links.longer_ranks", lambda now, usual: [0] * (now.own_s[0] > 1.5 * OWN_S)
        )
        reports, _ = watched(change)
    named = [step for step, report in reports if report.warning]
    assert 100 < named[0] <= 130, [(step, report.row["cause"]) for step, report in reports]


def test_longer_steps_without_a_slow_link_are_probed_ever_more_rarely() -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        return OWN_S, 0.1 if step > 30 else STEP_S - OWN_S

    reports, probe = watched(change)
    causes = [(step, report.row["cause"]) for step, report in reports]
    assert causes == [(10, None), *((step, "waiting") for step in (40, 60, 100, 180))]
    assert {*probe.probed} == {REPEATS}


def test_whatever_steps_take_probes_are_apart() -> None:
    def change(step: int, probe: Probe) -> tuple[float, float]:
        return OWN_S, 0.05 if step // 10 % 2 else 1.0

    steps = [step for step, _ in watched(change)[0]]
    assert len(steps) > 2
    assert all(later - earlier >= APART for earlier, later in itertools.pairwise(steps))


def test_nothing_is_probed_beside_a_save() -> None:
    watch = LinkWatch(ParallelContext.single(), 10, sees_waits=True)
    watch.is_busy = lambda iteration: True
    watch.add([{FORWARD: OWN_S}] * 20)
    assert watch.check(20) is None
    watch.is_busy = lambda iteration: False
    watch._probe = Probe()  # type: ignore[assignment]
    assert watch.check(30) is not None


def test_a_rank_s_place_is_kept_where_ranks_are_many() -> None:
    layout = Layout(tensor_size=8, num_batch_ranks=16, num_stages=4)
    assert len(links_of(replace(layout, rank=5), places(layout, 8))) == len(links_of(layout, places(layout, 8)))


@pytest.mark.parametrize(
    ("device", "hosts", "interval", "expected"),
    [
        ("cpu", 2, None, True),
        ("cpu", 1, None, False),
        ("cpu", 1, 20, True),
        ("cuda", 2, None, False),  # no probe has run over NCCL
        ("cuda", 2, 20, True),
        ("cpu", 2, 0, False),
    ],
)
def test_without_an_interval_the_links_between_hosts_of_cpus_are_watched(
    monkeypatch: pytest.MonkeyPatch, device: str, hosts: int, interval: int | None, expected: bool
) -> None:
    monkeypatch.setattr(slow_links, "LinkWatch", lambda *_, **options: options)
    monkeypatch.setattr(slow_links, "divides_passes", lambda *_: True)
    ctx: Any = SimpleNamespace(
        world_size=2,
        device=SimpleNamespace(type=device),
        gather_objects=lambda _: [f"node{number % hosts}" for number in range(2)],
        state=SimpleNamespace(clock=SimpleNamespace(runs=True)),
    )
    config: Any = SimpleNamespace(
        logging=SimpleNamespace(link_probe_interval=interval), optimizer=SimpleNamespace(zero_stage=0)
    )
    assert (slow_links.watch_links(config, ctx) is not None) is expected
