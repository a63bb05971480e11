"""Ownership of processes: what a command starts ends with it, whatever ends it, and it ends with its connection.

    owned(lambda: run_agent(...))  # does not return

From its first statement to the end of the process a signal is blocked, noted or ignored, and never has its default
effect. The exit status is fixed by the first cause of an end:

| stage       | owner                          | child, which calls `run`                                  |
|-------------|--------------------------------|-----------------------------------------------------------|
| starting    | blocked: it waits              | blocked: it waits                                         |
| running     | passed on to the child         | `run` notes it (`noted_signals`), SIGQUIT ends at once     |
| cleaning up | blocked: the status is fixed   | ignored: the status is fixed, SIGQUIT cleans up once more |

Linux alone makes a process the parent of descendants whose parent has ended. Elsewhere those are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.launch.child_processes import end_with_parent
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import FAILED, shell_status

END_AT_ONCE = signal.SIGQUIT
"""Signal at which a command kills all that it has started, and ends."""
KILL_S = 1.0
"""Time for killed processes to disappear."""
LOOK_S = 0.005
LOCK_TRIES = 3
MEMORY = Path("/dev/shm")
MEMORY_PREFIX = "megatron-copies-"
LONGEST_TMPDIR = 56
"""Length of TMPDIR that leaves room for a socket two folders below: its path has at most 107."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def owned(run: Callable[[], int], connection: Sequence[int] = ()) -> NoReturn:
    """End this process with the exit status of `run`, called in a child process; nothing that it started survives it.

    The child ends if this process does, and both end at once at SIGQUIT, or when the reader of one of the file
    descriptors `connection` is gone, as stdout is when an ssh session is closed. Other signals are passed on. The
    child's temporary files are removed at the end. To be called in the main thread, while it is the only one.
    """
    sys.stdout.flush()  # or the child would print it too
    signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, END_AT_ONCE])
    # what runs already is not what the command starts
    end = _End(_temporary_folder(), spared=processes_below(os.getpid()))
    status, own = FAILED, os.getpid()
    try:
        adopt_orphans()
        child = os.fork()
        if child == 0:
            _run_child(run, own, end)
        status = _wait(child, connection)
    except BaseException:
        traceback.print_exc()
    finally:
        end(status)


class _End:
    """End of this process and of all below it. The first cause fixes the exit status, whatever comes later."""

    def __init__(self, folder: str | None, spared: Collection[int] = ()) -> None:
        """`folder`: the child's temporary one. `spared`: descendants to leave alive."""
        self.folder, self.spared = folder, spared
        self._status: int | None = None

    def __call__(self, status: int) -> NoReturn:
        """Kill what is left below, remove the folder, and end. May interrupt itself, by a signal."""
        if self._status is None:
            self._status = status
        try:
            end_processes(os.getpid(), self.spared)
            if self.folder is not None:  # child and owner both do: the other one may have been killed
                shutil.rmtree(self.folder, ignore_errors=True)
                shutil.rmtree(memory_of(self.folder), ignore_errors=True)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: amid another write
                    stream.flush()
        finally:
            # past the handlers of atexit and the threads that still run, which could delay the end or change its status
            os._exit(self._status)


