"""Text to token ids and back, behind one face and under the names Megatron's users know.

Documents are plain text: a literal `<|endoftext|>` in one is encoded as those thirteen characters, never as the
special id, unless `parse_special_tokens` is asked for. No beginning- or end-of-text ids are added; the end-of-document
id is the caller's to append.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DataError

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class TokenBatch(NamedTuple):
    """Documents as token ids, end to end."""

    ids: NDArray[Any]
    """Ids of all documents in their order, 32-bit integers, signed or not."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document. None: the tokenizer has none."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the ids, for JSON: `type`, `vocab_size`, `eod`, and the `sha256` of its files and options.

        Where they lie and under which alias they were asked for makes no difference.
        """

    @property
    def batch_bytes(self) -> int | None:
        """How much text at once encode_batch is fast with. None: it makes no difference."""

    def encode(self, text: str) -> list[int]:
        """Raises DataError for a text that cannot be encoded, such as one with a lone surrogate."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """All of them, or DataError if any cannot be encoded. Several threads may call it at once."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are left out, or a DataError."""


class IdentifiedTokenizer:
    """What all tokenizers share: who they are, and which id ends a document."""

    vocab_size: int
    eod: int | None
    batch_bytes: int | None = None

    def __init__(self, kind: str, *contents: bytes):
        digest = hashlib.sha256(kind.encode())
        for content in contents:
            # lengths keep neighbours apart
            digest.update(len(content).to_bytes(8, "little") + content)
        self._kind = kind
        self._sha256 = digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        return {"type": self._kind, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": self._sha256}


def option_bytes(name: str, value: object) -> bytes:
    return f"{name}={value}".encode()


def end_to_end(documents: Sequence[NDArray[Any]], dtype: type[np.integer[Any]]) -> TokenBatch:
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    return TokenBatch(np.concatenate(documents) if documents else np.empty(0, dtype), lengths)


def refusal(texts: Sequence[str], error: Exception) -> DataError:
    """Why the library refused one of the texts. Lone surrogates are what it cannot say clearly itself."""
    for text in texts:
        place = re.search("[\ud800-\udfff]", text)
        if place:
            return DataError(
                f"character {place.start()} of the text is the lone surrogate U+{ord(place[0]):04X}, which is half a "
                "character; correct the text, or leave it out"
            )
    return DataError(f"the text cannot be encoded: {error}")


def unknown_id(ids: Sequence[int], vocab_size: int) -> DataError:
    outside = next((int(i) for i in ids if not 0 <= int(i) < vocab_size), None)
    # tiktoken's published vocabularies have gaps before their special tokens
    what = "one of the ids is no token's" if outside is None else f"id {outside} is outside vocab_size={vocab_size}"
    return DataError(f"{what}; decode with the tokenizer that the ids are of")


def any_of(words: Collection[str]) -> re.Pattern[str] | None:
    """Finds, as its only group, the longest of the words that starts earliest. None: there are no words."""
    longest_first = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
