"""Statistics, single documents, and verification of an indexed dataset.

Everything is read once, in memory that does not grow with the dataset.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.checksums import Checksums, ReportBytes, file_sha256
from megatron.data.index.indexed import BLOCK_ENTRIES, DataError, IndexedDataset
from megatron.data.prepare.manifest import read_manifest

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
        # a table of a million counts, since a list of lengths would be as long as the dataset
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
        percentiles = {}
        for percent in PERCENTILES:
            rank = max(1, -(-total * percent // 100))
            percentiles[str(percent)] = int(values[np.searchsorted(up_to, rank)])
        return {
            "shortest": int(values[0]),
            "longest": int(values[-1]),
            "mean": float(values @ counts / total),
            "percentiles": percentiles,
        }

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (first length, last length, count) of 0, 1, 2-3, 4-7, ..., from the first to the last that occur."""
        values, counts = self._table
        # the exponent counts the binary digits, exactly
        bins = np.frexp(values.astype(np.float64))[1]  # 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7
        rows = []
        for power in range(int(bins[0]), int(bins[-1]) + 1):
            first, end = (1 << power) >> 1, 1 << power
            rows.append((first, end - 1, int(counts[bins == power].sum())))
        return rows


def token_positions(data: IndexedDataset, sequences: Integers) -> Integers:
    """Return the token at which each sequence starts; the number of tokens for the one after the last."""
    # the sequence after the last has no pointer
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
    content: dict[str, Any] = {"document": document, "sequences": sequences}
    if tokenizer is not None:
        try:
            content["text"] = tokenizer.decode([i for sequence in sequences for i in sequence])
        # ids may be those of another tokenizer
        except Exception as error:  # the type depends on the tokenizer's library
            raise DataError(
                f"document {document} of {data.prefix} cannot be decoded ({type(error).__name__}: {error}); use the "
                "tokenizer the data was made with"
            ) from error
    return content


SHOWN_FINDINGS = 10
TOKENS_AT_A_TIME = 4 << 20


class Findings:
    """Errors found, by kind: their number, and messages of the first ones."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.shown: dict[str, list[str]] = {}

    def add(self, kind: str, messages: Iterable[str], count: int) -> None:
        """Add `count` findings of a kind; only as many messages are generated as are shown."""
        if not count:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        shown = self.shown.setdefault(kind, [])
        # a damaged file has millions of findings: only the messages that are shown are made
        shown.extend(message for message, _ in zip(messages, range(SHOWN_FINDINGS - len(shown)), strict=False))

    def as_json(self) -> dict[str, Any]:
        return {kind: {"count": count, "first": self.shown[kind]} for kind, count in self.counts.items()}


@dataclass(frozen=True)
class Expected:
    """Rules for the token ids. None: unknown."""

    vocab_size: int | None
    eod: int | None
    every_document_ends: bool
    """Every document must end with `eod`."""
    tokenizer: dict[str, Any] | None = None
    """Identity of the tokenizer on the command line."""


def verify_tokenizer(data: IndexedDataset, expected: Expected, checksums: Checksums | None, findings: Findings) -> None:
    """Compare the tokenizer with the one that the data was made with, and its vocabulary with the file's type."""
    noted = None
    if checksums is not None:
        noted = checksums.notes.get("tokenizer")
    if expected.tokenizer and noted and noted != expected.tokenizer:
        given, made_with = json.dumps(expected.tokenizer), json.dumps(noted)
        findings.add("tokenizer", [f"{data.prefix}.sha256 says {made_with}, but the tokenizer is {given}"], 1)
    largest = np.iinfo(data.dtype).max if data.dtype.kind in "iu" else 0
    if expected.vocab_size and expected.vocab_size - 1 > largest:
        message = f"{data.dtype} holds no ids above {largest}, but the vocabulary has {expected.vocab_size:,}"
        findings.add("tokenizer", [message], 1)