def _run_child(run: Callable[[], int], owner: int, end: _End) -> NoReturn:
    """Call `run` and end with its status. Signals stay blocked until it notes them."""
    status, end.spared = FAILED, ()
    try:
        os.setsid()  # a Ctrl-C reaches it once, through its owner
        # also for the socket of multiprocessing's fork server; other programs have their own
        tempfile.tempdir = end.folder
        for number in _heeded():  # what comes when `run` no longer notes it; children must not inherit SIG_IGN
            signal.signal(number, lambda number, frame: None)
        signal.signal(END_AT_ONCE, lambda number, frame: end(shell_status(-number)))
        end_with_parent(END_AT_ONCE)()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [END_AT_ONCE])
        if os.getppid() == owner:  # it has not ended before the death signal was set
            adopt_orphans()
            status = run()
    except SystemExit as end_of_run:
        status = end_of_run.code if isinstance(end_of_run.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        end(status)


def _heeded() -> list[signal.Signals]:
    """Return the signals that request a stop, without those ignored already (nohup, a job in the background)."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _wait(child: int, connection: Sequence[int]) -> int:
    """Return the exit status of the child, or FAILED when it has to end for another reason.

    Signals are blocked on return, as they are on entry.
    """
    woken, received = _wake_at_signals()
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    for descriptor in connection:
        poll.register(descriptor, 0)  # which reports an end alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*SIGNALS, END_AT_ONCE])
    try:
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
                    # the bytes only wake: the handler has noted the signals
                    os.read(woken, 512)
                elif event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                    return FAILED
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, END_AT_ONCE])


def _wake_at_signals() -> tuple[int, list[int]]:
    """Collect signals and ends of children for good; the descriptor becomes readable with each."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # without this pipe a signal between the look at `received` and the poll would wait for the next event
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # SIGQUIT also where it was ignored: a shell ignores it for what it runs in the background
    for number in (*_heeded(), END_AT_ONCE, signal.SIGCHLD):
        signal.signal(number, note)
    return reader, received


def _temporary_folder() -> str | None:
    """Return a new temporary folder; None where none can be made, as on a read-only system."""
    with contextlib.suppress(OSError):  # what needs no temporary file runs all the same
        if len(tempfile.gettempdir()) <= LONGEST_TMPDIR:
            return tempfile.mkdtemp(prefix="megatron-")
    return None


def adopt_orphans(value: int = 1) -> int:
    """Become the parent of descendants whose parent ends, so that they are found; 0: no longer. Linux only.

    Returns the previous value.
    """
    previous = ctypes.c_int()
    if sys.platform.startswith("linux"):
        # of the C library: Python's os module has no such function
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(previous), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)
    return previous.value


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Adopt orphans until the block ends."""
    previous = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(previous)


def processes_below(pid: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid for process in psutil.Process(pid).children(recursive=True)}
    return set()


def end_processes(below: int, spared: Collection[int] = (), spared_sessions: Collection[int] = ()) -> list[int]:
    """Kill the descendants of a process, whatever their groups and sessions; return those that survive.

    One that starts another in the meantime is looked for again. `spared`, and all of some sessions: descendants to
    leave alive.
    """
    import psutil

    deadline_s = time.monotonic() + KILL_S
    while True:
        left = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(below).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    if spared_sessions and os.getsid(process.pid) in spared_sessions:
                        continue
                    if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    # not a zombie: it has ended, and stays until its parent waits for it
                    left.append(process.pid)
                    process.kill()
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(LOOK_S)


# ---------------------------------------------------------------------------------------------------------------------
# Memory of an agent, in which the ranks keep copies of their state: a folder that outlives them, but not the agent.
#
# It is the user's alone, and removed with the temporary folder. Where agent and owner were both killed, the next agent
# of this user on the host removes it: a live one has its folder locked.


def memory_of(folder: str) -> Path:
    """Return the folder in memory that belongs to a temporary one."""
    return MEMORY / f"{MEMORY_PREFIX}{Path(folder).name}"


def open_memory() -> Path | None:
    """Make the folder of this process, locked until it ends; None where the host has no memory for files."""
    if not MEMORY.is_dir() or tempfile.tempdir is None:
        return None
    remove_stale_memory()
    path = memory_of(tempfile.tempdir)
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(OSError):  # a rank that needs it says that there is none
            path.mkdir(mode=0o700)
            # held to the end of the process, and by no program that it starts
            if _locked(path) is not None:
                return path
        # another agent took it for one without an owner, before it was locked, and removes it
        time.sleep(LOOK_S)
    return None


def remove_stale_memory() -> None:
    """Remove the folders of this user whose agents have ended without it."""
    for path in MEMORY.glob(f"{MEMORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Lock a folder, as long as the descriptor that is returned is open; None: it is locked, or there no longer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
