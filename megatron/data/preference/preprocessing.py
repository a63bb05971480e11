"""Preprocessing of preference files into an indexed dataset of pairs.

PREFIX.bin and .idx hold a document a row, in the order of the input, of three sequences: the tokens of the prompt,
those of the preferred answer, and those of the other. A row with one answer has an empty sequence for the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.conversation import BadRow
from megatron.data.chat.job import SHOWN_FAULTS, BadRows, compile_templates, tokenizer_folder
from megatron.data.chat.template import find_template
from megatron.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from megatron.data.index.indexed import DataError, best_dtype
from megatron.data.index.indexed_builder import IndexedDatasetBuilder, check_absent
from megatron.data.preference.encoder import Pair, PairCounts, PreferenceEncoder, Templates
from megatron.data.preference.formats import Preference, parse_preference
from megatron.data.preference.rows import EXAMPLE, ROW_COLUMNS
from megatron.data.prepare.block_workers import BYTES_WORTH_A_PROCESS, encode_blocks, rows_of
from megatron.data.prepare.manifest import LOG_NAME, BlockCounts, ManifestLog, manifest_writer
from megatron.data.read.archives import read_batches
from megatron.data.read.document_blocks import Block, Fault, ReadingRules
from megatron.data.read.input_shards import InputShard, of_split, shard_of
from megatron.data.read.sources import ROW_KINDS, STDIN_FILENAME, InputListing, InputRules, find_sources

BLOCK_BYTES = 1 << 20
SEQUENCES = 3
"""Sequences of a document: prompt, chosen, rejected."""
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class PreferenceJob:
    """Everything that decides the output."""

    inputs: tuple[str, ...]
    """Files, folders, globs or URLs of JSONL, also compressed or in tar files, or of tables; "-": standard input."""
    output_prefix: str
    tokenizer: str
    """tokenizer.json, or its folder."""
    chat_template: str | None = None
    """Name of a preset, a .jinja file, or a .py file with CHAT_TEMPLATE; None: the tokenizer's own, if it has one."""
    as_chat: bool = False
    """Make messages of texts, which the template then writes."""
    append_eos: bool = True
    """Add EOS to texts, and to conversations after which the template writes nothing."""
    bad_rows: BadRows = "error"
    ignore_columns: tuple[str, ...] = ()
    """Columns that are left out, though they look like a part of the prompt."""
    workers: int = 1
    """Largest number of processes."""
    split: str | None = None
    """Read the files of this split of a downloaded dataset."""
    exclude: tuple[str, ...] = ()
    """Patterns of files that are passed over."""
    stdin_filename: str = STDIN_FILENAME
    """Name whose ending says what standard input holds."""
    shard: InputShard | None = None
    max_documents: int | None = None
    """Rows of the input after which reading stops."""
    overwrite: bool = False
    """Replace a finished dataset."""

    @property
    def names(self) -> InputRules:
        return InputRules(exclude=self.exclude, stdin_filename=self.stdin_filename, kinds=ROW_KINDS)

    def reading(self, block_bytes: int = BLOCK_BYTES) -> ReadingRules:
        return ReadingRules(
            keys=ROW_COLUMNS,
            as_rows=True,
            remedy="shorten the row, or leave the line out",
            block_bytes=block_bytes,
            max_documents=self.max_documents,
            goes_on=self.bad_rows == "skip",
            names=self.names,
        )


@dataclass(frozen=True)
class PreferenceSetup:
    """The encoder of a job, and what it was made of."""

    encoder: PreferenceEncoder
    tokenizer: ChatTokenizer
    template: dict[str, str] | None
    """Name and SHA-256 of the chat template."""


def prepare_preferences(job: PreferenceJob) -> PreferenceSetup:
    """Find the template and load the tokenizer. Raises DataError."""
    folder, templates, named = tokenizer_folder(job.tokenizer), "", {}
    try:
        source = find_template(job.chat_template, folder)
        named = source.named_tokens
    except DataError as error:
        if job.chat_template is not None or job.as_chat:
            raise
        templates = str(error)  # matters for rows of messages alone
    tokenizer, _ = load_tokenizer(job.tokenizer, named)
    given: Templates | str = templates or compile_templates(source, tokenizer)
    described = None if templates else {"name": Path(source.origin).name, "sha256": source.sha256}
    return PreferenceSetup(PreferenceEncoder(given, tokenizer, append_eos=job.append_eos), tokenizer, described)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of rows


