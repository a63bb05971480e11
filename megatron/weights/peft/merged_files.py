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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.parallel.low_rank import gain
from megatron.weights.folder_files import own_file, real_path
from megatron.weights.huggingface_files import StoredTensor, bytes_of, write_at
from megatron.weights.peft.folder import PeftFactors

PIECE_BYTES = 1 << 20
"""Size of the pieces in which a tensor is read and written. Memory of 4 MiB would be mapped and cleared for each."""
BLOCK_NUMEL = 1 << 17
"""Elements computed at a time: half of a common second-level cache, in float32."""

Rows = Callable[[Tensor, int, int], object]
"""(rows, first, end): change those rows of a tensor, in place, from the base's to the result's."""


def copy_changed(
    source: Path,
    target: Path,
    tensors: Mapping[str, StoredTensor],
    changes: Mapping[str, TensorChange],
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
    source: Path,
    target: Path,
    changed: Mapping[str, StoredTensor],
    changes: Mapping[str, TensorChange],
    workers: _Workers,
) -> None:
    # closed by the workers, which may still use them after an error here
    given = os.open(real_path(source), os.O_RDONLY)
    copy = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    workers.closed_at_end += (given, copy)
    # the end of what is copied or computed so far; all bytes between changed tensors are the source's
    position = 0
    for name, tensor in sorted(changed.items(), key=lambda entry: entry[1].begin or 0):
        assert tensor.begin is not None
        _copy_bytes(source, given, copy, position, tensor.begin, workers)
        change = changes[name].prepare(tensor)
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        count = tensor.num_rows if row_bytes else 0  # rows without columns have no bytes to change
        for first, end in cuts(0, count, PIECE_BYTES // max(1, row_bytes)):
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
            # in the kernel; where a file system shares blocks between files, nothing is copied at all
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
        if len(self._waiting) > 2 * self._count:  # else a fast reader would queue the whole model
            self._progress(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work, *arguments))

    def finish(self) -> None:
        while self._waiting:
            self._progress(self._waiting.popleft().result())

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            # before the descriptors close: a thread may be writing to one
            self._pool.shutdown(cancel_futures=True)
            for descriptor in self.closed_at_end:
                os.close(descriptor)


# Changes that adapters make to one tensor of their base are by the operations of PEFT's merge in their order: every bit
# of the result depends on it.

LEAST_COLUMNS = 16
"""Columns of which norms are computed at a time: a cache line of float32."""

Update = Callable[[Tensor, Tensor, int, int], object]
"""(rows, base, first, end): change the rows in place; `base` holds them as no adapter has changed them."""


@dataclass
class TensorChange:
    """All changes of one tensor: first what replaces it, then what is added, adapter by adapter."""

    whole: list[tuple[float, StoredTensor]] = field(default_factory=list)
    """(weight, tensor) of adapters that replace it."""
    added: list[LowRankUpdate | BiasUpdate] = field(default_factory=list)

    def prepare(self, base: StoredTensor) -> Rows:
        """Return the function that applies all changes to rows. Called once: what all of them need is read here."""
        updates = [step.prepare(base) for step in self.added]

        # DoRA's norms are of the base's own rows: they are kept where an earlier step changes these
        changes_twice = bool(self.whole) + len(updates) > 1

        def change(rows: Tensor, first: int, end: int) -> None:
            unchanged = rows.clone() if changes_twice else rows
            if self.whole:
                self._replace(rows, first, end)
            for update in updates:
                update(rows, unchanged, first, end)

        return change

    def _replace(self, rows: Tensor, first: int, end: int) -> None:
        # bit for bit: base + (saved - base) would round
        if len(self.whole) == 1 and self.whole[0][0] == 1:
            rows.copy_(self.whole[0][1].rows(first, end))
            return
        base = rows.float()
        result = base
        for weight, saved in self.whole:
            result = result + weight * (saved.rows(first, end).float() - base)
        rows.copy_(result)


