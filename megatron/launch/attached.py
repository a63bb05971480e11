"""A child process whose output is passed on as it comes, and signals to it: in notebooks, services and scripts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron.launch import child_processes
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import shell_status

POLL_S = 0.1
LINES_KEPT = 20


@dataclass(frozen=True)
class Ended:
    """The end of a child process."""

    status: int
    """As a shell writes it."""
    last_lines: tuple[str, ...]


def run_attached(command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> Ended:
    """Run a command to its end, copying its output to stdout, and to the end of a file.

    A signal that requests a stop goes to the command; when that has ended, it takes effect here: a Ctrl-C raises
    KeyboardInterrupt, a SIGTERM ends the process unless the caller handles it.
    """
    with child_processes.noted_signals(SIGNALS) as received:
        with child_processes.blocked_signals(SIGNALS):  # until the command handles them
            # one pipe for both streams, so that the lines stay in order
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches the ranks once, through this process
                preexec_fn=child_processes.end_with_parent(signal.SIGTERM),  # the ranks then save and end
            )
        assert process.stdout is not None
        output = _Output(process.stdout, log)
        output.start()
        first: int | None = None
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                while received:
                    number = received.popleft()
                    first = first or number
                    process.send_signal(number)
            # what was printed last is still in the pipe
            output.join()
        finally:
            # after an exception here the command and its ranks still run
            child_processes.kill_tree(process.pid)
            process.wait()
    # here the caller's handlers are in place again
    if first is not None:
        signal.raise_signal(first)
    return Ended(shell_status(process.returncode), tuple(output.last_lines))


class _Output(threading.Thread):
    """Copies what a process prints."""

    def __init__(self, lines: IO[bytes], log: Path | None) -> None:
        super().__init__(name="output", daemon=True)
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._lines = lines
        # appended: the same call made again continues the run
        self._log = None if log is None else log.open("ab")

    def run(self) -> None:
        with self._log or contextlib.nullcontext():
            for line in self._lines:
                self._copy(line)

    def _copy(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.last_lines.append(text.rstrip())
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed reader: the run goes on
            sys.stdout.write(text)
            sys.stdout.flush()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(line)
                self._log.flush()
