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
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.context import LayoutError
from megatron.parallel.shards import Shard

FORMAT = "megatron-3d"
VERSION = 1
MANIFEST = "checkpoint.json"
LATEST = "latest"

ITEM_BYTES = 4
PIECE_BYTES = 8 << 20
"""Copied, summed and written at a time: large for the disk, small enough to stay in a cache meanwhile."""

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
RANK_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")
_KIND = re.compile(r"[a-z0-9_]+")
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64
LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<state>partial|failed|replaced|deleted|latest)-(?P<token>[A-Za-z0-9]+)(\.[0-9]+)?"
)
"""What a save under way, or one that was killed, has beside the checkpoints; see `hidden_path`."""

REMEDY = "copy it anew from where the checkpoint was saved, or load another checkpoint"


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
class StoredFragment:
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


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def hidden_path(save: Path, tag: str, state: str, token: str) -> Path:
    return save / f".{tag}.{state}-{token}"


def check_tag(tag: str) -> None:
    if not TAG.fullmatch(tag):
        raise CheckpointError(f"{tag!r} is no name of a checkpoint, such as global_step100")


def safetensors_header(
    tag: str, token: str, file: str, fragments: Sequence[StoredFragment], header_bytes: int
) -> bytes:
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


def header_metadata(header: bytes) -> dict[str, Any]:
    """What the header says of where it belongs; empty where it cannot be read."""
    try:
        found = json.loads(header[8:])["__metadata__"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def iteration_of(tag: str) -> int:
    """The number that a tag ends with; -1: none."""
    number = re.search(r"[0-9]+$", tag)
    return int(number[0]) if number else -1


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file, never through a link. Raises CheckpointError."""
    try:
        # a pipe in its place must not keep us waiting
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; {REMEDY}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, which is never followed; put the file itself there") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no regular file; {REMEDY}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Say of every fault found inside in which file it is."""
    try:
        yield
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there; give the folder of a checkpoint")
    with open_file(path) as descriptor, as_damage(path):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            text = file.read()
        seal = _SEAL.fullmatch(text[-_SEAL_BYTES:])
        body = text[:-_SEAL_BYTES] + b"\n}\n"
        whole = seal and hashlib.sha256(body).hexdigest().encode() == seal[1]
        try:
            manifest = json.loads(body if whole else text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is no JSON ({error}), so it is damaged; {REMEDY}") from None
        # of another kind or version rather than damaged: another seal, perhaps
        if isinstance(manifest, dict) and isinstance(manifest.get("format"), str) and manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format'][:80]!r}; only {FORMAT!r} is read")
        if isinstance(manifest, dict) and type(manifest.get("version")) is int and manifest["version"] != VERSION:
            raise CheckpointError(
                f"its version is {manifest['version']}; only {VERSION} is known: use the release that wrote it"
            )
        if not whole or not isinstance(manifest, dict):
            raise CheckpointError(f"its checksum is not that of its text, so it was changed; {REMEDY}")
        if string_field(manifest, "format") != FORMAT or count_field(manifest, "version") != VERSION:
            raise CheckpointError(f"it is not of format {FORMAT!r}, version {VERSION}")
    return manifest


def _field(entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise CheckpointError(f"{str(entry)[:80]} has no {key!r}, so it is damaged; {REMEDY}")
    return entry[key]


def string_field(entry: Any, key: str) -> str:
    value = _field(entry, key)
    if not isinstance(value, str):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no text; {REMEDY}")
    return value


def count_field(entry: Any, key: str) -> int:
    value = _field(entry, key)
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no count; {REMEDY}")
    return value


def mapping_field(entry: Any, key: str, of: type = dict) -> Any:
    value = _field(entry, key)
    if not isinstance(value, of):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no {of.__name__}; {REMEDY}")
    return value


def parameter_shard(name: str, entry: Any) -> Shard:
    numbers = {key: tuple(mapping_field(entry, key, list)) for key in ("shape", "pieces")}
    dim = _field(entry, "dim")
    well = all(type(i) is int and 0 < i < 2**62 for i in (*numbers["shape"], *numbers["pieces"]))
    well &= dim is None or (type(dim) is int and 0 <= dim < len(numbers["shape"]))
    if not well or (dim is None) != (not numbers["pieces"]):
        raise CheckpointError(f"parameters: {name} is described as {str(entry)[:200]}, which is no cut of a tensor")
    return Shard(numbers["shape"], dim, numbers["pieces"])


def described(shard: Shard) -> str:
    if shard.dim is None:
        return f"{list(shard.shape)}, not cut"
    return f"{list(shard.shape)}, cut along dimension {shard.dim} in pieces of {', '.join(map(str, shard.pieces))}"


def tiling_fault(shard: Shard, fragments: Sequence[StoredFragment]) -> str | None:
    """Why these fragments are not exactly one whole tensor; None: they are. Raises LayoutError."""
    layouts = {(at.tensor_size, at.padding) for at in fragments}
    size, padding = fragments[0].tensor_size, fragments[0].padding
    if len(layouts) > 1:
        return f"its fragments are of several layouts, of {sorted(layouts)} (tensor-parallel ranks, padding rows)"
    if size < 1 or (shard.dim is None and (size > 1 or padding)):
        return f"it cannot be split over {size} ranks with {padding} rows of padding"
    local_numel = math.prod(replace(shard, padding=padding).local_shape(size))
    by_rank: dict[int, list[StoredFragment]] = {}
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
            return f"there are {position} elements {of_rank}, but {described(shard)} makes {local_numel}"
    return None
