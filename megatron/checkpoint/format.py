"""The checkpoint format: names in a folder, fragments, file headers and the manifest. Nothing is pickled or executed.

    SAVE/latest                                      the tag of the newest whole checkpoint, such as global_step100;
                                                     the second line is the JSON of its run (folders.py)
    SAVE/global_step100/checkpoint.json              the manifest: metadata, parameters, files and their checksums
    SAVE/global_step100/rank_00000.safetensors, ...  one for each rank that owns something
    SAVE/.global_step100.partial-TOKEN/              a save in progress; renamed when it is complete
    SAVE/.global_step100.failed-TOKEN                the reason of a failed save, for the other ranks
    SAVE/.global_step100.replaced-TOKEN/             the previous checkpoint of this tag while it is overwritten
    SAVE/.global_step100.deleted-TOKEN/              being removed
    SAVE/.lock                                       locked by the run that saves here

A file holds flat float32 tensors, under the key KIND:NAME. Each is the stretch [start, start + numel) of a parameter's
flattened local tensor, as rank `tensor_rank` of `tensor_size` tensor-parallel ranks holds it, padding included. Readers
of any layout find what they need with `slices.regions`. No name inside a checkpoint leads out of its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import MANIFEST, REMEDY, TAG, open_file

# `as`: exported again for those that use the format, as strict mypy wants it marked
from megatron.checkpoint.folders import CheckpointError as CheckpointError
from megatron.checkpoint.folders import SaveError as SaveError
from megatron.parallel.layout import LayoutError
from megatron.parallel.shards import Shard
from megatron.runtime.files import natural_order, parse_json

FORMAT = "megatron-3d"
VERSION = 2
"""1 named parameters by the index of their pipeline layer (`2.attention.qkv.weight`)."""
LATEST = "latest"

ITEM_BYTES = 4
PIECE_BYTES = 8 << 20
"""Bytes copied, summed and written at a time: large for the disk, small enough to stay in a cache meanwhile."""

_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")
_KIND = re.compile(r"[a-z0-9_]+")
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64
_SAVE_AGAIN = "save the checkpoint again, or load another"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def hidden_path(save: Path, tag: str, state: str, token: str) -> Path:
    return save / f".{tag}.{state}-{token}"


def check_tag(tag: str) -> None:
    if not TAG.fullmatch(tag):
        raise CheckpointError(f"{tag!r} is not the name of a checkpoint, such as global_step100")


@dataclass(frozen=True, eq=False)
class Fragment:
    """Stretch of a parameter's flattened local tensor, to be saved. Raises CheckpointError if it cannot exist."""

    name: str
    """The parameter's full name, the same on every layout."""
    kind: str
    """`weight` (float32), its moving average `ema`, or a moment of the optimizer: `exp_avg`, `exp_avg_sq`, ..."""
    shard: Shard
    tensor_rank: int
    tensor_size: int
    start: int
    """First element, in the local tensor of `tensor_rank` of `tensor_size`."""
    tensor: Tensor
    """float32 [numel], on any device."""
    dtype: str = "float32"
    """Type that the run computes with, such as bfloat16; the fragment itself is float32."""

    def __post_init__(self) -> None:
        what = f"{self.kind} of {self.name}"
        if self.tensor.dtype != torch.float32 or self.tensor.dim() != 1:
            raise CheckpointError(
                f"{what} is {self.tensor.dtype} {tuple(self.tensor.shape)}; a fragment must be float32 and flat"
            )
        if not _KIND.fullmatch(self.kind):
            raise CheckpointError(f"{what}: a kind consists of lower-case letters, digits and underscores")
        # so that a tensor which every rank holds is described alike, whatever layout saved it
        if self.shard.dim is None and self.tensor_size != 1:
            raise CheckpointError(f"{what} is not sharded; it must be saved once, as tensor rank 0 of 1")
        if not 0 <= self.tensor_rank < self.tensor_size:
            raise CheckpointError(f"{what}: tensor rank {self.tensor_rank} is outside the {self.tensor_size} ranks")
        local_numel, stop = math.prod(self.shard.local_shape(self.tensor_size)), self.start + self.tensor.numel()
        if self.start < 0 or stop > local_numel:
            raise CheckpointError(f"{what}: [{self.start}, {stop}) is outside its {local_numel} local elements")


