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
from megatron.runtime.agent_link import RankLink, send_endings
from megatron.runtime.commands import FAILED, first_of
from megatron.runtime.places import END, WAIT, give_place, take_place

WATCH_S = 0.05
"""Interval at which the agent looks for signals. A rank that ends is noticed at once."""
KILL_S = 1.0
"""Time for the ranks to end after a second signal."""
LEAVE_S = 10.0
"""Time for healthy ranks to leave their round after another has ended. A rank notices it at its next collective."""


def run_rank(
    main: str,
    local_rank: int,
    environment: Connection,
    is_late: bool,
    flags: Sequence[str],
    cores: Collection[int] = (),
    is_kept: bool = False,
) -> None:
    """Receive the environment of this rank, then run the module `main` with these flags. Does not return.

    `is_late`: the environment comes after the rendezvous of several nodes, which leaves time for imports. `cores`:
    those that it is bound to; none: it is not. `is_kept`: it may have another place after the end of another rank.
    Signals are blocked on entry and stay pending until the module handles them.
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
        take_place(environment, is_kept=is_kept)
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
        self._processes: dict[int, BaseProcess] = {}
        """By local rank, as all that follow."""
        self._places: dict[int, Connection] = {}
        """Pipes to the processes that wait for their place; where ranks may be kept, to all."""
        self._links: dict[int, RankLink] = {}
        """Those to the processes."""
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
        with blocked_signals(SIGNALS), quiet_main():
            for local_rank in range(self._options.ranks_per_node):
                if local_rank in self._processes:  # it stays
                    continue
                # the environment comes later, by this pipe: a process that already imports learns its place from it
                receiver, self._places[local_rank] = self._context.Pipe()
                cores, is_late = self._cores[local_rank] if self._cores else (), self._options.nodes > 1
                how = (self._train_flags, cores, self._options.keep_healthy_ranks)
                arguments = (self._options.main, local_rank, receiver, is_late, *how)
                process = self._context.Process(target=run_rank, args=arguments, name=f"rank {local_rank}")
                try:
                    process.start()
                except (OSError, EOFError) as error:
                    raise NotStartedError(self._start_failure(local_rank, error)) from None
                finally:
                    # the child's end: with a copy of it open here the link would not end with the rank
                    receiver.close()
                self._processes[local_rank] = process

    def give_places(self, membership: Membership) -> None:
        """Give each process its environment, with which it runs."""
        self._first_rank = membership.node * self._options.ranks_per_node
        keeps = self._options.keep_healthy_ranks
        for local_rank, pipe in self._places.items():
            # rank 0 inherits the socket, so that no other program gets the port before it listens
            store = None
            if local_rank == 0:
                store = membership.store_socket
            with contextlib.suppress(OSError):  # it has ended, which its exit code shows
                # the link stays open for the reports of the rank, so that no port is needed for them
                link = give_place(pipe, self._environment(membership, local_rank), store, keeps=keeps)
                self._links[local_rank] = RankLink(socket.socket(fileno=link))
        if not keeps:
            self.let_go()
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
        return [process.exitcode for _, process in sorted(self._processes.items())]

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

    def await_healthy(self, received: Collection[int]) -> str | None:
        """Wait until the ranks that run have left their round; return why they cannot stay. None: they wait.

        A signal among those `received` ends the wait.
        """
        for link in self._links.values():
            if link.is_open:
                link.receive()
        # one that joins others may wait for them in a way that no end of a rank breaks
        if len(self._links) < self._options.ranks_per_node or not all(link.step for link in self._links.values()):
            return "a rank had not begun a step"
        deadline_s, informed = time.monotonic() + LEAVE_S, set[int]()
        while not received:
            running = {local_rank for local_rank, process in self._processes.items() if process.exitcode is None}
            if not running:
                return "no rank is left"
            # one that has given up ends, however soon
            waiting = {local_rank for local_rank, link in self._links.items() if link.has_left}
            self._inform_waiting(waiting - informed)
            informed |= waiting
            if running <= waiting:
                return None
            if time.monotonic() > deadline_s:
                late = [str(self._first_rank + local_rank) for local_rank in sorted(running - waiting)]
                return f"rank {first_of(late, 8)} has not left its step within {LEAVE_S:g} s"
            self.look()
        return "a stop was requested"

    def _inform_waiting(self, waiting: Collection[int]) -> None:
        """Inform ranks that have left their round that a place comes."""
        for local_rank in waiting:
            with contextlib.suppress(OSError):  # it has ended
                self._places[local_rank].send(WAIT)

    def let_go(self) -> None:
        """Close the pipes to the ranks, none of which has another place: those that wait end as lost ranks do."""
        for pipe in self._places.values():
            if self._options.keep_healthy_ranks:
                with contextlib.suppress(OSError):
                    pipe.send(END)
            pipe.close()
        self._places = {}

    def end(self, *, spares_waiting: bool = False) -> None:
        """Kill what is left of the ranks and of all that they started. `spares_waiting`: but for those that wait."""
        kept: dict[int, BaseProcess] = {}
        if spares_waiting:
            kept = {number: process for number, process in self._processes.items() if process.exitcode is None}
        spared = self._spared | self._helpers.pids
        for process in kept.values():
            assert process.pid is not None
            spared |= {process.pid} | processes_below(process.pid)
        # also what ranks have started in sessions of their own, such as the workers of a loader
        with self._alerts.held() as sessions:
            left = end_processes(os.getpid(), spared, sessions)
        for pid in left:
            report(f"process {pid} survives SIGKILL; it hangs in the kernel")
        for local_rank in self._processes.keys() - kept.keys():
            self._processes.pop(local_rank).join(KILL_S)  # its threads may still end
            if local_rank in self._places:
                self._places.pop(local_rank).close()
        for link in self._links.values():
            if link.is_open:
                link.receive()
            self._alerts.take(link)
            if link.saved is not None:
                self.saved = max(link.saved, self.saved or 0)
            link.close()
        self._links = {}

    @property
    def kept(self) -> list[int]:
        """The ranks that wait for another place, by their numbers in the last round."""
        return [self._first_rank + local_rank for local_rank in sorted(self._processes)]

    def _running(self) -> list[BaseProcess]:
        return [process for process in self._processes.values() if process.exitcode is None]


def bound_cores(options: AgentOptions) -> list[frozenset[int]]:
    """Return the cores of each local rank, and report them; none if ranks are not bound. Raises CoresError."""
    if not options.cores_per_rank:
        return []
    cores = rank_cores(options.ranks_per_node, options.cores_per_rank, options.ranks_per_socket, own_sockets())
    report(f"{socket.gethostname()}: ranks are bound to the cores {' | '.join(map(ranges, cores))}")
    return cores
