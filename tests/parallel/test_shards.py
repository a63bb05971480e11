"""A parameter's description cuts the full tensor, joins it again, and starts it alike on every layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import (
    LayerDeclaration,
    Layout,
    LayoutError,
    Shard,
    Shards,
    alias,
    allocate,
    initialise,
    named_parameters,
    shard_of,
)


@st.composite
def shards(draw: st.DrawFn) -> tuple[Shard, int]:
    """A shard and a number of ranks that it divides over."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    rest = draw(st.lists(st.integers(1, 4), max_size=2))
    dim = draw(st.integers(0, len(rest)))
    pieces = [size * part for part in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
    padding = draw(st.integers(0, pieces[-1] - 1))
    pieces[-1] -= padding
    shape = [*rest[:dim], sum(pieces), *rest[dim:]]
    return Shard(tuple(shape), dim, tuple(pieces), padding, std=1.0), size


@given(shards())
def test_assemble_is_the_inverse_of_take(case: tuple[Shard, int]) -> None:
    shard, size = case
    full = torch.arange(1.0, 1 + torch.Size(shard.shape).numel()).reshape(shard.shape)
    parts = [shard.take(full, rank, size) for rank in range(size)]
    assert all(tuple(part.shape) == shard.local_shape(size) and part.is_contiguous() for part in parts)
    torch.testing.assert_close(shard.assemble(parts), full, rtol=0, atol=0)
    # each number is on one rank only, and padding is zero
    assert sum(part.count_nonzero() for part in parts) == full.numel()


@given(shards())
def test_every_size_starts_from_the_same_full_tensor(case: tuple[Shard, int]) -> None:
    shard, size = case
    parts = [shard.initial("2.mlp.up.weight", 1234, rank, size) for rank in range(size)]
    whole = Shard(shard.shape, std=1.0).initial("2.mlp.up.weight", 1234, 0, 1)
    torch.testing.assert_close(shard.assemble(parts), whole, rtol=0, atol=0)


def test_fused_pieces_are_each_cut() -> None:
    # q of 4 rows, k and v of 2, over 2 ranks
    shard = Shard((8,), dim=0, pieces=(4, 2, 2))
    assert shard.take(torch.arange(8), 0, 2).tolist() == [0, 1, 4, 6]
    assert shard.take(torch.arange(8), 1, 2).tolist() == [2, 3, 5, 7]
    assert shard.spans(1, 2) == [(2, 4), (5, 6), (7, 8)]


def test_take_has_its_own_storage() -> None:
    for shard in (Shard((4, 2)), Shard((4, 2), dim=0, pieces=(4,)), Shard((4, 2), dim=1, pieces=(2,))):
        full = torch.zeros(4, 2)
        shard.take(full, 0, 1).fill_(1.0)
        assert not full.any()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"pieces \(3, 2\) do not add up to dimension 0 of \(6, 2\)"):
        Shard((6, 2), dim=0, pieces=(3, 2))
    with pytest.raises(LayoutError, match=r"7 rows of .* cannot be split over 2"):
        Shard((7,), dim=0, pieces=(7,)).local_shape(2)
    with pytest.raises(LayoutError, match=r"full tensor has shape \(2, 6\), not \(6, 2\)"):
        Shard((6, 2), dim=0, pieces=(6,)).take(torch.zeros(2, 6), 0, 2)


def test_start_depends_on_name_and_seed_alone() -> None:
    shard = Shard((64, 64), dim=0, pieces=(64,), std=0.02)
    start = shard.initial("a", 1, 0, 1)
    assert torch.equal(start, shard.initial("a", 1, 0, 1))
    assert not torch.equal(start, shard.initial("b", 1, 0, 1))
    assert not torch.equal(start, shard.initial("a", 2, 0, 1))
    torch.testing.assert_close(start.std(), torch.tensor(0.02), rtol=0.05, atol=0)
    before = torch.get_rng_state()
    shard.initial("a", 1, 0, 1)
    assert torch.equal(before, torch.get_rng_state())  # no other stream is touched


def test_padding_starts_at_zero() -> None:
    shard = Shard((5, 3), dim=0, pieces=(5,), padding=3, std=1.0)
    last = shard.initial("0.weight", 1, 3, 4)
    assert last.shape == (2, 3)
    assert not last.any()


def test_start_is_float32_whatever_the_default() -> None:
    shard = Shard((8,), std=1.0)
    expected = shard.initial("a", 1, 0, 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        drawn, filled = shard.initial("a", 1, 0, 1), Shard((8,), value=1.0).initial("a", 1, 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert drawn.dtype == filled.dtype == torch.float32
    assert torch.equal(drawn, expected)


def test_parameters_carry_their_description() -> None:
    shard, ctx = Shard((4, 2), dim=0, pieces=(4,), value=2.0), ParallelContext(tensor_size=2)
    parameter = allocate("layers.0.x", shard, ctx, dtype=torch.bfloat16)
    assert shard_of(parameter) is shard
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == ((2, 2), torch.bfloat16, True)
    assert parameter.full_name == "layers.0.x"  # type: ignore[attr-defined]
    assert parameter.tensor_model_parallel is True  # type: ignore[attr-defined]
    assert allocate("x", Shard((4,)), ctx).tensor_model_parallel is False  # type: ignore[attr-defined]
    assert not allocate("x", Shard((4,), trained=False), ctx).requires_grad
    initialise([("x", parameter)], 1, Layout(tensor_size=2))
    assert (parameter == 2.0).all()
    view = alias(parameter)
    assert view is not parameter
    assert shard_of(view) is shard
    view.sum().backward()
    assert parameter.grad is not None


def test_a_view_allocates_under_full_names() -> None:
    shards = {"a.b.weight": Shard((2,), used_on="stream"), "a.b.bias": Shard((3,), used_on="heads"), "c": MATRIX}
    view = Shards(LayerDeclaration("layers.7", shards, build=torch.nn.Module))
    assert list(view) == list(shards)
    inner = view.below("a").below("b")
    assert list(inner) == ["weight", "bias"]
    assert "weight" in inner
    assert "c" not in inner
    assert not view.below("nothing")
    module = torch.nn.Module()
    module.any_name = inner.allocate("bias", ParallelContext.single())
    assert [(name, tuple(p.shape)) for name, p in named_parameters(module)] == [("layers.7.a.b.bias", (3,))]


MATRIX = Shard((4, 2), dim=0, pieces=(4,))


def test_a_replicated_parameter_must_say_where_it_is_used() -> None:
    with pytest.raises(LayoutError, match=r"layers\.3\.q_norm\.weight is replicated without used_on; declare used_on="):
        LayerDeclaration("layers.3", {"c": MATRIX, "q_norm.weight": Shard((8,))}, build=torch.nn.Module)


SHARED = SimpleNamespace(ctx=ParallelContext.single())


def test_a_module_allocates_the_declared_parameters_no_fewer_and_no_more() -> None:
    def build(shards: Shards, shared: None) -> torch.nn.Module:
        module = torch.nn.Module()
        module.weight = shards.allocate("weight", ParallelContext.single())
        return module

    weight = Shard((2,), used_on="stream")
    assert LayerDeclaration("norm", {"weight": weight}, build).module(SHARED).weight.shape == (2,)
    with pytest.raises(LayoutError, match=r"norm\.bias is declared but not allocated; allocate it from the Shards of"):
        LayerDeclaration("norm", {"weight": weight, "bias": weight}, build).module(SHARED)
    with pytest.raises(LayoutError, match=r"norm\.weight is allocated but not declared; declare it in the family, or"):
        LayerDeclaration("norm", {"bias": weight}, build).module(SHARED)
