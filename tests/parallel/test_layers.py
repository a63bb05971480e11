"""Layers over tensor-parallel ranks equal the dense layer, forward and in every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import LayerNorm, VocabParallelEmbedding
from megatron.parallel.layout import LayoutError
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.operators import weight_gradient
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.shards import Shard, shard_of
from tests.parallel import on_ranks
from tests.parallel.on_ranks import declared
from tests.ranks import RankPools

S, B, H, INNER = 8, 3, 12, 20
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
Array = np.ndarray[Any, Any]


def random(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def on(ranks: RankPools, tp: int, function: Any, *arguments: Any) -> list[Any]:
    return [function(*arguments)] if tp == 1 else ranks(tp)(function, *arguments)


def rows_of(parts: list[Array], sequence_parallel: bool) -> Array:
    """The residual stream from what every rank holds of it."""
    if sequence_parallel:
        return np.concatenate(parts)
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


def assert_same(actual: Array, expected: torch.Tensor | None) -> None:
    assert expected is not None
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_column_then_row_equals_dense(ranks: RankPools, tp: int, sequence_parallel: bool, bias: bool) -> None:
    weights = {"column.weight": random(2 * INNER, H, seed=0), "row.weight": random(H, INNER, seed=1)}
    if bias:
        weights |= {"column.bias": random(2 * INNER, seed=2), "row.bias": random(H, seed=3)}
    x, slope = random(S, B, H, seed=4), random(S, B, H, seed=5)
    parts = on(ranks, tp, on_ranks.gated_mlp, tp, sequence_parallel, weights, x, slope)

    dense = {name: torch.from_numpy(weight).requires_grad_() for name, weight in weights.items()}
    hidden = torch.from_numpy(x).requires_grad_()
    gate, up = F.linear(hidden, dense["column.weight"], dense.get("column.bias")).chunk(2, dim=-1)
    output = F.linear(F.silu(gate) * up, dense["row.weight"], dense.get("row.bias"))
    (output * torch.from_numpy(slope)).sum().backward()

    assert_same(rows_of([part["output"] for part in parts], sequence_parallel), output)
    assert_same(rows_of([part["hidden"] for part in parts], sequence_parallel), hidden.grad)
    model = on_ranks.GatedMLP(H, INNER, bias=bias, ctx=ParallelContext.single())
    assert set(dict(model.named_parameters())) == set(weights)
    for name, parameter in model.named_parameters():
        pieces = [torch.from_numpy(part[name]) for part in parts]
        if shard_of(parameter).dim is None:
            rows_of([part[name] for part in parts], sequence_parallel=False)
        assert_same(shard_of(parameter).assemble(pieces).numpy(), dense[name].grad)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_vocabulary_embedding_equals_dense(ranks: RankPools, tp: int, sequence_parallel: bool) -> None:
    vocabulary, padded = 10, 16
    weight, slope = random(vocabulary, H, seed=0), random(S, B, H, seed=1)
    tokens = np.random.default_rng(2).integers(0, vocabulary, (B, S))
    tokens[0, :3] = vocabulary - 1  # the last token, several times
    parts = on(ranks, tp, on_ranks.embedding, tp, sequence_parallel, weight, padded, tokens, slope)

    dense = torch.from_numpy(weight).requires_grad_()
    output = F.embedding(torch.from_numpy(tokens).t(), dense)
    (output * torch.from_numpy(slope)).sum().backward()

    assert_same(rows_of([part[0] for part in parts], sequence_parallel), output)
    gradient = np.concatenate([part[1] for part in parts])
    assert_same(gradient[:vocabulary], dense.grad)
    assert not gradient[vocabulary:].any()  # padding stays as it is


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_norm_gradients_are_whole_on_every_rank(ranks: RankPools, tp: int, sequence_parallel: bool, kind: str) -> None:
    weights = {"weight": random(H, seed=0)} | ({"bias": random(H, seed=1)} if kind == "LayerNorm" else {})
    x, slope = random(S, B, H, seed=2), random(S, B, H, seed=3)
    parts = on(ranks, tp, on_ranks.norm, kind, tp, sequence_parallel, weights, x, slope)

    dense = {name: torch.from_numpy(weight).requires_grad_() for name, weight in weights.items()}
    rows = torch.from_numpy(x)
    if kind == "LayerNorm":
        centred = rows - rows.mean(-1, keepdim=True)
        output = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * dense["weight"] + dense["bias"]
    else:
        output = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * dense["weight"]
    (output * torch.from_numpy(slope)).sum().backward()

    assert_same(rows_of([part["output"] for part in parts], sequence_parallel), output)
    for part in parts:
        for name, weight in dense.items():
            assert_same(part[name], weight.grad)


def test_layers_allocate_what_is_declared() -> None:
    ctx = ParallelContext(tensor_size=2, rank=1)
    weight = Shard((16, 6), dim=0, pieces=(8, 4, 4), std=0.5)
    column = ColumnParallelLinear(declared(weight=weight, bias=Shard((16,), dim=0, pieces=(8, 4, 4))), ctx)
    assert shard_of(column.weight) is weight
    assert column.weight.shape == (8, 6)
    assert column.bias is not None
    assert column.bias.shape == (8,)
    row = RowParallelLinear(declared(weight=Shard((6, 8), dim=1, pieces=(8,), std=0.5)), ctx)
    assert row.weight.shape == (6, 4)
    assert row.bias is None
    vocabulary = Shard((5, 6), dim=0, pieces=(5,), padding=3, std=0.5)
    assert VocabParallelEmbedding(declared(weight=vocabulary), ctx).weight.shape == (4, 6)
    assert LayerNorm(declared(weight=Shard((6,), used_on="stream")), 1e-5, ctx).bias is None


def test_uneven_pieces_are_refused() -> None:
    weight = Shard((14, 8), dim=0, pieces=(8, 6), std=1.0)
    with pytest.raises(LayoutError, match=r"6 rows of .* cannot be split over 4"):
        ColumnParallelLinear(declared(weight=weight), ParallelContext(tensor_size=4))


def test_sequence_parallel_of_one_rank_is_off() -> None:
    assert not on_ranks.context(1, sequence_parallel=True).sequence_parallel
    # and a context that says otherwise changes nothing
    ctx = ParallelContext(sequence_parallel=True)
    layer = on_ranks.GatedMLP(H, INNER, bias=True, ctx=ctx)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    plain = on_ranks.GatedMLP(H, INNER, bias=True, ctx=ParallelContext.single())
    plain.load_state_dict(layer.state_dict())
    x = torch.from_numpy(random(S, B, H, seed=0))
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)


def test_slices_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="10 cannot be split evenly over 4"):
        ParallelContext(tensor_size=4).slice_size(10)


class Sum(GradientSum):
    """Float32 memory with the remains of an earlier step."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.total = torch.full_like(weight, torch.nan, dtype=torch.float32, requires_grad=False)
        self.num_opened = self.num_closed = 0

    def open(self) -> tuple[torch.Tensor, bool]:
        self.num_opened += 1
        return self.total, self.num_opened > 1

    def close(self) -> None:
        self.num_closed += 1


