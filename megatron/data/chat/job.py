"""What is to be done with files of chats, and the doing of it for one block of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.data.chat.conversation import (
    BadRow,
    Chat,
    ChatCounts,
    ChatEncoder,
    ChatRules,
    Sample,
    TooLong,
    TrainOn,
    parse_row,
)
from megatron.data.chat.template import ChatTemplate, TemplateSource, find_template
from megatron.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from megatron.data.document_blocks import Block, Fault
from megatron.data.document_parser import object_of_line
from megatron.data.indexed import DataError

BadRows = Literal["error", "skip"]

SHOWN_FAULTS = 10


@dataclass(frozen=True)
class ChatJob:
    """Everything that decides what is written."""

    inputs: tuple[str, ...]
    """Files, folders or globs of .jsonl, also .gz and .zst."""
    output_prefix: str
    tokenizer: str
    """tokenizer.json, or its folder."""
    chat_template: str | None = None
    """A preset's name, a .jinja file, a .py file with CHAT_TEMPLATE; None: the tokenizer's own."""
    max_length: int | None = None
    """Tokens in a sample."""
    too_long: TooLong = "drop"
    min_length: int = 1
    """Shorter samples are dropped."""
    bad_rows: BadRows = "error"
    train_on: TrainOn = "assistant"
    """What rows without `unmask` train."""
    append_eos: bool = True
    """End the last turn with EOS where the template ends it with nothing."""
    add_special_tokens: bool = False
    """Add the template's tokens that the tokenizer lacks."""
    tokenizer_output: str | None = None
    """Folder that gets the tokenizer with added tokens and the template."""
    workers: int = 1
    """Processes at most."""

    def __post_init__(self) -> None:
        for name in ("min_length", "workers", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name}={value} must be at least 1")
        if self.max_length is not None and self.max_length < self.min_length:
            raise DataError(f"max_length={self.max_length} is below min_length={self.min_length}; no sample fits both")

    @property
    def rules(self) -> ChatRules:
        return ChatRules(self.train_on, self.append_eos, self.max_length, self.min_length, self.too_long)


@dataclass(frozen=True)
class ChatSetup:
    """The template and the tokenizer of a job, ready for use."""

    encoder: ChatEncoder
    tokenizer: ChatTokenizer
    source: TemplateSource
    added_tokens: tuple[str, ...]


def prepare_chats(job: ChatJob) -> ChatSetup:
    """Find the template, load the tokenizer and add tokens to it. Raises DataError."""
    path = Path(job.tokenizer)
    if not path.exists():
        raise DataError(f"tokenizer {path} does not exist; give a tokenizer.json, or the folder that holds one")
    source = find_template(job.chat_template, path if path.is_dir() else path.parent)
    wanted = source.tokens_to_add() if job.add_special_tokens else ()
    tokenizer, lacking = load_tokenizer(job.tokenizer, source.named_tokens, wanted)
    if lacking and job.tokenizer_output is None:
        raise DataError(
            f"the tokenizer {path} lacks {', '.join(lacking)}; say with --tokenizer-output which folder gets the "
            "tokenizer that has them, or leave --add-special-tokens away"
        )
    template = ChatTemplate(source, tokenizer.tokens)
    return ChatSetup(ChatEncoder(template, tokenizer, job.rules), tokenizer, source, lacking)


@dataclass
class EncodedBlock:
    """The samples of a block of rows, end to end."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    counts: ChatCounts
    faults: list[str]
    num_blank: int = 0

    def samples(self) -> Iterator[Sample]:
        """One after the other."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield Sample(self.ids[start:end], self.mask[start:end])

    def to_bytes(self) -> list[bytes]:
        """A header, and the arrays, for the process that writes."""
        header = {
            "counts": {**asdict(self.counts), "dropped": dict(self.counts.dropped), "bad": dict(self.counts.bad)},
            "faults": self.faults,
            "num_blank": self.num_blank,
        }
        return [orjson.dumps(header), self.ids.tobytes(), self.mask.tobytes(), self.lengths.tobytes()]

    @classmethod
    def from_bytes(cls, parts: Sequence[bytes]) -> EncodedBlock:
        header = orjson.loads(parts[0])
        counts = header["counts"]
        counts["dropped"], counts["bad"] = Counter(counts["dropped"]), Counter(counts["bad"])
        return cls(
            np.frombuffer(parts[1], np.int32),
            np.frombuffer(parts[2], np.uint8),
            np.frombuffer(parts[3], np.int64),
            ChatCounts(**counts),
            header["faults"],
            header["num_blank"],
        )


def encode_block(encoder: ChatEncoder, block: Block, bad_rows: BadRows) -> EncodedBlock:
    """Raises DataError, naming the row, at the first bad one, unless they are skipped."""
    rows, problems, num_blank = _rows(block)
    counts = ChatCounts(num_rows=len(rows) + len(problems))
    chats: list[Chat] = []
    numbers: list[int] = []
    for number, row in rows:
        try:
            chats.append(parse_row(row))
            numbers.append(number)
        except BadRow as error:
            problems.append((number, error.kind, str(error)))
    samples: list[Sample] = []
    for number, result in zip(numbers, encoder.encode(chats, counts), strict=True):
        if isinstance(result, BadRow):
            problems.append((number, result.kind, str(result)))
        else:
            samples += result
    problems.sort()
    counts.bad.update(kind for _, kind, _ in problems)
    faults = [str(Fault(block.place(number), reason)) for number, _, reason in problems[:SHOWN_FAULTS]]
    if faults and bad_rows == "error":
        raise DataError(f"{faults[0]} (or pass --bad-rows skip to leave such rows out)")
    return EncodedBlock(
        np.concatenate([sample.ids for sample in samples] or [np.empty(0, np.int32)]),
        np.concatenate([sample.mask for sample in samples] or [np.empty(0, np.uint8)]),
        np.array([sample.length for sample in samples], np.int64),
        counts,
        faults,
        num_blank,
    )


def _rows(block: Block) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str, str]], int]:
    """The objects of a block's lines with their numbers, what is wrong with other lines, and how many are blank."""
    if block.fault is not None:  # a file that cannot be read on is no bad row: what follows is not known
        return [], [(0, "unreadable", block.fault.reason)], 0
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[tuple[int, str, str]] = []
    num_blank = 0
    for number, line in enumerate(block.raw.split(block.delimiter)):
        if not line.strip():
            num_blank += 1
            continue
        try:
            rows.append((number, object_of_line(line, '{"messages": [...]}')))
        except UnicodeDecodeError as error:
            problems.append((number, "no JSON", f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            problems.append((number, "no JSON", str(error)))
    return rows, problems, num_blank
