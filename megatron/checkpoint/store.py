"""Checkpoints on disk: whole or not there, checked when read, and independent of the layout that wrote them.

    SAVE/latest                                      the tag of the newest whole checkpoint, such as global_step100
    SAVE/global_step100/checkpoint.json              the manifest: what there is, where, and its checksums
    SAVE/global_step100/rank_00000.safetensors, ...  one for each rank that owns something
    SAVE/.global_step100.partial-TOKEN/              a save under way: gets its name when it is whole
    SAVE/.global_step100.failed-TOKEN                why a save failed, for the other ranks to read
    SAVE/.global_step100.replaced-TOKEN/             the old one, while a checkpoint is written over
    SAVE/.global_step100.deleted-TOKEN/              being removed
    SAVE/.lock                                       held by the run that saves here

A file holds flat float32 tensors, under the key KIND:NAME. Each is the stretch [start, start + numel) of a parameter's
flattened local tensor, as rank `tensor_rank` of `tensor_size` tensor-parallel ones has it, padding included. What any
other layout needs is found by `slices.regions`. Nothing here executes what it reads, and no name inside a checkpoint
leads out of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import mmap
import os
import re
import shutil
import socket
import stat
import threading
import time
import uuid
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.slices import copy_overlap, regions
from megatron.parallel.context import LayoutError
from megatron.parallel.shards import Shard

FORMAT = "megatron-3d"
VERSION = 1
MANIFEST = "checkpoint.json"
LATEST = "latest"

ITEM_BYTES = 4
PIECE_BYTES = 8 << 20
"""Copied, summed and written at a time: large for the disk, small enough to stay in a cache meanwhile."""
BLOCK_BYTES = 4096
"""What writing past the page cache wants addresses, places and lengths to be multiples of."""
STREAM_HEADER_BYTES = 64 << 10
"""Kept free for the header of a file whose tensors are not known beforehand: enough for some 400 of them."""
RELEASE_BYTES = 32 << 20
"""Read through a mapping before its pages are let go."""
SHOWN_DAMAGES = 10

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
_TOKEN = re.compile(r"[A-Za-z0-9]+")
_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")
_KIND = re.compile(r"[a-z0-9_]+")
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64
_LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<state>partial|failed|replaced|deleted|latest)-(?P<token>[A-Za-z0-9]+)(\.[0-9]+)?"
)

_REMEDY = "copy it anew from where the checkpoint was saved, or load another checkpoint"

Progress = Callable[[int], object]
"""Told how many bytes were handled since the last time."""

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A folder holds no checkpoint, or one that is damaged or cannot be used or written. Says which file, and why."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """A stretch of a parameter's flattened local tensor, to be saved."""

    name: str
    """`<layer index>.<name>`: the same on every layout."""
    kind: str
    """`weight` (float32), or a moment of the optimizer: `exp_avg`, `exp_avg_sq`, `momentum_buffer`."""
    shard: Shard
    tensor_rank: int
    tensor_size: int
    start: int
    """Of the stretch, in elements of the local tensor of `tensor_rank` of `tensor_size`."""
    tensor: Tensor
    """float32 [numel], on any device."""
    dtype: str = "float32"
    """What the run computes with, such as bfloat16. Told to readers; the fragment itself is float32."""

    def __post_init__(self) -> None:
        what = f"{self.kind} of {self.name}"
        if self.tensor.dtype != torch.float32 or self.tensor.dim() != 1:
            found = f"{self.tensor.dtype} {tuple(self.tensor.shape)}"
            raise CheckpointError(f"{what}: a fragment must be float32 and flat, this one is {found}")
        if not _KIND.fullmatch(self.kind):
            raise CheckpointError(f"{what}: a kind is lower-case letters, digits and underscores")
        if self.shard.dim is None and self.tensor_size != 1:
            raise CheckpointError(f"{what} is not cut, so it is saved once, as tensor rank 0 of 1")
        if not 0 <= self.tensor_rank < self.tensor_size:
            raise CheckpointError(f"{what}: there is no tensor rank {self.tensor_rank} of {self.tensor_size}")
        local_numel, stop = math.prod(self.shard.local_shape(self.tensor_size)), self.start + self.tensor.numel()
        if self.start < 0 or stop > local_numel:
            raise CheckpointError(f"{what}: [{self.start}, {stop}) is outside its {local_numel} local elements")


