"""Linear, embedding and normalisation layers over tensor-parallel ranks.

Shapes: S sequence, B batch, H hidden, V padded vocabulary, tp tensor-parallel ranks. The residual stream is
[S, B, H], or [S/tp, B, H] under sequence parallelism ("rows" below).
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import (
    all_gather_into,
    all_gather_rows,
    leave_tensor_region,
    reduce_from_tensor_region,
    reduce_scatter_into,
    reduce_scatter_to_sequence,
    replicated_parameter,
)
from megatron.parallel.shards import Shard, alias, shard_of, sharded_parameter


class _ColumnLinear(torch.autograd.Function):
    """x @ W^T + b from the residual stream, with the backward's communication behind its matrix products.

    Forward keeps only this rank's rows of x under sequence parallelism and gathers them again in backward, as
    Korthikanti et al. do: the gathered copy would undo the memory that sequence parallelism saves.
    """

    @staticmethod
    def forward(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        function.ctx, function.has_bias = ctx, bias is not None
        function.save_for_backward(x, weight)
        return F.linear(all_gather_rows(x, ctx) if ctx.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(function: Any, grad: Tensor) -> Any:
        x, weight = function.saved_tensors
        ctx: ParallelContext = function.ctx
        grad = grad.contiguous()
        gathering = None
        if ctx.sequence_parallel:
            full = x.new_empty((x.shape[0] * ctx.tensor_size, *x.shape[1:]))
            gathering = all_gather_into(full, x.contiguous(), group=ctx.tensor_group, async_op=True)
        else:
            full = x
        grad_full = grad @ weight
        if gathering is not None:
            gathering.wait()
            grad_x = torch.empty_like(x)
            reducing = reduce_scatter_into(grad_x, grad_full, group=ctx.tensor_group, async_op=True)
        else:
            grad_x = grad_full
            reducing = dist.all_reduce(grad_x, group=ctx.tensor_group, async_op=True)
        rows = grad.flatten(0, -2)
        grad_weight = rows.t() @ full.flatten(0, -2) if function.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if function.has_bias and function.needs_input_grad[2] else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None


class ColumnParallelLinear(nn.Module):
    """[rows, B, in] -> [S, B, out/tp]: each rank computes its part of the output channels.

    `pieces` are the output sizes fused in the weight (q, k, v; gate, up); each is cut evenly over the ranks.
    Raises LayoutError if tp does not divide each of them.
    """

    def __init__(self, in_size: int, pieces: Sequence[int], *, bias: bool, std: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        out_size = sum(pieces)
        weight = Shard((out_size, in_size), dim=0, pieces=tuple(pieces), std=std)
        self.weight = sharded_parameter(weight, ctx.tensor_size)
        self.bias = (
            sharded_parameter(Shard((out_size,), dim=0, pieces=tuple(pieces)), ctx.tensor_size) if bias else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        if self.ctx.tensor_size == 1:
            return F.linear(hidden, self.weight, self.bias)
        return _ColumnLinear.apply(hidden, self.weight, self.bias, self.ctx)


class RowParallelLinear(nn.Module):
    """[S, B, in/tp] -> [rows, B, out]: each rank multiplies its part of the input channels; the sums are added up."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, std: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.weight = sharded_parameter(Shard((out_size, in_size), dim=1, pieces=(in_size,), std=std), ctx.tensor_size)
        self.bias = sharded_parameter(Shard((out_size,)), ctx.tensor_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ctx.tensor_size == 1:
            return F.linear(x, self.weight, self.bias)
        hidden = leave_tensor_region(F.linear(x, self.weight), self.ctx)
        # the bias is added once, after the sum over ranks
        return hidden if self.bias is None else hidden + replicated_parameter(self.bias, self.ctx)


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, S] -> [rows, B, H], the vocabulary cut over the ranks; also the (tied) output weight.

    Called with `project`, it hands its weight to the loss instead: `project((hidden, weight))`. The weight is passed
    inside the module's own call so that ZeRO-3 has it gathered.
    """

    def __init__(
        self, vocab_size: int, padded_size: int, hidden_size: int, *, std: float, ctx: ParallelContext
    ) -> None:
        super().__init__()
        self.ctx = ctx
        shard = Shard((vocab_size, hidden_size), dim=0, pieces=(vocab_size,), padding=padded_size - vocab_size, std=std)
        self.weight = sharded_parameter(shard, ctx.tensor_size)

    def forward(self, inputs: Any, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        if project is not None:
            return project((inputs, alias(self.weight)))
        tokens_SB = inputs.t()
        if self.ctx.tensor_size == 1:
            return F.embedding(tokens_SB, self.weight)
        ((start, stop),) = shard_of(self.weight).spans(self.ctx.tensor_rank, self.ctx.tensor_size)
        elsewhere = (tokens_SB < start) | (tokens_SB >= stop)
        own = F.embedding((tokens_SB - start).masked_fill(elsewhere, 0), self.weight)
        own = own.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.ctx.sequence_parallel:
            return reduce_scatter_to_sequence(own, self.ctx)
        return reduce_from_tensor_region(own, self.ctx)


class LayerNorm(nn.Module):
    """LayerNorm over H of the residual stream; its weights are the same on every tensor-parallel rank."""

    def __init__(self, hidden_size: int, epsilon: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx, self.epsilon = ctx, epsilon
        self.weight = sharded_parameter(Shard((hidden_size,), value=1.0), ctx.tensor_size)
        self.bias = sharded_parameter(Shard((hidden_size,)), ctx.tensor_size)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = (replicated_parameter(p, self.ctx) for p in (self.weight, self.bias))
        return F.layer_norm(hidden, hidden.shape[-1:], weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32. Source: Zhang and Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, epsilon: float, ctx: ParallelContext, *, fused_hpu: bool = False) -> None:
        super().__init__()
        self.ctx, self.epsilon, self.fused_hpu = ctx, epsilon, fused_hpu
        self.weight = sharded_parameter(Shard((hidden_size,), value=1.0), ctx.tensor_size)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = replicated_parameter(self.weight, self.ctx)
        if self.fused_hpu:
            from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

            return FusedRMSNorm.apply(hidden, weight, self.epsilon)
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self.epsilon)
