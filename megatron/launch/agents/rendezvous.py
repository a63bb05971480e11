"""Rendezvous of the agents of a run: how many nodes there are, which of them this one is, where rank 0 listens.

One node needs no agreement, and so no open port here. nodes_rendezvous.py has that of several.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.launch.addresses import split_endpoint
from megatron.launch.agents.restart_policy import Failure, RestartPolicy
from megatron.launch.child_processes import report
from megatron.runtime.network import LOOPBACK, listening_socket

SLICE_S = 0.5
"""Longest sleep: a signal that comes just before one is handled at its end."""


class RendezvousFailedError(RuntimeError):
    """The nodes could not agree, or lost the first node."""


class DifferentCodeError(Exception):
    """A node has other code than the first one."""


class RunEndedError(Exception):
    """The run ends, on all nodes, instead of a restart. `status`: its exit status; `reason`: empty on other nodes."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(status)
        self.status, self.reason = status, reason


class NotNeededError(Exception):
    """The run has ended, or a stop was requested, while this node waited as a spare host."""


@dataclass(frozen=True)
class NodeOptions:
    """Nodes of a run, as each of them knows them beforehand."""

    nodes: int = 1
    min_nodes: int | None = None
    """Number of nodes that suffices to train on. None: all."""
    node_rank: int | None = None
    """Place of this node, from 0; the first serves the rendezvous. None: the node whose address is named is first.

    From `nodes` on: a spare host, which takes the place of one that is lost or fails twice.
    """
    rendezvous: str | None = None
    """HOST:PORT of the first node. One node: where rank 0 listens; None: a free port of the loopback interface."""
    node_order: int | None = None
    """Order of the nodes after the first, where there is no `node_rank`."""
    run_id: str = "run"
    """Equal on all nodes of a run."""
    max_restarts: int = 0


@dataclass(frozen=True)
class Membership:
    """Outcome of a rendezvous."""

    node: int
    num_nodes: int
    master_addr: str
    master_port: int
    store_socket: socket.socket | None = None
    """On the first node: what listens on `master_port`. Rank 0 takes it over, and accepts those that have connected."""
    restarts: int = 0
    """Those of the run so far."""


def _wait(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, SLICE_S))


class Rendezvous:
    """Agreement of the nodes of a run; that of a single node, which is by itself."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._policy = RestartPolicy(options.max_restarts)

    def join(self, failures: Sequence[Failure] = (), saved: int | None = None) -> Membership:
        """Wait until enough nodes are there, after a failure until the policy of restarts lets them start.

        `failures`: those of this node's ranks that made it join again, the first seen first. `saved`: iteration of the
        newest complete checkpoint that its ranks know. Raises RendezvousFailedError, DifferentCodeError, RunEndedError,
        and NotNeededError if the run ends without this node.
        """
        # first: a new checkpoint makes all restarts available again
        self._policy.note_saved(saved)
        if failures:
            decision = self._policy.after(failures)
            report(decision.text)
            if not decision.restarts:
                raise RunEndedError(decision.status, decision.text)
            _wait(decision.delay_s)
        endpoint, port = self._options.rendezvous, 0
        if endpoint:
            _, port = split_endpoint(endpoint)
        try:
            # it listens already: a rank whose connection is refused waits for up to a second before it tries again
            held = listening_socket(LOOPBACK, port)
        except OSError as error:
            raise RendezvousFailedError(f"{error.strerror}; give another port, or none") from None
        return Membership(0, 1, LOOPBACK, held.getsockname()[1], held, self._policy.restarts)

    def settle(self) -> None:
        """Release, after `join`, what only nodes that may be replaced need."""

    def nodes_waiting(self) -> bool:
        """Return whether nodes wait to join. Raises RendezvousFailedError when the first node is lost."""
        return False

    def has_lost_ranks(self) -> bool:
        """Return whether ranks of another node have ended or are lost, so that those of this node cannot save."""
        return False

    def finish(self) -> bool:
        """Wait a limited time for the ranks of the other nodes to end. Return whether they start again."""
        return False

    def close(self, status: int | None = None) -> None:
        """End the rendezvous: nodes that still wait to join end, by this exit status if there is one."""

    def end_status(self, timeout_s: float) -> int | None:
        """Return the exit status by which another node ends the run within this time; None: it does not."""
        return None

    def leave(self) -> None:
        """Release sockets and threads, in whatever state."""
