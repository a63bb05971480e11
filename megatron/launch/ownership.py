"""Ownership of processes: what a command starts ends with it, whatever ends it, and it ends with its connection.

    sys.exit(owned(lambda: run_agent(...)))

Linux alone makes a process the parent of descendants whose parent has ended. Elsewhere those are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from megatron.exit_codes import FAILED, shell_status
from megatron.launch.child_processes import blocked_signals, end_with_parent, handled_signals
from megatron.resilience.shutdown import SIGNALS

END_AT_ONCE = signal.SIGQUIT
"""Signal at which a command kills all that it has started, and ends."""
KILL_S = 1.0
"""Time for killed processes to disappear."""
LOOK_S = 0.005
LONGEST_TMPDIR = 56
"""Length of TMPDIR that leaves room for a socket two folders below: its path has at most 107."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def owned(run: Callable[[], int], connection: Sequence[int] = ()) -> int:
    """Return the exit status of `run`, called in a child process; nothing that it started survives it.

    The child ends if this process does, and both end at once at SIGQUIT, or when the reader of one of the file
    descriptors `connection` is gone, as stdout is when an ssh session is closed. Other signals are passed on. The
    child's temporary files are removed at the end. To be called in the main thread, while it is the only one.
    """
    own, before = os.getpid(), processes_below(os.getpid())
    with blocked_signals([*SIGNALS, END_AT_ONCE]), temporary_folder() as folder, adopted_orphans():
        child = os.fork()
        if child == 0:
            _run_child(run, own, folder)
        try:
            with woken_by_signals() as (descriptor, received):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [*SIGNALS, END_AT_ONCE])
                return _wait(child, descriptor, received, connection)
        finally:
            end_processes(below=own, spared=before)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _run_child(run: Callable[[], int], owner: int, folder: str | None) -> NoReturn:
    """Call `run` and end with its status. `folder`: for its temporary files."""
    status = FAILED
    try:
        os.setsid()  # a Ctrl-C reaches it once, through its owner
        tempfile.tempdir = folder  # also for the socket of multiprocessing's fork server; other programs have their own

        def end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)
            raise SystemExit(shell_status(-number))

        signal.signal(END_AT_ONCE, end)
        if set_death_signal := end_with_parent(END_AT_ONCE):
            set_death_signal()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*SIGNALS, END_AT_ONCE])
        if os.getppid() == owner:  # it has not ended before the death signal was set
            with adopted_orphans():
                status = run()
    except SystemExit as end_of_run:
        status = end_of_run.code if isinstance(end_of_run.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        end_processes(below=os.getpid())
        _remove(folder)  # the owner may have been killed
        os._exit(status)


def _wait(child: int, woken: int, received: list[int], connection: Sequence[int]) -> int:
    """Return the exit status of the child, or FAILED when it has to end for another reason."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    for descriptor in connection:
        poll.register(descriptor, 0)  # which reports an end alone
    while True:
        while received:
            number = received.pop(0)
            if number == END_AT_ONCE:
                return shell_status(-number)
            if number != signal.SIGCHLD:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return shell_status(os.waitstatus_to_exitcode(status))
        for descriptor, event in poll.poll():
            if descriptor == woken:
                os.read(woken, 512)
            elif event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                return FAILED


@contextlib.contextmanager
def temporary_folder() -> Iterator[str | None]:
    """Yield a new temporary folder, removed with its content at the end; None where none can be made."""
    folder = None
    with contextlib.suppress(OSError):  # a read-only system; what needs no temporary file runs all the same
        if len(tempfile.gettempdir()) <= LONGEST_TMPDIR:
            folder = tempfile.mkdtemp(prefix="megatron-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def woken_by_signals() -> Iterator[tuple[int, list[int]]]:
    """Collect signals and ends of children; the descriptor becomes readable with each."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # also where they were ignored: a shell ignores SIGQUIT for what it runs in the background
    former = {number: signal.signal(number, note) for number in (END_AT_ONCE, signal.SIGCHLD)}
    try:
        with handled_signals(SIGNALS, note):
            yield reader, received
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Become the parent of descendants whose parent ends, so that they are found. Linux only."""
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    previous = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(previous), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, previous.value, 0, 0, 0)


def processes_below(pid: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid for process in psutil.Process(pid).children(recursive=True)}
    return set()


def end_processes(below: int, spared: Collection[int] = ()) -> list[int]:
    """Kill the descendants of a process, whatever their groups and sessions; return those that survive.

    One that starts another in the meantime is looked for again. `spared`: descendants to leave alive.
    """
    import psutil

    deadline_s = time.monotonic() + KILL_S
    while True:
        left = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(below).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    left.append(process.pid)
                    process.kill()
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(LOOK_S)