@dataclass(frozen=True, slots=True)
class Stored:
    """A fragment in a file."""

    file: str
    name: str
    kind: str
    tensor_rank: int
    tensor_size: int
    padding: int
    start: int
    numel: int
    crc32: int
    offset: int
    """Of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Checkpoint:
    """A whole checkpoint. Raises CheckpointError if something is missing, or does not belong to the rest.

    Opening reads the manifest and the headers, and checks sizes and that the fragments make up every tensor, once. The
    tensors' own checksums are for `verify`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        path = self.folder / MANIFEST
        with _as_damage(path):
            self.tag = _string(manifest, "tag")
            self.token = _string(manifest, "token")
            self.metadata: dict[str, Any] = _mapping(manifest, "metadata")
            self.parameters: dict[str, Shard] = {}
            """Unpadded, without what they started from."""
            self.dtypes: dict[str, str] = {}
            """What the run computed with."""
            for name, entry in _mapping(manifest, "parameters").items():
                self.parameters[name] = _parameter(name, entry)
                self.dtypes[name] = _string(entry, "dtype")
            files = _mapping(manifest, "files")
            self.file_bytes: dict[str, int] = {}
            by_file = {}
            for name, entry in files.items():
                by_file[name] = list(self._file(name, entry))
                self.file_bytes[name] = _count(entry, "bytes")
                _count(entry, "header_crc32")
            self.fragments: Sequence[Stored] = [at for fragments in by_file.values() for at in fragments]
            """In the order of the files, and within them."""
        self._tensors: dict[tuple[str, str], list[Stored]] = {}
        for at in self.fragments:
            self._tensors.setdefault((at.name, at.kind), []).append(at)
        self.kinds = tuple(sorted({at.kind for at in self.fragments}, key=lambda kind: (kind != "weight", kind)))
        """`weight` first."""
        with _as_damage(path):
            self._check_completeness()
        for name, entry in files.items():
            self._check_file(name, entry["header_crc32"], by_file[name])
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}
        self._unreleased_bytes = 0

    def _file(self, file: str, entry: Any) -> Iterator[Stored]:
        """What the manifest says of a file, which is laid out in the order of its fragments."""
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"files: {file!r} is no name of a rank's file, such as rank_00000.safetensors")
        listed = _mapping(entry, "fragments", list)
        sizes = [_count(fragment, "numel") * ITEM_BYTES for fragment in listed]
        offset = _count(entry, "bytes") - sum(sizes)
        if offset < 8 or offset % ITEM_BYTES:
            raise CheckpointError(f"files: {file} has {entry['bytes']} bytes, but its fragments make {sum(sizes)}")
        for fragment, num_bytes in zip(listed, sizes, strict=True):
            name = _string(fragment, "name")
            if name not in self.parameters:
                raise CheckpointError(f"files: {file} has a fragment of {name!r}, which is no parameter")
            yield Stored(
                file=file,
                name=name,
                kind=_string(fragment, "kind"),
                tensor_rank=_count(fragment, "tensor_rank"),
                tensor_size=_count(fragment, "tensor_size"),
                padding=_count(fragment, "padding"),
                start=_count(fragment, "start"),
                numel=_count(fragment, "numel"),
                crc32=_count(fragment, "crc32"),
                offset=offset,
            )
            offset += num_bytes

    def _check_file(self, file: str, header_crc32: int, fragments: Sequence[Stored]) -> None:
        """That the file has the size and the header that the manifest says. Reads the header alone."""
        path, expected_bytes = self.folder / file, self.file_bytes[file]
        with _open_file(path) as descriptor, _as_damage(path):
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes != expected_bytes:
                raise CheckpointError(f"it has {num_bytes} bytes, but {MANIFEST} says {expected_bytes}; {_REMEDY}")
            data_start = fragments[0].offset if fragments else num_bytes
            header = os.pread(descriptor, data_start, 0)
            said = _metadata_of(header)
            if said.get("save") not in (None, self.token) or said.get("file") not in (None, file):
                raise CheckpointError(
                    f"it is {said.get('file')} of the save {said.get('tag')} {said.get('save')}, not {file} of "
                    f"{self.tag} {self.token}; {_REMEDY}"
                )
            if zlib.crc32(header) != header_crc32:
                raise CheckpointError(f"its header (bytes 0 to {data_start}) has another checksum; {_REMEDY}")
            if header != _header(self.tag, self.token, file, fragments, data_start):
                raise CheckpointError(f"its header lists other tensors than {MANIFEST}; {_REMEDY}")

    def _check_completeness(self) -> None:
        for name in self.parameters:
            if (name, "weight") not in self._tensors:
                raise CheckpointError(f"there is no weight of {name}; save the checkpoint anew, or load another")
        for (name, kind), fragments in self._tensors.items():
            try:
                problem = _tiling_fault(self.parameters[name], fragments)
            except LayoutError as error:
                problem = str(error)
            if problem:
                raise CheckpointError(f"{kind} of {name}: {problem}; save the checkpoint anew, or load another")

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(self.file_bytes.values())

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """What is stored of a parameter, `weight` first."""
        return tuple(kind for kind in self.kinds if (name, kind) in self._tensors)

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor:
        """[start, start + numel) of the flattened local tensor that `tensor_rank` of any `tensor_size` has: float32.

        Padding is zero. Reads only what it needs. Raises CheckpointError for a parameter or kind that is not there, or
        has another shape.
        """
        stored = self._shard_like(name, kind, shard)
        wanted = regions(shard, tensor_rank, tensor_size, start, numel)
        target = torch.zeros(numel) if shard.padding else torch.empty(numel)
        for at in self._tensors[name, kind]:
            source_start, source_numel = at.start, at.numel
            if at.tensor_size == tensor_size and at.padding == shard.padding and shard.dim is not None:
                # cut the same way: only what lies in the stretch itself can overlap
                source_start, stop = max(start, at.start), min(start + numel, at.start + at.numel)
                source_numel = stop - source_start
                if at.tensor_rank != tensor_rank or source_numel <= 0:
                    continue
            source_shard = replace(stored, padding=at.padding)
            held = regions(source_shard, at.tensor_rank, at.tensor_size, source_start, source_numel)
            begin = at.offset // ITEM_BYTES + source_start - at.start
            copy_overlap(self._map(at.file)[begin : begin + source_numel], held, target, wanted)
        self._release(numel * ITEM_BYTES)
        return target

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        """A whole tensor, without padding: float32 of its full shape."""
        if name not in self.parameters:
            raise CheckpointError(self._unknown(name))
        shard = self.parameters[name]
        return self.read(name, kind, shard, 0, 1, 0, math.prod(shard.shape)).view(shard.shape)

    def _shard_like(self, name: str, kind: str, shard: Shard) -> Shard:
        if name not in self.parameters:
            raise CheckpointError(self._unknown(name))
        stored = self.parameters[name]
        if (name, kind) not in self._tensors:
            there = ", ".join(self.kinds_of(name))
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}, only {there}")
        if (stored.shape, stored.dim, stored.pieces) != (shard.shape, shard.dim, shard.pieces):
            raise CheckpointError(
                f"{self.folder} holds {name} as {_said(stored)}; this model has it as {_said(shard)}. "
                "Give the options of the model that was saved"
            )
        return stored

    def _unknown(self, name: str) -> str:
        some = ", ".join(list(self.parameters)[:3])
        return f"{self.folder} holds no parameter {name!r}, but {len(self.parameters)} others, such as {some}"

    def _map(self, file: str) -> Tensor:
        """The whole file as float32, whatever its header is; mapped, not read."""
        if file not in self._maps:
            path = self.folder / file
            with _open_file(path) as descriptor, _as_damage(path):
                if os.fstat(descriptor).st_size != self.file_bytes[file]:
                    raise CheckpointError("it has changed its size since the checkpoint was opened")
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it cannot be written to, which nobody does
                tensor = torch.frombuffer(mapped, dtype=torch.float32, count=len(mapped) // ITEM_BYTES)
            self._maps[file] = (mapped, tensor)
        return self._maps[file][1]

    def _release(self, num_bytes: int) -> None:
        """Let go of the pages read so far now and then, so that memory does not grow with what was read."""
        self._unreleased_bytes += num_bytes
        if self._unreleased_bytes >= RELEASE_BYTES:
            for mapped, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._unreleased_bytes = 0

    def share(self, share: tuple[int, int]) -> list[Stored]:
        """The fragments that number share[0] of share[1] workers verifies, so that each has as many bytes to read."""
        index, count = share
        total, before, own = sum(at.num_bytes for at in self.fragments), 0, []
        for at in self.fragments:
            if index <= before * count // max(total, 1) < index + 1:
                own.append(at)
            before += at.num_bytes
        return own

    def verify(self, share: tuple[int, int] = (0, 1), progress: Progress | None = None) -> None:
        """Compare the checksum of every tensor of this share. Raises CheckpointError naming each damage."""
        own = self.share(share)
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((at.num_bytes for at in own), default=0))))
        damages = []
        for file, fragments in itertools.groupby(own, lambda at: at.file):
            path = self.folder / file
            with _open_file(path) as descriptor, _as_damage(path):
                for at in fragments:
                    found, done = 0, 0
                    while done < at.num_bytes:
                        count = os.preadv(descriptor, [buffer[: at.num_bytes - done]], at.offset + done)
                        if not count:
                            raise CheckpointError(f"it ends at byte {at.offset + done}; {_REMEDY}")
                        found = zlib.crc32(buffer[:count], found)
                        done += count
                        if progress:
                            progress(count)
                    if found != at.crc32:
                        place = f"bytes {at.offset} to {at.offset + at.num_bytes}"
                        damages.append(
                            f"{path}: {at.kind} of {at.name} ({place}) has the checksum {found:08x}, not {at.crc32:08x}"
                        )
        if damages:
            more = f"\n... {len(damages)} damaged tensors in all" if len(damages) > SHOWN_DAMAGES else ""
            raise CheckpointError(
                "\n".join(damages[:SHOWN_DAMAGES]) + f"{more}\nLoad another checkpoint, or copy these "
                "files anew from where it was saved"
            )


