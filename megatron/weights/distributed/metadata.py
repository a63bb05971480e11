"""The `.metadata` of a torch.distributed.checkpoint: which tensors there are, and in which files their chunks lie.

It is a pickle, read as data (inert_pickle.py), and checked: each chunk lies within its tensor and its file, and the
chunks of a tensor cover it exactly, without a gap or an overlap.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.2 to 2.13
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.folders import CheckpointError, open_file
from megatron.weights.distributed.inert_pickle import Name, PickleFault, Record, read_pickle
from megatron.weights.folder_files import own_file, real_path

METADATA = ".metadata"
REMEDY = "copy the folder again from its source"
DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_CHECKPOINT = "torch.distributed.checkpoint"
_PLANS = "all_local_plans"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = (
    *(f"{_CHECKPOINT}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_CHECKPOINT}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_CHECKPOINT}.metadata.{name}" for name in ("ChunkStorageMetadata", "TensorProperties")),
    *(f"{_CHECKPOINT}.metadata.{name}" for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")),
    *(f"{_CHECKPOINT}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"{_OLD}.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    # the plans of all ranks, which megatron-core keeps for its next save
    *(f"{_CHECKPOINT}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
    *(f"{_CHECKPOINT}.planner.{name}" for name in ("TensorWriteData", "BytesIOWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    # Python 3.11 writes the value of an enumeration as a call of it
    "builtins.getattr",
)


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a file: what torch.save wrote of a chunk, or of an object."""

    path: Path
    begin: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in one stretch of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: StoredBytes

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of a distributed checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    """They cover it exactly."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """The contents of a folder, by the names in it."""

    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, StoredBytes]
    """Python's objects, each as torch.save wrote it."""
    extra: Mapping[str, Any]
    """Further fields of the metadata, as plain values: `planner_data`, megatron-core's `mcore_data`."""


def read_metadata(folder: Path) -> Contents:
    """Return what the folder holds. Raises CheckpointError, which names the file and the damage."""
    path = folder / METADATA
    with open_file(real_path(path)) as descriptor:
        content = bytearray()
        while piece := os.read(descriptor, 1 << 24):
            content += piece
    # what cannot be interpreted is damage of this file; what does not fit the others, of theirs
    try:
        record = read_pickle(bytes(content), {*_CLASSES, *DTYPES})
        if not isinstance(record, Record) or record.name != f"{_CHECKPOINT}.metadata.Metadata":
            raise PickleFault("it is not the metadata of a torch.distributed.checkpoint")
        return _contents(folder, record)
    except PickleFault as error:
        raise CheckpointError(f"{path} is refused: {error}; {REMEDY}") from None


def _contents(folder: Path, record: Record) -> Contents:
    held, places = record["state_dict_metadata"], record["storage_data"]
    if not isinstance(held, dict) or not isinstance(places, dict):
        raise PickleFault("its tensors or their files are not given by name")
    files = _Files(folder)
    # by value: the records of two equal indices are two objects
    at = {_key(index): info for index, info in places.items()}
    tensors, objects = {}, {}
    for name, entry in held.items():
        if not isinstance(name, str) or not isinstance(entry, Record):
            raise PickleFault(f"its entry {str(name)[:100]!r} is of no known kind")
        if entry.name.endswith(".BytesStorageMetadata"):
            objects[name] = files.stored(name, at.get((name, None)))
        elif entry.name.endswith(".TensorStorageMetadata"):
            tensors[name] = _tensor(name, entry, at, files)
        else:
            raise PickleFault(f"its entry {name!r} is a {entry.name}")
    fields = record.state if isinstance(record.state, dict) else {}
    known = ("state_dict_metadata", "storage_data", "storage_meta", "version", _PLANS)
    return Contents(tensors, objects, {key: _plain(value) for key, value in fields.items() if key not in known})


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name and the offsets of a MetadataIndex, whose other field is a hint."""
    if not isinstance(index, Record):
        raise PickleFault("its files are not given by the index of a tensor")
    offset = index.get("offset")
    return str(index["fqn"]), None if offset is None else _sizes(offset)


class _Files:
    """Files of the folder, each looked for once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[Path, int]] = {}

    def stored(self, name: str, info: Any) -> StoredBytes:
        """Return the bytes of a tensor's chunk or an object. Raises CheckpointError where they are not there."""
        if not isinstance(info, Record):
            raise PickleFault(f"it names no file for {name!r}")
        if info.get("transform_descriptors"):
            raise PickleFault(
                f"{name!r} is transformed by {info.get('transform_descriptors')}, which is not read; save the "
                "checkpoint again without"
            )
        file, begin, length = info["relative_path"], info["offset"], info["length"]
        if not isinstance(file, str) or not isinstance(begin, int) or not isinstance(length, int):
            raise PickleFault(f"its place of {name!r} is not a file, an offset and a length")
        # a name from the file may lead anywhere: only plain ones are followed
        if file not in self._found:
            path = own_file(self._folder, file)
            self._found[file] = path, real_path(path).stat().st_size
        path, size = self._found[file]
        # sizes are compared when the folder is opened, so that a truncated file is named before anything is read
        if begin < 0 or length < 0 or begin + length > size:
            raise CheckpointError(
                f"{path} has {size} bytes, but {METADATA} has {name} at [{begin}, {begin + length}): it is truncated, "
                f"or of another checkpoint; {REMEDY}"
            )
        return StoredBytes(path, begin, length)


