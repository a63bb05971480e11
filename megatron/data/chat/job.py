"""Options of a preprocessing job for chats, and the template and tokenizer they name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.conversation import BadRow, Chat
from megatron.data.chat.encoder import TOO_LONG, ChatCounts, ChatEncoder, ChatRules, Sample, TooLong, TrainOn, Turns
from megatron.data.chat.row_forms import AUTO, EXAMPLE, PLAIN, RowReader
from megatron.data.chat.template import ChatTemplate, TemplateSource, find_template
from megatron.data.chat.tokenizer import ChatTokenizer, ids_before_text, load_tokenizer
from megatron.data.index.indexed import DataError
from megatron.data.prepare.block_workers import rows_of
from megatron.data.prepare.manifest import BlockCounts
from megatron.data.read.document_blocks import Block, Fault
from megatron.data.read.input_shards import InputShard
from megatron.data.read.sources import ROW_KINDS, STDIN_FILENAME, InputRules

BadRows = Literal["error", "skip"]


@dataclass(frozen=True)
class ChatJob:
    """Everything that decides the output."""

    inputs: tuple[str, ...]
    """Files, folders, globs or URLs of JSONL, also compressed or in tar files, or of tables; "-": standard input."""
    output_prefix: str
    tokenizer: str
    """tokenizer.json, or its folder."""
    chat_template: str | None = None
    """Name of a preset, a .jinja file, or a .py file with CHAT_TEMPLATE; None: the tokenizer's own template."""
    max_length: int | None = None
    """Tokens in a sample."""
    too_long: TooLong = "drop"
    min_length: int = 1
    """Shorter samples are dropped."""
    bad_rows: BadRows = "error"
    train_on: TrainOn = "assistant"
    """Tokens to train in rows without `unmask`; `all`: every token of every row, whatever the row says."""
    row_format: str = AUTO
    """Form of the rows (row_forms.py). `auto`: found by its keys, one for each file."""
    prompt_template: str | None = None
    """Text of the prompt with {column} for values, for columns of other names."""
    answer_key: str | None = None
    """Column of the answer to it."""
    ignore_columns: tuple[str, ...] = ()
    """Columns that are left out, though they look like a part of the prompt."""
    split: str | None = None
    """Read the files of this split of a downloaded dataset."""
    turns: Turns = "together"
    """Turns of a conversation in one sample, or each after exactly its inference prompt."""
    append_eos: bool = True
    """Add EOS to the last turn if the template writes nothing after it."""
    add_special_tokens: bool = False
    """Add the template's tokens that the tokenizer lacks."""
    tokenizer_output: str | None = None
    """Folder for the tokenizer with its added tokens, and the template."""
    workers: int = 1
    """Largest number of processes."""
    exclude: tuple[str, ...] = ()
    """Patterns of files that are passed over."""
    stdin_filename: str = STDIN_FILENAME
    """Name whose ending says what standard input holds."""
    shard: InputShard | None = None
    max_documents: int | None = None
    """Rows of the input after which reading stops."""
    overwrite: bool = False
    """Replace a finished dataset."""

    def __post_init__(self) -> None:
        for name in ("min_length", "workers", "max_length", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name}={value} must be at least 1")
        if self.turns == "as_prompted" and (self.train_on != "assistant" or self.too_long == "split"):
            other = "too_long=split" if self.train_on == "assistant" else f"train_on={self.train_on}"
            raise DataError(f"turns=as_prompted cuts conversations before turns, which {other} would undo; drop one")
        if self.too_long != "drop" and self.max_length is None:
            raise DataError(f"too_long={self.too_long} needs max_length, which is not given; give it")
        if self.max_length is not None and self.max_length < self.min_length:
            raise DataError(f"max_length={self.max_length} is below min_length={self.min_length}; no sample fits both")
        _ = self.reader

    @property
    def names(self) -> InputRules:
        return InputRules(exclude=self.exclude, stdin_filename=self.stdin_filename, kinds=ROW_KINDS)

    @cached_property
    def reader(self) -> RowReader:
        """The reader of the rows. Raises DataError."""
        takes_texts = self.chat_template == PLAIN
        return RowReader(self.row_format, self.prompt_template, self.answer_key, takes_texts, self.ignore_columns)

    @property
    def rules(self) -> ChatRules:
        return ChatRules(self.train_on, self.turns, self.append_eos, self.max_length, self.min_length, self.too_long)


@dataclass(frozen=True)
class ChatSetup:
    """The template and the tokenizer of a job."""

    encoder: ChatEncoder
    tokenizer: ChatTokenizer
    source: TemplateSource
    added_tokens: tuple[str, ...]


