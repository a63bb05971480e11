"""Sources of weights: slices by our names, whatever the files are.

Each format of files is one subclass of `WeightSource` in one file; weights/formats.py lists those that a folder may
hold. What wraps another source, such as a base with adapters, is a subclass too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron.options.config import Config
from megatron.parallel.shards import Shard

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext


AVERAGE = "ema"
"""Kind of the moving average of a run's trained weights."""


@dataclass(frozen=True)
class Slice:
    """A stretch of what one of `tensor_size` tensor-parallel ranks holds of a parameter, flattened."""

    name: str
    shard: Shard
    """Padding included, which reads as zero."""
    start: int
    numel: int
    tensor_rank: int = 0
    tensor_size: int = 1
    is_counted: bool = False
    """This rank alone reads these numbers: they count for the identity of a base. See `WeightSource.identify`."""

    @staticmethod
    def whole(name: str, shard: Shard) -> Slice:
        """Return the full tensor, without padding."""
        return Slice(name, replace(shard, padding=0), 0, math.prod(shard.shape))

    @staticmethod
    def of_rank(name: str, shard: Shard, tensor_rank: int, tensor_size: int) -> Slice:
        """Return a whole local tensor; the full one where every rank holds that."""
        if shard.dim is None:  # so that one slice of it has one description on all ranks
            tensor_rank, tensor_size = 0, 1
        numel = math.prod(shard.local_shape(tensor_size))
        return Slice(name, shard, 0, numel, tensor_rank, tensor_size)

    @property
    def tensor(self) -> Slice:
        """The whole local tensor that this is a stretch of."""
        return replace(self, start=0, numel=math.prod(self.local_shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shard.local_shape(self.tensor_size)


class WeightSource(ABC):
    """Weights, and moments where the files hold them, as slices for any layout, in float32."""

    format: ClassVar[str]
    """As a checkpoint of adapters records that of its base."""
    title: str
    """The format, for messages."""
    holds_run: bool = True
    """A run can go on from it: it has progress, and may have an optimizer. False: it has weights alone."""
    reads_slices: bool = True
    """A slice costs less than the tensor that it is of."""

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, Shard],
        *,
        kinds: Sequence[str] = ("weight",),
        metadata: dict[str, Any] | None = None,
        config: Config | None = None,
    ) -> None:
        self.folder = folder
        self.parameters = parameters
        """Full tensors by name."""
        self.kinds = tuple(kinds)
        """`weight` first, then the optimizer's moments."""
        self.metadata = metadata or {}
        """As of a run's checkpoint, as far as the files have it."""
        self.config = config
        """Model that the files describe; None: it is yet to be read from `metadata`."""
        self.uncompared: Sequence[str] = ()
        """Options of the run's model that nothing in the files settles."""
        self.optimizer_fault: str | None = None
        """Reason for which the optimizer that the files hold cannot be read, with the remedy."""

    @property
    def parts(self) -> Sequence[WeightSource]:
        """Sources of files that this one reads from, in the order in which they say what is beside the weights."""
        return (self,)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Kinds that the files hold of a parameter, in the order of `kinds`."""
        return self.kinds

    @abstractmethod
    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Return float32 [at.numel]. Raises CheckpointError where the parameter is missing or has another shape."""

    @abstractmethod
    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        """Compare the checksums of the share[0]-th of share[1] parts of the files, and return what was checked.

        `kinds`: those that will be read, if not all. Raises CheckpointError.
        """

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        """Return a whole tensor without padding, in its full shape."""
        shard = self.parameters[name]
        return self.read(Slice.whole(name, shard), kind).view(shard.shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), each parameter once. A tensor may be overwritten by the next one."""
        for name in self.parameters:
            yield name, self.read_full(name)

    def identify(self, ctx: ParallelContext) -> list[str]:
        """Return lines about the base of adapters, all of which ranks have read, each number once. Collective.

        Raises CheckpointError if it is another base than that of the adapters.
        """
        return []


# ---------------------------------------------------------------------------------------------------------------------
# Regions of the full tensor that a stretch of a rank's flattened tensor covers, and copies between such stretches.
#
# ZeRO cuts flattened parameters anywhere, tensor parallelism by rows or columns, in pieces. Both give rectangles of the
# full tensor seen as a matrix: its rows are all dimensions before the sharded one, flattened; its columns the rest. Two
# layouts share the intersections of their rectangles.


@dataclass(frozen=True)
class Region:
    """Rectangle of the full tensor's matrix, and the place of its elements in a flat stretch.

    The element at (row, column) is number `offset + (row - row_start) * row_stride + column - column_start`.
    """

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int
    offset: int
    row_stride: int


def regions(shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int) -> list[Region]:
    """Return the regions in [start, start + numel) of the flattened local tensor of `tensor_rank` of `tensor_size`.

    They contain no padding. Raises LayoutError if the tensor cannot be split so, ValueError outside the tensor.
    """
    local_numel = math.prod(shard.local_shape(tensor_size))
    if start < 0 or numel < 0 or start + numel > local_numel:
        raise ValueError(f"[{start}, {start + numel}) is outside the {local_numel} elements of the local {shard.shape}")
    if numel == 0:
        return []
    if shard.dim is None:
        return [Region(0, 1, start, start + numel, 0, numel)]
    inner = math.prod(shard.shape[shard.dim + 1 :])
    full_columns = shard.shape[shard.dim] * inner
    # a rank holds a span of each fused piece (q, k, v), one after the other
    spans = [(first * inner, last * inner) for first, last in shard.spans(tensor_rank, tensor_size)]
    local_columns = sum(last - first for first, last in spans)
    found = []
    for row_start, row_stop, left, right in bands(start, start + numel, local_columns):
        begin = 0  # first column of the span in the local tensor
        for first, last in spans:
            column_start = first + max(left - begin, 0)
            column_stop = min(first + min(right - begin, last - first), full_columns)  # behind them is padding
            if column_start < column_stop:
                offset = row_start * local_columns + begin + column_start - first - start
                found.append(Region(row_start, row_stop, column_start, column_stop, offset, local_columns))
            begin += last - first
    return found


def bands(start: int, stop: int, columns: int) -> list[tuple[int, int, int, int]]:
    """Rectangles (first row, last row + 1, first column, last column + 1) of a flat stretch.

    At most three: the end of a row, whole rows, the beginning of a row.
    """
    first_row, left = divmod(start, columns)
    last_row, right = divmod(stop, columns)
    if first_row == last_row:
        return [(first_row, first_row + 1, left, right)]
    bands = []
    if left:
        bands.append((first_row, first_row + 1, left, columns))
        first_row += 1
    if first_row < last_row:
        bands.append((first_row, last_row, 0, columns))
    if right:
        bands.append((last_row, last_row + 1, 0, right))
    return bands


def copy_overlap(
    source: Tensor, source_regions: Sequence[Region], target: Tensor, target_regions: Sequence[Region]
) -> None:
    """Copy the elements of the full tensor that two flat stretches share. The rest of `target` is unchanged.

    `source` and `target` are contiguous 1-D tensors; the regions must be of matrices with the same columns.
    """
    # few: at most three bands of each fused piece on either side
    for there in source_regions:
        for here in target_regions:
            row_start, row_stop = max(there.row_start, here.row_start), min(there.row_stop, here.row_stop)
            column_start = max(there.column_start, here.column_start)
            column_stop = min(there.column_stop, here.column_stop)
            if row_start >= row_stop or column_start >= column_stop:
                continue
            shape = (row_stop - row_start, column_stop - column_start)
            _rectangle(target, here, row_start, column_start, shape).copy_(
                _rectangle(source, there, row_start, column_start, shape)
            )


def _rectangle(flat: Tensor, region: Region, row: int, column: int, shape: tuple[int, int]) -> Tensor:
    offset = region.offset + (row - region.row_start) * region.row_stride + column - region.column_start
    # as_strided counts from the beginning of the storage, of which `flat` may be a part
    return flat.as_strided(shape, (region.row_stride, 1), flat.storage_offset() + offset)


Windows = Callable[[tuple[int, int], tuple[int, int]], Iterable[tuple[int, int, Tensor]]]
"""Function of rows and columns of a full tensor's matrix: (first row, first column, float32 [rows, columns]) in turn,
which cover them together.
"""


def read_windows(at: Slice, windows: Windows) -> Tensor:
    """Return a slice of what files give as rectangles of the full tensor: as WeightSource.read does."""
    # zeros: padding is in no file, and lies in no region
    target = torch.zeros(at.numel)
    # regions of a tensor cut by columns are of the tensor as it is; those of others, of the tensor as one row
    is_one_row = at.shard.dim != 1
    inner = math.prod(at.shard.shape[1:])
    for wanted in regions(at.shard, at.tensor_rank, at.tensor_size, at.start, at.numel):
        rows, columns = (wanted.row_start, wanted.row_stop), (wanted.column_start, wanted.column_stop)
        if is_one_row:
            rows, columns = (columns[0] // inner, -(-columns[1] // inner)), (0, inner)
        for row, column, window in windows(rows, columns):
            count, width = window.shape
            held = Region(row, row + count, column, column + width, 0, width)
            if is_one_row:
                held = Region(0, 1, row * inner, (row + count) * inner, 0, count * inner)
            copy_overlap(window.flatten(), [held], target, [wanted])
    return target