def verify_index(data: IndexedDataset, findings: Findings) -> None:
    """Compare lengths, pointers and the document index with each other. Opening has verified their ends."""
    _verify_pointers(data, findings)
    for start in range(0, data.num_documents, BLOCK_ENTRIES):
        sequences = np.array(data.document_index[start : start + BLOCK_ENTRIES + 1])
        wrong = np.flatnonzero((np.diff(sequences) < 0) | (sequences[1:] > len(data)))
        messages = (
            f"document {start + i} runs from sequence {sequences[i]} to {sequences[i + 1]} of {len(data)}"
            for i in wrong
        )
        findings.add("document index", messages, len(wrong))
        data.release_memory()


def _verify_pointers(data: IndexedDataset, findings: Findings) -> None:
    item_bytes, bin_bytes, count = data.dtype.itemsize, data.num_tokens * data.dtype.itemsize, len(data)
    for start in range(0, count, BLOCK_ENTRIES):
        lengths = data.lengths[start : start + BLOCK_ENTRIES].astype(np.int64)
        # a pointer beyond the last sequence is the end of the .bin
        pointers = np.append(data.pointers[start : start + len(lengths) + 1], bin_bytes)[: len(lengths) + 1]
        negative = np.flatnonzero(lengths < 0)
        findings.add("length", (f"sequence {start + i} has {lengths[i]} tokens" for i in negative), len(negative))
        outside = np.flatnonzero((pointers[:-1] < 0) | (pointers[:-1] > bin_bytes))
        messages = (
            f"sequence {start + i} starts at byte {pointers[i]}, outside the {bin_bytes} of the .bin" for i in outside
        )
        findings.add("pointer", messages, len(outside))
        wrong = np.flatnonzero(np.diff(pointers) != lengths * item_bytes)
        messages = (
            f"sequence {start + i} at byte {pointers[i]} has {lengths[i]} tokens of {item_bytes} bytes, but the next "
            f"one starts at byte {pointers[i + 1]}"
            for i in wrong
        )
        findings.add("pointer", messages, len(wrong))
        data.release_memory()


def verify_bin(
    data: IndexedDataset,
    expected: Expected,
    ends: DocumentEnds | None,
    checksums: Checksums | None,
    findings: Findings,
    progress: ReportBytes,
) -> dict[str, str]:
    """Verify token ids, ends of documents and checksums in one pass over the files, and return the SHA-256 found."""
    digest = hashlib.sha256()
    for start in range(0, data.num_tokens, TOKENS_AT_A_TIME):
        tokens = data.tokens[start : start + TOKENS_AT_A_TIME]
        verify_ids(data, start, tokens, expected.vocab_size, findings)
        if ends:
            ends.check(start, tokens)
        if checksums:
            # in the same pass: the file is read from disk once
            digest.update(tokens.data)
        progress(tokens.nbytes)
        data.release_memory()
    if not checksums:
        return {}
    sha256 = {".bin": digest.hexdigest(), ".idx": file_sha256(data.prefix + ".idx", progress)}
    for suffix, of_file in sha256.items():
        try:
            checksums.compare(data.prefix, suffix, of_file)
        except DataError as error:
            findings.add("checksum", [str(error)], 1)
    return sha256


def verify_manifest(data: IndexedDataset, sha256: dict[str, str], findings: Findings) -> str:
    """Compare PREFIX.manifest.json with the dataset, and return what was checked."""
    try:
        manifest = read_manifest(data.prefix)
    except DataError as error:
        findings.add("manifest", [str(error)], 1)
        return "manifest: damaged"
    if manifest is None:
        return "manifest: not checked, there is none"
    faults = list(manifest.faults(data, sha256))
    findings.add("manifest", faults, len(faults))
    return f"manifest: {manifest.counts['documents']:,} documents of {manifest.describe()}"


def num_bytes_to_verify(data: IndexedDataset, checksums: Checksums | None) -> int:
    """Return how many bytes `verify` reports to its `progress` in all."""
    suffixes = (".bin", ".idx") if checksums else (".bin",)
    return sum(Path(data.prefix + suffix).stat().st_size for suffix in suffixes)


