"""Copies of a run's state in host memory, which a restart reads as a checkpoint: each rank's files, used in turn.

    FOLDER/global_step120/rank_00003.safetensors   as in a checkpoint (format.py)
    FOLDER/global_step120/rank_00003.json          its part of the manifest, sealed: there once the file is whole
    FOLDER/global_step120/checkpoint.json          the manifest, made by a restart of all parts

The folder lies in memory (tmpfs) and belongs to the agent of a host, which outlives its ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from megatron.checkpoint.folders import MANIFEST, iteration_of, open_file
from megatron.checkpoint.format import (
    ITEM_BYTES,
    CheckpointError,
    Fragment,
    StoredFragment,
    as_damage,
    manifest_text,
    part_file,
    rank_file,
    safetensors_header,
)
from megatron.checkpoint.writer import ManifestEntries, file_entry, header_bytes_for, stored_as
from megatron.runtime.files import parse_json

TAG = "global_step"
COPIES = 2
"""Copies of a rank's state: the whole one and the one that is made: a rank may be killed while it makes one."""
MOST_PART_BYTES = 256 << 20
"""Size of a rank's part of the manifest: some 150 bytes a tensor."""
_LONGEST_TAG = f"{TAG}{10**18}"
_SEAL_BYTES = hashlib.sha256().digest_size * 2
_PART = re.compile(r"rank_[0-9]{5,}\.json")
_TOKEN = re.compile(r"[A-Za-z0-9]{1,64}")


@dataclass(frozen=True)
class RankPart:
    """Contribution of one rank to the manifest of a copy."""

    step: int
    token: str
    """Equal on all ranks, and of no other copy."""
    rank: int
    world_size: int
    metadata: str
    """JSON text of the checkpoint's metadata; of rank 0 alone, else empty."""
    parameters: dict[str, Any]
    files: dict[str, Any]

    @property
    def copy(self) -> tuple[int, str]:
        return self.step, self.token

    def to_text(self) -> bytes:
        body = json.dumps(asdict(self)).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def of(cls, text: bytes) -> RankPart:
        """Raises CheckpointError."""
        seal, body = text[:_SEAL_BYTES], text[_SEAL_BYTES + 1 :]
        if hashlib.sha256(body).hexdigest().encode() != seal:
            raise CheckpointError("its checksum is not that of its text")
        try:
            part = cls(**parse_json(body))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"it does not describe a part of a copy ({error})") from None
        numbers = (part.step, part.rank, part.world_size)
        is_valid = all(type(number) is int and number >= 0 for number in numbers)
        is_valid &= isinstance(part.token, str) and bool(_TOKEN.fullmatch(part.token))
        is_valid &= isinstance(part.metadata, str) and "\n" not in part.metadata
        is_valid &= isinstance(part.parameters, dict) and isinstance(part.files, dict)
        # one file, by the rank's own name: read_manifest checks what it holds
        if not is_valid or not part.files.keys() <= {rank_file(part.rank)}:
            raise CheckpointError("it does not describe a part of a copy")
        return part


def read_part(path: Path) -> RankPart:
    """Raises CheckpointError."""
    with open_file(path) as descriptor, as_damage(path):
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes > MOST_PART_BYTES:
            raise CheckpointError(f"it has {num_bytes} bytes, more than the {MOST_PART_BYTES} of a part")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            part = RankPart.of(file.read(MOST_PART_BYTES))
        if (part.step, part_file(part.rank)) != (iteration_of(path.parent.name), path.name):
            raise CheckpointError(f"it is that of rank {part.rank}, iteration {part.step}")
        return part


def write_part(copy: Path, rank: int, text: bytes) -> None:
    """Mark the copy of a rank as whole."""
    _write(copy / part_file(rank), text)


def part_paths(folder: Path) -> list[Path]:
    """Return the parts of all copies in a folder."""
    return sorted(path for path in folder.glob(f"{TAG}*/*.json") if _PART.fullmatch(path.name))


