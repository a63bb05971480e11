"""Held-out samples that are in other data too, token for token, so that their loss is not one of unseen data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import IndexedDataset

LOOKED_AT = 8
"""Tokens of a sample that are compared before all of them are."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Documents(Protocol):
    """Documents of an indexed dataset, of equally many sequences each, and those in use."""

    @property
    def tokens(self) -> IndexedDataset: ...
    @property
    def rows(self) -> NDArray[np.int64]:
        """[rows]"""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sequence, [rows, sequences]."""


def repeats(held_out: Documents, others: Sequence[Documents]) -> NDArray[np.bool_]:
    """Return which of the documents [rows] are also in one of the other files."""
    signs, count = _signs(held_out), held_out.lengths().shape[1]
    is_candidate = np.zeros(len(signs), np.bool_)
    contents: set[bytes] = set()
    for other in others:
        theirs = _signs(other)
        is_candidate |= np.isin(signs, theirs)
        contents |= {_content(other, int(number), count) for number in np.flatnonzero(np.isin(theirs, signs))}
    found = np.zeros(len(signs), np.bool_)
    for number in np.flatnonzero(is_candidate).tolist():
        found[number] = _content(held_out, number, count) in contents
    return found


def _signs(file: Documents) -> NDArray[np.uint64]:
    """Return a number for each document, equal for equal ones, from its lengths and a few of its tokens."""
    file.tokens.files.check(always=True)
    lengths = file.lengths()
    starts = np.asarray(file.tokens.pointers[file.rows * lengths.shape[1]]) // file.tokens.dtype.itemsize
    totals = lengths.sum(axis=1)
    parts = [*lengths.T]
    for part in range(LOOKED_AT):
        # from both ends: chats often begin alike
        places = starts + (totals - 1) * part // (LOOKED_AT - 1)
        parts.append(np.take(file.tokens.tokens, places, mode="clip"))
    found = np.zeros(len(totals), np.uint64)
    for each in parts:
        found = (found ^ each.astype(np.int64).astype(np.uint64)) * FACTOR
        found ^= found >> np.uint64(29)
    return found


def _content(file: Documents, number: int, count: int) -> bytes:
    first = count * int(file.rows[number])
    digest = hashlib.blake2b(digest_size=16)
    for sequence in range(first, first + count):
        ids = file.tokens.read(sequence).astype(np.int64)
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.digest()
