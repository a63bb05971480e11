"""Agent of a node: starts its ranks, passes signals to them, restarts them when one fails, and leaves none behind.

    python -m megatron.launch.agent --ranks-per-node M [--nodes N --rendezvous HOST:PORT] [--max-restarts R] -- FLAGS

Every run goes through it: tools/launch.py becomes the agent of this machine, or has DeepSpeed's launcher start one on
each host; InstructLab's run_training starts one. It does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

from megatron.control.agent_link import RankLink, send_endings
from megatron.control.run_secret import MissingSecretError, find_secret
from megatron.descriptors import raise_limit
from megatron.exit_codes import ABORTED, DONE, FAILED, HUNG, REFUSED, shell_status
from megatron.launch import rank
from megatron.launch.agent_messages import announce
from megatron.launch.child_processes import (
    InterruptedBySignal,
    blocked_signals,
    interruptible,
    noted_signals,
    python_path,
)
from megatron.launch.cores import CoresError, own_sockets, ranges, rank_cores
from megatron.launch.modules import ModulesError, require_modules
from megatron.launch.ownership import adopted_orphans, end_processes, owned, processes_below
from megatron.launch.rendezvous import (
    DifferentCodeError,
    Membership,
    NodeOptions,
    NotNeededError,
    Rendezvous,
    RendezvousFailedError,
    RunEndedError,
)
from megatron.launch.restart_policy import Failure, ending
from megatron.mpi_variables import leave_mpi
from megatron.resilience import job
from megatron.resilience.shutdown import REPEAT_S, SIGNALS

WATCH_S = 0.05
"""Interval at which the agent looks for signals. A rank that ends is noticed at once."""
# After one rank has failed the others wait in a collective for ever, and hold their devices: all end within 5 s.
FAILED_GRACE_S = 3.0
"""Time for the other ranks to report what they noticed; on gloo they do within a second or two."""
HUNG_GRACE_S = 1.5
"""The same after a watchdog has ended a rank: the others end by themselves, unless they are stopped or stuck."""
KILL_S = 1.0
"""Time for the ranks to end after a second signal."""
STOP_S = 2.0
"""Time to hear from another node why it has ended the run."""
JOIN_SAVE_S = 120
"""Time for healthy ranks to save before they restart because a node joins."""


@dataclass(frozen=True)
class AgentOptions(NodeOptions):
    """Ranks of a node, and the nodes of their run. Each field is an option of the agent's command line."""

    ranks_per_node: int = 1
    main: str = "megatron.train"
    """Module that each rank runs: its `process` ends the process."""
    is_chat: bool = False
    """Ctrl-C stops an answer: it goes to the ranks, which do not end."""
    ends_with_connection: bool = False
    """Started by ssh: the run ends here when the connection is closed, which the reader of stdout shows."""
    by_mpirun: bool = False
    """Started by mpirun, whose variables give its order among the nodes, and which sends no rank a signal."""
    cores_per_rank: int = 0
    """Cores that each rank is bound to. 0: ranks are not bound."""
    ranks_per_socket: int = 0
    secret_file: str | None = None
    """File in the home folder from which the secret of the run is read, once, if no variable has it."""

    def arguments(self) -> list[str]:
        """Return the command line that `parse` reads."""
        given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        known = [(name, value) for name, value in given if value != getattr(AgentOptions, name)]
        words = [(f"--{name.replace('_', '-')}", "1" if value is True else str(value)) for name, value in known]
        return [word for pair in words for word in pair]


