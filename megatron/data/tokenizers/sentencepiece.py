"""SentencePiece models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers import base


class SentencePieceTokenizer(base.Tokenizer):
    """A SentencePiece .model. Raises DataError.

    The library never parses a control piece such as `</s>` in text. To parse them, the text is cut at these pieces and
    each stretch between two is encoded as a text of its own, with the model's space before it, as Megatron does.
    """

    def __init__(self, path: str | Path, parse_special_tokens: bool = False):
        import sentencepiece

        self.model_proto = base.read_bytes(Path(path), "a SentencePiece model")
        super().__init__(
            "SentencePieceTokenizer", self.model_proto, base.option_bytes("parse_special_tokens", parse_special_tokens)
        )
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=self.model_proto)
        except Exception as error:  # RuntimeError, or what protobuf raises
            hint = base.looks_like(self.model_proto, "a SentencePiece model")
            raise DataError(
                f"{path} is not a SentencePiece model, or is truncated; give a .model file{hint}"
            ) from error
        self.vocab_size: int = self._inner.get_piece_size()
        self.eod = _id_or_none(self._inner.eos_id())
        self.bos = _id_or_none(self._inner.bos_id())
        self.special_tokens: dict[str, int] = {}
        """Pieces that are parsed in text."""
        if parse_special_tokens:
            self.special_tokens = {self._inner.id_to_piece(number): number for number in self._control_ids()}
        self._special = base.any_of(self.special_tokens)

    def _control_ids(self) -> list[int]:
        return [number for number in range(self.vocab_size) if self._inner.is_control(number)]

    def encode_plain(self, texts: Sequence[str]) -> base.TokenBatch:
        if self._special is not None:
            return base.end_to_end([self._encode(text) for text in texts], np.int32)
        try:
            # one thread, since callers have threads of their own
            documents = self._inner.encode(list(texts), out_type="numpy", num_threads=1)
        except Exception as error:  # RuntimeError or TypeError
            raise base.refusal(texts, error) from error
        return base.end_to_end(documents, np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text with control pieces."""
        assert self._special is not None
        try:
            # text at even indices, control pieces at odd ones
            stretches = self._special.split(text)
            ids = self._inner.encode(stretches[::2], out_type="numpy", num_threads=1)
        except Exception as error:  # RuntimeError or TypeError
            raise base.refusal([text], error) from error
        # joined in turn below; there is one stretch of text more than pieces
        parsed = [np.array([self.special_tokens[piece]], dtype=np.int32) for piece in stretches[1::2]]
        both = itertools.zip_longest(ids, parsed, fillvalue=np.empty(0, dtype=np.int32))
        return np.concatenate(list(itertools.chain.from_iterable(both)))

    def decode(self, ids: Sequence[int]) -> str:
        try:
            text: str = self._inner.decode([int(i) for i in ids])
        except IndexError:
            raise base.unknown_id(ids, self.vocab_size) from None
        return text

    @property
    def special_ids(self) -> frozenset[int]:
        return super().special_ids.union(self._control_ids())

    def token_id(self, token: str) -> int | None:
        # an unknown piece has the id of <unk>
        number: int = self._inner.piece_to_id(token)
        return number if self._inner.id_to_piece(number) == token else None

    def pieces_beyond_text(self) -> tuple[list[str], list[str]]:
        """Return pieces that text never becomes: the unused ones; and the control, unknown and byte pieces."""
        inner, ids = self._inner, range(self.vocab_size)
        unused = [inner.id_to_piece(i) for i in ids if inner.is_unused(i)]
        reserved = [inner.id_to_piece(i) for i in ids if inner.is_control(i) or inner.is_unknown(i) or inner.is_byte(i)]
        return unused, reserved


def _id_or_none(number: int) -> int | None:
    """Return an id of the model, which has -1 for a piece that it lacks."""
    return None if number < 0 else number
