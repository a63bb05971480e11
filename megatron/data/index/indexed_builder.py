"""Writer of indexed datasets, which appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from megatron.data.index.checksums import Checksums, ReportBytes, file_blocks, file_sha256, note_lines, read_checksums
from megatron.data.index.indexed import (
    BLOCK_ENTRIES,
    DTYPES,
    LARGEST_LENGTH,
    MAGIC,
    VERSION,
    DataError,
    IndexedDataset,
    Tokens,
)
from megatron.data.index.work_folder import WorkFolder
from megatron.runtime.commands import command_name
from megatron.runtime.files import sync_file, sync_folder


@dataclass(frozen=True)
class BuilderState:
    """Size of the part of a dataset that is safely on disk; IndexedDatasetBuilder.resume continues after it."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    num_listed_documents: int = 0
    """Entries in the file of document ends: num_documents, or 0 while every document has one sequence."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BuilderState:
        """Raises DataError if a field is missing, unknown or not a count."""
        # a state may come from another release, or be damaged
        names = [field.name for field in fields(cls)]
        if sorted(content) != sorted(names) or not all(type(i) is int and i >= 0 for i in content.values()):
            raise DataError(f"{dict(content)} is not a saved state of a dataset: it must hold counts named {names}")
        return cls(**content)


class IndexedDatasetBuilder:
    """Writer of PREFIX.bin, PREFIX.idx and PREFIX.sha256, which get these names only when whole, in `finalize`.

    Tokens and lengths are written to a work folder as they come, so memory does not grow with the data. By default it
    is PREFIX.partial-<12 hex digits>, removed when the context manager exits. A `work_dir`, which must lie on the file
    system of PREFIX, is kept: a later process can `resume` from it, and `abandon` removes it.

    `notes` are JSON values written to PREFIX.sha256 under their names. Raises DataError, OSError.
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
        # two builders in one folder would write into each other's files
        present = [path.name for path in self._folder.files if path.exists()]
        if present:
            raise DataError(
                f"{self.work_dir} already holds an unfinished dataset ({', '.join(present)}); resume it, or remove it"
            )
        self._bin = _HashedFile(self._folder.bin.open("xb"))
        self._lengths: IO[bytes] = self._folder.lengths.open("xb")

    def _set_up(
        self, prefix: str | Path, dtype: DTypeLike, notes: Mapping[str, Any] | None, work_dir: str | Path | None
    ) -> None:
        self.prefix = str(prefix)
        # the format is little-endian on every machine
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(f"dtype {self.dtype} cannot be stored; use one of {', '.join(map(str, DTYPES.values()))}")
        self._dtype_code = codes[0]
        self._notes = dict(notes or {})
        note_lines(self._notes)  # raises here rather than after hours of work
        # a folder that the caller named is kept, to be resumed from
        self._removed_on_exit = work_dir is None
        self.work_dir = Path(work_dir) if work_dir else Path(f"{self.prefix}.partial-{uuid.uuid4().hex[:12]}")
        """Folder of the unfinished files."""
        self._folder = WorkFolder(self.work_dir)
        self.num_tokens = 0
        """Tokens written so far."""
        self.num_sequences = 0
        self.num_documents = 0
        # None while every document has one sequence: the ends are then 1, 2, 3, ...
        self._document_ends: IO[bytes] | None = None
        self._state: Literal["open", "sealed", "published", "closed"] = "open"

    def _check_file_system(self) -> None:
        target = Path(self.prefix).parent
        # a rename between file systems is a copy, which a kill may cut
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
        """Continue from the result of `save_state`; anything written after it is truncated.

        Reads the tokens once, for their checksum. Raises DataError if less than `state` is on disk.
        """
        builder = cls.__new__(cls)
        builder._set_up(prefix, dtype, notes, work_dir)
        folder = builder._folder
        if folder.is_sealed:
            raise DataError(
                f"{work_dir} holds a sealed dataset, to which nothing can be added; publish it, or remove it"
            )
        sizes = {folder.bin: state.num_tokens * builder.dtype.itemsize, folder.lengths: 4 * state.num_sequences}
        if state.num_listed_documents:
            sizes[folder.document_ends] = 8 * state.num_listed_documents
        for path, size in sizes.items():
            on_disk = path.stat().st_size if path.exists() else 0
            if on_disk < size:
                raise DataError(f"{path} has {on_disk} bytes, less than the {size} that were saved; start over")
        builder.work_dir.mkdir(parents=True, exist_ok=True)
        builder._check_file_system()
        # left by a run that was killed after its last save
        for path in set(folder.files) - sizes.keys():
            path.unlink(missing_ok=True)
        opened = {path: _open_cut(path, size) for path, size in sizes.items()}
        builder._bin, builder._lengths = _HashedFile(opened[folder.bin]), opened[folder.lengths]
        builder._document_ends = opened.get(folder.document_ends)
        for block in file_blocks(folder.bin, sizes[folder.bin]):
            # a digest cannot be saved, so the tokens are read once more
            builder._bin.digest.update(block)
        builder.num_tokens, builder.num_sequences = state.num_tokens, state.num_sequences
        builder.num_documents = state.num_documents
        return builder

    def save_state(self) -> BuilderState:
        """Flush everything written so far to disk, and return how much that is."""
        self._check_open()
        self._sync()
        listed = 0 if self._document_ends is None else self.num_documents
        return BuilderState(self.num_tokens, self.num_sequences, self.num_documents, listed)

    def add_document(self, tokens: Sequence[int] | Tokens, lengths: Sequence[int] | None = None) -> None:
        """Add a document of one sequence, or of sequences with these lengths. Adds nothing if it raises DataError."""
        flat = np.asarray(tokens)
        self._write(flat, [len(flat)] if lengths is None else lengths)
        # the usual document of one sequence costs no array
        if self._document_ends is None and self.num_sequences == self.num_documents + 1:
            self.num_documents += 1
        else:
            self._end_documents(np.array([self.num_sequences]))

    def add_documents(
        self,
        tokens: Sequence[int] | Tokens,
        lengths: Sequence[int] | Tokens,
        *,
        keeps_empty_sequences: bool = True,
        sequences_per_document: int = 1,
    ) -> None:
        """Add documents of equally many sequences, concatenated in `tokens`. Adds nothing if it raises DataError.

        Tokens of the builder's own dtype are written without a check or a copy. Without `keeps_empty_sequences` a
        sequence of length 0 is left out, as Megatron writes a document without text.
        """
        counts = np.asarray(lengths)
        filled = np.ones(len(counts), np.bool_)
        if not keeps_empty_sequences:
            filled = counts > 0
        before = self.num_sequences
        self._write(np.asarray(tokens), counts[filled])
        self._end_documents(before + np.cumsum(filled)[sequences_per_document - 1 :: sequences_per_document])

    def add_cut_documents(self, tokens: Tokens, lengths: Tokens, sequences: Tokens) -> None:
        """Add documents, concatenated in `tokens`, of so many `sequences` each. Adds nothing if it raises DataError."""
        before = self.num_sequences
        self._write(tokens, lengths)
        self._end_documents(before + np.cumsum(sequences))

    def append_dataset(self, dataset: IndexedDataset, progress: ReportBytes | None = None) -> None:
        """Add all documents of a finished dataset of the same dtype.

        Raises DataError if its index is damaged or it differs from its PREFIX.sha256, if it has one. A part of it may
        have been added by then: abandon the builder.
        """
        checksums = self.check_input(dataset)
        before = self.num_sequences
        self._append_lengths(dataset)
        self._append_tokens(dataset, checksums, progress)
        self._append_document_ends(dataset, before)

    def check_input(self, dataset: IndexedDataset) -> Checksums | None:
        """Compare a dataset that is to be copied with this one and with its PREFIX.sha256, which is returned.

        Raises DataError. The .bin is for the reader of it to compare.
        """
        self._check_joins(dataset.prefix, dataset.dtype)
        if dataset.has_modes:
            raise DataError(f"{dataset.prefix}.idx has modes: multimodal datasets are read, but not written")
        checksums = read_checksums(dataset.prefix)
        if checksums:
            # the index first: it is small, and decides what is read of the .bin
            checksums.compare(dataset.prefix, ".idx", file_sha256(dataset.prefix + ".idx"))
        return checksums

    def _append_lengths(self, dataset: IndexedDataset) -> None:
        end = 0
        for start in range(0, len(dataset), BLOCK_ENTRIES):
            lengths = dataset.lengths[start : start + BLOCK_ENTRIES]
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            # the pointers are not copied: those of the result follow from its lengths
            disagrees = (dataset.pointers[start + 1 : start + len(ends)] != ends[:-1]).any()
            if dataset.pointers[start] != end or disagrees or lengths.min() < 0:
                raise DataError(
                    f"{dataset.prefix}.idx: lengths and pointers disagree within its sequences {start} to "
                    f"{start + len(lengths)}; the file is damaged; copy it again "
                    f"({command_name('inspect_dataset')} --verify reports details)"
                )
            self._write_lengths(lengths)
            end = int(ends[-1])
            dataset.release_memory()

    def _append_tokens(
        self, dataset: IndexedDataset, checksums: Checksums | None, progress: ReportBytes | None
    ) -> None:
        digest = hashlib.sha256()
        for block in file_blocks(Path(dataset.prefix + ".bin"), dataset.num_tokens * self.dtype.itemsize):
            self._bin.write(block)
            if checksums:
                digest.update(block)
            if progress:
                progress(len(block))
        self.num_tokens += dataset.num_tokens
        if checksums:
            checksums.compare(dataset.prefix, ".bin", digest.hexdigest())

    def _append_document_ends(self, dataset: IndexedDataset, before: int) -> None:
        """Add the ends of documents whose first sequence is number `before`."""
        for start in range(0, dataset.num_documents, BLOCK_ENTRIES):
            bounds = dataset.document_index[start : start + BLOCK_ENTRIES + 1]
            if (np.diff(bounds) < 0).any():
                raise DataError(
                    f"{dataset.prefix}.idx: the document index decreases within its entries {start} to "
                    f"{start + len(bounds)}; the file is damaged, copy it again"
                )
            self._end_documents(before + bounds[1:])
            dataset.release_memory()

    def absorb(self, other: IndexedDatasetBuilder) -> None:
        """Add everything that another, unsealed builder of the same dtype has written, and leave that as it is."""
        self._check_open()
        other._check_open()
        self._check_joins(other.prefix, other.dtype)
        other._flush()
        # by files, not in memory: a partition may be as large as the dataset
        before = self.num_sequences
        for lengths in file_blocks(other._folder.lengths, 4 * other.num_sequences):
            self._write_lengths(np.frombuffer(lengths, "<i4"))
        for block in file_blocks(other._folder.bin, other.num_tokens * self.dtype.itemsize):
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
        self._check_ids(tokens)
        # nothing is written before everything is checked: a refused batch leaves the files as they were
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self.num_tokens += len(tokens)
        self._write_lengths(counts)

    def _check_ids(self, tokens: Tokens) -> None:
        """Raise DataError for token ids that the conversion to the file's type would change."""
        if tokens.dtype == self.dtype or not len(tokens) or self.dtype.kind not in "iu":
            return
        if tokens.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: tokens are {tokens.dtype}, not integers; give token ids")
        limits = np.iinfo(self.dtype)
        for extreme in (tokens.min(), tokens.max()):
            if not limits.min <= extreme <= limits.max:
                raise DataError(
                    f"{self.prefix}: token id {extreme} does not fit {self.dtype} ({limits.min} to {limits.max}); "
                    "choose the dtype by best_dtype(vocab_size)"
                )

    def _write_lengths(self, lengths: Tokens) -> None:
        self._lengths.write(lengths.astype("<i4").data)
        self.num_sequences += len(lengths)

    def _end_documents(self, ends: Tokens) -> None:
        """Add documents that end before these sequences. They are listed only once a document has several sequences."""
        before = self.num_documents
        if self._document_ends is None:
            if np.array_equal(ends, np.arange(before + 1, before + 1 + len(ends))):
                self.num_documents += len(ends)
                return
            self._document_ends = self._folder.document_ends.open("xb")
            # until now every document had one sequence; these ends were implied
            for block in _count_to(before):
                self._document_ends.write(block)
        self._document_ends.write(ends.astype("<i8").data)
        self.num_documents += len(ends)

    def seal(self, write_manifest: Callable[[IO[bytes], dict[str, Any]], None] | None = None) -> None:
        """Write the rest of the files, still in the work folder. Raises DataError if there are no tokens.

        `write_manifest` receives the file of the manifest, and the facts of the dataset that belong in it. To make
        several datasets appear together, seal each, then finalize each.
        """
        self._check_open()
        if self.num_tokens == 0:
            raise DataError(f"{self.prefix}: no tokens to write; give text that is not empty")
        self._sync()
        with self._folder.unsealed_idx.open("wb") as file:
            idx = _HashedFile(file)
            self._write_index(idx)
            idx.sync()
        sha256 = {".bin": self._bin.digest.hexdigest(), ".idx": idx.digest.hexdigest()}
        with self._folder.sha256.open("wb") as file:
            file.write(Checksums(sha256, self._notes).content(Path(self.prefix).name))
            sync_file(file)
        if write_manifest:
            with self._folder.manifest.open("wb") as file:
                write_manifest(file, self._facts(sha256))
                sync_file(file)
        # last, after all else is on disk: a folder with this name in it is whole
        os.replace(self._folder.unsealed_idx, self._folder.idx)
        sync_folder(self.work_dir)
        self._close_files()
        self._state = "sealed"
        # the .idx holds them now
        self._folder.lengths.unlink()
        self._folder.document_ends.unlink(missing_ok=True)

    def _facts(self, sha256: dict[str, str]) -> dict[str, Any]:
        counts = {"documents": self.num_documents, "sequences": self.num_sequences, "tokens": self.num_tokens}
        return {**counts, "dtype": str(self.dtype), "sha256": sha256}

    def _write_index(self, idx: _HashedFile) -> None:
        idx.write(MAGIC + VERSION.to_bytes(8, "little") + bytes([self._dtype_code]))
        idx.write(self.num_sequences.to_bytes(8, "little") + (self.num_documents + 1).to_bytes(8, "little"))
        for block in self._length_blocks():
            idx.write(block)
        # the lengths twice, the second time as positions: a list of positions would not fit the memory
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
        return file_blocks(self._folder.lengths, 4 * self.num_sequences)

    def _document_end_blocks(self) -> Iterator[memoryview]:
        if self._document_ends is None:
            return _count_to(self.num_documents)
        return file_blocks(self._folder.document_ends, 8 * self.num_documents)

    def finalize(self) -> None:
        """Rename the files to their final names, after sealing them if necessary. Raises as `seal` does."""
        if self._state != "sealed":
            self.seal()
        self._folder.publish(self.prefix)
        self._state = "published"

    def close(self) -> None:
        """Stop, and keep the work folder for `resume` or, if sealed, for `publish`."""
        if self._state == "open":
            with contextlib.suppress(OSError):  # the disk is full; what was saved before is safe
                self._close_files()
        if self._state != "published":
            self._state = "closed"

    def abandon(self) -> None:
        """Remove the unfinished files. Does nothing after `finalize`."""
        if self._state != "published":
            self.close()
            self._folder.remove()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
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
        with contextlib.ExitStack() as stack:  # close all, even if one fails to flush
            for file in self._open_files():
                stack.callback(file.close)


class _HashedFile:
    """A file being written, and the SHA-256 of its content."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.digest.update(content)

    def sync(self) -> None:
        sync_file(self.file)


def _count_to(last: int) -> Iterator[memoryview]:
    """Yield 1, 2, ..., last as int64, in blocks."""
    for start in range(1, last + 1, BLOCK_ENTRIES):
        yield np.arange(start, min(start + BLOCK_ENTRIES, last + 1), dtype="<i8").data


def _open_cut(path: Path, size: int) -> IO[bytes]:
    """Open a file of at least `size` bytes for appending, truncated to `size`."""
    file = path.open("r+b" if path.exists() else "xb")
    file.truncate(size)
    file.seek(size)
    return file
