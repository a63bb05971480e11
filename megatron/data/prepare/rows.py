"""Preparation of rows, such as chats and pairs: processes render them by a template and tokenize them.

A worker process makes its own RowEncoder of the job, which is all that it is sent.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from megatron.data.chat.columns import looks_like_context
from megatron.data.chat.conversation import BadRow
from megatron.data.chat.tokenizer import ChatTokenizer
from megatron.data.index.indexed import DataError
from megatron.data.prepare import block_encoder, workers
from megatron.data.prepare.manifest import BlockCounts
from megatron.data.read.archives import read_blocks
from megatron.data.read.document_blocks import Block, Fault, Position, ReadingRules
from megatron.data.read.document_parser import check_unrepeated, object_of_line
from megatron.data.read.sources import ROW_KINDS, InputRules

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 20
SHOWN_BLOCK_BYTES = 1 << 16
"""Read at a time for the samples that are shown."""

BadRows = Literal["error", "skip"]
Problem = tuple[int, str, str]
"""A row that cannot be used: its number in the block, the kind of fault, and the reason."""


@dataclass(frozen=True)
class RowsJob(block_encoder.PreparationJob):
    """Everything that decides the output."""

    remedy: ClassVar[str]
    """End of the message for a row that is too long."""
    tokenizer: str
    """tokenizer.json, or its folder."""
    chat_template: str | None = field(default=None, kw_only=True)
    """Name of a preset, a .jinja file, or a .py file with CHAT_TEMPLATE; None: the tokenizer's own template."""
    append_eos: bool = field(default=True, kw_only=True)
    """Add EOS to texts, and to conversations after which the template writes nothing."""
    bad_rows: BadRows = field(default="error", kw_only=True)
    ignore_columns: tuple[str, ...] = field(default=(), kw_only=True)
    """Columns that are left out, though they look like a part of the prompt."""

    @property
    def names(self) -> InputRules:
        return InputRules(exclude=self.exclude, stdin_filename=self.stdin_filename, kinds=ROW_KINDS)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns that are read. Their values must be usable."""

    def reading_rules(self, block_bytes: int | None = None) -> ReadingRules:
        return ReadingRules(
            self.columns,
            as_rows=True,
            remedy=self.remedy,
            # the encoders are slow: a block is a task of a process, and small enough that all of them have work
            block_bytes=block_bytes or BLOCK_BYTES,
            max_documents=self.max_documents,
            goes_on=self.bad_rows == "skip",
            names=self.names,
        )

    @abstractmethod
    def encoder(self) -> RowEncoder[Any, Any, Any]:
        """Load the tokenizer and the template. Raises DataError."""


@dataclass
class RowCounts(block_encoder.Counts):
    """Numbers of rows by outcome."""

    num_rows: int = 0
    num_appended_eos: int = 0
    """Texts to whose end EOS was added."""
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be used."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Texts and options that the template leaves out of rows that are used."""
    unread: Counter[str] = field(default_factory=Counter)
    """Rows in which a column is not read, by its name."""

    def counts_apart(self, row: BadRow, place: str) -> bool:
        """Count a row that is not used though nothing is wrong with it; False if it is not such a one."""
        return False


R = TypeVar("R")
S = TypeVar("S")
K = TypeVar("K", bound=RowCounts)


