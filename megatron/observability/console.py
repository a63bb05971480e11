"""Standard output of rank 0: short rows and a progress bar on a terminal, Megatron's full lines elsewhere.

train.log in the results folder receives the full lines in either case.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.observability import lines
from megatron.observability.rank_times import RankStats
from megatron.observability.step_metrics import Speed, StepMetrics, Validation
from megatron.options.config import LoggingConfig
from megatron.runtime.files import AppendFile, WriteErrors
from megatron.runtime.network import prints_to_terminal
from megatron.runtime.terminal import folded

LOG_FILE = "train.log"
HEADER_EVERY = 20
"""Rows of steps below one header."""
WIDTH = 100
"""Width of rows where stdout is not a terminal, but they are requested."""


def prints_rows(logging: LoggingConfig) -> bool:
    """Return True for short rows, False for full lines."""
    return logging.log_format == "compact" or (logging.log_format == "auto" and prints_to_terminal())


class Console:
    """Prints and keeps the lines of a run. Errors of writing are reported and do not end it."""

    def __init__(
        self, logging: LoggingConfig, errors: WriteErrors, total_iterations: int, iteration: int, loss_name: str
    ) -> None:
        self._errors, self._total_iterations, self._loss_name = errors, total_iterations, loss_name
        self._prints_rows = prints_rows(logging)
        self._label_width = lines.label_width(total_iterations)
        self._names: list[str] = []
        self._rows = 0
        self._file: AppendFile | None = None
        if logging.results_dir is not None:
            self._file = AppendFile(Path(logging.results_dir) / LOG_FILE)
        self._bar: Any = None
        if prints_to_terminal():
            from tqdm import tqdm

            # its own lock is a semaphore of processes, which is reported as leaked where a rank ends by os._exit
            tqdm.set_lock(threading.RLock())
            self._bar = tqdm(
                total=total_iterations,
                initial=iteration,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
                file=sys.stdout,
                dynamic_ncols=True,
                # the last bar would stay between the last row and the summary
                leave=False,
            )

    def step(self, step: StepMetrics, speed: Speed) -> None:
        """Print a step: one row, below a header every so many rows."""
        if self._bar is not None:
            # by the difference: a line may stand for many steps
            self._bar.update(step.iteration - self._bar.n)
        full = lines.step_line(step, speed, self._total_iterations, self._loss_name)
        self._write(full, lambda: self._step_row(step, speed))

    def _step_row(self, step: StepMetrics, speed: Speed) -> str:
        columns = lines.step_columns(step, speed, self._total_iterations, self._width)
        names = [column.name for column in columns]
        row = lines.GAP.join(column.text.rjust(column.width) for column in columns)
        # columns come and go with the width of the terminal, and with the first skipped step
        if names != self._names or self._rows == HEADER_EVERY:
            self._names, self._rows = names, 0
            row = lines.GAP.join(column.name.rjust(column.width) for column in columns) + "\n" + row
        self._rows += 1
        return row

    def validation(self, name: str, iteration: int, found: Validation) -> None:
        """Print a validation. `name`: validation or test."""
        self._write(
            lines.validation_line(name, iteration, found, self._loss_name),
            lambda: self._wrapped(lines.validation_row(found), name),
        )

    def memory(self, event: str, iteration: int, values: Mapping[str, RankStats], *, was_printed: bool) -> None:
        """Print a memory record; one that `was_printed` goes to train.log only."""
        full = lines.memory_line(event, iteration, values)
        if was_printed:
            # stdout has it from before this log was open
            self._keep(full)
        else:
            self._write(full, lambda: self._wrapped(lines.memory_row(event, values), "memory"))

    def timers(self, values: Mapping[str, RankStats]) -> None:
        """Print the time of each phase."""
        self._write(lines.timer_lines(values), lambda: self._wrapped(lines.timer_row(values), "ms"))

    def message(self, text: str) -> None:
        """Print a text of any kind."""
        self._write(text, lambda: "\n".join(self._wrapped(line) for line in text.split("\n")))

    def rewind(self, iteration: int) -> None:
        """Move the progress bar back."""
        if self._bar is not None:
            self._bar.n = iteration
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()

    @property
    def _width(self) -> int:
        return shutil.get_terminal_size((WIDTH, 24)).columns - 1  # some terminals wrap a line that fills it

    def _wrapped(self, line: str, label: str = "") -> str:
        """Return the line behind its label, if any, wrapped between words."""
        start = label and label.rjust(self._label_width) + lines.GAP
        if len(start) + len(line) <= self._width:
            return start + line
        indent = " " * (len(start) or 4)
        return folded(line, self._width, start, indent)

    def _write(self, full: str, row: Callable[[], str]) -> None:
        self._keep(full)
        with self._errors.reported("stdout"):
            text = row() if self._prints_rows else full
            if self._bar is not None:
                # clears the bar, prints, and draws it again below: a plain print would leave a part of it in the line
                self._bar.write(text, file=sys.stdout)
            else:
                print(text)
            # a launcher's pipe is block-buffered; a crash must not lose the last lines
            sys.stdout.flush()

    def _keep(self, full: str) -> None:
        if self._file is not None:
            with self._errors.reported(LOG_FILE):
                self._file.write(f"{full}\n".encode())
