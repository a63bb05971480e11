"""Blocks of documents to tokens, by several threads at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.document_blocks import Block, Fault, Position
from megatron.data.document_parser import Parsed, parse
from megatron.data.tokenizers.acceleration import check_equal
from megatron.data.tokenizers.base import Tokenizer

SPOT_CHARACTERS = 1 << 9
"""Characters of every block that both tokenizers encode."""


@dataclass
class Stream:
    """Tokens of documents, end to end, and the length of each document."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]


@dataclass
class TextTotals:
    """Counts of the input that has been processed."""

    num_bytes: int = 0
    num_documents: int = 0
    num_blank: int = 0
    num_bad: int = 0
    num_empty: list[int] = field(default_factory=list)
    """Documents without a token, for each key."""

    def add(self, other: TextTotals) -> None:
        self.num_bytes += other.num_bytes
        self.num_documents += other.num_documents
        self.num_blank += other.num_blank
        self.num_bad += other.num_bad
        self.num_empty = [a + b for a, b in zip(self.num_empty, other.num_empty, strict=True)]


@dataclass
class Encoded:
    """A tokenized block."""

    end: Position
    streams: list[Stream]
    """One for each key and partition, key by key."""
    totals: TextTotals
    faults: list[Fault]


@dataclass(frozen=True)
class Encoder:
    """Encoder of blocks; several threads share one."""

    keys: tuple[str, ...]
    num_partitions: int
    eod: int | None
    """Appended to each document. None: nothing."""
    dtype: Any
    tokenizer: Tokenizer
    reference: Tokenizer | None
    """Tokenizer whose ids `tokenizer` must give. None: it is the reference itself."""

    def encode(self, block: Block) -> Encoded:
        """Encode a block. A document without a token is left out, its eod too. Raises NotAccelerated."""
        parsed = parse(block, self.keys)
        try:
            streams, num_empty = self._encode_columns(block, parsed)
        except MemoryError:
            raise
        except Exception:  # the type depends on the library: find the documents that it refuses
            self._sift(block, parsed)
            streams, num_empty = self._encode_columns(block, parsed)
        if self.reference is not None and parsed.numbers:
            self._check_spot(self.reference, block, parsed)
        totals = TextTotals(block.num_input_bytes, len(parsed.numbers), parsed.num_blank, len(parsed.faults), num_empty)
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
        ids, lengths = self.tokenizer.encode_batch(texts)
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise AssertionError(f"the tokenizer gave id {ids.max()} of a vocabulary of {self.tokenizer.vocab_size}")
        tokens = ids.astype(self.dtype)
        lengths = lengths[lengths > 0]
        if self.eod is not None:
            tokens = np.insert(tokens, np.cumsum(lengths), self.eod)
            lengths = lengths + 1
        return Stream(tokens, lengths)

    def _sift(self, block: Block, parsed: Parsed) -> None:
        """Move documents that the tokenizer refuses to `parsed.faults`."""
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
        row = block.begin.documents % len(parsed.numbers)
        text = parsed.columns[0][row]
        start = block.begin.offset % max(1, len(text) - SPOT_CHARACTERS)
        check_equal(self.tokenizer, reference, [text[start : start + SPOT_CHARACTERS]])
