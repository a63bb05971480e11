"""Text to an indexed dataset: PREFIX_KEY_document.bin and .idx, ready for --data-path PREFIX_KEY_document.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 4

Threads parse and encode blocks of documents while the main thread writes them in order; a bounded number is on the way,
so memory does not grow with the input. The files get their names only when all of them are whole. What a killed or
failed run has done is kept in PREFIX.unfinished/, and --resume goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.cli.command import run_command
from megatron.cli.text_flags import (
    add_input_flags,
    add_tokenizer_flags,
    check_input_flags,
    find_input,
    separator,
    tokenizer_of,
)
from megatron.command_names import command_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron.data.document_blocks import Block, Fault, Position
    from megatron.data.document_parser import Parsed
    from megatron.data.indexed_builder import IndexedDatasetBuilder
    from megatron.data.resume_state import State, UnfinishedWork
    from megatron.data.sources import SourceFile
    from megatron.data.tokenizers.base import Tokenizer

A = TypeVar("A")
B = TypeVar("B")

BLOCKS_AHEAD = 2
"""Blocks read beyond those being encoded."""
SHOWN_FAULTS = 10
PROOF_SOURCES = 16
"""Files of which the beginning is encoded twice before the accelerated tokenizer is trusted."""
PROOF_CHARACTERS = 1 << 15
SPOT_CHARACTERS = 1 << 9
"""What is encoded twice of every block after that."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("preprocess_data"),
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, Megatron's indexed format.",
        allow_abbrev=False,
    )
    source = add_input_flags(parser, "keys or columns to extract, a dataset each (default: text)")
    source.add_argument(
        "--max-document-mb", type=int, default=64, metavar="N", help="a longer document is a bad one (default: 64)"
    )
    tokenizer = add_tokenizer_flags(parser, required=True)
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    tokenizer.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="special tokens written out in a document get their ids (default: they stay text)",
    )
    tokenizer.add_argument(
        "--reference-tokenizer",
        action="store_true",
        help="do without the accelerated tokenizer, whose ids are checked against the reference's on a sample",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX_KEY_document.bin, .idx, .sha256"
    )
    output.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: all cores)"
    )
    output.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="order documents as Megatron's N partitions do: every Nth from the first, every Nth from the second, ...",
    )
    output.add_argument(
        "--keep-sequential-samples", action="store_true", help="keep the order of the input, whatever --partitions says"
    )
    output.add_argument("--dataset-impl", choices=("mmap",), default="mmap", help="Megatron's; only mmap is written")
    output.add_argument("--log-interval", type=int, default=10000, metavar="N", help="documents between progress lines")
    output.add_argument("--resume", action="store_true", help="go on with what an earlier run left unfinished")
    output.add_argument(
        "--resume-interval",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time between two moments that --resume can go on from (default: 20)",
    )
    arguments = parser.parse_args(argv)
    for name in ("workers", "log_interval", "partitions", "max_document_mb"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not arguments.resume_interval >= 0:
        parser.error("--resume-interval must not be negative")
    check_input_flags(parser, arguments)
    return arguments


@dataclass
class Stream:
    """Documents laid end to end, and the length of each."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]


@dataclass
class Totals:
    """What came of the input so far."""

    num_bytes: int = 0
    num_documents: int = 0
    num_blank: int = 0
    num_bad: int = 0
    num_empty: list[int] = field(default_factory=list)
    """For each key, documents that gave no token."""

    def add(self, other: Totals) -> None:
        self.num_bytes += other.num_bytes
        self.num_documents += other.num_documents
        self.num_blank += other.num_blank
        self.num_bad += other.num_bad
        self.num_empty = [a + b for a, b in zip(self.num_empty, other.num_empty, strict=True)]


@dataclass
class Encoded:
    """A block after the tokenizer."""

    end: Position
    streams: list[Stream]
    """For each key, one for each partition."""
    totals: Totals
    faults: list[Fault]


@dataclass(frozen=True)
class Encoder:
    """Blocks of documents to tokens. Used by several threads at once."""

    keys: tuple[str, ...]
    num_partitions: int
    eod: int | None
    """What each document is ended with."""
    dtype: Any
    tokenizer: Tokenizer
    reference: Tokenizer | None
    """What the tokenizer must agree with. None: it is the reference itself."""

    def encode(self, block: Block) -> Encoded:
        """A document without a token is counted as empty and left out, its eod too. Raises NotAccelerated."""
        from megatron.data.document_parser import parse

        parsed = parse(block, self.keys)
        try:
            streams, num_empty = self._encode_columns(block, parsed)
        except MemoryError:
            raise
        except Exception:  # of whatever kind the tokenizer's library raises: find the document it refuses
            self._sift(block, parsed)
            streams, num_empty = self._encode_columns(block, parsed)
        if self.reference is not None and parsed.numbers:
            self._check_spot(self.reference, block, parsed)
        totals = Totals(block.num_input_bytes, len(parsed.numbers), parsed.num_blank, len(parsed.faults), num_empty)
        return Encoded(block.end, streams, totals, parsed.faults)

    def _encode_columns(self, block: Block, parsed: Parsed) -> tuple[list[Stream], list[int]]:
        streams: list[Stream] = []
        num_empty: list[int] = []
        for texts in parsed.columns:
            before = len(streams)
            if self.num_partitions == 1:
                streams.append(self._encode_texts(texts))
            else:
                first = block.begin.documents
                partitions = [(first + number) % self.num_partitions for number in parsed.numbers]
                for wanted in range(self.num_partitions):
                    chosen = [text for text, partition in zip(texts, partitions, strict=True) if partition == wanted]
                    streams.append(self._encode_texts(chosen))
            num_empty.append(len(texts) - sum(len(stream.lengths) for stream in streams[before:]))
        return streams, num_empty

    def _encode_texts(self, texts: list[str]) -> Stream:
        import numpy as np

        ids, lengths = self.tokenizer.encode_batch(texts)
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise AssertionError(f"the tokenizer gave id {ids.max()} of a vocabulary of {self.tokenizer.vocab_size}")
        tokens = ids.astype(self.dtype)
        lengths = lengths[lengths > 0]
        if self.eod is not None:
            tokens = np.insert(tokens, np.cumsum(lengths), self.eod)
            # counted where it is written
            lengths = lengths + 1
        return Stream(tokens, lengths)

    def _sift(self, block: Block, parsed: Parsed) -> None:
        """Move the documents that the tokenizer refuses to the faults."""
        from megatron.data.document_blocks import Fault

        kept = []
        for row, number in enumerate(parsed.numbers):
            try:
                for texts in parsed.columns:
                    self.tokenizer.encode(texts[row])
            except Exception as error:
                parsed.faults.append(Fault(block.place(number), str(error)))
            else:
                kept.append(row)
        parsed.numbers = [parsed.numbers[row] for row in kept]
        parsed.columns = [[texts[row] for row in kept] for texts in parsed.columns]

    def _check_spot(self, reference: Tokenizer, block: Block, parsed: Parsed) -> None:
        from megatron.data.tokenizers.acceleration import check_equal

        row = block.begin.documents % len(parsed.numbers)
        text = parsed.columns[0][row]
        start = block.begin.offset % max(1, len(text) - SPOT_CHARACTERS)
        check_equal(self.tokenizer, reference, [text[start : start + SPOT_CHARACTERS]])


def map_in_order(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A], ahead: int) -> Generator[B]:
    """`pool.map` that never holds more than `ahead` items at once."""
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


class ProgressReport:
    """A bar on a terminal, elsewhere a line every log_interval documents. On stderr."""

    def __init__(self, num_bytes: int, done: Totals, log_interval: int):
        from tqdm import tqdm

        self._log_interval = log_interval
        self._begun = Totals(**asdict(done))
        self._next_line = done.num_documents + log_interval
        self._started_s = time.monotonic()
        self._bar = tqdm(
            total=num_bytes,
            initial=done.num_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1000,
            smoothing=0.1,
            disable=not sys.stderr.isatty(),
            leave=False,
        )

    def show(self, totals: Totals) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{totals.num_documents} documents", refresh=False)
            self._bar.update(totals.num_bytes - self._bar.n)
        elif totals.num_documents >= self._next_line:
            self._print(totals)
            self._next_line = totals.num_documents // self._log_interval * self._log_interval + self._log_interval

    def finish(self, totals: Totals) -> None:
        self.close()
        self._print(totals)

    def close(self) -> None:
        self._bar.close()

    def _print(self, totals: Totals) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        num_documents = totals.num_documents - self._begun.num_documents
        megabytes = (totals.num_bytes - self._begun.num_bytes) / 1e6
        left_s = (self._bar.total - totals.num_bytes) / 1e6 / max(megabytes / elapsed_s, 1e-9)
        ends = f", {left_s:.0f} s left" if totals.num_bytes < self._bar.total else f" in {elapsed_s:.1f} s"
        print(
            f"{totals.num_documents} documents, {num_documents / elapsed_s:.0f} docs/s, "
            f"{megabytes / elapsed_s:.2f} MB/s{ends}",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Job:
    """The whole command, once its files are found and its tokenizer is built."""

    arguments: argparse.Namespace
    sources: list[SourceFile]
    tokenizer: Tokenizer
    """The reference."""
    eod: int | None
    """What --append-eod appends. None: nothing."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.arguments.json_keys)

    @property
    def separator(self) -> str | None:
        return separator(self.arguments)

    @property
    def num_partitions(self) -> int:
        return 1 if self.arguments.keep_sequential_samples else self.arguments.partitions

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.arguments.output_prefix}_{key}_document" for key in self.keys]

    @property
    def dtype(self) -> Any:
        from megatron.data.indexed import best_dtype

        return best_dtype(self.tokenizer.vocab_size)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what is written, apart from the input's content."""
        return {
            "--json-keys": list(self.keys),
            "--partitions": self.num_partitions,
            "--document-separator": self.separator,
            "--append-eod": self.eod is not None,
            "the tokenizer": self.tokenizer.identity,
        }

    @property
    def notes(self) -> dict[str, Any]:
        """What PREFIX.sha256 tells of the dataset."""
        inputs = [[source.path.name, source.path.stat().st_size] for source in self.sources]
        return {"tokenizer": self.tokenizer.identity, "append_eod": self.eod is not None, "input": digest(inputs)}

    def blocks(self, start: Position, tokenizer: Tokenizer) -> Iterator[Block]:
        from megatron.data.document_blocks import read_blocks

        return read_blocks(
            self.sources,
            self.keys,
            separator=self.separator,
            start=start,
            largest_document_bytes=self.arguments.max_document_mb << 20,
            block_bytes=tokenizer.batch_bytes,
            goes_on=self.arguments.on_bad_line == "skip",
        )


