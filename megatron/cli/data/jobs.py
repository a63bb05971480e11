"""Jobs made of the flags, their progress, and how the commands for data end.

--help must be quick, so nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.cli.command import run_command
from megatron.cli.data.flags import tokenizer_folder
from megatron.runtime.commands import DONE

if TYPE_CHECKING:
    from megatron.data.prepare.block_encoder import Counts, JobInput, PreparationJob
    from megatron.data.prepare.rows import RowsJob
    from megatron.data.read.sources import InputListing

FLAG_OF = {
    "inputs": "input",
    "tokenizer": "tokenizer_model",
    "resume_interval_s": "resume_interval",
    "keys": "json_keys",
}
"""Field of a job -> name of its flag, where they differ."""

Job = TypeVar("Job", bound="PreparationJob")
Rows = TypeVar("Rows", bound="RowsJob")
Totals = TypeVar("Totals")


def job_of(kind: type[Job], arguments: argparse.Namespace, **values: Any) -> Job:
    """Return a job with the values of the flags named as its fields, and further ones. Raises DataError."""
    given = {**vars(arguments), **values}
    for field in fields(kind):
        flag = FLAG_OF.get(field.name, field.name)
        # what the command gives as a field comes before the flag of that name
        if field.name not in values and flag in given:
            # a job is frozen, so a list becomes a tuple
            value = given[flag]
            if flag == "tokenizer_model":
                value = tokenizer_folder(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    # samples may be shown without any output
    values["output_prefix"] = values["output_prefix"] or ""
    return kind(**values)


class ProgressReport:
    """A bar on a terminal, elsewhere a line every `log_interval` documents, or none. On stderr."""

    def __init__(self, log_interval: int | None = None):
        self._log_interval = log_interval
        self._is_done = False

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def describe(self, listing: InputListing) -> None:
        if self._log_interval is not None:
            self.note(listing.describe())

    def start(self, num_bytes: int | None, counts: Counts) -> None:
        from tqdm import tqdm

        # not 0 after --resume: rates are those of this run alone
        self._started_bytes, self._started_documents = counts.num_bytes, counts.num_documents
        self._started_s = time.monotonic()
        self._set_next_line(counts)
        self._bar = tqdm(
            total=num_bytes,
            initial=counts.num_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1000,
            smoothing=0.1,
            disable=not sys.stderr.isatty(),
            leave=False,
        )

    def _set_next_line(self, counts: Counts) -> None:
        interval = self._log_interval or sys.maxsize
        # the next multiple, since blocks of documents may pass over one
        self._next_line = counts.num_documents // interval * interval + interval

    def show(self, counts: Counts) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{counts.num_documents} documents", refresh=False)
            self._bar.update(counts.num_bytes - self._bar.n)
        elif counts.num_documents >= self._next_line:
            self._print(counts)
            self._set_next_line(counts)

    def finish(self, counts: Counts) -> None:
        self.close()
        self._is_done = True
        if self._log_interval is not None:
            self._print(counts)

    def close(self) -> None:
        self._bar.close()

    def _print(self, counts: Counts) -> None:
        # the first line may come within one tick of the clock
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        num_documents = counts.num_documents - self._started_documents
        megabytes = (counts.num_bytes - self._started_bytes) / 1e6
        ends = f" in {elapsed_s:.1f} s"
        if not self._is_done and self._bar.total is not None:
            # bytes that are left / bytes a second, in MB
            left_s = (self._bar.total - counts.num_bytes) / 1e6 / max(megabytes / elapsed_s, 1e-9)
            ends = f", {max(0, left_s):.0f} s left"
        print(
            f"{counts.num_documents} documents, {num_documents / elapsed_s:.0f} docs/s, "
            f"{megabytes / elapsed_s:.2f} MB/s{ends}",
            file=sys.stderr,
            flush=True,
        )


def print_table(rows: Sequence[tuple[str, str]], counts: dict[str, int]) -> None:
    """Print named values, and those of the counts that are not 0."""
    rows = [*rows, *((name, f"{count:,}") for name, count in counts.items() if count)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def spread(levels: dict[int, int]) -> str:
    return ", ".join(f"{percent} %: {length}" for percent, length in levels.items())


def samples_to_show(job: RowsJob, files: JobInput, count: int) -> tuple[Any, Iterator[Any]]:
    """Return the encoder of a job, and its first samples, without bad rows: named if samples run short.

    Raises DataError, also while the samples are read if there are none.
    """
    from megatron.data.prepare.rows import first_samples

    # bad rows are passed over here, and named by `note` if samples run short
    rows = replace(job, bad_rows="skip").encoder()
    return rows, first_samples(rows, files, count, ProgressReport().note)


def prepare_rows(
    job: Rows,
    num_shown: int,
    show: Callable[[Rows, JobInput, int], None],
    preprocess: Callable[[Rows, ProgressReport, JobInput], Totals],
    summarize: Callable[[Rows, Totals, float], None],
) -> None:
    """Show the first samples of a job, and where it has an output, do it. Raises DataError, OSError and Finished."""
    from megatron.data.prepare.block_encoder import find_input

    files = find_input(job)
    if num_shown:
        show(job, files, num_shown)
    if job.output_prefix:
        started_s = time.monotonic()
        totals = preprocess(job, ProgressReport(), files)
        summarize(job, totals, time.monotonic() - started_s)


def run_preparation(work: Callable[[], None], output_prefix: str | None) -> int:
    """Run a command, and return its exit status."""
    from megatron.data.prepare.pipeline import Finished
    from megatron.data.prepare.resume_state import kept_work

    prefix = output_prefix or ""
    try:
        return run_command(work, prefix, lambda: kept_work(prefix) if prefix else "")
    except Finished:
        print("nothing to resume: the datasets are finished")
        return DONE
