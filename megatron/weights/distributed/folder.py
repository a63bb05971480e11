"""A folder of torch.distributed.checkpoint: boxes of its tensors, read without the rest of their files.

A chunk is what torch.save wrote, a zip of one storage, at an offset of a .distcp file. Its numbers are read from where
they lie. A chunk's checksum is compared before its first number is used, or when all chunks are verified.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import open_file
from megatron.checkpoint.format import PIECE_BYTES, CheckpointError
from megatron.weights.distributed.inert_pickle import PickleFault, Record, read_pickle
from megatron.weights.distributed.metadata import DTYPES, REMEDY, Chunk, ChunkedTensor, StoredBytes, read_metadata
from megatron.weights.folder_files import real_path
from megatron.weights.foreign_files import compare_checksums, load_plain
from megatron.weights.huggingface_files import StoredTensor, bytes_of
from megatron.weights.zip_frame import ZipEntry, zip_entries

log = logging.getLogger(__name__)

ROW_BYTES = 1 << 20
"""Rows of a chunk up to this size are read whole, also where some of their columns alone are needed."""
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_UNTYPED = "torch.storage.UntypedStorage"
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a chunk in its file."""

    start: int
    """Offset of the storage in the file."""
    first: int
    """Number of the first element in the storage."""
    strides: tuple[int, ...]
    checked: tuple[ZipEntry, ...]
    """Entries with a checksum."""
    storage: ZipEntry


@dataclass(frozen=True)
class _Box:
    """Elements [begins, ends) of a block that lies in a file in order, from `first` on."""

    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    first: int

    @property
    def row(self) -> int:
        """Elements of one row of the block."""
        return math.prod(self.sizes[1:])

    @property
    def has_whole_rows(self) -> bool:
        return not any(self.begins[1:]) and self.ends[1:] == self.sizes[1:]

    def of_row(self, row: int) -> _Box:
        """Return its part in one row."""
        return _Box(self.sizes[1:], self.begins[1:], self.ends[1:], self.first + row * self.row)


