"""Rendezvous of several nodes: the first serves it (rendezvous_server.py), and each, the first included, is a client.

Every message is authenticated with the secret of the run (runtime/messages.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron.launch.addresses import split_endpoint
from megatron.launch.agents import rendezvous, rendezvous_server
from megatron.launch.agents.rendezvous_server import LOST_BEATS
from megatron.launch.agents.restart_policy import MOST_FAILURES, Failure
from megatron.launch.child_processes import report
from megatron.runtime import network
from megatron.runtime.files import IMPORT_ROOT
from megatron.runtime.messages import SECRET, Connection, run_secret
from megatron.runtime.network import is_loopback, listen_address, listening_socket, resolve

KINDS = (".py", ".yaml", ".cpp", ".h")
"""Files of the project that make a version of it."""
JOIN_TIMEOUT_S = 600
"""Time for enough nodes to join."""
EXIT_BARRIER_S = 30
"""Time that a node whose ranks are done waits for the others."""
RETRY_S = 1.0
"""Interval of attempts to reach the first node."""
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 15.0
"""Time to connect again to a first node that was lost, or for a program without the secret to leave its address."""
POLL_S = 0.05


# Hosts of a run compare it, since two versions of the code on them agree on nothing else that would show it.
@functools.cache
def code_digest() -> str:
    """Return a digest of the project's files as they lay on the disk when it was first called, names included."""
    folder, digest = IMPORT_ROOT / "megatron", hashlib.sha256()
    paths = [path for path in folder.rglob("*") if path.suffix in KINDS]
    # a file system lists a folder in an order of its own, which may differ between the hosts
    for path in sorted(paths):
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


