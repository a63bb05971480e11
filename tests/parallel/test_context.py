"""Where a rank stands, and which network it talks over."""

from __future__ import annotations

import socket

import psutil
import pytest

from megatron.options.config import ParallelConfig
from megatron.parallel import plain_data
from megatron.parallel.context import SHORT_BYTES, ParallelContext
from megatron.parallel.layout import LayoutError
from megatron.runtime.network import interface_towards
from tests.ranks import RankPools


def test_interface_is_the_one_an_address_is_reached_from() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback is not None
    assert loopback.startswith("lo")
    assert interface_towards("no.such.host.invalid") is None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_towards(entry.address) == name


def test_single_context_needs_no_process_group() -> None:
    ctx = ParallelContext.single()
    assert (ctx.broadcast(7), ctx.sum_over_batch_ranks(2.5), ctx.slice_size(12)) == (7, 2.5, 12)
    assert ctx.is_first_stage
    assert ctx.is_last_stage


def test_uneven_slice_is_refused() -> None:
    with pytest.raises(LayoutError, match="10 cannot be split evenly over 4"):
        ParallelContext(tensor_size=4).slice_size(10)


def text_of(size: int) -> str:
    """Return a text that takes so many bytes as plain data."""
    return "é" + "x" * (size - len(plain_data.encode("é")))


def gathered(sizes: list[list[int]]) -> list[list[str]]:
    """Gather a text of each rank, one after the other; `sizes`: those of the ranks, in bytes."""
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    return [ctx.gather_objects(text_of(each[ctx.rank])) for each in sizes]


def test_objects_of_any_size_are_gathered_in_order_of_rank(ranks: RankPools) -> None:
    # as long as goes with the sizes, a byte more on one rank alone, and long ones
    sizes = [[9, SHORT_BYTES], [9, SHORT_BYTES + 1], [SHORT_BYTES + 1, 9], [70_000, 300], [9, 9]]
    expected = [[text_of(size) for size in each] for each in sizes]
    assert ranks(2)(gathered, sizes) == [expected, expected]
