"""Statistics of an indexed dataset, and single documents of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.checksums import Checksums
from megatron.data.indexed import BLOCK_ENTRIES, DataError, IndexedDataset
from megatron.data.manifest import read_manifest

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer

Integers = NDArray[np.int64]

COUNTED_BELOW = 1 << 20
"""Lengths below this are counted in a table; of longer ones, at most one in a million tokens, a list is kept."""
PERCENTILES = (1, 10, 50, 90, 99)


class Lengths:
    """Exact counts of each length, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._short: Integers = np.zeros(COUNTED_BELOW, np.int64)
        self._long: list[Integers] = []

    def add(self, lengths: Integers) -> None:
        short = lengths < COUNTED_BELOW
        counts = np.bincount(lengths[short])
        self._short[: len(counts)] += counts
        if not short.all():
            self._long.append(lengths[~short])

    @cached_property
    def _table(self) -> tuple[Integers, Integers]:
        """Lengths that occur, ascending, and the count of each."""
        values = np.flatnonzero(self._short)
        long_values, long_counts = np.unique(np.concatenate([*self._long, np.empty(0, np.int64)]), return_counts=True)
        return np.concatenate([values, long_values]), np.concatenate([self._short[values], long_counts])

    @property
    def num_empty(self) -> int:
        return int(self._short[0])

    def describe(self) -> dict[str, Any]:
        """Return the smallest, the largest, the mean and nearest-rank percentiles."""
        values, counts = self._table
        up_to = np.cumsum(counts)
        total = int(up_to[-1])
        ranks = [max(1, -(-total * percent // 100)) for percent in PERCENTILES]
        return {
            "shortest": int(values[0]),
            "longest": int(values[-1]),
            "mean": float(values @ counts / total),
            "percentiles": {
                str(p): int(values[np.searchsorted(up_to, r)]) for p, r in zip(PERCENTILES, ranks, strict=True)
            },
        }

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (first length, last length, count) of 0, 1, 2-3, 4-7, ..., from the first to the last that occur."""
        values, counts = self._table
        bins = np.frexp(values.astype(np.float64))[1]  # 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7
        rows = []
        for power in range(int(bins[0]), int(bins[-1]) + 1):
            first, last = (0, 0) if power == 0 else (1 << (power - 1), (1 << power) - 1)
            rows.append((first, last, int(counts[bins == power].sum())))
        return rows


def token_positions(data: IndexedDataset, sequences: Integers) -> Integers:
    """Return the token at which each sequence starts; the number of tokens for the one after the last."""
    inside = np.minimum(sequences, len(data) - 1)
    return np.where(sequences < len(data), data.pointers[inside] // data.dtype.itemsize, data.num_tokens)


def document_bounds(data: IndexedDataset) -> Iterator[tuple[int, Integers]]:
    """Yield blocks of documents: the first document, and the tokens at which they start and the last one ends.

    Raises DataError for an inconsistent index.
    """
    for start in range(0, data.num_documents, BLOCK_ENTRIES):
        sequences = np.array(data.document_index[start : start + BLOCK_ENTRIES + 1])
        if sequences.min() < 0 or sequences.max() > len(data):
            raise DataError(
                f"{data.prefix}.idx: the document index leaves the {len(data)} sequences; --verify says more"
            )
        bounds = token_positions(data, sequences)
        if (np.diff(bounds) < 0).any():
            raise DataError(f"{data.prefix}.idx: documents of negative length; the file is damaged, --verify says more")
        data.release_memory()
        yield start, bounds


def measure(data: IndexedDataset, checksums: Checksums | None) -> dict[str, Any]:
    """Return the statistics that --json prints. Raises DataError for an inconsistent index."""
    documents, sequences = Lengths(), Lengths()
    for _, bounds in document_bounds(data):
        documents.add(np.diff(bounds))
    for start in range(0, len(data), BLOCK_ENTRIES):
        lengths = data.lengths[start : start + BLOCK_ENTRIES].astype(np.int64)
        if lengths.min() < 0:
            raise DataError(f"{data.prefix}.idx: sequences of negative length; the file is damaged, --verify says more")
        sequences.add(lengths)
        data.release_memory()
    return {
        "prefix": data.prefix,
        "documents": data.num_documents,
        "empty_documents": documents.num_empty,
        "sequences": len(data),
        "tokens": data.num_tokens,
        "dtype": str(data.dtype),
        "bin_bytes": Path(data.prefix + ".bin").stat().st_size,
        "idx_bytes": Path(data.prefix + ".idx").stat().st_size,
        "checksum_file": checksums is not None,
        "notes": checksums.notes if checksums else {},
        "manifest": _manifest_summary(data),
        "document_lengths": documents.describe(),
        "sequence_lengths": sequences.describe(),
        "document_length_histogram": documents.histogram(),
    }


def _manifest_summary(data: IndexedDataset) -> dict[str, Any] | None:
    manifest = read_manifest(data.prefix)
    if manifest is None:
        return None
    return {"file": str(manifest.path), "summary": manifest.describe(), "counts": manifest.counts, **manifest.header}


def read_document(data: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the ids of a document's sequences, and its text; -1 is the last document. Raises DataError."""
    count = data.num_documents
    if not -count <= number < count:
        raise DataError(f"{data.prefix} has documents 0 to {count - 1}; there is no document {number}")
    document = number % count
    first, last = (int(i) for i in data.document_index[document : document + 2])
    if not 0 <= first <= last <= len(data):
        raise DataError(
            f"{data.prefix}.idx: document {document} runs from sequence {first} to {last}; the file is damaged, "
            "--verify says more"
        )
    sequences = [data.read(sequence).tolist() for sequence in range(first, last)]
    found: dict[str, Any] = {"document": document, "sequences": sequences}
    if tokenizer is not None:
        try:
            found["text"] = tokenizer.decode([i for sequence in sequences for i in sequence])
        except Exception as error:  # the type depends on the tokenizer's library
            raise DataError(
                f"document {document} of {data.prefix} cannot be decoded ({type(error).__name__}: {error}); use the "
                "tokenizer the data was made with"
            ) from error
    return found