class DistributedFolder:
    """The tensors and objects of a torch.distributed.checkpoint. Raises CheckpointError, which names file and damage.

    `tensors` and `objects` are by the names in the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        contents = read_metadata(folder)
        self.tensors, self.objects, self.extra = contents.tensors, contents.objects, contents.extra
        self._numbers: dict[StoredBytes, _Numbers] = {}
        self._verified: set[StoredBytes] = set()
        self._all_verified = False
        self._lacks_checksums = False

    def read(self, name: str, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> Tensor:
        """Return the box [begins, ends) of a tensor, or all of it, in its own dtype."""
        tensor = self._tensor(name)
        begins = tuple(begins) or (0,) * len(tensor.shape)
        ends = tuple(ends) or tensor.shape
        target = torch.empty([end - begin for begin, end in zip(begins, ends, strict=True)], dtype=tensor.dtype)
        self.read_into(target, name, begins)
        return target

    def read_into(self, target: Tensor, name: str, begins: Sequence[int]) -> None:
        """Read the box of `target`'s shape at `begins`, and convert it to its dtype."""
        tensor = self._tensor(name)
        if target.dim() != len(tensor.shape) or len(begins) != len(tensor.shape):
            raise ValueError(f"{name} has the shape {tensor.shape}, but {tuple(target.shape)} of it is read")
        for chunk in tensor.chunks:
            # the part of the box that lies in the chunk
            bounds = list(zip(begins, target.shape, chunk.offsets, chunk.ends, strict=True))
            firsts = [max(begin, offset) for begin, _, offset, _ in bounds]
            lasts = [min(begin + size, end) for begin, size, _, end in bounds]
            if any(first >= last for first, last in zip(firsts, lasts, strict=True)):
                continue
            # a view: what is read goes straight to its place
            part = target
            for dim, (begin, first, last) in enumerate(zip(begins, firsts, lasts, strict=True)):
                part = part.narrow(dim, first - begin, last - first)
            box = _Box(
                chunk.sizes,
                tuple(first - offset for first, offset in zip(firsts, chunk.offsets, strict=True)),
                tuple(last - offset for last, offset in zip(lasts, chunk.offsets, strict=True)),
                0,
            )
            self._read_chunk(part, tensor, chunk, box)

    def object(self, name: str) -> Any:
        """Return an object: tensors and plain values, nothing executed."""
        # small: counters and options, not tensors of a model
        at = self.objects[name]
        with open_file(real_path(at.path)) as descriptor:
            entries = zip_entries(descriptor, f"{at.path}: {name}", (at.begin, at.length))
            if entries and self._has_checksum(at.path, entries):
                compare_checksums(f"{at.path}: {name}", descriptor, entries)
            content = os.pread(descriptor, at.length, at.begin)
        return load_plain(io.BytesIO(content), f"{at.path}: {name}")

    def stored(self, name: str, index: tuple[int, ...] = (), rows: tuple[int, int] | None = None) -> StoredTensor:
        """Return a tensor, or the one at `index` of its leading dimensions, as one that is read by rows.

        `rows`: first and end of its rows, if not all.
        """
        tensor = self._tensor(name)
        shape = tensor.shape[len(index) :]
        begin, end = rows or (0, shape[0] if shape else 1)
        inner = shape[1:]

        def read_rows(first: int, last: int) -> Tensor:
            return window(first, last, (0, math.prod(inner))).view(last - first, *inner) if shape else self.read(name)

        def window(first: int, last: int, columns: tuple[int, int]) -> Tensor:
            begins, ends = (*index, begin + first), (*(at + 1 for at in index), begin + last)
            # columns within a row of a matrix are a box of the tensor; those of more dimensions lie across them
            whole = len(inner) != 1
            box_begins = (*begins, *((0,) * len(inner) if whole else columns[:1]))
            box_ends = (*ends, *(inner if whole else columns[1:]))
            found = self.read(name, box_begins, box_ends).view(last - first, -1)
            return found[:, columns[0] : columns[1]] if whole else found

        path = tensor.chunks[0].at.path if tensor.chunks else self.folder
        return StoredTensor(path, (end - begin, *inner) if shape else (), tensor.dtype, read_rows, window=window)

    def verify(self, share: tuple[int, int] = (0, 1), names: Collection[str] | None = None) -> str:
        """Compare the checksums of the share[0]-th of share[1] parts of the chunks, and return what was checked.

        `names`: those of the tensors that will be read, if not all.
        """
        wanted = self.tensors if names is None else {name: self.tensors[name] for name in names}
        chunks = [(tensor, chunk) for tensor in wanted.values() for chunk in tensor.chunks]
        # dealt out from the largest down, so that the shares come out alike; neighbours in a file by turns
        chunks.sort(key=lambda pair: (-pair[1].at.length, pair[1].at.path, pair[1].at.begin))
        for tensor, chunk in chunks[share[0] :: share[1]]:
            # opened for each chunk: a large model has more files than a process may have open
            with open_file(real_path(chunk.at.path)) as descriptor:
                self._ensure(descriptor, tensor, chunk)
        if names is None:
            # the other shares are verified by other ranks, whose fault ends this one too
            self._all_verified = True
        else:
            self._verified |= {chunk.at for _, chunk in chunks}
        what = f"of every byte of {len(chunks)} chunks of {len(wanted)} tensors"
        if self._lacks_checksums:
            return f"the CRC-32 {what}, but for those that carry none"
        return f"the CRC-32 {what}"

    def _tensor(self, name: str) -> ChunkedTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name}; it is of another model, or not whole")
        return self.tensors[name]

    def _read_chunk(self, target: Tensor, tensor: ChunkedTensor, chunk: Chunk, box: _Box) -> None:
        with open_file(real_path(chunk.at.path)) as descriptor:
            self._ensure(descriptor, tensor, chunk)
            numbers = self._numbers_of(descriptor, tensor, chunk)
            reader = _Reader(descriptor, f"{chunk.at.path}: {tensor.name}", numbers.start, tensor.dtype)
            if numbers.strides == _contiguous(chunk.sizes):
                reader.fill(target, replace(box, first=numbers.first))
                return
            # a transposed tensor keeps its strides when it is saved
            storage = torch.empty(numbers.storage.num_bytes // tensor.dtype.itemsize, dtype=tensor.dtype)
            reader.into(storage, 0)
            whole = storage.as_strided(chunk.sizes, numbers.strides, numbers.first)
            for dim, (begin, end) in enumerate(zip(box.begins, box.ends, strict=True)):
                whole = whole.narrow(dim, begin, end - begin)
            target.copy_(whole)

    def _ensure(self, descriptor: int, tensor: ChunkedTensor, chunk: Chunk) -> None:
        """Compare the checksums of a chunk, unless they have been."""
        if self._all_verified or chunk.at in self._verified:
            return
        # all of the chunk, although a part of it may be needed: it has one checksum
        numbers = self._numbers_of(descriptor, tensor, chunk)
        compare_checksums(f"{chunk.at.path}: {tensor.name} at {list(chunk.offsets)}", descriptor, numbers.checked)
        self._verified.add(chunk.at)

    def _numbers_of(self, descriptor: int, tensor: ChunkedTensor, chunk: Chunk) -> _Numbers:
        """Return the place of the chunk's numbers, checked to be all that it must hold."""
        if chunk.at not in self._numbers:
            where = f"{chunk.at.path}: {tensor.name} at {list(chunk.offsets)}"
            self._numbers[chunk.at] = self._located(descriptor, where, tensor, chunk)
        return self._numbers[chunk.at]

    def _located(self, descriptor: int, where: str, tensor: ChunkedTensor, chunk: Chunk) -> _Numbers:
        entries = zip_entries(descriptor, where, (chunk.at.begin, chunk.at.length))
        if entries is None:
            raise CheckpointError(f"{where} is not a tensor as torch.save writes it; {REMEDY}")
        checked = tuple(entries) if self._has_checksum(chunk.at.path, entries) else ()
        # below a folder that is named after the file, or `archive`
        by_name = {entry.name.partition("/")[2]: entry for entry in entries}
        pickled = _pickled(descriptor, where, by_name)
        if checked:
            compare_checksums(where, descriptor, [pickled])  # it describes what is read
        try:
            key, first, sizes, strides, dtype = _description(os.pread(descriptor, pickled.num_bytes, pickled.start))
        except PickleFault as error:
            raise CheckpointError(f"{where} is refused: {error}; {REMEDY}") from None
        if sizes != chunk.sizes or dtype != tensor.dtype:
            raise CheckpointError(
                f"{where} is {list(sizes)} of {dtype}, but .metadata makes it {list(chunk.sizes)} of {tensor.dtype}: "
                f"files of two checkpoints; {REMEDY}"
            )
        storage = by_name.get(f"data/{key}")
        # strides may repeat or skip numbers, but reach none that are not there
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if storage is None or (last + 1) * dtype.itemsize > storage.num_bytes:
            raise CheckpointError(f"{where} lacks numbers of its tensor; {REMEDY}")
        return _Numbers(storage.start, first, strides, checked, storage)

    def _has_checksum(self, path: Path, entries: Sequence[ZipEntry]) -> bool:
        # torch writes zeros where it computes none
        if any(entry.crc32 for entry in entries):
            return True
        if not self._lacks_checksums:
            log.warning("%s carries no checksums, so damage to its tensors cannot be found", path)
        self._lacks_checksums = True
        return False


def _pickled(descriptor: int, where: str, entries: Mapping[str, ZipEntry]) -> ZipEntry:
    """Return the entry that describes a tensor. Raises CheckpointError if there is none, or for another byte order."""
    # torch before 2.1 wrote none, on machines that are little-endian
    order = entries.get("byteorder")
    if order is not None and os.pread(descriptor, order.num_bytes, order.start) != b"little":
        raise CheckpointError(f"{where} was written on a machine of another byte order, which is not read")
    if "data.pkl" not in entries:
        raise CheckpointError(f"{where} has no pickle; {REMEDY}")
    return entries["data.pkl"]


def _description(pickled: bytes) -> tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return the key of a tensor's storage, its first element there, sizes, strides and dtype."""
    names = {*_STORAGES, *DTYPES, *_TENSORS, _UNTYPED, _PARAMETER, "collections.OrderedDict"}
    found = read_pickle(pickled, names, lambda storage: storage)
    # a Parameter is a tensor with flags, which say nothing of its numbers
    if isinstance(found, Record) and found.name == _PARAMETER and found.arguments:
        found = found.arguments[0]
    if not isinstance(found, Record) or found.name not in _TENSORS:
        raise PickleFault("it holds something else than a dense tensor")
    storage, first, sizes, strides, *more = found.arguments
    mark, kind, key, _, _ = storage
    dtype = _STORAGES.get(kind)
    # newer dtypes have no storage class, and name their dtype instead
    if found.name == _TENSORS[1]:
        dtype = DTYPES.get(more[-1])
    numbers = (first, *sizes, *strides)
    if mark != "storage" or dtype is None or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise PickleFault(f"its tensor is of {kind}, which is not read")
    return str(key), first, tuple(sizes), tuple(strides), dtype


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(sizes)])


