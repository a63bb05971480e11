"""Documents of indexed datasets in a random order, within a bounded memory.

Each document draws a number of 64 bits, and the documents are sorted by it. So the order is uniform among all orders,
and depends on the seed and the documents before it alone: neither on the memory, nor on how the documents are divided
into datasets.

The numbers are sorted from the outside in. A first pass over the index draws them, and cuts their range into parts of
which each has documents that fit the memory. A second pass appends each document to the files of its part. Then one
part after the other is read, sorted and written. Every file is read and written from its beginning to its end, so
that a disk is as fast as it can be. A part's files are removed when it is in memory: besides the datasets, the disk
never holds more than the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.checksums import ReportBytes
from megatron.data.index.indexed import DataError, IndexedDataset, Tokens
from megatron.data.index.indexed_builder import IndexedDatasetBuilder

Integers = NDArray[np.int64]

CELLS = 1 << 16
"""Parts of the range of numbers that are never divided. Their sizes are counted, to cut the range between them."""
CELL_SHIFT = np.uint64(48)
DOCUMENT_BYTES = 80
"""Memory for the tables of a document while its part is sorted: number, sequences, order, bounds, and copies."""
SEQUENCE_BYTES = 16
BLOCK_DOCUMENTS = 1 << 14
"""Documents processed at a time, or sequences if these are more."""
BLOCK_BYTES = 4 << 20
"""Tokens written at a time, unless one document has more."""


@dataclass(frozen=True)
class Documents:
    """Consecutive documents of a dataset."""

    tokens: Tokens
    lengths: NDArray[np.int32]
    """Tokens in each sequence."""
    sequence_bounds: Integers
    """First sequence of each document, and the end of the last."""
    token_bounds: Integers

    def __len__(self) -> int:
        return len(self.token_bounds) - 1

    @property
    def costs(self) -> Integers:
        """Memory that each document takes while it is sorted, in bytes."""
        tokens, sequences = np.diff(self.token_bounds), np.diff(self.sequence_bounds)
        return tokens * self.tokens.itemsize + sequences * SEQUENCE_BYTES + DOCUMENT_BYTES

    def taken(self, order: Integers) -> tuple[Tokens, NDArray[np.int32], Integers]:
        """Return tokens, lengths and numbers of sequences of documents in this order."""
        starts = self.sequence_bounds[order]
        sequences = self.sequence_bounds[order + 1] - starts
        if (sequences == 1).all():  # as of the documents of a language model
            lengths = self.lengths[starts]
        else:
            lengths = _taken(self.lengths, self.sequence_bounds, order)
        return _taken(self.tokens, self.token_bounds, order), lengths, sequences


def _taken(values: NDArray[Any], bounds: Integers, order: Integers) -> NDArray[Any]:
    # a document as long as the memory must not be there twice
    if len(order) == 1:
        return values[bounds[order[0]] : bounds[order[0] + 1]]
    starts, ends = bounds[order].tolist(), bounds[order + 1].tolist()
    return np.concatenate([values[start:end] for start, end in zip(starts, ends, strict=True)])


class Shuffle:
    """Plan of a shuffle. Raises DataError if `memory_bytes` are too few for it, or an index is damaged."""

    def __init__(self, datasets: Sequence[IndexedDataset], seed: int, memory_bytes: int):
        self.seed = seed
        self._datasets = datasets
        # a block is in memory twice, as tokens and as parts; it must leave room for nothing else
        self._block_bytes = max(1, memory_bytes // 4)
        costs = np.zeros(CELLS, np.int64)
        numbers = np.random.PCG64(seed)
        for data in datasets:
            for documents in document_blocks(data, self._block_bytes):
                cells = _cells(_drawn(numbers, len(documents)))
                # exact: sums of whole numbers below 2**53
                costs += np.bincount(cells, documents.costs, CELLS).astype(np.int64)
                data.release_memory()
        self._part_of_cell = _cut(costs, memory_bytes)
        self.num_parts = int(self._part_of_cell[-1]) + 1

    def divide(self, builder: IndexedDatasetBuilder, progress: ReportBytes) -> list[_Part]:
        """Return the parts in their order, whose files are in the work folder of the builder.

        Raises DataError, also for a dataset that differs from its PREFIX.sha256, or OSError.
        """
        parts = [_Part(builder.work_dir, number, builder.dtype) for number in range(self.num_parts)]
        numbers = np.random.PCG64(self.seed)
        for data in self._datasets:
            checksums = builder.check_input(data)
            digest = hashlib.sha256()
            for documents in document_blocks(data, self._block_bytes):
                digest.update(documents.tokens.data)
                self._divide(documents, _drawn(numbers, len(documents)), parts)
                progress(documents.tokens.nbytes)
                data.release_memory()
            if checksums:
                checksums.compare(data.prefix, ".bin", digest.hexdigest())
        return parts

    def add_sorted(self, builder: IndexedDatasetBuilder, parts: Sequence[_Part], progress: ReportBytes) -> None:
        """Add all documents to the builder, and remove the files of the parts. Raises OSError."""
        for part in parts:
            for tokens, lengths, sequences in part.sorted():
                builder.add_cut_documents(tokens, lengths, sequences)
                progress(tokens.nbytes)

    def _divide(self, documents: Documents, numbers: NDArray[np.uint64], parts: Sequence[_Part]) -> None:
        part_of = self._part_of_cell[_cells(numbers)]
        by_part = np.argsort(part_of, kind="stable")
        ends = np.cumsum(np.bincount(part_of, minlength=len(parts)))
        for part in np.unique(part_of).tolist():
            order = by_part[ends[part - 1] if part else 0 : ends[part]]
            parts[part].append(numbers[order], *documents.taken(order))


def _drawn(numbers: np.random.PCG64, count: int) -> NDArray[np.uint64]:
    # the generator's own output, which no version of NumPy changes, as it may its shuffles
    return np.asarray(numbers.random_raw(count), np.uint64)


def _cells(numbers: NDArray[np.uint64]) -> Integers:
    return (numbers >> CELL_SHIFT).astype(np.int64)


def _cut(costs: Integers, memory_bytes: int) -> Integers:
    """Return the part of each cell: consecutive cells that fit the memory together. Raises DataError."""
    largest = int(costs.max())
    if largest > memory_bytes:
        raise DataError(
            f"--shuffle-memory-gb {memory_bytes / 1e9:g} is too little: documents that are sorted together, or one "
            f"that is this long, take {largest / 1e9:.6f} GB; give at least {_rounded_up(largest):g}"
        )
    filled = np.flatnonzero(costs)
    later_parts: list[int] = []  # the first cell of each
    used = 0
    for cell, cost in zip(filled.tolist(), costs[filled].tolist(), strict=True):
        used += cost
        if used > memory_bytes:
            later_parts.append(cell)
            used = cost
    return np.searchsorted(later_parts, np.arange(CELLS), "right")


def _rounded_up(num_bytes: int) -> float:
    """Return gigabytes, to a thousandth."""
    return -(-num_bytes // 10**6) / 1000


class _Part:
    """Documents whose numbers lie in one part of the range, in files that are appended to and then read once."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]):
        # opened for each write: there may be more parts than a process may have open files
        self._tokens = folder / f"{number}.tokens"
        self._lengths = folder / f"{number}.lengths"
        self._documents = folder / f"{number}.documents"
        self._dtype = dtype

    def append(
        self, numbers: NDArray[np.uint64], tokens: Tokens, lengths: NDArray[np.int32], sequences: Integers
    ) -> None:
        documents = np.stack([numbers, sequences.astype(np.uint64)], axis=1)
        for path, values in ((self._tokens, tokens), (self._lengths, lengths), (self._documents, documents)):
            with path.open("ab") as file:
                file.write(values.data)

    def sorted(self) -> Iterator[tuple[Tokens, NDArray[np.int32], Integers]]:
        """Yield tokens, lengths and numbers of sequences of documents in order, and remove the files."""
        documents, order = self._read()
        costs = np.cumsum(np.diff(documents.token_bounds)[order])
        most = BLOCK_BYTES // self._dtype.itemsize
        start = 0
        while start < len(order):
            before = costs[start - 1] if start else 0
            end = int(np.searchsorted(costs, before + most, "right"))
            end = min(max(end, start + 1), start + BLOCK_DOCUMENTS)
            yield documents.taken(order[start:end])
            start = end

    def _read(self) -> tuple[Documents, Integers]:
        """Return the documents, and their order. Removes the files."""
        tokens, lengths = np.fromfile(self._tokens, self._dtype), np.fromfile(self._lengths, np.int32)
        table = np.fromfile(self._documents, np.uint64).reshape(-1, 2)
        # before the result grows by as much
        for path in (self._tokens, self._lengths, self._documents):
            path.unlink()
        # of equal numbers, which are rare, the first document comes first
        order = np.argsort(table[:, 0], kind="stable")
        sequence_bounds = _bounds(table[:, 1].astype(np.int64))
        return Documents(tokens, lengths, sequence_bounds, _bounds(lengths)[sequence_bounds]), order