@dataclass
class EncodedPairs:
    """The pairs of a block of rows, concatenated."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """[pairs, 3] Tokens of prompt, chosen and rejected."""
    counts: PairCounts
    faults: list[str]
    num_blank: int
    of_blocks: list[BlockCounts]

    def pairs(self) -> list[Pair]:
        parts = np.split(self.ids, np.cumsum(self.lengths)[:-1])
        return [Pair(*parts[begin : begin + SEQUENCES]) for begin in range(0, len(self.lengths) * SEQUENCES, SEQUENCES)]


def encode_pairs(encoder: PreferenceEncoder, job: PreferenceJob, blocks: Sequence[Block]) -> EncodedPairs:
    """Encode consecutive blocks. Raises DataError for the first bad row unless bad rows are skipped."""
    counts, faults, num_blank = PairCounts(), list[str](), 0
    pairs: list[Pair] = []
    of_blocks = []
    for block in blocks:
        found, problems, blank = _encoded_block(encoder, job, block, counts)
        if problems and job.bad_rows == "error":
            raise DataError(f"{problems[0]} (or leave such rows out: tools/preprocess_preferences.py --bad-rows skip)")
        of_blocks.append(BlockCounts(block.without_content(), len(found), blank, 0, len(problems)))
        pairs += found
        faults += problems[: SHOWN_FAULTS - len(faults)]
        num_blank += blank
    parts = [part for pair in pairs for part in pair.parts]
    lengths = np.array([len(part) for part in parts], np.int64).reshape(-1, SEQUENCES)
    return EncodedPairs(np.concatenate([np.empty(0, np.int32), *parts]), lengths, counts, faults, num_blank, of_blocks)


def _encoded_block(
    encoder: PreferenceEncoder, job: PreferenceJob, block: Block, counts: PairCounts
) -> tuple[list[Pair], list[str], int]:
    """Return the pairs of a block, its faults, and its blank lines."""
    rows, problems, num_blank = rows_of(block, EXAMPLE, ROW_COLUMNS)
    counts.num_rows += len(rows) + len(problems)
    numbers: list[int] = []
    parsed: list[Preference] = []
    for number, row in rows:
        try:
            parsed.append(found := parse_preference(row, as_chat=job.as_chat, ignored=job.ignore_columns))
            numbers.append(number)
            counts.unread.update(found.unread)
            counts.num_other_turns += found.has_other_turns
            counts.num_repeated_prompts += found.repeats_prompt
            counts.num_passed_over += found.num_passed_over
            counts.forms[found.form] += 1
            counts.first_rows.setdefault(found.form, block.place(number))
        except BadRow as error:
            problems.append((number, error.kind, str(error)))
    pairs = []
    for number, result in zip(numbers, encoder.encode(parsed, counts), strict=True):
        if isinstance(result, BadRow):
            problems.append((number, result.kind, str(result)))
        else:
            pairs.append(result)
    problems.sort()
    counts.bad.update(kind for _, kind, _ in problems)
    return pairs, [str(Fault(block.place(number), reason)) for number, _, reason in problems], num_blank


@lru_cache(maxsize=1)
def _encoder_of(job: PreferenceJob) -> PreferenceEncoder:
    setup = prepare_preferences(job)
    setup.tokenizer.expected_bytes = sys.maxsize  # workers are started for large inputs only
    return setup.encoder


def _encode_in_worker(job: PreferenceJob, blocks: list[Block]) -> EncodedPairs:
    return encode_pairs(_encoder_of(job), job, blocks)


# ---------------------------------------------------------------------------------------------------------------------
# The job


@dataclass(frozen=True)
class PreferenceTotals:
    """Numbers of rows, pairs and tokens."""

    num_pairs: int
    num_tokens: dict[str, int]
    """Tokens of the prompts, the preferred and the other answers."""
    counts: PairCounts
    num_blank: int
    faults: tuple[str, ...]
    """The first bad rows, each with its file and line."""
    vocab_size: int
    length_percentiles: dict[str, dict[int, int]] = field(default_factory=dict)
    """Percentile -> tokens: of a prompt, and of a prompt with its longer answer."""


def find_pairs(job: PreferenceJob) -> InputListing:
    """Return the files of a job. Raises DataError."""
    return of_split(find_sources(job.inputs, job.names), job.split, job.inputs)


def preprocess_preferences(job: PreferenceJob, progress: Callable[[int], None] | None = None) -> PreferenceTotals:
    """Run a job. `progress` is called with numbers of input bytes as they are done.

    For large inputs `workers` above 1 starts other processes; they do not import the caller's script. Raises DataError
    or OSError, and then leaves no dataset.
    """
    check_absent([job.output_prefix], job.overwrite)
    whole = find_pairs(job)
    listing = shard_of(whole, job.shard) if job.shard else whole
    setup = prepare_preferences(job)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    counts, lengths, faults, num_blank = PairCounts(), [np.empty((0, SEQUENCES), np.int64)], list[str](), 0
    options = {"as_chat": job.as_chat, "append_eos": job.append_eos}
    notes = {
        "tokenizer": setup.tokenizer.identity,
        "chat_template": setup.template,
        "rules": options,
        "input": whole.digest,
    }
    builder = IndexedDatasetBuilder(job.output_prefix, best_dtype(setup.tokenizer.vocab_size), notes=notes)
    log = ManifestLog(builder.work_dir / LOG_NAME, listing.sources, max_documents=job.max_documents)
    try:
        with closing(_encoded(job, setup, listing)) as encoded:
            for num_bytes, block in encoded:
                builder.add_documents(block.ids, block.lengths.reshape(-1), sequences_per_document=SEQUENCES)
                for of_block in block.of_blocks:
                    log.add(of_block)
                counts.add(block.counts)
                lengths.append(block.lengths)
                faults += block.faults[: max(0, SHOWN_FAULTS - len(faults))]
                num_blank += block.num_blank
                if progress:
                    progress(num_bytes)
        found = np.concatenate(lengths)
        if not len(found):
            raise DataError(_empty_output(job, counts))
        log.finish()
        listed = {
            **options,
            "bad_rows": job.bad_rows,
            "ignore_columns": list(job.ignore_columns),
            "split": job.split,
            "exclude": list(job.exclude),
            "max_documents": job.max_documents,
        }
        tokenizer = setup.tokenizer.identity
        builder.seal(manifest_writer(listing, log, tokenizer, listed, job.shard, whole.digest, counts.outcomes()))
        log.close()
        (builder.work_dir / LOG_NAME).unlink(missing_ok=True)
        builder.finalize()
    finally:
        log.close()
        (builder.work_dir / LOG_NAME).unlink(missing_ok=True)
        builder.abandon()  # does nothing after `finalize`
    return _totals(found, counts, num_blank, faults, setup.tokenizer.vocab_size)


def _totals(
    lengths: NDArray[np.int64], counts: PairCounts, num_blank: int, faults: Sequence[str], vocab_size: int
) -> PreferenceTotals:
    of_parts = {"prompts": lengths[:, 0], "with the longer answer": lengths[:, 0] + lengths[:, 1:].max(axis=1)}
    percentiles: dict[str, Any] = {
        name: dict(zip(PERCENTILES, np.percentile(part, PERCENTILES, method="nearest").tolist(), strict=True))
        for name, part in of_parts.items()
    }
    num_tokens = dict(zip(("prompts", "chosen", "rejected"), lengths.sum(axis=0).tolist(), strict=True))
    return PreferenceTotals(len(lengths), num_tokens, counts, num_blank, tuple(faults), vocab_size, percentiles)


def _empty_output(job: PreferenceJob, counts: PairCounts) -> str:
    if not counts.num_rows:
        return f"no row in {', '.join(job.inputs)}; give a file with a JSON object a line, {EXAMPLE}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.bad.most_common())
    return f"no pair is left of {counts.num_rows} rows: {reasons}; correct the rows"


def _encoded(job: PreferenceJob, setup: PreferenceSetup, listing: InputListing) -> Generator[tuple[int, EncodedPairs]]:
    batches = read_batches(listing.sources, job.reading())
    total_bytes = sys.maxsize if listing.num_bytes is None else listing.num_bytes
    setup.tokenizer.expected_bytes = total_bytes
    return encode_blocks(
        partial(encode_pairs, setup.encoder, job),
        partial(_encode_in_worker, job),
        batches,
        min(job.workers, total_bytes // BYTES_WORTH_A_PROCESS),
    )
