"""Embedding and normalisation layers over tensor-parallel ranks.

Shapes: S sequence, B batch, H hidden, V padded vocabulary, tp tensor-parallel ranks. The residual stream is
[S, B, H], or [S/tp, B, H] under sequence parallelism ("rows" below).
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel import mappings
from megatron.parallel.context import ParallelContext
from megatron.parallel.low_rank import output_weight, vocabulary_adapters
from megatron.parallel.operators.fused import PLAIN, Kernels
from megatron.parallel.operators.weight_gradient import Lookup, own_sum
from megatron.parallel.shards import Shards, shard_of


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, S] -> [rows, B, H], the vocabulary cut over the ranks; also the (tied) output weight.

    Called with `project`, it passes its weight to the loss instead: `project((hidden, weight))`.
    """

    def __init__(self, shards: Shards, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.weight = shards.allocate("weight", ctx)
        self.adapters = vocabulary_adapters(self, shards, ctx)
        self.logits_cap: float | None = None
        """Soft cap of the logits."""

    def forward(self, inputs: Any, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        # inside the module's own call, so that ZeRO-3 has the weight gathered
        if project is not None:
            return project(output_weight(self, inputs))
        tokens_SB = inputs.t()
        if self.ctx.tensor_size == 1:
            return self._rows(tokens_SB)
        ((start, stop),) = shard_of(self.weight).spans(self.ctx.tensor_rank, self.ctx.tensor_size)
        elsewhere = (tokens_SB < start) | (tokens_SB >= stop)
        # another rank's tokens read row 0, and give zeros to the sum
        own = self._rows((tokens_SB - start).masked_fill(elsewhere, 0))
        own = own.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.ctx.sequence_parallel:
            return mappings.reduce_scatter_to_sequence(own, self.ctx)
        return mappings.reduce_from_tensor_region(own, self.ctx)

    def _rows(self, rows_SB: Tensor) -> Tensor:
        """Return these rows of this rank's part of the table, [S, B, H]."""
        into = own_sum(self.weight)
        if into is None:
            found = F.embedding(rows_SB, self.weight)
        else:
            found = Lookup.apply(rows_SB, self.weight, into)
        if self.adapters is None:
            return found
        return self.adapters.embed(self, rows_SB, found)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, with the bias that is declared."""

    def __init__(self, shards: Shards, epsilon: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = shards.allocate("weight", ctx)
        self.bias: nn.Parameter | None = None
        if "bias" in shards:
            self.bias = shards.allocate("bias", ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, hidden.shape[-1:], self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32. Source: Zhang and Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(
        self,
        shards: Shards,
        epsilon: float,
        ctx: ParallelContext,
        *,
        kernels: Kernels = PLAIN,
        adds_one: bool = False,
    ) -> None:
        """`adds_one`: multiply by 1 + weight, added up in float32."""
        super().__init__()
        self.epsilon, self.kernels, self.adds_one = epsilon, kernels, adds_one
        self.weight = shards.allocate("weight", ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.adds_one:
            return self.kernels.rms_norm(hidden, self.weight, self.epsilon)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        # kernels take a weight of their input's dtype
        return self.kernels.rms_norm(hidden.to(exact), self.weight.to(exact) + 1.0, self.epsilon).to(hidden.dtype)


class StreamNorm(RMSNorm):
    """RMSNorm with the addition to the residual stream before it, of one operator where the kernels have that.

    The gradients of the stream and of the norm are added in the same operator.
    """

    def forward(self, hidden: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return hidden + branch, or hidden without one, and its norm. [rows, B, H]"""
        return self.kernels.add_norm(hidden, branch, self.weight, self.epsilon)


class SplitRMSNorm(RMSNorm):
    """RMSNorm over channels that are cut over the tensor-parallel ranks, [..., C/tp] -> [..., C/tp]."""

    def __init__(self, shards: Shards, epsilon: float, ctx: ParallelContext, *, kernels: Kernels = PLAIN) -> None:
        super().__init__(shards, epsilon, ctx, kernels=kernels)
        self.ctx, self.num_channels = ctx, shards["weight"].shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.ctx.tensor_size == 1:
            return super().forward(hidden)
        exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        total = mappings.reduce_from_tensor_region(exact.square().sum(-1, keepdim=True), self.ctx)
        # each rank's channels depend on the sum of all
        scale = (mappings.copy_to_tensor_region(total, self.ctx) / self.num_channels + self.epsilon).rsqrt()
        return (exact * scale * self.weight).to(hidden.dtype)