class _Reader:
    """Elements of one storage in an open file."""

    def __init__(self, descriptor: int, where: str, start: int, dtype: torch.dtype) -> None:
        self._descriptor, self._where, self._start, self._dtype = descriptor, where, start, dtype

    def fill(self, target: Tensor, box: _Box) -> None:
        """Read a box, of `target`'s shape."""
        if not box.sizes:
            value = torch.empty(1, dtype=self._dtype)
            self.into(value, box.first)
            target.copy_(value[0])
        elif box.has_whole_rows or box.row * self._dtype.itemsize <= ROW_BYTES:
            self._fill_rows(target, box)
        else:
            for row in range(box.begins[0], box.ends[0]):
                self.fill(target[row - box.begins[0]], box.of_row(row))

    def _fill_rows(self, target: Tensor, box: _Box) -> None:
        # without a buffer between where the numbers need no conversion
        is_direct = box.has_whole_rows and target.is_contiguous() and target.dtype == self._dtype
        if is_direct:
            self.into(target, box.first + box.begins[0] * box.row)
            return
        step = max(1, PIECE_BYTES // max(1, box.row * self._dtype.itemsize))
        for begin in range(box.begins[0], box.ends[0], step):
            end = min(begin + step, box.ends[0])
            rows = torch.empty((end - begin, *box.sizes[1:]), dtype=self._dtype)
            self.into(rows, box.first + begin * box.row)
            for dim, (first, last) in enumerate(zip(box.begins[1:], box.ends[1:], strict=True), 1):
                rows = rows.narrow(dim, first, last - first)
            target[begin - box.begins[0] : end - box.begins[0]].copy_(rows)

    def into(self, target: Tensor, first: int) -> None:
        """Fill a contiguous tensor of the storage's dtype with its elements from `first` on."""
        memory = bytes_of(target)
        position = self._start + first * self._dtype.itemsize
        # a read may return less than was requested
        while memory:
            count = os.preadv(self._descriptor, [memory], position)
            if not count:
                raise CheckpointError(f"{self._where} ends within its numbers: it is truncated; {REMEDY}")
            memory, position = memory[count:], position + count