def newest_checkpoint(
    folder: str | Path, *, tag: str | None = None, fall_back: bool = True, excluding: Collection[str] = ()
) -> Checkpoint | None:
    """The checkpoint that `latest` names, or `tag`, or None where `folder` is missing or empty: a run starts anew.

    Those in `excluding`, names of folders, are known to be damaged.

    With `fall_back`, where `latest` names none that is whole, the newest that is, which a warning tells. A `tag` has no
    substitute. Files and folders whose names begin with a dot, as a killed run leaves them, count as nothing.
    Raises CheckpointError if there is something else, or nothing whole.
    """
    save = Path(folder)
    if not os.path.lexists(save):
        return None
    if not save.is_dir():
        raise CheckpointError(f"{save} is a file; give the folder that a run saved its checkpoints in")
    if tag is not None:
        _check_tag(tag)
        return Checkpoint(save / tag)
    candidates = _candidates(save)
    if not candidates and not any(not entry.name.startswith(".") for entry in save.iterdir()):
        return None
    if not candidates and not os.path.lexists(save / LATEST):
        if os.path.lexists(save / MANIFEST):
            raise CheckpointError(f"{save} is itself a checkpoint; give the folder that it is in: {save.parent}")
        raise CheckpointError(
            f"{save} holds files, but no checkpoint: it has no `{LATEST}`; give the folder that a run saved its "
            "checkpoints in, or an empty one to start anew"
        )
    problems = []
    try:
        latest = _read_latest(save)
        if latest not in excluding:
            return Checkpoint(save / latest)
        problems.append(f"{latest} is damaged")
    except CheckpointError as error:
        if not fall_back:
            raise
        problems.append(str(error))
    for path in candidates:
        if path.name in excluding:
            continue
        try:
            checkpoint = Checkpoint(path)
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        logger.warning("%s is loaded instead of a newer one: %s", path, "; ".join(problems))
        return checkpoint
    raise CheckpointError(f"{save} holds no whole checkpoint: " + "; ".join(problems))


def holds_checkpoints(folder: Path) -> bool:
    """Whether something in the folder looks like a checkpoint, whole or not."""
    return folder.is_dir() and bool(_candidates(folder))


