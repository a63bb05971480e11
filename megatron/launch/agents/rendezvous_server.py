"""Server of the rendezvous, a thread in the agent of the first node: which nodes there are, and what number each has.

A node is a connection that knows the secret of the run. Its stages, and what it is sent:

| stage           | event                                         | sent               | next stage |
|-----------------|-----------------------------------------------|--------------------|------------|
| any             | `join`: wants a number                        |                    | WAITING    |
| any             | `join` with other code                        | `refused`          | CONNECTED  |
| WAITING         | the run is complete without it                | `spare`            | SPARE      |
| WAITING, SPARE  | a round begins with it                        | `placed`, a number | MEMBER     |
| MEMBER          | `done`: its ranks are                         |                    | DONE       |
| DONE            | no member is left that runs                   | `done`             | DONE       |
| DONE            | the same, but a member of the round waits     | `again`: join too  | DONE       |
| MEMBER          | connection ended, or silent for three beats   |                    | missing    |
| missing         | `resume` on a further connection              | `waiting`          | MEMBER     |
| missing         | `resume` after others were placed without it  | `stale`            | CONNECTED  |

All are sent `waiting`, the number of nodes that wait to join and whether ranks of another node have ended, whenever it
changes and as a heartbeat; and `closed` once one of them sends `close`, or the policy of restarts ends the run.

Where more nodes wait than the run needs, these come first: the first node, nodes that failed less than twice since the
last new checkpoint, lower numbers. Spare hosts have the numbers from the size of the run on.

A node says in `join` how its ranks failed. Once all nodes wait, the policy of restarts decides for them all, from the
failures of all: a rank that lost another mostly comes first, and is not the cause.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.launch.agents.restart_policy import Failure, RestartPolicy
from megatron.launch.child_processes import report
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


class NodeStage(enum.Enum):
    """Stage of a node, as in the table above."""

    CONNECTED = enum.auto()
    WAITING = enum.auto()
    SPARE = enum.auto()
    MEMBER = enum.auto()
    DONE = enum.auto()


class Order(NamedTuple):
    """Order of nodes that wait, and have failed equally often."""

    is_other: bool
    """Not the first node, which serves the rendezvous."""
    number: int
    """UNNUMBERED: it was given none."""
    address: str
    process: int


@dataclass
class Node:
    """Another agent, or that of this node itself."""

    heard_s: float
    stage: NodeStage = NodeStage.CONNECTED
    order: Order | None = None
    """None: it has not joined."""
    address: str = ""
    port: int = 0
    agent: str = ""
    """Drawn at random by each agent."""
    failures: list[Failure] = field(default_factory=list)
    """Those of its ranks that ended the present round."""
    joined_s: float = 0.0

    @property
    def waits(self) -> bool:
        return self.stage in (NodeStage.WAITING, NodeStage.SPARE)

    @property
    def has_number(self) -> bool:
        """True in the present round, not while it waits for the next one."""
        return self.stage in (NodeStage.MEMBER, NodeStage.DONE)


class News(NamedTuple):
    """State of the round, as all nodes are sent it."""

    waiting: int = 0
    """Number of nodes that wait to join."""
    has_lost_ranks: bool = False
    """The ranks of a member have ended, or are lost, for another reason than a node that joins."""


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
        # a peer may leave between select and accept
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._nodes: dict[Connection, Node] = {}
        self._round: list[Connection] = []
        self._round_id = ""
        self._missing: dict[str, tuple[Node, float]] = {}
        """Members of the round that were dropped, by agent, and since when."""
        self._has_lost_ranks = False
        self._is_first_round = True
        self._last_call_s: float | None = None
        """When a round begins without those that are not there yet; None: too few nodes wait."""
        self._news, self._news_s = News(), 0.0
        """Last news sent, and when."""
        self._end_s: float | None = None
        self._is_closed = False
        self._end_status: int | None = None
        self.reason = ""
        """Decision of the policy that ended the run."""
        self._actions: dict[str, Callable[[Connection, dict[str, Any]], None]] = {
            "join": self._admit,
            "resume": self._resume,
            "done": self._note_done,
            "close": self._end_run,
            "beat": lambda connection, message: None,
        }

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
        # else whoever opens connections without a word would use up the descriptors
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
        try:
            connected, _ = self._listener.accept()
        # the listener stays readable then, and without a pause the loop would take a core
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
                self._actions[message["kind"]](connection, message)
        except Exception:  # of whatever a stranger sends; a node reports it itself
            self._drop(connection)

    def _admit(self, connection: Connection, message: dict[str, Any]) -> None:
        node = self._nodes[connection]
        self._policy.note_saved(_number(message["saved"]))
        node.failures = [Failure.from_json(failure) for failure in message["failures"]]
        node.joined_s = node.heard_s
        self._replace(connection, str(message["agent"]))
        ran = node.has_number or node.agent in self._missing
        if ran and not self._news.waiting:  # no node joins: its ranks have ended by themselves
            self._has_lost_ranks = True
        self._missing.pop(node.agent, None)
        is_other, number, address, process = message["order"]
        node.order = Order(bool(is_other), int(number), str(address), int(process))
        node.address, node.port = str(message["address"]), int(message["port"])
        node.stage = NodeStage.WAITING
        if self._is_closed:
            connection.send(kind="closed", status=self._end_status)
        elif message["code"] != self._code:
            self._refuse(connection, str(message["host"]))
        elif len(self._waiting()) >= self._min_nodes:
            self._last_call_s = time.monotonic() + LAST_CALL_S

    def _refuse(self, connection: Connection, host: str) -> None:
        """Refuse a node with other code, and before the first round all nodes: the run lacks one of its own."""
        self._nodes[connection].order, self._nodes[connection].stage = None, NodeStage.CONNECTED
        refused = [connection]  # a node that comes late does not end the run of the others
        if self._is_first_round:
            refused = list(self._nodes)
        self._send_all(refused, kind="refused", host=host)

    def _note_done(self, connection: Connection, message: dict[str, Any]) -> None:
        node = self._nodes[connection]
        # a node that the newest round left out is no longer counted
        if node.stage is NodeStage.MEMBER:
            node.stage = NodeStage.DONE

    def _end_run(self, connection: Connection, message: dict[str, Any]) -> None:
        self._close(_number(message["status"]))

    def _close(self, status: int | None) -> None:
        self._is_closed, self._end_status = True, status
        self._send_all(list(self._nodes), kind="closed", status=status)

    def _replace(self, connection: Connection, agent: str) -> None:
        """Drop older connections of the same agent, which may be half open and count as members until they are lost."""
        self._nodes[connection].agent = agent
        for other, node in list(self._nodes.items()):
            if other is not connection and node.agent == agent:
                self._drop(other)

    def _resume(self, connection: Connection, message: dict[str, Any]) -> None:
        """Give a member of the present round that lost its connection its place again: its ranks still run."""
        agent = str(message["agent"])
        self._replace(connection, agent)
        if self._is_closed:
            connection.send(kind="closed", status=self._end_status)
        elif message["round"] != self._round_id or agent not in self._missing:
            connection.send(kind="stale")
        else:
            node, _ = self._missing.pop(agent)
            node.heard_s = time.monotonic()
            self._nodes[connection] = node
            self._round.append(connection)
            # news goes out when it changes, and this node may have missed some
            connection.send(kind="waiting", count=self._news.waiting, has_lost_ranks=self._news.has_lost_ranks)

    def _look(self, now_s: float) -> None:
        """Let time take its effect: silence, the begin and the end of a round, and news.

        In this order: a round begins once its members are lost, and with it no news of the last one are left.
        """
        self._drop_silent(now_s)
        if self._begin_round(now_s):
            return
        returning = sum(now_s - since_s < RETURN_S for _, since_s in self._missing.values())
        self._has_lost_ranks |= returning < len(self._missing)
        if not returning:  # its ranks run, and are not done
            self._end_round()
        members = sum(node.has_number for node in self._nodes.values())
        if members == self._max_nodes:
            self._inform_spares()
        num_waiting = 0
        # nodes join where there are places, also of a member that is lost, but not of one that may return
        if 0 < members < self._max_nodes - returning:
            num_waiting = len(self._waiting())
        self._send_news(News(num_waiting, self._has_lost_ranks), now_s)

    def _drop_silent(self, now_s: float) -> None:
        for connection, node in list(self._nodes.items()):
            limit_s = INTRODUCTION_S
            if connection.is_known:
                limit_s = KEEP_ALIVE_S * LOST_BEATS
            if now_s - node.heard_s > limit_s:
                self._drop(connection, was_silent=True)

    def _begin_round(self, now_s: float) -> bool:
        """Give the nodes their numbers if no member of the last round is left, and enough wait; return whether so."""
        waiting = self._waiting()
        if len(waiting) < self._min_nodes:
            self._last_call_s = None
        if self._is_closed or any(node.has_number for node in self._nodes.values()):
            return False
        is_time = self._last_call_s is not None and now_s >= self._last_call_s
        if not is_time and not self._are_complete(waiting):
            return False
        self._decide(now_s)
        if self._is_closed or now_s < self._start_s:
            return False
        self._place(self._waiting())  # once more: a failure may have put another node first
        return True

    def _end_round(self) -> None:
        """Send those that are done how the round ends, once no member runs any more."""
        left = [connection for connection in self._round if connection in self._nodes]
        stages = {self._nodes[connection].stage for connection in left}
        if NodeStage.MEMBER in stages or NodeStage.DONE not in stages:
            return
        self._round = []
        kind = "done"
        if stages != {NodeStage.DONE}:
            kind = "again"  # a node has joined, whose agent has stopped the ranks of all: the run has not ended
        self._send_all((one for one in left if self._nodes[one].stage is NodeStage.DONE), kind=kind)

    def _send_news(self, news: News, now_s: float) -> None:
        if news == self._news and now_s - self._news_s <= KEEP_ALIVE_S:
            return
        self._news, self._news_s = news, now_s
        everyone = [connection for connection in self._nodes if connection.is_known]
        self._send_all(everyone, kind="waiting", count=news.waiting, has_lost_ranks=news.has_lost_ranks)

    def _waiting(self) -> list[Connection]:
        """Return the nodes that have joined and have no place yet, the first of them first, at most one of a number."""
        by_number: dict[Any, tuple[tuple[Any, ...], Connection]] = {}
        for connection, node in self._nodes.items():
            if node.order is None or not node.waits:
                continue
            is_other, number, *rest = node.order
            is_failing = self._own_failures[node.agent] >= FAILING
            # of two with one number the later is the one that lives: the other has been started again
            key = connection if number == UNNUMBERED else number
            by_number[key] = (is_other, is_failing, number, *rest), connection
        in_order = sorted(by_number.values(), key=lambda one: one[0])
        return [connection for _, connection in in_order][: self._max_nodes]

    def _are_complete(self, waiting: list[Connection]) -> bool:
        """Return whether all nodes are there. At first a spare host leaves others the last call to come."""
        if len(waiting) < self._max_nodes:
            return False
        orders = (self._nodes[connection].order for connection in waiting)
        has_spare = any(order is not None and order.number >= self._max_nodes for order in orders)
        return not (has_spare and self._is_first_round)

    def _decide(self, now_s: float) -> None:
        """Let the policy decide once what follows the failures that ended the round."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.joined_s)
        failures = [failure for node in nodes for failure in node.failures]
        # by agent, not by number: the numbers change with each round
        failed = [node.agent for node in nodes if any(failure.is_own for failure in node.failures)]
        for node in nodes:
            node.failures = []
        lost = next((f"the node at {node.address} was lost" for node, _ in self._missing.values()), "")
        self._missing.clear()
        if not failures and not lost:
            return  # a node joins
        decision = self._policy.after(failures, lost)
        report(decision.text)
        if decision.has_progressed:
            self._own_failures.clear()
        self._own_failures.update(failed)
        self._start_s = now_s + decision.delay_s
        if not decision.restarts:
            self.reason = decision.text
            self._close(decision.status)

    def _inform_spares(self) -> None:
        for connection, node in list(self._nodes.items()):
            if node.stage is NodeStage.WAITING:
                node.stage = NodeStage.SPARE
                self._send_all([connection], kind="spare")

    def _place(self, waiting: list[Connection]) -> None:
        self._is_first_round = False
        first = self._nodes[waiting[0]]
        self._round, self._last_call_s = list(waiting), None
        self._round_id = secrets.token_hex(8)
        self._missing.clear()
        self._has_lost_ranks = False
        self._news, self._news_s = News(), time.monotonic()
        for number, connection in enumerate(waiting):
            self._nodes[connection].stage = NodeStage.MEMBER
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

    def _send_all(self, connections: Iterable[Connection], **message: Any) -> None:
        for connection in connections:
            if connection not in self._nodes or not connection.is_known:
                continue
            try:
                connection.send(**message)
            except OSError:
                self._drop(connection)

    def _drop(self, connection: Connection, *, was_silent: bool = False) -> None:
        node = self._nodes.pop(connection, None)
        if node is None:
            return
        if node.stage is NodeStage.MEMBER and not self._is_closed:
            since_s = time.monotonic()
            if was_silent:
                since_s -= RETURN_S  # it has had its time to return
            self._missing[node.agent] = node, since_s
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()


def _number(value: Any) -> int | None:
    """Return a number that a node sends. Raises ValueError and TypeError for what is none."""
    if value is None:
        return None
    return int(value)
