"""Text to indexed datasets, a key a dataset: threads encode blocks of documents with an accelerated tokenizer.

The accelerated ids are compared with the reference tokenizer's before the work and on a spot of every batch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError, best_dtype
from megatron.data.prepare.block_encoder import (
    BlockEncoder,
    Counts,
    EncodedBatch,
    JobInput,
    Output,
    PreparationJob,
    StartOver,
    Stream,
)
from megatron.data.prepare.manifest import BlockCounts
from megatron.data.prepare.pipeline import Pipeline, PreparationReport
from megatron.data.read.archives import read_blocks
from megatron.data.read.document_blocks import LARGEST_DOCUMENT_BYTES, Block, Fault, Position, ReadingRules
from megatron.data.read.document_parser import Parsed, bad_line_error, parse
from megatron.data.read.sources import InputRules
from megatron.data.tokenizers.acceleration import NotAccelerated, accelerate, check_equal
from megatron.data.tokenizers.base import Tokenizer

PROOF_SOURCES = 16
"""Files of which the beginning is encoded twice before the accelerated tokenizer is trusted."""
PROOF_CHARACTERS = 1 << 15
PROOF_BLOCK_BYTES = 1 << 18
SPOT_CHARACTERS = 1 << 9
"""Characters of every batch that both tokenizers encode."""
BATCHES_AHEAD = 2
"""Batches that may wait beyond one for each thread. Bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class TextJob(PreparationJob):
    """Input, tokenizer and output of a preparation of text."""

    tokenizer: Tokenizer
    """The reference."""
    eod: int | None = None
    """Appended to each document. None: nothing."""
    uses_reference: bool = False
    """The reference tokenizer encodes everything, without an accelerated one."""
    keys: tuple[str, ...] = ("text",)
    text_files: str | None = None
    """Pattern of files that are text."""
    separator: str | None = None
    """Text between the documents of a text file."""
    num_partitions: int = 1
    max_document_bytes: int = LARGEST_DOCUMENT_BYTES
    skips_faults: bool = False
    """Skip documents that cannot be used, instead of failing."""

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{key}_document" for key in self.keys]

    @property
    def names(self) -> InputRules:
        return InputRules(self.text_files, self.exclude, self.stdin_filename)

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


@dataclass
class TextCounts(Counts):
    """Numbers of documents by outcome."""

    num_empty: list[int] = field(default_factory=list)
    """Documents without a token, for each key."""

    def add(self, other: Counts) -> None:
        assert isinstance(other, TextCounts)
        num_empty = [before + after for before, after in zip(self.num_empty, other.num_empty, strict=True)]
        super().add(other)
        self.num_empty = num_empty


Batch = EncodedBatch[TextCounts]


def preprocess_text(job: TextJob, files: JobInput, report: PreparationReport) -> TextCounts:
    """Write the datasets of a job. Raises DataError or OSError, with no final file written, and Finished."""
    return Pipeline(TextEncoder(job, files), report).run()


