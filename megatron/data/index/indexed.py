"""Megatron's indexed datasets: PREFIX.bin holds the tokens, PREFIX.idx the place of each sequence.

    .idx   magic        9 bytes  MMIDIDX\\0\\0
           version      uint64   1
           dtype code   uint8    see DTYPES
           S            uint64   number of sequences
           D            uint64   entries of the document index, the leading 0 included
           lengths      int32[S]   tokens
           pointers     int64[S]   bytes from the start of .bin
           documents    int64[D]   sequence at which each document starts, and S at the end
           modes        int8[S]    optional: multimodal datasets

All numbers are little-endian. tools/preprocess_data.py writes one sequence a document.

indexed_builder.py also writes PREFIX.sha256: the checksums of both files in the format of `sha256sum`, and notes about
the data, such as its tokenizer, in comment lines `# NAME: JSON`. Only verification reads it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.runtime.commands import UserError, command_name

Tokens = NDArray[Any]
"""Token ids in the file's integer type."""

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
LARGEST_LENGTH = 2**31 - 1
LOSS_MASK_SUFFIX = "_loss_mask"
"""Added to the prefix of a dataset of chats: the dataset of its loss mask."""

BLOCK_ENTRIES = 1 << 20
"""Table entries processed at a time, which bounds the memory."""

SIZE_CHECK_INTERVAL_S = 0.01
"""Least time between two looks at the sizes of the files, so that they cost nothing before single samples."""

# Enough of a .bin to detect a rewritten one, little enough to read at every start.
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_BYTES = 4096

VOCABULARY_PARTS = 16
VOCABULARY_PART = 1 << 18
"""Parts of a dataset, and tokens in each, whose ids are compared with the vocabulary when it is opened."""


class DataError(UserError, ValueError):
    """Unusable data. The message names the file, what was found, the rule and the remedy."""


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which Megatron stores ids of this vocabulary."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class MappedFiles:
    """Files that are read through memory maps, by path, and what to do about one that is damaged.

    A file that is truncated while it is mapped kills the process that reads beyond its new end, by SIGBUS. Readers call
    `check` before.
    """

    def __init__(self, maps: Mapping[Path, mmap.mmap], remedy: str):
        self._maps, self._remedy = dict(maps), remedy
        self._next_check_s = 0.0

    def check(self, *, always: bool = False) -> None:
        """Raise DataError if a file was truncated since it was opened.

        Looks once every SIZE_CHECK_INTERVAL_S, or `always`, as before a batch, beside which a look costs little.
        """
        now_s = time.monotonic()
        if now_s < self._next_check_s and not always:
            return
        self._next_check_s = now_s + SIZE_CHECK_INTERVAL_S
        for path, mapped in self._maps.items():
            size = mapped.size()  # of the file now; len() is that of the map
            if size < len(mapped):
                raise DataError(
                    f"{path} has {size} bytes, but had {len(mapped)} when it was opened: it was truncated while it was "
                    f"read; {self._remedy}"
                )


