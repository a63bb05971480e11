"""Preprocessing of chat files into a dataset of tokens and a dataset of their loss mask.

PREFIX.bin and .idx hold one sample a document, in the order of the input. PREFIX_loss_mask.bin and .idx hold one byte a
token: 1 where it is trained. Both datasets appear together when whole, or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.encoder import ChatCounts
from megatron.data.chat.job import (
    SHOWN_FAULTS,
    ChatJob,
    ChatSetup,
    EncodedBlock,
    encode_batch,
    encode_in_worker,
    prepare_chats,
)
from megatron.data.chat.row_forms import MIXED
from megatron.data.chat.tokenizer import write_tokenizer
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, best_dtype
from megatron.data.index.indexed_builder import IndexedDatasetBuilder, check_absent
from megatron.data.prepare.block_workers import BYTES_WORTH_A_PROCESS, encode_blocks
from megatron.data.prepare.manifest import LOG_NAME, ManifestLog, manifest_writer
from megatron.data.read.archives import read_batches
from megatron.data.read.document_blocks import ReadingRules
from megatron.data.read.input_shards import of_split, shard_of
from megatron.data.read.sources import UNCOMPRESSED_ONLY, InputListing, find_sources

BLOCK_BYTES = 1 << 20
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class ChatTotals:
    """Numbers of rows, samples and tokens."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    """Trained tokens."""
    num_blank: int
    """Blank lines."""
    outcomes: dict[str, int]
    """Rows or samples that were changed or left out, by what happened to them: `ChatCounts.outcomes`."""
    dropped: dict[str, int]
    """Samples left out, by reason."""
    bad: dict[str, int]
    """Rows that cannot be used, by reason."""
    left_out: dict[str, int]
    """Texts and options that the template leaves out of rows that are used, by kind."""
    forms: dict[str, int]
    """Rows of each form (row_forms.py)."""
    faults: tuple[str, ...]
    """The first bad rows, each with its file and line."""
    vocab_size: int
    """Size of the vocabulary, added tokens included."""
    added_tokens: tuple[str, ...]
    length_percentiles: dict[int, int] = field(default_factory=dict)
    """Percentile -> tokens in a sample."""


class _Datasets:
    """Writers of the tokens and of the mask."""

    def __init__(self, job: ChatJob, setup: ChatSetup, chats: ChatInput):
        self._prefix, self._job, self._setup, self._chats = job.output_prefix, job, setup, chats
        notes = {
            "tokenizer": setup.tokenizer.identity,
            "chat_template": {"name": Path(setup.source.origin).name, "sha256": setup.source.sha256},
            "rules": asdict(job.rules),
            "input": chats.whole.digest,
        }
        self._tokens = IndexedDatasetBuilder(job.output_prefix, best_dtype(setup.tokenizer.vocab_size), notes=notes)
        try:
            self._mask = IndexedDatasetBuilder(job.output_prefix + LOSS_MASK_SUFFIX, np.uint8, notes=notes)
        except BaseException:
            self._tokens.abandon()
            raise
        self._log = ManifestLog(
            self._tokens.work_dir / LOG_NAME, chats.listing.sources, max_documents=job.max_documents
        )
        self.lengths: list[NDArray[np.int64]] = []
        self.num_loss_tokens = 0

    def add(self, block: EncodedBlock) -> None:
        self._tokens.add_documents(block.ids, block.lengths)
        self._mask.add_documents(block.mask, block.lengths)
        for counts in block.of_blocks:
            self._log.add(counts)
        self.lengths.append(block.lengths)
        self.num_loss_tokens += int(block.mask.sum(dtype=np.int64))

    def seal(self, outcomes: dict[str, int]) -> None:
        self._log.finish()
        job, chats = self._job, self._chats
        options = {
            **asdict(job.rules),
            "chat_template": Path(self._setup.source.origin).name,
            "row_format": job.row_format,
            "prompt_template": job.prompt_template,
            "answer_key": job.answer_key,
            "ignore_columns": list(job.ignore_columns),
            "split": job.split,
            "bad_rows": job.bad_rows,
            "exclude": list(job.exclude),
            "max_documents": job.max_documents,
        }
        tokenizer = self._setup.tokenizer.identity
        write_manifest = manifest_writer(
            chats.listing, self._log, tokenizer, options, job.shard, chats.whole.digest, outcomes
        )
        self._tokens.seal(write_manifest)
        self._mask.seal(write_manifest)

    def publish(self) -> None:
        """Rename both, the tokens last. An older dataset is removed first: the new mask does not fit it."""
        self._close_log()
        Path(f"{self._prefix}.idx").unlink(missing_ok=True)
        self._mask.finalize()
        self._tokens.finalize()

    def abandon(self) -> None:
        self._close_log()
        self._tokens.abandon()
        self._mask.abandon()

    def _close_log(self) -> None:
        self._log.close()
        (self._tokens.work_dir / LOG_NAME).unlink(missing_ok=True)


def preprocess_chats(
    job: ChatJob, progress: Callable[[int], None] | None = None, chats: ChatInput | None = None
) -> ChatTotals:
    """Run a job. `progress` is called with numbers of input bytes as they are done.

    `chats` is what `find_chats` has returned, if it was called already. For large inputs `workers` above 1 starts other
    processes; they do not import the caller's script. Raises DataError or OSError, and then leaves no dataset.
    """
    check_absent([job.output_prefix, job.output_prefix + LOSS_MASK_SUFFIX], job.overwrite)
    chats = chats or find_chats(job)
    setup = prepare_chats(job)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    counts = ChatCounts()
    faults: list[str] = []
    num_blank = 0
    datasets = _Datasets(job, setup, chats)
    try:
        with closing(_encoded(job, setup, chats.listing)) as encoded:
            for num_bytes, block in encoded:
                datasets.add(block)
                counts.add(block.counts)
                _check_forms(job, counts)
                faults += block.faults[: max(0, SHOWN_FAULTS - len(faults))]
                num_blank += block.num_blank
                if progress:
                    progress(num_bytes)
        if counts.num_too_long:
            raise DataError(_too_long(job, counts))
        lengths = np.concatenate([*datasets.lengths, np.empty(0, np.int64)])
        if not len(lengths):
            raise DataError(_empty_output(job, counts, num_blank))
        datasets.seal(counts.outcomes())
        if job.tokenizer_output is not None:
            write_tokenizer(job.tokenizer_output, setup.tokenizer, job.tokenizer, setup.source)
        datasets.publish()
    finally:
        datasets.abandon()  # does nothing after `publish`
    levels = np.percentile(lengths, PERCENTILES, method="nearest")
    return ChatTotals(
        num_rows=counts.num_rows,
        num_samples=len(lengths),
        num_tokens=int(lengths.sum()),
        num_loss_tokens=datasets.num_loss_tokens,
        num_blank=num_blank,
        outcomes=counts.outcomes(),
        dropped=dict(counts.dropped),
        bad=dict(counts.bad),
        left_out=dict(counts.left_out),
        forms=dict(counts.num_of_forms),
        faults=tuple(faults),
        vocab_size=setup.tokenizer.vocab_size,
        added_tokens=setup.added_tokens,
        length_percentiles={percent: int(level) for percent, level in zip(PERCENTILES, levels, strict=True)},
    )


@dataclass(frozen=True)
class ChatInput:
    """Files of chats."""

    whole: InputListing
    listing: InputListing
    """Those of the shard."""


def find_chats(job: ChatJob) -> ChatInput:
    """Return the files of a job. Raises DataError."""
    whole = of_split(find_sources(job.inputs, job.names), job.split, job.inputs)
    if any(source.kind in UNCOMPRESSED_ONLY for source in whole.sources):
        from megatron.data.read.tables import check_columns  # pyarrow, which takes its time

        check_columns(whole.sources, job.reader.keys, as_rows=True)
    return ChatInput(whole, shard_of(whole, job.shard) if job.shard else whole)


def _check_forms(job: ChatJob, counts: ChatCounts) -> None:
    """Raise DataError for a file whose rows are of several forms."""
    if job.row_format == MIXED:
        return
    for places in counts.forms.values():
        if len(places) > 1:
            (first, _), (second, place) = list(places.items())[:2]
            raise DataError(
                f"{place}: the row is of the form {second}, and the file began with {first}; separate them, or pass "
                f"--row-format {MIXED}"
            )


def _too_long(job: ChatJob, counts: ChatCounts) -> str:
    return (
        f"{counts.num_too_long} of {counts.num_rows} conversations have more than max_length={job.max_length} tokens; "
        f"the first is {counts.first_too_long}, the longest has {counts.longest} tokens; raise --max-length, or choose "
        "what becomes of them: --too-long drop, truncate or split"
    )


def _empty_output(job: ChatJob, counts: ChatCounts, num_blank: int) -> str:
    if not counts.num_rows:
        blank = f", only {num_blank} blank lines" if num_blank else ""
        return f"no conversation in {', '.join(job.inputs)}{blank}; give a file with a JSON object a line"
    reasons = ", ".join(f"{count} {reason}" for reason, count in (counts.dropped + counts.bad).most_common())
    return f"no sample is left of {counts.num_rows} rows: {reasons}; correct the rows, or raise --max-length"


def _encoded(job: ChatJob, setup: ChatSetup, listing: InputListing) -> Generator[tuple[int, EncodedBlock]]:
    rules = ReadingRules(
        keys=job.reader.keys,
        as_rows=True,
        remedy="cut the conversation into several, or leave the line out",
        block_bytes=BLOCK_BYTES,
        max_documents=job.max_documents,
        goes_on=job.bad_rows == "skip",
        names=job.names,
    )
    batches = read_batches(listing.sources, rules)
    total_bytes = sys.maxsize if listing.num_bytes is None else listing.num_bytes
    setup.tokenizer.expected_bytes = total_bytes
    return encode_blocks(
        lambda batch: encode_batch(setup.encoder, batch, job),
        partial(encode_in_worker, job),
        batches,
        min(job.workers, total_bytes // BYTES_WORTH_A_PROCESS),
    )
