"""Token files in Megatron's format: PREFIX.bin holds the tokens, PREFIX.idx says where each sequence lies.

    .idx   magic        9 bytes  MMIDIDX\\0\\0
           version      uint64   1
           dtype code   uint8    see DTYPES
           S            uint64   number of sequences
           D            uint64   entries of the document index, the leading 0 included
           lengths      int32[S]   tokens
           pointers     int64[S]   bytes from the start of .bin
           documents    int64[D]   sequence at which each document starts, and S at the end
           modes        int8[S]    optional: multimodal datasets

All numbers are little-endian. What tools/preprocess_data.py writes has one sequence for each document.

Beside them, where our builder wrote them, PREFIX.sha256 holds the checksums of both in the format of `sha256sum`, and
notes about the data, such as its tokenizer, in comment lines `# NAME: JSON`. Nothing but verification needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.files import sync_file, sync_folder

Tokens = NDArray[Any]
"""Token ids, of whichever integer type the file has."""

Progress = Callable[[int], object]
"""Told how many bytes were handled since the last time."""

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
LARGEST_LENGTH = 2**31 - 1

# Enough of a .bin to notice that it was made anew, little enough to read at every start.
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BLOCK_BYTES = 4096


class DataError(ValueError):
    """The data cannot be used. Says which file, what was found, the rule, and the remedy."""


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type Megatron stores ids of this vocabulary in."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A memory-mapped reader of PREFIX.bin and PREFIX.idx.

    Opening reads the header and the ends of the tables only, however large the dataset. Raises DataError.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self._idx_path, self._bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        self._idx = idx = _map(self._idx_path, self.prefix)
        self._bin = _map(self._bin_path, self.prefix)
        self.dtype, num_sequences, num_document_entries = self._read_header(idx)
        self.has_modes = len(idx) > HEADER_BYTES + 12 * num_sequences + 8 * num_document_entries
        """Whether the index is a multimodal one, with a mode for each sequence."""
        at = HEADER_BYTES
        self.lengths: NDArray[np.int32] = np.frombuffer(idx, "<i4", num_sequences, at)
        """Tokens in each sequence."""
        at += 4 * num_sequences
        self.pointers: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_sequences, at)
        """Where each sequence starts in the .bin, in bytes. A view of the file, not aligned."""
        at += 8 * num_sequences
        self.document_index: NDArray[np.int64] = np.frombuffer(idx, "<i8", num_document_entries, at)
        """Sequence at which each document starts; the number of sequences at the end."""
        self._check_tables()
        self.tokens: Tokens = np.frombuffer(self._bin, self.dtype)
        """All of the .bin: the tokens of all sequences."""

    def _read_header(self, idx: mmap.mmap) -> tuple[np.dtype[Any], int, int]:
        path, size = self._idx_path, len(idx)
        if idx[: len(LEGACY_MAGIC)] == LEGACY_MAGIC:
            raise DataError(
                f"{path} is in the legacy TNTIDX format; only MMIDIDX (--dataset-impl mmap) is read, "
                "preprocess the text anew"
            )
        if idx[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{path} starts with {bytes(idx[: len(MAGIC)])!r}, not {MAGIC!r}: it is no Megatron index; "
                "write it with tools/preprocess_data.py"
            )
        if size < HEADER_BYTES:
            raise DataError(
                f"{path} has {size} bytes, less than its header of {HEADER_BYTES}; it was cut off, copy it anew"
            )
        version = int.from_bytes(idx[9:17], "little")
        if version != VERSION:
            raise DataError(f"{path} has version {version}; only version {VERSION} is known, the file may be damaged")
        if idx[17] not in DTYPES:
            raise DataError(f"{path} has dtype code {idx[17]}; it must be 1 to 8, so the file is damaged, copy it anew")
        num_sequences = int.from_bytes(idx[18:26], "little")
        num_document_entries = int.from_bytes(idx[26:34], "little")
        expected = HEADER_BYTES + 12 * num_sequences + 8 * num_document_entries
        if size not in (expected, expected + num_sequences):
            raise DataError(
                f"{path} has {size} bytes, but {num_sequences} sequences and {num_document_entries} document entries "
                f"make {expected}; it was cut off or damaged, copy it anew"
            )
        if num_sequences == 0 or num_document_entries < 2:
            raise DataError(f"{path} holds no documents; preprocess text that is not empty")
        return DTYPES[idx[17]], num_sequences, num_document_entries

    def _check_tables(self) -> None:
        num_sequences, bin_bytes = len(self.lengths), len(self._bin)
        first, last = int(self.document_index[0]), int(self.document_index[-1])
        if first != 0 or last != num_sequences:
            raise DataError(
                f"{self._idx_path}: the document index runs from {first} to {last}, not from 0 to the {num_sequences} "
                "sequences; the file is damaged, copy it anew"
            )
        if self.pointers[0] != 0:
            raise DataError(
                f"{self._idx_path}: the first sequence starts at byte {self.pointers[0]}, not 0; the file is damaged"
            )
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if end != bin_bytes:
            advice = "the two belong to different datasets, or one was cut off; copy both anew"
            if bin_bytes - end == self.num_documents * self.dtype.itemsize:
                advice = (
                    "one token too many for each document: an old preprocess_data.py wrote end-of-document tokens "
                    "without counting them; preprocess the text anew"
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

    def release_memory(self) -> None:
        """Let go of the pages read so far; the next read fetches them again. For those who pass over everything."""
        self._idx.madvise(mmap.MADV_DONTNEED)
        self._bin.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def fingerprint(self) -> str:
        """Tells datasets apart by content, wherever they lie: all lengths, and a sample of the tokens."""
        digest = hashlib.sha256(f"{self.dtype.str} {len(self.lengths)} {len(self._bin)} ".encode())
        digest.update(self.lengths.data)
        last = max(0, len(self._bin) - FINGERPRINT_BLOCK_BYTES)
        for start in sorted({last * block // FINGERPRINT_BLOCKS for block in range(FINGERPRINT_BLOCKS + 1)}):
            digest.update(self._bin[start : start + FINGERPRINT_BLOCK_BYTES])
        return digest.hexdigest()

    def count_tokens(self, sequences: range) -> int:
        """Tokens in a contiguous range of sequences. Raises DataError if lengths and pointers disagree about it."""
        if len(sequences) == 0:
            return 0
        begin, last = int(self.pointers[sequences.start]), int(self.pointers[sequences.stop - 1])
        lengths = self.lengths[sequences.start : sequences.stop]
        num_tokens = int(lengths.sum(dtype=np.int64))
        spanned_bytes = last - begin + int(lengths[-1]) * self.dtype.itemsize
        if num_tokens * self.dtype.itemsize != spanned_bytes or int(lengths.min()) < 0:
            raise DataError(
                f"{self._idx_path}: the lengths of sequences {sequences.start} to {sequences.stop} make "
                f"{num_tokens * self.dtype.itemsize} bytes, their pointers {spanned_bytes}; the file is damaged, "
                "copy it anew"
            )
        return num_tokens

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Tokens [offset, offset + length) of a sequence, by default up to its end: a read-only view of the file.

        Raises IndexError outside the dataset or the sequence, DataError where the index points outside the .bin.
        """
        if not 0 <= sequence < len(self.lengths):
            raise IndexError(f"sequence {sequence} is outside the {len(self.lengths)} of {self.prefix}")
        whole = int(self.lengths[sequence])
        count = whole - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > whole:
            raise IndexError(
                f"tokens {offset} to {offset + count} are outside the {whole} of sequence {sequence} of {self.prefix}"
            )
        start, rest = divmod(int(self.pointers[sequence]), self.dtype.itemsize)
        if rest or start < 0 or start + whole > len(self.tokens):
            raise DataError(
                f"{self._idx_path}: sequence {sequence} lies at byte {self.pointers[sequence]} with {whole} tokens, "
                f"outside the {len(self._bin)} bytes of {self._bin_path}; the file is damaged, copy it anew"
            )
        return self.tokens[start + offset : start + offset + count]


