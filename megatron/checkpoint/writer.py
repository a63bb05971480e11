"""Writing checkpoints: a file as a stream (`Writer`), manifest and final name (`commit`), all of it in one process.

The ranks of a run save with `saver.Saver`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib

from megatron.checkpoint.folders import MANIFEST
from megatron.checkpoint.format import (
    ITEM_BYTES,
    LATEST,
    PIECE_BYTES,
    CheckpointError,
    Fragment,
    StoredFragment,
    check_tag,
    hidden_path,
    manifest_text,
    rank_file,
    safetensors_header,
)
from megatron.checkpoint.reader import Checkpoint
from megatron.runtime.files import sync_folder, write_durably

BLOCK_BYTES = 4096
"""Alignment of addresses, offsets and lengths for writes past the page cache (O_DIRECT)."""
STREAM_HEADER_BYTES = 64 << 10
"""Reserved for the header of a file whose tensors are not known beforehand: enough for some 400 of them."""

logger = logging.getLogger(__name__)


def _entry_bytes(fragment: Fragment) -> int:
    """Upper bound of the header bytes that a fragment needs."""
    # 47 characters of JSON around the key, a comma, and three numbers of at most 20 digits
    return len(json.dumps(f"{fragment.kind}:{fragment.name}")) + 120


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed memory aligned to a page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them; they only speed up the first touch
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def stored_as(file: str, fragment: Fragment, crc32: int, offset: int) -> StoredFragment:
    """Return a fragment as it lies in a file."""
    numel = fragment.tensor.numel()
    stretch = (fragment.tensor_rank, fragment.tensor_size, fragment.shard.padding, fragment.start, numel)
    return StoredFragment(file, fragment.name, fragment.kind, *stretch, crc32, offset)


def file_entry(num_bytes: int, header: bytes, fragments: Sequence[StoredFragment]) -> dict[str, Any]:
    """Return the manifest's entry of a file."""
    keys = ("name", "kind", "tensor_rank", "tensor_size", "padding", "start", "numel", "crc32")
    return {
        "bytes": num_bytes,
        "header_crc32": isal_zlib.crc32(header),
        "fragments": [{key: getattr(at, key) for key in keys} for at in fragments],
    }