def _tensor(name: str, entry: Record, at: Mapping[Any, Any], files: _Files) -> ChunkedTensor:
    shape, dtype = _sizes(entry["size"]), _dtype(entry["properties"])
    if dtype is None:
        raise PickleFault(f"its tensor {name!r} has no known dtype")
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        is_inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= length for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not is_inside:
            raise PickleFault(f"a chunk of {name!r} at {offsets} of {sizes} is outside of the tensor's {shape}")
        # ranks that hold nothing of a tensor write empty chunks, some of them nowhere
        if math.prod(sizes):
            chunks.append(Chunk(offsets, sizes, files.stored(f"{name} at {offsets}", at.get((name, offsets)))))
    _check_cover(name, shape, chunks)
    return ChunkedTensor(name, shape, dtype, tuple(chunks))


def _check_cover(name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise PickleFault unless the chunks cover the tensor, each element once."""
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    # of two numbers for one element, neither would be known to be the right one
    if pair := next(_overlaps(chunks), None):
        raise PickleFault(f"the chunks of {name!r} at {pair[0].offsets} and at {pair[1].offsets} overlap")
    # without overlaps, inside of the tensor, as many elements as it has are all of them
    if covered != math.prod(shape):
        raise PickleFault(f"the chunks of {name!r} have {covered} of its {math.prod(shape)} elements")


def _overlaps(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield pairs of chunks that have elements in common."""
    if len(chunks) < 2:
        return
    # along the dimension that is cut most, few chunks lie side by side
    dim = max(range(len(chunks[0].offsets)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=-1)
    if dim < 0:  # a single number, twice
        yield chunks[0], chunks[1]
        return
    # in their order, each is compared with those that have not ended
    open_chunks: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        open_chunks = [other for other in open_chunks if other.ends[dim] > chunk.offsets[dim]]
        for other in open_chunks:
            bounds = zip(chunk.offsets, chunk.ends, other.offsets, other.ends, strict=True)
            if all(first < other_end and other_first < end for first, end, other_first, other_end in bounds):
                yield other, chunk
        open_chunks.append(chunk)


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a torch.Size, or the tuple that stands for one."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    is_plain = isinstance(value, tuple | list) and all(isinstance(size, int) and size >= 0 for size in value)
    if not is_plain:
        raise PickleFault(f"its {str(value)[:100]!r} is not a size")
    return tuple(value)


def _dtype(properties: Any) -> torch.dtype | None:
    # a tuple of dtype, layout and more, or the fields by name
    state = properties.state if isinstance(properties, Record) else None
    value = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    return DTYPES.get(value) if isinstance(value, Name) else None


def _plain(value: Any) -> Any:
    """Return the value with plain lists, dicts and tuples; a record of anything else is None."""
    if isinstance(value, Record):
        if value.name == "torch.Size":
            return _sizes(value)
        return _plain(value.state) if value.name == "collections.OrderedDict" else None
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value
