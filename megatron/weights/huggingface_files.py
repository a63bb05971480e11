"""Files of tensors as Hugging Face lays them out: safetensors with or without an index, and old pytorch_model.bin.

What is read is not trusted: no pickle is executed, no name leads out of the folder, and every tensor is where the index
says. Tensors are read and written some rows at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.foreign import foreign_format
from megatron.checkpoint.format import CheckpointError
from megatron.runtime.files import write_durably
from megatron.weights.folder_files import Precision, json_object, own_file, read_json
from megatron.weights.foreign_files import ForeignFiles

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By safetensors' names."""
SHOWN_NAMES = 5


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read by rows."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]
    """(first, end) -> those rows."""
    begin: int | None = None
    """Offset of its first byte in a safetensors file."""
    window: Callable[[int, int, tuple[int, int]], Tensor] | None = None
    """(first, end, columns) -> those columns of those rows, where that costs less than the rows."""

    def matrix(self, first: int, end: int, columns: tuple[int, int]) -> Tensor:
        """Return those columns of those rows, seen as a matrix."""
        if self.window is not None:
            return self.window(first, end, columns)
        return self.rows(first, end).view(end - first, -1)[:, columns[0] : columns[1]]

    @property
    def num_rows(self) -> int:
        """Rows that `rows` can read; a single number is one."""
        return self.shape[0] if self.shape else 1


def open_safetensors(path: Path, files: ForeignFiles) -> dict[str, StoredTensor]:
    """Return every tensor of the file by name. Raises CheckpointError for a damaged file, and integers in it."""
    text, data_start = files.safetensors_header(path)
    header = json_object(text, path)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype = STORED_DTYPES.get(entry["dtype"])
        if entry["dtype"] == "F64":
            raise CheckpointError(f"{path} holds {name} as F64, which is not read; save it again as float32")
        if dtype is None:
            raise CheckpointError(
                f"{path} holds {name} as {entry['dtype']}; only {', '.join(STORED_DTYPES)} are weights that can be "
                "converted: give an unquantized model"
            )
        shape = tuple(entry["shape"])
        begin = data_start + entry["data_offsets"][0]
        tensors[name] = StoredTensor(path, shape, dtype, partial(_read_rows, path, name, begin, shape, dtype), begin)
    return tensors


def _read_rows(
    path: Path, name: str, begin: int, shape: tuple[int, ...], dtype: torch.dtype, first: int, end: int
) -> Tensor:
    # read, not mapped: pages of a mapping would count as this process's memory until something else needs them
    rows = torch.empty((end - first, *shape[1:]), dtype=dtype)
    target = bytes_of(rows)
    # len(target) // rows: the bytes of a row
    position = begin + first * (len(target) // max(1, end - first))
    with path.open("rb", buffering=0) as file:
        file.seek(position)
        while target:
            count = file.readinto(target)
            if not count:
                raise CheckpointError(f"{path} ends within {name}; it is truncated, copy it again")
            target = target[count:]
    return rows


def bytes_of(rows: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat: Any = rows.flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def stretch_of(tensor: StoredTensor, index: int, first: int, length: int) -> StoredTensor:
    """Return [length, columns]: rows from `first` on of one matrix of a tensor [matrices, rows, columns]."""
    _, rows, columns = tensor.shape
    shape = (length, columns)
    if tensor.begin is None:  # in memory, or mapped there

        def of_memory(begin: int, end: int) -> Tensor:
            return tensor.rows(index, index + 1)[0, first + begin : first + end]

        return StoredTensor(tensor.file, shape, tensor.dtype, of_memory)
    offset = tensor.begin + (index * rows + first) * columns * tensor.dtype.itemsize
    read = partial(_read_rows, tensor.file, "a matrix of experts", offset, shape, tensor.dtype)
    return StoredTensor(tensor.file, shape, tensor.dtype, read, offset)


def open_bin(path: Path, files: ForeignFiles) -> dict[str, StoredTensor]:
    """Return every tensor of a .bin file by name. Raises CheckpointError for anything else in it."""
    content = files.load(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold tensors by name")
    tensors = {}
    for name, tensor in content.items():
        if not _is_plain(tensor):
            kind = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"{path} holds {name} as {kind}; only float32, bfloat16 and float16 tensors are converted"
            )
        rows = partial(_bin_rows, path, files, tensor.detach())
        tensors[name] = StoredTensor(path, tuple(tensor.shape), tensor.dtype, rows)
    return tensors


def _is_plain(tensor: object) -> bool:
    """Return True for a dense tensor on the CPU of a dtype that is read."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.is_cpu or tensor.is_quantized:
        return False
    # bool and uint8 are the causal masks in GPT-2's files; as a weight they are refused by name
    return tensor.dtype in (*STORED_DTYPES.values(), torch.bool, torch.uint8)


def _bin_rows(path: Path, files: ForeignFiles, tensor: Tensor, first: int, end: int) -> Tensor:
    files.ensure(path)
    return tensor[first:end].contiguous()


def open_weights(folder: Path, files: ForeignFiles) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's weights, by the name in the files.

    Raises CheckpointError for missing, damaged and contradictory files, and tensors that are twice or not where the
    index says.
    """
    # transformers reads safetensors first where a folder holds both
    for stem, suffix, opened in (
        ("model", ".safetensors", open_safetensors),
        ("pytorch_model", ".bin", open_bin),
    ):
        single, index = f"{stem}{suffix}", f"{stem}{suffix}.index.json"
        shards = {path.name for path in folder.glob(f"{stem}-*-of-*{suffix}")}
        present = [name for name in (single, index) if os.path.lexists(folder / name)]
        if present == [index]:
            return _open_sharded(folder, index, shards, partial(opened, files=files))
        if present == [single] and not shards:
            return opened(own_file(folder, single), files)
        if present or shards:
            held = " and ".join([*present, *sorted(shards)[:1]])
            lacking = "" if present else f", but no {index}"
            raise CheckpointError(
                f"{folder} holds {held}{lacking}: the files of one model are either {single} alone, or {index} and the "
                "shards it names; keep those of one"
            )
    neither = f"{folder} holds no weights: neither model.safetensors, nor its index, nor pytorch_model.bin"
    raise CheckpointError(foreign_format(folder) or neither)


def _open_sharded(
    folder: Path, index: str, shards: set[str], opened: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    weight_map = read_json(own_file(folder, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / index} has no weight_map of tensors to files; copy it again")
    files = sorted(set(weight_map.values()))
    paths = [own_file(folder, name) for name in files]  # all of them before any is opened
    strays = sorted(shards - set(files))
    if strays:
        raise CheckpointError(f"{folder / strays[0]} is not named in {index}: files of two models; keep those of one")
    tensors: dict[str, StoredTensor] = {}
    for file, path in zip(files, paths, strict=True):
        for name, tensor in opened(path).items():
            if name in tensors:
                raise CheckpointError(f"{name} is both in {tensors[name].file} and in {path}; keep one")
            if weight_map.get(name) != file:
                indexed = weight_map.get(name, "nowhere")
                raise CheckpointError(f"{path} holds {name}, which {index} has in {indexed}; copy the folder again")
            tensors[name] = tensor
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(f"{folder / weight_map[missing[0]]} lacks {some(missing)}, named in {index}")
    return tensors


def some(names: Sequence[str]) -> str:
    """Return the first of the names, and the number of the others, for a message."""
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += f" and {len(names) - SHOWN_NAMES} more"
    return shown


# Writing


class WeightsWriter:
    """model.safetensors, or its shards and their index: headers first, then each tensor at its place, in any order.

    `shapes` are those of all tensors, by name; `stem` is the file's name instead of `model`. A context manager; at its
    end every file is on the disk. `joins`: another process has begun the files, and waits for the disk.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        precision: Precision,
        max_shard_bytes: float,
        stem: str = "model",
        *,
        joins: bool = False,
    ) -> None:
        self.dtype = DTYPES[precision]
        self._offsets: dict[str, tuple[int, int]] = {}
        """By name: the descriptor of its file, and the offset there."""
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in shapes.items()}
        shards = _shards(sizes, max_shard_bytes)
        names = [f"{stem}.safetensors"]
        if len(shards) > 1:
            names = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        self._joins = joins
        # O_EXCL: never into a file that is there
        flags = os.O_WRONLY if joins else os.O_CREAT | os.O_EXCL | os.O_WRONLY
        self._files = [os.open(folder / name, flags, 0o666) for name in names]
        for file, shard in zip(self._files, shards, strict=True):
            self._begin(file, shard, shapes)
        if len(shards) > 1 and not joins:
            total = sum(map(math.prod, shapes.values()))
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in sorted(shard)}
            metadata = {"total_parameters": total, "total_size": total * self.dtype.itemsize}
            write_json(folder / f"{stem}.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})

    def _begin(self, file: int, shard: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        dtype = next(name for name, dtype in STORED_DTYPES.items() if dtype == self.dtype)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, size in shard.items():
            header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        # the format's own padding, by which tensors begin at multiples of 8 bytes
        text += b" " * (-len(text) % 8)
        if not self._joins:
            write_at(file, 0, memoryview(len(text).to_bytes(8, "little") + text))
        for name in shard:
            self._offsets[name] = (file, 8 + len(text) + header[name]["data_offsets"][0])

    def write(self, name: str, parts: Iterable[Tensor], first: int = 0) -> None:
        """A tensor from the element of this number on, as consecutive parts of its rows.

        Raises CheckpointError if one does not fit the dtype.
        """
        file, offset = self._offsets[name]
        offset += first * self.dtype.itemsize
        for part in parts:
            rows = part.to(self.dtype).contiguous()
            # bfloat16 has float32's range
            if self.dtype == torch.float16 and bool((rows.isinf() & ~part.isinf()).any()):
                raise CheckpointError(f"{name} has values beyond {self.dtype}'s range; write it as bfloat16")
            data = bytes_of(rows)
            write_at(file, offset, data)
            offset += len(data)

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files:
            # after an error the folder is not kept
            if kind is None and not self._joins:
                os.fsync(file)
            os.close(file)


def _shards(sizes: Mapping[str, int], max_shard_bytes: float) -> list[dict[str, int]]:
    """Return the tensors of each file, and their bytes, in the order of `sizes`."""
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        # a tensor larger than a whole file has one of its own
        if shards[-1] and sum(shards[-1].values()) + size > max_shard_bytes:
            shards.append({})
        shards[-1][name] = size
    return shards


def write_at(file: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at an offset of an open file."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(content, indent=2) + "\n").encode())
