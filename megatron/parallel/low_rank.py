"""Linear layers with low-rank adapters (models/adapters.py says which have some).

Shapes: S sequence, B batch, R the ranks of a layer's adapters together, tp tensor-parallel ranks; "rows" as in
linear.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import LinearMethod, ParallelLinear
from megatron.parallel.mappings import enter_tensor_region
from megatron.parallel.shards import Shard


class LowRankMethod(LinearMethod):
    """The base layer's output plus that of its adapters, with dropout on their input.

    The adapters of fused outputs (q, k, v) are computed together: one product with all their A, one with their B.
    """

    def __init__(self, adapters: Sequence[Adapter], dropout: float) -> None:
        self.adapters, self.dropout = tuple(adapters), dropout

    def product(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """Return the partial sums of a row-parallel layer over this rank's channels."""
        low = F.linear(self._dropped(layer, x, sharded=True), self._down(layer))
        return plus(layer.base.product(layer, x), low, self._up(layer))

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        """[rows, B, in] -> [S, B, out/tp]. A sees this rank's rows alone: what is gathered has R channels, not `in`."""
        ctx = layer.ctx
        low = F.linear(self._dropped(layer, hidden, sharded=ctx.sequence_parallel), self._down(layer))
        return plus(layer.base.column(layer, hidden), enter_tensor_region(low, ctx), self._up(layer))

    def _dropped(self, layer: ParallelLinear, x: Tensor, *, sharded: bool) -> Tensor:
        return dropped(x, self.dropout if layer.training else 0.0, layer.ctx, sharded=sharded)

    def _down(self, layer: ParallelLinear) -> Tensor:
        """[R, in]"""
        parts: list[Tensor] = [layer.get_parameter(f"lora_A{adapter.suffix}") for adapter in self.adapters]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _up(self, layer: ParallelLinear) -> Tensor:
        """[out, R], scaled: a block for each adapter, zeros where an output has none."""
        weight, size = layer.weight_shard, layer.ctx.tensor_size
        parts = [layer.get_parameter(f"lora_B{adapter.suffix}") * adapter.scale for adapter in self.adapters]
        if weight.dim != 0:  # its adapters are of the whole output
            return parts[0]
        total, blocks, piece, left = sum(adapter.rank for adapter in self.adapters), [], 0, 0
        for adapter, part in zip(self.adapters, parts, strict=True):
            blocks.append(_no_rows(weight, piece, adapter.first, size, part, total))
            blocks.append(F.pad(part, (left, total - left - adapter.rank)))
            piece, left = adapter.stop, left + adapter.rank
        blocks.append(_no_rows(weight, piece, len(weight.pieces), size, parts[0], total))
        found = [block for block in blocks if block.shape[0]]
        return found[0] if len(found) == 1 else torch.cat(found)


def _no_rows(weight: Shard, first: int, stop: int, tensor_size: int, like: Tensor, total: int) -> Tensor:
    """Zeros for the pieces [first, stop) that have no adapter."""
    return like.new_zeros(sum(weight.pieces[first:stop]) // tensor_size, total)


def dropped(x: Tensor, probability: float, ctx: ParallelContext, *, sharded: bool) -> Tensor:
    """Return x with dropout from the adapters' stream: `sharded`, this tensor-parallel rank's own."""
    if probability == 0.0:
        return x
    with ctx.streams.adapters(sharded=sharded):
        return F.dropout(x, probability)


def plus(output: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """output + low up^T in one pass over the output."""
    return torch.addmm(output.flatten(0, -2), low.flatten(0, -2), up.t()).view(output.shape)
