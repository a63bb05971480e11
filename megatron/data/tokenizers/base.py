"""Interface of all tokenizers, under the names that Megatron's users know.

The classes here encode plain text: a literal `<|endoftext|>` is encoded as those thirteen characters, never as the
special id, unless `parse_special_tokens` is set, and nothing is added around a text, unless `added` is. `build.py` sets
both as Megatron's tokenizer of that name has them. The caller appends the end-of-document id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>")
CONFIG_NAME = "tokenizer_config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Tokens that tokenizer_config.json names and templates may write by name."""


class TokenBatch(NamedTuple):
    """Token ids of documents, concatenated."""

    ids: NDArray[Any]
    """32-bit integers, signed or unsigned."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""


class Added(NamedTuple):
    """Ids around a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Tokenizer(ABC):
    """Base of all tokenizers."""

    vocab_size: int
    """One more than the largest id."""
    eod: int | None
    """Id that ends a document; None if the tokenizer has none."""
    bos: int | None = None
    """Id that begins a text; None if the tokenizer has none."""
    template: Added = Added()
    """Ids that the tokenizer's own files put around each text."""
    added: Added = Added()
    """Ids that are put around each text which has a token."""
    batch_bytes: int | None = None
    """Size of batch at which encode_batch is fastest; None if it makes no difference."""

    def __init__(self, kind: str, *contents: bytes):
        """`kind` and `contents`, its files and options, identify it."""
        digest = hashlib.sha256(kind.encode())
        for content in contents:
            # lengths separate neighbours
            digest.update(len(content).to_bytes(8, "little") + content)
        self._kind = kind
        self._sha256 = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises DataError if it cannot be encoded, as with an unpaired surrogate."""
        ids: list[int] = self.encode_batch([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of all texts. Raises DataError if one cannot be encoded. Thread-safe."""
        return surrounded(self.encode_plain(texts), self.added)

    @abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of all texts, with nothing added. Raises DataError. Thread-safe."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is none."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are left out or a DataError."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text, such as those that begin or end one."""
        return frozenset(() if self.eod is None else [self.eod])

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the ids, as JSON. Paths and aliases make no difference."""
        described = {"type": self._kind, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": self._sha256}
        return described | {"before": list(self.added.before), "after": list(self.added.after)}


def surrounded(batch: TokenBatch, added: Added) -> TokenBatch:
    """Return the batch with `added` around each text that has a token."""
    if not any(added):
        return batch
    ids, lengths = batch
    has_token = lengths > 0
    ends = np.cumsum(lengths)[has_token]
    starts = ends - lengths[has_token]
    # inserted at one offset, the end of a text comes before the start of the next, as np.insert keeps their order
    offsets = np.concatenate([np.repeat(ends, len(added.after)), np.repeat(starts, len(added.before))])
    # astype: NumPy makes float64 of an empty tuple, and so of both
    values = np.concatenate([np.tile(added.after, len(ends)), np.tile(added.before, len(starts))]).astype(ids.dtype)
    return TokenBatch(np.insert(ids, offsets, values), lengths + has_token * (len(added.before) + len(added.after)))


def option_bytes(name: str, value: object) -> bytes:
    return f"{name}={value}".encode()


def end_to_end(documents: Sequence[NDArray[Any]], dtype: type[np.integer[Any]]) -> TokenBatch:
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    return TokenBatch(np.concatenate(documents) if documents else np.empty(0, dtype), lengths)


def refusal(texts: Sequence[str], error: Exception) -> DataError:
    """Return the error for the text that a library refused, in clear words for unpaired surrogates."""
    for text in texts:
        surrogate = re.search("[\ud800-\udfff]", text)
        if surrogate:
            return DataError(
                f"character {surrogate.start()} of the text is the unpaired surrogate U+{ord(surrogate[0]):04X}, "
                "which is half a character; correct the text, or leave it out"
            )
    return DataError(f"the text cannot be encoded: {error}")


def unknown_id(ids: Sequence[int], vocab_size: int) -> DataError:
    outside = next((int(i) for i in ids if not 0 <= int(i) < vocab_size), None)
    # tiktoken's published vocabularies have gaps before their special tokens
    what = "one of the ids has no token" if outside is None else f"id {outside} is outside vocab_size={vocab_size}"
    return DataError(f"{what}; decode with the tokenizer that made the ids")


def any_of(words: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern whose only group is the longest word at the earliest offset; None without words."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    if not longest_first:
        return None
    # an alternation takes the first that fits, not the longest
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


# How files that are often confused begin, and what they are.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (rb"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page, not the file that the link should give"),
    (rb"[A-Za-z0-9+/]+=* \d+\r?\n", "a tiktoken rank file (TikTokenizer)"),
    (rb"#version", "a merges.txt (GPT2BPETokenizer)"),
    (rb'\s*\{\s*"version"', "a tokenizer.json (HFTokenizer)"),
    (rb'\s*\{\s*"[^"]*":\s*\d+\s*,', "a vocab.json (GPT2BPETokenizer, with its merges.txt)"),
    # protobuf: a piece (field 1), its length, and in it the text (field 1 again)
    (rb"\n.\n", "a SentencePiece model (SentencePieceTokenizer)"),
    (rb"PK\x03\x04|\x1f\x8b", "an archive; unpack it"),
)


def looks_like(content: bytes, wanted: str) -> str:
    """Return a sentence about what a file that is not `wanted` seems to be; empty if unknown."""
    for start, kind in _KINDS:
        # a file of the wanted kind that is damaged looks like that kind, which would be no help
        if re.match(start, content[:1000], re.IGNORECASE | re.DOTALL) and not kind.startswith(wanted):
            return f". It looks like {kind}"
    return ""


def read_bytes(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give {what}") from error
    if not content:
        raise DataError(f"{path} is empty; give {what}")
    return content


def check_replaced(folder: Path, files: Mapping[str, str], flag: str, *, overwrite: bool) -> None:
    """Raise DataError if files that are to be written replace others in `folder`, named by `flag`."""
    if overwrite:
        return
    for name, content in files.items():
        path = folder / name
        # the same tokenizer once more, as for a second dataset, replaces nothing
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content.encode()):
            raise DataError(
                f"{path} exists already and is of another tokenizer; pass --overwrite to replace it, or give another "
                f"{flag}"
            )


def decode_utf8(path: Path, content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = looks_like(content, what)
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); give {what}{hint}") from None


def parse_json(path: Path, content: bytes, what: str) -> Any:
    try:
        return json.loads(decode_utf8(path, content, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); give {what}{looks_like(content, what)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty if it is missing. Raises DataError."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return {}
    what = "a tokenizer_config.json"
    config = parse_json(path, read_bytes(path, what), what)
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a JSON object; copy it again")
    return config


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names: {"eos_token": "</s>", ...}."""
    tokens = {}
    for name in NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):  # an AddedToken, as older versions of transformers write it
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens
