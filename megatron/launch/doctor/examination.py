"""Examination of a fleet, stage by stage: facts, clocks, disks, devices, links, groups.

What seems slow is measured again before it is named, and its best rate counts: other work on a host makes a rate lower,
and nothing makes it higher. Wrong bits, a full disk and a lost host are named at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.launch.doctor import rules
from megatron.launch.doctor.fleet import Fleet
from megatron.launch.doctor.links import MOST_ROUNDS, Pair, batches, rounds
from megatron.launch.doctor.replies import (
    Clock,
    DeviceChecks,
    DiskRates,
    Facts,
    Failed,
    GroupTime,
    GroupTimes,
    Port,
    Received,
    Record,
)
from megatron.launch.doctor.rules import Suspicion, link_text
from megatron.launch.plan import Host, LaunchPlan
from megatron.runtime.commands import counted, first_of
from megatron.runtime.descriptors import needed
from megatron.runtime.devices import DEVICES, find_device, is_device

AGAIN = 2
"""Further measurements of what seems slow."""
FEW = 8
"""Hosts all of whose links are measured again with one of them: few rates spread as they are disturbed."""
ANSWER_S = 30.0
"""Time to answer a question that needs no measurement."""
UNREACHED = 3
"""Hosts that did not reach another, after which no further ones try, if none did."""
CLOCK_QUESTIONS = 5
HERE = "localhost"
"""Name of this machine where there is no hostsfile."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Extent:
    """Sizes and times of the measurements."""

    disk_bytes: int = 2**28
    product_s: float = 0.1
    """Seconds of each window of a core or device."""
    device_bytes: int = 2**28
    """Copied in the memory of an accelerator; its product has as many bytes in its operands and result."""
    link_s: float = 0.25
    """Seconds of each direction of a link."""
    rounds: int = MOST_ROUNDS
    """Rounds of the tournament at most."""


@dataclass(frozen=True)
class Wanted:
    """Subject of an examination."""

    per_node: int | None = None
    """Ranks of each host. None: its slots in the hostsfile."""
    group_sizes: tuple[int, int, int] | None = None
    """Tensor, context and pipeline size of a layout, whose groups exchange; None: none do."""
    extent: Extent = Extent()


