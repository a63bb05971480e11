"""Find which hosts this one reaches, to distinguish a broken link from a rank that hangs.

A host that runs answers an attempt to connect at once, also by refusing it: nothing needs to listen there.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Mapping

PATIENCE_S = 1.2
"""Time for a host to answer; TCP repeats a lost attempt after 1 s."""
ATTEMPTS = 4
"""Attempts at once: on a link that loses every third packet one of eight passes, but for one time in 200."""
ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
SHOWN = 16
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
            return sorted(self._attempts)[:SHOWN] if is_over else []

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
