"""Datagrams by which the watchdogs of all ranks exchange their reports, and attempts to reach hosts that are silent.

Reports travel to two collectors, rank 0 and the last rank, which usually are on different hosts. Agents add how the
process of a rank ended.
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
from collections.abc import Mapping
from typing import Any

from megatron.parallel.context import ParallelContext
from megatron.resilience.rank_reports import LOST, STUCK, LastSign, Report
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


# not torch's TCPStore, which blocks forever where its server is stopped
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
        # the address of each host's first rank
        places = {host: (address, port) for host, address, port in reversed(gathered)}
        own = places.pop(self.hosts[ctx.rank])
        self.is_one_host = not places
        is_first_of_host = own == tuple(gathered[ctx.rank][1:])
        self._places: Mapping[str, tuple[str, int]] = {}
        """Hosts that this rank tries to reach: one rank a host does, and the last, which may print the verdict."""
        if is_first_of_host or ctx.rank == ctx.world_size - 1:
            self._places = places
        self._probe: HostProbe | None = None
        self._collectors = {rank: tuple(gathered[rank][1:]) for rank in (0, ctx.world_size - 1)}
        # drawn for each start: a datagram of an earlier one does not pass for one of this
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
        if self._probe is None:
            return []
        return self._probe.unreachable()

    def end(self) -> None:
        """Inform all ranks that the verdict is printed: none needs to wait for it."""
        self.has_verdict = True
        for _ in range(3):  # datagrams may get lost
            self._call_all()

    def _call_all(self) -> None:
        for address in list(self._addresses.values()):  # the other thread may add one
            self._datagrams.send(address, {"call": self.call, "verdict": self.has_verdict})

    def sorted_reports(self, world_size: int) -> tuple[dict[int, Report], dict[int, LastSign]]:
        """Return `answers` and `silent` of `verdict`: the ranks that answered the call, and those that did not."""
        now_s = time.monotonic()
        answers = {rank: report for rank, (report, came_s) in dict(self.reports).items() if came_s >= self.call_s}
        silent: dict[int, LastSign] = {}
        for rank in set(range(world_size)) - set(answers):
            report, came_s = self.reports.get(rank, (self.hosts[rank], now_s))
            silent[rank] = report, now_s - came_s
        return answers, silent

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._datagrams.close()


class HostProbe:
    """Attempts to reach hosts, from its creation on, to distinguish a broken link from a rank that hangs.

    A host that runs answers an attempt to connect at once, also by refusing it: nothing needs to listen there.
    """

    def __init__(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """`addresses`: IP address and port of each host."""
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._attempts: dict[str, list[socket.socket]] = {}
        """Those of each host that has not answered."""
        for host, address in addresses.items():
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            with contextlib.suppress(OSError):  # no descriptor is free
                attempts = [socket.socket(family) for _ in range(ATTEMPTS)]
                self._attempts[host] = []
                for attempt in attempts:
                    attempt.setblocking(False)
                    self._note(host, attempt, attempt.connect_ex(address))

    def unreachable(self) -> list[str]:
        """Return the hosts that have not answered, sorted, at most HOSTS_SHOWN; none before their time is over."""
        with self._lock:
            for host, attempts in list(self._attempts.items()):
                for attempt in list(attempts):
                    if _has_ended(attempt):
                        attempts.remove(attempt)
                        self._note(host, attempt, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            if time.monotonic() - self._began_s < PATIENCE_S:
                return []
            return sorted(self._attempts)[:HOSTS_SHOWN]

    def _note(self, host: str, attempt: socket.socket, fault: int) -> None:
        """Keep an attempt that goes on, and no host that has answered."""
        if fault == errno.EINPROGRESS and host in self._attempts:
            self._attempts[host].append(attempt)
            return
        attempt.close()
        if fault in ANSWERS:
            # one answer is enough of a host
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
    # not select.select, which refuses descriptors above 1023
    poll = select.poll()
    poll.register(attempt, select.POLLOUT)
    return bool(poll.poll(0))