@dataclass
class Examined:
    """Measurements by the number of the host, and what stands out."""

    names: tuple[str, ...]
    facts: dict[int, Facts] = field(default_factory=dict)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Between which seconds each clock is ahead of this machine's."""
    disks: dict[int, DiskRates] = field(default_factory=dict)
    devices: dict[int, DeviceChecks] = field(default_factory=dict)
    links: dict[Pair, float] = field(default_factory=dict)
    """Bytes a second from one host to another."""
    round_trips: dict[Pair, float] = field(default_factory=dict)
    num_rounds: int = 0
    groups: list[GroupTime] = field(default_factory=list)
    suspicions: list[Suspicion] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage."""

    def suspects(self) -> list[int]:
        """Return the hosts to leave out, and of a link that is slow by itself the end that has most such links."""
        return suspects_of(self.suspicions)


def suspects_of(suspicions: Iterable[Suspicion]) -> list[int]:
    """Return the hosts to leave out: those named for themselves, then ends of bad links until none is left."""
    suspicions = list(suspicions)
    out = {each.host for each in suspicions if each.peer is None and each.leaves_out}
    links = [{each.host, each.peer} for each in suspicions if each.peer is not None]
    while left := [link for link in links if not link & out]:
        ends = [host for link in left for host in sorted(link, key=lambda host: host or 0) if host is not None]
        # of one link alone either end may be at fault: the later one goes, since the first host leads a run
        out.add(max(sorted(set(ends), reverse=True), key=ends.count))
    return sorted(out)


class Examination:
    """Examines the hosts of a fleet."""

    def __init__(self, fleet: Fleet, wanted: Wanted, say: Say) -> None:
        self._fleet, self._wanted, self._say = fleet, wanted, say
        self.findings = Examined(tuple(host.name for host in fleet.hosts))
        self._num_tests = 0

    def run(self) -> Examined:
        """Run all stages, and return what was found."""
        stages: dict[str, Callable[[], Iterator[Suspicion]]] = {
            "hosts": self._examine_hosts,
            "clocks": self._examine_clocks,
            "disks": self._examine_disks,
            "devices": self._examine_devices,
            "links": self._examine_links,
        }
        if self._wanted.group_sizes is not None:
            stages["groups"] = self._examine_groups
        for name, examine in stages.items():
            begin_s = time.monotonic()
            self._say(f"{name}: {counted(len(self._fleet.alive or self._fleet.hosts), 'host')}")
            self.findings.suspicions += list(examine())
            self.findings.seconds[name] = time.monotonic() - begin_s
        lost = {number: agent.fault for number, agent in self._fleet.agents.items() if agent.fault is not None}
        self.findings.suspicions += [Suspicion(number, "lost", f"it {fault}") for number, fault in lost.items()]
        return self.findings

    # -----------------------------------------------------------------------------------------------------------------
    # Questions

    def _ask(
        self, kind: type[Record], questions: Mapping[int, Mapping[str, object]], limit_s: float
    ) -> tuple[dict[int, Record], dict[int, str]]:
        """Return the answers, and why a host could not carry out its command."""
        found: dict[int, Record] = {}
        failed: dict[int, str] = {}
        for number, answer in self._fleet.ask(questions, kind, limit_s).items():
            if isinstance(answer, Failed):
                failed[number] = answer.error
            else:
                found[number] = answer
        return found, failed

    def _ask_in_turns(
        self, kind: type[Record], numbers: Iterable[int], question: Mapping[str, object], limit_s: float
    ) -> tuple[dict[int, Record], dict[int, str]]:
        """Question all hosts at once, but agents of one machine in turn: they would measure each other."""
        found: dict[int, Record] = {}
        failed: dict[int, str] = {}
        for turn in self._turns(numbers):
            some, without = self._ask(kind, dict.fromkeys(turn, question), limit_s)
            found, failed = found | some, failed | without
        return found, failed

    def _turns(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        left = list(numbers)
        while left:
            first: dict[str, int] = {}
            for number in left:
                first.setdefault(self.findings.facts[number].machine, number)
            yield list(first.values())
            left = [number for number in left if number not in first.values()]

    def _alike(self) -> dict[int, Hashable]:
        """Return what hosts of equal hardware and kernels have in common."""
        return {
            number: (own.processor, own.device, tuple(sorted(set(own.chips))), own.packages.get("torch"))
            for number, own in self.findings.facts.items()
        }

    # -----------------------------------------------------------------------------------------------------------------
    # Stages

    def _examine_hosts(self) -> Iterator[Suspicion]:
        hosts = self._fleet.hosts
        towards = hosts[-1].address if len(hosts) > 1 else "127.0.0.1"
        answers = self._fleet.start({"do": "facts", "towards": towards}, Facts)
        # its record is read here, and a user's is code: no host may name another than the user has
        devices = [self._fleet.device]
        if not is_device(self._fleet.device):
            devices = [record.name for record in DEVICES]
        for number, answer in answers.items():
            if isinstance(answer, Failed):
                yield Suspicion(number, "facts", f"its agent cannot examine it: {answer.error}")
            elif answer.device in devices:
                self.findings.facts[number] = answer
            else:
                self._fleet.give_up(self._fleet.agents[number], "sent a reply with a device that is not there")
        facts = self.findings.facts
        slots = {number: self._wanted.per_node or hosts[number].slots for number in facts}
        files = 0
        if facts:
            usual, _ = rules.usual_value([own.device for own in facts.values()])
            files = needed(find_device(usual), sum(slots.values()), 1)
        yield from rules.judge_facts(facts, slots, files)

    def _known(self) -> list[int]:
        """Return the hosts that can still measure."""
        return [number for number in self._fleet.alive if number in self.findings.facts]

    def _examine_clocks(self) -> Iterator[Suspicion]:
        offsets = self.findings.clocks
        for _ in range(CLOCK_QUESTIONS):
            found, _ = self._ask(Clock, {number: {"do": "clock"} for number in self._known()}, ANSWER_S)
            for number, answer in found.items():
                agent = self._fleet.agents[number]
                # it read its clock at some time between the question and the answer
                low, high = answer.time - agent.answered_at, answer.time - agent.asked_at
                before = offsets.get(number, (-math.inf, math.inf))
                offsets[number] = max(low, before[0]), min(high, before[1])
        yield from rules.judge_clocks(offsets)

    def _examine_disks(self) -> Iterator[Suspicion]:
        size = self._wanted.extent.disk_bytes
        question = {"do": "disk", "size": size}
        # a disk of 2 MB/s is named for its rate
        limit_s = ANSWER_S + size / 2e6
        numbers = self._known()
        for again in range(1 + AGAIN):
            found, failed = self._ask_in_turns(DiskRates, numbers, question, limit_s)
            if again == 0:
                for number, error in failed.items():
                    yield Suspicion(number, "disk", f"its folder cannot be written: {error}")
            for number, rates in found.items():
                self.findings.disks[number] = _better(self.findings.disks.get(number), rates)
            disks = self.findings.disks
            writes = rules.lows({number: own.bytes_per_s for number, own in disks.items()}, rules.LOW_WRITE)
            syncs = rules.lows({number: 1 / max(own.sync_s, 1e-6) for number, own in disks.items()}, rules.LOW_SYNC)
            numbers = [number for number in (writes | syncs) if number in self._known()]
            if not numbers:
                break
        for number, low in writes.items():
            yield Suspicion(number, "disk", f"its disk writes at {low.text(link_text)}")
        for number, low in syncs.items():
            yield Suspicion(number, "disk", f"its disk syncs a small file at {low.text(rules.per_second)}")

    def _examine_devices(self) -> Iterator[Suspicion]:
        alike, numbers, named = self._alike(), self._known(), set()
        facts, checks = self.findings.facts, self.findings.devices
        for _ in range(1 + AGAIN):
            for count, some in self._by_devices(numbers).items():
                most = max([facts[number].cores for number in some], default=1)
                limit_s = 120.0 + most * 6 * self._wanted.extent.product_s
                question = {"do": "devices", "count": count, "seconds": self._wanted.extent.product_s}
                question["size"] = self._wanted.extent.device_bytes
                question["limit_s"] = limit_s
                found, failed = self._ask_in_turns(DeviceChecks, some, question, limit_s + ANSWER_S)
                for number, error in failed.items():
                    named.add(number)
                    yield Suspicion(number, "device", f"its devices cannot be examined: {error}")
                for number, own in found.items():
                    checks[number] = _faster(checks.get(number), own)
            slow = {number: alike[number] for number in checks}
            products, memory = rules.low_products(checks, slow), rules.low_memory(checks, slow)
            numbers = [number for number in {key[0] for key in (*products, *memory)} - named if number in self._known()]
            if not numbers:
                break
        yield from rules.judge_bits(checks, slow)
        yield from rules.slow_devices(checks, products, memory)

    def _by_devices(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the hosts by the number of their devices that are examined."""
        found: dict[int, list[int]] = {}
        for number in numbers:
            present = self.findings.facts[number].devices
            slots = self._wanted.per_node or self._fleet.hosts[number].slots
            found.setdefault(slots if present is None else present, []).append(number)
        return {count: some for count, some in found.items() if count > 0}

    # -----------------------------------------------------------------------------------------------------------------
    # Links

    def _examine_links(self) -> Iterator[Suspicion]:
        numbers = self._known()
        if len(numbers) < 2:
            return
        questions = {number: {"do": "listen", "host": self._fleet.hosts[number].address} for number in numbers}
        ports, failed = self._ask(Port, questions, ANSWER_S)
        for number, error in failed.items():
            yield Suspicion(number, "link", f"it cannot listen for the others: {error}")
        broken = self._tournament(ports)
        stated = {number: own.link_bits for number, own in self.findings.facts.items()}
        for _ in range(AGAIN):
            # below its share, whatever the spread: a disturbed rate hides others as well
            again = {_pair(each) for each in rules.low_links(self.findings.links, stated, 0.0)} | set(broken)
            if again and len(ports) <= FEW:
                again |= set(self.findings.links)
            for pairs in self._disjoint(again):
                broken |= self._test(pairs, ports)
            broken = {pair: error for pair, error in broken.items() if pair not in self.findings.links}
            if not again:
                break
        yield from rules.broken_links(broken, self.findings.links)
        yield from rules.low_links(self.findings.links, stated)

    def _tournament(self, ports: Mapping[int, Port]) -> dict[Pair, str]:
        """Test the links of all rounds; return why some could not be measured."""
        broken: dict[Pair, str] = {}
        for pairs in rounds(sorted(ports), self._wanted.extent.rounds):
            self.findings.num_rounds += 1
            # each test of a host that none reaches takes the time of a timeout
            unreached = self._unreached(broken)
            broken |= self._test([pair for pair in pairs if not unreached & set(pair)], ports)
        return broken

    def _unreached(self, broken: Iterable[Pair]) -> set[int]:
        """Return the hosts that several others did not reach, and none did."""
        tried = Counter(itertools.chain(*broken))
        reached = set(itertools.chain(*self.findings.links))
        return {host for host, count in tried.items() if count >= UNREACHED and host not in reached}

    def _disjoint(self, links: Iterable[Pair | int]) -> Iterator[list[Pair]]:
        """Yield rounds of the pairs to repeat: those of a link, and of a host three of those that it has met."""
        pairs: dict[Pair, None] = {}
        for link in links:
            if isinstance(link, tuple):
                pairs[min(link), max(link)] = None
                continue
            met = [pair for pair in self.findings.links if link in pair and pair[0] < pair[1]]
            pairs |= dict.fromkeys(met[:3])
        left = [pair for pair in pairs if set(pair) <= set(self._known())]
        yield from batches(left, {number: number for pair in left for number in pair})

    def _test(self, pairs: Sequence[Pair], ports: Mapping[int, Port]) -> dict[Pair, str]:
        """Let disjoint pairs measure their links; return why a link could not be measured."""
        broken: dict[Pair, str] = {}
        machine = {number: own.machine for number, own in self.findings.facts.items()}
        for part in batches(pairs, machine):
            questions: dict[int, Mapping[str, object]] = {}
            for server, client in part:
                self._num_tests += 1
                # its number: a peer of an earlier test that comes late is not taken for this one's
                test = {"from": client, "to": server, "number": self._num_tests}
                common = {"test": test, "seconds": self._wanted.extent.link_s}
                port = self.endpoint(ports[server], server, client)
                questions[server] = {"do": "serve", **common}
                questions[client] = {"do": "connect", "address": port.address, "port": port.port, **common}
            found, failed = self._ask(Received, questions, ANSWER_S + 6 * self._wanted.extent.link_s + 30.0)
            for server, client in part:
                pair = min(server, client), max(server, client)
                if server in found and client in found:
                    self._keep(client, server, found[server].bytes_per_s)
                    self._keep(server, client, found[client].bytes_per_s)
                    trip = self.findings.round_trips.get(pair, math.inf)
                    self.findings.round_trips[pair] = min(trip, found[client].round_trip_s)
                # the peer of a host that was lost meanwhile is not at fault
                elif {server, client} <= set(self._known()):
                    broken[pair] = failed.get(client) or failed.get(server, "no answer")
        return broken

    def endpoint(self, port: Port, server: int, client: int) -> Port:
        """Return where a client reaches a server."""
        return port

    def _keep(self, sender: int, receiver: int, rate: float) -> None:
        self.findings.links[sender, receiver] = max(rate, self.findings.links.get((sender, receiver), 0.0))

    # -----------------------------------------------------------------------------------------------------------------
    # Groups

    def _examine_groups(self) -> Iterator[Suspicion]:
        numbers, per_node = self._ranks_of_groups()
        if len(numbers) * per_node < 2:
            self._say("groups: the hosts that are left make no layout of these sizes with two ranks; not measured")
            return
        best: dict[tuple[str, tuple[int, ...]], GroupTime] = {}
        for _ in range(1 + AGAIN):
            found, failed = self._exchange(numbers, per_node)
            for number, error in failed.items():
                # where one rank fails, those of all hosts end with errors or wait
                reason = f"its ranks did not exchange: {error}"
                yield Suspicion(number, "group", reason, leaves_out=len(failed) == 1)
            for each in found:
                key = each.kind, each.ranks
                best[key] = min(each, best.get(key, each), key=lambda time: time.seconds)
            low = rules.low_groups(best)
            if failed or not low:
                break
        self.findings.groups = list(best.values())
        for (kind, ranks), slow in low.items():
            group = f"the {kind} group of ranks {first_of([str(rank) for rank in ranks], 8)}"
            first, *others = sorted({numbers[rank // per_node] for rank in ranks})
            over = f" over {counted(1 + len(others), 'host')}" if others else ""
            reason = f"{group}{over} exchanges at {slow.text(link_text)}"
            yield Suspicion(first, "group", reason, leaves_out=not others)

    def _ranks_of_groups(self) -> tuple[list[int], int]:
        """Return the hosts whose ranks exchange, and the ranks of each: whole copies of the layout."""
        # ranks of a host that lacks devices, whose devices fail, or that others do not reach would let all others wait
        bad = set(suspects_of(each for each in self.findings.suspicions if each.kind in ("device", "facts", "link")))
        numbers = [number for number in self._known() if number not in bad]
        per_node = self._wanted.per_node or min((self._fleet.hosts[number].slots for number in numbers), default=1)
        size = math.prod(self._wanted.group_sizes or ())
        while len(numbers) * per_node % size:
            numbers.pop()
        return numbers, per_node

    def _exchange(self, numbers: Sequence[int], per_node: int) -> tuple[list[GroupTime], dict[int, str]]:
        """Run the ranks of these hosts once; return what each group took, or why hosts failed."""
        first, limit_s = numbers[0], 180.0
        store, failed = self._ask(Port, {first: {"do": "store", "host": self._fleet.hosts[first].address}}, ANSWER_S)
        if failed or first not in store:
            return [], failed
        common = {"do": "groups", "nodes": len(numbers), "per_node": per_node, "limit_s": limit_s}
        common |= {"address": store[first].address, "port": store[first].port}
        common["sizes"] = list(self._wanted.group_sizes or ())
        questions = {number: {**common, "node": node} for node, number in enumerate(numbers)}
        found, failed = self._ask(GroupTimes, questions, limit_s + ANSWER_S)
        groups = list(found[first].groups) if first in found else []
        if any(rank >= len(numbers) * per_node for each in groups for rank in each.ranks):
            self._fleet.give_up(self._fleet.agents[first], "sent a reply with ranks that are not there")
            groups = []
        return groups, failed


# ---------------------------------------------------------------------------------------------------------------------
# Best of several measurements, and suspicions of several records


def _better(before: DiskRates | None, now: DiskRates) -> DiskRates:
    if before is None:
        return now
    return DiskRates(max(before.bytes_per_s, now.bytes_per_s), min(before.sync_s, now.sync_s))


def _faster(before: DeviceChecks | None, now: DeviceChecks) -> DeviceChecks:
    """Return the faster rates; bits that were wrong once stay wrong."""
    if before is None or len(before.products) != len(now.products) or len(before.memory) != len(now.memory):
        return now
    products = []
    for old, new in zip(before.products, now.products, strict=True):
        worse = old if not (old.repeats and old.is_exact) else new
        products.append(dataclasses.replace(worse, flops=max(old.flops, new.flops)))
    memory = tuple(map(max, before.memory, now.memory))
    return DeviceChecks(tuple(products), memory)


def _pair(suspicion: Suspicion) -> Pair | int:
    if suspicion.peer is None:
        return suspicion.host
    return suspicion.host, suspicion.peer


def examine(
    hosts: Sequence[Host],
    device: str,
    folder: str,
    activate: str | None,
    wanted: Wanted,
    say: Say,
    environment: Mapping[str, str] | None = None,
) -> Examined:
    """Examine hosts, and return what was found. All that was started has ended then."""
    with Fleet(hosts, device, folder, activate, environment) as fleet:
        return Examination(fleet, wanted, say).run()


def examine_plan(plan: LaunchPlan) -> Examined:
    """Examine the hosts of a run, the spare ones too, for its ranks, layout and folder of checkpoints."""
    parallel = plan.config.parallel
    hosts = plan.hosts or (Host(HERE, plan.devices_per_node, 1),)
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    wanted = Wanted(per_node=plan.devices_per_node, group_sizes=sizes)
    # which need not exist before the run makes it
    folder = Path(plan.config.checkpoint.save or ".").absolute()
    while not folder.is_dir():
        folder = folder.parent

    def say(line: str) -> None:
        print(f"doctor: {line}", file=sys.stderr, flush=True)

    # as the ranks have it: what libraries read from it decides how groups exchange
    return examine(hosts, parallel.device, str(folder), plan.activate, wanted, say, plan.environment)
