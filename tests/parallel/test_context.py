"""Where a rank stands, and which network it talks over."""

from __future__ import annotations

import socket

import psutil
import pytest

from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import LayoutError
from megatron.runtime.network import interface_towards


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
