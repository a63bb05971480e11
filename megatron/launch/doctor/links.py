"""Rates of links: rounds of disjoint pairs of hosts, and the test of a pair.

Two agents of the doctor authenticate each other, then each sends the other bytes for a while. The listening end waits
for the one peer of its test; a stranger is closed without being parsed, and delays no test. Without torch.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from megatron.launch.doctor.replies import Received
from megatron.runtime.messages import Connection

MOST_ROUNDS = 64
"""Rounds at most: with more hosts than that each is tested with as many others, evenly chosen."""
Pair = tuple[int, int]
PINGS = 8
CHUNK = 2**20
WARM_SHARE = 0.2
"""Share of the time in which TCP finds its rate, and nothing is counted."""
HANDSHAKE_S = 5.0
"""Time for both ends to come and know each other."""
DRAIN_S = 15.0
"""Time for what lies in buffers to arrive over a slow link."""
MOST_STRANGERS = 64
"""Unknown connections at one time; the oldest is closed for a newer one."""


def rounds(hosts: Sequence[int], most: int = MOST_ROUNDS) -> Iterator[list[Pair]]:
    """Yield rounds of disjoint pairs, by the circle method: one host stays, the others turn by one place a round.

    All rounds, of which there is one less than hosts, are every pair once. Where they are more than `most`, evenly
    spaced ones.
    """
    # of an odd number one host rests a round
    circle: list[int | None] = list(hosts)
    if len(circle) % 2:
        circle.append(None)
    total = len(circle) - 1
    for number in _evenly(total, most):
        turned = [circle[0], *(circle[1 + (place + number) % total] for place in range(total))]
        pairs = zip(turned[: len(turned) // 2], reversed(turned[len(turned) // 2 :]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]


def _evenly(total: int, most: int) -> list[int]:
    if total <= most:
        return list(range(total))
    return [number * total // most for number in range(most)]


def batches(pairs: Sequence[Pair], machine: Mapping[int, Hashable]) -> Iterator[list[Pair]]:
    """Yield the pairs of a round in parts in which no two use the same machine: agents may share one."""
    left = list(pairs)
    while left:
        busy: set[Hashable] = set()
        now, later = [], []
        for pair in left:
            machines = {machine[host] for host in pair}
            if machines & busy:
                later.append(pair)
                continue
            busy |= machines
            now.append(pair)
        yield now
        left = later


# ---------------------------------------------------------------------------------------------------------------------
# Test of a pair


class LinkError(Exception):
    """The other end was not reached, or was lost."""


def serve(listener: socket.socket, key: bytes, test: dict[str, Any], seconds: float) -> Received:
    """Return the listening end's part of a test. `test`: name of the test, which both ends know. Raises LinkError."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    connection = _accepted(listener, key, test, deadline_s)
    try:
        connection.send(ready=True)
        for number in range(PINGS):
            _await(connection, {"ping": number}, deadline_s)
            connection.send(ping=number)
        _await(connection, {"begin": True}, deadline_s)
        connection.send(begin=True)
        rate = _receive(connection.socket, seconds)
        _send(connection.socket, seconds)
        return Received(bytes_per_s=rate, round_trip_s=0.0)
    except (OSError, EOFError, ValueError) as error:
        raise LinkError(f"the link broke amid the test ({_words(error)})") from None
    finally:
        connection.close()


