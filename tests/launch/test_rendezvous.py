"""Rendezvous of several nodes, all in this process: rounds, nodes that leave and return, strangers."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron.launch.agents import nodes_rendezvous, rendezvous_server, restart_policy
from megatron.launch.agents.nodes_rendezvous import NodesRendezvous
from megatron.launch.agents.rendezvous import (
    DifferentCodeError,
    Membership,
    NodeOptions,
    NotNeededError,
    RendezvousFailedError,
    RunEndedError,
    split_endpoint,
)
from megatron.launch.agents.restart_policy import Failure
from megatron.runtime import network
from megatron.runtime.commands import ABORTED, DONE
from megatron.runtime.messages import LARGEST_BYTES, MAC_BYTES, NONCE_BYTES, SECRET, SIZE, Connection, StrangerError
from tests.ranks import HANG_S, free_port
from tests.strangers import Bomb

KILLED = Failure(rank=1, host="node1", returncode=-9)
BOOM = Failure(1, "node1", 1, step=5, phase="train", state="failed", fault="ValueError: boom")
SHARED = "a secret of the nodes of a test"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, SHARED)
    for module, name, value in (
        (rendezvous_server, "LAST_CALL_S", 0.4),
        (rendezvous_server, "RETURN_S", 0.3),
        (nodes_rendezvous, "RETRY_S", 0.05),
        (nodes_rendezvous, "RECONNECT_S", 0.6),
    ):
        monkeypatch.setattr(module, name, value)


class Nodes:
    """Nodes of one run by their number, and threads in which they wait."""

    def __init__(self, count: int, min_nodes: int, max_restarts: int = 3) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.threads = ThreadPoolExecutor(8)
        self._options: dict[str, Any] = {"nodes": count, "min_nodes": min_nodes, "max_restarts": max_restarts}
        self.made: list[NodesRendezvous] = []

    def make(self, number: int) -> NodesRendezvous:
        node = NodesRendezvous(NodeOptions(node_rank=number, rendezvous=self.endpoint, **self._options))
        self.made.append(node)
        return node

    def join(self, *nodes: NodesRendezvous) -> list[Membership]:
        return [found.result(20) for found in self.start(*nodes)]

    def start(self, *nodes: NodesRendezvous) -> list[Future[Membership]]:
        return [self.threads.submit(node.join) for node in nodes]

    def server(self, first: NodesRendezvous) -> rendezvous_server.Server:
        until(lambda: first._server is not None)
        assert first._server is not None
        return first._server

    def close(self) -> None:
        for node in reversed(self.made):
            node.close()
            node.leave()
        self.threads.shutdown()


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(*arguments: Any, **options: Any) -> Nodes:
        made.append(Nodes(*arguments, **options))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "rendezvous" not in names
    assert "rendezvous client" not in names


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def leave(node: NodesRendezvous) -> None:
    """Break its connection, as the end of its agent does."""
    assert node._client is not None
    node._client._leaves = True
    node._client._connection.socket.shutdown(socket.SHUT_RDWR)


def test_nodes_are_numbered_by_their_rank_and_agree_on_the_first(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(3, 3, max_restarts=0)
    third, first, second = (nodes.make(number) for number in (2, 0, 1))
    found = nodes.join(third, first, second)
    assert [membership.node for membership in found] == [2, 0, 1]
    assert {(one.num_nodes, one.master_addr, one.master_port) for one in found} == {
        (3, "127.0.0.1", found[0].master_port)
    }
    assert found[0].master_port != int(nodes.endpoint.rpartition(":")[2])
    # nobody else gets the port before rank 0 listens there
    assert [one.store_socket is not None for one in found] == [False, True, False]
    held = found[1].store_socket
    assert held is not None
    assert held.getsockname() == ("127.0.0.1", found[0].master_port)
    held.close()
    # without restarts they have left, and nothing listens
    until(lambda: first._server is not None and not first._server.is_alive())


def test_a_node_that_fails_restarts_with_the_others_and_a_lost_one_is_left_out(
    make_nodes: Callable[..., Nodes],
) -> None:
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    assert [one.num_nodes for one in nodes.join(first, second)] == [2, 2]
    assert not first.nodes_waiting()
    (again,) = nodes.start(second)  # its ranks failed
    until(first.nodes_waiting)
    assert first.has_lost_ranks(), "no save can complete"
    assert not again.done(), "the first node still trains"
    assert [one.node for one in (*nodes.join(first), again.result(20))] == [0, 1]

    assert not first.nodes_waiting()
    leave(second)
    until(first.nodes_waiting)  # although nobody waits: ranks on accelerators would hang
    assert first.has_lost_ranks()
    (alone,) = nodes.join(first)
    assert (alone.node, alone.num_nodes) == (0, 1)
    third = nodes.make(1)  # in its place
    (joined,) = nodes.start(third)
    until(first.nodes_waiting)
    assert not first.has_lost_ranks(), "its ranks can save"
    assert [one.num_nodes for one in (*nodes.join(first), joined.result(20))] == [2, 2]


def spares(*nodes: NodesRendezvous) -> bool:
    return all(node._client is not None and node._client.is_spare for node in nodes)


def test_a_spare_host_replaces_a_node_that_fails_twice_and_one_that_is_lost(
    make_nodes: Callable[..., Nodes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_server, "LAST_CALL_S", 60.0)  # no step below waits for it
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.05)
    nodes = make_nodes(3, 3, max_restarts=9)
    first, second, third, spare, other = (nodes.make(number) for number in (0, 1, 2, 3, 4))
    waiting = nodes.start(spare, other, first, second)
    server = nodes.server(first)
    until(lambda: len([node for node in list(server._nodes.values()) if node.order]) == 4)
    time.sleep(0.3)
    assert not any(one.done() for one in waiting), "the third is only late"
    found = [one.result(20) for one in (*nodes.start(third), *waiting[2:])]
    assert [one.node for one in found] == [2, 0, 1]
    until(lambda: spares(spare, other))

    # restarts in its place after its first failure
    again = nodes.threads.submit(second.join, [KILLED])
    until(lambda: first.nodes_waiting() and third.nodes_waiting())
    assert [one.node for one in (*nodes.join(first, third), again.result(20))] == [0, 2, 1]
    assert not any(one.done() for one in waiting[:2])

    failing = nodes.threads.submit(second.join, [KILLED])
    until(lambda: first.nodes_waiting() and third.nodes_waiting())
    # numbered after those that stay
    assert [one.node for one in (*nodes.join(first, third), waiting[0].result(20))] == [0, 1, 2]
    until(lambda: spares(second, other))
    leave(third)
    until(first.nodes_waiting)
    assert [one.node for one in (*nodes.join(first, spare), waiting[1].result(20))] == [0, 1, 2]
    leave(other)
    until(first.nodes_waiting)  # and the one that failed twice is better than none
    assert [one.node for one in (*nodes.join(first, spare), failing.result(20))] == [0, 1, 2]
    said = capfd.readouterr().err
    assert said.count("waits as a spare host: the run is complete without it") == 3
    assert said.count("takes a place in the run") == 3


def test_all_nodes_restart_by_the_decision_of_the_first_on_the_real_cause(
    make_nodes: Callable[..., Nodes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that lost another mostly fails first; the same error of the same rank three times ends all nodes."""
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 2.4)  # in which heartbeats must go on
    nodes = make_nodes(2, 2, max_restarts=9)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    consequence = Failure(0, "node0", 1, step=5, state="lost", fault="Connection closed by peer")
    for restarts, saved in ((1, 10), (2, 10), (3, 20), (4, 20)):
        early = nodes.threads.submit(first.join, [consequence], saved)
        until(lambda: second.nodes_waiting())
        began_s = time.monotonic()
        late = nodes.threads.submit(second.join, [BOOM])
        assert [one.result(20).restarts for one in (early, late)] == [restarts] * 2
        assert time.monotonic() - began_s > (0.0 if restarts % 2 else 1.2), "the delay is that of all nodes"
    early = nodes.threads.submit(first.join, [consequence], 20)
    until(lambda: second.nodes_waiting())
    late = nodes.threads.submit(second.join, [BOOM])
    for one in (early, late):
        with pytest.raises(RunEndedError) as ended:
            one.result(20)
        assert ended.value.status == ABORTED
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 5
    assert all(line.startswith("rank 1 on node1 ended with status 1 in step 5, train: ValueError") for line in shown)
    assert [line.partition("; ")[2][:14] for line in shown[:4]] == ["restart 1 of 9", "restart 2 of 9"] * 2


