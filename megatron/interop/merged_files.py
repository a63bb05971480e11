"""Copy weights files while some of their tensors are replaced by computed ones, at the speed of the disk.

The bytes between those tensors are copied by the kernel. The tensors are read, computed and written in pieces of a
MiB, once each and in the order of the file, by as many threads as torch uses: while one waits for the disk, another
computes. Within a piece, blocks of rows stay in a core's cache.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.interop.folder_files import own_file, real_path
from megatron.interop.huggingface_files import StoredTensor, bytes_of, write_at

PIECE_BYTES = 1 << 20
"""Size of the pieces in which a tensor is read and written. Memory of 4 MiB would be mapped and cleared for each."""
BLOCK_NUMEL = 1 << 17
"""Elements computed at a time: half of a common second-level cache, in float32."""

Rows = Callable[[Tensor, int, int], object]
"""(rows, first, end): change those rows of a tensor, in place, from the base's to the result's."""


class Change(Protocol):
    """Change of one tensor."""

    def prepare(self, base: StoredTensor) -> Rows:
        """Read what all rows need. Called once, before the first of them."""
        ...


def copy_changed(
    source: Path,
    target: Path,
    tensors: Mapping[str, StoredTensor],
    changes: Mapping[str, Change],
    progress: Callable[[int], object],
) -> None:
    """Write a durable copy of the files that hold `tensors`, with `changes` of some of them, from folder to folder.

    `progress` receives elements changed. Raises CheckpointError if a result is not finite, and OSError.
    """
    with _Workers(progress) as workers:
        for name in sorted({tensor.file.name for tensor in tensors.values()}):
            changed = {key: tensors[key] for key in changes if tensors[key].file.name == name}
            _copy_file(own_file(source, name), target / name, changed, changes, workers)


def _copy_file(
    source: Path, target: Path, changed: Mapping[str, StoredTensor], changes: Mapping[str, Change], workers: _Workers
) -> None:
    given = os.open(real_path(source), os.O_RDONLY)
    copy = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    workers.closed_at_end += (given, copy)
    position = 0
    for name, tensor in sorted(changed.items(), key=lambda entry: entry[1].begin or 0):
        assert tensor.begin is not None
        _copy_bytes(source, given, copy, position, tensor.begin, workers)
        change = changes[name].prepare(tensor)
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        count = tensor.shape[0] if tensor.shape else 1
        for first, end in cuts(0, count if row_bytes else 0, PIECE_BYTES // max(1, row_bytes)):
            workers.submit(_change_piece, name, tensor, change, first, end, copy, tensor.begin + first * row_bytes)
        position = tensor.begin + count * row_bytes
    _copy_bytes(source, given, copy, position, os.fstat(given).st_size, workers)
    workers.finish()
    workers.submit(_sync, copy)  # while the next file is written


def cuts(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range into as few parts of at most `most` as there can be, of nearly equal size: none is a mere rest."""
    count = end - first
    parts = -(-count // max(1, most))
    for part in range(parts):
        yield first + count * part // parts, first + count * (part + 1) // parts


def _copy_bytes(source: Path, given: int, copy: int, begin: int, end: int, workers: _Workers) -> None:
    for first, last in cuts(begin, end, 32 * PIECE_BYTES):
        workers.submit(_copy_piece, source, given, copy, first, last)


def _copy_piece(source: Path, given: int, copy: int, begin: int, end: int) -> int:
    while begin < end:
        try:
            count = os.copy_file_range(given, copy, end - begin, begin, begin)
        except (OSError, AttributeError):  # not on this system, or not between these files: errors of the disk return
            data = os.pread(given, min(end - begin, PIECE_BYTES), begin)
            write_at(copy, begin, memoryview(data))
            count = len(data)
        if not count:
            raise CheckpointError(f"{source} became shorter while it was read; start again")
        begin += count
    return 0


def _change_piece(name: str, tensor: StoredTensor, change: Rows, first: int, end: int, copy: int, position: int) -> int:
    rows = tensor.rows(first, end)
    for start, stop in cuts(first, end, BLOCK_NUMEL // max(1, math.prod(tensor.shape[1:]))):
        block = rows[start - first : stop - first]
        change(block, start, stop)
        if not all(map(math.isfinite, map(float, block.aminmax()))):  # 1/20 of the time of isfinite().all()
            raise CheckpointError(
                f"{name} is not finite after merging, in {rows.dtype}: an adapter is damaged, or the base's dtype is "
                "too narrow for it"
            )
    write_at(copy, position, bytes_of(rows))
    return rows.numel()


def _sync(descriptor: int) -> int:
    os.fsync(descriptor)
    return 0


class _Workers:
    """Threads with a short queue, each with one thread of torch's. At the end, or after a fault, descriptors close."""

    def __init__(self, progress: Callable[[int], object]) -> None:
        self._progress = progress
        self._count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._count, initializer=partial(torch.set_num_threads, 1))
        self._waiting: deque[Future[int]] = deque()
        self.closed_at_end: tuple[int, ...] = ()

    def submit(self, work: Callable[..., int], *arguments: object) -> None:
        """Start the work when a thread is free. Raises the error of an earlier one."""
        if len(self._waiting) > 2 * self._count:
            self._progress(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work, *arguments))

    def finish(self) -> None:
        while self._waiting:
            self._progress(self._waiting.popleft().result())

    def __enter__(self) -> _Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._pool.shutdown(cancel_futures=True)
            for descriptor in self.closed_at_end:
                os.close(descriptor)
