"""Preparation of chats: a dataset of tokens and a dataset of their loss mask.

PREFIX.bin and .idx hold one sample a document, in the order of the input. PREFIX_loss_mask.bin and .idx hold one byte a
token: 1 where it is trained. Both datasets appear together when whole, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron.data.chat.conversation import BadRow, Chat
from megatron.data.chat.encoder import ChatCounts, ChatEncoder, ChatRules, Sample, TooLong, Turns
from megatron.data.chat.row_forms import AUTO, EXAMPLE, MIXED, PLAIN, RowReader
from megatron.data.chat.template import TOOL_TEMPLATE_NAME, ChatTemplate, TemplateSource, find_template
from megatron.data.chat.tokenizer import (
    ChatTokenizer,
    files_to_write,
    ids_before_text,
    load_tokenizer,
    write_tokenizer,
)
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, best_dtype
from megatron.data.prepare.block_encoder import JobInput, Output, Stream, find_input
from megatron.data.prepare.pipeline import Pipeline, PreparationReport, Silence, percentiles
from megatron.data.prepare.rows import RowEncoder, RowsJob
from megatron.data.tokenizers.base import check_replaced

if TYPE_CHECKING:
    from megatron.options.types import TrainOn


@dataclass(frozen=True)
class ChatJob(RowsJob):
    """Everything that decides the output."""

    remedy: ClassVar[str] = "cut the conversation into several, or leave the line out"
    _: KW_ONLY
    max_length: int | None = None
    """Tokens in a sample."""
    too_long: TooLong = "drop"
    min_length: int = 1
    """Shorter samples are dropped."""
    train_on: TrainOn = "assistant"
    """Tokens to train in rows without `unmask`; `all`: every token of every row, whatever the row says."""
    row_format: str = AUTO
    """Form of the rows (row_forms.py). `auto`: found by its keys, one for each file."""
    prompt_template: str | None = None
    """Text of the prompt with {column} for values, for columns of other names."""
    answer_key: str | None = None
    """Column of the answer to it."""
    turns: Turns = "together"
    """Turns of a conversation in one sample, or each after exactly its inference prompt."""
    add_special_tokens: bool = False
    """Add the template's tokens that the tokenizer lacks."""
    tokenizer_output: str | None = None
    """Folder for the tokenizer with its added tokens, and the template."""

    def __post_init__(self) -> None:
        for name in ("min_length", "workers", "max_length", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name}={value} must be at least 1")
        # options that contradict each other are refused before any file is opened
        if self.turns == "as_prompted":
            self._check_undone()
        if self.too_long != "drop" and self.max_length is None:
            raise DataError(f"too_long={self.too_long} needs max_length, which is not given; give it")
        if self.max_length is not None and self.max_length < self.min_length:
            raise DataError(f"max_length={self.max_length} is below min_length={self.min_length}; no sample fits both")
        _ = self.reader  # which checks its own options

    def _check_undone(self) -> None:
        """Raise DataError for an option that undoes the cutting of conversations before turns."""
        if self.train_on != "assistant":
            other = f"train_on={self.train_on}"
        elif self.too_long == "split":
            other = "too_long=split"
        else:
            return
        raise DataError(f"turns=as_prompted cuts conversations before turns, which {other} would undo; drop one")

    @cached_property
    def reader(self) -> RowReader:
        """The reader of the rows. Raises DataError."""
        # any other template writes a role before a text
        takes_texts = self.chat_template == PLAIN
        return RowReader(self.row_format, self.prompt_template, self.answer_key, takes_texts, self.ignore_columns)

    @property
    def rules(self) -> ChatRules:
        return ChatRules(self.train_on, self.turns, self.append_eos, self.max_length, self.min_length, self.too_long)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.reader.keys

    def encoder(self) -> ChatRows:
        """Find the template, load the tokenizer and add tokens to it. Raises DataError."""
        source = find_template(self.chat_template, tokenizer_folder(self.tokenizer))
        # new ids need rows in the model's embedding, so they are added on request alone
        wanted = source.tokens_to_add() if self.add_special_tokens else ()
        tokenizer, lacking = load_tokenizer(self.tokenizer, source.named_tokens, wanted)
        # without the changed tokenizer no one could read or generate these ids
        if lacking and self.tokenizer_output is None:
            raise DataError(
                f"the tokenizer {self.tokenizer} lacks {', '.join(lacking)}; name a folder for the tokenizer that has "
                "them with --tokenizer-output, or leave out --add-special-tokens"
            )
        if self.chat_template == PLAIN:
            # no template writes BOS here, with which a tokenizer such as Llama's begins texts
            first = tokenizer.decode(ids_before_text(tokenizer).tolist())
            if first:
                source = replace(source, text="{{- " + json.dumps(first) + " }}" + source.text)
        return ChatRows(self, source, tokenizer, lacking)