def prepare_chats(job: ChatJob) -> ChatSetup:
    """Find the template, load the tokenizer and add tokens to it. Raises DataError."""
    source = find_template(job.chat_template, tokenizer_folder(job.tokenizer))
    wanted = source.tokens_to_add() if job.add_special_tokens else ()
    tokenizer, lacking = load_tokenizer(job.tokenizer, source.named_tokens, wanted)
    if lacking and job.tokenizer_output is None:
        raise DataError(
            f"the tokenizer {job.tokenizer} lacks {', '.join(lacking)}; name a folder for the tokenizer that has them "
            "with --tokenizer-output, or leave out --add-special-tokens"
        )
    if job.chat_template == PLAIN and (first := tokenizer.decode(ids_before_text(tokenizer).tolist())):
        source = replace(source, text="{{- " + json.dumps(first) + " }}" + source.text)
    template, tool_template = compile_templates(source, tokenizer)
    return ChatSetup(ChatEncoder(template, tokenizer, job.rules, tool_template), tokenizer, source, lacking)


def tokenizer_folder(tokenizer: str) -> Path:
    """Return the folder of a tokenizer.json. Raises DataError if there is none."""
    path = Path(tokenizer)
    if not path.exists():
        raise DataError(f"tokenizer {path} does not exist; give a tokenizer.json, or the folder that holds one")
    return path if path.is_dir() else path.parent


def compile_templates(source: TemplateSource, tokenizer: ChatTokenizer) -> tuple[ChatTemplate, ChatTemplate | None]:
    """Return the template, and the one for conversations with tools if that is another. Raises DataError."""
    template = ChatTemplate(source, tokenizer.tokens)
    if source.tool_use is None:
        return template, None
    return template, ChatTemplate(replace(source, text=source.tool_use), tokenizer.tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding of blocks of chat rows.

SHOWN_FAULTS = 10


@dataclass
class EncodedBlock:
    """The samples of a block of rows, concatenated."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    counts: ChatCounts
    faults: list[str]
    num_blank: int = 0
    of_blocks: list[BlockCounts] = field(default_factory=list)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield Sample(self.ids[start:end], self.mask[start:end])


def encode_batch(encoder: ChatEncoder, blocks: Sequence[Block], job: ChatJob) -> EncodedBlock:
    """Encode consecutive blocks. Raises DataError for the first bad row unless bad rows are skipped."""
    encoded = [encode_block(encoder, block, job) for block in blocks]
    if len(encoded) == 1:
        return encoded[0]
    counts = ChatCounts()
    for one in encoded:
        counts.add(one.counts)
    return EncodedBlock(
        np.concatenate([one.ids for one in encoded]),
        np.concatenate([one.mask for one in encoded]),
        np.concatenate([one.lengths for one in encoded]),
        counts,
        [fault for one in encoded for fault in one.faults][:SHOWN_FAULTS],
        sum(one.num_blank for one in encoded),
        [of_block for one in encoded for of_block in one.of_blocks],
    )


def encode_block(encoder: ChatEncoder, block: Block, job: ChatJob) -> EncodedBlock:
    """Encode the rows of a block. Raises DataError for the first bad row unless bad rows are skipped."""
    rows, problems, num_blank = rows_of(block, EXAMPLE, job.reader.keys)
    counts = ChatCounts(num_rows=len(rows) + len(problems))
    chats: list[Chat] = []
    numbers: list[int] = []
    for number, row in rows:
        try:
            form, chat, unread = job.reader.read(row)
            chats.append(chat)
            numbers.append(number)
            counts.unread.update(unread)
            counts.num_unanswered += not chat.ends_with_answer
            counts.num_of_forms[form] += 1
            counts.forms.setdefault(block.source.name, {}).setdefault(form, block.place(number))
        except BadRow as error:
            problems.append((number, error.kind, str(error)))
    samples: list[Sample] = []
    for number, result in zip(numbers, encoder.encode(chats, counts), strict=True):
        if isinstance(result, BadRow) and result.kind == TOO_LONG:
            counts.num_too_long += 1
            counts.first_too_long = counts.first_too_long or f"{block.place(number)}, {result}"
        elif isinstance(result, BadRow):
            problems.append((number, result.kind, str(result)))
        else:
            samples += result
    problems.sort()
    counts.bad.update(kind for _, kind, _ in problems)
    faults = [str(Fault(block.place(number), reason)) for number, _, reason in problems[:SHOWN_FAULTS]]
    if faults and job.bad_rows == "error":
        raise DataError(f"{faults[0]} (or leave such rows out: tools/preprocess_chat.py --bad-rows skip)")
    return EncodedBlock(
        np.concatenate([sample.ids for sample in samples] or [np.empty(0, np.int32)]),
        np.concatenate([sample.mask for sample in samples] or [np.empty(0, np.uint8)]),
        np.array([sample.length for sample in samples], np.int64),
        counts,
        faults,
        num_blank,
        [BlockCounts(block.without_content(), len(samples), num_blank, 0, len(problems))],
    )


@lru_cache(maxsize=1)
def _encoder_of(job: ChatJob) -> ChatEncoder:
    setup = prepare_chats(job)
    setup.tokenizer.expected_bytes = sys.maxsize  # workers are started for large inputs only
    return setup.encoder


def encode_in_worker(job: ChatJob, batch: list[Block]) -> EncodedBlock:
    """Encode a batch in a process that has the job alone."""
    return encode_batch(_encoder_of(job), batch, job)
