"""Tokenizer for text that is already token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DataError
from megatron.data.tokenizers.base import IdentifiedTokenizer, TokenBatch, end_to_end, option_bytes


class NullTokenizer(IdentifiedTokenizer):
    """Parser of ids separated by white space, for data prepared elsewhere: those of `num_ids` ids, then the eod.

    Source: megatron-core 0.17 and before. From 0.18 on, its eod is the last of the ids.
    """

    def __init__(self, num_ids: int):
        super().__init__("NullTokenizer", option_bytes("num_ids", num_ids))
        self.vocab_size = num_ids + 1
        self.eod = num_ids

    def encode_plain(self, texts: Sequence[str]) -> TokenBatch:
        return end_to_end([self._encode(text) for text in texts], np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            ids = np.fromiter(map(int, text.split()), dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"NullTokenizer reads ids separated by white space: {error}") from None
        num_ids = self.vocab_size - 1
        outside = ids[(ids < 0) | (ids >= num_ids)]
        if len(outside):
            is_eod = ", which is the end-of-document id," if outside[0] == num_ids else ""
            raise DataError(f"id {outside[0]}{is_eod} is outside vocab_size={num_ids}; enlarge it, or correct the text")
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_id(self, token: str) -> int | None:
        is_id = token.isdecimal() and len(token) <= len(str(self.vocab_size)) and int(token) < self.vocab_size
        return int(token) if is_id else None
