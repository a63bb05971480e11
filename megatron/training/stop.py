"""When a run ends before its last iteration: the kill switch, a signal, the exit interval.

No rank decides alone. Only rank 0's view counts, and it is broadcast once a step, so all ranks leave after the same
step. (Were each rank to look for the kill switch itself, a lag of a shared file system would leave some of them waiting
in a collective for those that left.)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from megatron.config import TrainingConfig

# What is broadcast, one small int: signal numbers end at 64.
GO_ON = 0
KILL_SWITCH = 100

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal's Ctrl-C reaches the ranks directly and once more through their launcher: that is one request.
REPEAT_S = 1.0


class StopDecision:
    """Asks once a step whether all ranks stop now. A context manager: signals are heeded inside it.

    A first SIGTERM or SIGINT lets the step finish; the same signal again, `REPEAT_S` or more later, ends the process at
    once. Every rank must enter, or a signal would tear it out of a step that the others finish. Launchers signal all
    their ranks, rank 0 included; a signal to another rank alone changes nothing.

    `broadcast` returns rank 0's code on every rank; it is called once by `before_start` and once by each `after_step`.
    `decides`: whether this is rank 0. What the others see is not looked at.
    """

    def __init__(self, training: TrainingConfig, *, broadcast: Callable[[int], int], decides: bool = True):
        self._kill_switch_path = training.kill_switch_path
        self._exit_interval = training.exit_interval
        self._broadcast = broadcast
        self._decides = decides
        self._first_signal = GO_ON
        self._received_s: dict[int, float] = {}
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopDecision:
        # Python runs signal handlers in the main thread only, and refuses to install them elsewhere
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                # a job that the shell started in the background ignores SIGINT; let it
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            # None: a handler that C code installed; Python cannot put it back
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if signum not in self._received_s:
            self._received_s[signum] = now_s
            self._first_signal = self._first_signal or signum
        elif now_s - self._received_s[signum] >= REPEAT_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def before_start(self) -> str | None:
        """Why no training should begin, or None. Call it on every rank, before the model is built."""
        if self._agree() == KILL_SWITCH:
            return f"Detected kill switch at {self._kill_switch_path} before the first iteration. Exiting"
        return None

    def after_step(self, iteration: int, consumed_samples: int) -> str | None:
        """Why all ranks stop after `iteration`, or None: the same on every rank."""
        code = self._agree()
        if code == KILL_SWITCH:
            return f"Detected kill switch at {self._kill_switch_path}, iteration={iteration}. Exiting"
        where = f"iteration={iteration}, consumed_samples={consumed_samples}"
        if code != GO_ON:
            return f"Received {signal.Signals(code).name}, {where}. Exiting"
        # needs no broadcast: every rank counts alike
        if self._exit_interval and iteration % self._exit_interval == 0:
            return f"Reached exit_interval={self._exit_interval}, {where}. Exiting"
        return None

    def _agree(self) -> int:
        """Rank 0's code, on every rank."""
        code = GO_ON
        if self._decides:
            if self._kill_switch_path is not None and os.path.exists(self._kill_switch_path):
                code = KILL_SWITCH
            else:
                code = self._first_signal
        return self._broadcast(code)
