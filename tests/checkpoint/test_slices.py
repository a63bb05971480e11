"""Stretches of flattened local tensors, found in the full tensor: against index arithmetic over numbered elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.source import Region, copy_overlap, regions
from megatron.parallel.shards import Shard

SIZES = (1, 2, 3, 4, 6)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shard, Shard, int, int]:
    """A parameter as two layouts have it, each with its padding, and the two tensor-parallel sizes."""
    dim = draw(st.sampled_from([None, 0, 1, 2]))
    if dim is None:
        shard = Shard(tuple(draw(st.lists(st.integers(1, 5), max_size=3))))
        return shard, shard, 1, 1
    before = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    unit = math.lcm(*before)
    padded = draw(st.booleans())
    pieces: tuple[int, ...]
    if padded:
        pieces = (draw(st.integers(1, 20)),)
    else:
        pieces = tuple(unit * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3))))
    others = draw(st.lists(st.integers(1, 4), min_size=dim, max_size=dim + 1))
    shape = (*others[:dim], sum(pieces), *others[dim:])
    rows = [-pieces[0] % size + size * draw(st.integers(0, 3)) if padded else 0 for size in before]
    first, second = (Shard(shape, dim, pieces, padding) for padding in rows)
    return first, second, *before


def stretch(draw: st.DrawFn, numel: int) -> tuple[int, int]:
    start = draw(st.integers(0, numel))
    return start, draw(st.integers(0, numel - start))


def numbered(shard: Shard, rank: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number + 1 of every element of a flattened local tensor in the full one; 0: padding."""
    full = torch.arange(1, math.prod(shard.shape) + 1).view(shard.shape)
    return shard.take(full, rank, size).flatten().numpy()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_regions_are_where_index_arithmetic_finds_the_elements(data: st.DataObject) -> None:
    shard, _, size, _ = data.draw(layouts())
    rank = data.draw(st.integers(0, size - 1))
    local = numbered(shard, rank, size)
    start, numel = data.draw(st.composite(stretch)(len(local)))
    columns = math.prod(shard.shape[shard.dim or 0 :])
    found = np.zeros(numel, dtype=np.int64)
    for region in regions(shard, rank, size, start, numel):
        for row in range(region.row_start, region.row_stop):
            begin = region.offset + (row - region.row_start) * region.row_stride
            length = region.column_stop - region.column_start
            assert not found[begin : begin + length].any()
            found[begin : begin + length] = row * columns + np.arange(region.column_start, region.column_stop) + 1
    np.testing.assert_array_equal(found, local[start : start + numel])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_two_layouts_have_in_common_is_copied_and_nothing_else(data: st.DataObject) -> None:
    first, second, first_size, second_size = data.draw(layouts())
    first_rank, second_rank = data.draw(st.integers(0, first_size - 1)), data.draw(st.integers(0, second_size - 1))
    held, wanted = numbered(first, first_rank, first_size), numbered(second, second_rank, second_size)
    first_start, first_numel = data.draw(st.composite(stretch)(len(held)))
    second_start, second_numel = data.draw(st.composite(stretch)(len(wanted)))
    held = held[first_start : first_start + first_numel]
    wanted = wanted[second_start : second_start + second_numel]
    # in the midst of something larger, as a file is
    memory = torch.cat([torch.full((3,), -5), torch.from_numpy(held.copy()), torch.full((2,), -5)])
    target = torch.full((second_numel,), -1)
    copy_overlap(
        memory[3 : 3 + first_numel],
        regions(first, first_rank, first_size, first_start, first_numel),
        target,
        regions(second, second_rank, second_size, second_start, second_numel),
    )
    expected = np.where(np.isin(wanted, held) & (wanted > 0), wanted, -1)
    np.testing.assert_array_equal(target.numpy(), expected)


def test_a_stretch_of_a_row_parallel_weight_is_at_most_three_rectangles() -> None:
    shard = Shard((1000, 64), dim=1, pieces=(64,))
    assert regions(shard, 1, 4, 5, 32 * 16) == [
        Region(0, 1, 21, 32, 0, 16),
        Region(1, 32, 16, 32, 11, 16),
        Region(32, 33, 16, 21, 11 + 31 * 16, 16),
    ]


def test_a_stretch_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[40, 49\) is outside the 48 elements"):
        regions(Shard((12, 8), dim=0, pieces=(12,)), 0, 2, 40, 9)
