"""Agent of this node as a child process, and the meaning of its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.launch import child_processes
from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_of
from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.attached import run_attached
from megatron.launch.instructlab.arguments import TorchrunArgs
from megatron.runtime.commands import ABORTED, DONE, FAILED, HUNG, REFUSED
from megatron.runtime.devices import find_device, rank_variables

MEANINGS = {
    FAILED: "an unexpected fault; another attempt may succeed",
    REFUSED: "refused: a fault of the options, the data, the model or the device, reported above",
    ABORTED: "aborted: too many steps in a row were skipped, or the ranks' copies of a parameter differ",
    HUNG: "hung: no progress was seen for too long; another attempt may succeed",
}


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
    """Run the agent as `run_attached` does, with its output in a file too.

    Raises RuntimeError with the exit status and its meaning if the run failed.
    """
    status = run_attached(command, environment, log).status
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
