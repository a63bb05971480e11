"""Blocks of documents to tokens, by several threads at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.prepare.manifest import BlockCounts
from megatron.data.read.document_blocks import Block, Fault, Position
from megatron.data.read.document_parser import Parsed, parse
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
    """A tokenized batch of blocks."""

    end: Position
    streams: list[Stream]
    """One for each key and partition, key by key."""
    totals: TextTotals
    faults: list[Fault]
    counts: list[BlockCounts]
    """Those of each block."""


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

    def encode(self, blocks: Sequence[Block]) -> Encoded:
        """Encode consecutive blocks. Raises NotAccelerated.

        A document without a token is left out if there is one key, its eod too. With several keys it stays, without a
        sequence, so that the datasets have the same documents.
        """
        parsed = [parse(block, self.keys) for block in blocks]
        try:
            streams, is_empty = self._encode_columns(blocks, parsed)
        except MemoryError:
            raise
        except Exception:  # the type depends on the library: find the documents that it refuses
            for block, of_block in zip(blocks, parsed, strict=True):
                self._sift(block, of_block)
            streams, is_empty = self._encode_columns(blocks, parsed)
        if self.reference is not None and len(is_empty[0]):
            self._check_spot(self.reference, blocks[0], parsed)
        counts = self._counts(blocks, parsed, is_empty[0])
        totals = TextTotals(
            sum(block.num_input_bytes for block in blocks),
            len(is_empty[0]),
            sum(found.blank for found in counts),
            sum(found.bad for found in counts),
            [int(column.sum()) for column in is_empty],
        )
        return Encoded(blocks[-1].end, streams, totals, [fault for one in parsed for fault in one.faults], counts)

    def _counts(
        self, blocks: Sequence[Block], parsed: Sequence[Parsed], is_empty: NDArray[np.bool_]
    ) -> list[BlockCounts]:
        found = []
        start = 0
        leaves_out = len(self.keys) == 1 and bool(is_empty.any())
        for block, one in zip(blocks, parsed, strict=True):
            end = start + len(one.numbers)
            empty = int(is_empty[start:end].sum()) if leaves_out else 0
            found.append(
                BlockCounts(block.without_content(), end - start - empty, one.num_blank, empty, len(one.faults))
            )
            start = end
        return found

    def _encode_columns(
        self, blocks: Sequence[Block], parsed: Sequence[Parsed]
    ) -> tuple[list[Stream], list[NDArray[np.bool_]]]:
        """Return the streams, and for each key which documents have no token."""
        streams: list[Stream] = []
        is_empty: list[NDArray[np.bool_]] = []
        for k in range(len(self.keys)):
            texts = parsed[0].columns[k] if len(parsed) == 1 else [text for one in parsed for text in one.columns[k]]
            if self.num_partitions == 1:
                stream = self._encode_texts(texts)
                is_empty.append(stream.lengths == 0)
                streams.append(stream)
                continue
            documents = [
                block.begin.documents + n for block, one in zip(blocks, parsed, strict=True) for n in one.numbers
            ]
            partition_of = np.array(documents, np.int64) % self.num_partitions
            is_empty.append(np.zeros(len(texts), np.bool_))
            for wanted in range(self.num_partitions):
                chosen = np.flatnonzero(partition_of == wanted)
                streams.append(self._encode_texts([texts[i] for i in chosen]))
                is_empty[-1][chosen] = streams[-1].lengths == 0
        if len(self.keys) == 1:
            for stream in streams:
                stream.lengths = stream.lengths[stream.lengths > 0]
        return streams, is_empty

    def _encode_texts(self, texts: list[str]) -> Stream:
        ids, lengths = self.tokenizer.encode_batch(texts)
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise AssertionError(f"the tokenizer gave id {ids.max()} of a vocabulary of {self.tokenizer.vocab_size}")
        tokens = ids.astype(self.dtype)
        if self.eod is not None:
            has_tokens = lengths > 0
            tokens = np.insert(tokens, np.cumsum(lengths[has_tokens]), self.eod)
            lengths = lengths + has_tokens
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

    def _check_spot(self, reference: Tokenizer, first: Block, parsed: Sequence[Parsed]) -> None:
        of_block = next(one for one in parsed if one.numbers)
        text = of_block.columns[0][first.begin.documents % len(of_block.numbers)]
        start = first.begin.offset % max(1, len(text) - SPOT_CHARACTERS)
        check_equal(self.tokenizer, reference, [text[start : start + SPOT_CHARACTERS]])
