"""Standard output of rank 0: short rows and a progress bar on a terminal, Megatron's full lines elsewhere.

train.log in the results folder receives the full lines in either case.
"""

from __future__ import annotations

import math
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.observability.rank_times import RankStats
from megatron.observability.step_metrics import Speed, StepMetrics, Validation
from megatron.options.config import LoggingConfig
from megatron.runtime.accelerator import HOST_AVAILABLE, MAX_ALLOCATED, TOTAL
from megatron.runtime.commands import folded
from megatron.runtime.files import AppendFile, WriteErrors
from megatron.runtime.hpu_driver import TEMPERATURE, UTILISATION
from megatron.runtime.network import prints_to_terminal
from megatron.runtime.result_files import LOG_FILE

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
        self._label_width = label_width(total_iterations)
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
        full = step_line(step, speed, self._total_iterations, self._loss_name)
        self._write(full, lambda: self._step_row(step, speed))

    def _step_row(self, step: StepMetrics, speed: Speed) -> str:
        columns = step_columns(step, speed, self._total_iterations, self._width)
        names = [column.name for column in columns]
        row = GAP.join(column.text.rjust(column.width) for column in columns)
        # columns come and go with the width of the terminal, and with the first skipped step
        if names != self._names or self._rows == HEADER_EVERY:
            self._names, self._rows = names, 0
            row = GAP.join(column.name.rjust(column.width) for column in columns) + "\n" + row
        self._rows += 1
        return row

    def validation(self, name: str, iteration: int, found: Validation) -> None:
        """Print a validation. `name`: validation or test."""
        self._write(
            validation_line(name, iteration, found, self._loss_name),
            lambda: self._wrapped(validation_row(found), name),
        )

    def memory(self, event: str, iteration: int, values: Mapping[str, RankStats], *, was_printed: bool) -> None:
        """Print a memory record; one that `was_printed` goes to train.log only."""
        full = memory_line(event, iteration, values)
        if was_printed:
            # stdout has it from before this log was open
            self._keep(full)
        else:
            self._write(full, lambda: self._wrapped(memory_row(event, values), "memory"))

    def timers(self, values: Mapping[str, RankStats]) -> None:
        """Print the time of each phase."""
        self._write(timer_lines(values), lambda: self._wrapped(timer_row(values), "ms"))

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
        start = label and label.rjust(self._label_width) + GAP
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


# ---------------------------------------------------------------------------------------------------------------------
# Text of the log: Megatron's full lines, and the short rows of a terminal.

TIMER_SUFFIX = "-time"
"""End of a timer's name in rows and tags, as in Megatron's."""

# Full lines


def step_line(step: StepMetrics, speed: Speed, total_iterations: int, loss_name: str) -> str:
    """Return Megatron's log line. Its `memory (GB)` is the peak so far."""
    # Megatron's own words and order, which tools that read its logs look for
    values: list[tuple[str, str, float | None]] = [
        ("consumed samples", "12d", step.consumed_samples),
        ("consumed tokens", "12d", step.consumed_tokens),
        ("elapsed time per iteration (ms)", ".1f", step.elapsed_s * 1000),
        ("learning rate", ".3E", step.learning_rate),
        ("decoupled learning rate", ".3E", step.decoupled_learning_rate),
        ("muon learning rate", ".3E", step.muon_learning_rate),
        ("global batch size", "5d", step.global_batch_size),
        (loss_name, ".6E", step.lm_loss),
        *((name, ".6E", value) for name, value in step.metrics.items()),
        ("loss scale", ".1f", step.loss_scale),
        ("grad norm", ".3f", step.grad_norm),
        ("max attention logit", ".3f", step.max_attention_logit),
        ("number of skipped iterations", "3d", step.skipped_iterations),
        ("number of nan iterations", "3d", step.nan_iterations),
        ("samples per second", ".3f", speed.samples_per_second),
        ("tokens/s/device", ".1f", speed.tokens_per_second_per_device),
        ("TFLOP/s/device", ".4g", speed.tflops_per_device),
        ("MFU", ".1%", speed.mfu),
        ("memory (GB)", ".2f", step.memory.get(MAX_ALLOCATED)),
        ("compiled graphs", "d", step.compiled_graphs),
    ]
    parts = [f" iteration {step.iteration:8d}/{total_iterations:8d}"]
    # what this run does not have is left out
    parts += [f"{name}: {value:{form}}" for name, form, value in values if value is not None]
    if step.experts is not None:
        share, layer, expert = step.experts.largest
        parts.append(f"largest share of an expert: {share:.3f} (layer {layer}, expert {expert})")
        if step.experts.dropped is not None:
            parts.append(f"dropped tokens: {step.experts.dropped:.2%}")
    if step.straggler is not None:
        parts.append(str(step.straggler))
    return " | ".join(parts) + " |"