class TextEncoder(BlockEncoder[TextCounts]):
    """Encoder of texts; several threads share it."""

    free_options = ("--max-document-mb", "--on-bad-line")

    def __init__(self, job: TextJob, files: JobInput):
        self.job: TextJob = job
        self.files = files
        self._dtype = best_dtype(job.tokenizer.vocab_size)
        self.outputs = [
            Output(prefix, self._dtype, job.num_partitions, keeps_empty_sequences=False) for prefix in job.prefixes
        ]
        self.notes = {
            "tokenizer": job.tokenizer.identity,
            "append_eod": job.eod is not None,
            "input": files.whole.digest,
        }
        self.options = {
            "--json-keys": list(job.keys),
            "--partitions": job.num_partitions,
            "--document-separator": job.separator,
            "--append-eod": job.eod is not None,
            "--text-files": job.text_files,
            "--exclude": list(job.exclude),
            "--stdin-filename": job.stdin_filename,
            "--max-documents": job.max_documents,
            "--max-document-mb": job.max_document_bytes >> 20,
            "--on-bad-line": "skip" if job.skips_faults else "fail",
        }

    def no_counts(self) -> TextCounts:
        return TextCounts(num_empty=[0] * len(self.job.keys))

    def check(self, counts: TextCounts) -> None:
        """Raise DataError for a key without any text."""
        for key, num_empty in zip(self.job.keys, counts.num_empty, strict=True):
            if num_empty < counts.num_documents:
                continue
            where, remedy = f"{len(self.files.sources)} files", "give text that is not empty"
            if self.job.shard:
                where, remedy = f"shard {self.job.shard} of {where}", "divide the input into fewer shards"
            raise DataError(
                f"no text under key {key!r} in {where}: {num_empty} empty, {counts.num_blank} blank, "
                f"{counts.num_bad} bad; {remedy}"
            )

    def encode(self, start: Position) -> Generator[Batch]:
        try:
            tokenizer = self.job.tokenizer
            if not self.job.uses_reference:
                tokenizer = self._accelerated()
            work = _BatchEncoder(self.job, self._dtype, tokenizer)
            batches = self.batches(start, tokenizer.batch_bytes)
            with contextlib.closing(_in_threads(work.encode, batches, self.job.workers)) as encoded:
                yield from encoded
        except NotAccelerated as difference:
            reference = TextEncoder(replace(self.job, uses_reference=True), self.files)
            raise StartOver(f"encoding with the reference tokenizer: {difference}", reference) from None

    def _accelerated(self) -> Tokenizer:
        """Return the accelerated tokenizer, if its ids equal the reference's for the beginnings of the files.

        Raises NotAccelerated if they differ.
        """
        job = self.job
        tokenizer = accelerate(job.tokenizer)
        sources = self.files.sources
        if job.max_documents is not None:  # the later files may never be read
            sources = sources[:1]
        # evenly among the files, of which the first may be all of one kind
        step = max(1, len(sources) // PROOF_SOURCES)
        for source in sources[::step][:PROOF_SOURCES]:
            # a small block: a proof for each of many files must not take longer than the work
            blocks = read_blocks([source], job.reading_rules(PROOF_BLOCK_BYTES))
            first = next(blocks, None)
            if first is None:  # an empty file
                continue
            left = PROOF_CHARACTERS
            for text in parse(first, job.keys).columns[0]:
                check_equal(tokenizer, job.tokenizer, [text[:left]])
                left -= len(text)
                if left <= 0:
                    break
        return tokenizer


# Threads, not processes: tokenizers, gigatoken and hashing release the interpreter's lock, so nothing is pickled, and a
# kill leaves no process behind.
def _in_threads(
    encode: Callable[[list[Block]], Batch], batches: Iterator[list[Block]], num_threads: int
) -> Generator[Batch]:
    """Yield every encoded batch in order, with a bounded number of them in flight."""
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(encode, batch))
                if len(waiting) >= num_threads + BATCHES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@dataclass(frozen=True)
