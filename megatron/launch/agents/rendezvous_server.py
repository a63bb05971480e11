"""Server of the rendezvous, a thread in the agent of the first node: which nodes there are, and what number each has.

Nodes that know the secret of the run send `join`, `resume`, `beat`, `done` and `close`. They receive `placed` with
their number, `waiting` with the number of nodes that wait to join (also as a heartbeat) and whether ranks of another
node have ended, `spare` where the run is complete without them, `refused` where a node has other code, `done`, or
`again` where a node that is done must join once more with the others, and `closed`. A node is a connection: it is lost
when this ends, or is silent for three heartbeats. A further connection of its agent takes the place of the first at
once: after `resume` the node stays what it was, unless others were placed without it since: `stale`.

Where more nodes wait than the run needs, these come first: the first node, nodes that failed less than twice since the
last new checkpoint, lower numbers. Spare hosts have the numbers from the size of the run on.

A node says in `join` how its ranks failed. Once all nodes wait, the policy of restarts decides for them all, from the
failures of all: a rank that lost another mostly comes first, and is not the cause.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron.launch.agents.restart_policy import Failure, RestartPolicy
from megatron.runtime.messages import Connection

KEEP_ALIVE_S = 5.0
"""Interval of each node's heartbeat."""
LOST_BEATS = 3
"""Heartbeats that a lost node has missed."""
LAST_CALL_S = 30.0
"""Time for further nodes to join once there are enough."""
INTRODUCTION_S = 10.0
"""Time for a new connection to prove that it knows the secret."""
MOST_STRANGERS = 256
"""Number of connections that have not done so yet; a further one closes the oldest."""
RETURN_S = 5.0
"""Time for an agent whose connection broke to connect again."""
LINGER_S = 2.0
"""Time for the nodes to read the last message."""
FAILING = 2
"""Failures of a node's own ranks, without progress between, after which a spare host takes its place."""
POLL_S = 0.1
UNNUMBERED = -1
"""Stands for the number of a node that was given none."""


@dataclass
class Node:
    """Another agent, or that of this node itself."""

    heard_s: float
    order: list[Any] | None = None
    """True for all but the first, then number, address and process; None: it has not joined."""
    address: str = ""
    port: int = 0
    agent: str = ""
    """Drawn at random by each agent."""
    is_spare: bool = False
    """It knows that the run is complete without it."""
    is_member: bool = False
    """It has a number in the present round; not while it waits for the next one."""
    is_done: bool = False
    failures: list[Failure] = field(default_factory=list)
    """Those of its ranks that ended the present round."""
    joined_s: float = 0.0