@dataclass(frozen=True, slots=True)
class StoredFragment:
    """Fragment in a file."""

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
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES


def safetensors_header(
    tag: str, token: str, file: str, fragments: Sequence[StoredFragment], header_bytes: int
) -> bytes:
    """Header of a safetensors file, padded with spaces to `header_bytes`. Raises CheckpointError if it does not fit."""
    # the save and the file's own name: a file from another checkpoint is found without its checksums
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "tag": tag, "save": token, "file": file}}
    for at in fragments:
        # safetensors counts from the end of its header, the manifest from the beginning of the file
        begin = at.offset - header_bytes
        key = f"{at.kind}:{at.name}"
        if key in entries:
            raise CheckpointError(f"{file} has two fragments of the {at.kind} of {at.name}; a file can hold one")
        entries[key] = {"dtype": "F32", "shape": [at.numel], "data_offsets": [begin, begin + at.num_bytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > header_bytes - 8:
        raise CheckpointError(f"the header of {file} has {len(text)} bytes, more than the {header_bytes - 8} for it")
    # safetensors: the length of the header in 8 bytes, then its JSON, which spaces may follow
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def header_metadata(header: bytes) -> dict[str, Any]:
    """Metadata in a header; empty where it cannot be read."""
    try:
        metadata = parse_json(header[8:])["__metadata__"]
    except (ValueError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


@dataclass(frozen=True)
class RankFile:
    """One file of a checkpoint."""

    num_bytes: int
    header_crc32: int
    fragments: tuple[StoredFragment, ...]
    """In the order of their bytes."""


@dataclass(frozen=True)
class Manifest:
    """Validated content of checkpoint.json: together the fragments make up every tensor exactly once."""

    tag: str
    token: str
    metadata: dict[str, Any]
    parameters: dict[str, Shard]
    """Full tensors: no padding, no initialisation."""
    dtypes: dict[str, str]
    """Type that the run computed each parameter with."""
    files: dict[str, RankFile]
    tensors: dict[tuple[str, str], list[StoredFragment]]
    """By name and kind."""


def manifest_text(
    tag: str, token: str, metadata_text: str, parameters: Mapping[str, Any], files: Mapping[str, Any]
) -> bytes:
    """JSON of a manifest, one line a parameter and a file, sealed by its own SHA-256."""

    def lines(mapping: Mapping[str, Any]) -> str:
        entries = [f"  {json.dumps(key)}: {json.dumps(mapping[key])}" for key in sorted(mapping, key=natural_order)]
        return "{\n" + ",\n".join(entries) + "\n }"

    fields = {"format": json.dumps(FORMAT), "version": str(VERSION), "tag": json.dumps(tag), "token": json.dumps(token)}
    # metadata before the long sections, on one line: folders.read_metadata parses nothing else
    fields |= {"metadata": metadata_text, "parameters": lines(parameters), "files": lines(files)}
    body = "{\n" + ",\n".join(f' "{key}": {value}' for key, value in fields.items())
    # of the text as it ends without the seal; a reader cuts the seal off and sums the same bytes
    seal = hashlib.sha256(f"{body}\n}}\n".encode()).hexdigest()
    return f'{body},\n "sha256": "{seal}"\n}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a checkpoint's folder. Raises CheckpointError."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there; give the folder of a checkpoint")
    with open_file(path) as descriptor, as_damage(path):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = _parsed(file.read())
        parameters, dtypes = {}, {}
        for name, entry in _typed(content, "parameters", dict).items():
            parameters[name] = _shard_of_entry(name, entry)
            dtypes[name] = _typed(entry, "dtype", str)
        files = {name: _rank_file(name, entry, parameters) for name, entry in _typed(content, "files", dict).items()}
        tensors: dict[tuple[str, str], list[StoredFragment]] = {}
        for at in itertools.chain.from_iterable(file.fragments for file in files.values()):
            tensors.setdefault((at.name, at.kind), []).append(at)
        _check_completeness(parameters, tensors)
        return Manifest(
            tag=_typed(content, "tag", str),
            token=_typed(content, "token", str),
            metadata=_typed(content, "metadata", dict),
            parameters=parameters,
            dtypes=dtypes,
            files=files,
            tensors=tensors,
        )


def _parsed(text: bytes) -> dict[str, Any]:
    seal = _SEAL.fullmatch(text[-_SEAL_BYTES:])
    body = text[:-_SEAL_BYTES] + b"\n}\n"
    whole = seal and hashlib.sha256(body).hexdigest().encode() == seal[1]
    try:
        content = parse_json(body if whole else text)
    except ValueError as error:
        raise CheckpointError(f"it is not JSON ({error}), so it is damaged; {REMEDY}") from None
    # another format or version may have another seal: report that first, not damage
    if isinstance(content, dict) and isinstance(content.get("format"), str) and content["format"] != FORMAT:
        raise CheckpointError(f"its format is {content['format'][:80]!r}; only {FORMAT!r} is read")
    if isinstance(content, dict) and type(content.get("version")) is int and content["version"] != VERSION:
        remedy = "use the release that wrote it"
        if content["version"] < VERSION:
            remedy += ", or convert it there with tools/ds_to_universal.py and load that with --universal-checkpoint"
        raise CheckpointError(f"its version is {content['version']}; only {VERSION} is read: {remedy}")
    if not whole or not isinstance(content, dict):
        raise CheckpointError(f"its checksum is not that of its text, so it was changed; {REMEDY}")
    if _typed(content, "format", str) != FORMAT or _count(content, "version") != VERSION:
        raise CheckpointError(f"it is not of format {FORMAT!r}, version {VERSION}")
    return content


def _typed(entry: Any, key: str, kind: type) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise CheckpointError(f"{str(entry)[:80]} has no {key!r}, so it is damaged; {REMEDY}")
    if not isinstance(entry[key], kind):
        raise CheckpointError(f"{key} is {str(entry[key])[:80]}, not a {kind.__name__}; {REMEDY}")
    return entry[key]


def _count(entry: Any, key: str) -> int:
    value = _typed(entry, key, object)
    # not isinstance, for which True is an integer
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{key} is {str(value)[:80]}, not a count; {REMEDY}")
    return value


def _shard_of_entry(name: str, entry: Any) -> Shard:
    shape, pieces = tuple(_typed(entry, "shape", list)), tuple(_typed(entry, "pieces", list))
    dim = _typed(entry, "dim", object)
    is_valid = all(type(length) is int and 0 < length < 2**62 for length in (*shape, *pieces))
    if dim is None:
        is_valid &= not pieces
    else:
        is_valid &= type(dim) is int and 0 <= dim < len(shape) and bool(pieces)
    if not is_valid:
        raise CheckpointError(f"parameters: {name} is {str(entry)[:200]}, which does not describe a shard; {REMEDY}")
    return Shard(shape, dim, pieces)


def _rank_file(file: str, entry: Any, parameters: Mapping[str, Shard]) -> RankFile:
    # the tensors of a file fill it from its end, in the order of the manifest
    if not _FILE.fullmatch(file):
        raise CheckpointError(f"files: {file!r} is not the name of a rank's file, such as rank_00000.safetensors")
    listed = _typed(entry, "fragments", list)
    num_bytes, sizes = _count(entry, "bytes"), [_count(fragment, "numel") * ITEM_BYTES for fragment in listed]
    offset = num_bytes - sum(sizes)
    # the tensors are mapped as float32, so they lie at multiples of it
    if offset < 8 or offset % ITEM_BYTES:
        raise CheckpointError(f"files: {file} has {num_bytes} bytes, but its fragments have {sum(sizes)}")
    fragments = []
    for fragment, size in zip(listed, sizes, strict=True):
        name = _typed(fragment, "name", str)
        if name not in parameters:
            raise CheckpointError(f"files: {file} has a fragment of {name!r}, which is not a parameter")
        keys = ("tensor_rank", "tensor_size", "padding", "start", "numel", "crc32")
        numbers = {key: _count(fragment, key) for key in keys}
        fragments.append(StoredFragment(file, name, _typed(fragment, "kind", str), **numbers, offset=offset))
        offset += size
    return RankFile(num_bytes, _count(entry, "header_crc32"), tuple(fragments))


def _check_completeness(
    parameters: Mapping[str, Shard], tensors: Mapping[tuple[str, str], Sequence[StoredFragment]]
) -> None:
    # a save without the optimizer (no_save_optim) lacks moments; nothing lacks weights
    for name in parameters:
        if (name, "weight") not in tensors:
            raise CheckpointError(f"there is no weight of {name}; {_SAVE_AGAIN}")
    for (name, kind), fragments in tensors.items():
        try:
            problem = _tiling_fault(parameters[name], fragments)
        except LayoutError as error:
            problem = str(error)
        if problem:
            raise CheckpointError(f"{kind} of {name}: {problem}; {_SAVE_AGAIN}")


def _tiling_fault(shard: Shard, fragments: Sequence[StoredFragment]) -> str | None:
    """Reason why these fragments are not exactly one whole tensor; None: they are. Raises LayoutError."""
    layouts = {(at.tensor_size, at.padding) for at in fragments}
    size, padding = fragments[0].tensor_size, fragments[0].padding
    if len(layouts) > 1:
        return f"its fragments are of several layouts, of {sorted(layouts)} (tensor-parallel ranks, padding rows)"
    if size < 1 or (shard.dim is None and (size, padding) != (1, 0)):
        return f"it cannot be split over {size} ranks with {padding} rows of padding"
    local_numel = math.prod(replace(shard, padding=padding).local_shape(size))
    by_rank: dict[int, list[StoredFragment]] = {}
    for at in fragments:
        by_rank.setdefault(at.tensor_rank, []).append(at)  # ZeRO cuts a rank's tensor into stretches
    # before the ranks that lack: the difference of sets would not see one too many
    if max(by_rank) >= size:
        return f"a fragment is of tensor rank {max(by_rank)}, but there are {size}"
    missing = set(range(size)) - by_rank.keys()
    if missing:
        return f"nothing of tensor rank {min(missing)} of {size} is there"
    for rank, parts in by_rank.items():
        of_rank = f"of tensor rank {rank} of {size}" if size > 1 else "of it"
        fault = _stretch_fault(shard, parts, local_numel, of_rank)
        if fault is not None:
            return fault
    return None


def _stretch_fault(shard: Shard, fragments: Sequence[StoredFragment], local_numel: int, of_rank: str) -> str | None:
    """Reason why these fragments are not exactly one local tensor."""
    # the end of what the fragments cover so far, without a gap or an overlap
    # by size too: an empty fragment comes before the one that begins at its place, or would look like an overlap
    position = 0
    for at in sorted(fragments, key=lambda at: (at.start, at.numel)):
        if at.start > position:
            return f"elements [{position}, {at.start}) {of_rank} are missing"
        if at.start < position:
            return f"elements [{at.start}, {min(position, at.start + at.numel)}) {of_rank} are there twice"
        position += at.numel
    if position < local_numel:
        return f"elements [{position}, {local_numel}) {of_rank} are missing"
    if position > local_numel:
        return f"there are {position} elements {of_rank}, but {described(shard)} has {local_numel}"
    return None


def described(shard: Shard) -> str:
    if shard.dim is None:
        return f"{list(shard.shape)}, not sharded"
    return f"{list(shard.shape)}, sharded along dimension {shard.dim} in pieces of {', '.join(map(str, shard.pieces))}"


@contextlib.contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Put the file's name before the message of every error raised inside."""
    try:
        yield
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        # with its cause, from which the loader sees that a network may be back soon and nothing is damaged
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
