"""A linear layer with adapters: gradients of its formula in float64, and no second array of outputs or of inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from megatron.models.adapters import LowRank
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from megatron.parallel.operators.fused import EAGER
from megatron.parallel.shards import Adapter, LayerDeclaration, Shard, Shards

ROWS, BATCH, IN, PIECES = 48, 2, 128, (64, 64, 128)
SLACK = 0.25
"""Of an array of outputs: A, B and what has R channels."""


def layer(*, column: bool, quantized: bool, dtype: torch.dtype) -> ParallelLinear:
    """Return a layer whose first and last third have an adapter, or of row-parallel form with one."""
    weight = Shard((sum(PIECES), IN), dim=0, pieces=PIECES) if column else Shard((sum(PIECES), IN), dim=1, pieces=(IN,))
    weight = dataclasses.replace(weight, std=0.3, trained=False, quantized=quantized)
    bias = Shard((sum(PIECES),), dim=0, pieces=PIECES) if column else Shard((sum(PIECES),), used_on="stream")
    declared = LayerDeclaration("test", {"base.weight": weight, "base.bias": bias}, build=nn.Module)
    adapters = (Adapter("_q", 0, 1, 3, 0.7), Adapter("_v", 2, 3, 2, 1.5)) if column else (Adapter("", 0, 1, 3, 0.7),)
    declared = declared.with_method("base", LowRank(adapters, 0.0, use_dora=False))
    cls = ColumnParallelLinear if column else RowParallelLinear
    found = cls(Shards(declared, "base."), ParallelContext.single()).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if quantized:
        found.quantized.initialise(1)
    return found


def formula(module: ParallelLinear, x: Tensor) -> Tensor:
    weight = module.quantized.dense(x.dtype) if hasattr(module, "quantized") else module.weight.detach()
    output = F.linear(x, weight, module.bias)
    method: Any = module.method
    for adapter in method.adapters:
        a, b = (module.get_parameter(f"lora_{part}{adapter.suffix}") for part in "AB")
        start, rows = sum(PIECES[: adapter.first]) if adapter.suffix else 0, len(b)
        output = output + F.pad(adapter.scale * (x @ a.t()) @ b.t(), (start, len(weight) - start - rows))
    return output


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("quantized", [False, True])
def test_outputs_and_gradients_are_those_of_the_formula(column: bool, quantized: bool) -> None:
    module = layer(column=column, quantized=quantized, dtype=torch.float64)
    x = torch.randn(ROWS, BATCH, IN, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(ROWS, BATCH, sum(PIECES), dtype=torch.float64)
    trained = {"x": x} | {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert len(trained) == (6 if column else 4)
    expected = formula(module, x)
    gradients = torch.autograd.grad(expected, list(trained.values()), grad)
    output = module(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for (name, tensor), theirs in zip(trained.items(), gradients, strict=True):
        (found,) = torch.autograd.grad(output, tensor, grad, retain_graph=True)
        torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-11, msg=name)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters_are_added_in_the_memory_of_the_base_layers_results(dropout: float) -> None:
    module: Any = layer(column=True, quantized=False, dtype=torch.float32)
    module.method.dropout = dropout
    x = torch.randn(1024, BATCH, IN, requires_grad=True)
    with LiveBytes([x, *module.parameters()]) as tracker:
        before = tracker.now + x.nbytes * 2 * bool(dropout)  # the dropped input, and its mask
        output = module(x)
        assert tracker.peak - before < output.nbytes * (1 + SLACK)
        if not dropout:
            grad = torch.ones_like(output)
            before = tracker.peak = tracker.now
            output.backward(grad)
            assert tracker.peak - before < x.nbytes * (1 + SLACK)


def test_a_frozen_norm_makes_no_gradient_of_its_weight() -> None:
    x, weight = torch.randn(5, 7, requires_grad=True), torch.ones(7)
    EAGER.rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