def _bounds(counts: NDArray[Any]) -> Integers:
    """Return where each of several parts of these sizes begins, and the end of the last."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def document_blocks(data: IndexedDataset, most_bytes: int) -> Iterator[Documents]:
    """Yield the documents in order, in blocks of at most so many bytes of tokens unless one has more.

    Raises DataError for a damaged index.
    """
    at, end_byte = 0, 0
    while at < data.num_documents:
        data.files.check(always=True)
        bounds = _up_to(np.array(data.document_index[at : at + BLOCK_DOCUMENTS + 1]), BLOCK_DOCUMENTS)
        first, last = int(bounds[0]), int(bounds[-1])
        lengths = data.lengths[first:last]
        token_bounds = _bounds(lengths)
        pointers = end_byte + token_bounds[:-1] * data.dtype.itemsize
        is_whole = last <= len(data) and (np.diff(bounds) >= 0).all() and (lengths >= 0).all()
        if not is_whole or (data.pointers[first:last] != pointers).any():
            raise DataError(
                f"{data.prefix}.idx: lengths, pointers and documents disagree within its documents {at} to "
                f"{at + len(bounds) - 1}; the file is damaged, copy it again"
            )
        token_bounds = token_bounds[bounds - first]
        token_bounds = _up_to(token_bounds, most_bytes // data.dtype.itemsize)
        bounds = bounds[: len(token_bounds)] - first
        start = end_byte // data.dtype.itemsize
        tokens = data.tokens[start : start + int(token_bounds[-1])]
        yield Documents(tokens, lengths[: int(bounds[-1])], bounds, token_bounds)
        at += len(bounds) - 1
        end_byte += tokens.nbytes


def _up_to(bounds: Integers, most: int) -> Integers:
    """Return the first bounds, at least two, that span at most `most`."""
    count = int(np.searchsorted(bounds, bounds[0] + most, "right"))
    return bounds[: max(2, count)]