# It alone chooses the nodes of a round and decides on restarts: two hosts cannot give way to one spare host, and an
# agent sees its own ranks alone, which may only have lost others.
class Server(threading.Thread):
    """Serves the rendezvous on `listener` until `stop`, or without restarts until all nodes have their numbers."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        min_nodes: int,
        max_nodes: int,
        max_restarts: int,
        code: str = "",
    ) -> None:
        """`code`: what each node must have too."""
        super().__init__(name="rendezvous", daemon=True)
        self._listener, self._secret = listener, secret
        self._min_nodes, self._max_nodes, self._max_restarts, self._code = min_nodes, max_nodes, max_restarts, code
        self._policy = RestartPolicy(max_restarts)
        self._own_failures: Counter[str] = Counter()
        """Failures of each agent's own ranks, without progress between."""
        self._start_s = 0.0
        """The next round does not begin before."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._nodes: dict[Connection, Node] = {}
        self._round: list[Connection] = []
        self._round_id = ""
        self._missing: dict[str, tuple[Node, float]] = {}
        """Members of the round that were dropped, by agent, and since when."""
        self._has_lost_ranks = False
        """The ranks of a member have ended, or are lost, for another reason than a node that joins."""
        self._is_first_round = True
        self._last_call_s: float | None = None
        self._said: tuple[int, bool, float] = (0, False, 0.0)
        self._end_s: float | None = None
        self._is_closed = False
        self._end_status: int | None = None

    def stop(self, linger_s: float) -> None:
        """End once the nodes have left, at most `linger_s` from now."""
        self._end_s = time.monotonic() + linger_s
        self.join(linger_s + 1.0)

    def run(self) -> None:
        while self._end_s is None or (self._nodes and time.monotonic() < self._end_s):
            for key, _ in self._selector.select(POLL_S):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._look(time.monotonic())
        for connection in list(self._nodes):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        strangers = [connection for connection in self._nodes if not connection.is_known]
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
        try:
            connected, _ = self._listener.accept()
        except OSError:  # the peer has disconnected, or no descriptor is free
            time.sleep(POLL_S)
            return
        try:
            connection = Connection(connected, self._secret, is_server=True)
        except OSError:
            connected.close()
            return
        self._nodes[connection] = Node(time.monotonic())
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        if connection not in self._nodes:
            return  # dropped since it was selected
        try:
            for message in connection.receive():
                self._nodes[connection].heard_s = time.monotonic()
                self._take(connection, message)
        except Exception:  # of whatever a stranger sends; a node reports it itself
            self._drop(connection)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        node = self._nodes[connection]
        if message["kind"] == "join":
            is_other, node_rank, address, pid = message["order"]
            saved = message["saved"]
            self._policy.note_saved(None if saved is None else int(saved))
            node.failures = [Failure.from_json(failure) for failure in message["failures"]]
            node.joined_s = node.heard_s
            self._replace(connection, str(message["agent"]))
            self._has_lost_ranks |= (node.is_member or node.agent in self._missing) and not self._said[0]
            self._missing.pop(node.agent, None)
            node.order = [bool(is_other), int(node_rank), str(address), int(pid)]
            node.address, node.port = str(message["address"]), int(message["port"])
            node.is_member = node.is_done = node.is_spare = False
            if self._is_closed:
                connection.send(kind="closed", status=self._end_status)
            elif message["code"] != self._code:
                # a node that comes late does not end the run of the others
                refused = list(self._nodes) if self._is_first_round else [connection]
                node.order = None
                self._send_all(refused, kind="refused", host=str(message["host"]))
            elif len(self._waiting()) >= self._min_nodes:
                self._last_call_s = time.monotonic() + LAST_CALL_S
        elif message["kind"] == "resume":
            self._replace(connection, str(message["agent"]))
            self._resume(connection, str(message["round"]))
        elif message["kind"] == "done":
            node.is_done = True
        elif message["kind"] == "close":
            status = message["status"]
            self._close(None if status is None else int(status))

    def _close(self, status: int | None) -> None:
        self._is_closed, self._end_status = True, status
        self._send_all(list(self._nodes), kind="closed", status=status)

    def _replace(self, connection: Connection, agent: str) -> None:
        """Drop older connections of the same agent, which may be half open and count as members until they are lost."""
        self._nodes[connection].agent = agent
        for other, node in list(self._nodes.items()):
            if other is not connection and node.agent == agent:
                self._drop(other)

    def _resume(self, connection: Connection, round_id: str) -> None:
        """Give a member of the present round that lost its connection its place again: its ranks still run."""
        if self._is_closed or round_id != self._round_id or self._nodes[connection].agent not in self._missing:
            if self._is_closed:
                connection.send(kind="closed", status=self._end_status)
            else:
                connection.send(kind="stale")
            return
        node, _ = self._missing.pop(self._nodes[connection].agent)
        node.heard_s = time.monotonic()
        self._nodes[connection] = node
        self._round.append(connection)
        connection.send(kind="waiting", count=self._said[0], has_lost_ranks=self._said[1])

    def _look(self, now_s: float) -> None:
        """Drop who is silent, number the nodes if it is time, and send what has changed."""
        for connection, node in list(self._nodes.items()):
            limit_s = KEEP_ALIVE_S * LOST_BEATS if connection.is_known else INTRODUCTION_S
            if now_s - node.heard_s > limit_s:
                self._drop(connection, was_silent=True)
        waiting = self._waiting()
        members = [connection for connection, node in self._nodes.items() if node.is_member]
        if len(waiting) < self._min_nodes:
            self._last_call_s = None
        is_time = self._last_call_s is not None and now_s >= self._last_call_s
        if not members and not self._is_closed and (self._are_complete(waiting) or is_time):
            self._decide(now_s)
            if now_s >= self._start_s and not self._is_closed:
                self._place(self._waiting())
                return
        returning = [since_s for _, since_s in self._missing.values() if now_s - since_s < RETURN_S]
        self._has_lost_ranks |= len(returning) < len(self._missing)
        left = [self._nodes[connection] for connection in self._round if connection in self._nodes]
        have_ended = all(node.is_done or not node.is_member for node in left) and not returning
        if have_ended and any(node.is_done for node in left):
            done, self._round = [connection for connection in self._round if connection in self._nodes], []
            # where a node has joined again, its agent has stopped the ranks of all: the run has not ended
            kind = "again" if any(not node.is_member for node in left) else "done"
            self._send_all([connection for connection in done if self._nodes[connection].is_done], kind=kind)
        if len(members) == self._max_nodes:
            self._inform_spares()
        count = len(waiting) if members and len(members) + len(returning) < self._max_nodes else 0
        if (count, self._has_lost_ranks) != self._said[:2] or now_s - self._said[2] > KEEP_ALIVE_S:
            self._said = count, self._has_lost_ranks, now_s
            everyone = [connection for connection in self._nodes if connection.is_known]
            self._send_all(everyone, kind="waiting", count=count, has_lost_ranks=self._has_lost_ranks)

    def _waiting(self) -> list[Connection]:
        """Return the nodes that have joined and have no place yet, the first of them first, at most one of a number."""
        found: dict[Any, tuple[list[Any], Connection]] = {}
        for connection, node in self._nodes.items():
            if node.order and not node.is_member:
                number = node.order[1]
                is_failing = self._own_failures[node.agent] >= FAILING
                found[connection if number == UNNUMBERED else number] = (
                    [node.order[0], is_failing, *node.order[1:]],
                    connection,
                )
        in_order = sorted(found.values(), key=lambda one: one[0])
        return [connection for _, connection in in_order][: self._max_nodes]

    def _are_complete(self, waiting: list[Connection]) -> bool:
        """Return whether all nodes are there. At first a spare host leaves others the last call to come."""
        orders = [self._nodes[connection].order or [] for connection in waiting]
        spare = any(order[1] >= self._max_nodes for order in orders)
        return len(waiting) == self._max_nodes and not (spare and self._is_first_round)

    def _decide(self, now_s: float) -> None:
        """Let the policy decide once what follows the failures that ended the round."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.joined_s)
        failures = [failure for node in nodes for failure in node.failures]
        failed = [node.agent for node in nodes if any(failure.is_own for failure in node.failures)]
        for node in nodes:
            node.failures = []
        lost = next((f"the node at {node.address} was lost" for node, _ in self._missing.values()), "")
        self._missing.clear()
        if not failures and not lost:
            return  # a node joins
        decision = self._policy.after(failures, lost)
        print(decision.text, file=sys.stderr, flush=True)
        if decision.has_progressed:
            self._own_failures.clear()
        self._own_failures.update(failed)
        self._start_s = now_s + decision.delay_s
        if not decision.restarts:
            self._close(decision.status)

    def _inform_spares(self) -> None:
        for connection, node in list(self._nodes.items()):
            if node.order and not node.is_member and not node.is_spare:
                node.is_spare = True
                self._send_all([connection], kind="spare")

    def _place(self, waiting: list[Connection]) -> None:
        self._is_first_round = False
        first = self._nodes[waiting[0]]
        self._round, self._last_call_s = list(waiting), None
        self._round_id = secrets.token_hex(8)
        self._missing.clear()
        self._has_lost_ranks, self._said = False, (0, False, time.monotonic())
        for number, connection in enumerate(waiting):
            self._nodes[connection].is_member = True
            self._send_all(
                [connection],
                kind="placed",
                round=self._round_id,
                node=number,
                num_nodes=len(waiting),
                master_addr=first.address,
                master_port=first.port,
                restarts=self._policy.restarts,
            )
        if not self._max_restarts:
            self._end_s = time.monotonic() + LINGER_S

    def _send_all(self, connections: list[Connection], **message: Any) -> None:
        for connection in connections:
            if connection in self._nodes and connection.is_known:
                try:
                    connection.send(**message)
                except OSError:
                    self._drop(connection)

    def _drop(self, connection: Connection, *, was_silent: bool = False) -> None:
        if (node := self._nodes.pop(connection, None)) is not None:
            if node.is_member and not node.is_done and not self._is_closed:
                self._missing[node.agent] = node, time.monotonic() - (RETURN_S if was_silent else 0.0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.socket)
            connection.close()
