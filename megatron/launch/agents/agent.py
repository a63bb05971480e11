"""Agent of a node: starts its ranks, passes signals to them, restarts them when one fails, and leaves none behind.

    python -m megatron.launch.agents.agent --ranks-per-node M [--nodes N --rendezvous HOST:PORT] -- FLAGS

Every run goes through it: tools/launch.py becomes the agent of this machine, or has DeepSpeed's launcher start one on
each host; InstructLab's run_training starts one. It does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from megatron.hub.download import whole_folder
from megatron.hub.names import HubError
from megatron.launch.agents import rendezvous
from megatron.launch.agents.agent_command import AgentOptions, announce, parse
from megatron.launch.agents.helper_processes import HelperProcesses
from megatron.launch.agents.node_ranks import KILL_S, NodeRanks, NotStartedError
from megatron.launch.agents.ownership import adopted_orphans, open_memory, owned
from megatron.launch.agents.restart_policy import Failure, ending
from megatron.launch.agents.run_alerts import RunAlerts
from megatron.launch.child_processes import InterruptedBySignal, interruptible, noted_signals, report
from megatron.launch.host_environment import CoresError, ModulesError, require_devices
from megatron.resilience.shutdown import REPEAT_S, SIGNALS
from megatron.runtime.commands import ABORTED, DONE, FAILED, HUNG, REFUSED, counted, first_of, shell_status
from megatron.runtime.descriptors import raise_limit
from megatron.runtime.devices import launched_device
from megatron.runtime.messages import MissingSecretError, find_secret
from megatron.runtime.network import leave_mpi

# After one rank has failed the others wait in a collective for ever, and hold their devices: all end within 5 s.
FAILED_GRACE_S = 3.0
"""Time for the other ranks to report what they noticed; on gloo they do within a second or two."""
HUNG_GRACE_S = 1.5
"""The same after a watchdog has ended a rank: the others end by themselves, unless they are stopped or stuck."""
STOP_S = 2.0
"""Time to hear from another node why it has ended the run."""
JOIN_SAVE_S = 120
"""Time for healthy ranks to save before they restart because a node joins."""


class Event(enum.Enum):
    """End of an attempt that has started, other than a failure."""

    DONE = enum.auto()
    """All ranks of this node have ended well."""
    NODES_CHANGED = enum.auto()
    """Nodes wait to join, or ranks of another node are lost."""


# Not torch's agents: these restart a run that was refused, kill ranks 30 s after a SIGTERM, in which no large
# checkpoint is saved, and need torch and a store for a single node.
class Agent:
    """Ranks of this node, from their start to the end of the run."""

    def __init__(
        self,
        options: AgentOptions,
        helpers: HelperProcesses,
        train_flags: Sequence[str],
        received: deque[int],
        alerts: RunAlerts,
        memory: Path | None = None,
    ) -> None:
        """`memory`: folder in which the ranks may keep copies of their state."""
        self._options = options
        self._received, self._alerts = received, alerts
        self._rendezvous = rendezvous_of(options)
        self._ranks = NodeRanks(options, helpers, train_flags, alerts, memory)
        self._membership: rendezvous.Membership | None = None
        self._failures: list[Failure] = []
        """Those that ended the last attempt."""
        self._stop_requested_s: float | None = None
        self._kill_s: float | None = None

    def run(self) -> int:
        """Run the ranks to the end; return 0, or the exit status of the rank that failed first in the last attempt.

        A crash loop ends with ABORTED. Raises RendezvousFailedError, NotNeededError, and SystemExit for a signal before
        the ranks first run. Attempts follow each other by this table:

        | an attempt ends as                   | stop requested   | then                                             |
        |--------------------------------------|------------------|--------------------------------------------------|
        | all ranks done, here and elsewhere   |                  | DONE                                             |
        | all done, but another agent's joins  | no               | again: that agent has ended the ranks of all     |
        | nodes change                         | no               | healthy ranks save, again                        |
        | either of these two                  | yes              | DONE on all nodes                                |
        | a rank fails as REFUSED or ABORTED   |                  | its status on all nodes                          |
        | other failure, restarts are set      | no               | again: the policy decides when all nodes wait    |
        | any other failure                    |                  | its status on all nodes                          |
        | signal between two attempts          |                  | DONE on all nodes                                |
        | the policy, or a node, ends the run  |                  | that status                                      |
        """
        try:
            while True:
                status = self._attempt()
                if status is not None:
                    return status
        finally:
            self._ranks.end()
            self._rendezvous.leave()

    def _attempt(self) -> int | None:
        """Run the ranks once. Return the exit status of the run; None: they are to start again."""
        try:
            self._start_ranks()
        except InterruptedBySignal as interrupted:
            # before the ranks first ran nothing is to be saved: `run_agent` ends by the signal's status
            if self._membership is None:
                raise
            return self._stop_between(interrupted.number)
        except rendezvous.RunEndedError as ended:
            if self._options.keep_healthy_ranks:  # those that wait come to a verdict, as lost ranks do
                self._ranks.let_go()
                self._ranks.wait_for_end(FAILED_GRACE_S)
            self._alerts.ended(ended.status, ended.reason, self._failures)
            return ended.status
        except NotStartedError as not_started:
            if self._membership is not None and self._membership.store_socket is not None:
                self._membership.store_socket.close()  # the next attempt may need its port
            return self._after_failure(not_started.failure)
        assert self._membership is not None
        self._alerts.restarted(self._failures)
        self._alerts.begin(self._membership.node)
        self._failures = []
        ended_by = self._watch()
        if isinstance(ended_by, Failure):
            return self._after_failure(ended_by)
        if ended_by is Event.NODES_CHANGED:
            self._let_ranks_save()
        elif not self._rendezvous.finish():
            self._rendezvous.close()
            return DONE
        if self._stop_requested_s is not None:
            self._rendezvous.close(DONE)
            return DONE
        self._ranks.end()
        return None

    def _after_failure(self, failure: Failure) -> int | None:
        """Return the exit status after a failure that is final; None where the policy of restarts is to decide."""
        is_final = failure.returncode in (REFUSED, ABORTED) or self._stop_requested_s is not None
        if is_final or self._options.max_restarts == 0:
            return self._end_after(failure)
        stay = self._options.keep_healthy_ranks and self._have_left(failure)
        if not stay and failure.returncode >= 0:  # after a kill the others only wait for the dead rank
            self._ranks.wait_for_end(FAILED_GRACE_S)
        self._note_failures(failure)
        self._ranks.end(spares_waiting=stay)
        return None

    def _have_left(self, failure: Failure) -> bool:
        """Return whether the healthy ranks have left their round, and wait for a place in the next; report why not."""
        reason: str | None = "the watchdog has ended the ranks"
        if failure.returncode != HUNG:
            reason = self._ranks.await_healthy(self._received)
        if reason is None:
            return True
        if not self._received:  # a stop, after which none start
            report(f"{reason}: all ranks of the node start again")
        self._ranks.let_go()
        return False

    def _stop_between(self, number: int) -> int:
        """End the run on all nodes at a signal that came between two attempts; return the exit status."""
        stop = f"{signal.Signals(number).name}: the run stops here, with the checkpoints that it has saved"
        report("; ".join([*map(str, self._failures[:1]), stop]))
        self._ranks.end()
        self._rendezvous.close(DONE)
        return DONE

    def _note_failures(self, first: Failure) -> None:
        """Keep how the ranks failed, the first first, and the newest checkpoint that they know."""
        others = [self._ranks.failure(local_rank, code) for local_rank, code in enumerate(self._ranks.codes) if code]
        # ranks end with another member, such as the fork server, and have not failed
        self._failures = [first, *(other for other in others if other.rank != first.rank and not first.member)]
        if self._options.nodes > 1 and first.is_own:
            report(str(first))  # the first node reports what follows

    def _start_ranks(self) -> None:
        """Start the processes, agree with the other nodes, then give each process its environment.

        Raises InterruptedBySignal, except before the first attempt of a single node, whose ranks handle a signal.
        """
        previous = self._membership
        if self._options.nodes == 1:  # no rank waits for its end while a restart is delayed
            self._join()
        kept = self._ranks.kept
        if kept:
            stay = "1 healthy rank stays"
            if len(kept) > 1:
                stay = f"{len(kept)} healthy ranks stay"
            report(f"{stay}: {first_of(list(map(str, kept)), 8)}")
        self._ranks.start()
        if self._options.nodes > 1:  # meanwhile the ranks import
            self._join()
        assert self._membership is not None
        self._report_size(previous, self._membership)
        self._ranks.give_places(self._membership)

    def _join(self) -> None:
        previous = self._membership
        guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._options.nodes > 1 or previous is not None:
            guard = interruptible(SIGNALS, self._received)
        try:
            with guard:
                self._membership = self._rendezvous.join(self._failures, self._ranks.saved)
        except InterruptedBySignal as interrupted:
            if self._membership is previous:
                raise
            self._received.append(interrupted.number)  # it has its place: the other nodes wait for its ranks
        self._rendezvous.settle()

    def _report_size(self, previous: rendezvous.Membership | None, membership: rendezvous.Membership) -> None:
        if previous is None or previous.num_nodes == membership.num_nodes or membership.node != 0:
            return
        per_node, count = self._options.ranks_per_node, membership.num_nodes
        nodes = counted(count, "node")
        report(f"{count * per_node} ranks on {nodes} from now on, instead of {previous.num_nodes * per_node}")

    def _watch(self) -> Failure | Event:
        """Wait until the ranks end. Raises RendezvousFailedError."""
        while True:
            self._ranks.look()
            self._pass_on_signals()
            codes = self._ranks.codes
            # first: multiprocessing then gives each rank the code 255, as if all had failed by themselves
            lost_with_server = self._ranks.server_failure()
            if lost_with_server is not None:
                self._ranks.inform(dict.fromkeys(range(len(codes)), "ended with its fork server"))
                return lost_with_server
            failed = [(code, local_rank) for local_rank, code in enumerate(codes) if code]
            if failed:
                self._ranks.inform({local_rank: ending(code) for code, local_rank in failed})
                # where several failed since the last look, one killed from outside is the likelier cause
                code, local_rank = min(failed)
                return self._ranks.failure(local_rank, code)
            if all(code == 0 for code in codes):
                return Event.DONE
            if self._rendezvous.nodes_waiting():
                return Event.NODES_CHANGED

    def _end_after(self, failure: Failure) -> int:
        """End the ranks after a failure that is final, and return the exit status.

        The failure is reported unless the failed rank has done so itself.
        """
        status = shell_status(failure.returncode)
        self._ranks.let_go()
        if self._stop_requested_s is not None:
            if not failure.is_own and self._rendezvous.end_status(STOP_S) == DONE:
                return DONE  # another node stopped between two attempts
            report(f"{failure} after a stop was requested")
        # a rank that ended by itself has printed its error; a killed one, and a fork server, print nothing
        elif failure.returncode < 0 or failure.member:
            report(str(failure))
        grace_s = FAILED_GRACE_S
        if failure.returncode == HUNG:
            grace_s = HUNG_GRACE_S
        if not self._ranks.wait_for_end(grace_s):
            report(f"{failure}; ending the ranks that still run")
        self._ranks.end()
        self._alerts.ended(status, "", [failure])
        self._rendezvous.close(status)
        return status

    def _let_ranks_save(self) -> None:
        """Have the ranks end, because the nodes have changed: healthy ones save before."""
        # a rank that saves needs all others: with one of them lost it would wait in the collective until it is killed
        if self._rendezvous.has_lost_ranks():
            report("another node has failed or is lost; the ranks restart")
            self._ranks.wait_for_end(FAILED_GRACE_S, or_failure=True)
            self._ranks.end()
            return
        report("the nodes have changed; the ranks save and restart")
        # the ranks finish their step and save, as for a user's signal
        self._ranks.send_signal(signal.SIGTERM)
        self._ranks.wait_for_end(JOIN_SAVE_S, or_failure=True)
        self._ranks.end()

    def _pass_on_signals(self) -> None:
        """Send the ranks what was received. They handle it in their own time, and have little after a second."""
        now_s = time.monotonic()
        while self._received:
            number = self._received.popleft()
            self._ranks.send_signal(number)
            if self._options.is_chat and number == signal.SIGINT:
                continue  # it stops an answer, not the run
            if self._stop_requested_s is None:
                self._stop_requested_s = now_s
                self._report_stop(number)
                continue
            # the kernel repeats SIGXCPU each second
            is_second = now_s - self._stop_requested_s >= REPEAT_S and number != signal.SIGXCPU
            if is_second and self._kill_s is None:
                self._kill_s = now_s + KILL_S
        if self._kill_s is not None and now_s > self._kill_s:
            self._ranks.send_signal(signal.SIGKILL)

    def _report_stop(self, number: int) -> None:
        """Report, once for all nodes, what a signal makes the ranks do."""
        if self._membership is None or self._membership.node != 0:
            return
        stop = "stop"
        if self._options.main == "megatron.train":
            stop = "stop after this step and save"
        report(f"{signal.Signals(number).name}: the ranks {stop}; a second signal ends them at once")


def rendezvous_of(options: AgentOptions) -> rendezvous.Rendezvous:
    """Return the rendezvous of one node, or that of several. Raises MissingSecretError."""
    if options.nodes == 1:
        return rendezvous.Rendezvous(options)
    from megatron.launch.agents.nodes_rendezvous import NodesRendezvous  # late: one node needs none of it

    return NodesRendezvous(options)


def run_agent(options: AgentOptions, train_flags: Sequence[str], start_method: str | None = None) -> int:
    """Run this node's part of a run to its end, and return the exit status."""
    options = with_ranks_that_stay(options)
    os.environ["MEGATRON_MAIN"] = options.main  # for launch/preload.py
    # the backward pass of a pipeline imports sympy, which the fork server does once for all ranks and restarts
    os.environ["MEGATRON_PIPELINE"] = str(int(has_pipeline(train_flags)))
    # the log of rank 0, for which the others wait, imports TensorBoard
    os.environ["MEGATRON_TENSORBOARD"] = str(int(writes_events(train_flags)))
    os.environ["PYTHONUNBUFFERED"] = "1"  # what a killed rank printed is not lost
    # before any process starts: a limit is inherited
    raise_limit()
    with noted_signals(SIGNALS) as received:
        helpers = HelperProcesses(start_method or start_method_of(options), NodeRanks.__module__)
        alerts = RunAlerts(options)
        try:
            if options.ends_with_connection:  # the launcher has not checked this machine
                require_devices(options.ranks_per_node)
            if options.nodes > 1:
                with interruptible(SIGNALS, received):
                    find_secret(options.secret_file)
            # before the nodes join each other, and before any rank waits for another
            if options.models:
                with interruptible(SIGNALS, received):
                    fetch_models(options.models.split())
            # only ranks that are restarted can read what is kept for them
            memory = None
            if options.max_restarts:
                memory = open_memory()
            with adopted_orphans():
                return Agent(options, helpers, train_flags, received, alerts, memory).run()
        # a signal before the ranks have run: nothing is to be saved
        except SystemExit as interrupted:
            return int(interrupted.code or DONE)
        except rendezvous.NotNeededError:
            return DONE
        except (CoresError, ModulesError) as error:
            report(f"{socket.gethostname()}: {error}")
            alerts.ended(REFUSED, str(error))
            return REFUSED
        except (MissingSecretError, rendezvous.DifferentCodeError) as error:
            report(str(error))
            alerts.ended(REFUSED, str(error))
            return REFUSED
        except (HubError, rendezvous.RendezvousFailedError) as error:
            report(str(error))
            alerts.ended(FAILED, str(error))
            return FAILED
        finally:
            alerts.close()


