"""Rendezvous of the agents of a run: how many nodes there are, which of them this one is, where rank 0 listens.

One node needs no agreement, and so neither torch nor an open port here. Several nodes use torch's elastic rendezvous
(`DynamicRendezvousHandler` over c10d), which also detects nodes that are lost or join.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler

JOIN_TIMEOUT_S = 600
"""Time for enough nodes to join."""
LAST_CALL_S = 30
"""Time for further nodes to join once there are enough."""
KEEP_ALIVE_S = 5
"""Interval of each node's heartbeat. A node that misses three is lost."""
EXIT_BARRIER_S = 30
"""Time that a node whose ranks are done waits for the others."""
STORE_LINGER_S = 2
"""Time that the first node still serves the store when all are done, for the others to leave."""
WATCH_S = 0.25
"""Interval at which a node looks for others that wait to join."""
RETRY_S = 1.0
"""Interval of attempts to reach the first node."""
CONNECT_TIMEOUT_S = 5.0
POLL_S = 0.05


class RendezvousFailedError(RuntimeError):
    """The nodes could not agree, or lost the first node."""


@dataclass(frozen=True)
class NodeOptions:
    """Nodes of a run, as each of them knows them beforehand."""

    nodes: int = 1
    min_nodes: int | None = None
    """Number of nodes that suffices to train on. None: all."""
    node_rank: int | None = None
    """Place of this node, from 0; the first serves the rendezvous. None: the node whose address is named is first."""
    rendezvous: str | None = None
    """HOST:PORT of the first node. One node: where rank 0 listens; None: a free port of the loopback interface."""
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


class Rendezvous:
    """Agreement of the nodes of a run; that of a single node, which is by itself."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options

    def join(self) -> Membership:
        """Wait until enough nodes are there. Raises RendezvousFailedError."""
        endpoint = self._options.rendezvous
        return Membership(0, 1, *(split_endpoint(endpoint) if endpoint else ("127.0.0.1", free_port("127.0.0.1"))))

    def nodes_waiting(self) -> bool:
        """Return whether nodes wait to join. Raises RendezvousFailedError when the first node is lost."""
        return False

    def finish(self) -> None:
        """Wait a limited time for the ranks of the other nodes to end."""

    def close(self) -> None:
        """Leave; nodes that still wait to join end."""


class TorchRendezvous(Rendezvous):
    """Torch's rendezvous, with the nodes ordered by `node_rank`.

    Without restarts no node can be replaced, so the rendezvous is left as soon as all have joined: a network that fails
    for some minutes between the agents need not concern the ranks.
    """

    def __init__(self, options: NodeOptions) -> None:
        super().__init__(options)
        self._handler: RendezvousHandler | None = None
        self._store: Store | None = None
        self._num_nodes = 0
        self._serves = False
        self._address = ""
        self._looked_s = 0.0

    def join(self) -> Membership:
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

        try:
            if self._handler is None:
                self._connect()
            assert self._handler is not None
            found = self._handler.next_rendezvous()
            self._store, self._num_nodes = found.store, found.world_size
            membership = self._order(found.rank)
            if self._options.max_restarts == 0:
                self._handler.shutdown()
                self._handler = None
        except RendezvousClosedError:
            raise RendezvousFailedError("the run has ended on the other nodes") from None
        except (RendezvousError, DistError, OSError) as error:
            raise RendezvousFailedError(f"no rendezvous at {self._options.rendezvous}: {error}") from None
        return membership

    def nodes_waiting(self) -> bool:
        from torch.distributed.elastic.rendezvous import RendezvousError

        if self._handler is None or time.monotonic() - self._looked_s < WATCH_S:
            return False
        self._looked_s = time.monotonic()
        try:
            return self._handler.num_nodes_waiting() > 0
        except RendezvousError as error:
            raise RendezvousFailedError(f"lost the rendezvous at {self._options.rendezvous}: {error}") from None

    def finish(self) -> None:
        from torch.distributed import DistError
        from torch.distributed.elastic.utils.store import barrier

        if self._options.max_restarts == 0:
            return
        with contextlib.suppress(DistError):  # a node that failed at the very end
            barrier(self._store, self._num_nodes, key_prefix="megatron/end", barrier_timeout=EXIT_BARRIER_S)

    def close(self) -> None:
        if self._handler is not None:
            self._handler.shutdown()
            if self._serves:
                time.sleep(STORE_LINGER_S)

    def _connect(self) -> None:
        """Reach the first node, or serve the store there. Raises RendezvousError or OSError."""
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        options = self._options
        # a new attempt must find neither the keys of the last one nor its rank 0: each gets a store of its own
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._serves, self._address = self._find_first_node()

        def handler(is_host: bool) -> RendezvousHandler:
            parameters = RendezvousParameters(
                backend="c10d",
                endpoint=options.rendezvous or "",
                run_id=options.run_id,
                min_nodes=options.min_nodes or options.nodes,
                max_nodes=options.nodes,
                local_addr=self._address,
                is_host=is_host,
                join_timeout=JOIN_TIMEOUT_S,
                last_call_timeout=LAST_CALL_S,
                keep_alive_interval=KEEP_ALIVE_S,
            )
            return get_rendezvous_handler(parameters)

        if self._serves:
            # of two agents on one machine the first serves
            with contextlib.suppress(RendezvousConnectionError):
                self._handler = handler(True)
                return
            self._serves = False
        self._handler = handler(False)

    def _find_first_node(self) -> tuple[bool, str]:
        """Return whether this is the first node, and this node's address for the others. Raises OSError."""
        from megatron.parallel.context import address_towards

        host, port = split_endpoint(self._options.rendezvous or "")
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                first = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
                own = address_towards(first)
                if self._options.node_rank == 0 or (self._options.node_rank is None and own == first):
                    return True, host
                socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
                return False, own or socket.gethostname()
            except OSError:  # the first node may not have started yet, nor have a name
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)

    def _order(self, place: int) -> Membership:
        """Number the nodes by their `node_rank`, rather than by their addresses as torch does."""
        assert self._store is not None
        order = [not self._serves, self._options.node_rank or 0, self._address, os.getpid()]
        # rank 0 listens on the first node
        mine: list[Any] = [order, self._address, free_port("")]
        keys = [f"megatron/node{number}" for number in range(self._num_nodes)]
        self._store.set(keys[place], json.dumps(mine))
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while not self._store.check(keys):  # not `wait`, which no signal interrupts
            if time.monotonic() > deadline_s:
                raise RendezvousFailedError(f"a node left the rendezvous at {self._options.rendezvous} while joining")
            time.sleep(POLL_S)
        nodes = sorted(json.loads(self._store.get(key)) for key in keys)
        return Membership(nodes.index(mine), self._num_nodes, nodes[0][1], nodes[0][2])


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def free_port(address: str) -> int:
    """Return a port that is free on this interface; '' stands for all of them."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