class IndexedDataset:
    """Memory-mapped reader of PREFIX.bin and PREFIX.idx.

    Opening reads only the header and the ends of the tables, whatever the size of the dataset. Raises DataError.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self._idx_path, self._bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        self._idx = idx = _map(self._idx_path, self.prefix)
        self._bin = _map(self._bin_path, self.prefix)
        self.files = MappedFiles({self._idx_path: self._idx, self._bin_path: self._bin}, "copy it again")
        """Checked by `read`; whoever reads `tokens` or the tables checks them before."""
        self.dtype, num_sequences, num_document_entries = self._read_header(idx)
        # read, so that a multimodal file is named where it is of no use, rather than called damaged
        self.has_modes = len(idx) > HEADER_BYTES + 12 * num_sequences + 8 * num_document_entries
        """True for a multimodal index, which has a mode for each sequence."""
        at = HEADER_BYTES
        self.lengths: NDArray[np.int32] = np.frombuffer(idx, "<i4", num_sequences, at)
        """Tokens in each sequence."""
        at += 4 * num_sequences
        self.pointers: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_sequences, at)
        """Start of each sequence in the .bin, in bytes. A view of the file, not aligned."""
        at += 8 * num_sequences
        self.document_index: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_document_entries, at)
        """First sequence of each document, and the number of sequences at the end."""
        self._check_tables()
        self.tokens: Tokens = np.frombuffer(self._bin, self.dtype)
        """The whole .bin: the tokens of all sequences."""

    def _read_header(self, idx: mmap.mmap) -> tuple[np.dtype[Any], int, int]:
        path, size = self._idx_path, len(idx)
        if idx[: len(LEGACY_MAGIC)] == LEGACY_MAGIC:
            raise DataError(
                f"{path} is in the legacy TNTIDX format; only MMIDIDX (--dataset-impl mmap) is read, "
                "preprocess the text again"
            )
        if idx[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{path} starts with {bytes(idx[: len(MAGIC)])!r}, not {MAGIC!r}: it is not a Megatron index; "
                f"write it with {command_name('preprocess_data')}"
            )
        if size < HEADER_BYTES:
            raise DataError(
                f"{path} has {size} bytes, less than its header of {HEADER_BYTES}; it was cut off, copy it again"
            )
        # compared one by one, so that each fault has its own remedy
        version = int.from_bytes(idx[9:17], "little")
        if version != VERSION:
            raise DataError(f"{path} has version {version}; only version {VERSION} is known, the file may be damaged")
        if idx[17] not in DTYPES:
            raise DataError(f"{path} has dtype code {idx[17]}; it must be 1 to 8: the file is damaged, copy it again")
        num_sequences = int.from_bytes(idx[18:26], "little")
        num_document_entries = int.from_bytes(idx[26:34], "little")
        expected = HEADER_BYTES + 12 * num_sequences + 8 * num_document_entries
        # a multimodal index has a mode of one byte for each sequence at the end
        if size not in (expected, expected + num_sequences):
            raise DataError(
                f"{path} has {size} bytes, but {num_sequences} sequences and {num_document_entries} document entries "
                f"make {expected}; it was cut off or damaged, copy it again"
            )
        if num_sequences == 0 or num_document_entries < 2:
            raise DataError(f"{path} holds no documents; preprocess text that is not empty")
        return DTYPES[idx[17]], num_sequences, num_document_entries

    def _check_tables(self) -> None:
        num_sequences, bin_bytes = len(self.lengths), len(self._bin)
        # only the ends of the tables: opening takes as long for 100 million documents as for one
        first, last = int(self.document_index[0]), int(self.document_index[-1])
        if first != 0 or last != num_sequences:
            raise DataError(
                f"{self._idx_path}: the document index runs from {first} to {last}, not from 0 to the {num_sequences} "
                "sequences; the file is damaged, copy it again"
            )
        if self.pointers[0] != 0:
            raise DataError(
                f"{self._idx_path}: the first sequence starts at byte {self.pointers[0]}, not 0; the file is damaged"
            )
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if end != bin_bytes:
            advice = "the two belong to different datasets, or one was cut off; copy both again"
            if bin_bytes - end == self.num_documents * self.dtype.itemsize:
                advice = (
                    "one token too many for each document: an old preprocess_data.py wrote end-of-document tokens "
                    "without counting them; preprocess the text again"
                )
            raise DataError(f"{self._bin_path} has {bin_bytes} bytes, but {self._idx_path} describes {end}: {advice}")
        if bin_bytes == 0:
            raise DataError(f"{self._bin_path} holds no tokens; preprocess text that is not empty")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._bin) // self.dtype.itemsize

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of documents, sequences and tokens, as a manifest names them."""
        return {"documents": self.num_documents, "sequences": len(self), "tokens": self.num_tokens}

    def release_memory(self) -> None:
        """Release the pages read so far, as a pass over the whole dataset should; the next read loads them again."""
        self._idx.madvise(mmap.MADV_DONTNEED)
        self._bin.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all lengths and a sample of the tokens: identifies the content, independent of the path."""
        digest = hashlib.sha256(f"{self.dtype.str} {len(self.lengths)} {len(self._bin)} ".encode())
        # all lengths decide the samples; of the tokens a sample shows another tokenizer or text
        digest.update(self.lengths.data)
        last = max(0, len(self._bin) - FINGERPRINT_BLOCK_BYTES)
        for start in sorted({last * block // FINGERPRINT_BLOCKS for block in range(FINGERPRINT_BLOCKS + 1)}):
            digest.update(self._bin[start : start + FINGERPRINT_BLOCK_BYTES])
        return digest.hexdigest()

    def count_tokens(self, sequences: range) -> int:
        """Return the tokens in a contiguous range of sequences. Raises DataError if lengths and pointers disagree."""
        if len(sequences) == 0:
            return 0
        # the sum of lengths against the span of pointers: a cheap look at all of both
        begin, last = int(self.pointers[sequences.start]), int(self.pointers[sequences.stop - 1])
        lengths = self.lengths[sequences.start : sequences.stop]
        num_tokens = int(lengths.sum(dtype=np.int64))
        spanned_bytes = last - begin + int(lengths[-1]) * self.dtype.itemsize
        if num_tokens * self.dtype.itemsize != spanned_bytes or int(lengths.min()) < 0:
            raise DataError(
                f"{self._idx_path}: the lengths of sequences {sequences.start} to {sequences.stop} make "
                f"{num_tokens * self.dtype.itemsize} bytes, their pointers {spanned_bytes}; the file is damaged, "
                "copy it again"
            )
        return num_tokens

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens [offset, offset + length) of a sequence, by default to its end: a read-only view of the file.

        Raises IndexError outside the dataset or the sequence, DataError if the index points outside the .bin.
        """
        self.files.check()
        if not 0 <= sequence < len(self.lengths):
            raise IndexError(f"sequence {sequence} is outside the {len(self.lengths)} of {self.prefix}")
        whole = int(self.lengths[sequence])
        count = length
        if count is None:
            count = whole - offset
        if offset < 0 or count < 0 or offset + count > whole:
            raise IndexError(
                f"tokens {offset} to {offset + count} are outside the {whole} of sequence {sequence} of {self.prefix}"
            )
        start, rest = divmod(int(self.pointers[sequence]), self.dtype.itemsize)
        if rest or start < 0 or start + whole > len(self.tokens):
            raise DataError(
                f"{self._idx_path}: sequence {sequence} lies at byte {self.pointers[sequence]} with {whole} tokens, "
                f"outside the {len(self._bin)} bytes of {self._bin_path}; the file is damaged, copy it again"
            )
        return self.tokens[start + offset : start + offset + count]