class _BatchEncoder:
    job: TextJob
    dtype: np.dtype[np.generic]
    tokenizer: Tokenizer
    """The job's, or one whose ids must equal that one's."""

    def encode(self, blocks: Sequence[Block]) -> Batch:
        """Encode consecutive blocks. Raises NotAccelerated, and DataError for the first fault unless they are skipped.

        A document without a token is left out if there is one key, its eod too. With several keys it stays, without a
        sequence, so that the datasets have the same documents.
        """
        parsed = [parse(block, self.job.keys) for block in blocks]
        try:
            streams, is_empty = self._encode_columns(blocks, parsed)
        # not a fault of a document: each of them alone would succeed
        except MemoryError:
            raise
        except Exception:  # the type depends on the library: find the documents that it refuses
            for block, of_block in zip(blocks, parsed, strict=True):
                self._sift(block, of_block)
            streams, is_empty = self._encode_columns(blocks, parsed)
        # a spot of each batch: the proof at the start has seen the beginnings of files only
        if self.tokenizer is not self.job.tokenizer and len(is_empty[0]):
            self._check_spot(blocks[0], parsed)
        faults = [fault for of_block in parsed for fault in of_block.faults]
        if faults and not self.job.skips_faults:
            raise bad_line_error(faults[0])
        num_empty = [int(column.sum()) for column in is_empty]
        counts = TextCounts(faults=[str(fault) for fault in faults], num_empty=num_empty)
        return EncodedBatch(streams, counts, self._of_blocks(blocks, parsed, is_empty[0]))

    @property
    def _leaves_out_empty(self) -> bool:
        # with several keys, document n of one dataset is document n of the others
        return len(self.job.keys) == 1

    def _of_blocks(
        self, blocks: Sequence[Block], parsed: Sequence[Parsed], is_empty: NDArray[np.bool_]
    ) -> list[BlockCounts]:
        counts = []
        start = 0
        for block, of_block in zip(blocks, parsed, strict=True):
            end = start + len(of_block.numbers)
            num_empty = 0
            if self._leaves_out_empty:
                num_empty = int(is_empty[start:end].sum())
            num_kept = end - start - num_empty
            num_bad = len(of_block.faults)
            counts.append(BlockCounts(block.without_content(), num_kept, of_block.num_blank, num_empty, num_bad))
            start = end
        return counts

    def _encode_columns(
        self, blocks: Sequence[Block], parsed: Sequence[Parsed]
    ) -> tuple[list[Stream], list[NDArray[np.bool_]]]:
        """Return the streams, and for each key which documents have no token."""
        streams: list[Stream] = []
        is_empty: list[NDArray[np.bool_]] = []
        for column in range(len(self.job.keys)):
            # the usual batch is one block, whose list is not copied
            texts = parsed[0].columns[column]
            if len(parsed) > 1:
                texts = [text for of_block in parsed for text in of_block.columns[column]]
            if self.job.num_partitions == 1:
                of_column = [self._encode_texts(texts)]
                is_empty.append(of_column[0].lengths == 0)
            else:
                of_column, without_tokens = self._encode_partitions(texts, _document_numbers(blocks, parsed))
                is_empty.append(without_tokens)
            streams += of_column
        if self._leaves_out_empty:
            for stream in streams:
                stream.lengths = stream.lengths[stream.lengths > 0]
        return streams, is_empty

    def _encode_partitions(
        self, texts: list[str], numbers: NDArray[np.int64]
    ) -> tuple[list[Stream], NDArray[np.bool_]]:
        """Return the stream of each partition, and which documents have no token."""
        streams = []
        is_empty = np.zeros(len(texts), np.bool_)
        # by the number in the whole input: the partitions do not depend on where blocks begin
        partition_of = numbers % self.job.num_partitions
        for partition in range(self.job.num_partitions):
            chosen = np.flatnonzero(partition_of == partition)
            stream = self._encode_texts([texts[i] for i in chosen])
            # in the order of the documents, which is that of the manifest
            is_empty[chosen] = stream.lengths == 0
            streams.append(stream)
        return streams, is_empty

    def _encode_texts(self, texts: list[str]) -> Stream:
        ids, lengths = self.tokenizer.encode_batch(texts)
        # cheap, and the last look at an id before it is written in fewer bits
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise AssertionError(f"the tokenizer gave id {ids.max()} of a vocabulary of {self.tokenizer.vocab_size}")
        # in the type of the file here, in a thread: the builder then writes without a copy
        tokens = ids.astype(self.dtype)
        if self.job.eod is not None:
            has_tokens = lengths > 0
            # a document without a token gets no eod, which would be one document more to train on
            tokens = np.insert(tokens, np.cumsum(lengths[has_tokens]), self.job.eod)
            lengths = lengths + has_tokens
        return Stream(tokens, lengths)

    def _sift(self, block: Block, parsed: Parsed) -> None:
        """Move documents that the tokenizer refuses to `parsed.faults`."""
        # one by one, and slowly: a batch with a refused document is rare
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

    def _check_spot(self, first: Block, parsed: Sequence[Parsed]) -> None:
        """Raise NotAccelerated unless the reference gives the same ids for a part of one document."""
        of_block = next(one for one in parsed if one.numbers)
        # another document and another part of it in every batch, the same in every run
        text = of_block.columns[0][first.begin.documents % len(of_block.numbers)]
        start = first.begin.offset % max(1, len(text) - SPOT_CHARACTERS)
        check_equal(self.tokenizer, self.job.tokenizer, [text[start : start + SPOT_CHARACTERS]])


def _document_numbers(blocks: Sequence[Block], parsed: Sequence[Parsed]) -> NDArray[np.int64]:
    """Return the number of each document in the input."""
    numbers = [
        block.begin.documents + np.array(of_block.numbers, np.int64)
        for block, of_block in zip(blocks, parsed, strict=True)
    ]
    return np.concatenate(numbers)