class Writer:
    """One file of a checkpoint, streamed: tensors as they come, with their checksums; the header last.

    Bypasses the page cache where the file system allows it, since a checkpoint is seldom read soon. Durable once
    `close` has returned. Raises OSError.
    """

    def __init__(self, path: Path, *, tag: str, token: str, header_bytes: int):
        self.path, self._tag, self._token, self._header_bytes = path, tag, token, header_bytes
        self._free_header_bytes = header_bytes - 8 - _BARE_HEADER_BYTES - len(tag) - len(token)
        self._fragments: list[StoredFragment] = []
        self._offset = header_bytes
        self._memory = anonymous_memory(PIECE_BYTES)
        self._bytes = memoryview(self._memory)
        self._piece = torch.frombuffer(self._memory, dtype=torch.float32)
        self._filled = 0  # elements of the piece
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._direct = hasattr(os, "O_DIRECT")
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._direct = False  # a file system without O_DIRECT, which may have created the file all the same
            self._file = os.open(path, flags & ~os.O_EXCL, 0o666)
        # at a whole block (`header_bytes_for`), as O_DIRECT demands
        os.lseek(self._file, header_bytes, os.SEEK_SET)

    def fits(self, fragment: Fragment) -> bool:
        """Return True if the header has room for one more."""
        return _entry_bytes(fragment) <= self._free_header_bytes

    def add(self, fragment: Fragment) -> None:
        tensor, numel = fragment.tensor.detach(), fragment.tensor.numel()
        done, crc32 = 0, 0
        while done < numel:
            count = min(numel - done, len(self._piece) - self._filled)
            end = self._filled + count
            self._piece[self._filled : end].copy_(tensor[done : done + count])
            crc32 = isal_zlib.crc32(self._bytes[self._filled * ITEM_BYTES : end * ITEM_BYTES], crc32)
            self._filled, done = end, done + count
            if end == len(self._piece):
                self._flush()
        self._fragments.append(stored_as(self.path.name, fragment, crc32, self._offset))
        self._offset += numel * ITEM_BYTES
        self._free_header_bytes -= _entry_bytes(fragment)

    def close(self) -> dict[str, Any]:
        """Write the rest, wait for the disk, and return the manifest's entry of the file."""
        self._flush()
        # the header's bytes lie at no aligned address
        self._leave_direct()
        header = safetensors_header(self._tag, self._token, self.path.name, self._fragments, self._header_bytes)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._write(memoryview(header))
        os.fsync(self._file)
        self.abandon()
        return file_entry(self._offset, header, self._fragments)

    def abandon(self) -> None:
        """Close the file as it is. Does nothing after `close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _flush(self) -> None:
        self._write(self._bytes[: self._filled * ITEM_BYTES])
        self._filled = 0

    def _write(self, content: memoryview) -> None:
        while len(content):
            # the rest at the end of a file is shorter than a block
            if self._direct and len(content) < BLOCK_BYTES:
                self._leave_direct()
            part = content
            if self._direct:
                part = content[: len(content) // BLOCK_BYTES * BLOCK_BYTES]
            try:
                written = os.write(self._file, part)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()  # larger blocks than ours, or a write that ended within one
                continue
            if not self._direct and hasattr(os, "posix_fadvise"):
                # start writeback now, so that the final fsync has little left
                begin = os.lseek(self._file, 0, os.SEEK_CUR) - written
                os.posix_fadvise(self._file, begin, written, os.POSIX_FADV_DONTNEED)
            content = content[written:]

    def _leave_direct(self) -> None:
        if self._direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False


_BARE_HEADER_BYTES = len(safetensors_header("", "", "rank_0000000000.safetensors", (), 1 << 12).rstrip())


@dataclass
class ManifestEntries:
    """Parameters and files that one rank adds to the manifest."""

    parameters: dict[str, Any]
    files: dict[str, Any]

    def add_parameter(self, fragment: Fragment) -> None:
        shard = fragment.shard
        entry = {"shape": list(shard.shape), "dim": shard.dim, "pieces": list(shard.pieces), "dtype": fragment.dtype}
        self._add(fragment.name, entry)

    def merge(self, other: Mapping[str, Any]) -> None:
        for name, entry in other["parameters"].items():
            self._add(name, entry)
        self.files.update(other["files"])

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        if self.parameters.setdefault(name, entry) != entry:
            raise CheckpointError(
                f"{name} is both {self.parameters[name]} and {entry}; a name must belong to one parameter"
            )


def write_checkpoint(folder: str | Path, tag: str, fragments: Iterable[Fragment], metadata: Mapping[str, Any]) -> Path:
    """Save a checkpoint from a single process, update `latest`, and return the checkpoint's folder.

    Fragments are consumed one by one. A failure leaves nothing behind, and a previous checkpoint of this tag intact.
    Raises CheckpointError or OSError.
    """
    return write_checkpoint_by(folder, tag, metadata, lambda part: write_files(part, fragments))


@dataclass(frozen=True)
class Part:
    """Files of a checkpoint that one process writes: number `first`, and each `step` further."""

    folder: Path
    tag: str
    token: str
    first: int = 0
    step: int = 1


def write_checkpoint_by(
    folder: str | Path, tag: str, metadata: Mapping[str, Any], write: Callable[[Part], ManifestEntries]
) -> Path:
    """Save a checkpoint whose files `write` writes, as `write_checkpoint` does."""
    save, token = Path(folder), uuid.uuid4().hex[:12]
    check_tag(tag)
    # NaN and infinities are not JSON: other readers would refuse the manifest
    text = json.dumps(metadata, allow_nan=False)
    make_folder(save)
    partial = hidden_path(save, tag, "partial", token)
    try:
        os.mkdir(partial)
        entries = write(Part(partial, tag, token))
        if not entries.files:
            raise CheckpointError(f"{save / tag}: there is nothing to save in it")
        commit(save, tag, token, entries, text)
    finally:
        # after a commit it has another name, and nothing is here
        shutil.rmtree(partial, ignore_errors=True)
    return save / tag


def write_files(part: Part, fragments: Iterable[Fragment]) -> ManifestEntries:
    """Write fragments, which are consumed one by one, and return what the manifest has of them."""
    entries, writer, number = ManifestEntries({}, {}), None, part.first
    # a file is closed when its header is full: tensors come one by one, and their names are not known before
    try:
        for fragment in fragments:
            entries.add_parameter(fragment)
            if writer is None or not writer.fits(fragment):
                if writer is not None:
                    entries.files[writer.path.name] = writer.close()
                    number += part.step
                header_bytes = max(STREAM_HEADER_BYTES, header_bytes_for(part.tag, part.token, [fragment]))
                writer = Writer(
                    part.folder / rank_file(number), tag=part.tag, token=part.token, header_bytes=header_bytes
                )
            writer.add(fragment)
        if writer is not None:
            entries.files[writer.path.name] = writer.close()
    finally:
        if writer is not None:
            writer.abandon()
    return entries


def make_folder(save: Path) -> None:
    try:
        save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{save} cannot be created: {error.strerror}; give a writable folder") from error


def header_bytes_for(tag: str, token: str, fragments: Sequence[Fragment]) -> int:
    """Return a size sufficient for the header of these fragments."""
    needed = 8 + _BARE_HEADER_BYTES + len(tag) + len(token) + sum(map(_entry_bytes, fragments))
    return -(-needed // BLOCK_BYTES) * BLOCK_BYTES


def commit(save: Path, tag: str, token: str, entries: ManifestEntries, metadata_text: str) -> None:
    """Write the manifest of a complete folder, rename the folder to its tag, and update `latest`.

    At every moment, failure and crash included, `latest` names a complete checkpoint, or that checkpoint is found under
    its hidden name.
    """
    partial, final = hidden_path(save, tag, "partial", token), save / tag
    replaced, latest = hidden_path(save, tag, "replaced", token), hidden_path(save, tag, "latest", token)
    try:
        write_durably(partial / MANIFEST, manifest_text(tag, token, metadata_text, entries.parameters, entries.files))
        for path in partial.glob("rank_*.json"):  # the ranks' entries, which the manifest now has
            os.unlink(path)
        Checkpoint(partial)  # an incomplete one must not get its name
        sync_folder(partial)
        lines = [tag]
        run = json.loads(metadata_text).get("run")
        if run is not None:
            lines.append(json.dumps(run))
        # before any rename: a full disk shows here
        write_durably(latest, "\n".join([*lines, ""]).encode())
        if os.path.lexists(final):
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
            # the name is on the disk before `latest` gives it: after a crash, none that is missing is named
            sync_folder(save)
            os.replace(latest, save / LATEST)
            sync_folder(save)
        except OSError:  # the checkpoint that was there gets its name back
            with contextlib.suppress(OSError):
                os.rename(final, partial)
            with contextlib.suppress(OSError):
                os.rename(replaced, final)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(latest)
        raise
    # last: until `latest` is on the disk, this is what a crash leaves whole
    if os.path.lexists(replaced):
        remove_checkpoint(replaced, hidden_path(save, tag, "deleted", token))


def remove_checkpoint(path: Path, hidden: Path) -> None:
    """Rename a checkpoint to `hidden`, then delete it, so that half of one never keeps its name. Failures only warn."""
    try:
        if path != hidden:
            os.rename(path, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
