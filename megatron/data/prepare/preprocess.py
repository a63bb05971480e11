"""Text to indexed datasets, resumable: threads encode blocks of documents, and the main thread writes them in order.

A bounded number of blocks is in flight, so memory does not grow with the input. The files get their names only when all
of them are complete. The work of a killed or failed run stays in PREFIX.unfinished/, from where it is resumed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset, best_dtype
from megatron.data.index.indexed_builder import IndexedDatasetBuilder, check_absent, is_open, publish
from megatron.data.prepare.document_encoder import Encoded, Encoder, TextTotals
from megatron.data.prepare.manifest import LOG_NAME, ManifestLog, manifest_writer, read_manifest
from megatron.data.prepare.resume_state import State, UnfinishedWork
from megatron.data.read.archives import read_batches, read_blocks
from megatron.data.read.document_blocks import Block, Position, ReadingRules
from megatron.data.read.document_parser import bad_line_error, parse
from megatron.data.read.input_shards import InputShard, shard_of
from megatron.data.read.sources import InputListing, InputRules, SourceFile
from megatron.data.tokenizers.acceleration import NotAccelerated, accelerate, check_equal
from megatron.data.tokenizers.base import Tokenizer

A = TypeVar("A")
B = TypeVar("B")

BLOCKS_AHEAD = 2
"""Blocks read beyond those being encoded."""
SHOWN_FAULTS = 10
PROOF_SOURCES = 16
"""Files of which the beginning is encoded twice before the accelerated tokenizer is trusted."""
PROOF_CHARACTERS = 1 << 15
PROOF_BLOCK_BYTES = 1 << 18


class PreprocessReport(Protocol):
    """Receiver of what a run reports while it works."""

    def note(self, text: str) -> None: ...

    def start(self, num_bytes: int | None, totals: TextTotals) -> None:
        """`num_bytes`: of the whole input, None if unknown. `totals`: what earlier runs have done of it."""

    def show(self, totals: TextTotals) -> None: ...

    def finish(self, totals: TextTotals) -> None:
        """All input is processed."""

    def close(self) -> None:
        """Called after `start`, also after an error."""


@dataclass(frozen=True)
class PreprocessJob:
    """Input, tokenizer and output of a preprocessing run."""

    whole_input: InputListing
    """All files, of which the shard may be a share."""
    names: InputRules
    keys: tuple[str, ...]
    output_prefix: str
    tokenizer: Tokenizer
    """The reference."""
    eod: int | None
    """Appended to each document. None: nothing."""
    uses_reference: bool
    """The reference tokenizer encodes everything, without an accelerated one."""
    separator: str | None
    """Text between the documents of a text file."""
    num_partitions: int
    max_document_bytes: int
    skips_faults: bool
    """Skip documents that cannot be used, instead of failing."""
    workers: int
    resume: bool
    resume_interval_s: float
    shard: InputShard | None = None
    max_documents: int | None = None
    """Documents of the input after which reading stops."""
    overwrite: bool = False
    """Replace finished datasets."""

    @cached_property
    def listing(self) -> InputListing:
        """The files of the shard. Raises DataError if it cannot be divided."""
        return shard_of(self.whole_input, self.shard) if self.shard else self.whole_input

    @property
    def sources(self) -> list[SourceFile]:
        return self.listing.sources

    @property
    def pipe(self) -> str | None:
        """Name of an input that cannot be read again."""
        return next((source.name for source in self.sources if source.transport == "pipe"), None)

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{key}_document" for key in self.keys]

    @property
    def dtype(self) -> Any:
        return best_dtype(self.tokenizer.vocab_size)

    @property
    def identity(self) -> dict[str, Any]:
        """All that determines what is written, apart from the content of the input."""
        return {
            "--json-keys": list(self.keys),
            "--partitions": self.num_partitions,
            "--document-separator": self.separator,
            "--append-eod": self.eod is not None,
            "--text-files": self.names.text_files,
            "--exclude": list(self.names.exclude),
            "--stdin-filename": self.names.stdin_filename,
            "--shard": str(self.shard) if self.shard else None,
            "--max-documents": self.max_documents,
            "the tokenizer": self.tokenizer.identity,
        }

    @property
    def notes(self) -> dict[str, Any]:
        """Notes for PREFIX.sha256."""
        return {
            "tokenizer": self.tokenizer.identity,
            "append_eod": self.eod is not None,
            "input": self.whole_input.digest,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Options for the manifest."""
        others = {"the tokenizer", "--shard"}
        options = {name: value for name, value in self.identity.items() if name not in others}
        options["--max-document-mb"] = self.max_document_bytes >> 20
        return {**options, "--on-bad-line": "skip" if self.skips_faults else "fail"}

    def reading_rules(self, block_bytes: int | None = None) -> ReadingRules:
        return ReadingRules(
            self.keys,
            self.separator,
            self.max_document_bytes,
            block_bytes=block_bytes,
            max_documents=self.max_documents,
            goes_on=self.skips_faults,
            names=self.names,
        )

    def batches(self, start: Position, tokenizer: Tokenizer) -> Iterator[list[Block]]:
        rules = self.reading_rules(tokenizer.batch_bytes)
        return read_batches(self.sources, rules, start=start)