class DocumentEnds:
    """Documents that end with the end-of-document id, counted while the .bin passes block by block."""

    def __init__(self, data: IndexedDataset, expected: Expected, findings: Findings):
        self._expected, self._findings = expected, findings
        self.num_with_tokens = 0
        self.num_ended = 0
        self._blocks = last_tokens(data)
        # documents of the current block whose last token is still ahead
        self._documents, self._positions = next(self._blocks)

    def check(self, start: int, tokens: NDArray[Any]) -> None:
        """Verify `tokens`, which begin at token `start` of the .bin."""
        while True:
            # a block of documents and a block of tokens end at different places
            here = int(np.searchsorted(self._positions, start + len(tokens)))
            documents, last = self._documents[:here], tokens[self._positions[:here] - start]
            lacking = np.flatnonzero(last != self._expected.eod)
            self.num_with_tokens += here
            self.num_ended += here - len(lacking)
            if self._expected.every_document_ends:
                eod = self._expected.eod
                messages = (f"document {documents[i]} ends with {last[i]}, not {eod}" for i in lacking)
                self._findings.add("end of document", messages, len(lacking))
            self._documents, self._positions = self._documents[here:], self._positions[here:]
            if len(self._positions):
                return
            block = next(self._blocks, None)
            if block is None:
                return
            self._documents, self._positions = block


def last_tokens(data: IndexedDataset) -> Iterator[tuple[Integers, Integers]]:
    """Yield blocks of (document, position of its last token in the .bin), for every document that has tokens."""
    for first, bounds in document_bounds(data):
        filled = np.flatnonzero(np.diff(bounds))
        yield first + filled, bounds[1:][filled] - 1


def verify_ids(
    data: IndexedDataset, start: int, tokens: NDArray[Any], vocab_size: int | None, findings: Findings
) -> None:
    """Verify `tokens`, which begin at token `start` of the .bin."""
    if data.dtype.kind not in "iu":
        if start == 0:
            findings.add("token id", [f"the .bin holds {data.dtype}, not integers"], 1)
        return
    limit = vocab_size
    if limit is None:
        limit = int(np.iinfo(data.dtype).max) + 1
    # twice as fast as a look at each, and mostly enough
    if int(tokens.max()) < limit and int(tokens.min()) >= 0:
        return
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
    findings.add("token id", (outside(data, start + int(i), tokens[i], limit) for i in wrong), len(wrong))


def outside(data: IndexedDataset, position: int, token: int, limit: int) -> str:
    byte = position * data.dtype.itemsize
    # in the tables as they are on disk, since only a few are looked up
    sequence = bisect.bisect_right(data.pointers, byte) - 1
    document = bisect.bisect_right(data.document_index, sequence) - 1
    rule = "is negative" if token < 0 else f"is not below {limit}"
    return f"id {token} at byte {byte} of the .bin (document {document}, sequence {sequence}) {rule}"


def verify(
    data: IndexedDataset, expected: Expected, checksums: Checksums | None, progress: ReportBytes
) -> dict[str, Any]:
    """Verify everything, and return `checked`, a list of sentences, and `findings`, the errors by kind."""
    findings = Findings()
    verify_tokenizer(data, expected, checksums, findings)
    verify_index(data, findings)
    checked = [f"{len(data):,} lengths and pointers, {data.num_documents:,} documents"]
    # in a damaged index the ends of documents are unknown
    index_is_whole = not findings.counts.keys() & {"length", "pointer", "document index"}
    ends = None
    if expected.eod is not None and index_is_whole:
        ends = DocumentEnds(data, expected, findings)
    sha256 = verify_bin(data, expected, ends, checksums, findings, progress)
    below = f"below {expected.vocab_size:,}" if expected.vocab_size else "not negative (the vocabulary is unknown)"
    checked.append(f"{data.num_tokens:,} ids: {below}")
    if ends:
        checked.append(
            f"{ends.num_ended:,} of {ends.num_with_tokens:,} documents with tokens end with id {expected.eod}"
        )
    else:
        why = "the end-of-document id is unknown" if index_is_whole else "the index is damaged"
        checked.append(f"ends of documents: not checked, {why}")
    checked.append(f"SHA-256 of both files: {'compared' if checksums else 'not checked, there is no .sha256'}")
    checked.append(verify_manifest(data, sha256, findings))
    result: dict[str, Any] = {"checked": checked, "findings": findings.as_json()}
    if ends:
        result |= {"documents_with_tokens": ends.num_with_tokens, "documents_ending_with_eod": ends.num_ended}
    return result
