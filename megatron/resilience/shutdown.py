"""When a run ends before its last sample: a kill switch, a signal, a limit of time or of iterations.

No rank decides alone. Once a step each rank says what it sees, the largest counts, and all leave after the same step.
(Were each rank to act on what it sees itself, a lag of a shared file system would leave some of them waiting in a
collective for those that left.) What any rank sees counts: a scheduler may signal one rank alone, and a kill switch may
lie on the disk of one node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megatron.config.options import TrainingConfig

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext
    from megatron.planning.progress import Progress

logger = logging.getLogger(__name__)

# What a rank may see, by priority: of several reasons the largest is told. A signal is its number on top of SIGNAL.
GO_ON = 0
TIME_OVER = 1
SIGNAL = 100
KILL_SWITCH = 200  # above all others: it also keeps the next start from training, so it must be known

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
# One request may come as several signals: a terminal's Ctrl-C reaches the ranks of torchrun or DeepSpeed directly and
# once more, at once or as a SIGTERM 0.1 s later, through their launcher.
REPEAT_S = 1.0
# How long a step waits for a file system to say whether the kill switch is there. A sound one answers in milliseconds.
LOOK_S = 5.0


class Signals:
    """Notes the signals that ask for a stop, from where this context is entered on. Not collective.

    The first one is noted for `Shutdown`. A second, the same or another, `REPEAT_S` or more after it ends the
    process at once, with the status 128 + n that a shell gives one that signal n killed. Not SIGXCPU: the kernel
    repeats it every second of processor time. What is ignored on entry (nohup, a job in the background) stays ignored.
    """

    def __init__(self) -> None:
        self.first = 0
        """The number of the first signal, 0 before there is one."""
        self._previous: dict[int, Any] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Signals:
        # Python runs signal handlers in the main thread only, and refuses to install them elsewhere
        if threading.current_thread() is not threading.main_thread():
            return self
        # Handlers wait while the main thread is inside C++, such as a collective whose other side hangs. The number of
        # a signal is written here at once, and read by a thread.
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is None:
            return
        for signum, handler in self._previous.items():
            # None: a handler that C code installed; Python cannot put it back
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.write(self._write_fd, b"\0")  # no signal has this number
        self._watcher.join()
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._watcher = None
        self._previous.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.first = self.first or signum

    def _watch(self) -> None:
        first_s: float | None = None
        while True:
            for signum in os.read(self._read_fd, 64):
                if signum == 0:
                    return
                if signum not in self._previous:
                    continue  # another handler's
                now_s = time.monotonic()
                if first_s is None:
                    first_s = now_s
                    self.first = self.first or signum
                elif now_s - first_s >= REPEAT_S and signum != signal.SIGXCPU:
                    end_at_once(signum)


def end_at_once(signum: int) -> None:
    rank = os.environ.get("RANK", "0")
    # past Python's buffers: the main thread may hold their locks for ever
    with contextlib.suppress(OSError):
        os.write(2, f"rank {rank}: received {signal.Signals(signum).name}, the second signal; ends at once\n".encode())
    os._exit(128 + signum)


class KillSwitch:
    """Looks for a file, without ever holding a run up for long.

    A file system that does not answer (a hard mount of a server that is down) holds the thread that asks it, in a sleep
    that nothing ends. So each look has a thread of its own. The first one that takes longer than `LOOK_S` is reported,
    and from then on none is waited for: a look counts when its answer comes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._look: threading.Thread | None = None
        self._seen = False
        self._fault: str | None = None
        self._reported = False
        self._patience_s = LOOK_S

    def is_there(self) -> bool:
        """Whether the file is there; where that cannot be told, says so once, and takes it for absent."""
        if self._look is None:
            self._fault = None
            self._look = threading.Thread(target=self._stat, name="kill switch", daemon=True)
            self._look.start()
        self._look.join(self._patience_s)
        if self._look.is_alive():
            self._report(f"no answer within {self._patience_s:g} s")
            self._patience_s = 0.0
            return False
        self._look = None
        if self._fault is not None:
            self._report(self._fault)
        return self._seen

    def _stat(self) -> None:
        try:
            os.stat(self.path)
            self._seen = True
        except (FileNotFoundError, NotADirectoryError):
            self._seen = False
        except (OSError, ValueError) as error:  # os.path.exists would call them absence
            self._seen = False
            self._fault = str(error)

    def _report(self, fault: str) -> None:
        if not self._reported:
            self._reported = True
            logger.warning(
                "rank %s on %s cannot see whether there is a kill switch at %s: %s. Training goes on, and it keeps "
                "looking; until it can see, stop the run by a signal, or by the file on another node",
                *(os.environ.get("RANK", "0"), socket.gethostname(), self.path, fault),
            )