class RowEncoder(block_encoder.BlockEncoder[K], Generic[R, S, K]):
    """Rows of a block to samples, by as many processes as the input is worth."""

    job: RowsJob
    free_options = ("bad_rows",)
    example: str
    """Shown for a line that is not an object."""
    command: str

    def __init__(
        self,
        job: RowsJob,
        tokenizer: ChatTokenizer,
        template: dict[str, str] | None,
        rules: dict[str, Any],
        **options: Any,
    ):
        """`template`: its name and SHA-256. `rules` and `options`: what decides the bytes of the output, of its own."""
        self.job, self.tokenizer = job, tokenizer
        self.notes = {"tokenizer": tokenizer.identity, "chat_template": template, "rules": rules}
        # a resume with other values is refused
        self.options = {
            **rules,
            **options,
            "ignore_columns": list(job.ignore_columns),
            "split": job.split,
            "bad_rows": job.bad_rows,
            "exclude": list(job.exclude),
            "max_documents": job.max_documents,
        }

    def read_from(self, files: block_encoder.JobInput) -> None:
        """Take the files of the job; a worker process has none, and is sent blocks of them."""
        self.files = files
        self.notes["input"] = files.whole.digest

    @abstractmethod
    def read(self, row: dict[str, Any], source_name: str, place: str, counts: K) -> R:
        """Return a row in one form. Raises BadRow."""

    @abstractmethod
    def encode_rows(self, rows: Sequence[R], counts: K) -> list[list[S] | BadRow]:
        """Return the samples of each row, or why there are none."""

    @abstractmethod
    def streams(self, samples: Sequence[S]) -> list[block_encoder.Stream]: ...

    def count_samples(self, samples: Sequence[S], counts: K) -> None:
        """Count what is known only of the samples."""

    def encode_batch(self, blocks: Sequence[Block]) -> block_encoder.EncodedBatch[K]:
        """Encode consecutive blocks. Raises DataError for the first bad row unless bad rows are skipped."""
        counts = self.no_counts()
        samples: list[S] = []
        of_blocks = []
        for block in blocks:
            of_block, of_rows = self.encode_block(block, counts)
            samples += of_block
            of_blocks.append(of_rows)
        self.count_samples(samples, counts)
        return block_encoder.EncodedBatch(self.streams(samples), counts, of_blocks)

    def encode_block(self, block: Block, counts: K) -> tuple[list[S], BlockCounts]:
        """Return the samples of a block, and add to the counts. Raises DataError as `encode_batch`."""
        # blank lines are no rows, and no faults
        objects, problems, num_blank = rows_of(block, self.example, self.job.columns)
        counts.num_rows += len(objects) + len(problems)
        numbers: list[int] = []
        rows: list[R] = []
        for number, row in objects:
            try:
                rows.append(self.read(row, block.source.name, block.place(number), counts))
                numbers.append(number)
            except BadRow as error:
                problems.append((number, error.kind, str(error)))
        samples: list[S] = []
        for number, result in zip(numbers, self.encode_rows(rows, counts), strict=True):
            if not isinstance(result, BadRow):
                samples += result
            elif not counts.counts_apart(result, block.place(number)):
                problems.append((number, result.kind, str(result)))
        # reading and encoding find faults by themselves
        problems.sort()
        counts.bad.update(kind for _, kind, _ in problems)
        left = block_encoder.SHOWN_FAULTS - len(counts.faults)
        faults = [str(Fault(block.place(number), reason)) for number, _, reason in problems[:left]]
        # the first fault in the order of the file, whatever the order in which they were found
        if faults and self.job.bad_rows == "error":
            raise DataError(f"{faults[0]} (or leave such rows out: tools/{self.command}.py --bad-rows skip)")
        counts.faults += faults
        return samples, BlockCounts(block.without_content(), len(samples), num_blank, 0, len(problems))

    def encode(self, start: Position) -> Generator[block_encoder.EncodedBatch[K]]:
        num_bytes = self.files.listing.num_bytes
        total_bytes = sys.maxsize  # unknown, as of a pipe
        if num_bytes is not None:
            total_bytes = num_bytes
        self.tokenizer.expected_bytes = total_bytes
        # small inputs are done before a process has loaded its tokenizer
        num_processes = min(self.job.workers, total_bytes // workers.BYTES_WORTH_A_PROCESS)
        # the job, not the encoder: tokenizers and templates cannot be pickled
        there = partial(_encode_in_worker, self.job)
        return workers.in_processes(self.encode_batch, there, self.batches(start), num_processes)


@lru_cache(maxsize=1)
def _encoder_of(job: RowsJob) -> RowEncoder[Any, Any, Any]:
    encoder = job.encoder()
    encoder.tokenizer.expected_bytes = sys.maxsize  # workers are started for large inputs only
    return encoder


def _encode_in_worker(job: RowsJob, batch: list[Block]) -> block_encoder.EncodedBatch[Any]:
    return _encoder_of(job).encode_batch(batch)


def first_samples(
    encoder: RowEncoder[Any, S, Any], files: block_encoder.JobInput, count: int, note: Callable[[str], None]
) -> Iterator[S]:
    """Yield the first samples of the input, and note the first bad rows if samples run short.

    The job of the encoder skips bad rows. Raises DataError if the input has none.
    """
    counts = encoder.no_counts()
    left = count
    for block in read_blocks(files.sources, encoder.job.reading_rules(SHOWN_BLOCK_BYTES)):
        samples, _ = encoder.encode_block(block, counts)
        yield from samples[:left]
        left -= len(samples[:left])
        if not left:
            return
    if left == count:
        if counts.faults:
            raise DataError(counts.faults[0])
        raise DataError("no row of the input can be shown; a whole run counts why")
    for fault in counts.faults:
        note(f"skipped {fault}")


def rows_of(
    block: Block, example: str, keys: Sequence[str]
) -> tuple[list[tuple[int, dict[str, Any]]], list[Problem], int]:
    """Return the numbered rows of a block, the problems (number, kind, reason) of other lines, and the blank lines.

    `example` is shown for a line that is not an object; `keys` are those whose values must be usable.
    """
    if block.fault is not None:  # unlike a bad row, it hides what follows
        return [], [(0, "unreadable", block.fault.reason)], 0
    if block.end.documents == block.begin.documents:
        return [], [], 0
    if block.rows is not None:
        return list(enumerate(_rows_of_table(block.rows, keys))), [], 0
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[Problem] = []
    num_blank = 0
    for number, line in enumerate(block.raw.split(block.delimiter)):
        if not line.strip():
            num_blank += 1
            continue
        try:
            row = object_of_line(line, example, keys)
            # of a turn given twice under one name, one would be lost in silence
            check_unrepeated(row, line, keys)
            rows.append((number, row))
        except UnicodeDecodeError as error:
            problems.append((number, "not JSON", f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            problems.append((number, "not JSON", str(error)))
    return rows, problems, num_blank


def _rows_of_table(table: pyarrow.RecordBatch, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table, without nulls in objects. Of columns that are not read, True stands for a value."""
    columns = []
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in keys or looks_like_context(name):
            columns.append(column.to_pylist())
        else:
            columns.append([is_valid or None for is_valid in column.is_valid().to_pylist()])
    rows = zip(*columns, strict=True)
    return [dict(zip(table.schema.names, map(_without_nulls, row), strict=True)) for row in rows]


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without nulls: all objects of a column have the keys of each other there."""
    if isinstance(value, dict):
        # a struct column gives each row the keys of all rows, null where a row has none
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