def validation_line(name: str, iteration: int, found: Validation, loss_name: str) -> str:
    """Return Megatron's line of a validation. `name`: validation or test."""
    parts = [f" {name} loss at iteration {iteration}", f"{loss_name} value: {found.lm_loss:.6E}"]
    if found.perplexity is not None:
        parts.append(f"{loss_name} PPL: {found.perplexity:.6E}")
    parts.append(f"{found.unit}: {found.count}")
    parts += [f"{metric}: {value:.6E}" for metric, value in found.metrics.items()]
    return " | ".join(parts) + " |"


def memory_line(event: str, iteration: int, values: Mapping[str, RankStats]) -> str:
    """Return every key as one number where all ranks have the same, else as min / mean / max and the fullest rank."""
    parts = [f" memory at iteration {iteration}, {event.replace('_', ' ')}"]
    for key, stats in values.items():
        low, mean, high = (f"{value:.3f}".removesuffix(".000") for value in (stats.min, stats.mean, stats.max))
        # as printed: smaller differences say nothing
        if low == high:
            parts.append(f"{key}: {high}")
        else:
            parts.append(f"{key}: {low} / {mean} / {high} on rank {stats.max_rank}")
    return " | ".join(parts) + " |"


def timer_lines(timers: Mapping[str, RankStats]) -> str:
    """Return Megatron's table of the timers."""
    names = [(name.removesuffix(TIMER_SUFFIX) + " ").ljust(48, ".") for name in timers]
    rows = [
        f"    {name}: ({stats.min * 1e3:.2f}, {stats.max * 1e3:.2f})"
        for name, stats in zip(names, timers.values(), strict=True)
    ]
    return "\n".join(["(min, max) time across ranks (ms):", *rows])


# Rows of a terminal

GAP = "  "
SHORT_NAMES = {"load_balancing_loss": "balance", "router_z_loss": "z-loss"}
"""Names of columns, where those of the metrics are wider than their numbers."""


class Column(NamedTuple):
    """A value of a row, right-aligned below its name."""

    name: str
    text: str
    least_width: int
    rank: int = 0
    """Columns of the highest rank are left out first where the terminal is narrow; those of rank 0 never."""

    @property
    def width(self) -> int:
        return max(self.least_width, len(self.name), len(self.text))


def _rate_columns(step: StepMetrics) -> list[Column]:
    columns = [Column("lr", f"{step.learning_rate:.2e}", 8, 1)]
    if step.decoupled_learning_rate is not None:
        columns.append(Column("dec. lr", f"{step.decoupled_learning_rate:.2e}", 8, 3))
    return columns


