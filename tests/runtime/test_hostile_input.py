"""Whatever strangers send to the ports of agents and watchdogs: nothing of it is believed, and both go on."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.launch.agents.rendezvous_server import MOST_STRANGERS, Server
from megatron.runtime.agent_link import LARGEST_BYTES, Datagrams
from megatron.runtime.messages import MAC_BYTES, SIZE, Connection
from megatron.runtime.network import listening_socket
from tests.ranks import HANG_S
from tests.strangers import Bomb

SECRET = b"known to the agents of a test"


def damaged(genuine: bytes, draw: random.Random) -> bytes:
    """What a program makes of a recorded message: cut off, longer, with a bit changed, with another size, as it was."""
    place = draw.randrange(len(genuine))
    return draw.choice(
        [
            genuine[:place],
            genuine + draw.randbytes(1 + draw.randrange(9)),
            genuine[:place] + bytes([genuine[place] ^ 1 << draw.randrange(8)]) + genuine[place + 1 :],
            genuine[:32] + SIZE.pack(draw.choice([0, 1, MAC_BYTES, 2**14, 2**32 - 1])) + genuine[36:],
            draw.randbytes(draw.randrange(400)),
            b"[" * draw.randrange(9000),
            genuine,
        ]
    )


def connected(place: tuple[str, int]) -> Connection:
    return Connection(socket.create_connection(place), SECRET, is_server=False)


def exchange(connection: Connection, awaited: str, **message: object) -> dict[str, object]:
    """Send once that is possible, and return the first answer."""
    deadline_s = time.monotonic() + HANG_S
    has_sent = False
    while time.monotonic() < deadline_s:
        if answers := [answer for answer in connection.receive() if answer["kind"] == awaited]:
            return answers[0]
        if connection.can_send and not has_sent:
            connection.send(**message)
            has_sent = True
        time.sleep(0.005)
    raise AssertionError("no answer")


@contextlib.contextmanager
def served() -> Iterator[tuple[Server, tuple[str, int]]]:
    listener = listening_socket("127.0.0.1", 0)
    place = listener.getsockname()
    server = Server(listener, SECRET, min_nodes=1, max_nodes=1, max_restarts=1)
    server.start()
    yield server, place
    server.stop(0.0)


@pytest.mark.parametrize("count", [2500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_connections_of_strangers(count: int, tmp_path: Path) -> None:
    draw = random.Random(count)
    ours, theirs = socket.socketpair()
    recorder = Connection(theirs, SECRET, is_server=False)
    Connection(ours, SECRET, is_server=True)
    recorder.receive()
    recorder.send(kind="close")
    genuine = ours.recv(10_000)
    attacks = [genuine, pickle.dumps(Bomb(tmp_path / "executed")), genuine[:32] + genuine]
    with served() as (server, place):
        held: list[socket.socket] = []
        for _ in range(count):
            stranger = socket.create_connection(place)
            with contextlib.suppress(OSError):
                stranger.sendall(damaged(draw.choice(attacks), draw))
            held.append(stranger)
            if len(held) > 300:  # many at a time stay open
                held.pop(draw.randrange(300)).close()
            assert len(server._nodes) <= MOST_STRANGERS + 1
        member = connected(place)
        mine = {
            "order": [False, 0, "127.0.0.1", 1],
            "agent": "a",
            "code": "",
            "host": "a",
            "failures": [],
            "saved": None,
        }
        placed = exchange(member, "placed", kind="join", address="127.0.0.1", port=1, **mine)
        assert (placed["node"], placed["num_nodes"], server.is_alive(), server._is_closed) == (0, 1, True, False)
        member.close()
        for stranger in held:
            stranger.close()
    ours.close()
    recorder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [2500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_datagrams_of_strangers(count: int, tmp_path: Path) -> None:
    draw = random.Random(count)
    collector, peer = Datagrams("127.0.0.1", 0), Datagrams("127.0.0.1", 1)
    collector.key = peer.key = b"known to the ranks of a test"
    peer.send(collector.place, {"step": 1})
    genuine = collector._socket.recv(LARGEST_BYTES, socket.MSG_PEEK)
    assert [message["step"] for message, _ in collector.receive(5.0)] == [1]
    attacks = [genuine, pickle.dumps(Bomb(tmp_path / "executed")), genuine * 30]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(count):
            stranger.sendto(damaged(draw.choice(attacks), draw)[:60_000], collector.place)
            assert collector.receive(0.0) == []
    peer.send(collector.place, {"step": 2})
    assert [message["step"] for message, _ in collector.receive(5.0)] == [2]
    assert len(collector._heard) == 1, "memory for each sender that is known alone"
    collector.close()
    peer.close()
    assert list(tmp_path.iterdir()) == []