# Not torch's elastic rendezvous, which unpickles what any peer writes to a store that listens on all interfaces.
class NodesRendezvous(rendezvous.Rendezvous):
    """Rendezvous of several nodes, ordered by `node_rank`.

    Without restarts no node can be replaced, so the rendezvous is left as soon as all have joined: a network that fails
    for some minutes between the agents need not concern the ranks.
    """

    def __init__(self, options: rendezvous.NodeOptions) -> None:
        super().__init__(options)
        # a secret may serve several runs, which must not mix
        self._secret = run_secret() + options.run_id.encode()
        self._client: Client | None = None
        self._server: rendezvous_server.Server | None = None
        self._host, self._port = split_endpoint(options.rendezvous or "")
        self._address = ""

    def join(self, failures: Sequence[Failure] = (), saved: int | None = None) -> rendezvous.Membership:
        numbers = (self._options.node_rank, self._options.node_order, rendezvous_server.UNNUMBERED)
        number = next(number for number in numbers if number is not None)
        try:
            self._client = self._client or self._connected()
            is_first = self._server is not None
            own = self._address
            if is_first:
                own = listen_address(self._host)
            # sorted by the server: False, the first node, leads, since it serves the rendezvous and cannot be replaced
            order = [not is_first, number, self._address, os.getpid()]
            failed = [failure.to_json() for failure in failures[:MOST_FAILURES]]
            return self._place(listening_socket(own, 0), order=order, failures=failed, saved=saved)
        except OSError as error:
            raise rendezvous.RendezvousFailedError(f"no rendezvous at {self._options.rendezvous}: {error}") from None
        except rendezvous.RunEndedError as ended:
            if self._server is not None:
                ended.reason = self._server.reason
            raise
        except SystemExit:  # a signal
            if self._client is not None and self._client.is_spare:
                raise rendezvous.NotNeededError from None
            raise

    def _place(self, held: socket.socket, **mine: Any) -> rendezvous.Membership:
        """Return this node's place; the first keeps the socket for rank 0. As Client.place."""
        assert self._client is not None
        with contextlib.ExitStack() as unless_first:
            unless_first.enter_context(held)
            membership = self._client.place(address=self._address, port=held.getsockname()[1], **mine)
            if membership.node != 0:
                return membership
            unless_first.pop_all()
        return dataclasses.replace(membership, store_socket=held)

    def settle(self) -> None:
        if self._options.max_restarts == 0 and self._client is not None:
            self._client.stop()
            self._client = None

    def nodes_waiting(self) -> bool:
        return self._client is not None and self._client.nodes_waiting()

    def has_lost_ranks(self) -> bool:
        return self._client is not None and self._client.has_lost_ranks

    def finish(self) -> bool:
        return self._client is not None and self._client.finish()

    def close(self, status: int | None = None) -> None:
        if self._client is not None:
            self._client.close(status)
        if self._server is not None:
            self._server.stop(rendezvous_server.LINGER_S)

    def end_status(self, timeout_s: float) -> int | None:
        if self._client is None:
            return None
        return self._client.wait_for_end(timeout_s)

    def leave(self) -> None:
        if self._client is not None:
            self._client.stop()
        if self._server is not None:
            self._server.stop(0.0)

    def _connected(self) -> Client:
        """Serve the rendezvous if this is the first node, and return a client of it. Raises OSError."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                first = resolve(self._host)
                self._address = network.address_towards(first) or socket.gethostname()
                if not self._is_first(first):
                    return Client(self._connect, f"{self._host}:{self._port}")
                break
            except OSError:  # the first node may not have started yet, nor have a name
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_S)
        # behind the loop: a first node that others cannot reach fails at once
        self._serve()
        if self._server is not None:
            self._address = self._host
        return Client(self._connect, f"{self._host}:{self._port}")

    def _is_first(self, address: str) -> bool:
        """Return whether this is the first node. `address`: that of the first node."""
        if self._options.node_rank is not None:
            return self._options.node_rank == 0
        # towards 127.0.1.1, a machine's own name on Debian and Ubuntu, its own address is 127.0.0.1
        return self._address == address or is_loopback(address)

    def _connect(self) -> Connection:
        address = self._host
        if self._server is not None:
            address = listen_address(self._host)
        connected = socket.create_connection((address, self._port), timeout=CONNECT_TIMEOUT_S)
        return Connection(connected, self._secret, is_server=False)

    def _serve(self) -> None:
        """Start the server, unless another agent on this machine is the first node. Raises OSError."""
        try:
            listener = listening_socket(listen_address(self._host), self._port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        options = self._options
        self._server = rendezvous_server.Server(
            listener,
            self._secret,
            min_nodes=options.min_nodes or options.nodes,
            max_nodes=options.nodes,
            max_restarts=options.max_restarts,
            code=code_digest(),
        )
        self._server.start()


class Client(threading.Thread):
    """Connection of this node to the rendezvous. A thread receives, and sends heartbeats; the rest is for the main one.

    Where the connection breaks it connects again. It keeps its place, and its ranks run on, if the others still
    count on it.
    """

    def __init__(self, connect: Callable[[], Connection], endpoint: str) -> None:
        """Connect. Raises OSError."""
        super().__init__(name="rendezvous client", daemon=True)
        self._connect, self._endpoint = connect, endpoint
        self._connection = connect()
        self._lock = threading.Lock()
        self._request: dict[str, Any] | None = None
        """Message to send as soon as this connection can."""
        self._standing: dict[str, Any] | None = None
        """The same, again after each new connection: `join` until this node has its number, then `resume`.

        None: its ranks are done.
        """
        self._agent, self._code = secrets.token_hex(8), code_digest()
        self._membership: rendezvous.Membership | None = None
        self._waiting = 0
        self._is_done = self._goes_on = self._is_closed = self._leaves = False
        self._was_lost = False
        """The others have gone on without this node, or may have."""
        self.has_lost_ranks = False
        """The ranks of another node have ended or are lost, so those of this one cannot save."""
        self.is_spare = False
        """The run is complete without this node, which waits for a place without a limit."""
        self.end_status: int | None = None
        """Exit status by which another node, or the policy of restarts, has ended the run; None: neither has."""
        self._fault: str | None = None
        self._refused: str | None = None
        """Host whose code is another one than the first node's."""
        self._known_s: float | None = None
        self.start()

    def place(self, **mine: Any) -> rendezvous.Membership:
        """Join, and wait for this node's number.

        Raises RendezvousFailedError, DifferentCodeError, RunEndedError, and NotNeededError on a spare host.
        """
        self._membership, self._waiting = None, 0
        self._is_done = self._goes_on = self.is_spare = False
        self._standing = self._request = {
            "kind": "join",
            "agent": self._agent,
            "code": self._code,
            "host": socket.gethostname(),
            **mine,
        }
        self._send_request()
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while self._membership is None:
            if self._is_closed and self.is_spare:
                raise rendezvous.NotNeededError
            if self.end_status is not None:
                raise rendezvous.RunEndedError(self.end_status)
            if self._is_closed:
                raise rendezvous.RendezvousFailedError("the run has ended on the other nodes")
            self._check()
            if time.monotonic() > deadline_s and not self.is_spare:
                raise rendezvous.RendezvousFailedError(f"too few nodes came to the rendezvous at {self._endpoint}")
            time.sleep(POLL_S)
        if self.is_spare:
            report(f"{socket.gethostname()} takes a place in the run")
        return self._membership

    def nodes_waiting(self) -> bool:
        """Return whether the nodes change. Raises RendezvousFailedError."""
        self._check()
        return self._waiting > 0 or self.has_lost_ranks

    def finish(self) -> bool:
        """Wait a limited time until the other nodes are done, or have left. Return True if one joins again instead."""
        # nothing stands any more: after a new connection there would be no running ranks to resume
        self._standing, self._request = None, {"kind": "done"}
        self._send_request()
        deadline_s = time.monotonic() + EXIT_BARRIER_S
        while time.monotonic() <= deadline_s:
            if self._is_done or self._goes_on or self._is_closed or self._was_lost or self._fault:
                break
            time.sleep(POLL_S)
        return self._goes_on

    def wait_for_end(self, timeout_s: float) -> int | None:
        """Return the exit status by which another node ends the run within this time; None: it does not."""
        deadline_s = time.monotonic() + timeout_s
        while not (self._is_closed or self._fault) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return self.end_status

    def close(self, status: int | None = None) -> None:
        """End the rendezvous for all nodes, and leave it. `status`: of those that would restart; None: an error."""
        self._request = {"kind": "close", "status": status}
        self._send_request()
        self.stop()

    def stop(self) -> None:
        """Leave the rendezvous."""
        self._leaves = True
        with contextlib.suppress(OSError):  # what has been sent still arrives; the server then closes its end
            self._connection.socket.shutdown(socket.SHUT_WR)
        self.join(CONNECT_TIMEOUT_S)
        self._connection.close()

    def _check(self) -> None:
        if self._refused is not None:
            raise rendezvous.DifferentCodeError(
                f"megatron's code on {self._refused} differs from that on the first host; use the same on every host"
            )
        if self._fault is not None:
            raise rendezvous.RendezvousFailedError(self._fault)

    def _send_request(self) -> None:
        # both threads send, and a message must not begin within another
        with self._lock, contextlib.suppress(OSError):  # the thread notices a connection that is broken
            if self._request is not None and self._connection.can_send:
                request, self._request = self._request, None
                self._connection.send(**request)

    # The thread

    def run(self) -> None:
        since_s = time.monotonic()
        while self._fault is None:
            try:
                self._use_connection()
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                if self._leaves or self._is_closed:
                    return
                # the time to connect again counts from the last message of the server
                since_s = max(since_s, self._known_s or 0.0)
                self._reconnect(since_s + RECONNECT_S, error)

    def _use_connection(self) -> None:
        """Receive until the connection breaks. Raises OSError, EOFError and ValueError."""
        connection = self._connection
        beat_s = heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(connection.socket, selectors.EVENT_READ)
            while True:
                # not blocking for longer: requests of the main thread are sent from here once the server is known
                selector.select(POLL_S)
                now_s = time.monotonic()
                for message in connection.receive():
                    heard_s = self._known_s = now_s
                    self._take(message)
                if self._leaves:
                    continue
                self._send_request()
                if connection.is_known and now_s - heard_s > rendezvous_server.KEEP_ALIVE_S * LOST_BEATS:
                    raise OSError("the first node is silent")
                if connection.is_known and now_s - beat_s > rendezvous_server.KEEP_ALIVE_S:
                    beat_s = now_s
                    with self._lock:
                        connection.send(kind="beat")

    def _take(self, message: dict[str, Any]) -> None:
        """Note what a message of the server says; rendezvous_server.py has the table of them."""
        match message.pop("kind"):
            case "placed":
                self._waiting, self.has_lost_ranks, self._was_lost = 0, False, False
                self._standing = {"kind": "resume", "agent": self._agent, "round": message.pop("round")}
                self._membership = rendezvous.Membership(**message)  # last: `place` waits for it
            case "waiting":
                self._waiting = message["count"]
                self.has_lost_ranks = message["has_lost_ranks"] or self._was_lost
            case "refused":
                self._refused = message["host"]
            case "stale":
                self._was_lost = self.has_lost_ranks = True
            case "spare":
                if not self.is_spare:  # the server says so again after each new connection
                    report(f"{socket.gethostname()} waits as a spare host: the run is complete without it")
                self.is_spare = True
            case "done":
                self._is_done = True
            case "again":
                self._goes_on = True
            case "closed":
                self.end_status = message["status"]
                self._is_closed = True  # last: `place` reads the status once it is set

    def _reconnect(self, deadline_s: float, error: Exception) -> None:
        """Connect again, or note the fault if that takes too long."""
        self._connection.close()
        time.sleep(RETRY_S)
        while time.monotonic() < deadline_s and not self._leaves:
            try:
                connection = self._connect()
            except OSError as again:
                error = again
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._connection, self._request = connection, self._standing
            self._was_lost = self._request is None
            return
        # a server that knows another secret closes the connection; a refused one says that nothing listens there
        if self._known_s is None and not isinstance(error, ConnectionRefusedError):
            self._fault = (
                f"the program at {self._endpoint} does not know the secret of this run ({SECRET}), or was started with "
                "other options; give all nodes the same"
            )
        else:
            self._fault = f"lost the rendezvous at {self._endpoint}: {error or type(error).__name__}"
