"""Signals and lifetime of the processes that a launcher starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

from megatron.runtime.commands import shell_status
from megatron.runtime.files import IMPORT_ROOT


class InterruptedBySignal(SystemExit):
    """A signal requests a stop. `number`: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(shell_status(-number))
        self.number = number


@contextlib.contextmanager
def noted_signals(numbers: Iterable[signal.Signals]) -> Iterator[deque[int]]:
    """Unblock and collect these signals, except those ignored already (nohup, a job in the background).

    Collects none outside the main thread, where Python installs no handlers.
    """
    received: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = list(numbers)
    with handled_signals(numbers, note):
        if threading.current_thread() is threading.main_thread():
            # after the handlers are there: what was pending comes now
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield received


@contextlib.contextmanager
def handled_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Install a handler for these signals, except those ignored already, and restore the previous ones at the end."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {
        number: signal.signal(number, handler)
        for number in numbers
        if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, former in previous.items():
            # None: a handler that C code installed, which Python cannot restore
            signal.signal(number, signal.SIG_DFL if former is None else former)


@contextlib.contextmanager
def interruptible(numbers: Iterable[signal.Signals], received: deque[int]) -> Iterator[None]:
    """Raise InterruptedBySignal for one of these signals, which request a stop, also for one received before."""

    def interrupt(number: int, frame: FrameType | None = None) -> None:
        raise InterruptedBySignal(number)

    # one that came before the handler was installed would be heard by no one
    if received:
        interrupt(received[0])
    with handled_signals(numbers, interrupt):
        yield


@contextlib.contextmanager
def blocked_signals(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Block these signals; a process started inside inherits the mask, so none reaches it before it is ready."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for a new process to call, so that it gets this signal when its parent dies. Linux only."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    # loaded here, since little may be called between fork and exec
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, number)


def end_quietly_without_agent() -> None:
    """Let what a fork server forks end without a traceback where the agent is killed before it says what to run."""
    report_error = sys.excepthook

    def report_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, EOFError):  # by which multiprocessing reads that the agent is gone
            report_error(kind, error, trace)

    sys.excepthook = report_others


def report(text: str) -> None:
    """Print a line at once: the process may end before a buffer does."""
    print(text, file=sys.stderr, flush=True)


def python_path() -> str:
    """Return PYTHONPATH with this package's folder first, for processes that start elsewhere."""
    # without an empty part, which would stand for the current folder
    return os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def threads_per_rank(ranks_per_node: int) -> str:
    """Return OMP_NUM_THREADS for CPU ranks: torch takes every core for each, and they would compete for them."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, whatever their process groups and sessions."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        # listed before the first is killed: children of a process that has ended have another parent
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
