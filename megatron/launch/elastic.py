"""torch's elastic agent with ranks of ours: see tools/supervise.py.

`SimpleElasticAgent` is torch's published base for agents of one's own: it has the rendezvous, the ranks of the nodes,
the count of restarts and the watch for nodes that come and go. Its LocalElasticAgent would not do: it gives ranks at a
SIGTERM 30 s, in which no large checkpoint is saved; it restarts a run that was refused as if it had crashed; and
after a failure it waits 30 s for ranks that wait for the dead one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megatron.exit_codes import FAILED
from megatron.launch.agent import Supervision, ending, is_failure, own_address, run_rank, shell_status
from megatron.launch.child_processes import noted_signals
from megatron.launch.hosts import FAILED_GRACE_S, TERMINATED_GRACE_S
from megatron.resilience.shutdown import REPEAT_S, SIGNALS

MONITOR_S = 0.25
"""How often the agent looks for signals, and for nodes that come or go. A rank that ends is noticed at once."""
JOIN_TIMEOUT_S = 600
"""How long a node waits for enough others."""
LAST_CALL_S = 30
"""How long enough nodes wait for the rest, before they begin without."""
KEEP_ALIVE_S = 5
"""How often a node shows that it is there. One that is silent for three times as long is lost."""
EXIT_BARRIER_S = 30
"""How long a node whose ranks are done waits for the others: they end together."""
STORE_LINGER_S = 2
"""How long the first node still serves the others when all are done: they take their leave there."""
JOIN_SAVE_S = 120
"""What healthy ranks get to save, when they must begin again because a node joins."""


class Agent(SimpleElasticAgent):
    """The ranks of this node, and of what became of them."""

    def __init__(self, spec: WorkerSpec, start_method: str, train_flags: Sequence[str], received: deque[int]):
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_S)
        self._context: Any = multiprocessing.get_context(start_method)
        self._train_flags = tuple(train_flags)
        self._received = received
        self._processes: list[BaseProcess] = []
        self._first_rank = 0
        self._world_size: int | None = None
        self._restarts = 0
        self._asked_s: float | None = None
        self._kill_s: float | None = None
        self.status = FAILED
        """Of the rank that ended the last try."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with _interruptible(self._received):  # no rank is there to be told
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, workers = worker_group.spec, worker_group.workers
        self._first_rank = workers[0].global_rank
        self._tell_size(worker_group)
        self._processes = []
        # one that comes meanwhile waits until the rank can heed it
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for worker in workers:
                environment = {
                    "RANK": str(worker.global_rank),
                    "LOCAL_RANK": str(worker.local_rank),
                    "GROUP_RANK": str(worker_group.group_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                    "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                    "MASTER_ADDR": str(worker_group.master_addr),
                    "MASTER_PORT": str(worker_group.master_port),
                    "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                    "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
                    "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
                    "TORCHELASTIC_USE_AGENT_STORE": "False",
                }
                process = self._context.Process(
                    target=run_rank, args=(environment, self._train_flags), name=f"rank {worker.global_rank}"
                )
                process.start()
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return {place: process.pid for place, process in enumerate(self._processes)}

    def _tell_size(self, worker_group: WorkerGroup) -> None:
        size = worker_group.workers[0].world_size
        if self._world_size not in (None, size) and worker_group.group_rank == 0:
            nodes = "1 node" if worker_group.group_world_size == 1 else f"{worker_group.group_world_size} nodes"
            say(f"{size} ranks on {nodes} from now on, instead of {self._world_size}")
        self._world_size = size

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if running := self._running():
            wait([process.sentinel for process in running], timeout=MONITOR_S)
        self._pass_on_signals()
        exitcodes = self._exitcodes()
        if not exitcodes or (len(exitcodes) < len(self._processes) and not any(exitcodes.values())):
            return RunResult(WorkerState.HEALTHY)
        if not any(exitcodes.values()):
            self.status = 0
            return RunResult(WorkerState.SUCCEEDED, return_values=dict(exitcodes))
        # the first that failed; where several did since we looked, one killed from outside is the likelier cause
        rank, exitcode = min(((at, code) for at, code in exitcodes.items() if code), key=lambda found: found[1])
        # the others may be about to tell what is wrong; after a kill they only wait for the dead
        self._end_ranks(0.0 if exitcode < 0 else FAILED_GRACE_S)
        return self._judge(rank, exitcode)

    def _judge(self, rank: int, exitcode: int) -> RunResult:
        """What follows from the first rank that failed, once all have ended."""
        self.status = shell_status(exitcode)
        what = f"rank {rank} on {socket.gethostname()} {ending(exitcode)}"
        limit = self._worker_group.spec.max_restarts
        if self._asked_s is not None or not is_failure(exitcode):
            # over, as far as torch's agent is concerned: it restarts whatever failed
            if self._asked_s is not None:
                say(f"{what} after the run was asked to stop")
            statuses = {self._first_rank + place: self.status for place in range(len(self._processes))}
            return RunResult(WorkerState.SUCCEEDED, return_values=statuses)
        if self._restarts == limit:
            say(f"{what}; " + (f"all {limit} restarts are used up" if limit else "no restart was asked for"))
        else:
            self._restarts += 1
            say(f"{what}; restart {self._restarts} of {limit}")
        process = self._processes[rank - self._first_rank]
        failure = ProcessFailure(rank - self._first_rank, process.pid or 0, exitcode, error_file="")
        return RunResult(WorkerState.FAILED, failures={rank: failure})

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before the next try. Where no rank has ended, only the nodes have changed: those that can save do."""
        if len(self._running()) == len(self._processes):
            say("the nodes have changed; the ranks save and begin again")
            for process in self._running():
                _send(process, signal.SIGTERM)
            deadline_s = time.monotonic() + JOIN_SAVE_S
            while (
                (running := self._running()) and not any(self._exitcodes().values()) and time.monotonic() < deadline_s
            ):
                wait([process.sentinel for process in running], timeout=MONITOR_S)
        self._end_ranks(0.0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(0.0)

    def _end_ranks(self, grace_s: float) -> None:
        """No rank runs, nor do its children, once this returns."""
        deadline_s = time.monotonic() + grace_s
        while (running := self._running()) and (left_s := deadline_s - time.monotonic()) > 0:
            wait([process.sentinel for process in running], timeout=left_s)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid is not None:
                    os.killpg(process.pid, signal.SIGKILL)
            _send(process, signal.SIGKILL)  # one that has no session of its own yet
        for process in self._processes:
            process.join(TERMINATED_GRACE_S)
            if process.is_alive():
                say(f"{process.name} (process {process.pid}) does not end, not even by SIGKILL; it hangs in the kernel")

    def _pass_on_signals(self) -> None:
        """How long the ranks take to heed a signal is theirs; a second one leaves them little time."""
        now_s = time.monotonic()
        while self._received:
            number = self._received.popleft()
            for process in self._running():
                _send(process, number)
            if self._asked_s is None:
                self._asked_s = now_s
            elif now_s - self._asked_s >= REPEAT_S and self._kill_s is None:
                self._kill_s = now_s + TERMINATED_GRACE_S
        if self._kill_s is not None and now_s > self._kill_s:
            for process in self._running():
                _send(process, signal.SIGKILL)

    def _running(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]

    def _exitcodes(self) -> dict[int, int]:
        """Of the ranks that have ended."""
        ended = ((place, process.exitcode) for place, process in enumerate(self._processes))
        return {self._first_rank + place: code for place, code in ended if code is not None}


def run_agent(supervision: Supervision, start_method: str, train_flags: Sequence[str]) -> int:
    """This node's part of a run, to its end. Returns its exit status."""
    # Ranks of a new try must not meet the keys of the last one, nor its rank 0: each gets a store of its own
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with noted_signals(SIGNALS) as received:
        try:
            with _interruptible(received):
                handler, serves = _meet(supervision)
            spec = WorkerSpec(
                role="rank",
                local_world_size=supervision.ranks_per_node,
                rdzv_handler=handler,
                entrypoint=run_rank,
                max_restarts=supervision.max_restarts,
                monitor_interval=0.001,  # the waiting is in _monitor_workers
            )
            agent = Agent(spec, start_method, train_flags, received)
            agent.run()
            handler.shutdown()
            if serves and supervision.nodes > 1:
                time.sleep(STORE_LINGER_S)
        except SignalException as interrupted:
            return 128 + interrupted.sigval
        except RendezvousClosedError:
            say("the run has ended on the other nodes")
            return FAILED
        except (RendezvousError, OSError) as error:
            say(f"the nodes cannot meet at {supervision.rendezvous or 'a port of this machine'}: {error}")
            return FAILED
    return agent.status


def _meet(supervision: Supervision) -> tuple[RendezvousHandler, bool]:
    """torch's rendezvous of the agents, and whether this is the one that serves it, on the host it is named after.

    Raises RendezvousError or OSError where that host does not answer.
    """
    common: dict[str, Any] = {
        "backend": "c10d",
        "run_id": supervision.run_id,
        "min_nodes": supervision.min_nodes,
        "max_nodes": supervision.nodes,
        "join_timeout": JOIN_TIMEOUT_S,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_S,
    }
    if supervision.rendezvous is None:
        alone = RendezvousParameters(endpoint="127.0.0.1:0", local_addr="127.0.0.1", is_host=True, **common)
        return get_rendezvous_handler(alone), True
    host, _, port = supervision.rendezvous.rpartition(":")
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            address, serves = own_address(host, int(port))
            if not serves:
                socket.create_connection((host, int(port)), timeout=MONITOR_S + 5).close()
            break
        except OSError:  # it may not have started yet, nor have a name
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1)
    common |= {"endpoint": supervision.rendezvous, "local_addr": address}
    if serves:
        # of two agents on one machine the first serves
        with contextlib.suppress(RendezvousConnectionError):
            return get_rendezvous_handler(RendezvousParameters(is_host=True, **common)), True
    return get_rendezvous_handler(RendezvousParameters(is_host=False, **common)), False


@contextlib.contextmanager
def _interruptible(received: deque[int]) -> Iterator[None]:
    """Inside, a signal that asks to stop raises SignalException, as does one that has come before."""

    def raise_it(number: int, frame: FrameType | None = None) -> None:
        raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))

    if received:
        raise_it(received[0])
    previous = {
        number: signal.signal(number, raise_it) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _send(process: BaseProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