def check_vocabulary(data: IndexedDataset, vocab_size: int) -> None:
    """Raise DataError if the file's type cannot hold every id of the vocabulary, or the file has an id beyond it.

    Of a large file, parts are read that lie evenly in it; every id is compared when it is read.
    """
    if data.dtype.kind not in "iu":
        raise DataError(f"{data.prefix} holds {data.dtype}, not token ids; preprocess the text again")
    largest = int(np.iinfo(data.dtype).max)
    if vocab_size - 1 > largest:
        raise DataError(
            f"{data.prefix} stores ids as {data.dtype}, up to {largest}, but vocab_size={vocab_size}: it was made with "
            "another tokenizer; preprocess the text with this model's tokenizer, or set vocab_size to the data's"
        )
    data.files.check()
    count = len(data.tokens)
    for begin in np.unique(np.linspace(0, max(0, count - VOCABULARY_PART), VOCABULARY_PARTS, dtype=np.int64)):
        part = data.tokens[begin : begin + VOCABULARY_PART]
        # the extremes first: twice as fast as a comparison of each
        if len(part) and (int(part.max()) >= vocab_size or int(part.min()) < 0):
            number = int(begin) + int(((part >= vocab_size) | (part < 0)).argmax())
            raise DataError(
                f"{data.prefix}: token {number} is {data.tokens[number]}, outside vocab_size={vocab_size}; preprocess "
                "it with this model's tokenizer, or set vocab_size to the data's"
            )


def _map(path: Path, prefix: str) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {_missing_hint(path, prefix)}") from None
    except ValueError:  # an empty file cannot be mapped
        raise DataError(f"{path} is empty; preprocess the text again, or copy the file again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _missing_hint(path: Path, prefix: str) -> str:
    # the commonest mistake: the name of a file in place of the prefix
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".bin", ".idx"):
        return f"give the prefix without {suffix}: {stem}"
    other = Path(prefix + (".idx" if path.suffix == ".bin" else ".bin"))
    if other.exists():
        return f"{other} does: a dataset is both files, copy them together"
    if os.path.isdir(prefix):
        names = sorted(file.stem for file in Path(prefix).glob("*.idx"))
        if not names:
            return f"{prefix} is a folder, without datasets"
        return f"{prefix} is a folder, give a dataset in it, such as {Path(prefix, names[0])}"
    return "give PREFIX for PREFIX.bin and PREFIX.idx, as the command that tokenized it printed them"