# Threads, not processes: tokenizers, gigatoken and hashing release the interpreter's lock, so nothing is pickled, and
# a kill leaves no process behind.
def map_in_order(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A], ahead: int) -> Generator[B]:
    """Yield results as `pool.map` does, with at most `ahead` items in flight."""
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


def accelerated(job: PreprocessJob) -> Tokenizer:
    """Return the accelerated tokenizer, if its ids equal the reference's for the beginnings of the files.

    Raises NotAccelerated if they differ.
    """

    fast = accelerate(job.tokenizer)
    # with a limit, the later files may never be read
    sources = job.sources if job.max_documents is None else job.sources[:1]
    step = max(1, len(sources) // PROOF_SOURCES)
    for source in sources[::step][:PROOF_SOURCES]:
        blocks = read_blocks([source], job.reading_rules(PROOF_BLOCK_BYTES))
        first = next(blocks, None)  # None: an empty file
        left = PROOF_CHARACTERS
        for text in parse(first, job.keys).columns[0] if first else ():
            check_equal(fast, job.tokenizer, [text[:left]])
            left -= len(text)
            if left <= 0:
                break
    return fast


class GrowingDatasets:
    """Datasets being built, with the state from which they are resumed."""

    def __init__(self, job: PreprocessJob, work: UnfinishedWork, saved: State | None):
        """Start empty, or from `saved`. Raises DataError."""
        self._job, self._work = job, work
        self.is_complete = saved is not None and saved.is_complete
        """All input has been added."""
        self.totals = TextTotals(**saved.totals) if saved else TextTotals(num_empty=[0] * len(job.keys))
        self.position = saved.position if saved else Position()
        """End of the input that has been added."""
        log = saved.manifest if saved else None
        self._log = ManifestLog(work.folder / LOG_NAME, job.sources, log, max_documents=job.max_documents)
        self._builders: list[IndexedDatasetBuilder] = []
        self._unsealed: list[tuple[IndexedDatasetBuilder, ...]] = []
        """Builders of the partitions of each dataset that is not sealed."""
        for k, prefix in enumerate(job.prefixes):
            folders = [work.work_dir(f"{k}.{p}") for p in range(job.num_partitions)]
            if self.is_complete and not is_open(folders[0]):
                continue  # sealed, or even published, by the run that was killed
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
            builder.add_documents(stream.tokens, stream.lengths, keeps_empty_sequences=False)
        for counts in block.counts:
            self._log.add(counts)
        self.totals.add(block.totals)
        self.position = block.end

    def save(self) -> None:
        """Save the state, from which a later run can resume."""
        states = {builder.work_dir.name: builder.save_state() for builder in self._builders}
        log = self._log.save_state()
        self._work.save(State(self.position, self.is_complete, asdict(self.totals), log, states))

    def finish(self) -> None:
        """Give every dataset its name. Raises DataError for a key without any text."""
        if not self.is_complete:
            self._check_not_empty()
            self._log.finish()
            self.is_complete = True
            self.save()
        job = self._job
        write_manifest = manifest_writer(
            job.listing, self._log, job.tokenizer.identity, job.options, job.shard, job.whole_input.digest
        )
        for first, *others in self._unsealed:
            for other in others:
                first.absorb(other)
            first.seal(write_manifest)
        self._log.close()
        for k, prefix in enumerate(self._job.prefixes):
            publish(self._work.work_dir(f"{k}.0"), prefix)

    def _check_not_empty(self) -> None:
        totals = self.totals
        for key, partitions, num_empty in zip(self._job.keys, self._unsealed, totals.num_empty, strict=True):
            if not any(builder.num_tokens for builder in partitions):
                shard = self._job.shard
                where = (
                    f"shard {shard} of {len(self._job.sources)} files" if shard else f"{len(self._job.sources)} files"
                )
                remedy = "divide the input into fewer shards" if shard else "give text that is not empty"
                raise DataError(
                    f"no text under key {key!r} in {where}: {num_empty} empty, {totals.num_blank} blank, "
                    f"{totals.num_bad} bad; {remedy}"
                )


def encode_input(
    job: PreprocessJob, work: UnfinishedWork, datasets: GrowingDatasets, tokenizer: Tokenizer, report: PreprocessReport
) -> None:
    """Add the rest of the input to the datasets.

    Raises DataError at the first fault unless the job skips them, and NotAccelerated.
    """
    totals = datasets.totals
    reference = None if tokenizer is job.tokenizer else job.tokenizer
    encoder = Encoder(job.keys, job.num_partitions, job.eod, job.dtype, tokenizer, reference)
    batches = job.batches(datasets.position, tokenizer)
    report.start(job.listing.num_bytes if job.max_documents is None else None, totals)
    saved_s = time.monotonic()
    with (
        contextlib.closing(report),
        ThreadPoolExecutor(job.workers, thread_name_prefix="encode") as pool,
        contextlib.closing(map_in_order(pool, encoder.encode, batches, job.workers + BLOCKS_AHEAD)) as encoded,
    ):
        try:
            for block in encoded:
                if block.faults and not job.skips_faults:
                    raise bad_line_error(block.faults[0])
                for fault in block.faults[: max(0, SHOWN_FAULTS - totals.num_bad)]:
                    report.note(f"skipped {fault}")
                datasets.add(block)
                report.show(totals)
                if job.pipe is None and time.monotonic() - saved_s >= job.resume_interval_s:
                    datasets.save()
                    saved_s = time.monotonic()
            report.finish(totals)
        except (DataError, KeyboardInterrupt) as error:
            if not work.is_saved:  # the work so far is too short to keep
                raise
            datasets.save()
            if isinstance(error, DataError):
                raise DataError(f"{error}{kept_work(job.output_prefix)}") from None
            raise


def kept_work(output_prefix: str) -> str:
    """Return the end of an error message that names the work to resume from; "" if there is none."""
    folder = Path(f"{output_prefix}.unfinished")
    return f"\nthe work so far is kept in {folder}: --resume continues from there" if folder.exists() else ""


def is_finished(job: PreprocessJob) -> bool:
    """Return True if the datasets of this job exist already."""
    shard = job.shard and {"number": job.shard.number, "count": job.shard.count}
    for prefix in job.prefixes:
        try:
            checksums, manifest = read_checksums(prefix), read_manifest(prefix)
            IndexedDataset(prefix)
        except DataError:
            return False
        if checksums is None or checksums.notes != job.notes or manifest is None:
            return False
        found = manifest.header["options"]
        if any(found.get(name) != value for name, value in job.options.items() if name in job.identity):
            return False
        if shard != (manifest.shard and {name: manifest.shard[name] for name in ("number", "count")}):
            return False
    return True


def preprocess(job: PreprocessJob, report: PreprocessReport) -> TextTotals | None:
    """Write the datasets of a job. Returns None if `resume` finds them finished.

    Raises DataError or OSError, with no final file written.
    """
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with UnfinishedWork(job.output_prefix, job.identity, job.sources) as work:
        saved = work.load() if job.resume else None
        if job.resume and job.pipe and not (saved and saved.is_complete):
            raise DataError(
                f"--resume: {job.pipe} cannot be read again from where an earlier run stopped; give files, or leave "
                "out --resume and start over"
            )
        if saved is not None:
            report.note(f"resuming after {saved.position.documents} documents")
        elif job.resume and is_finished(job):
            return None
        else:
            work.start()
            check_absent(job.prefixes, job.overwrite)
        report.note(job.listing.describe())
        datasets = GrowingDatasets(job, work, saved)
        if not datasets.is_complete:
            try:
                encode_input(job, work, datasets, job.tokenizer if job.uses_reference else accelerated(job), report)
            except NotAccelerated as difference:
                report.note(f"encoding with the reference tokenizer: {difference}")
                if datasets.position != (saved.position if saved else Position()):
                    if job.pipe:
                        raise DataError(
                            f"{job.pipe} cannot be read again with the reference tokenizer; repeat the command with "
                            "--reference-tokenizer"
                        ) from None
                    # ids encoded before the difference was found may be wrong too
                    work.clear()
                    datasets = GrowingDatasets(job, work, None)
                encode_input(job, work, datasets, job.tokenizer, report)
        datasets.finish()
        work.remove()
    return datasets.totals