class LowRankUpdate:
    """`scaling * B @ A`, added in the dtype of the base and rounded after each adapter.

    DoRA: every row of the sum with the base is scaled to its magnitude, and what was merged before with it. PiSSA: the
    product that the adapter began with, a part of the base, is subtracted first.
    """

    def __init__(self, factors: PeftFactors, weight: float, transposed: bool) -> None:
        """`transposed`: the base holds (in_features, out_features)."""
        self._factors, self._weight, self.transposed = factors, weight, transposed

    def _products(self, base: StoredTensor) -> tuple[Product, Product | None]:
        """Return what is added, not yet scaled, and what is subtracted first."""
        product = Product(_all(self._factors.b), _all(self._factors.a), self.transposed)
        if not self._factors.starts_from_svd:
            return product, None
        return product, _principal(_all(base), product, self._factors.scaling(1), self._factors.scaling(self._weight))

    def in_float64(self, base: StoredTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return B, scaled, A, and DoRA's magnitudes: the rows of `base + B @ A` are scaled to these."""
        product, start = self._products(base)
        # B (scaled) and A of base + B A: with PiSSA's start that is [B, -start B] [A; start A]
        b, a = self._factors.scaling(self._weight) * product.b.double(), product.a.double()
        if start is not None:
            b, a = torch.cat([b, -start.b.double()], dim=1), torch.cat([a, start.a.double()])
        if self._factors.magnitude is None:
            return b, a, None
        return b, a, _all(self._factors.magnitude).double()

    def prepare(self, base: StoredTensor) -> Update:
        """Read the factors, and compute the start of PiSSA and the norms of whole columns."""
        product, start = self._products(base)
        scaling, magnitude = self._factors.scaling(self._weight), self._factors.magnitude
        if magnitude is None:
            return Addition(product, scaling, start, rounds_first=self._factors.of_embedding)
        # norms over the inputs: of a transposed weight these are its rows, so no piece of it has a whole norm
        whole = _whole(base) if self.transposed else None
        return Addition(product, scaling, start).scaled(_all(magnitude), whole)


@dataclass(frozen=True)
class Product:
    """`B @ A` of the rows of a weight, which holds (in_features, out_features) if it is transposed."""

    b: Tensor
    a: Tensor
    transposed: bool

    @property
    def num_rows(self) -> int:
        return self.a.shape[1] if self.transposed else self.b.shape[0]

    def rows(self, first: int, end: int) -> Tensor:
        if self.transposed:
            return self.a[:, first:end].T @ self.b.T
        return self.b[first:end] @ self.a


@dataclass(frozen=True)
class Addition:
    """Addition of `scaling * B @ A` to a weight, some rows at a time: on the way into memory, or files."""

    product: Product
    scaling: float
    start: Product | None = None
    """Subtracted first: the start of PiSSA, scaled."""
    rounds_first: bool = False
    """Round to the weight's dtype before the sum, as PEFT does with an embedding's alone."""
    magnitude: Tensor | None = None
    """DoRA's, of each row, or of each column of a transposed weight."""
    column_norms: Tensor | None = None
    """Norms of the whole sum, for a transposed weight."""

    def scaled(self, magnitude: Tensor, whole: Tensor | None) -> Addition:
        """Return the addition of DoRA. `whole`: the weight, where it is transposed."""
        norms = None
        if whole is not None:
            norms = _column_norms(self._residual(whole, 0, whole.shape[0]), self.product, self.scaling)
        return replace(self, magnitude=magnitude, column_norms=norms)

    def __call__(self, rows: Tensor, base: Tensor, first: int, end: int) -> None:
        # the factor after the product, as PEFT multiplies: scaled factors would round otherwise
        change = self.product.rows(first, end).mul_(self.scaling)
        if self.magnitude is not None:  # scales what was merged before too
            factor = self._factor(self.magnitude, base, change, first, end)
            rows.copy_(factor * (self._residual(rows, first, end) + change))
            return
        if self.start is not None:
            rows.copy_(self._residual(rows, first, end))
        if self.rounds_first:
            change = change.to(rows.dtype)
        rows += change

    def _factor(self, magnitude: Tensor, base: Tensor, change: Tensor, first: int, end: int) -> Tensor:
        if self.column_norms is not None:
            return gain(magnitude, self.column_norms)
        # of the base and this adapter alone, as it was trained
        norms = torch.linalg.norm(self._residual(base, first, end) + change, dim=1)
        return gain(magnitude[first:end], norms)[:, None]

    def _residual(self, rows: Tensor, first: int, end: int) -> Tensor:
        if self.start is None:
            return rows
        return (rows.float() - self.start.rows(first, end)).to(rows.dtype)


def _principal(weight: Tensor, product: Product, full_scaling: float, scaling: float) -> Product:
    """Return what PiSSA took out of a weight in float32, multiplied by `scaling`.

    `full_scaling` is that of the whole adapter, by which its factors were divided.
    """
    rank = product.a.shape[0]
    # as PEFT's pissa_init does, which is what the adapter was trained against
    left, values, right = torch.linalg.svd(weight.T if product.transposed else weight, full_matrices=False)
    root = torch.diag(torch.sqrt(values[:rank] / full_scaling))
    return Product(scaling * (left[:, :rank] @ root), root @ right[:rank], product.transposed)


def _column_norms(weight: Tensor, product: Product, scaling: float) -> Tensor:
    """Return the length of each column of `weight`, in its own dtype, with the scaled product added."""
    norms = []
    most_columns = max(2 * LEAST_COLUMNS, BLOCK_NUMEL // max(1, weight.shape[0]))
    for first, end in cuts(0, weight.shape[1], most_columns):
        change = (product.b[first:end] @ product.a).mul_(scaling)
        norms.append(torch.linalg.norm(weight[:, first:end].T + change, dim=1))
    return torch.cat(norms)


@dataclass(frozen=True)
class BiasUpdate:
    """`scaling * bias` of lora_bias."""

    bias: StoredTensor
    scaling: float

    def prepare(self, base: StoredTensor) -> Update:
        """Return the function that adds it."""

        def add(rows: Tensor, base: Tensor, first: int, end: int) -> None:
            rows += self.bias.rows(first, end).float() * self.scaling

        return add


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.rows(0, tensor.shape[0])


def _all(tensor: StoredTensor) -> Tensor:
    """Read a tensor as float32, to which PEFT raises an adapter's dtype."""
    return _whole(tensor).float()
