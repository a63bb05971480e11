"""Memory log: the device and host memory of every rank while the run starts, after its first step and at an interval.

Peaks are since the process began and never reset: the largest one decides over an out-of-memory error, and other
readers of the allocator's counters keep theirs.
"""

from __future__ import annotations

from megatron.observability.console import GAP, label_width, memory_line, memory_row, prints_rows
from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import RankStats, gather_stats
from megatron.options.config import LoggingConfig
from megatron.parallel.context import ParallelContext
from megatron.runtime import accelerator

EVENTS = ("before_model", "after_model", "after_optimizer", "after_restore", "first_step", "interval")
"""Times of a record. `after_model` is before the optimizer; `first_step` is the first of this start."""


class MemoryLog:
    """Takes the records; rank 0 prints them, and writes them to the log once it is open.

    Every rank makes one and calls every method: taking a record is collective. log_memory_interval=0: no records.
    """

    def __init__(self, options: LoggingConfig, ctx: ParallelContext) -> None:
        self._interval, self._ctx = options.log_memory_interval, ctx
        self._prints_rows = prints_rows(options)
        self._log: MetricsLog | None = None
        self._unwritten: list[tuple[str, int, dict[str, RankStats]]] = []
        self._stepped = False

    def take(self, event: str, iteration: int) -> None:
        """Record the memory of all ranks. Collective."""
        assert event in EVENTS
        if self._interval == 0:
            return
        numbers = accelerator.memory_details() | accelerator.current().health()
        # over the host's network: a record of memory must not wait for what the device computes
        values = gather_stats(numbers, self._ctx)
        if self._ctx.rank != 0:
            return
        if self._log is not None:
            self._log.log_memory(event, iteration, values)
            return
        # the log is not open yet; a run that then dies of its memory must have printed this
        if self._prints_rows:
            print("memory".rjust(label_width(0)) + GAP + memory_row(event, values), flush=True)
        else:
            print(memory_line(event, iteration, values), flush=True)
        self._unwritten.append((event, iteration, values))

    def open(self, log: MetricsLog) -> None:
        """Write all records to `log` from here on, and those taken before."""
        self._log = log
        for event, iteration, values in self._unwritten:
            log.log_memory(event, iteration, values, was_printed=True)
        self._unwritten.clear()

    def after_step(self, iteration: int) -> None:
        """Take the record that is due after this step, if any. Collective."""
        # the first step of this start has allocated the optimizer's states and the buffers of a step
        if not self._stepped:
            self._stepped = True
            self.take("first_step", iteration)
        elif self._interval and iteration % self._interval == 0:
            self.take("interval", iteration)