def digest(value: Any) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def prepare(arguments: argparse.Namespace) -> Job:
    """Find every file and build the tokenizer. Raises DataError."""
    from megatron.data.indexed import DataError

    sources = find_input(arguments)
    if len(arguments.json_keys) > 1 and any(source.kind == "text" for source in sources):
        raise DataError(f"--json-keys {' '.join(arguments.json_keys)}: text files have no keys; give JSONL, or one key")
    tokenizer = tokenizer_of(arguments, parse_special_tokens=arguments.parse_special_tokens)
    if arguments.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: this tokenizer has no end-of-document token; name it with --eod-token")
    return Job(arguments, sources, tokenizer, tokenizer.eod if arguments.append_eod else None)


def accelerated(job: Job) -> Tokenizer:
    """The fast tokenizer, if it agrees with the reference on the beginnings of the files. Raises NotAccelerated."""
    from megatron.data.document_blocks import read_blocks
    from megatron.data.document_parser import parse
    from megatron.data.tokenizers.acceleration import accelerate, check_equal

    fast = accelerate(job.tokenizer)
    step = max(1, len(job.sources) // PROOF_SOURCES)
    for source in job.sources[::step][:PROOF_SOURCES]:
        blocks = read_blocks([source], job.keys, separator=job.separator)
        first = next(blocks, None)  # None: nothing in it
        left = PROOF_CHARACTERS
        for text in parse(first, job.keys).columns[0] if first else ():
            check_equal(fast, job.tokenizer, [text[:left]])
            left -= len(text)
            if left <= 0:
                break
    return fast


class Datasets:
    """The datasets being built, and what it takes to go on with them after a kill."""

    def __init__(self, job: Job, work: UnfinishedWork, saved: State | None):
        """Empty ones, or those of `saved`. Raises DataError."""
        from megatron.data.document_blocks import Position
        from megatron.data.indexed_builder import IndexedDatasetBuilder, is_open

        self._job, self._work = job, work
        self.is_complete = saved is not None and saved.is_complete
        """Whether all input is in."""
        self.totals = Totals(**saved.totals) if saved else Totals(num_empty=[0] * len(job.keys))
        self.position = saved.position if saved else Position()
        """Where in the input to go on."""
        self._builders: list[IndexedDatasetBuilder] = []
        self._unsealed: list[tuple[IndexedDatasetBuilder, ...]] = []
        """For each dataset that is not sealed yet, the builders of its partitions."""
        for k, prefix in enumerate(job.prefixes):
            folders = [work.work_dir(f"{k}.{p}") for p in range(job.num_partitions)]
            if self.is_complete and not is_open(folders[0]):
                continue  # sealed by the run that was killed, or even published
            partitions = []
            for folder in folders:
                if saved is None:
                    builder = IndexedDatasetBuilder(prefix, job.dtype, notes=job.notes, work_dir=folder)
                else:
                    state = saved.builders[folder.name]
                    builder = IndexedDatasetBuilder.resume(prefix, job.dtype, state, notes=job.notes, work_dir=folder)
                partitions.append(builder)
            self._unsealed.append(tuple(partitions))
            self._builders += partitions

    def add(self, block: Encoded) -> None:
        for builder, stream in zip(self._builders, block.streams, strict=True):
            builder.add_documents(stream.tokens, stream.lengths)
        self.totals.add(block.totals)
        self.position = block.end

    def save(self) -> None:
        """Make what was added so far something that a later run can go on from."""
        from megatron.data.resume_state import State

        states = {builder.work_dir.name: builder.save_state() for builder in self._builders}
        self._work.save(State(self.position, self.is_complete, asdict(self.totals), states))

    def finish(self) -> None:
        """Give every dataset its name. Raises DataError for a key under which there was no text at all."""
        from megatron.data.indexed_builder import publish

        if not self.is_complete:
            self._check_not_empty()
            self.is_complete = True
            self.save()
        for first, *others in self._unsealed:
            for other in others:
                first.absorb(other)
            first.seal()
        for k, prefix in enumerate(self._job.prefixes):
            publish(self._work.work_dir(f"{k}.0"), prefix)

    def _check_not_empty(self) -> None:
        from megatron.data.indexed import DataError

        totals = self.totals
        for key, partitions, num_empty in zip(self._job.keys, self._unsealed, totals.num_empty, strict=True):
            if not any(builder.num_tokens for builder in partitions):
                raise DataError(
                    f"no text under key {key!r} in {len(self._job.sources)} files: {num_empty} empty, "
                    f"{totals.num_blank} blank, {totals.num_bad} bad; give text that is not empty"
                )


def encode_input(job: Job, work: UnfinishedWork, datasets: Datasets, tokenizer: Tokenizer) -> None:
    """Add what is left of the input to the datasets.

    Raises DataError at the first fault unless they are to be skipped, and NotAccelerated.
    """
    from megatron.data.document_parser import bad_line_error
    from megatron.data.indexed import DataError

    arguments, totals = job.arguments, datasets.totals
    reference = None if tokenizer is job.tokenizer else job.tokenizer
    encoder = Encoder(job.keys, job.num_partitions, job.eod, job.dtype, tokenizer, reference)
    report = ProgressReport(sum(source.path.stat().st_size for source in job.sources), totals, arguments.log_interval)
    saved_s = time.monotonic()
    with ThreadPoolExecutor(arguments.workers, thread_name_prefix="encode") as pool:
        encoded = map_in_order(
            pool, encoder.encode, job.blocks(datasets.position, tokenizer), arguments.workers + BLOCKS_AHEAD
        )
        try:
            for block in encoded:
                if block.faults and arguments.on_bad_line == "fail":
                    raise bad_line_error(block.faults[0])
                for fault in block.faults[: max(0, SHOWN_FAULTS - totals.num_bad)]:
                    print(f"skipped {fault}", file=sys.stderr)
                datasets.add(block)
                report.show(totals)
                if time.monotonic() - saved_s >= arguments.resume_interval:
                    datasets.save()
                    saved_s = time.monotonic()
            report.finish(totals)
        except (DataError, KeyboardInterrupt) as error:
            if not work.is_saved:  # too short to be worth keeping
                raise
            datasets.save()
            if isinstance(error, DataError):
                raise DataError(f"{error}{kept(arguments)}") from None
            raise
        finally:
            encoded.close()
            report.close()


def is_finished(job: Job) -> bool:
    """Whether the datasets of this very command are there already."""
    from megatron.data.checksums import read_checksums
    from megatron.data.indexed import DataError, IndexedDataset

    try:
        found = [read_checksums(prefix) for prefix in job.prefixes]
        for prefix in job.prefixes:
            IndexedDataset(prefix)
    except DataError:
        return False
    return all(checksums is not None and checksums.notes == job.notes for checksums in found)


def run(arguments: argparse.Namespace) -> None:
    """The whole command. Raises DataError or OSError, with no final file written."""
    # one thread a worker: --workers alone says how many cores are used
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from megatron.data.document_blocks import Position
    from megatron.data.resume_state import UnfinishedWork
    from megatron.data.tokenizers.acceleration import NotAccelerated

    job = prepare(arguments)
    Path(arguments.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with UnfinishedWork(arguments.output_prefix, job.identity, job.sources) as work:
        saved = work.load() if arguments.resume else None
        if saved is not None:
            print(f"going on after {saved.position.documents} documents", file=sys.stderr)
        elif arguments.resume and is_finished(job):
            print("nothing to resume: the datasets are finished")
            return
        else:
            work.start()
        datasets = Datasets(job, work, saved)
        if not datasets.is_complete:
            try:
                is_plain = arguments.reference_tokenizer or arguments.tokenizer_type == "NullTokenizer"
                tokenizer = job.tokenizer if is_plain else accelerated(job)
                encode_input(job, work, datasets, tokenizer)
            except NotAccelerated as difference:
                print(f"the reference tokenizer does the work: {difference}", file=sys.stderr)
                if datasets.position != (saved.position if saved else Position()):
                    # what was encoded before the difference showed may hold others
                    work.clear()
                    datasets = Datasets(job, work, None)
                encode_input(job, work, datasets, job.tokenizer)
        datasets.finish()
        work.remove()
    summarize(job, datasets.totals)


def summarize(job: Job, totals: Totals) -> None:
    from megatron.data.indexed import IndexedDataset

    for prefix, num_empty in zip(job.prefixes, totals.num_empty, strict=True):
        data = IndexedDataset(prefix)
        print(
            f"{prefix}.bin, .idx: {data.num_documents} documents, {data.num_tokens} tokens "
            f"({data.dtype}, vocabulary {job.tokenizer.vocab_size}); {num_empty} empty documents left out"
        )
    if totals.num_bad or totals.num_blank:
        print(f"skipped {totals.num_bad} bad documents and {totals.num_blank} blank ones")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.indexed import DataError

    return run_command(lambda: run(arguments), (DataError,), arguments.output_prefix, lambda: kept(arguments))


def kept(arguments: argparse.Namespace) -> str:
    """What is left to go on from, for the end of a message."""
    folder = Path(f"{arguments.output_prefix}.unfinished")
    return f"\nwhat was done is kept in {folder}: --resume goes on from there" if folder.exists() else ""