def with_ranks_that_stay(options: AgentOptions) -> AgentOptions:
    """Return the options, without `keep_healthy_ranks` where the ranks cannot stay, which is reported."""
    if not options.keep_healthy_ranks:
        return options
    device, reason = launched_device(), None
    if options.nodes > 1:
        reason = "over several nodes"
    elif device is None:
        reason = "where the ranks detect their device (give the launcher --device cpu, HL_DEVICE=cpu)"
    elif not device.collectives_are_gloo:
        reason = f"on {device.name}, since a rank that waits in a collective of {device.collectives} cannot leave it"
    elif options.main != "megatron.train":
        reason = f"of {options.main}"
    if reason is None:
        return options
    report(f"keep_healthy_ranks: no ranks are kept {reason}; all start again where one ends")
    return dataclasses.replace(options, keep_healthy_ranks=False)


def fetch_models(names: Sequence[str]) -> None:
    """Download the models of the hub that this host lacks. Raises HubError."""
    for name in names:
        whole_folder(name, "load")


def start_method_of(options: AgentOptions) -> str:
    """Return how multiprocessing starts the ranks.

    On the CPU several ranks, and those of several attempts, are forks of a server that has done their imports. On most
    accelerators each is a new process, since their libraries do not survive a fork once they have looked for devices,
    which importing deepspeed does.
    """
    device = launched_device()
    shares_imports = options.ranks_per_node > 1 or options.max_restarts > 0
    if shares_imports and device is not None and device.survives_fork:
        return "forkserver"
    return "spawn"


