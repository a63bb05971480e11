"""Find which hosts this one reaches, to distinguish a broken link from a rank that hangs.

A host that runs answers an attempt to connect at once, also by refusing it: nothing needs to listen there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.parallel.context import ParallelContext
from megatron.runtime.agent_link import Datagrams
from megatron.runtime.messages import SECRET
from megatron.runtime.network import address_towards, is_loopback

PATIENCE_S = 1.2
"""Time for a host to answer; TCP repeats a lost attempt after 1 s."""
ATTEMPTS = 4
"""Attempts at once: on a link that loses every third packet one of eight passes, but for one time in 200."""
ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
HOSTS_SHOWN = 16
"""Hosts that are named."""


class HostProbe:
    """Attempts to reach hosts, from its creation on. `places`: an address and a port of each."""

    def __init__(self, places: Mapping[str, tuple[str, int]]) -> None:
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._attempts: dict[str, list[socket.socket]] = {}
        """Those of each host that has not answered."""
        for host, place in places.items():
            with contextlib.suppress(OSError):  # no descriptor is free
                attempts = [
                    socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) for _ in range(ATTEMPTS)
                ]
                self._attempts[host] = []
                for attempt in attempts:
                    attempt.setblocking(False)
                    self._note(host, attempt, attempt.connect_ex(place))

    def unreachable(self) -> list[str]:
        """Return the hosts that have not answered, sorted, at most SHOWN; none before their time is over."""
        with self._lock:
            for host, attempts in list(self._attempts.items()):
                for attempt in list(attempts):
                    if _has_ended(attempt):
                        attempts.remove(attempt)
                        self._note(host, attempt, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            is_over = time.monotonic() - self._began_s >= PATIENCE_S
            return sorted(self._attempts)[:HOSTS_SHOWN] if is_over else []

    def _note(self, host: str, attempt: socket.socket, fault: int) -> None:
        """Keep an attempt that goes on, and no host that has answered."""
        if fault == errno.EINPROGRESS and host in self._attempts:
            self._attempts[host].append(attempt)
            return
        attempt.close()
        if fault in ANSWERS:
            for other in self._attempts.pop(host, []):
                other.close()

    def close(self) -> None:
        with self._lock:
            for attempts in self._attempts.values():
                for attempt in attempts:
                    attempt.close()
            self._attempts.clear()


def _has_ended(attempt: socket.socket) -> bool:
    if attempt.fileno() < 0:  # another one has been answered
        return False
    poll = select.poll()
    poll.register(attempt, select.POLLOUT)
    return bool(poll.poll(0))


# ---------------------------------------------------------------------------------------------------------------------
# Reports that the ranks' watchdogs exchange, and the verdict on a run that they lead to.
#
# They travel as datagrams to two collectors, rank 0 and the last rank, which usually are on different hosts. (torch's
# TCPStore blocks forever where its server is stopped.) Agents add how the process of a rank ended.

SHOWN = 8
"""Number of ranks that a verdict names one by one."""

RUNNING, FAILED, LOST, STUCK = "running", "failed", "lost", "stuck"
"""States of a rank: `failed` by an error of its own, `lost` when a collective failed, `stuck` without progress."""


@dataclasses.dataclass(frozen=True)
class Report:
    """State of a rank."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    since_s: float
    """Time since its last progress."""
    state: str = RUNNING
    fault: str = ""
    where: str = ""
    """Innermost call of its main thread."""
    waits: bool = False
    """It waits for other ranks in a collective."""
    unreachable: Sequence[str] = ()
    """Hosts that this rank's host does not reach, once a rank has called (host_probe.py)."""
    may_pass: bool = False
    """Its error may not come again (errors.is_passing)."""
    repeats_another: bool = False
    """Its error only names the error of another rank (errors.OtherRankFailed)."""
    remark: str = ""
    """Fault of its own part of an earlier step (attribution.py), which may be the cause."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    @property
    def at(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


def verdict(
    call: str,
    world_size: int,
    answers: Mapping[int, Report],
    silent: Mapping[int, tuple[Report | str, float]],
    endings: Mapping[int, str] = MappingProxyType({}),
    stragglers: str = "",
) -> str:
    """Return the state of every rank when the run ended, the ranks that caused it first.

    `answers`: reports of the ranks that answered the call. `silent`: for each other rank its last report, or its host
    if there is none, and how many seconds ago it came. `endings`: how the processes of silent ranks ended, where known.
    `stragglers`: ranks that were slower than the others, as text.
    """
    others = [report for _, report in sorted(answers.items())]
    links = _link_lines(answers, silent)
    lines = [*links, *_silent_lines(answers, silent, endings)]
    lines += [_failed(report) for report in others if report.state == FAILED]
    left = [report for report in others if report.state not in (FAILED, LOST)]
    if call == STUCK:
        odd, description = _odd_ones(left)
        if links and any(report.waits for report in odd):
            odd = []  # the rank behind a broken link may be a step ahead
        for one in odd:
            lines.append(f"{one.name} {description}: {one.at}, since {one.since_s:.1f} s, {one.where}{_earlier(one)}")
        left = [report for report in left if report not in odd]
    lost = [report for report in others if report.state == LOST]
    head = lines[:SHOWN]
    if len(lines) > SHOWN:
        head.append(f"and {len(lines) - SHOWN} more such ranks")
    if not lines:  # no other rank explains those that lost touch
        head += [f"{report.name}: {report.fault}" for report in lost[:SHOWN] if report.fault]
    waiting = [report for report in left if report.waits]
    running = [report for report in left if not report.waits]
    head += _grouped(lost, "lost touch with another rank", world_size)
    head += _grouped(waiting, "waited for others", world_size)
    head += _grouped(running, "came no further" if call == STUCK else "ran on", world_size)
    if stragglers:
        head.append(f"slower than expected {stragglers}")
    return "\n".join(f"  {line}" for line in head)


def _silent_lines(
    answers: Mapping[int, Report], silent: Mapping[int, tuple[Report | str, float]], endings: Mapping[int, str]
) -> Iterator[str]:
    """Yield what is known of each rank that does not answer, but on hosts that are not reached."""
    gone = _unreached_hosts(answers, silent)
    for rank, (last, ago_s) in sorted(silent.items()):
        if isinstance(last, str):
            if last not in gone:
                yield f"rank {rank} on {last} {endings.get(rank, 'was never heard of')}"
        elif last.state == FAILED:
            yield _failed(last)
        elif last.host not in gone:
            ending = endings.get(rank, "does not answer: it ended, is stopped, or is stuck in native code")
            yield f"{last.name} {ending}; last heard of {ago_s:.1f} s ago, {last.at}{_earlier(last)}"


def _grouped(reports: Sequence[Report], description: str, world_size: int) -> Iterator[str]:
    """Yield a line for the ranks of each step and phase."""
    for at in dict.fromkeys(report.at for report in reports):
        ranks = [report.rank for report in reports if report.at == at]
        yield f"{_numbered(ranks, world_size)} {description} {at}"


def _failed(report: Report) -> str:
    return f"{report.name} failed {report.at}: {report.fault}{_earlier(report)}"


def _earlier(report: Report) -> str:
    return f"; {report.remark}" if report.remark else ""


def _unreached_hosts(
    answers: Mapping[int, Report], silent: Mapping[int, tuple[Report | str, float]]
) -> dict[str, list[int]]:
    """Return the silent ranks of each host of which none answers, and which another host does not reach."""
    unreached = {host for report in answers.values() for host in report.unreachable}
    unreached -= {report.host for report in answers.values()}
    found: dict[str, list[int]] = {}
    for rank, (last, _) in sorted(silent.items()):
        host = last if isinstance(last, str) else last.host
        if host in unreached:
            found.setdefault(host, []).append(rank)
    return found


def _link_lines(answers: Mapping[int, Report], silent: Mapping[int, tuple[Report | str, float]]) -> list[str]:
    """Return what is known of hosts that do not reach each other."""
    gone = _unreached_hosts(answers, silent)
    lines = []
    for host, ranks in gone.items():
        witnesses = sorted({report.host for report in answers.values() if host in report.unreachable})
        last = min((silent[rank] for rank in ranks), key=lambda each: each[1])
        heard = "" if isinstance(last[0], str) else f"; last heard of {last[1]:.1f} s ago, {last[0].at}"
        shown = ", ".join(witnesses[:SHOWN]) + (f" and {len(witnesses) - SHOWN} more" if len(witnesses) > SHOWN else "")
        lines.append(
            f"host {host} is not reached from {shown}: it is down, or its link is; {_numbered(ranks, 0)} on it "
            f"{'is' if len(ranks) == 1 else 'are'} silent{heard}"
        )
    pairs = {
        tuple(sorted((report.host, other)))
        for report in answers.values()
        for other in report.unreachable
        if other not in gone
    }
    return lines + [
        f"the link between {one} and {other} is broken: both run, and do not reach each other"
        for one, other in sorted(pairs)
    ]


def _odd_ones(reports: Sequence[Report]) -> tuple[list[Report], str]:
    """Return the ranks that probably hang, and in which respect they differ.

    Those that do not wait, if others do; else, since waiting for an accelerator does not show, those at another step or
    phase than most.
    """
    busy = [report for report in reports if not report.waits]
    if busy and (len(busy) < len(reports) or len(reports) == 1):
        return busy, "does not wait for others"
    places = [report.at for report in reports]
    counts = {place: places.count(place) for place in places}
    most = max(counts.values(), default=0)
    odd = [] if 2 * most <= len(reports) else [report for report in reports if counts[report.at] < most]
    return odd, "is elsewhere than most"


def _numbered(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class Channel:
    """Datagrams between the watchdogs of all ranks. Used by their threads; `send` also by the main one."""

    def __init__(self, ctx: ParallelContext, address: str):
        """Exchange the addresses. Collective."""
        addresses = ctx.gather_objects(address)
        elsewhere = [other for other in addresses if not is_loopback(other)]
        if is_loopback(address) and elsewhere:  # the first host's own name often resolves to such an address
            address = address_towards(elsewhere[0]) or address
        self._datagrams = Datagrams(address, ctx.rank)
        gathered = ctx.gather_objects((socket.gethostname(), *self._datagrams.place))
        self.hosts = [host for host, _, _ in gathered]
        places = {host: (address, port) for host, address, port in reversed(gathered)}
        own = places.pop(self.hosts[ctx.rank])
        self._places = places if own == tuple(gathered[ctx.rank][1:]) or ctx.rank == ctx.world_size - 1 else {}
        self._probe: HostProbe | None = None
        self.is_one_host = not places
        self._collectors = {rank: tuple(gathered[rank][1:]) for rank in (0, ctx.world_size - 1)}
        drawn = ctx.broadcast_object(secrets.token_hex(32))
        self._datagrams.key = hmac.digest(os.environ.get(SECRET, "").encode(), drawn.encode(), "sha256")
        self._rank, self._world_size = ctx.rank, ctx.world_size
        self.collects = ctx.rank in self._collectors
        if self.collects:  # all ranks may answer at once
            self._datagrams.expect(ctx.world_size)
        self._addresses: dict[int, Any] = {}
        self.reports: dict[int, tuple[Report, float]] = {}
        """On a collector: the last report of each rank, and when it came."""
        self.endings: dict[int, str] = {}
        """On a collector: how the process of a rank ended, as its agent saw it."""
        self.call = ""
        """LOST or STUCK once a rank has called all others."""
        self.call_s = 0.0
        self.has_verdict = False
        """A collector has printed the verdict."""

    def for_agent(self) -> dict[str, Any]:
        """Return what the agent of this node needs to report the end of a rank (`report_endings`)."""
        places = sorted(set(self._collectors.values()))
        return {"places": places, "key": self._datagrams.key.hex(), "sender": self._world_size + self._rank}

    def send(self, report: Report) -> None:
        """Send a report to the collectors."""
        if self.collects:
            self._take(report)
        for rank, address in self._collectors.items():
            if rank != self._rank:
                self._datagrams.send(address, {"report": dataclasses.asdict(report)})

    def wait(self, timeout_s: float) -> bool:
        """Receive until something has come or the time is over. Return True if that was a call to answer."""
        called = False
        for message, place in self._datagrams.receive(timeout_s):
            called |= self._read(message, place)
        return called

    def interrupt(self) -> None:
        """Have a `wait` of another thread return at once."""
        self._datagrams.interrupt()

    def _read(self, message: dict[str, Any], place: Any) -> bool:
        if "endings" in message:
            self.endings |= {int(rank): str(ending) for rank, ending in message["endings"].items()}
            return False
        if "report" in message:
            report = Report(**message["report"])
            self._addresses[report.rank] = place
            self._take(report)
            if self.call or self.has_verdict:
                self._datagrams.send(place, {"call": self.call, "verdict": self.has_verdict})
            return False
        self.has_verdict |= message["verdict"]
        return self._note_call(message["call"])

    def _take(self, report: Report) -> None:
        self.reports[report.rank] = report, time.monotonic()
        if report.state in (LOST, STUCK) and self._note_call(report.state):
            self._call_all()

    def _note_call(self, call: str) -> bool:
        """Return True if the call is a new one. A rank that is stuck outweighs one that lost another."""
        if not call or call == self.call or self.call == STUCK:
            return False
        self.call, self.call_s = call, time.monotonic()
        self._probe = self._probe or HostProbe(self._places)
        return True

    @property
    def unreachable(self) -> list[str]:
        """Hosts that this one does not reach since a rank has called; found by one rank a host, and the last."""
        return self._probe.unreachable() if self._probe is not None else []

    def end(self) -> None:
        """Inform all ranks that the verdict is printed: none needs to wait for it."""
        self.has_verdict = True
        for _ in range(3):  # datagrams may get lost
            self._call_all()

    def _call_all(self) -> None:
        for address in list(self._addresses.values()):  # the other thread may add one
            self._datagrams.send(address, {"call": self.call, "verdict": self.has_verdict})

    def sorted_reports(self, world_size: int) -> tuple[dict[int, Report], dict[int, tuple[Report | str, float]]]:
        """Return `answers` and `silent` of `verdict`: the ranks that answered the call, and those that did not."""
        now_s = time.monotonic()
        answers = {rank: report for rank, (report, came_s) in dict(self.reports).items() if came_s >= self.call_s}
        silent: dict[int, tuple[Report | str, float]] = {}
        for rank in set(range(world_size)) - set(answers):
            report, came_s = self.reports.get(rank, (self.hosts[rank], now_s))
            silent[rank] = report, now_s - came_s
        return answers, silent

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._datagrams.close()
