"""What a launcher owes the processes it starts: signals are theirs to heed, and none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def noted_signals(numbers: Iterable[signal.Signals]) -> Iterator[deque[int]]:
    """Collects these signals, except what is ignored already (nohup, a job in the background).

    Outside the main thread, where Python installs no handlers, it collects none.
    """
    received: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {
        number: signal.signal(number, note)
        for number in numbers
        if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            # None: a handler that C code installed; Python cannot put it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """What a new process does so that it gets this signal when we are killed. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, number)


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, whatever their process groups and sessions."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
