"""Process of one rank, started by the agent of its node."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from megatron.control.agent_link import AGENT_SOCKET
from megatron.exit_codes import FAILED
from megatron.launch.child_processes import end_with_parent
from megatron.network import STORE_SOCKET
from megatron.resilience.shutdown import SIGNALS


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
    if set_death_signal := end_with_parent():
        set_death_signal()
    agent = parent_process()
    if agent is not None and not agent.is_alive():
        os._exit(FAILED)  # it ended before the death signal was set
    os.setsid()  # a Ctrl-C reaches this process once, through the agent
    os.environ["LOCAL_RANK"] = str(local_rank)
    if is_late:
        importlib.import_module("megatron.launch.preload")
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
