"""Regions of the full tensor that a stretch of a rank's flattened tensor covers, and copies between such stretches.

ZeRO cuts flattened parameters anywhere, tensor parallelism by rows or columns, in pieces. Both give rectangles of the
full tensor seen as a matrix: its rows are all dimensions before the sharded one, flattened; its columns the rest. Two
layouts share the intersections of their rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.shards import Shard


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
