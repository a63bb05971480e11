"""The doctor's tournament and rules on planted records, and an examination of 1,000 simulated hosts."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from megatron.launch.doctor import examination, rules
from megatron.launch.doctor.examination import Examination, Extent, Wanted, suspects_of
from megatron.launch.doctor.links import HANDSHAKE_S, batches, rounds
from megatron.launch.doctor.replies import (
    Clock,
    DamagedReplyError,
    DeviceChecks,
    DiskRates,
    Facts,
    Failed,
    GroupTime,
    GroupTimes,
    Port,
    ProductCheck,
    Received,
    record_of,
)
from megatron.launch.doctor.report import text
from megatron.launch.doctor.rules import Suspicion, lows
from megatron.launch.plan import Host

FACTS = Facts(
    hostname="node",
    machine="one",
    processor="a processor",
    cores=2,
    device="hpu",
    devices=8,
    chips=("HL-225",) * 8,
    driver="1.24.0",
    packages={"torch": "2.10.0", "megatron": "abc"},
    memory_bytes=10**12,
    memory_free=9 * 10**11,
    disk_bytes=10**12,
    disk_free=5 * 10**11,
    open_files=10**6,
    link_bits=0,
)


# ---------------------------------------------------------------------------------------------------------------------
# Tournament


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_all_rounds_are_every_pair_once(count: int) -> None:
    met = list(rounds(range(count), most=10**6))
    assert len(met) == count - 1 + count % 2
    for pairs in met:
        hosts = list(itertools.chain(*pairs))
        assert len(hosts) == len(set(hosts)) == count - count % 2
    every = sorted(tuple(sorted(pair)) for pairs in met for pair in pairs)
    assert every == list(itertools.combinations(range(count), 2))


def test_a_thousand_hosts_meet_64_others_each_in_64_rounds() -> None:
    met: dict[int, set[int]] = {}
    played = list(rounds(range(1000)))
    for a, b in itertools.chain(*played):
        met.setdefault(a, set()).add(b)
        met.setdefault(b, set()).add(a)
    assert len(played) == 64
    assert {len(each) for each in met.values()} == {64}


def test_no_two_tests_at_once_use_one_machine() -> None:
    machine = {0: "a", 1: "a", 2: "b", 3: "c", 4: "c", 5: "d"}
    parts = list(batches([(0, 5), (1, 4), (2, 3)], machine))
    assert parts == [[(0, 5), (2, 3)], [(1, 4)]]
    assert list(batches([(0, 1)], machine)) == [[(0, 1)]]


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def test_a_rate_is_low_below_its_share_of_the_median_and_beyond_the_spread() -> None:
    assert set(lows({"a": 10.0, "b": 9.0, "c": 10.5, "d": 3.0}, 0.7)) == {"d"}
    assert lows({"a": 10.0, "b": 9.0, "c": 10.5, "d": 7.2}, 0.7) == {}
    # all differ as much: none stands out
    assert lows({"a": 1.0, "b": 5.0, "c": 10.0, "d": 20.0, "e": 30.0}, 0.7) == {}
    assert set(lows({"a": 10.0, "b": 6.0}, 0.7)) == {"b"}
    assert "of two, either may be unusual" in lows({"a": 10.0, "b": 6.0}, 0.7)["b"].text(str)
    assert lows({"a": 1.0}, 0.7) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"packages": {"torch": "2.11.0", "megatron": "abc"}}, "its torch is 2.11.0, but 2.10.0 on 3 of 4 hosts"),
        ({"packages": {"torch": "2.10.0", "megatron": "abd"}}, "its megatron is abd, but abc on 3 of 4 hosts"),
        ({"packages": {"torch": "2.10.0"}}, "its megatron is not installed, but abc on 3 of 4 hosts"),
        ({"driver": "1.23.0"}, "its driver is 1.23.0, but 1.24.0 on 3 of 4 hosts"),
        ({"chips": ("HL-325",) * 8}, "its chips is HL-325, but HL-225 on 3 of 4 hosts"),
        ({"memory_bytes": 9 * 10**11}, "its memory is 900.0 GB, 0.90 of the median of 4 (1000.0 GB)"),
        ({"memory_free": 10**11}, "its free memory is 100.0 GB, 0.11 of the median of 4 (900.0 GB)"),
        ({"disk_free": 10**8}, "its disk has 0.10 GB free, less than 1 GB"),
        ({"open_files": 1024}, "its limit of open files is 1024 (ulimit -Hn), but a rank here needs up to 2000"),
    ],
)
def test_a_host_that_lacks_or_differs_is_named(change: Mapping[str, Any], expected: str) -> None:
    facts = dict.fromkeys(range(4), FACTS) | {2: dataclasses.replace(FACTS, **change)}
    found = list(rules.judge_facts(facts, dict.fromkeys(facts, 8), needed_files=2000))
    assert [each.host for each in found] == [2]
    assert found[0].reason.startswith(expected)


def test_too_few_devices_and_two_hosts_without_a_majority() -> None:
    facts = {0: FACTS, 1: dataclasses.replace(FACTS, devices=7)}
    found = [each.reason for each in rules.judge_facts(facts, {0: 8, 1: 8}, 0)]
    assert found == [
        "it has 7 devices, but 8 ranks are to run on it",
        "its number of devices is 7, but 8 on 1 of 2 hosts, not a majority",
    ]


def test_a_clock_is_named_where_its_interval_is_off_and_not_where_it_is_wide() -> None:
    assert list(rules.judge_clocks({0: (-0.001, 0.001), 1: (-0.5, 4.0), 2: (-0.002, 0.0)})) == []
    (found,) = rules.judge_clocks({0: (-0.001, 0.001), 1: (3.1, 3.3), 2: (-0.002, 0.0)})
    assert (found.host, found.kind) == (1, "clock")
    assert "between +3.100 and +3.300 s off" in found.reason.replace("3.101", "3.100").replace("3.301", "3.300")
    assert [each.host for each in rules.judge_clocks({0: (-3.0, -2.9)})] == [0]


def checks(digest: str = "right", *, repeats: bool = True, is_exact: bool = True, flops: float = 1e9) -> DeviceChecks:
    products = tuple(ProductCheck(f"core {core}", flops, repeats, digest, is_exact) for core in range(2))
    return DeviceChecks(products, (1e9,))


def test_wrong_bits_are_named_by_repeats_by_whole_numbers_and_by_equals() -> None:
    alike = dict.fromkeys(range(4), "alike")
    assert list(rules.judge_bits({host: checks() for host in range(4)}, alike)) == []
    for wrong, why in (
        (checks(repeats=False), "gives other bits when it repeats a product"),
        (checks(is_exact=False), "gives a wrong product of whole numbers"),
        (checks("wrong"), "6 of 8 like it give the same other bits"),
    ):
        found = list(rules.judge_bits({host: checks() for host in range(3)} | {3: wrong}, alike))
        assert [each.host for each in found] == [3, 3]
        assert all(why in each.reason for each in found)
    # other hardware may round otherwise
    assert list(rules.judge_bits({0: checks("a"), 1: checks("b")}, {0: "one", 1: "other"})) == []
    either = list(rules.judge_bits({0: checks("a"), 1: checks("b")}, {0: "one", 1: "one"}))
    assert {each.host for each in either} == {0, 1}


def links_of(count: int) -> dict[tuple[int, int], float]:
    return {(a, b): 1e9 for a in range(count) for b in range(count) if a != b}


def test_a_slow_link_names_its_pair_and_a_slow_host_itself() -> None:
    stated = dict.fromkeys(range(5), 0)
    assert rules.low_links(links_of(5), stated) == []
    one_way = links_of(5) | {(1, 3): 2e8}
    assert [(each.host, each.peer) for each in rules.low_links(one_way, stated)] == [(1, 3)]
    receives = links_of(5) | {(host, 4): 2e8 for host in range(4)}
    (found,) = rules.low_links(receives, stated)
    assert (found.host, found.peer) == (4, None)
    assert found.reason.startswith("it receives at 200 MB/s, 0.20 of the median of 5 (1 GB/s)")
    # with three hosts a slow link is named by its ends, and no host as slow
    (found,) = rules.low_links(links_of(3) | {(0, 1): 1e8}, dict.fromkeys(range(3), 0))
    assert (found.host, found.peer) == (0, 1)


def test_two_hosts_are_compared_with_the_other_way_and_with_what_the_interface_states() -> None:
    (found,) = rules.low_links({(0, 1): 1e9, (1, 0): 2e8}, {0: 0, 1: 0})
    assert (found.host, found.peer) == (1, 0)
    slow = {(0, 1): 1e7, (1, 0): 1e7}
    assert rules.low_links(slow, {0: 0, 1: 10**10}) == [], "one interface states nothing"
    found_both = rules.low_links(slow, {0: 10**10, 1: 10**10})
    assert [each.peer for each in found_both] == [1, 0]
    assert "less than 375 MB/s, 0.3 of what its interface states" in found_both[0].reason
    # one stream does not fill a link of 400 Gbit/s
    assert rules.low_links({(0, 1): 1e9, (1, 0): 1e9}, {0: 4 * 10**11, 1: 4 * 10**11}) == []


def test_the_host_with_most_bad_links_is_left_out_and_of_one_link_the_later() -> None:
    assert suspects_of([Suspicion(0, "link", "", 2), Suspicion(2, "link", "", 0)]) == [2]
    assert suspects_of([Suspicion(0, "link", "", 1), Suspicion(0, "link", "", 2), Suspicion(3, "lost", "")]) == [0, 3]
    assert suspects_of([Suspicion(1, "disk", ""), Suspicion(1, "link", "", 2)]) == [1]


# ---------------------------------------------------------------------------------------------------------------------
# Examination of simulated hosts


@dataclasses.dataclass
class SimulatedAgent:
    fault: str | None = None
    asked_at: float = 0.0
    answered_at: float = 0.0


class SimulatedFleet:
    """Answers of hosts whose rates vary by a tenth, and the seconds that their measurements would take."""

    def __init__(self, count: int, seed: int, planted: bool) -> None:
        self.hosts = tuple(Host(f"node{number}", 8, number + 1) for number in range(count))
        self.agents = {number: SimulatedAgent() for number in range(count)}
        self.planted, self._random = planted, random.Random(seed)
        self.device = "hpu"
        self.seconds = {"links": 0.0}
        self.num_rounds = 0

    def give_up(self, agent: SimulatedAgent, fault: str) -> None:
        agent.fault = fault

    @property
    def alive(self) -> list[int]:
        return [number for number, agent in self.agents.items() if agent.fault is None]

    def start(self, question: Mapping[str, Any], kind: type[Any]) -> dict[int, Any]:
        if self.planted:
            self.agents[17].fault = "does not answer within 40 s"
        return self.ask(dict.fromkeys(self.alive, question), kind, 0)

    def ask(self, questions: Mapping[int, Mapping[str, Any]], kind: type[Any], limit_s: float) -> dict[int, Any]:
        found = {number: self._answer(number, question) for number, question in questions.items()}
        asked = {question["do"] for question in questions.values()}
        if "serve" in asked:
            # both directions, the handshake, and the answers of all hosts
            (seconds,) = {question["seconds"] for question in questions.values()}
            self.seconds["links"] += 2 * seconds + 0.02 + 1e-4 * len(questions)
            if any(isinstance(answer, Failed) for answer in found.values()):
                self.seconds["links"] += HANDSHAKE_S
            self.num_rounds += 1
        return found

    def _rate(self, usual: float, spread: float = 0.05) -> float:
        return usual * max(0.5, self._random.gauss(1, spread))

    def _answer(self, number: int, question: Mapping[str, Any]) -> Any:
        is_odd = self.planted and number == 401
        agent, do = self.agents[number], question["do"]
        if do == "facts":
            # of equal machines firmware takes more or less
            memory = FACTS.memory_bytes - self._random.randrange(10**9)
            return dataclasses.replace(FACTS, machine=str(number), memory_bytes=memory)
        if do == "clock":
            agent.asked_at, agent.answered_at = 100.0, 100.002
            return Clock(100.001 + (2.5 if self.planted and number == 402 else 0))
        if do == "disk":
            return DiskRates(self._rate(2e9, 0.15) * (0.1 if self.planted and number == 403 else 1), 0.002)
        if do == "devices":
            slow = 0.5 if self.planted and number == 404 else 1.0
            products = [
                ProductCheck(f"hpu {rank}", self._rate(4e14, 0.02), True, "bits", not (is_odd and rank == 3))
                for rank in range(8)
            ]
            products[5] = dataclasses.replace(products[5], flops=products[5].flops * slow)
            return DeviceChecks(tuple(products), tuple(self._rate(1e12, 0.02) for _ in range(8)))
        if do == "listen":
            return Port(f"10.0.0.{number}", 4000)
        ends = question["test"]["to"], question["test"]["from"]
        if self.planted and number == 405:
            return Failed("the other end did not come within 5 s")
        slow_link = self.planted and (406 in ends) and (ends[0] + ends[1]) % 7 == 0
        return Received(self._rate(3e9, 0.08) * (0.2 if slow_link else 1), 5e-5)


def examined(count: int, seed: int, *, planted: bool) -> tuple[examination.Examined, SimulatedFleet]:
    fleet = SimulatedFleet(count, seed, planted)
    return Examination(fleet, Wanted(extent=Extent()), lambda line: None).run(), fleet  # type: ignore[arg-type]


def test_a_thousand_hosts_take_minutes_and_the_planted_ones_are_named() -> None:
    found, fleet = examined(1000, 1, planted=True)
    assert found.num_rounds == 64
    assert fleet.seconds["links"] < 120, f"{fleet.seconds['links']:.0f} s in {fleet.num_rounds} rounds"
    named = {each.host: each for each in found.suspicions if each.kind != "link"}
    assert sorted(named) == [17, 401, 402, 403, 404]
    assert named[401].reason == "hpu 3 computes wrongly: it gives a wrong product of whole numbers"
    assert named[404].reason.startswith("hpu 5 multiplies at ")
    of_links = [each for each in found.suspicions if each.kind == "link"]
    assert [each.host for each in of_links if each.peer is None] == [405]
    assert all(406 in (each.host, each.peer) for each in of_links if each.peer is not None)
    assert found.suspects() == [17, 401, 402, 403, 404, 405, 406]
    shown = text(found).splitlines()
    assert max(map(len, shown)) <= 100
    assert len(shown) < 80


def test_no_clean_host_of_twenty_fleets_is_named() -> None:
    for seed in range(20):
        found, _ = examined(60, seed, planted=False)
        assert found.suspicions == []


def test_a_host_names_no_device_whose_code_would_be_imported() -> None:
    class WithCode(SimulatedFleet):
        def _answer(self, number: int, question: Mapping[str, Any]) -> Any:
            answer = super()._answer(number, question)
            return dataclasses.replace(answer, device="antigravity:RECORD") if question["do"] == "facts" else answer

    fleet = WithCode(1, 1, False)
    found = Examination(fleet, Wanted(), lambda line: None).run()  # type: ignore[arg-type]
    assert [each.reason for each in found.suspicions] == ["it sent a reply with a device that is not there"]
    assert "antigravity" not in sys.modules


def test_devices_and_their_memories_are_as_many() -> None:
    product = {"name": "core 0", "flops": 1.0, "repeats": True, "digest": "a", "is_exact": True}
    assert record_of({"products": [product], "memory": [1.0]}, DeviceChecks)
    with pytest.raises(DamagedReplyError, match="2 memories of 1 devices"):
        record_of({"products": [product], "memory": [1.0, 0.1]}, DeviceChecks)


class WithGroups(SimulatedFleet):
    """Hosts of 8 ranks, whose groups take what is planted."""

    groups: tuple[GroupTime, ...] = ()
    failures: Mapping[int, str] = {}

    def _answer(self, number: int, question: Mapping[str, Any]) -> Any:
        if question["do"] == "store":
            return Port("10.0.0.1", 4000)
        if question["do"] != "groups":
            return super()._answer(number, question)
        assert question["sizes"] == [8, 1, 1]
        if number in self.failures:
            return Failed(self.failures[number])
        return GroupTimes(() if question["node"] else self.groups)

    def examined(self) -> examination.Examined:
        return Examination(self, Wanted(group_sizes=(8, 1, 1)), lambda line: None).run()  # type: ignore[arg-type]


SECONDS = (0.001, 0.0011, 0.004, 0.00105)


def test_a_slow_group_within_a_host_leaves_it_out() -> None:
    fleet = WithGroups(4, 1, False)
    ranks = [tuple(range(8 * host, 8 * host + 8)) for host in range(4)]
    fleet.groups = tuple(GroupTime("tensor", "all_reduce", ranks[host], 2**20, SECONDS[host]) for host in range(4))
    found = fleet.examined()
    (named,) = found.suspicions
    assert (named.host, named.kind) == (2, "group")
    assert named.reason.startswith("the tensor group of ranks 16, 17, 18")
    assert found.suspects() == [2]


def test_a_slow_group_over_hosts_is_named_and_leaves_none_out() -> None:
    fleet = WithGroups(4, 1, False)
    ranks = [tuple(range(local, 32, 8)) for local in range(4)]
    fleet.groups = tuple(GroupTime("data", "all_reduce", ranks[local], 2**20, SECONDS[local]) for local in range(4))
    found = fleet.examined()
    (named,) = found.suspicions
    assert named.reason.startswith("the data group of ranks 2, 10, 18, 26 over 4 hosts exchanges at ")
    assert found.suspects() == []


@pytest.mark.parametrize(("failing", "out"), [((1,), [1]), ((0, 1, 2, 3), [])])
def test_an_exchange_that_fails_on_all_hosts_leaves_none_out(failing: tuple[int, ...], out: list[int]) -> None:
    fleet = WithGroups(4, 1, False)
    fleet.failures = dict.fromkeys(failing, "a program ended with status 1: connection closed by peer")
    found = fleet.examined()
    assert [each.host for each in found.suspicions] == list(failing)
    assert found.suspects() == out
