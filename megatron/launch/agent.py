"""The ranks of one node, started again when one of them fails: the agent that each node of a supervised run runs.

    python tools/supervise.py --ranks-per-node M [--nodes N --rendezvous HOST:PORT] --max-restarts R -- FLAGS

tools/launch.py checks a run and then becomes this, or starts it on each host. torch's elastic agent (tools/elastic.py)
brings the nodes together, counts restarts and says who is rank 0; here is what it starts, and what is said of it.

Imports no torch: a rank is a new process that must find its environment set before it does.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process

from megatron.exit_codes import ABORTED, DONE, FAILED, REFUSED
from megatron.files import IMPORT_ROOT
from megatron.resilience.shutdown import SIGNALS


@dataclass(frozen=True)
class Supervision:
    """How the ranks of a run are started, and started again."""

    ranks_per_node: int
    nodes: int = 1
    min_nodes: int = 1
    """The run goes on as long as this many nodes are left."""
    rendezvous: str | None = None
    """HOST:PORT where the agents of several nodes meet; the agent on that host serves it. None: this node is alone."""
    run_id: str = "run"
    """Equal on all nodes of a run."""
    max_restarts: int = 0

    def arguments(self) -> list[str]:
        """As `parse` reads them."""
        meeting = ["--rendezvous", self.rendezvous, "--run-id", self.run_id] if self.rendezvous else []
        return [
            *("--nodes", str(self.nodes), "--min-nodes", str(self.min_nodes)),
            *("--ranks-per-node", str(self.ranks_per_node), "--max-restarts", str(self.max_restarts)),
            *meeting,
        ]


def parse(arguments: Sequence[str]) -> tuple[Supervision, list[str]]:
    """The options of the agent, and the flags of megatron.train behind `--`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python tools/supervise.py",
        description="Start the ranks of this node, and start them again when one fails. tools/launch.py calls it.",
        epilog="After --, the flags of megatron.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the run starts with")
    parser.add_argument("--min-nodes", type=int, default=1, help="nodes that it goes on with at least")
    parser.add_argument("--rendezvous", help="HOST:PORT of the first node; none: this node is alone")
    parser.add_argument("--run-id", default="run", help="equal on all nodes of the run")
    parser.add_argument("--max-restarts", type=int, default=0)
    return Supervision(**vars(parser.parse_args(arguments[:place]))), list(arguments[place + 1 :])


def supervise(supervision: Supervision, train_flags: Sequence[str]) -> int:
    """Run this node's ranks to the end of the run. Returns the status of the first that failed last, 0 if none did."""
    start_method = "spawn"
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Started now, it imports while the agent does. On accelerators each rank is a fresh process: their libraries
        # do not survive a fork once they have looked for devices, as deepspeed does when it is imported.
        start_method = "forkserver"
        # the fork server finds modules by this alone
        os.environ["PYTHONPATH"] = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        forkserver.set_forkserver_preload(["megatron.launch.preload"])
        # it lives as long as its ranks: what stops a run is for them, and reaches them through us
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    from megatron.launch.elastic import run_agent

    return run_agent(supervision, start_method, train_flags)


def run_rank(environment: Mapping[str, str], train_flags: Sequence[str]) -> None:
    """What the process of a rank does: a run of megatron.train. Does not return."""
    from megatron.launch.child_processes import end_with_parent

    if at_death := end_with_parent():
        at_death()
    agent = parent_process()
    if agent is not None and not agent.is_alive():
        os._exit(FAILED)  # it ended before we asked to be told
    os.setsid()  # a Ctrl-C reaches us once, through the agent
    os.environ.update(environment)
    sys.argv = ["megatron.train", *train_flags]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    from megatron import train

    try:
        status = train.start()
    except BaseException:
        traceback.print_exc()
        status = FAILED
    train.leave(status)


def is_failure(status: int) -> bool:
    """Whether a process that ended so is worth another try."""
    return status not in (DONE, REFUSED, ABORTED)


def shell_status(exitcode: int) -> int:
    """128 + n for a process that signal n killed."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def ending(exitcode: int) -> str:
    """How a process ended, in words."""
    if exitcode >= 0:
        return f"ended with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def own_address(towards: str, port: int) -> tuple[str, bool]:
    """The address by which other nodes reach this one, and whether `towards` is this very machine.

    Raises OSError where it cannot be reached.
    """
    family, kind, _, _, there = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing
        own = probe.getsockname()[0]
    return (towards, True) if own == there[0] else (own, False)


def main(arguments: Sequence[str]) -> int:
    supervision, train_flags = parse(arguments)
    return supervise(supervision, train_flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
