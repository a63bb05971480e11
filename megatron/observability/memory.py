"""The memory log: what every rank's device and host hold, at the moments that matter and at an interval.

Peaks are since the process began. They are never reset: the number that decides over an out-of-memory is the largest
there ever was, and other readers of the allocator's counters keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron import accelerator
from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_stats import RankStats, gather_stats
from megatron.parallel.context import ParallelContext

EVENTS = ("before_model", "after_model", "after_optimizer", "after_restore", "first_step", "interval")
"""When a record is taken. `after_model` is before the optimizer; `first_step` is the first of this start."""


@dataclass(frozen=True)
class MemoryRecord:
    """What all ranks held at one moment."""

    event: str
    iteration: int
    values: dict[str, RankStats]
    """As `accelerator.memory_details` names them."""


class MemoryLog:
    """Takes the records; rank 0 prints them, and writes them to the log once that is open.

    Every rank makes one and calls every method: taking a record is collective. `interval` 0: nothing is ever taken.
    """

    def __init__(self, interval: int, ctx: ParallelContext) -> None:
        self._interval, self._ctx = interval, ctx
        self._log: MetricsLog | None = None
        self._unwritten: list[MemoryRecord] = []
        self._stepped = False

    def take(self, event: str, iteration: int) -> None:
        """Collective."""
        assert event in EVENTS
        if self._interval == 0:
            return
        values = gather_stats(accelerator.memory_details(), self._ctx)
        if self._ctx.rank != 0:
            return
        record = MemoryRecord(event, iteration, values)
        if self._log is None:
            # the folder is not open yet; but a run that dies of its memory before it is must have told
            print(memory_line(record), flush=True)
            self._unwritten.append(record)
        else:
            self._log.message(memory_line(record))
            self._log.log_memory(record.event, record.iteration, record.values)

    def open(self, log: MetricsLog) -> None:
        """From now on records go to `log`; so do those that were taken before."""
        self._log = log
        for record in self._unwritten:
            log.log_memory(record.event, record.iteration, record.values)
        self._unwritten.clear()

    def after_step(self, iteration: int) -> None:
        """Take what is due after this step. Collective."""
        if not self._stepped:
            self._stepped = True
            self.take("first_step", iteration)
        elif self._interval and iteration % self._interval == 0:
            self.take("interval", iteration)


def memory_line(record: MemoryRecord) -> str:
    """One number where all ranks have the same, else least / mean / most, and who has the most."""
    parts = [f" memory at iteration {record.iteration}, {record.event.replace('_', ' ')}"]
    for key, spread in record.values.items():
        low, mean, high = (f"{value:.3f}".removesuffix(".000") for value in (spread.min, spread.mean, spread.max))
        parts.append(f"{key}: {high}" if low == high else f"{key}: {low} / {mean} / {high} on rank {spread.max_rank}")
    return " | ".join(parts) + " |"
