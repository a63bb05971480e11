"""Processes of a node's ranks: their start, the connections to them, how they ended, and their end.

The agent (agent.py) decides when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.agents.helper_processes import OF_LOST_SERVER, SERVER, HelperProcesses, quiet_main
from megatron.launch.agents.ownership import end_processes, processes_below
from megatron.launch.agents.rendezvous import Membership
from megatron.launch.agents.restart_policy import Failure
from megatron.launch.agents.run_alerts import RunAlerts
from megatron.launch.child_processes import blocked_signals, end_with_parent, report
from megatron.launch.host_environment import own_sockets, ranges, rank_cores
from megatron.resilience import job
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.agent_link import AGENT_SOCKET, RankLink, send_endings
from megatron.runtime.commands import FAILED
from megatron.runtime.network import STORE_SOCKET

WATCH_S = 0.05
"""Interval at which the agent looks for signals. A rank that ends is noticed at once."""
KILL_S = 1.0
"""Time for the ranks to end after a second signal."""


def run_rank(
    main: str,
    local_rank: int,
    environment: Connection,
    is_late: bool,
    flags: Sequence[str],
    cores: Collection[int] = (),
) -> None:
    """Receive the environment of this rank, then run the module `main` with these flags. Does not return.

    `is_late`: the environment comes after the rendezvous of several nodes, which leaves time for imports. `cores`:
    those that it is bound to; none: it is not. Signals are blocked on entry and stay pending until the module handles
    them.
    """
    if cores:  # before any thread starts, which would keep the cores of the agent
        os.sched_setaffinity(0, cores)
    end_with_parent()()
    agent = parent_process()
    if agent is not None and not agent.is_alive():
        os._exit(FAILED)  # it ended before the death signal was set
    os.setsid()  # a Ctrl-C reaches this process once, through the agent
    os.environ["LOCAL_RANK"] = str(local_rank)
    if is_late:
        import megatron.launch.preload  # noqa: F401
    try:
        os.environ.update(environment.recv())
        if os.environ["RANK"] == "0":
            os.environ[STORE_SOCKET] = str(recv_handle(environment))
        os.environ[AGENT_SOCKET] = str(environment.fileno())
    except EOFError:
        os._exit(FAILED)  # the agent ended
    run_main(main, flags)


def run_main(main: str, flags: Sequence[str]) -> None:
    """Run the module `main` with these flags, and exit with its status."""
    module = importlib.import_module(main)
    sys.argv = [main, *flags]
    if main != "megatron.train":  # which unblocks them once it handles them: one that waits must not end it before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    module.process()


class NotStartedError(Exception):
    """The ranks could not all be started. `failure`: why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class NodeRanks:
    """The ranks of this node, in one attempt after another."""

    def __init__(
        self,
        options: AgentOptions,
        helpers: HelperProcesses,
        train_flags: Sequence[str],
        alerts: RunAlerts,
        memory: Path | None = None,
    ) -> None:
        """`memory`: as of the agent. Raises CoresError."""
        self._options, self._memory = options, memory
        self._helpers = helpers
        self._context: Any = multiprocessing.get_context(helpers.start_method)
        self._train_flags = tuple(train_flags)
        self._cores = bound_cores(options)
        """Those of each local rank; none: the ranks are not bound."""
        self._processes: list[BaseProcess] = []
        self._environments: list[Connection] = []
        """Those of the processes that wait for their place."""
        self._links: dict[int, RankLink] = {}
        """Those to the processes, by local rank."""
        self._spared = processes_below(os.getpid())
        self._began_s = time.monotonic()
        self._first_rank = 0
        self.saved: int | None = None
        """Iteration of the newest complete checkpoint that the ranks knew when they ended."""
        self._alerts = alerts

    def start(self) -> None:
        """Start the processes, which wait for their place. Raises NotStartedError."""
        # ranks of a fork server that has ended would raise EOFError here, or end by status 255
        self._helpers.renew()
        self._start_processes()
        if self._helpers.note():  # those of the fork server before it are lost, and cannot say how they end
            self.end()
            self._start_processes()
            if self._helpers.note():
                why = "it ends whenever ranks are started"
                raise NotStartedError(Failure.of_member(SERVER, socket.gethostname(), FAILED, fault=why))

    def _start_processes(self) -> None:
        self._processes, self._environments = [], []
        with blocked_signals(SIGNALS), quiet_main():
            for local_rank in range(self._options.ranks_per_node):
                # the environment comes later, by this pipe: a process that already imports learns its place from it
                receiver, sender = self._context.Pipe()
                self._environments.append(sender)
                cores, is_late = self._cores[local_rank] if self._cores else (), self._options.nodes > 1
                arguments = (self._options.main, local_rank, receiver, is_late, self._train_flags, cores)
                process = self._context.Process(target=run_rank, args=arguments, name=f"rank {local_rank}")
                try:
                    process.start()
                except (OSError, EOFError) as error:
                    raise NotStartedError(self._start_failure(local_rank, error)) from None
                finally:
                    # the child's end: with a copy of it open here the link would not end with the rank
                    receiver.close()
                self._processes.append(process)

    def give_places(self, membership: Membership) -> None:
        """Give each process its environment, with which it runs."""
        self._first_rank = membership.node * self._options.ranks_per_node
        for local_rank, sender in enumerate(self._environments):
            with contextlib.suppress(OSError):  # it has ended, which its exit code shows
                sender.send(self._environment(membership, local_rank))
                if local_rank == 0 and membership.store_socket is not None:
                    # rank 0 inherits the socket, so that no other program gets the port before it listens
                    send_handle(sender, membership.store_socket.fileno(), None)
                # the pipe stays open for the reports of the rank, so that no port is needed for them
                # by a copy of the descriptor, since `sender` closes its own
                self._links[local_rank] = RankLink(socket.socket(fileno=os.dup(sender.fileno())))
            sender.close()
        if membership.store_socket is not None:
            membership.store_socket.close()

    def _environment(self, membership: Membership, local_rank: int) -> dict[str, str]:
        per_node = self._options.ranks_per_node
        values: dict[str, object] = {
            "RANK": membership.node * per_node + local_rank,
            "WORLD_SIZE": membership.num_nodes * per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "MASTER_ADDR": membership.master_addr,
            "MASTER_PORT": membership.master_port,
            job.RESTARTS: membership.restarts,
            job.BEGAN: self._began_s,
            # a forked rank would report the command of its fork server
            job.COMMAND: json.dumps(sys.orig_argv),
        }
        if self._memory is not None:
            values[job.COPIES] = self._memory
        elif self._options.max_restarts:
            values[job.COPIES] = job.NO_MEMORY
        return {name: str(value) for name, value in values.items()}

    @property
    def codes(self) -> list[int | None]:
        """Exit code of each local rank; None: it runs."""
        return [process.exitcode for process in self._processes]

    def look(self) -> None:
        """Wait until a rank ends or reports, at most WATCH_S, and take the reports."""
        running = self._running()
        if not running:
            return
        links = {link.fileno(): link for link in self._links.values() if link.is_open}
        # an end wakes this at once; a signal to the agent is noted by a handler and waits for the timeout
        ready = wait([*(process.sentinel for process in running), *links], timeout=WATCH_S)
        for number in links.keys() & set(ready):
            links[number].receive()
            self._alerts.take(links[number])

    def failure(self, local_rank: int, returncode: int) -> Failure:
        """Return the failure of a rank that has ended, with what it reported last."""
        number = self._first_rank + local_rank
        link = self._links.get(local_rank)
        if link is None:  # it ended before it had its place
            return Failure(number, socket.gethostname(), returncode)
        if link.is_open:
            link.receive()
        return Failure.of(number, socket.gethostname(), returncode, link.step, link.report)

    def server_failure(self) -> Failure | None:
        """Return the failure of the fork server, with which all ranks have ended; None: it runs, or there is none."""
        failure = self._helpers.server_failure(is_likely=OF_LOST_SERVER in self.codes)
        if failure is None:
            return None
        return dataclasses.replace(failure, step=max((link.step for link in self._links.values()), default=0))

    def _start_failure(self, local_rank: int, error: Exception) -> Failure:
        """Return why a process could not be started: the fork server has ended, or the system refuses."""
        why = f"{type(error).__name__}: {error}"
        return self._helpers.server_failure(is_likely=True) or Failure.of_member(
            f"the start of local rank {local_rank}", socket.gethostname(), FAILED, fault=why
        )

    def inform(self, endings: Mapping[int, str]) -> None:
        """Inform the watchdogs of the other ranks how local ranks have ended, which they only lose."""
        of_run = {self._first_rank + local_rank: ending for local_rank, ending in endings.items()}
        for link in self._links.values():
            if link.watchdogs:  # each rank knows where those of all are
                send_endings(link.watchdogs, of_run)
                return

    def send_signal(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for process in self._running():
            # a fork server waits for its children itself, after which the id of one is free
            with contextlib.suppress(ProcessLookupError):
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, number)

    def wait_for_end(self, timeout_s: float, *, or_failure: bool = False) -> bool:
        """Return whether all ranks have ended within this time. `or_failure`: do not wait once one has failed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            running, left_s = self._running(), deadline_s - time.monotonic()
            if not running or left_s <= 0 or (or_failure and any(self.codes)):
                return not running
            wait([process.sentinel for process in running], timeout=left_s)

    def end(self) -> None:
        """Kill what is left of the ranks and of all that they started."""
        # also what ranks have started in sessions of their own, such as the workers of a loader
        with self._alerts.held() as sessions:
            left = end_processes(os.getpid(), self._spared | self._helpers.pids, sessions)
        for pid in left:
            report(f"process {pid} survives SIGKILL; it hangs in the kernel")
        for process in self._processes:
            process.join(KILL_S)  # its threads may still end
        for link in self._links.values():
            if link.is_open:
                link.receive()
            self._alerts.take(link)
            if link.saved is not None:
                self.saved = max(link.saved, self.saved or 0)
            link.close()
        self._processes, self._environments, self._links = [], [], {}

    def _running(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]


def bound_cores(options: AgentOptions) -> list[frozenset[int]]:
    """Return the cores of each local rank, and report them; none if ranks are not bound. Raises CoresError."""
    if not options.cores_per_rank:
        return []
    cores = rank_cores(options.ranks_per_node, options.cores_per_rank, options.ranks_per_socket, own_sockets())
    report(f"{socket.gethostname()}: ranks are bound to the cores {' | '.join(map(ranges, cores))}")
    return cores
