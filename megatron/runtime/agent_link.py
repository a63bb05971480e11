"""Authenticated datagrams: JSON objects, each with an HMAC that is verified before it is parsed (messages.py).

They suit what is repeated until it is answered: no connection can break, none needs a descriptor, and a peer that hangs
delays no other. Anybody may send to their port, so nothing else of a datagram is read before its HMAC is verified.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import Any

from megatron.runtime.messages import Connection, StrangerError, seal, unseal
from megatron.runtime.network import LOOPBACK, address_towards

LARGEST_BYTES = 8192
"""Size of a datagram. Those of the watchdogs are below 5,000 bytes."""
DATAGRAMS_AT_ONCE = 2048
"""Number of datagrams read at one time, however many a stranger sends."""
PURPOSE = b"datagram"


class Datagrams:
    """Socket of one sender, a number that no other sender of the run has. `send` may be called by several threads."""

    def __init__(self, address: str, sender: int) -> None:
        """Bind a free port of this address. Raises OSError."""
        self._sender = sender
        # Datagrams: reports are repeated anyway, no connection breaks or hangs, and ranks of any launcher can send
        # them. (Clients of torch's TCPStore wait forever for a stopped server.)
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        # a full buffer, or a datagram with a wrong checksum, must not hold up who sends or receives
        self._socket.setblocking(False)
        # not select.select, which fails from descriptor 1024 on
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.place: tuple[str, int] = self._socket.getsockname()[:2]
        """Address and port."""
        self.key = b""
        """Known to all senders of the run alone. To be set before anything is sent."""
        self._sending = threading.Lock()
        self._num_sent = 0
        self._heard: dict[int, int] = {}
        """Number of the last datagram of each sender: one that a stranger repeats is ignored."""

    def expect(self, num_senders: int) -> None:
        """Have the kernel keep one datagram of each sender; it grants less where its limit is lower."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(1 << 20, num_senders * LARGEST_BYTES))

    def send(self, place: Any, message: dict[str, Any]) -> None:
        """Send a message, which may get lost."""
        with self._sending:  # a number that comes late would be ignored
            self._num_sent += 1
            content = seal(self.key, PURPOSE, {"sender": self._sender, "number": self._num_sent, **message})
            with contextlib.suppress(OSError):  # a full buffer, no route: it is sent again
                self._socket.sendto(content, place)

    def receive(self, timeout_s: float) -> list[tuple[dict[str, Any], Any]]:
        """Wait until something has come or the time is over; return the messages, each with the place it came from."""
        messages: list[tuple[dict[str, Any], Any]] = []
        if not self._selector.select(max(0.0, timeout_s)):
            return messages
        for _ in range(DATAGRAMS_AT_ONCE):
            try:
                # one byte more, so that a longer one is seen to be longer
                content, place = self._socket.recvfrom(LARGEST_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:  # an ICMP answer to an earlier datagram, whose receiver has ended; a lack of memory
                continue
            with contextlib.suppress(StrangerError):
                message = unseal(self.key, PURPOSE, content[: LARGEST_BYTES + 1], LARGEST_BYTES)
                # numbers only grow: what a stranger has recorded is old
                if message["number"] > self._heard.get(message["sender"], 0):
                    self._heard[message["sender"]] = message["number"]
                    messages.append((message, place))
        return messages

    def interrupt(self) -> None:
        """Have a `receive` of another thread return at once, by an empty datagram to itself, which is ignored."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", self._socket.getsockname())

    def close(self) -> None:
        self._selector.close()
        self._socket.close()


# ---------------------------------------------------------------------------------------------------------------------
# Connection between a rank and the agent of its node, which the rank inherits: no port is open for it.
#
# The rank sends its reports. The agent keeps the last one for when the rank has ended, and sends the watchdogs of the
# other ranks what they cannot see: how a process ended.

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
        # popped, so that no process that the rank starts takes the descriptor for its own
        if (inherited := os.environ.pop(AGENT_SOCKET, None)) is not None:
            with contextlib.suppress(OSError):
                self._connection = Connection(socket.socket(fileno=int(inherited)), NO_SECRET, is_server=False)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, **message: Any) -> None:
        """Send a message to the agent."""
        with self._lock:
            if self._connection is None:
                return
            try:
                # a rank may be here before its agent has answered with its nonce
                if not self._connection.can_send:
                    poll = select.poll()
                    poll.register(self._connection.socket, select.POLLIN)
                    poll.poll(AGENT_MS)
                    self._connection.receive()
                if self._connection.can_send:
                    self._connection.send(**message)
            except (OSError, EOFError):
                self._connection.close()
                # the agent has ended: later reports go nowhere, and the rank goes on
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
        self.has_left = False
        """The rank has left its round, since another one has ended, and waits for its next place (places.py)."""
        self.alerts: list[Mapping[str, Any]] = []
        """Fields of `megatron.runtime.alerts.Alert`, which the receiver takes out."""
        self.verdict: Mapping[str, Any] = {}
        """`text` of the watchdog's verdict, if this rank has come to it, and `alone`: no agent of rank 0 is known."""

    def fileno(self) -> int:
        return self._connection.socket.fileno()

    def receive(self) -> None:
        """Take what has come."""
        try:
            for message in self._connection.receive():
                # a message has some of these; what it lacks stays as it was
                self.report = message.get("report", self.report)
                self.watchdogs = message.get("watchdogs", self.watchdogs)
                self.step = message.get("step", self.step)
                self.saved = message.get("saved", self.saved)
                self.has_left = message.get("left", self.has_left)
                self.verdict = message.get("verdict", self.verdict)
                if "alert" in message:
                    self.alerts.append(message["alert"])
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
        # once to each, then once more: a burst to one place is lost together
        for place in places * TIMES_SENT:
            datagrams.send(place, {"endings": dict(endings)})
        datagrams.close()
