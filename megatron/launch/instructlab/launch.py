"""Agent of this node as a child process: its output is passed on and logged, and so are signals to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from megatron.launch import child_processes
from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_of
from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.instructlab.arguments import TorchrunArgs
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import ABORTED, DONE, FAILED, HUNG, REFUSED, shell_status
from megatron.runtime.devices import find_device, rank_variables

MEANINGS = {
    FAILED: "an unexpected fault; another attempt may succeed",
    REFUSED: "refused: a fault of the options, the data, the model or the device, reported above",
    ABORTED: "aborted: too many steps in a row were skipped, or the ranks' copies of a parameter differ",
    HUNG: "hung: no progress was seen for too long; another attempt may succeed",
}
POLL_S = 0.1


class RunFailedError(RuntimeError):
    """The ranks did not end well."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def agent_command(torch_args: TorchrunArgs, ranks_per_node: int, train_flags: Sequence[str]) -> list[str]:
    """Return the command that starts the ranks of this node."""
    endpoint = torch_args.rdzv_endpoint
    if torch_args.master_addr is not None:
        endpoint = endpoint_of(torch_args.master_addr, torch_args.master_port or RENDEZVOUS_PORT)
    # without restarts: the program that calls run_training decides what follows a failure
    options = AgentOptions(
        nodes=torch_args.nnodes,
        node_rank=torch_args.node_rank,
        rendezvous=endpoint,
        run_id=str(torch_args.rdzv_id),
        ranks_per_node=ranks_per_node,
    )
    # unbuffered, since its lines are copied as they come
    return [sys.executable, "-u", "-m", "megatron.launch.agents.agent", *options.arguments(), "--", *train_flags]


def environment_of_ranks(device: str, ranks_per_node: int) -> dict[str, str]:
    """Return this process's environment, with what the ranks need."""
    environment = os.environ | rank_variables(device) | {"PYTHONPATH": child_processes.python_path()}
    if find_device(device).is_host:
        environment["OMP_NUM_THREADS"] = child_processes.threads_per_rank(ranks_per_node)
    return environment


def run_to_the_end(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run the agent, copying its output to stdout and to a file.

    A signal that requests a stop goes to the ranks, which save and end; then it takes effect here: a Ctrl-C raises
    KeyboardInterrupt, a SIGTERM ends the process unless the caller handles it. Raises RuntimeError with the exit status
    and its meaning if the run failed.
    """
    with child_processes.noted_signals(SIGNALS) as received:
        with child_processes.blocked_signals(SIGNALS):  # until the agent handles them
            # one pipe for both streams, so that the log has their lines in order
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches the ranks once, through this process
                preexec_fn=child_processes.end_with_parent(signal.SIGTERM),  # the ranks then save and end
            )
        assert process.stdout is not None
        output = _Output(process.stdout, log)
        output.start()
        first: int | None = None
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                while received:
                    number = received.popleft()
                    first = first or number
                    process.send_signal(number)
            # what was printed last is still in the pipe
            output.join()
        finally:
            # after an exception here the agent and its ranks still run
            child_processes.kill_tree(process.pid)
            process.wait()
    # here the caller's handlers are in place again
    if first is not None:
        signal.raise_signal(first)
    status = shell_status(process.returncode)
    if status != DONE:
        text = f"the training ended with status {status}: {meaning(status)}. The whole output is in {log}"
        raise RunFailedError(status, text)


def meaning(status: int) -> str:
    """Explain an exit status, as docs/guides/launching.md lists them."""
    # as a shell writes the end by a signal
    if status > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(status - 128).name
            return f"{name} ended it" + (", often for lack of memory" if name == "SIGKILL" else "")
    return MEANINGS.get(status, "not a status of this project; something else ended it")


class _Output(threading.Thread):
    """Copies what a process prints."""

    def __init__(self, lines: IO[bytes], log: Path):
        super().__init__(name="output", daemon=True)
        self._lines = lines
        # appended: the same call made again continues the run
        self._log = log.open("ab")

    def run(self) -> None:
        with self._log as log:
            for line in self._lines:
                with contextlib.suppress(OSError, ValueError):  # a full disk, a closed reader: the run goes on
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()
                with contextlib.suppress(OSError):
                    log.write(line)
                    log.flush()