def addmm_in_float32(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, beta: int, out: torch.Tensor
) -> None:
    """What torch.addmm does on CUDA, and on a CPU does not do."""
    product = a.to(dtype) @ b.to(dtype)
    out.copy_(product + total if beta else product)


@pytest.mark.parametrize("device", ["cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("module", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
def test_gradients_go_into_the_sum_of_the_optimizer_unrounded(
    module: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two microbatches; nothing is left for autograd, and the outputs are those without a sum."""
    if device == "cpu":
        monkeypatch.setattr(weight_gradient, "adds_products_in_float32", lambda device: True)
        monkeypatch.setattr(torch, "addmm", addmm_in_float32)
    is_table = module is VocabParallelEmbedding
    dim = int(module is RowParallelLinear)
    shards = declared(weight=Shard((INNER, H), dim=dim, pieces=((INNER, H)[dim],), std=1.0))
    layer = module(shards, ParallelContext.single()).to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator(device).manual_seed(2))
    expected = torch.zeros(INNER, H, dtype=torch.float64)
    plain, into = layer.weight.detach().clone(), Sum(layer.weight)
    for _ in range(2):
        rows = torch.randint(INNER, (B, S), generator=generator)
        inputs = rows if is_table else torch.randn(S, B, H, generator=generator).bfloat16()
        grad = torch.randn(S, B, H if is_table else INNER, generator=generator).bfloat16()
        layer.weight.gradient_sum = into
        output = layer(inputs.to(device))
        output.backward(grad.to(device))
        alike = F.embedding(rows.t().to(device), plain) if is_table else F.linear(inputs.to(device), plain)
        assert torch.equal(output, alike)
        one_hot = F.one_hot(rows.t().flatten(), INNER).double() if is_table else grad.flatten(0, 1).double()
        expected += one_hot.t() @ (grad if is_table else inputs).flatten(0, 1).double()
    assert layer.weight.grad is None
    assert (into.num_opened, into.num_closed) == (2, 2)
    torch.testing.assert_close(into.total.cpu().double(), expected, rtol=1e-5, atol=1e-5)
