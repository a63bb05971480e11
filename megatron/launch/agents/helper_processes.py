"""Helper processes of an agent: the fork server that its ranks are forked from, and the resource tracker.

Both are multiprocessing's, which does not notice that one has ended: all ranks of a fork server then end by status 255,
as if each had failed, and the next start raises EOFError.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import types
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

from megatron.launch.agents.restart_policy import Failure, ending
from megatron.launch.child_processes import blocked_signals, python_path, report
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import FAILED

SERVER = "the fork server of the ranks"
OF_LOST_SERVER = 255
"""Exit code by which multiprocessing knows the ranks of a fork server that has ended."""
END_S = 1.0
"""Time between the end of a process's connections and its own."""
LOOK_S = 0.01


class HelperProcesses:
    """Those that a start method of multiprocessing needs, as members of the run that may fail."""

    def __init__(self, start_method: str, module: str) -> None:
        """Start them. The fork server imports while the agent goes on, and ignores signals.

        `module`: that of the function with which the ranks start, which each of them would import.
        """
        self.start_method = start_method
        self._has_server = start_method == "forkserver"
        self._tracker: int | None = None
        self._server: int | None = None
        self._lost_server: int | None = None
        """Process id of a fork server whose end is known."""
        self._start_tracker()
        if self._has_server:
            os.environ["PYTHONPATH"] = python_path()  # by which alone it finds modules
            # the last freezes what was imported before it
            forkserver.set_forkserver_preload([module, "megatron.launch.preload"])
            self._start_server()

    @property
    def pids(self) -> set[int]:
        """Process ids of those that run or ran last."""
        known = [_tracker_pid()]
        if self._has_server:
            known.append(_server_pid())
        return {pid for pid in known if pid is not None}

    def renew(self) -> None:
        """Start those again that have ended, and report how, unless `server_failure` has returned it."""
        self._start_tracker()
        if not self._has_server:
            return
        failure = self.server_failure()
        if failure is not None:
            report(f"{failure}; it is started again")
        self._start_server()

    def note(self) -> bool:
        """Report a fork server that multiprocessing has started again by itself, and return whether it has."""
        # at each start of a process multiprocessing looks at its fork server, and silently replaces one that has ended
        is_another = self._server not in (None, self._lost_server, _server_pid())
        if is_another:
            report(f"{SERVER} on {socket.gethostname()} had ended, and was started again")
        self._server = _server_pid()
        return is_another

    def server_failure(self, *, is_likely: bool = False) -> Failure | None:
        """Return the failure of a fork server that has ended, once; None: it runs, or there is none.

        `is_likely`: its connections have ended.
        """
        if not self._has_server:
            return None
        pid = _server_pid()
        if pid is None or pid == self._lost_server:
            return None
        within_s = 0.0
        if is_likely:
            within_s = END_S  # its connections end a moment before its process does
        code = _ended(pid, within_s)
        if code is None:
            return None
        self._lost_server = pid
        # the ranks are lost with it also where it ended by 0
        return Failure.of_member(SERVER, socket.gethostname(), code or FAILED)

    def _start_tracker(self) -> None:
        """Start the resource tracker, without which multiprocessing starts no rank.

        Signals are not blocked here: it unblocks SIGINT and SIGTERM, and a process started next would inherit that.
        """
        if self.start_method == "fork":
            return
        # before: `ensure_running` waits for the process that has ended, and its status is then gone
        code = _ended(_tracker_pid())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is reported here
            resource_tracker.ensure_running()
        if self._tracker not in (None, _tracker_pid()):
            how = "has ended"
            if code is not None:
                how = ending(code)
            report(f"multiprocessing's resource tracker {how}; no rank needs it, and it is started again")
        self._tracker = _tracker_pid()

    def _start_server(self) -> None:
        with blocked_signals(SIGNALS), quiet_main():
            forkserver.ensure_running()
        self.note()


# multiprocessing has no public name for the ids of its helpers.
def _server_pid() -> int | None:
    return vars(vars(forkserver)["_forkserver"])["_forkserver_pid"]


def _tracker_pid() -> int | None:
    return vars(vars(resource_tracker)["_resource_tracker"])["_pid"]


def _ended(pid: int | None, timeout_s: float = 0.0) -> int | None:
    """Return how a child has ended within this time, below 0 by a signal, and leave it to be waited for.

    None: it runs, or there is none, or another process started it.
    """
    if pid is None or not hasattr(os, "waitid"):
        return None
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            # not waited for: multiprocessing does so itself before it starts another
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if end is not None and end.si_code == os.CLD_EXITED:
            return end.si_status
        if end is not None:
            return -end.si_status
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(LOOK_S)


@contextlib.contextmanager
def quiet_main() -> Iterator[None]:
    """Hide from multiprocessing the program that started the agent, and its own warning of a resource tracker's end.

    It would import the program again in each rank.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="resource_tracker: process died")
            yield
    finally:
        sys.modules["__main__"] = main