def test_a_node_is_forgiven_its_failures_after_progress(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, 2)
    first, second, spare = (nodes.make(number) for number in range(3))
    (waiting, *found) = nodes.start(spare, first, second)
    assert [one.result(20).node for one in found] == [0, 1]
    for saved in (1, 2, 3):
        again = nodes.threads.submit(second.join, [KILLED])
        until(first.nodes_waiting)
        here = nodes.threads.submit(first.join, (), saved)
        assert [one.result(20).node for one in (here, again)] == [0, 1]
    assert not waiting.done()


def test_a_node_that_stops_between_two_attempts_ends_the_others_cleanly(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, 2)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    (waiting,) = nodes.start(first)
    until(second.nodes_waiting)
    second.close(DONE)
    with pytest.raises(RunEndedError) as ended:
        waiting.result(20)
    assert ended.value.status == DONE
    assert first.end_status(0.0) == DONE


@pytest.mark.parametrize("how", ["the run ends", "signal"])
def test_a_spare_host_ends_with_the_run(make_nodes: Callable[..., Nodes], how: str) -> None:
    nodes = make_nodes(2, 2)
    first, second, spare = (nodes.make(number) for number in range(3))
    found = nodes.start(spare, first, second)
    assert [one.result(20).node for one in found[1:]] == [0, 1]
    until(lambda: spares(spare))
    if how == "signal":  # as `interruptible` raises it in a main thread
        assert spare._client is not None
        spare._client._check = lambda: sys.exit(143)  # type: ignore[method-assign]
    else:
        for finished in [nodes.threads.submit(node.finish) for node in (first, second)]:
            finished.result(20)
        assert first._client is not None
        first._client.close()
    with pytest.raises(NotNeededError):
        found[0].result(20)


