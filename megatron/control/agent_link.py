"""Connection between a rank and the agent of its node, which the rank inherits: no port is open for it.

The rank sends its reports. The agent keeps the last one for when the rank has ended, and sends the watchdogs of the
other ranks what they cannot see: how a process ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

from megatron.control.datagrams import Datagrams
from megatron.control.messages import Connection
from megatron.network import LOOPBACK, address_towards

AGENT_SOCKET = "MEGATRON_AGENT_SOCKET"
"""Variable of a rank: the number of the descriptor that it has inherited."""
NO_SECRET = b""
"""Both ends are processes of one tree, and no other process can connect."""
AGENT_MS = 1000
"""Time for an agent that has just started this rank to be ready."""
TIMES_SENT = 3
"""Datagrams may get lost."""


class AgentLink:
    """The rank's end. Nothing is sent where no agent has started it, or the agent has ended."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        if (inherited := os.environ.pop(AGENT_SOCKET, None)) is not None:
            with contextlib.suppress(OSError):
                self._connection = Connection(socket.socket(fileno=int(inherited)), NO_SECRET, is_server=False)

    def send(self, **message: Any) -> None:
        """Send a message to the agent."""
        with self._lock:
            if self._connection is None:
                return
            try:
                if not self._connection.can_send:
                    poll = select.poll()
                    poll.register(self._connection.socket, select.POLLIN)
                    poll.poll(AGENT_MS)
                    self._connection.receive()
                if self._connection.can_send:
                    self._connection.send(**message)
            except (OSError, EOFError):
                self._connection.close()
                self._connection = None


class RankLink:
    """The agent's end."""

    def __init__(self, connected: socket.socket) -> None:
        """Raises OSError."""
        self._connection = Connection(connected, NO_SECRET, is_server=True)
        self.is_open = True
        self.report: Mapping[str, Any] = {}
        """The rank's last report: the fields of `megatron.resilience.rank_reports.Report`."""
        self.watchdogs: Mapping[str, Any] = {}
        """The watchdogs that collect reports (`send_endings`); empty until the ranks have joined each other."""
        self.step = 0
        """The last step that the rank began, which it sends at once; 0: none."""
        self.saved: int | None = None
        """Iteration of the newest complete checkpoint that the rank knows."""

    def fileno(self) -> int:
        return self._connection.socket.fileno()

    def receive(self) -> None:
        """Take what has come."""
        try:
            for message in self._connection.receive():
                self.report = message.get("report", self.report)
                self.watchdogs = message.get("watchdogs", self.watchdogs)
                self.step = message.get("step", self.step)
                self.saved = message.get("saved", self.saved)
        except (OSError, EOFError, ValueError):
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._connection.close()


def send_endings(watchdogs: Mapping[str, Any], endings: Mapping[int, str]) -> None:
    """Send the watchdogs how the processes of these ranks ended. `watchdogs`: as a rank has reported them."""
    places = [(str(address), int(port)) for address, port in watchdogs["places"]]
    with contextlib.suppress(OSError):  # no descriptor, no network: the ranks come to a verdict without it
        datagrams = Datagrams(address_towards(places[0][0]) or LOOPBACK, watchdogs["sender"])
        datagrams.key = bytes.fromhex(watchdogs["key"])
        for place in places * TIMES_SENT:
            datagrams.send(place, {"endings": dict(endings)})
        datagrams.close()