def connect(address: str, port: int, key: bytes, test: dict[str, Any], seconds: float) -> Received:
    """Return the connecting end's part. Raises LinkError."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    try:
        connected = socket.create_connection((address, port), timeout=HANDSHAKE_S)
    except OSError as error:
        raise LinkError(f"{address}, port {port}, is not reached ({_words(error)})") from None
    connection = Connection(connected, key, is_server=False)
    try:
        while not connection.can_send:
            _receive_messages(connection, deadline_s)
        connection.send(**test)
        _await(connection, {"ready": True}, deadline_s)
        trips = []
        for number in range(PINGS):
            begin_s = time.perf_counter()
            connection.send(ping=number)
            _await(connection, {"ping": number}, deadline_s)
            trips.append(time.perf_counter() - begin_s)
        connection.send(begin=True)
        _await(connection, {"begin": True}, deadline_s)
        _send(connection.socket, seconds)
        return Received(bytes_per_s=_receive(connection.socket, seconds), round_trip_s=min(trips))
    except (OSError, EOFError, ValueError) as error:
        raise LinkError(f"the link to {address} broke amid the test ({_words(error)})") from None
    finally:
        connection.close()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _accepted(listener: socket.socket, key: bytes, test: dict[str, Any], deadline_s: float) -> Connection:
    """Return the connection of the peer. Raises LinkError where it does not come."""
    waiting: dict[socket.socket, Connection] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(stranger: socket.socket) -> None:
            selector.unregister(stranger)
            waiting.pop(stranger).close()

        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                for ready, _ in selector.select(left_s):
                    if ready.fileobj is listener:
                        _admit(listener, key, waiting, selector)
                        continue
                    assert isinstance(ready.fileobj, socket.socket)
                    own = waiting.get(ready.fileobj)
                    if own is None:
                        continue
                    try:
                        messages = own.receive()
                    except (OSError, EOFError, ValueError):
                        drop(own.socket)
                        continue
                    if messages == [test]:
                        return waiting.pop(own.socket)
                    if messages:  # of the same run, but of another test
                        drop(own.socket)
                while len(waiting) > MOST_STRANGERS:
                    drop(next(iter(waiting)))
        finally:
            for left in waiting.values():
                left.close()
    raise LinkError(f"the other end did not come within {HANDSHAKE_S:g} s")


def _admit(
    listener: socket.socket,
    key: bytes,
    waiting: dict[socket.socket, Connection],
    selector: selectors.DefaultSelector,
) -> None:
    # one that has left already does not matter
    with contextlib.suppress(OSError):
        accepted, _ = listener.accept()
        connection = Connection(accepted, key, is_server=True)
        waiting[accepted] = connection
        selector.register(accepted, selectors.EVENT_READ)


def _receive_messages(connection: Connection, deadline_s: float) -> list[dict[str, Any]]:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError("no answer in time")
    return connection.receive()


def _await(connection: Connection, expected: dict[str, Any], deadline_s: float) -> None:
    """Wait for one message, before which nothing else may come."""
    while not (messages := _receive_messages(connection, deadline_s)):
        continue
    if messages != [expected]:
        raise ValueError(f"it sent {json.dumps(messages)[:60]}")


def _send(connected: socket.socket, seconds: float) -> None:
    """Send zeros for so many seconds, and end this direction."""
    end_s = time.monotonic() + seconds
    connected.settimeout(seconds + DRAIN_S)
    chunk = memoryview(bytes(CHUNK))
    while time.monotonic() < end_s:
        connected.send(chunk)
    connected.shutdown(socket.SHUT_WR)


def _receive(connected: socket.socket, seconds: float) -> float:
    """Return the bytes a second that come, by the time after the first of them."""
    buffer = bytearray(CHUNK)
    connected.settimeout(seconds + DRAIN_S)
    if connected.recv_into(buffer) == 0:
        raise EOFError("it sent nothing")
    begin_s = time.perf_counter()
    warm_s, end_s = begin_s + WARM_SHARE * seconds, begin_s + seconds
    whole, counted, now_s, last_s = 0, 0, begin_s, begin_s
    while count := connected.recv_into(buffer):
        now_s = time.perf_counter()
        whole += count
        # what lies in buffers when the sender has ended is received, but not counted
        if warm_s <= now_s <= end_s:
            counted += count
            last_s = now_s
        if now_s > end_s + DRAIN_S:
            raise TimeoutError(f"what was sent within {seconds:g} s has not come within {DRAIN_S:g} s more")
    # a link so slow that nothing came between: by all that came
    if counted == 0:
        return max(whole, 1) / max(now_s - begin_s, 1e-6)
    return counted / max(last_s - warm_s, 1e-6)