def has_pipeline(train_flags: Sequence[str]) -> bool:
    """Return whether the flags set more than one pipeline stage. What a file says of it is not read."""
    words = [part for word in train_flags for part in word.split("=", 1)]
    # `--flag=VALUE` is two words here too; the last one counts, as for argparse
    values = [value for name, value in pairwise(words) if name == "--pipeline-model-parallel-size"]
    return values[-1:] not in ([], ["1"])


def writes_events(train_flags: Sequence[str]) -> bool:
    """Return whether the flags set a folder for TensorBoard's events. As in `has_pipeline`, no file is read."""
    names = {word.partition("=")[0] for word in train_flags}
    return not names.isdisjoint(("--results-dir", "--tensorboard-dir"))


def main(arguments: Sequence[str]) -> NoReturn:
    options, train_flags = parse(arguments)
    if not options.ends_with_connection:  # no launcher waits for its messages
        owned(lambda: run_agent(options, train_flags))
    # before any rank starts, which would take the place of this agent in Open MPI's variables for its own
    if options.by_mpirun:
        options = dataclasses.replace(options, node_order=leave_mpi())

    def run_announced() -> int:
        announce("ready")  # the owner handles signals
        status = run_agent(options, train_flags)
        announce(f"ended {status}")
        return status

    owned(run_announced, (sys.stdout.fileno(), sys.stderr.fileno()))


if __name__ == "__main__":
    main(sys.argv[1:])