def step_columns(step: StepMetrics, speed: Speed, total_iterations: int, width: int) -> list[Column]:
    """Return the columns of a step that fit into a terminal of `width`."""
    # validations and saves to come are not in it
    left_s = (total_iterations - step.iteration) * step.elapsed_s
    grad_norm, digits = "-", 1
    if step.grad_norm is not None:
        grad_norm = f"{step.grad_norm:.3f}"
    # of a few, as on a CPU, one digit would say little
    if speed.tflops_per_device < 100:
        digits = 3
    efficiency = Column("TFLOP/s", f"{speed.tflops_per_device:.{digits}f}", 7, 7)
    if speed.mfu is not None:
        efficiency = Column("MFU", f"{speed.mfu:.1%}", 6, 7)
    columns = [
        Column("iteration", f"{step.iteration}/{total_iterations}", label_width(total_iterations)),
        Column("loss", f"{step.lm_loss:.4f}", 7),
        *(Column(SHORT_NAMES.get(name, name), f"{value:.4g}", 8, 4) for name, value in step.metrics.items()),
        *_rate_columns(step),
        Column("grad norm", grad_norm, 9, 2),
        Column("tokens/s", f"{speed.tokens_per_second:,.0f}", 9, 5),
        efficiency,
        Column("mem GB", f"{step.memory.get(MAX_ALLOCATED, math.nan):.2f}", 6, 8),
        Column("ETA", _duration(left_s), 8, 6),
    ]
    if step.skipped_iterations or step.nan_iterations:
        columns.append(Column("skip/nan", f"{step.skipped_iterations}/{step.nan_iterations}", 0, 3))
    if step.straggler is not None:
        slowest = f"rank {step.straggler.slowest_rank} {step.straggler.slowest_ratio:.2f}x"
        columns.append(Column("slowest", slowest, 14, 3))
    if step.experts is not None:
        share, layer, expert = step.experts.largest
        columns.append(Column("top expert", f"{share:.0%} L{layer} E{expert}", 12, 3))
        if step.experts.dropped is not None:
            columns.append(Column("dropped", f"{step.experts.dropped:.1%}", 7, 3))
    # of equal ranks the last first
    while sum(column.width for column in columns) + len(GAP) * (len(columns) - 1) > width:
        last = max(reversed(columns), key=lambda column: column.rank)
        if last.rank == 0:
            break
        columns.remove(last)
    return columns


def label_width(total_iterations: int) -> int:
    """Return the width of the first column: the iteration of a step, or the label of another row."""
    return max(2 * len(str(total_iterations)) + 1, len("validation"))


def validation_row(found: Validation) -> str:
    """Return the text of a validation behind its label; the loss is below those of the steps."""
    parts = []
    if found.perplexity is not None:
        parts.append(f"perplexity {found.perplexity:.4g}")
    parts += [f"{metric} {value:.4g}" for metric, value in found.metrics.items()]
    return f"{found.lm_loss:7.4f}{GAP}{', '.join([*parts, f'{found.count:,} {found.unit}'])}"


def memory_row(event: str, values: Mapping[str, RankStats]) -> str:
    """Return the text of a memory record behind its label: the fullest rank, the host with the least left.

    Where it is known, how busy the Gaudis are, and the hottest.
    """
    peak, total, free = values[MAX_ALLOCATED], values[TOTAL], values[HOST_AVAILABLE]
    on_rank = f"peak {peak.max:.2f} of {total.max:.2f} GB on rank {peak.max_rank}"
    row = f"{event.replace('_', ' ')}: {on_rank}; host {free.min:.1f} GB free"
    if (busy := values.get(UTILISATION)) is not None:
        row += f"; {busy.min:.0f}-{busy.max:.0f} % busy"
    if (heat := values.get(TEMPERATURE)) is not None:
        row += f", {heat.max:.0f} C on rank {heat.max_rank}"
    return row


def timer_row(timers: Mapping[str, RankStats]) -> str:
    """Return the timers of the slowest rank behind their label."""
    return " ".join(f"{name.removesuffix(TIMER_SUFFIX)} {stats.max * 1e3:.1f}" for name, stats in timers.items())


def _duration(seconds: float) -> str:
    """Return h:mm:ss; - if it is not known."""
    if not 0 <= seconds < 1e9:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