def _candidates(save: Path) -> list[Path]:
    """Folders that may be checkpoints, newest first; one that was about to be replaced comes behind its namesake."""
    found = []
    for path in save.iterdir():
        left = _LEFTOVER.fullmatch(path.name)
        tag = left["tag"] if left and left["state"] == "replaced" else path.name
        if _TAG.fullmatch(tag) and os.path.lexists(path / MANIFEST):
            found.append((_iteration(tag), tag == path.name, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _iteration(tag: str) -> int:
    """The number that a tag ends with; -1: none."""
    number = re.search(r"[0-9]+$", tag)
    return int(number[0]) if number else -1


def _read_latest(save: Path) -> str:
    path = save / LATEST
    remedy = "write the name of a whole checkpoint into it"
    with _open_file(path) as descriptor, _as_damage(path):
        content = os.read(descriptor, 4096)
        tag = content.decode("ascii", "backslashreplace").strip()
        if not _TAG.fullmatch(tag):
            raise CheckpointError(f"it says {tag[:80]!r}, which names no checkpoint; {remedy}")
        if not (save / tag).is_dir():
            raise CheckpointError(f"it names {tag}, but {save / tag} is not there; {remedy}")
    return tag


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file, never through a link. Raises CheckpointError."""
    try:
        # a pipe in its place must not keep us waiting
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; {_REMEDY}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, which is never followed; put the file itself there") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no regular file; {_REMEDY}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Say of every fault found inside in which file it is."""
    try:
        yield
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there; give the folder of a checkpoint")
    with _open_file(path) as descriptor, _as_damage(path):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            text = file.read()
        seal = _SEAL.fullmatch(text[-_SEAL_BYTES:])
        body = text[:-_SEAL_BYTES] + b"\n}\n"
        whole = seal and hashlib.sha256(body).hexdigest().encode() == seal[1]
        try:
            manifest = json.loads(body if whole else text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is no JSON ({error}), so it is damaged; {_REMEDY}") from None
        # of another kind or version rather than damaged: another seal, perhaps
        if isinstance(manifest, dict) and isinstance(manifest.get("format"), str) and manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format'][:80]!r}; only {FORMAT!r} is read")
        if isinstance(manifest, dict) and type(manifest.get("version")) is int and manifest["version"] != VERSION:
            raise CheckpointError(
                f"its version is {manifest['version']}; only {VERSION} is known: use the release that wrote it"
            )
        if not whole or not isinstance(manifest, dict):
            raise CheckpointError(f"its checksum is not that of its text, so it was changed; {_REMEDY}")
        if _string(manifest, "format") != FORMAT or _count(manifest, "version") != VERSION:
            raise CheckpointError(f"it is not of format {FORMAT!r}, version {VERSION}")
    return manifest


def _field(entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise CheckpointError(f"{str(entry)[:80]} has no {key!r}, so it is damaged; {_REMEDY}")
    return entry[key]


def _string(entry: Any, key: str) -> str:
    value = _field(entry, key)
    if not isinstance(value, str):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no text; {_REMEDY}")
    return value


def _count(entry: Any, key: str) -> int:
    value = _field(entry, key)
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no count; {_REMEDY}")
    return value


def _mapping(entry: Any, key: str, of: type = dict) -> Any:
    value = _field(entry, key)
    if not isinstance(value, of):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no {of.__name__}; {_REMEDY}")
    return value


def _parameter(name: str, entry: Any) -> Shard:
    numbers = {key: tuple(_mapping(entry, key, list)) for key in ("shape", "pieces")}
    dim = _field(entry, "dim")
    well = all(type(i) is int and 0 < i < 2**62 for i in (*numbers["shape"], *numbers["pieces"]))
    well &= dim is None or (type(dim) is int and 0 <= dim < len(numbers["shape"]))
    if not well or (dim is None) != (not numbers["pieces"]):
        raise CheckpointError(f"parameters: {name} is described as {str(entry)[:200]}, which is no cut of a tensor")
    return Shard(numbers["shape"], dim, numbers["pieces"])


def _said(shard: Shard) -> str:
    if shard.dim is None:
        return f"{list(shard.shape)}, not cut"
    return f"{list(shard.shape)}, cut along dimension {shard.dim} in pieces of {', '.join(map(str, shard.pieces))}"


def _tiling_fault(shard: Shard, fragments: Sequence[Stored]) -> str | None:
    """Why these fragments are not exactly one whole tensor; None: they are. Raises LayoutError."""
    layouts = {(at.tensor_size, at.padding) for at in fragments}
    size, padding = fragments[0].tensor_size, fragments[0].padding
    if len(layouts) > 1:
        return f"its fragments are of several layouts, of {sorted(layouts)} (tensor-parallel ranks, padding rows)"
    if size < 1 or (shard.dim is None and (size > 1 or padding)):
        return f"it cannot be split over {size} ranks with {padding} rows of padding"
    local_numel = math.prod(replace(shard, padding=padding).local_shape(size))
    by_rank: dict[int, list[Stored]] = {}
    for at in fragments:
        by_rank.setdefault(at.tensor_rank, []).append(at)
    if max(by_rank) >= size:
        return f"a fragment is of tensor rank {max(by_rank)}, but there are {size}"
    if len(by_rank) < size:
        missing = next(rank for rank in range(size) if rank not in by_rank)
        return f"nothing of tensor rank {missing} of {size} is there"
    for rank, parts in by_rank.items():
        position, of_rank = 0, f"of tensor rank {rank} of {size}" if size > 1 else "of it"
        for at in sorted(parts, key=lambda at: (at.start, at.numel)):
            if at.start > position:
                return f"elements [{position}, {at.start}) {of_rank} are missing"
            if at.start < position:
                return f"elements [{at.start}, {min(position, at.start + at.numel)}) {of_rank} are there twice"
            position += at.numel
        if position < local_numel:
            return f"elements [{position}, {local_numel}) {of_rank} are missing"
        if position > local_numel:
            return f"there are {position} elements {of_rank}, but {_said(shard)} makes {local_numel}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _header(tag: str, token: str, file: str, fragments: Sequence[Stored], header_bytes: int) -> bytes:
    """The beginning of a safetensors file, filled up with spaces to `header_bytes`. Raises CheckpointError."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "tag": tag, "save": token, "file": file}}
    for at in fragments:
        begin = at.offset - header_bytes
        key = f"{at.kind}:{at.name}"
        if key in entries:
            raise CheckpointError(f"{file} has two fragments of the {at.kind} of {at.name}; a file can hold one")
        entries[key] = {"dtype": "F32", "shape": [at.numel], "data_offsets": [begin, begin + at.num_bytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > header_bytes - 8:
        raise CheckpointError(f"the header of {file} has {len(text)} bytes, more than the {header_bytes - 8} for it")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _metadata_of(header: bytes) -> dict[str, Any]:
    """What the header says of where it belongs; empty where it cannot be read."""
    try:
        found = json.loads(header[8:])["__metadata__"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _entry_bytes(fragment: Fragment) -> int:
    """At least what a fragment takes of a header."""
    return len(json.dumps(f"{fragment.kind}:{fragment.name}")) + 120


def _anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that begins at a page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them; they only make the first touch quicker
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Writer:
    """One file of a checkpoint, streamed: tensors as they come, their checksums on the way, the header last.

    Past the page cache where the file system allows it: what is saved is seldom read soon, and what is waited for is
    the disk anyway. Durable once `close` has returned. Raises OSError.
    """

    def __init__(self, path: Path, *, tag: str, token: str, header_bytes: int):
        self.path, self._tag, self._token, self._header_bytes = path, tag, token, header_bytes
        self._free_header_bytes = header_bytes - 8 - _BARE_HEADER_BYTES - len(tag) - len(token)
        self._fragments: list[Stored] = []
        self._offset = header_bytes
        self._memory = _anonymous_memory(PIECE_BYTES)
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
            self._direct = False  # a file system that has no such thing, and may have made the file all the same
            self._file = os.open(path, flags & ~os.O_EXCL, 0o666)
        os.lseek(self._file, header_bytes, os.SEEK_SET)

    def fits(self, fragment: Fragment) -> bool:
        """Whether the header has room for one more."""
        return _entry_bytes(fragment) <= self._free_header_bytes

    def add(self, fragment: Fragment) -> None:
        tensor, numel, done, crc32 = fragment.tensor.detach(), fragment.tensor.numel(), 0, 0
        while done < numel:
            count = min(numel - done, len(self._piece) - self._filled)
            end = self._filled + count
            self._piece[self._filled : end].copy_(tensor[done : done + count])
            crc32 = zlib.crc32(self._bytes[self._filled * ITEM_BYTES : end * ITEM_BYTES], crc32)
            self._filled, done = end, done + count
            if end == len(self._piece):
                self._flush()
        place = (fragment.tensor_rank, fragment.tensor_size, fragment.shard.padding, fragment.start, numel)
        self._fragments.append(Stored(self.path.name, fragment.name, fragment.kind, *place, crc32, self._offset))
        self._offset += numel * ITEM_BYTES
        self._free_header_bytes -= _entry_bytes(fragment)

    def close(self) -> dict[str, Any]:
        """Write the rest, and wait until it is on the disk. Returns the manifest's entry of the file."""
        self._flush()
        self._leave_direct()
        header = _header(self._tag, self._token, self.path.name, self._fragments, self._header_bytes)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._write(memoryview(header))
        os.fsync(self._file)
        self.abandon()
        keys = ("name", "kind", "tensor_rank", "tensor_size", "padding", "start", "numel", "crc32")
        return {
            "bytes": self._offset,
            "header_crc32": zlib.crc32(header),
            "fragments": [{key: getattr(at, key) for key in keys} for at in self._fragments],
        }

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
            if self._direct and len(content) < BLOCK_BYTES:
                self._leave_direct()
            part = content[: len(content) // BLOCK_BYTES * BLOCK_BYTES] if self._direct else content
            try:
                written = os.write(self._file, part)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()  # larger blocks than ours, or a write that ended within one
                continue
            if not self._direct and hasattr(os, "posix_fadvise"):
                # begin to write it out now: the last fsync would find all of it still to do
                place = os.lseek(self._file, 0, os.SEEK_CUR) - written
                os.posix_fadvise(self._file, place, written, os.POSIX_FADV_DONTNEED)
            content = content[written:]

    def _leave_direct(self) -> None:
        if self._direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False


_BARE_HEADER_BYTES = len(_header("", "", "rank_0000000000.safetensors", (), 1 << 12).rstrip())


@dataclass
class _Part:
    """What one rank adds to the manifest."""

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
            raise CheckpointError(f"{name} is {self.parameters[name]} and {entry}; a name stands for one parameter")


def write_checkpoint(folder: str | Path, tag: str, fragments: Iterable[Fragment], metadata: Mapping[str, Any]) -> Path:
    """Save a checkpoint from a single process, and point `latest` at it. Returns its folder.

    Fragments are taken one by one and not kept. What fails leaves nothing behind, and an older checkpoint of this tag
    as it was. Raises CheckpointError, OSError.
    """
    save, token = Path(folder), uuid.uuid4().hex[:12]
    _check_tag(tag)
    text = _json(metadata)
    _make_folder(save)
    partial = _hidden(save, tag, "partial", token)
    part, writer, number = _Part({}, {}), None, 0
    try:
        os.mkdir(partial)
        for fragment in fragments:
            part.add_parameter(fragment)
            if writer is None or not writer.fits(fragment):
                if writer is not None:
                    part.files[writer.path.name] = writer.close()
                    number += 1
                header_bytes = max(STREAM_HEADER_BYTES, _header_bytes(tag, token, [fragment]))
                writer = Writer(partial / _file_name(number), tag=tag, token=token, header_bytes=header_bytes)
            writer.add(fragment)
        if writer is None:
            raise CheckpointError(f"{save / tag}: there is nothing to save in it")
        part.files[writer.path.name] = writer.close()
        _commit(save, tag, token, part, text)
    finally:
        if writer is not None:
            writer.abandon()
        shutil.rmtree(partial, ignore_errors=True)
    return save / tag


def _file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _hidden(save: Path, tag: str, state: str, token: str) -> Path:
    return save / f".{tag}.{state}-{token}"


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"{tag!r} is no name of a checkpoint, such as global_step100")


def _json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, allow_nan=False)


def _make_folder(save: Path) -> None:
    try:
        save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{save} cannot be made: {error.strerror}; give a folder that can be written") from error


def _header_bytes(tag: str, token: str, fragments: Sequence[Fragment]) -> int:
    """Enough for the header of these fragments."""
    needed = 8 + _BARE_HEADER_BYTES + len(tag) + len(token) + sum(map(_entry_bytes, fragments))
    return -(-needed // BLOCK_BYTES) * BLOCK_BYTES


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that puts layer 10 behind layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split("([0-9]+)", name)]


def _manifest_text(tag: str, token: str, part: _Part, metadata_text: str) -> bytes:
    def lines(mapping: Mapping[str, Any]) -> str:
        entries = [f"  {json.dumps(key)}: {json.dumps(mapping[key])}" for key in sorted(mapping, key=_natural)]
        return "{\n" + ",\n".join(entries) + "\n }"

    fields = {"format": json.dumps(FORMAT), "version": str(VERSION), "tag": json.dumps(tag), "token": json.dumps(token)}
    fields |= {"metadata": metadata_text, "parameters": lines(part.parameters), "files": lines(part.files)}
    body = "{\n" + ",\n".join(f' "{key}": {value}' for key, value in fields.items())
    seal = hashlib.sha256(f"{body}\n}}\n".encode()).hexdigest()
    return f'{body},\n "sha256": "{seal}"\n}}\n'.encode()


def _commit(save: Path, tag: str, token: str, part: _Part, metadata_text: str) -> None:
    """Give a folder whose files are whole its manifest and its name, and point `latest` at it.

    Whatever fails, and at whichever moment the process dies, `latest` names a whole checkpoint, or the one it named is
    found under its other name.
    """
    partial, final = _hidden(save, tag, "partial", token), save / tag
    replaced, latest = _hidden(save, tag, "replaced", token), _hidden(save, tag, "latest", token)
    try:
        _write_file(partial / MANIFEST, _manifest_text(tag, token, part, metadata_text))
        for path in partial.glob("rank_*.json"):
            os.unlink(path)
        Checkpoint(partial)  # complete, or it is not worth its name
        _sync_folder(partial)
        # before anything gets its name: a full disk is found here
        _write_file(latest, f"{tag}\n".encode())
        if os.path.lexists(final):
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
            _sync_folder(save)
            os.replace(latest, save / LATEST)
            _sync_folder(save)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(final, partial)
            with contextlib.suppress(OSError):
                os.rename(replaced, final)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(latest)
        raise
    if os.path.lexists(replaced):
        _remove(replaced, _hidden(save, tag, "deleted", token))


def _write_file(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        view = memoryview(content)
        while len(view):
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and keep the order in their own way
            os.fsync(folder)
    finally:
        os.close(folder)


def _remove(path: Path, hidden: Path) -> None:
    """Delete a checkpoint, so that half of one is never seen under its name. What cannot be deleted is only told."""
    try:
        if path != hidden:
            os.rename(path, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


@dataclass(frozen=True)
class Outcome:
    """How a save ended."""

    tag: str
    seconds: float
    """From the call of `save` to the end on this rank."""
    error: CheckpointError | None
    """None: the checkpoint is whole, durable and what `latest` names."""
    retried: str | None = None
    """Why this rank had to write its file a second time."""


class Saver:
    """Saves the checkpoints of a run; each of its processes has one. Ranks agree by files, so nothing is collective.

    A rank that has its file on disk leaves rank_00003.json, its part of the manifest, beside it. Rank 0 waits for all
    of them and gives the folder its name; the others wait for that. What goes wrong on one rank ends the save on all,
    with its message, and leaves the older checkpoints as they were.

    Rank 0 keeps SAVE/.lock locked while its process lives, so two runs never save into one folder, and what an earlier
    run left unfinished belongs to no living one: it is removed at the first save. (Where the file system knows no
    locks, it stays.)

    `keep_last` newest checkpoints by their number are kept (None: all), and those whose number is a multiple of
    `retain_interval`; never is the one just saved removed. `timeout_s` is how long nothing may happen in a save's
    folder before the ranks that are missing are given up. Raises CheckpointError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        world_size: int,
        asynchronous: bool,
        keep_last: int | None,
        retain_interval: int | None,
        timeout_s: float,
    ):
        self.folder = Path(folder)
        self._rank, self._world_size, self._asynchronous = rank, world_size, asynchronous
        self._keep_last, self._retain_interval, self._timeout_s = keep_last, retain_interval, timeout_s
        self._thread: threading.Thread | None = None
        self._outcomes: deque[Outcome] = deque()  # a thread appends, `finished` takes
        self._buffer = torch.empty(0)
        self._leftovers_are_dead = False
        self._failed: list[tuple[str, str]] = []  # tag and token of saves whose traces are still there
        self._lock: int | None = None
        if rank == 0:
            _make_folder(self.folder)
            self._lock = self._take_lock()

    def save(self, tag: str, token: str, fragments: Iterable[Fragment], metadata: Mapping[str, Any]) -> None:
        """Save what this rank owns. Every rank calls it, with the same tag and token, which no other save has had.

        Waits for the save before. If asynchronous, returns when the tensors have been copied, otherwise at the end.
        Does not raise what fails: `wait` does, and `finished` tells. The metadata of rank 0 is the one that is saved.
        """
        began_s = time.monotonic()
        self._join()
        _check_tag(tag)
        if not _TOKEN.fullmatch(token):
            raise CheckpointError(f"the token {token!r} of a save must be letters and digits")
        job = _Job(self, tag, token, began_s)
        try:
            text = _json(metadata)
            owned = list(fragments)
            if self._asynchronous:
                owned = self._copy(owned)
        except Exception as error:
            self._outcomes.append(job.fail(error))
            return
        if self._asynchronous:
            # not a daemon: a process that ends waits for its save
            self._thread = threading.Thread(target=self._carry_out, args=(job, owned, text), name=f"save {tag}")
            self._thread.start()
        else:
            self._carry_out(job, owned, text)

    def reserve(self, fragments: Iterable[Fragment]) -> None:
        """Get the host memory of an asynchronous save of these now, so that the first one is as quick as the next."""
        if self._asynchronous:
            self._join()
            self._reserve(list(fragments))

    def wait(self) -> None:
        """Return when no save is under way. Raises CheckpointError if one failed that was not told of yet."""
        self._join()
        failed = [outcome for outcome in self._outcomes if outcome.error]
        self._outcomes = deque(outcome for outcome in self._outcomes if not outcome.error)
        if failed:
            raise CheckpointError("; ".join(str(outcome.error) for outcome in failed))

    def finished(self) -> list[Outcome]:
        """The saves that ended since the last call, in their order. Returns at once."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self) -> None:
        """Wait for what is under way, and let another process save into the folder. Without it, our end does so."""
        self._join()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _reserve(self, fragments: Sequence[Fragment]) -> bool:
        """See that the host buffer holds these. Returns whether it is pinned, for copies from CUDA devices."""
        numel = sum(fragment.tensor.numel() for fragment in fragments)
        on_cuda = any(fragment.tensor.is_cuda for fragment in fragments)
        if numel > len(self._buffer):
            self._buffer = torch.empty(0)  # the old one goes before the new one comes
            if on_cuda:
                self._buffer = torch.empty(numel, pin_memory=True)
            else:
                self._buffer = torch.frombuffer(_anonymous_memory(numel * ITEM_BYTES), dtype=torch.float32)
                self._buffer.zero_()  # touch every page
        return on_cuda

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The same fragments in host memory that is kept from save to save."""
        on_cuda = self._reserve(fragments)
        copies, begin = [], 0
        for fragment in fragments:
            copy = self._buffer[begin : begin + fragment.tensor.numel()]
            copy.copy_(fragment.tensor.detach(), non_blocking=on_cuda)
            copies.append(replace(fragment, tensor=copy))
            begin += len(copy)
        if on_cuda:
            torch.cuda.synchronize()
        return copies

    def _carry_out(self, job: _Job, fragments: Sequence[Fragment], metadata_text: str) -> None:
        try:
            outcome = job.run(fragments, metadata_text)
        except Exception as error:  # of whatever kind: nobody else would hear of it
            outcome = job.fail(error)
        self._outcomes.append(outcome)

    def _take_lock(self) -> int:
        path = self.folder / ".lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be written to: {error.strerror}; give a folder that this run may write to"
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    "%s cannot be locked (%s): see to it that one run alone saves there", path, error.strerror
                )
                return file
            holder = os.read(file, 200).decode("utf-8", "replace").strip() or "unknown"
            os.close(file)
            raise CheckpointError(
                f"{self.folder} is in use by another run (process {holder}); give each run a folder of its own"
            ) from None
        self._leftovers_are_dead = True
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return file

    def _remove_leftovers(self, token: str) -> None:
        """What runs before this one left. An old checkpoint that was being replaced gets its name back."""
        if not self._leftovers_are_dead:
            return
        self._leftovers_are_dead = False
        for path in self.folder.iterdir():
            left = _LEFTOVER.fullmatch(path.name)
            if not left or left["token"] == token:
                continue
            if left["state"] == "replaced" and not os.path.lexists(self.folder / left["tag"]):
                os.rename(path, self.folder / left["tag"])
            elif path.is_dir() and not path.is_symlink():
                _remove(path, _hidden(self.folder, left["tag"], "deleted", left["token"]))
            else:
                os.unlink(path)

    def _remove_traces(self) -> None:
        """Of saves of this run that failed. Every rank has ended them when a later one is whole."""
        for tag, token in self._failed:
            shutil.rmtree(_hidden(self.folder, tag, "partial", token), ignore_errors=True)
            _hidden(self.folder, tag, "failed", token).unlink(missing_ok=True)
        self._failed.clear()

    def _prune(self, tag: str) -> None:
        if self._keep_last is None:
            return
        paths = [path for path in _candidates(self.folder) if not path.name.startswith(".") and not path.is_symlink()]
        numbered = [path for path in paths if _iteration(path.name) >= 0]
        for path in numbered[self._keep_last :]:
            retained = self._retain_interval and _iteration(path.name) % self._retain_interval == 0
            if path.name != tag and not retained:
                _remove(path, _hidden(self.folder, path.name, "deleted", uuid.uuid4().hex[:12]))


class _Job:
    """One save on one rank."""

    def __init__(self, saver: Saver, tag: str, token: str, began_s: float):
        self._saver, self._tag, self._token, self._began_s = saver, tag, token, began_s
        self._rank, self._world_size = saver._rank, saver._world_size
        self._partial = _hidden(saver.folder, tag, "partial", token)
        self._failure = _hidden(saver.folder, tag, "failed", token)
        self._retried: str | None = None

    def run(self, fragments: Sequence[Fragment], metadata_text: str) -> Outcome:
        saver = self._saver
        if self._rank == 0:
            saver._remove_leftovers(self._token)
        self._raise_failure()
        saver.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._partial)
        own_folder = os.stat(self._partial)
        part = self._write(fragments)
        part_path = self._partial / f"rank_{self._rank:05d}.json"
        _write_file(
            part_path.with_suffix(".tmp"), json.dumps({"parameters": part.parameters, "files": part.files}).encode()
        )
        os.rename(part_path.with_suffix(".tmp"), part_path)
        if self._rank == 0:
            self._await(self._all_parts, saver._timeout_s)
            for rank in range(1, self._world_size):
                part.merge(json.loads((self._partial / f"rank_{rank:05d}.json").read_text(encoding="utf-8")))
            _commit(saver.folder, self._tag, self._token, part, metadata_text)
            try:
                saver._remove_traces()
                saver._prune(self._tag)
            except OSError as error:  # the checkpoint is whole all the same
                logger.warning("%s: what is no longer needed could not be removed: %s", saver.folder, error)
        else:
            # rank 0 gives up first, and says why
            self._await(lambda: self._is_committed(own_folder), 2 * saver._timeout_s)
        return Outcome(self._tag, time.monotonic() - self._began_s, None, self._retried)

    def fail(self, error: Exception) -> Outcome:
        """Tell the other ranks, unless they have told us, and remove what was written."""
        saver = self._saver
        own = [self._partial / f"rank_{self._rank:05d}.{suffix}" for suffix in ("json", "tmp", "safetensors")]
        for path in own:  # first: where the disk is full, the message needs room
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(FileNotFoundError):  # ours may only follow from it: the folder has gone
            error = _FailedElsewhere(self._failure.read_text(encoding="utf-8"))
        if not isinstance(error, _FailedElsewhere):
            reason = (
                f"{error.filename or self._partial}: {error.strerror}" if isinstance(error, OSError) else str(error)
            )
            if not isinstance(error, OSError | CheckpointError):
                reason = f"{type(error).__name__}: {reason}"
            error = CheckpointError(f"saving {self._tag} failed on rank {self._rank}: {reason}")
            message = self._failure.with_name(f"{self._failure.name}.{self._rank}")
            try:
                _write_file(message, str(error).encode())
                os.rename(message, self._failure)
            except OSError:  # they will miss us in time
                message.unlink(missing_ok=True)
        if self._rank == 0:
            saver._failed.append((self._tag, self._token))
            shutil.rmtree(self._partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # others' files are in it, or it has gone
                os.rmdir(self._partial)
        assert isinstance(error, CheckpointError)
        return Outcome(self._tag, time.monotonic() - self._began_s, error, self._retried)

    def _write(self, fragments: Sequence[Fragment]) -> _Part:
        try:
            return self._write_once(fragments)
        except OSError as error:
            self._retried = f"{error.filename or self._partial}: {error.strerror}"
            logger.warning("%s of rank %d is written again: %s", self._tag, self._rank, self._retried)
            self._raise_failure()
            return self._write_once(fragments)

    def _write_once(self, fragments: Sequence[Fragment]) -> _Part:
        part = _Part({}, {})
        if not fragments:
            return part
        path = self._partial / _file_name(self._rank)
        path.unlink(missing_ok=True)
        header_bytes = _header_bytes(self._tag, self._token, fragments)
        writer = Writer(path, tag=self._tag, token=self._token, header_bytes=header_bytes)
        try:
            for fragment in fragments:
                part.add_parameter(fragment)
                writer.add(fragment)
            part.files[path.name] = writer.close()
        finally:
            writer.abandon()
        return part

    def _await(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        """Raises CheckpointError if another rank fails, or nothing has happened in the folder for `timeout_s`."""
        pause_s, changed_s, seen = 0.001, time.monotonic(), self._sizes()
        while not is_there():
            self._raise_failure()
            sizes = self._sizes()
            if sizes != seen:
                changed_s, seen = time.monotonic(), sizes
            elif time.monotonic() - changed_s > timeout_s:
                raise CheckpointError(f"nothing was heard of {self._missing()} for {timeout_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(0.1, 1.3 * pause_s)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _all_parts(self) -> bool:
        return not self._missing_ranks()

    def _missing_ranks(self) -> list[int]:
        there = self._sizes()
        return [rank for rank in range(self._world_size) if f"rank_{rank:05d}.json" not in there]

    def _missing(self) -> str:
        ranks = self._missing_ranks() if self._partial.exists() else []
        ranks = ranks or [0]  # which has all it needs, and yet has not ended the save
        shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

    def _is_committed(self, own_folder: os.stat_result) -> bool:
        """Whether the very folder we wrote into has got its name, and `latest` names it."""
        try:
            committed = os.path.samestat(os.stat(self._saver.folder / self._tag), own_folder)
            return committed and (self._saver.folder / LATEST).read_text(encoding="utf-8").strip() == self._tag
        except (OSError, ValueError):
            return False

    def _raise_failure(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            raise _FailedElsewhere(self._failure.read_text(encoding="utf-8"))


class _FailedElsewhere(CheckpointError):
    """Another rank could not do its part; the message is its own."""
