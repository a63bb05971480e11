"""Tokenizer for text that is already token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DataError
from megatron.data.tokenizers.base import IdentifiedTokenizer, TokenBatch, end_to_end, option_bytes


class NullTokenizer(IdentifiedTokenizer):
    """Parser of ids separated by white space, for data prepared elsewhere. eod is the last id."""

    def __init__(self, vocab_size: int):
        super().__init__("NullTokenizer", option_bytes("vocab_size", vocab_size))
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return end_to_end([self._encode(text) for text in texts], np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            ids = np.fromiter(map(int, text.split()), dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"NullTokenizer reads ids separated by white space: {error}") from None
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise DataError(f"id {outside[0]} is outside vocab_size={self.vocab_size}; enlarge it, or correct the text")
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_id(self, token: str) -> int | None:
        is_id = token.isdecimal() and len(token) <= len(str(self.vocab_size)) and int(token) < self.vocab_size
        return int(token) if is_id else None