def parse(arguments: Sequence[str]) -> tuple[AgentOptions, list[str]]:
    """Return the agent's own options, and the flags of megatron.train behind `--`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m megatron.launch.agent",
        description="Start the ranks of this node. tools/launch.py calls it; megatron/launch/rendezvous.py describes "
        "the options.",
        epilog="After --, the flags of megatron.train.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(AgentOptions):
        kind = int if "int" in str(field.type) or "bool" in str(field.type) else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = AgentOptions(**vars(parser.parse_args(arguments[:place])))
    if options.nodes > 1 and options.rendezvous is None:
        parser.error(f"--nodes {options.nodes} needs --rendezvous HOST:PORT, the address of the first node")
    return options, list(arguments[place + 1 :])


class NodesChangedError(Exception):
    """Nodes wait to join; the ranks restart with them."""


class Agent:
    """Ranks of this node, from their start to the end of the run."""

    def __init__(
        self, options: AgentOptions, start_method: str, train_flags: Sequence[str], received: deque[int]
    ) -> None:
        self._options = options
        self._context: Any = multiprocessing.get_context(start_method)
        self._train_flags = tuple(train_flags)
        self._received = received
        self._rendezvous = rendezvous_of(options)
        self._membership: Membership | None = None
        self._processes: list[BaseProcess] = []
        self._links: dict[int, RankLink] = {}
        """Those to the processes, by local rank."""
        self._cores = bound_cores(options)
        """Those of each local rank; none: the ranks are not bound."""
        self._spared = processes_below(os.getpid())  # such as the fork server
        self._began_s = time.monotonic()
        self._failures: list[Failure] = []
        """Those that ended the last attempt."""
        self._saved: int | None = None
        """Iteration of the newest complete checkpoint that the ranks know."""
        self._stop_requested_s: float | None = None
        self._kill_s: float | None = None

    def run(self) -> int:
        """Run the ranks to the end; return 0, or the exit status of the rank that failed first in the last attempt.

        A crash loop ends with ABORTED. Raises RendezvousFailedError, NotNeededError, and SystemExit for a signal before
        the ranks first run.
        """
        try:
            while True:
                try:
                    self._start_ranks()
                except InterruptedBySignal as interrupted:
                    if self._membership is None:
                        raise
                    return self._stop_between(interrupted.number)
                except RunEndedError as ended:
                    return ended.status
                self._failures = []
                try:
                    failure = self._watch()
                    goes_on = failure is None and self._rendezvous.finish()  # true: another agent ended them
                except NodesChangedError:
                    self._let_ranks_save()
                    failure, goes_on = None, True
                if failure is None:
                    if goes_on and self._stop_requested_s is None:
                        self._end_ranks()
                        continue
                    self._rendezvous.close(DONE if goes_on else None)
                    return DONE
                if not self._may_restart(failure):
                    return self._end_after(failure)
                # after a kill the others only wait for the dead rank
                self._wait_for_ranks(0.0 if failure.returncode < 0 else FAILED_GRACE_S)
                self._note_failures(failure)
                self._end_ranks()
        finally:
            self._end_ranks()
            self._rendezvous.leave()

    def _stop_between(self, number: int) -> int:
        """End the run on all nodes at a signal that came between two attempts; return the exit status."""
        failure = f"{self._failures[0]}; " if self._failures else ""
        name = signal.Signals(number).name
        report(f"{failure}{name}: the run stops here, with the checkpoints that it has saved")
        self._end_ranks()
        self._rendezvous.close(DONE)
        return DONE

    def _note_failures(self, first: Failure) -> None:
        """Keep how the ranks failed, the first first, and the newest checkpoint that they know."""
        codes = {place: process.exitcode for place, process in enumerate(self._processes)}
        others = [self._failure(place, code) for place, code in codes.items() if code]
        self._failures = [first, *(other for other in others if other.rank != first.rank)]
        if self._options.nodes > 1 and first.is_own:
            report(str(first))  # the first node reports what follows

    def _start_ranks(self) -> None:
        """Start the processes, agree with the other nodes, then give each process its environment.

        Raises InterruptedBySignal, except before the first attempt of a single node, whose ranks handle a signal.
        """
        previous = self._membership
        if self._options.nodes == 1:  # no rank waits for its end while a restart is delayed
            self._join()
        environments: list[Connection] = []
        self._processes = []
        with blocked_signals(SIGNALS), without_main_module():
            for local_rank in range(self._options.ranks_per_node):
                receiver, sender = self._context.Pipe()
                cores, is_late = self._cores[local_rank] if self._cores else (), self._options.nodes > 1
                arguments = (self._options.main, local_rank, receiver, is_late, self._train_flags, cores)
                process = self._context.Process(target=rank.run_rank, args=arguments, name=f"rank {local_rank}")
                process.start()
                receiver.close()
                self._processes.append(process)
                environments.append(sender)
        if self._options.nodes > 1:  # meanwhile the ranks import
            self._join()
        assert self._membership is not None
        self._report_size(previous, self._membership)
        for local_rank, sender in enumerate(environments):
            with contextlib.suppress(OSError):  # it has ended, which _watch reports
                sender.send(self._environment(self._membership, local_rank))
                if local_rank == 0 and self._membership.store_socket is not None:
                    send_handle(sender, self._membership.store_socket.fileno(), None)
                self._links[local_rank] = RankLink(socket.socket(fileno=os.dup(sender.fileno())))
            sender.close()
        if self._membership.store_socket is not None:
            self._membership.store_socket.close()

    def _join(self) -> None:
        is_interruptible = self._options.nodes > 1 or self._membership is not None
        with interruptible(SIGNALS, self._received) if is_interruptible else contextlib.nullcontext():
            self._membership = self._rendezvous.join(self._failures, self._saved)

    def _environment(self, membership: Membership, local_rank: int) -> dict[str, str]:
        per_node = self._options.ranks_per_node
        values = {
            "RANK": membership.node * per_node + local_rank,
            "WORLD_SIZE": membership.num_nodes * per_node,
            "LOCAL_WORLD_SIZE": per_node,
            "MASTER_ADDR": membership.master_addr,
            "MASTER_PORT": membership.master_port,
            job.RESTARTS: membership.restarts,
            job.BEGAN: self._began_s,
            job.COMMAND: json.dumps(sys.orig_argv),
        }
        return {name: str(value) for name, value in values.items()}

    def _report_size(self, previous: Membership | None, membership: Membership) -> None:
        if previous is None or previous.num_nodes == membership.num_nodes or membership.node != 0:
            return
        per_node, count = self._options.ranks_per_node, membership.num_nodes
        nodes = "1 node" if count == 1 else f"{count} nodes"
        report(f"{count * per_node} ranks on {nodes} from now on, instead of {previous.num_nodes * per_node}")

    def _watch(self) -> Failure | None:
        """Wait until a rank fails, or all are done. Raises NodesChangedError and RendezvousFailedError."""
        assert self._membership is not None
        first_rank = self._membership.node * self._options.ranks_per_node
        while True:
            links = {link.fileno(): link for link in self._links.values() if link.is_open}
            if running := self._running():
                ready = wait([*(process.sentinel for process in running), *links], timeout=WATCH_S)
                for number in set(links) & set(ready):
                    links[number].receive()
            self._pass_on_signals()
            codes = [process.exitcode for process in self._processes]
            if any(codes):
                self._send_endings({first_rank + place: ending(code) for place, code in enumerate(codes) if code})
            # where several failed since the last look, one killed from outside is the likelier cause
            if failed := min(((code, place) for place, code in enumerate(codes) if code), default=None):
                return self._failure(failed[1], failed[0])
            if all(code == 0 for code in codes):
                return None
            if self._rendezvous.nodes_waiting():
                raise NodesChangedError

    def _failure(self, local_rank: int, returncode: int) -> Failure:
        """Return the failure of a rank that has ended, with what it reported last."""
        assert self._membership is not None
        number = self._membership.node * self._options.ranks_per_node + local_rank
        if (link := self._links.get(local_rank)) is None:
            return Failure(number, socket.gethostname(), returncode)
        if link.is_open:
            link.receive()
        return Failure.of(number, socket.gethostname(), returncode, link.step, link.report)

    def _send_endings(self, endings: dict[int, str]) -> None:
        """Inform the watchdogs of the other ranks, which only lose these."""
        if watchdogs := next((link.watchdogs for link in self._links.values() if link.watchdogs), None):
            send_endings(watchdogs, endings)

    def _may_restart(self, failure: Failure) -> bool:
        """Return whether the policy of restarts is to decide."""
        is_final = failure.returncode in (REFUSED, ABORTED) or self._stop_requested_s is not None
        return not is_final and self._options.max_restarts > 0

    def _end_after(self, failure: Failure) -> int:
        """End the ranks after a failure that is final, and return the exit status.

        The failure is reported unless the failed rank has done so itself.
        """
        status = shell_status(failure.returncode)
        if self._stop_requested_s is not None:
            if not failure.is_own and self._rendezvous.end_status(STOP_S) == DONE:
                return DONE  # another node stopped between two attempts
            report(f"{failure} after a stop was requested")
        elif failure.returncode < 0:
            report(str(failure))
        if not self._wait_for_ranks(HUNG_GRACE_S if failure.returncode == HUNG else FAILED_GRACE_S):
            report(f"{failure}; ending the ranks that still run")
        self._end_ranks()
        self._rendezvous.close(status)
        return status

    def _let_ranks_save(self) -> None:
        """Have the ranks end, because the nodes have changed: healthy ones save before."""
        if self._rendezvous.has_lost_ranks():
            report("another node has failed or is lost; the ranks restart")
            self._wait_for_ranks(FAILED_GRACE_S, or_failure=True)
            self._end_ranks()
            return
        report("the nodes have changed; the ranks save and restart")
        for process in self._running():
            send(process, signal.SIGTERM)
        self._wait_for_ranks(JOIN_SAVE_S, or_failure=True)
        self._end_ranks()

    def _wait_for_ranks(self, timeout_s: float, *, or_failure: bool = False) -> bool:
        """Return whether all ranks have ended within this time. `or_failure`: do not wait once one has failed."""
        deadline_s = time.monotonic() + timeout_s
        while (running := self._running()) and (left_s := deadline_s - time.monotonic()) > 0:
            if or_failure and any(process.exitcode for process in self._processes):
                break
            wait([process.sentinel for process in running], timeout=left_s)
        return not running

    def _end_ranks(self) -> None:
        """Kill what is left of the ranks and of all that they started."""
        for pid in end_processes(os.getpid(), self._spared):
            report(f"process {pid} survives SIGKILL; it hangs in the kernel")
        for process in self._processes:
            process.join(KILL_S)  # its threads may still end
        for link in self._links.values():
            if link.is_open:
                link.receive()
            if link.saved is not None:
                self._saved = max(link.saved, self._saved or 0)
            link.close()
        self._processes, self._links = [], {}

    def _pass_on_signals(self) -> None:
        """Send the ranks what was received. They handle it in their own time; after a second signal they have little.

        The kernel repeats SIGXCPU each second, so it does not count as a second signal.
        """
        now_s = time.monotonic()
        while self._received:
            number = self._received.popleft()
            for process in self._running():
                send(process, number)
            if self._options.is_chat and number == signal.SIGINT:
                continue
            if self._stop_requested_s is None:
                self._stop_requested_s = now_s
                if self._membership is not None and self._membership.node == 0:
                    name = signal.Signals(number).name
                    stop = "stop after this step and save" if self._options.main == "megatron.train" else "stop"
                    report(f"{name}: the ranks {stop}; a second signal ends them at once")
            elif now_s - self._stop_requested_s >= REPEAT_S and self._kill_s is None and number != signal.SIGXCPU:
                self._kill_s = now_s + KILL_S
        if self._kill_s is not None and now_s > self._kill_s:
            for process in self._running():
                send(process, signal.SIGKILL)

    def _running(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]


def bound_cores(options: AgentOptions) -> list[frozenset[int]]:
    """Return the cores of each local rank, and report them; none if ranks are not bound. Raises CoresError."""
    if not options.cores_per_rank:
        return []
    cores = rank_cores(options.ranks_per_node, options.cores_per_rank, options.ranks_per_socket, own_sockets())
    report(f"{socket.gethostname()}: ranks are bound to the cores {' | '.join(map(ranges, cores))}")
    return cores


def rendezvous_of(options: AgentOptions) -> Rendezvous:
    """Return the rendezvous of one node, or that of several. Raises MissingSecretError."""
    if options.nodes == 1:
        return Rendezvous(options)
    from megatron.launch.nodes_rendezvous import NodesRendezvous  # late: one node needs none of it

    return NodesRendezvous(options)


def run_agent(options: AgentOptions, train_flags: Sequence[str], start_method: str | None = None) -> int:
    """Run this node's part of a run to its end, and return the exit status.

    On the CPU several ranks, and those of several attempts, are forks of a server that has done their imports. On
    accelerators each is a new process, since their libraries do not survive a fork once they have looked for devices,
    which importing deepspeed does.
    """
    os.environ["MEGATRON_MAIN"] = options.main  # for launch/preload.py
    os.environ["PYTHONUNBUFFERED"] = "1"  # what a killed rank printed is not lost
    raise_limit()
    with noted_signals(SIGNALS) as received:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if start_method is None:
            shares_imports = options.ranks_per_node > 1 or options.max_restarts > 0
            start_method = "forkserver" if shares_imports and os.environ.get("DS_ACCELERATOR") == "cpu" else "spawn"
            if start_method == "forkserver":
                start_fork_server()
            elif start_method == "spawn":
                resource_tracker.ensure_running()
        try:
            if options.ends_with_connection:  # the launcher has not checked this machine
                require_modules(options.ranks_per_node)
            if options.nodes > 1:
                with interruptible(SIGNALS, received):
                    find_secret(options.secret_file)
            with adopted_orphans():
                return Agent(options, start_method, train_flags, received).run()
        except SystemExit as interrupted:
            return int(interrupted.code or DONE)
        except NotNeededError:
            return DONE
        except (CoresError, ModulesError) as error:
            report(f"{socket.gethostname()}: {error}")
            return REFUSED
        except (MissingSecretError, DifferentCodeError) as error:
            report(str(error))
            return REFUSED
        except RendezvousFailedError as error:
            report(str(error))
            return FAILED


def start_fork_server() -> None:
    """Start the process that ranks are forked from. It imports while the agent goes on, and ignores signals."""
    os.environ["PYTHONPATH"] = python_path()  # by which alone it finds modules
    forkserver.set_forkserver_preload(["megatron.launch.preload"])
    with blocked_signals(SIGNALS), without_main_module():
        forkserver.ensure_running()


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the program that started the agent from multiprocessing, which would import it again in each rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def send(process: BaseProcess, number: int) -> None:
    """Send a signal to a process, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    options, train_flags = parse(arguments)
    outputs = (sys.stdout.fileno(), sys.stderr.fileno()) if options.ends_with_connection else ()
    if not options.by_mpirun:
        return owned(lambda: run_agent(options, train_flags), outputs)
    options = dataclasses.replace(options, node_order=leave_mpi())

    def run_announced() -> int:
        announce("ready")  # the owner handles signals
        status = run_agent(options, train_flags)
        announce(f"ended {status}")
        return status

    return owned(run_announced, outputs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
