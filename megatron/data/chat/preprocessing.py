"""Preprocessing of chat files into a dataset of tokens and a dataset of their loss mask.

PREFIX.bin and .idx hold one sample a document, in the order of the input. PREFIX_loss_mask.bin and .idx hold one byte a
token: 1 where it is trained. Both datasets appear together when whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.block_encoder import SHOWN_FAULTS, EncodedBlock, encode_blocks
from megatron.data.chat.encoder import ChatCounts
from megatron.data.chat.job import ChatJob, ChatSetup, prepare_chats
from megatron.data.chat.tokenizer import write_tokenizer
from megatron.data.document_blocks import read_blocks
from megatron.data.indexed import LOSS_MASK_SUFFIX, DataError, best_dtype
from megatron.data.indexed_builder import IndexedDatasetBuilder
from megatron.data.sources import SourceFile, find_sources

BLOCK_BYTES = 1 << 20
BYTES_WORTH_A_PROCESS = 16 << 20
"""Input for each process to start: starting one takes as long as encoding this much here."""
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class ChatTotals:
    """Numbers of rows, samples and tokens."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    """Trained tokens."""
    num_appended_eos: int
    num_truncated: int
    num_split: int
    """Rows that became several samples."""
    num_blank: int
    """Blank lines."""
    dropped: dict[str, int]
    """Samples left out, by reason."""
    bad: dict[str, int]
    """Rows that cannot be used, by reason."""
    left_out: dict[str, int]
    """Texts and options that the template leaves out of rows that are used, by kind."""
    faults: tuple[str, ...]
    """The first bad rows, each with its file and line."""
    vocab_size: int
    """Size of the vocabulary, added tokens included."""
    added_tokens: tuple[str, ...]
    length_percentiles: dict[int, int] = field(default_factory=dict)
    """Percentile -> tokens in a sample."""


class _Datasets:
    """Writers of the tokens and of the mask."""

    def __init__(self, job: ChatJob, setup: ChatSetup, sources: Sequence[SourceFile]):
        self._prefix = job.output_prefix
        notes = {
            "tokenizer": setup.tokenizer.identity,
            "chat_template": {"name": Path(setup.source.origin).name, "sha256": setup.source.sha256},
            "rules": asdict(job.rules),
            "input": [[source.path.name, source.path.stat().st_size] for source in sources],
        }
        self._tokens = IndexedDatasetBuilder(job.output_prefix, best_dtype(setup.tokenizer.vocab_size), notes=notes)
        try:
            self._mask = IndexedDatasetBuilder(job.output_prefix + LOSS_MASK_SUFFIX, np.uint8, notes=notes)
        except BaseException:
            self._tokens.abandon()
            raise
        self.lengths: list[NDArray[np.int64]] = []
        self.num_loss_tokens = 0

    def add(self, block: EncodedBlock) -> None:
        self._tokens.add_documents(block.ids, block.lengths)
        self._mask.add_documents(block.mask, block.lengths)
        self.lengths.append(block.lengths)
        self.num_loss_tokens += int(block.mask.sum(dtype=np.int64))

    def seal(self) -> None:
        self._tokens.seal()
        self._mask.seal()

    def publish(self) -> None:
        """Rename both, the tokens last. An older dataset is removed first: the new mask does not fit it."""
        Path(f"{self._prefix}.idx").unlink(missing_ok=True)
        self._mask.finalize()
        self._tokens.finalize()

    def abandon(self) -> None:
        self._tokens.abandon()
        self._mask.abandon()


def preprocess_chats(job: ChatJob, progress: Callable[[int], None] | None = None) -> ChatTotals:
    """Run a job. `progress` is called with numbers of input bytes as they are done.

    For large inputs `workers` above 1 starts other processes; they do not import the caller's script. Raises DataError
    or OSError, and then leaves no dataset.
    """
    sources = find_chats(job.inputs)
    setup = prepare_chats(job)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    counts = ChatCounts()
    faults: list[str] = []
    num_blank = 0
    datasets = _Datasets(job, setup, sources)
    try:
        with closing(_encoded(job, setup, sources)) as encoded:
            for num_bytes, block in encoded:
                datasets.add(block)
                counts.add(block.counts)
                faults += block.faults[: max(0, SHOWN_FAULTS - len(faults))]
                num_blank += block.num_blank
                if progress:
                    progress(num_bytes)
        lengths = np.concatenate([*datasets.lengths, np.empty(0, np.int64)])
        if not len(lengths):
            raise DataError(_empty_output(job, counts, num_blank))
        datasets.seal()
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
        num_appended_eos=counts.num_appended_eos,
        num_truncated=counts.num_truncated,
        num_split=counts.num_split,
        num_blank=num_blank,
        dropped=dict(counts.dropped),
        bad=dict(counts.bad),
        left_out=dict(counts.left_out),
        faults=tuple(faults),
        vocab_size=setup.tokenizer.vocab_size,
        added_tokens=setup.added_tokens,
        length_percentiles={percent: int(level) for percent, level in zip(PERCENTILES, levels, strict=True)},
    )


def find_chats(inputs: Sequence[str]) -> list[SourceFile]:
    """Return the JSONL files of paths, folders and globs. Raises DataError."""
    sources = find_sources(inputs)
    for source in sources:
        if source.kind != "jsonl":
            raise DataError(
                f"{source.path} is not JSONL; chats are read from files with one JSON object a line: .jsonl or .json, "
                "also with .gz or .zst after it"
            )
    return sources


def _empty_output(job: ChatJob, counts: ChatCounts, num_blank: int) -> str:
    if not counts.num_rows:
        blank = f", only {num_blank} blank lines" if num_blank else ""
        return f"no conversation in {', '.join(job.inputs)}{blank}; give a file with a JSON object a line"
    reasons = ", ".join(f"{count} {reason}" for reason, count in (counts.dropped + counts.bad).most_common())
    return f"no sample is left of {counts.num_rows} rows: {reasons}; correct the rows, or raise --max-length"


def _encoded(job: ChatJob, setup: ChatSetup, sources: Sequence[SourceFile]) -> Generator[tuple[int, EncodedBlock]]:
    remedy = "cut the conversation into several, or leave the line out"
    blocks = read_blocks(sources, (), remedy=remedy, block_bytes=BLOCK_BYTES, goes_on=job.bad_rows == "skip")
    total_bytes = setup.tokenizer.expected_bytes = sum(source.path.stat().st_size for source in sources)
    num_processes = min(job.workers, total_bytes // BYTES_WORTH_A_PROCESS)
    return encode_blocks(job, setup.encoder, blocks, num_processes)