class ChatRows(RowEncoder[Chat, Sample, ChatCounts]):
    """Rows of chats to samples."""

    example = EXAMPLE
    command = "preprocess_chat"

    def __init__(self, job: ChatJob, source: TemplateSource, tokenizer: ChatTokenizer, added_tokens: tuple[str, ...]):
        # the name without its folder: the same template elsewhere is the same data
        name = Path(source.origin).name
        super().__init__(
            job,
            tokenizer,
            {"name": name, "sha256": source.sha256},
            asdict(job.rules),
            chat_template=name,
            row_format=job.row_format,
            prompt_template=job.prompt_template,
            answer_key=job.answer_key,
        )
        self.job: ChatJob = job
        self.source, self.added_tokens = source, added_tokens
        self.outputs = [
            # uint16 where every id fits, with the ids that were added
            Output(job.output_prefix, best_dtype(tokenizer.vocab_size)),
            Output(job.output_prefix + LOSS_MASK_SUFFIX, np.uint8),
        ]
        template, tool_template = compile_templates(source, tokenizer)
        self._encoder = ChatEncoder(template, tokenizer, job.rules, tool_template)

    def no_counts(self) -> ChatCounts:
        return ChatCounts()

    def read(self, row: dict[str, Any], source_name: str, place: str, counts: ChatCounts) -> Chat:
        form, chat, unread = self.job.reader.read(row)
        counts.unread.update(unread)
        counts.num_unanswered += not chat.ends_with_answer
        counts.forms[form] += 1
        # of mixed rows each is read by its own keys, and none contradicts another
        if self.job.row_format != MIXED:
            counts.first_forms.setdefault(source_name, {}).setdefault(form, place)
        return chat

    def encode_rows(self, rows: Sequence[Chat], counts: ChatCounts) -> list[list[Sample] | BadRow]:
        return self._encoder.encode(rows, counts)

    def streams(self, samples: Sequence[Sample]) -> list[Stream]:
        """Return the tokens, and the mask."""
        lengths = np.array([sample.length for sample in samples], np.int64)
        # an empty array in front: a block may have no samples
        ids = np.concatenate([np.empty(0, np.int32), *(sample.ids for sample in samples)])
        mask = np.concatenate([np.empty(0, np.uint8), *(sample.mask for sample in samples)])
        return [Stream(ids, lengths), Stream(mask, lengths)]

    def count_samples(self, samples: Sequence[Sample], counts: ChatCounts) -> None:
        counts.num_loss_tokens += sum(int(sample.mask.sum()) for sample in samples)

    def check(self, counts: ChatCounts) -> None:
        job = self.job
        # after all rows are read: one run names them all, and nothing is published
        if counts.num_too_long:
            raise DataError(
                f"{counts.num_too_long} of {counts.num_rows} conversations have more than max_length={job.max_length} "
                f"tokens; the first is {counts.first_too_long}, the longest has {counts.longest} tokens; raise "
                "--max-length, or choose what becomes of them: --too-long drop, truncate or split"
            )
        if counts.num_documents:
            return
        if counts.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (counts.dropped + counts.bad).most_common())
            raise DataError(
                f"no sample is left of {counts.num_rows} rows: {reasons}; correct the rows, or raise --max-length"
            )
        blank = f", only {counts.num_blank} blank lines" if counts.num_blank else ""
        raise DataError(f"no conversation in {', '.join(job.inputs)}{blank}; give a file with a JSON object a line")

    def check_outputs(self) -> None:
        super().check_outputs()
        folder = self.job.tokenizer_output
        if folder is None:
            return
        # a template for tools that is there is removed where this tokenizer has none
        files = {TOOL_TEMPLATE_NAME: "", **files_to_write(self.tokenizer, self.job.tokenizer, self.source)}
        check_replaced(Path(folder), files, "--tokenizer-output", overwrite=self.job.overwrite)

    def before_publishing(self) -> None:
        # before the dataset appears: data with added ids is never without the tokenizer that has them
        if self.job.tokenizer_output is not None:
            write_tokenizer(self.job.tokenizer_output, self.tokenizer, self.job.tokenizer, self.source)


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


@dataclass(frozen=True)
class ChatTotals:
    """Numbers of rows, samples and tokens."""

    counts: ChatCounts
    num_samples: int
    num_tokens: int
    vocab_size: int
    """Size of the vocabulary, added tokens included."""
    added_tokens: tuple[str, ...]
    length_percentiles: dict[int, int]
    """Percentile -> tokens in a sample."""


def preprocess_chats(
    job: ChatJob, report: PreparationReport | None = None, files: JobInput | None = None
) -> ChatTotals:
    """Run a job, whose `files` are those of `find_input`.

    For large inputs `workers` above 1 starts other processes; they do not import the caller's script. Raises DataError
    or OSError, and then leaves no dataset, and Finished.
    """
    encoder = job.encoder()
    encoder.read_from(files or find_input(job))
    counts = Pipeline(encoder, report or Silence()).run()
    data, vocab_size = IndexedDataset(job.output_prefix), encoder.tokenizer.vocab_size
    return ChatTotals(counts, len(data), data.num_tokens, vocab_size, encoder.added_tokens, percentiles(data.lengths))