def _map(path: Path, prefix: str) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {_missing_hint(path, prefix)}") from None
    except ValueError:  # an empty file cannot be mapped
        raise DataError(f"{path} is empty; preprocess the text anew, or copy the file anew") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _missing_hint(path: Path, prefix: str) -> str:
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".bin", ".idx"):
        return f"give the prefix without {suffix}: {stem}"
    other = Path(prefix + (".idx" if path.suffix == ".bin" else ".bin"))
    if other.exists():
        return f"{other} does: a dataset is both files, copy them together"
    if os.path.isdir(prefix):
        names = sorted(file.stem for file in Path(prefix).glob("*.idx"))
        return f"{prefix} is a folder, " + (
            f"give a dataset in it, such as {Path(prefix, names[0])}" if names else "without datasets"
        )
    return "give PREFIX for PREFIX.bin and PREFIX.idx, as tools/preprocess_data.py prints it"


@dataclass(frozen=True)
class BuilderState:
    """How much of a dataset was safely on disk at some moment: what `IndexedDatasetBuilder.resume` goes on from."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    num_listed_documents: int = 0
    """Entries of the file of document ends: num_documents, or 0 while every document had one sequence."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BuilderState:
        """Raises DataError if anything is missing, unknown, or no count."""
        names = [field.name for field in fields(cls)]
        if sorted(content) != sorted(names) or not all(type(i) is int and i >= 0 for i in content.values()):
            raise DataError(f"{dict(content)} is no saved state of a dataset: it must hold counts named {names}")
        return cls(**content)