def test_a_second_agent_of_a_number_does_not_take_the_place_of_a_missing_node(
    make_nodes: Callable[..., Nodes],
) -> None:
    nodes = make_nodes(3, 3)
    first, second, double, third = (nodes.make(number) for number in (0, 1, 1, 2))
    waiting = nodes.start(first, second, double)
    server = nodes.server(first)
    until(lambda: len([node for node in list(server._nodes.values()) if node.order]) == 3)
    time.sleep(0.3)
    assert not any(one.done() for one in waiting)
    assert nodes.join(third)[0].node == 2
    assert waiting[0].result(20).node == 0
    until(lambda: waiting[1].done() or waiting[2].done())
    (left,) = [one for one in waiting[1:] if not one.done()]
    until(lambda: spares(second) or spares(double))
    assert first._client is not None
    first._client.close()
    with pytest.raises(NotNeededError):
        left.result(20)


def test_nodes_wait_for_each_other_at_the_end_and_a_late_one_learns_of_it(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    finished = nodes.threads.submit(first.finish)
    time.sleep(0.3)
    assert not finished.done()
    second.finish()
    finished.result(20)
    second.close()
    with pytest.raises(RendezvousFailedError, match="the run has ended on the other nodes"):
        first.join()


AGENT = """
import sys, time
skew_s = float(sys.argv[1])
for name in ("time", "monotonic"):
    clock = getattr(time, name)
    setattr(time, name, lambda clock=clock: clock() + skew_s)
from megatron.launch.agents import nodes_rendezvous
from megatron.launch.agents.rendezvous import NodeOptions
nodes_rendezvous.EXIT_BARRIER_S = 1e6
node = nodes_rendezvous.NodesRendezvous(NodeOptions(2, 2, int(sys.argv[2]), sys.argv[3], max_restarts=1))
for attempt in range(2):
    print(node.join().node, flush=True)
    while int(sys.argv[2]) == 0 and attempt == 0 and not node.nodes_waiting():  # the second one's ranks have failed
        time.sleep(0.01)
node.finish()
node.close()
node.leave()
"""


def test_clocks_that_differ_between_hosts_delay_nothing() -> None:
    """By 90 s, the monotonic one too: both nodes join, join again, and leave together at the end."""
    endpoint = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", AGENT, skew_s, str(number), endpoint],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for number, skew_s in enumerate(("0", "90"))
    ]
    try:
        ended = [process.communicate(timeout=HANG_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert ended == ["0\n0\n", "1\n1\n"]
    assert [process.returncode for process in started] == [0, 0]


def test_the_last_node_does_not_wait_for_one_that_was_lost(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    finished = nodes.threads.submit(first.finish)
    assert not finished.done(), "the second still trains"
    leave(second)
    assert finished.result(20) is False


@pytest.mark.parametrize("half_open", [False, True])
def test_a_connection_that_breaks_is_made_again_and_the_ranks_run_on(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, half_open: bool
) -> None:
    """Half open: the server does not learn that the old one has ended."""
    # no step below waits for any of these
    for name in "RETURN_S", "KEEP_ALIVE_S":
        monkeypatch.setattr(rendezvous_server, name, 60.0)
    monkeypatch.setattr(nodes_rendezvous, "RECONNECT_S", 60.0)
    nodes = make_nodes(2, 2)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    server = nodes.server(first)
    before, held = set(server._nodes), break_connection(second, half_open=half_open)
    until(lambda: len({one for one, node in list(server._nodes.items()) if node.has_number} - before) == 1)
    assert not first.nodes_waiting()
    assert not second.nodes_waiting()
    assert len(server._nodes) == 2

    finished = nodes.threads.submit(first.finish)
    time.sleep(0.3)
    assert not finished.done(), "the second still trains"
    second.finish()
    finished.result(20)
    held.close()


def break_connection(node: NodesRendezvous, *, half_open: bool = False) -> socket.socket:
    """Make a node believe that its connection broke; the other end learns of it unless this is half open."""
    assert node._client is not None
    connection = node._client._connection
    held = connection.socket.dup()  # so closing it sends nothing

    def fail(**message: Any) -> Any:
        raise OSError("broken")

    connection.receive = connection.send = fail  # type: ignore[method-assign]
    if not half_open:
        held.shutdown(socket.SHUT_RDWR)
    return held


def test_a_node_that_joins_over_a_new_connection_does_not_wait_for_the_end_of_the_old_one(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_server, "KEEP_ALIVE_S", 60.0)
    monkeypatch.setattr(nodes_rendezvous, "RECONNECT_S", 60.0)
    nodes = make_nodes(2, 2)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    held = break_connection(second, half_open=True)
    assert [one.node for one in nodes.join(second, first)] == [1, 0]
    held.close()


def test_a_node_that_the_others_went_on_without_learns_of_it(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_rendezvous, "RECONNECT_S", 60.0)
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    assert second._client is not None
    is_back, connect = threading.Event(), second._client._connect

    def later() -> Connection:
        if not is_back.is_set():
            raise ConnectionRefusedError
        return connect()

    second._client._connect = later
    break_connection(second).close()
    until(first.nodes_waiting)
    assert [one.num_nodes for one in nodes.join(first)] == [1]
    assert not second.nodes_waiting()
    is_back.set()
    until(second.nodes_waiting)
    assert second.has_lost_ranks()
    (again,) = nodes.start(second)
    until(first.nodes_waiting)
    assert [one.num_nodes for one in (*nodes.join(first), again.result(20))] == [2, 2]


def test_a_node_whose_ranks_another_node_stopped_joins_again_with_it(make_nodes: Callable[..., Nodes]) -> None:
    """All ranks end well once one agent stops its own for a node that joins; the others may not know of it yet."""
    nodes = make_nodes(3, 2)
    first, second, third = (nodes.make(number) for number in range(3))
    nodes.join(first, second)
    late = nodes.start(third)
    until(first.nodes_waiting)
    finishing = nodes.threads.submit(second.finish)  # before it looks
    again = nodes.start(first)
    assert finishing.result(20), "taken for the end of the run"
    again += nodes.start(second)
    assert [found.result(20).num_nodes for found in (*late, *again)] == [3, 3, 3]
    # at the end of the run nobody does
    assert [node.result(20) for node in [nodes.threads.submit(each.finish) for each in nodes.made]] == [False] * 3


def test_a_silent_node_is_lost_after_three_heartbeats_and_the_others_learn_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is called with a clock of its own."""
    monkeypatch.undo()
    now_s = 0.0
    monkeypatch.setattr(rendezvous_server.time, "monotonic", lambda: now_s)
    server = rendezvous_server.Server(
        socket.create_server(("127.0.0.1", 0)), b"known to both", min_nodes=2, max_nodes=2, max_restarts=1
    )
    ends = []
    for number in range(2):
        ours, theirs = socket.socketpair()
        ends.append(Connection(theirs, b"known to both", is_server=False))
        served = Connection(ours, b"known to both", is_server=True)
        server._nodes[served] = rendezvous_server.Node(now_s)
        ends[-1].receive()
        order = [number > 0, number, "127.0.0.1", number]
        mine = {"agent": str(number), "code": "", "host": "a", "address": "127.0.0.1", "port": 1}
        mine |= {"failures": [], "saved": None}
        ends[-1].send(kind="join", order=order, **mine)
        server._read(served)
    kept = next(iter(server._nodes))
    server._look(now_s)
    assert [message["kind"] for message in ends[0].receive()] == ["placed"]

    def kinds_at(moment_s: float) -> list[Any]:
        """What the first node, which beats, learns; and how many nodes there are."""
        nonlocal now_s
        now_s = moment_s
        ends[0].send(kind="beat")
        server._read(kept)
        server._look(now_s)
        return [*[message["has_lost_ranks"] for message in ends[0].receive()], len(server._nodes)]

    assert kinds_at(5.1) == [False, 2]
    assert kinds_at(15.0) == [False, 2]
    assert kinds_at(15.1) == [True, 1]
    for end in (*ends, *server._nodes):
        end.close()
    server._selector.close()
    server._listener.close()


def test_without_the_first_node_the_others_end(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    assert first._server is not None
    leave(first)
    first._server.stop(0.0)
    with pytest.raises(RendezvousFailedError, match=f"lost the rendezvous at {nodes.endpoint}"):
        until(lambda: second.nodes_waiting() and False)


def test_nodes_with_another_secret_are_refused_by_name(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make_nodes(2, 2)
    first = nodes.make(0)
    (waiting,) = nodes.start(first)
    monkeypatch.setenv(SECRET, "a secret of another run, or a guess")
    with pytest.raises(RendezvousFailedError, match=f"does not know the secret .* .{SECRET}., or was started with"):
        nodes.make(1).join()
    assert not waiting.done()
    monkeypatch.setenv(SECRET, SHARED)
    assert [one.node for one in (*nodes.join(nodes.make(1)), waiting.result(20))] == [1, 0]


def test_a_host_with_other_code_is_refused_by_name_on_every_node_before_the_first_ranks_run(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"megatron's code on {socket.gethostname()} differs from that on the first host"
    nodes = make_nodes(3, 3)
    waiting = nodes.start(nodes.make(0), nodes.make(1))
    until(lambda: all(node._client is not None for node in nodes.made))  # which have the digest
    monkeypatch.setattr(nodes_rendezvous, "code_digest", lambda: "of another commit")
    for one in (*nodes.start(nodes.make(2)), *waiting):
        with pytest.raises(DifferentCodeError, match=said):
            one.result(20)


def test_a_host_with_other_code_does_not_end_a_run_that_it_joins(
    make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make_nodes(2, 1)
    first, second = nodes.make(0), nodes.make(1)
    nodes.join(first, second)
    leave(second)
    until(first.nodes_waiting)
    assert [one.num_nodes for one in nodes.join(first)] == [1]
    monkeypatch.setattr(nodes_rendezvous, "code_digest", lambda: "of another commit")
    with pytest.raises(DifferentCodeError):
        nodes.join(nodes.make(1))
    assert not first.nodes_waiting()


@pytest.mark.parametrize("node_rank", [0, None])
def test_a_first_node_that_others_cannot_reach_is_refused_at_once(
    node_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Debian, where a machine's own name is 127.0.1.1. Slurm and Kubernetes give the nodes no number."""
    monkeypatch.setattr(nodes_rendezvous, "JOIN_TIMEOUT_S", 0)
    monkeypatch.setattr(network, "resolve", lambda host: "127.0.1.1")
    monkeypatch.setattr(nodes_rendezvous, "resolve", lambda host: "127.0.1.1")
    node = NodesRendezvous(NodeOptions(nodes=2, node_rank=node_rank, rendezvous=f"node0:{free_port()}", max_restarts=1))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(RendezvousFailedError, match=r"node0 is 127.0.1.1 on this machine, which .* GLOO_SOCKET_IFNAME"):
        node.join()
    name, address = next((name, address) for name, address in network._interfaces() if "." in address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert network.listen_address("node0") == address


@pytest.mark.parametrize("endpoint", ["fd00::2:29500", "[fd00::2]:29500"])
def test_an_ipv6_address_may_stand_in_brackets(endpoint: str) -> None:
    assert split_endpoint(endpoint) == ("fd00::2", 29500)


def test_strangers_cannot_join_nor_stop_the_rendezvous_nor_run_anything(
    make_nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    nodes = make_nodes(2, 2)
    first = nodes.make(0)
    (waiting,) = nodes.start(first)
    host, port = nodes.endpoint.split(":")
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    join = json.dumps({"kind": "join", "order": [True], "address": "6.6.6.6", "port": 1}).encode()
    nonce, mac = bytes(NONCE_BYTES), bytes(MAC_BYTES)
    until(lambda: first._client is not None and first._client._connection.can_send)
    attacks = [
        b"",
        bomb,
        nonce,
        nonce + SIZE.pack(MAC_BYTES + len(join)) + mac + join,
        nonce + SIZE.pack(MAC_BYTES + len(bomb)) + mac + bomb,
        nonce + SIZE.pack(2**32 - 1) + mac,
        nonce + SIZE.pack(MAC_BYTES + LARGEST_BYTES) + mac + b"[" * LARGEST_BYTES,
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(5000),
    ]
    strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
    for number, stranger in enumerate(strangers):
        try:
            stranger.sendall(attacks[number % len(attacks)])
        except OSError:
            continue  # it was closed for another
    (second,) = nodes.join(nodes.make(1))
    assert (waiting.result(20).num_nodes, second.node) == (2, 1)
    assert list(tmp_path.iterdir()) == []
    for stranger in strangers:
        stranger.close()


def test_a_recorded_message_is_not_taken_twice() -> None:
    ours, theirs = socket.socketpair()
    server, client = (
        Connection(ours, b"known to both", is_server=True),
        Connection(theirs, b"known to both", is_server=False),
    )
    assert server.receive() == client.receive() == []
    client.send(kind="beat")
    recorded = ours.recv(1000, socket.MSG_PEEK)
    assert server.receive() == [{"kind": "beat"}]
    theirs.sendall(recorded)
    with pytest.raises(StrangerError):
        server.receive()
    server.close()
    client.close()
