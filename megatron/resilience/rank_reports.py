"""Reports that the ranks' watchdogs exchange, and the verdict on a run that they lead to.

They travel as datagrams to two collectors, rank 0 and the last rank, which usually are on different hosts. (torch's
TCPStore blocks forever where its server is stopped.) Anybody may send a datagram to their ports: each carries an HMAC
with a key that only the ranks know, and nothing else of it is read before that is verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.network import address_towards, is_loopback
from megatron.parallel.context import ParallelContext
from megatron.resilience.host_probe import HostProbe

MAC_BYTES = hashlib.sha256().digest_size
LARGEST_BYTES = 8192
"""Size of a datagram. Those of this module are below 5,000 bytes."""
DATAGRAMS_AT_ONCE = 2048
"""Number of datagrams read before the watchdog looks at its clock again, however many a stranger sends."""
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

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    @property
    def at(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


def verdict(
    call: str, world_size: int, answers: Mapping[int, Report], silent: Mapping[int, tuple[Report | str, float]]
) -> str:
    """Return the state of every rank when the run ended, the ranks that caused it first.

    `answers`: reports of the ranks that answered the call. `silent`: for each other rank its last report, or its host
    if there is none, and how many seconds ago it came.
    """
    lines = _link_lines(answers, silent)
    has_links = bool(lines)
    gone = _unreached_hosts(answers, silent)
    for rank, (last, ago_s) in sorted(silent.items()):
        if isinstance(last, str):
            if last not in gone:
                lines.append(f"rank {rank} on {last} was never heard of")
        elif last.state == FAILED:
            lines.append(f"{last.name} failed {last.at}: {last.fault}")
        elif last.host not in gone:
            lines.append(
                f"{last.name} does not answer: it ended, is stopped, or is stuck in native code; last heard of "
                f"{ago_s:.1f} s ago, {last.at}"
            )
    others = [report for _, report in sorted(answers.items())]
    lines += [f"{report.name} failed {report.at}: {report.fault}" for report in others if report.state == FAILED]
    left = [report for report in others if report.state not in (FAILED, LOST)]
    if call == STUCK:
        odd, description = _odd_ones(left)
        if has_links and any(report.waits for report in odd):
            odd = []  # the rank behind a broken link may be a step ahead
        lines += [f"{one.name} {description}: {one.at}, since {one.since_s:.1f} s, {one.where}" for one in odd]
        left = [report for report in left if report not in odd]
    head = lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more such ranks"] if len(lines) > SHOWN else [])
    lost = [report for report in others if report.state == LOST]
    if lost and not lines:  # no other rank explains it
        head += [f"{report.name}: {report.fault}" for report in lost[:SHOWN] if report.fault]
    for description, those in (
        ("lost touch with another rank", lost),
        ("waited for others", [report for report in left if report.waits]),
        ("came no further" if call == STUCK else "ran on", [report for report in left if not report.waits]),
    ):
        for at in dict.fromkeys(report.at for report in those):
            ranks = [report.rank for report in those if report.at == at]
            head.append(f"{_numbered(ranks, world_size)} {description} {at}")
    return "\n".join(f"  {line}" for line in head)


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
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        # not select.select, which fails from descriptor 1024 on
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        gathered = ctx.gather_objects((socket.gethostname(), *self._socket.getsockname()[:2]))
        self.hosts = [host for host, _, _ in gathered]
        places = {host: (address, port) for host, address, port in reversed(gathered)}
        own = places.pop(self.hosts[ctx.rank])
        self._places = places if own == tuple(gathered[ctx.rank][1:]) or ctx.rank == ctx.world_size - 1 else {}
        self._probe: HostProbe | None = None
        self.is_one_host = not places
        self._collectors = {rank: gathered[rank][1:] for rank in (0, ctx.world_size - 1)}
        self._key = bytes.fromhex(ctx.broadcast_object(secrets.token_hex(MAC_BYTES)))
        self._rank = ctx.rank
        self.collects = ctx.rank in self._collectors
        if self.collects:  # all ranks may answer at once; the kernel grants less
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(1 << 20, ctx.world_size * LARGEST_BYTES))
        self._sending = threading.Lock()
        self._num_sent = 0
        self._heard: dict[int, int] = {}
        """Number of the last datagram of each rank: one that a stranger repeats is ignored."""
        self._addresses: dict[int, Any] = {}
        self.reports: dict[int, tuple[Report, float]] = {}
        """On a collector: the last report of each rank, and when it came."""
        self.call = ""
        """LOST or STUCK once a rank has called all others."""
        self.call_s = 0.0
        self.has_verdict = False
        """A collector has printed the verdict."""

    def send(self, report: Report) -> None:
        """Send a report to the collectors."""
        if self.collects:
            self._take(report)
        for rank, address in self._collectors.items():
            if rank != self._rank:
                self._send(address, {"report": dataclasses.asdict(report)})

    def wait(self, timeout_s: float) -> bool:
        """Receive until something has come or the time is over. Return True if that was a call to answer."""
        if not self._selector.select(max(0.0, timeout_s)):
            return False
        called = False
        for _ in range(DATAGRAMS_AT_ONCE):
            try:
                content, sender = self._socket.recvfrom(LARGEST_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:  # an ICMP answer to an earlier datagram, whose receiver has ended; a lack of memory
                continue
            message = self._verified(content)
            called |= message is not None and self._read(message, sender)
        return called

    def _verified(self, content: bytes) -> dict[str, Any] | None:
        """Return the message of a datagram; None unless another rank of this run sent it, for the first time."""
        mac, body = content[:MAC_BYTES], content[MAC_BYTES:]
        if len(content) > LARGEST_BYTES or not hmac.compare_digest(mac, self._mac(body)):
            return None
        message: dict[str, Any] = json.loads(body)
        if message["number"] <= self._heard.get(message["rank"], 0):
            return None
        self._heard[message["rank"]] = message["number"]
        return message

    def _read(self, message: dict[str, Any], sender: Any) -> bool:
        if "report" in message:
            report = Report(**message["report"])
            self._addresses[report.rank] = sender
            self._take(report)
            if self.call or self.has_verdict:
                self._send(sender, {"call": self.call, "verdict": self.has_verdict})
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
            self._send(address, {"call": self.call, "verdict": self.has_verdict})

    def _send(self, address: Any, message: dict[str, Any]) -> None:
        with self._sending:  # two threads send, and a number that comes late would be ignored
            self._num_sent += 1
            body = json.dumps({"rank": self._rank, "number": self._num_sent, **message}).encode()
            with contextlib.suppress(OSError):  # a full buffer, no route: it is sent again
                self._socket.sendto(self._mac(body) + body, address)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")

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
        self._selector.close()
        self._socket.close()