class _Left(BaseException):
    """Leaves the block of a Shutdown."""


class Shutdown:
    """Whether all ranks stop now. A context manager: signals are heeded inside it, unless they are noted already.

    Every rank must enter, or a signal would tear it out of a step that the others finish.

    `signals`: those noted since the process began. `looks`: whether this rank looks for the kill switch; by default one
    on each node does, since each look asks the file system.
    """

    def __init__(
        self,
        training: TrainingConfig,
        ctx: ParallelContext,
        signals: Signals | None = None,
        *,
        looks: bool | None = None,
    ) -> None:
        self.reason: str | None = None
        """Why all ranks stop, once that is decided. The same on every rank."""
        self._ctx = ctx
        self._exit_interval = training.exit_interval
        self._kill_switch: KillSwitch | None = None
        if looks is None:
            looks = os.environ.get("LOCAL_RANK", "0") == "0"
        if looks and training.kill_switch_path is not None:
            self._kill_switch = KillSwitch(training.kill_switch_path)
        self._kill_switch_path = training.kill_switch_path
        self._limit_mins = training.exit_duration_in_mins
        self._limit_s = 60 * (self._limit_mins or 0.0)
        self._began_s = 0.0 if self._limit_mins is None else time.monotonic() - process_age_s()
        self._own_signals = Signals() if signals is None else None
        self._signals = signals or self._own_signals

    def __enter__(self) -> Shutdown:
        if self._own_signals is not None:
            self._own_signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._own_signals is not None:
            self._own_signals.__exit__(kind, error, trace)
        return isinstance(error, _Left)

    def exit_if_requested(self) -> None:
        """Leave the `with` block, on every rank, if any is asked to stop. Collective; for before the training."""
        if self.decide():
            if self._ctx.rank == 0:
                print(self.reason, flush=True)
            raise _Left

    def decide(self, progress: Progress | None = None) -> bool:
        """Whether all ranks stop for what any of them sees. Collective until the answer is yes, which stands."""
        if self.reason is not None:
            return True
        # the rank goes along, so that a signal to one alone can be explained; of several ranks the lowest is told
        size = self._ctx.world_size
        code, place = divmod(self._ctx.largest(self._seen() * size + size - 1 - self._ctx.rank), size)
        if code == GO_ON:
            return False
        where = "before the first iteration" if progress is None else f"iteration={progress.iteration}"
        if code == KILL_SWITCH:  # in the words of Habana's scripts, for those who look for them in logs
            self.reason = f"Detected kill switch at {self._kill_switch_path}, {where}. Exiting"
            return True
        if progress is not None:
            where += f", consumed_samples={progress.consumed_samples}"
        if code == TIME_OVER:
            self.reason = f"Reached exit_duration_in_mins={self._limit_mins:g}, {where}. Exiting"
        else:
            self.reason = f"Received {signal.Signals(code - SIGNAL).name} on rank {size - 1 - place}, {where}. Exiting"
        return True

    def check_exit_interval(self, progress: Progress) -> bool:
        """Whether all ranks stop, be it for the exit interval. Not collective: every rank counts alike."""
        if self.reason is None and self._exit_interval and progress.iteration % self._exit_interval == 0:
            self.reason = (
                f"Reached exit_interval={self._exit_interval}, iteration={progress.iteration}, "
                f"consumed_samples={progress.consumed_samples}. Exiting"
            )
        return self.reason is not None

    def _seen(self) -> int:
        """What this rank has to say."""
        if self._kill_switch is not None and self._kill_switch.is_there():
            return KILL_SWITCH
        if self._signals is not None and self._signals.first:
            return SIGNAL + self._signals.first
        # by one clock: those of the others began at other times
        is_timed = self._ctx.rank == 0 and self._limit_mins is not None
        if is_timed and time.monotonic() - self._began_s >= self._limit_s:
            return TIME_OVER
        return GO_ON


def process_age_s() -> float:
    """Since this process began."""
    import psutil

    began_s: float = psutil.Process().create_time()
    return time.time() - began_s