def write_manifest(folder: Path, step: int, world_size: int) -> Path:
    """Make the manifest of a copy of the parts of all ranks, which lie in one folder; return the copy's.

    Raises CheckpointError and OSError.
    """
    copy = folder / f"{TAG}{step}"
    parts = [read_part(copy / part_file(rank)) for rank in range(world_size)]
    entries = ManifestEntries({}, {})
    for part in parts:
        entries.merge({"parameters": part.parameters, "files": part.files})
    text = manifest_text(copy.name, parts[0].token, parts[0].metadata, entries.parameters, entries.files)
    _write(copy / MANIFEST, text)
    return copy


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears whole."""
    # to memory: nothing is to survive a power cut, so nothing is synced
    partial = path.with_suffix(".tmp")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.rename(partial, path)


def copied_bytes(fragments: Sequence[Fragment]) -> int:
    """Return the size of the file of a copy of these."""
    return _header_bytes(fragments) + ITEM_BYTES * sum(fragment.tensor.numel() for fragment in fragments)


def _header_bytes(fragments: Sequence[Fragment]) -> int:
    # for the longest names, so that a file serves every later iteration
    return header_bytes_for(_LONGEST_TAG, "t" * 64, fragments)


class RankCopies:
    """The copies of one rank in a folder, in COPIES files in turn. Raises OSError where memory is full."""

    def __init__(self, folder: Path, rank: int, world_size: int, kept: int | None) -> None:
        """Take over the files that an earlier attempt left. `kept`: the iteration whose copy is to stay."""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        left = [_CopyFile(path) for path in folder.glob(f"{TAG}*/{rank_file(rank)}")]
        left.sort(key=lambda file: file.step != kept)
        for file in left[COPIES:]:  # of a restart that brought one from another host
            file.free()
        self._files = [*left[:COPIES], *(_CopyFile(None) for _ in range(COPIES - len(left)))]
        self._withdraw(kept)
        # where neither is to stay, as after a start from the disk, the first serves
        self._present = next((file for file in self._files if file.step is not None), self._files[0])
        self._placed: list[tuple[Fragment, int]] = []
        """Copied fragments, and where they lie, until its checksums are computed."""
        self._step, self._token, self._num_bytes = 0, "", 0

    def copy(self, step: int, token: str, fragments: Sequence[Fragment], kept: int | None) -> None:
        """Copy the state now, over what is not the copy of the iteration `kept`; `complete` does the rest."""
        self._step, self._token, self._num_bytes, self._placed = step, token, 0, []
        offset, num_bytes = _header_bytes(fragments), copied_bytes(fragments) if fragments else 0
        floats = self.open(step, num_bytes, kept).view(torch.float32)
        for fragment in fragments:
            self._placed.append((fragment, offset))
            begin = offset // ITEM_BYTES
            floats[begin : begin + fragment.tensor.numel()].copy_(fragment.tensor.detach())
            offset += ITEM_BYTES * fragment.tensor.numel()
        self._num_bytes = num_bytes

    def open(self, step: int, num_bytes: int, kept: int | None) -> Tensor:
        """Return the bytes of the file for the copy of an iteration, which belongs to no copy until `mark`."""
        self._withdraw(kept)
        if not num_bytes:  # of a rank that owns nothing
            return torch.empty(0, dtype=torch.uint8)
        path = self._folder / f"{TAG}{step}" / rank_file(self._rank)
        free = [file for file in self._files if file.step is None]
        # after a rollback both are free, and one may have this name already
        self._present = next((file for file in free if file.path == path), free[0])
        return self._present.take(path, num_bytes)

    def complete(self, metadata: str) -> bytes:
        """Compute the checksums of what was copied, and mark the copy as whole. Returns the text of its part."""
        tag, entries, stored = f"{TAG}{self._step}", ManifestEntries({}, {}), list[StoredFragment]()
        for fragment, offset in self._placed:
            entries.add_parameter(fragment)
            content = self._present.content[offset : offset + ITEM_BYTES * fragment.tensor.numel()]
            stored.append(stored_as(rank_file(self._rank), fragment, isal_zlib.crc32(content), offset))
        if stored:
            name, content = rank_file(self._rank), self._present.content
            header = safetensors_header(tag, self._token, name, stored, stored[0].offset)
            content[: len(header)] = header
            entries.files[name] = file_entry(len(content), header, stored)
        part = RankPart(
            self._step, self._token, self._rank, self._world_size, metadata, entries.parameters, entries.files
        ).to_text()
        self._placed = []
        self.mark(self._step, part)
        return part

    def mark(self, step: int, part: bytes) -> None:
        """Mark the copy of an iteration as whole."""
        folder = self._folder / f"{TAG}{step}"
        folder.mkdir(exist_ok=True)
        write_part(folder, self._rank, part)

    @property
    def content(self) -> Tensor:
        """The bytes of the newest copy; none where the rank owns nothing."""
        if not self._num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._present.content, dtype=torch.uint8)

    def discard(self) -> None:
        """Let no restart begin at any of the copies."""
        self._withdraw(None)

    def _withdraw(self, kept: int | None) -> None:
        """Remove the signs of all copies but that of the iteration `kept`: what is about to change is not whole."""
        for file in self._files:
            # forgotten: an iteration that comes again, as after a rollback, is not that one
            if kept is None or file.step != kept:
                file.step = None
        for path in self._folder.glob(f"{TAG}*/{part_file(self._rank)}"):
            if kept is None or iteration_of(path.parent.name) != kept:
                path.unlink()
                (path.parent / MANIFEST).unlink(missing_ok=True)
                _remove_empty(path.parent)


class _CopyFile:
    """Memory of a copy, under a name that changes with each one."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of an earlier attempt; None: it takes no memory yet."""
        self.path = path
        self.step = iteration_of(path.parent.name) if path is not None else None
        """Iteration of its copy, whole or not; None: of none that counts, whatever its name says."""
        self._memory: mmap.mmap | None = None

    @property
    def content(self) -> memoryview:
        assert self._memory is not None
        return memoryview(self._memory)

    def free(self) -> None:
        """Give its memory back."""
        self._memory = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            _remove_empty(self.path.parent)
            self.path = self.step = None

    def take(self, path: Path, num_bytes: int) -> Tensor:
        """Give it this name and size. Returns its bytes."""
        if not self._has(num_bytes):
            self.free()  # first: there may be no room for both
        path.parent.mkdir(exist_ok=True)
        if self.path is None:
            self._memory = allocate(path, num_bytes)
        elif path != self.path:
            if os.path.lexists(path):  # a rename would end that one without a word
                raise FileExistsError(errno.EEXIST, "another copy has this name", str(path))
            os.rename(self.path, path)
            _remove_empty(self.path.parent)
        self.path, self.step = path, iteration_of(path.parent.name)
        return torch.frombuffer(self.content, dtype=torch.uint8)

    def _has(self, num_bytes: int) -> bool:
        """Return True if its memory has this size; that of an earlier attempt is opened."""
        if self._memory is None and self.path is not None:
            with contextlib.suppress(OSError, ValueError):
                self._memory = _opened(self.path)
        return self._memory is not None and len(self._memory) == num_bytes


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # files of other ranks are in it
        folder.rmdir()


def allocate(path: Path, num_bytes: int) -> mmap.mmap:
    """Make a file in memory. Raises OSError where that is full."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        # now: a page that is missing when it is written to ends the process by SIGBUS
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _opened(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def remove_others(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the copies of all ranks but these, and what killed ones left."""
    own = {MANIFEST}
    for rank in ranks:
        own |= {rank_file(rank), part_file(rank)}
    for path in folder.glob(f"{TAG}*/*"):
        if path.name not in own:
            path.unlink(missing_ok=True)
            _remove_empty(path.parent)


def held_bytes(folder: Path) -> int:
    """Return the bytes that the copies in a folder take."""
    sizes = 0
    for path in folder.glob(f"{TAG}*/*"):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes
