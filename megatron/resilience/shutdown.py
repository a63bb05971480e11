"""End of a run before its last sample: a kill switch, a signal, a limit of time or of iterations, a callback's error.

All ranks decide together. A reduction that each step needs anyway says if a rank sees a reason. If one does, each rank
contributes its own, the largest counts, and all stop after the same step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megatron.options.config import TrainingConfig
from megatron.resilience import job

if TYPE_CHECKING:
    from megatron.options.progress import Progress
    from megatron.parallel.context import ParallelContext

logger = logging.getLogger(__name__)

# Reasons by priority: of several, the largest is reported. A signal is its number on top of SIGNAL.
GO_ON = 0
TIME_OVER = 1
ERROR = 2
SIGNAL = 100
KILL_SWITCH = 200  # above all others: it also prevents the next start from training, so it must be reported

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
# One request may come as several signals: a terminal's Ctrl-C reaches the ranks of torchrun or DeepSpeed directly and
# once more, at once or as a SIGTERM 0.1 s later, through their launcher.
REPEAT_S = 1.0
# Time that a step waits for the file system of the kill switch. A healthy one answers in milliseconds.
LOOK_S = 5.0


class Signals:
    """Receives the signals that request a stop, while this context is active. Not collective.

    `Shutdown` acts on the first one. A second one, `REPEAT_S` or more after it, ends the process at once with the
    status 128 + n of a process that signal n killed. Not SIGXCPU: the kernel repeats it every second of processor time.
    Signals that are ignored on entry (nohup, a background job) stay ignored.
    """

    def __init__(self) -> None:
        self.first = 0
        """Number of the first signal; 0: none yet."""
        self._previous: dict[int, Any] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Signals:
        # Python runs signal handlers in the main thread only, and refuses to install them elsewhere
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python's handlers do not run while the main thread is inside C++, such as a collective that hangs. The number
        # of a signal is written to this pipe at once, and a thread reads it.
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # those that came while the agent started this rank
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is None:
            return
        for signum, handler in self._previous.items():
            if handler is None:  # C code installed it, and Python cannot restore it
                handler = signal.SIG_DFL
            signal.signal(signum, handler)
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
                    continue  # it has another handler
                now_s = time.monotonic()
                if first_s is None:
                    first_s = now_s
                    self.first = self.first or signum
                    continue
                is_repeated = now_s - first_s < REPEAT_S or signum == signal.SIGXCPU
                if not is_repeated:
                    end_at_once(signum)


def end_at_once(signum: int) -> None:
    """End this process with the status of one that the signal killed."""
    rank = os.environ.get("RANK", "0")
    # not through Python's buffers: the main thread may hold their locks forever
    with contextlib.suppress(OSError):
        os.write(2, f"rank {rank}: received {signal.Signals(signum).name}, the second signal; ends at once\n".encode())
    os._exit(128 + signum)


class KillSwitch:
    """Checks for a file without blocking the run."""

    # A file system that does not answer (a hard mount of a server that is down) blocks the calling thread forever. So
    # each check has its own thread. The first one that takes longer than `LOOK_S` is reported, and later ones are not
    # waited for: their answer counts when it comes.

    def __init__(self, path: str) -> None:
        self.path = path
        self._look: threading.Thread | None = None
        self._seen = False
        self._fault: str | None = None
        self._reported = False
        self._patience_s = LOOK_S

    def is_there(self) -> bool:
        """Return True if the file exists. A failed check is reported once and counts as absence."""
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
                "rank %s on %s cannot check the kill switch %s: %s. Training continues, and each step checks again; "
                "until then, stop the run by a signal or by the file on another node",
                *(os.environ.get("RANK", "0"), socket.gethostname(), self.path, fault),
            )


class _Exit(BaseException):
    """Leaves the block of a Shutdown."""


# If each rank acted alone, a lag of a shared file system would leave some of them waiting in a collective for those
# that ended. A reason on a single rank is enough: a scheduler may signal one rank only, and a kill switch may be on the
# disk of one node.
class Shutdown:
    """Decision of all ranks to stop. A context manager that receives signals, unless `signals` does already.

    Every rank must enter it: a signal would otherwise end a rank within a step that the others finish.

    `signals`: those received since the process began.
    """

    def __init__(self, training: TrainingConfig, ctx: ParallelContext, signals: Signals | None = None) -> None:
        self.reason: str | None = None
        """Reason of the stop, once it is decided; the same on every rank."""
        self.is_error = False
        """The reason is an error, once it is decided; the same on every rank."""
        self.find_error: Callable[[], str | None] = lambda: None
        """Returns an error on this rank that is to end the run after the step."""
        self._ctx = ctx
        self._exit_interval = training.exit_interval
        self._kill_switch: KillSwitch | None = None
        # on one rank of each node, since each check queries the file system
        if os.environ.get("LOCAL_RANK", "0") == "0" and training.kill_switch_path is not None:
            self._kill_switch = KillSwitch(training.kill_switch_path)
        self._kill_switch_path = training.kill_switch_path
        self._limit_mins = training.exit_duration_in_mins
        self._limit_s = 60 * (self._limit_mins or 0.0)
        self._began_s = 0.0
        if self._limit_mins is not None:
            self._began_s = job.began_s()
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
        return isinstance(error, _Exit)

    def exit_if_requested(self) -> None:
        """Leave the `with` block on every rank if any rank has a reason to stop. Collective."""
        if self.decide():
            if self._ctx.rank == 0:
                print(self.reason, flush=True)
            raise _Exit

    def sees_reason(self) -> bool:
        """Return True if this rank has a reason to stop. Not collective."""
        return self._seen() != GO_ON

    def decide(self, progress: Progress | None = None, *, is_reason_seen: bool | None = None) -> bool:
        """Return True if any rank has a reason to stop. Collective until then; the decision is final.

        `is_reason_seen`: if some rank's `sees_reason` was true, which all ranks know already; False saves the
        collective. None: they do not know.
        """
        if self.reason is not None:
            return True
        if is_reason_seen is False and self._ctx.world_size > 1:
            return False
        # with the rank, so that a signal to a single one can be explained; of several ranks the lowest is reported
        size = self._ctx.world_size
        code, place = divmod(self._ctx.largest(self._seen() * size + size - 1 - self._ctx.rank), size)
        if code == GO_ON:
            return False
        self.is_error = code == ERROR
        self.reason = self._reason(code, size - 1 - place, progress)
        return True

    def _reason(self, code: int, rank: int, progress: Progress | None) -> str:
        """Return the reason that a rank saw, as text. Collective of an error, which its rank alone knows."""
        if code == ERROR:
            return f"rank {rank}: {self._ctx.gather_objects(self.find_error())[rank]}"
        where = "before the first iteration"
        if progress is not None:
            where = f"iteration={progress.iteration}"
        if code == KILL_SWITCH:  # the words of Habana's scripts, which users search logs for
            return f"Detected kill switch at {self._kill_switch_path}, {where}. Exiting"
        if progress is not None:
            where += f", consumed_samples={progress.consumed_samples}"
        if code == TIME_OVER:
            return f"Reached exit_duration_in_mins={self._limit_mins:g}, {where}. Exiting"
        return f"Received {signal.Signals(code - SIGNAL).name} on rank {rank}, {where}. Exiting"

    def decide_error(self) -> None:
        """Make an error on any rank the reason, in place of a request to stop. Collective."""
        errors = self._ctx.gather_objects(self.find_error())
        if not self.is_error and any(errors):
            rank = next(rank for rank, error in enumerate(errors) if error)
            self.reason, self.is_error = f"rank {rank}: {errors[rank]}", True

    def check_exit_interval(self, progress: Progress) -> bool:
        """Return True if all ranks stop, also for the exit interval. Not collective: every rank counts alike."""
        if self.reason is None and self._exit_interval and progress.iteration % self._exit_interval == 0:
            self.reason = (
                f"Reached exit_interval={self._exit_interval}, iteration={progress.iteration}, "
                f"consumed_samples={progress.consumed_samples}. Exiting"
            )
        return self.reason is not None

    def _seen(self) -> int:
        """Return the reason that this rank sees."""
        if self._kill_switch is not None and self._kill_switch.is_there():
            return KILL_SWITCH
        if self._signals is not None and self._signals.first:
            return SIGNAL + self._signals.first
        if self.find_error() is not None:
            return ERROR
        # by one clock: the other processes began at other times
        is_timed = self._ctx.rank == 0 and self._limit_mins is not None
        if is_timed and time.monotonic() - self._began_s >= self._limit_s:
            return TIME_OVER
        return GO_ON