SEALED_NAME = "dataset"
"""A sealed work folder holds a dataset of this name, which can be read there before it is published."""
# The .idx gets its name last in `seal`, and leaves last in `publish`: a folder that holds it is sealed.
_BIN, _SHA256, _IDX = (SEALED_NAME + suffix for suffix in (".bin", ".sha256", ".idx"))
_LENGTHS, _DOCUMENT_ENDS, _UNSEALED_IDX = "lengths.int32", "document_ends.int64", "idx.unsealed"
_WORK_FILES = (_BIN, _SHA256, _IDX, _LENGTHS, _DOCUMENT_ENDS, _UNSEALED_IDX)

BLOCK_ENTRIES = 1 << 20
"""Entries of a table handled at a time: memory does not grow with the dataset."""
COPY_BYTES = 4 << 20


class IndexedDatasetBuilder:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.sha256, which appear under these names only in `finalize`, whole.

    Everything is written to a work folder first, tokens and lengths as they come: memory does not grow with the data.
    Without `work_dir` that folder is PREFIX.partial-<12 hex digits>, and goes when the context manager is left. With
    `work_dir`, which must lie on the file system of PREFIX, leaving the context manager keeps what was written, and a
    later process can `resume` from it; `abandon` removes it.

    `notes` are JSON values, written into PREFIX.sha256 under their names. Raises DataError, OSError.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        notes: Mapping[str, Any] | None = None,
        work_dir: str | Path | None = None,
    ):
        self._set_up(prefix, dtype, notes, work_dir)
        self.work_dir.mkdir(parents=not self._removed_on_exit, exist_ok=not self._removed_on_exit)
        self._check_file_system()
        present = [name for name in _WORK_FILES if (self.work_dir / name).exists()]
        if present:
            raise DataError(
                f"{self.work_dir} already holds an unfinished dataset ({', '.join(present)}); resume it, or remove it"
            )
        self._bin = _HashedFile((self.work_dir / _BIN).open("xb"))
        self._lengths: IO[bytes] = (self.work_dir / _LENGTHS).open("xb")

    def _set_up(
        self, prefix: str | Path, dtype: DTypeLike, notes: Mapping[str, Any] | None, work_dir: str | Path | None
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(f"dtype {self.dtype} cannot be stored; use one of {', '.join(map(str, DTYPES.values()))}")
        self._dtype_code = codes[0]
        self._notes = dict(notes or {})
        _note_lines(self._notes)  # raises now rather than after hours of work
        self._removed_on_exit = work_dir is None
        self.work_dir = Path(work_dir) if work_dir else Path(f"{self.prefix}.partial-{uuid.uuid4().hex[:12]}")
        """The folder of everything that is not whole yet."""
        self.num_tokens = 0
        """Tokens written so far."""
        self.num_sequences = 0
        self.num_documents = 0
        # None while every document has one sequence: their ends are then 1, 2, 3, ...
        self._document_ends: IO[bytes] | None = None
        self._state: Literal["open", "sealed", "published", "closed"] = "open"

    def _check_file_system(self) -> None:
        target = Path(self.prefix).parent
        if self.work_dir.stat().st_dev != target.stat().st_dev:
            raise DataError(
                f"{self.work_dir} and {target} lie on different file systems, so finished files could not be renamed "
                "from one to the other; put the work folder beside the output"
            )

    @classmethod
    def resume(
        cls,
        prefix: str | Path,
        dtype: DTypeLike,
        state: BuilderState,
        *,
        notes: Mapping[str, Any] | None = None,
        work_dir: str | Path,
    ) -> IndexedDatasetBuilder:
        """Go on from what `save_state` returned: whatever was written after it is cut off.

        Reads the tokens once, for their checksum. Raises DataError if less than `state` is there.
        """
        builder = cls.__new__(cls)
        builder._set_up(prefix, dtype, notes, work_dir)
        if is_sealed(work_dir):
            raise DataError(
                f"{work_dir} holds a sealed dataset, to which nothing can be added; publish it, or remove it"
            )
        sizes = {_BIN: state.num_tokens * builder.dtype.itemsize, _LENGTHS: 4 * state.num_sequences}
        if state.num_listed_documents:
            sizes[_DOCUMENT_ENDS] = 8 * state.num_listed_documents
        for name, size in sizes.items():
            path = builder.work_dir / name
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise DataError(f"{path} has {found} bytes, less than the {size} that were saved; start anew")
        builder.work_dir.mkdir(parents=True, exist_ok=True)
        builder._check_file_system()
        for name in set(_WORK_FILES) - sizes.keys():
            (builder.work_dir / name).unlink(missing_ok=True)
        opened = {name: _open_cut(builder.work_dir / name, size) for name, size in sizes.items()}
        builder._bin, builder._lengths = _HashedFile(opened[_BIN]), opened[_LENGTHS]
        builder._document_ends = opened.get(_DOCUMENT_ENDS)
        for block in _file_blocks(builder.work_dir / _BIN, sizes[_BIN]):
            builder._bin.digest.update(block)
        builder.num_tokens, builder.num_sequences = state.num_tokens, state.num_sequences
        builder.num_documents = state.num_documents
        return builder

    def save_state(self) -> BuilderState:
        """Bring everything written so far safely to disk, and say how much that is."""
        self._check_open()
        self._sync()
        listed = 0 if self._document_ends is None else self.num_documents
        return BuilderState(self.num_tokens, self.num_sequences, self.num_documents, listed)

    def add_document(self, tokens: Sequence[int] | Tokens, lengths: Sequence[int] | None = None) -> None:
        """One document, of one sequence or of sequences with these lengths. Raises DataError; then nothing is added."""
        flat = np.asarray(tokens)
        self._write(flat, [len(flat)] if lengths is None else lengths)
        if self._document_ends is None and self.num_sequences == self.num_documents + 1:
            self.num_documents += 1
        else:
            self._end_documents(np.array([self.num_sequences]))

    def add_documents(self, tokens: Sequence[int] | Tokens, lengths: Sequence[int] | Tokens) -> None:
        """Documents of one sequence each, laid end to end in `tokens`. Raises DataError; then nothing is added.

        Tokens of the builder's own dtype are written as they are, neither checked nor copied.
        """
        before = self.num_sequences
        self._write(np.asarray(tokens), lengths)
        self._end_documents(np.arange(before + 1, self.num_sequences + 1))

    def append_dataset(self, dataset: IndexedDataset, progress: Progress | None = None) -> None:
        """All documents of a finished dataset of the same dtype.

        Raises DataError if its index is damaged, or if it is not what its PREFIX.sha256 says, where it has one. What
        was added before that was met stays: abandon the builder then.
        """
        self._check_joins(dataset.prefix, dataset.dtype)
        if dataset.has_modes:
            raise DataError(f"{dataset.prefix}.idx has modes: multimodal datasets are read, but not written")
        checksums = read_checksums(dataset.prefix)
        if checksums:
            checksums.compare(dataset.prefix, ".idx", file_sha256(dataset.prefix + ".idx"))
        before, end = self.num_sequences, 0
        for start in range(0, len(dataset), BLOCK_ENTRIES):
            lengths = dataset.lengths[start : start + BLOCK_ENTRIES]
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            wrong = np.flatnonzero(dataset.pointers[start + 1 : start + len(ends)] != ends[:-1])
            if dataset.pointers[start] != end or len(wrong) or lengths.min() < 0:
                raise DataError(
                    f"{dataset.prefix}.idx: lengths and pointers disagree within its sequences {start} to "
                    f"{start + len(lengths)}; the file is damaged, copy it anew (tools/inspect_dataset.py --verify "
                    "says more)"
                )
            self._write_lengths(lengths)
            end = int(ends[-1])
            dataset.release_memory()
        digest = hashlib.sha256() if checksums else None
        for block in _file_blocks(Path(dataset.prefix + ".bin"), dataset.num_tokens * self.dtype.itemsize):
            self._bin.write(block)
            if digest:
                digest.update(block)
            if progress:
                progress(len(block))
        self.num_tokens += dataset.num_tokens
        if checksums and digest:
            checksums.compare(dataset.prefix, ".bin", digest.hexdigest())
        for start in range(0, dataset.num_documents, BLOCK_ENTRIES):
            bounds = dataset.document_index[start : start + BLOCK_ENTRIES + 1]
            if (np.diff(bounds) < 0).any():
                raise DataError(
                    f"{dataset.prefix}.idx: the document index decreases within its entries {start} to "
                    f"{start + len(bounds)}; the file is damaged, copy it anew"
                )
            self._end_documents(before + bounds[1:])
            dataset.release_memory()

    def absorb(self, other: IndexedDatasetBuilder) -> None:
        """All that another builder of the same dtype, not sealed yet, has written so far. It is left as it is."""
        self._check_open()
        other._check_open()
        self._check_joins(other.prefix, other.dtype)
        other._flush()
        before = self.num_sequences
        for lengths in _file_blocks(other.work_dir / _LENGTHS, 4 * other.num_sequences):
            self._write_lengths(np.frombuffer(lengths, "<i4"))
        for block in _file_blocks(other.work_dir / _BIN, other.num_tokens * self.dtype.itemsize):
            self._bin.write(block)
        self.num_tokens += other.num_tokens
        for ends in other._document_end_blocks():
            self._end_documents(before + np.frombuffer(ends, "<i8"))

    def _check_joins(self, prefix: str, dtype: np.dtype[Any]) -> None:
        if dtype != self.dtype:
            raise DataError(f"{prefix} holds {dtype}, {self.prefix} {self.dtype}; they cannot be joined")

    def _write(self, tokens: Tokens, lengths: Sequence[int] | Tokens) -> None:
        self._check_open()
        counts = np.asarray(lengths, dtype=np.int64)
        if int(counts.sum()) != len(tokens) or (counts.size and counts.min() < 0):
            raise DataError(f"{self.prefix}: lengths add up to {counts.sum()}, but {len(tokens)} tokens are given")
        if counts.size and counts.max() > LARGEST_LENGTH:
            raise DataError(f"{self.prefix}: a sequence of {counts.max()} tokens; the format ends at {LARGEST_LENGTH}")
        if tokens.dtype != self.dtype and len(tokens) and self.dtype.kind in "iu":
            if tokens.dtype.kind not in "iu":
                raise DataError(f"{self.prefix}: tokens are {tokens.dtype}, not integers; give token ids")
            smallest, largest, limits = tokens.min(), tokens.max(), np.iinfo(self.dtype)
            if smallest < limits.min or largest > limits.max:
                wrong = smallest if smallest < limits.min else largest
                raise DataError(
                    f"{self.prefix}: token id {wrong} does not fit {self.dtype} ({limits.min} to {limits.max}); "
                    "choose the dtype by best_dtype(vocab_size)"
                )
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self.num_tokens += len(tokens)
        self._write_lengths(counts)

    def _write_lengths(self, lengths: Tokens) -> None:
        self._lengths.write(lengths.astype("<i4").data)
        self.num_sequences += len(lengths)

    def _end_documents(self, ends: Tokens) -> None:
        """Further documents, which end before these sequences. They are listed only where that says something."""
        before = self.num_documents
        if self._document_ends is None:
            if np.array_equal(ends, np.arange(before + 1, before + 1 + len(ends))):
                self.num_documents += len(ends)
                return
            self._document_ends = (self.work_dir / _DOCUMENT_ENDS).open("xb")
            for block in _count_to(before):
                self._document_ends.write(block)
        self._document_ends.write(ends.astype("<i8").data)
        self.num_documents += len(ends)

    def seal(self) -> None:
        """Write all that is left to write, still in the work folder.

        So that several datasets appear together: seal each, then finalize each. Raises DataError if there is no token
        at all.
        """
        self._check_open()
        if self.num_tokens == 0:
            raise DataError(f"{self.prefix}: no tokens to write; give text that is not empty")
        self._sync()
        with (self.work_dir / _UNSEALED_IDX).open("wb") as file:
            idx = _HashedFile(file)
            self._write_index(idx)
            idx.sync()
        name = Path(self.prefix).name
        with (self.work_dir / _SHA256).open("wb") as file:
            file.write(_note_lines(self._notes))
            file.write(_checksum_line(self._bin.digest.hexdigest(), name + ".bin"))
            file.write(_checksum_line(idx.digest.hexdigest(), name + ".idx"))
            sync_file(file)
        os.replace(self.work_dir / _UNSEALED_IDX, self.work_dir / _IDX)
        sync_folder(self.work_dir)
        self._close_files()
        self._state = "sealed"
        (self.work_dir / _LENGTHS).unlink()
        (self.work_dir / _DOCUMENT_ENDS).unlink(missing_ok=True)

    def _write_index(self, idx: _HashedFile) -> None:
        idx.write(MAGIC + VERSION.to_bytes(8, "little") + bytes([self._dtype_code]))
        idx.write(self.num_sequences.to_bytes(8, "little") + (self.num_documents + 1).to_bytes(8, "little"))
        for block in self._length_blocks():
            idx.write(block)
        position = 0
        for block in self._length_blocks():
            sizes = np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            idx.write((ends - sizes).astype("<i8", copy=False).data)
            position = int(ends[-1])
        idx.write(bytes(8))  # the first document starts at sequence 0
        for block in self._document_end_blocks():
            idx.write(block)

    def _length_blocks(self) -> Iterator[memoryview]:
        return _file_blocks(self.work_dir / _LENGTHS, 4 * self.num_sequences)

    def _document_end_blocks(self) -> Iterator[memoryview]:
        if self._document_ends is None:
            return _count_to(self.num_documents)
        return _file_blocks(self.work_dir / _DOCUMENT_ENDS, 8 * self.num_documents)

    def finalize(self) -> None:
        """Give the files their names, sealing first where that was not done. Raises as `seal` does."""
        if self._state != "sealed":
            self.seal()
        publish(self.work_dir, self.prefix)
        self._state = "published"

    def close(self) -> None:
        """Stop, and leave the work folder as it is: for `resume`, or, if sealed, for `publish`."""
        if self._state == "open":
            with contextlib.suppress(OSError):  # a full disk again; what was saved before is safe
                self._close_files()
        if self._state != "published":
            self._state = "closed"

    def abandon(self) -> None:
        """Remove what was written. Nothing happens after `finalize`."""
        if self._state != "published":
            self.close()
            _remove_work_files(self.work_dir)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._removed_on_exit:
            self.abandon()
        else:
            self.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise RuntimeError(f"{self.prefix} is already {self._state}")

    def _open_files(self) -> list[IO[bytes]]:
        return [file for file in (self._bin.file, self._lengths, self._document_ends) if file is not None]

    def _flush(self) -> None:
        for file in self._open_files():
            file.flush()

    def _sync(self) -> None:
        for file in self._open_files():
            sync_file(file)

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # each of them, even where one cannot write its rest
            for file in self._open_files():
                stack.callback(file.close)


def is_sealed(work_dir: str | Path) -> bool:
    """Whether a builder's work folder holds a whole dataset that has yet to be published."""
    return (Path(work_dir) / _IDX).exists()


def is_open(work_dir: str | Path) -> bool:
    """Whether a builder's work folder holds a dataset that can still be added to: neither sealed nor published."""
    return (Path(work_dir) / _BIN).exists() and not is_sealed(work_dir)


def publish(work_dir: str | Path, prefix: str | Path) -> None:
    """Move a sealed dataset to PREFIX.bin, .sha256 and .idx, over an older one if need be, and remove its work folder.

    At every moment the pair is whole, or the .idx is missing. A process killed in here can be followed by another that
    calls this again. Raises DataError if the folder is not sealed, or if there is neither a folder nor a dataset.
    """
    work, base = Path(work_dir), str(prefix)
    targets = {name: Path(base + name.removeprefix(SEALED_NAME)) for name in (_BIN, _SHA256, _IDX)}
    if not is_sealed(work):
        if (work / _BIN).exists() or not targets[_IDX].exists():
            raise DataError(f"{work} holds no finished dataset to publish as {base}; finish it first, or start anew")
    elif (work / _BIN).exists():
        # an old index or checksum beside a new .bin would be taken for its own
        for name in (_IDX, _SHA256):
            targets[name].unlink(missing_ok=True)
        sync_folder(targets[_IDX].parent)
    for name, target in targets.items():
        if (work / name).exists():
            os.replace(work / name, target)
            sync_folder(target.parent)  # in this order even if the power fails
    _remove_work_files(work)


def _remove_work_files(work_dir: Path) -> None:
    for name in _WORK_FILES:
        (work_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # gone already, or the caller keeps something of his own in it
        work_dir.rmdir()


class _HashedFile:
    """A file being written, and the SHA-256 of what it holds."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.digest.update(content)

    def sync(self) -> None:
        sync_file(self.file)


def _count_to(last: int) -> Iterator[memoryview]:
    """1, 2, ..., last as int64, in blocks."""
    for start in range(1, last + 1, BLOCK_ENTRIES):
        yield np.arange(start, min(start + BLOCK_ENTRIES, last + 1), dtype="<i8").data


def _file_blocks(path: Path, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a file, in blocks that are good until the next is asked for."""
    buffer = memoryview(bytearray(min(COPY_BYTES, size)))
    with path.open("rb") as file:
        while size:
            count = file.readinto(buffer[:size])
            if not count:
                raise DataError(f"{path} ends {size} bytes too early; it was changed while it was read")
            yield buffer[:count]
            size -= count


def _open_cut(path: Path, size: int) -> IO[bytes]:
    """A file to append to, cut to its first `size` bytes, which are there."""
    file = path.open("r+b" if path.exists() else "xb")
    file.truncate(size)
    file.seek(size)
    return file


@dataclass(frozen=True)
class Checksums:
    """What PREFIX.sha256 says of a dataset."""

    sha256: dict[str, str]
    """Hexadecimal digests, of ".bin" and ".idx"."""
    notes: dict[str, Any]
    """What the builder was told about the data, such as its tokenizer."""

    def compare(self, prefix: str, suffix: str, found: str) -> None:
        """Raises DataError if the SHA-256 found of that file is not the one noted."""
        if found != self.sha256[suffix]:
            raise DataError(
                f"{prefix}{suffix} has the SHA-256 {found[:12]}…, not {self.sha256[suffix][:12]}… as {prefix}.sha256 "
                "says: it was changed, or belongs to another dataset; copy all three files anew"
            )


def file_sha256(path: str | Path, progress: Progress | None = None) -> str:
    """SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    for block in _file_blocks(Path(path), os.path.getsize(path)):
        digest.update(block)
        if progress:
            progress(len(block))
    return digest.hexdigest()


_CHECKSUM_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *].*(\.bin|\.idx)")
_NOTE_LINE = re.compile(r"# ([A-Za-z_][A-Za-z0-9_]*): (.*)")


def read_checksums(prefix: str | Path) -> Checksums | None:
    """PREFIX.sha256, in the format of `sha256sum`; None where there is none, as for datasets that Megatron wrote.

    Only the suffixes of the names in it matter: the dataset may have been renamed. Raises DataError naming the line.
    """
    path = Path(f"{prefix}.sha256")
    try:
        text = os.fsdecode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    remedy = "delete it, or copy it anew"
    digests: dict[str, str] = {}
    notes: dict[str, Any] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        place = f"{path}:{number}"
        if line.startswith("#"):
            note = _NOTE_LINE.fullmatch(line)
            if note:  # any other comment is somebody else's
                try:
                    notes[note[1]] = json.loads(note[2])
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place}: the note {note[1]!r} is no JSON ({error}); {remedy}") from None
            continue
        entry = _CHECKSUM_LINE.fullmatch(line)
        if not entry or entry[2] in digests:
            problem = "is no line of sha256sum for a .bin or .idx" if not entry else f"is a second one for {entry[2]}"
            raise DataError(f"{place}: {line[:80]!r} {problem}; {remedy}")
        digests[entry[2]] = entry[1]
    for suffix in (".bin", ".idx"):
        if suffix not in digests:
            raise DataError(f"{path} has no line for the {suffix}; {remedy}")
    return Checksums(digests, notes)


def _note_lines(notes: Mapping[str, Any]) -> bytes:
    lines = [f"# {name}: {json.dumps(value)}\n" for name, value in notes.items()]
    wrong = [name for name, line in zip(notes, lines, strict=True) if not _NOTE_LINE.fullmatch(line.rstrip("\n"))]
    if wrong:
        raise ValueError(f"note {wrong[0]!r} cannot be written; its name must be letters, digits and underscores")
    return "".join(lines).encode()


def _checksum_line(digest: str, name: str) -> bytes:
    """As sha256sum writes it: odd characters of the name are escaped, and a leading backslash says so."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return os.fsencode(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
