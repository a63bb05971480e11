"""Heads for places: each context-parallel rank attends over whole rows, with a share of the heads.

One all-to-all brings queries, keys and values, another takes the context back. Fewer key/value heads than ranks, or a
number that these do not divide, are repeated until each rank has the ones of its query heads.

Shapes: S places of a row, of which L are this rank's, B samples, n query and k key/value heads, cp context-parallel
ranks, d head size.
Source: Jacobs et al. 2023, DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.models.attention.kernels import repeat_heads
from megatron.models.attention.ring import places_of_ranks
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import all_to_all_rows


class HeadExchange:
    """Attention of a kernel for whole rows to this rank's share of the heads."""

    def __init__(self, kernel: Callable[..., Tensor], ctx: ParallelContext) -> None:
        self._kernel, self._ctx = kernel, ctx

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        # the least multiple of k that cp divides; it divides n, as k and cp do
        kv_heads = math.lcm(k.shape[1], self._ctx.context_size)
        k, v = repeat_heads(k, kv_heads), repeat_heads(v, kv_heads)
        context = self._kernel(*_HeadsOfRows.apply(self._ctx, q, k, v), packing, dropout)
        return _RowsOfHeads.apply(self._ctx, context)  # type: ignore[no-any-return]


class _HeadsOfRows(torch.autograd.Function):
    """Tensors [B, heads, L, d] of this rank's rows -> [B, heads / cp, S, d] of its heads."""

    @staticmethod
    def forward(function: Any, ctx: ParallelContext, *parts: Tensor) -> tuple[Tensor, ...]:
        function.ctx = ctx
        return _to_heads(ctx, parts)

    @staticmethod
    @once_differentiable
    def backward(function: Any, *gradients: Tensor) -> Any:
        return None, *_to_rows(function.ctx, gradients)


class _RowsOfHeads(torch.autograd.Function):
    """[B, heads / cp, S, d] of this rank's heads -> [B, heads, L, d] of its rows."""

    @staticmethod
    def forward(function: Any, ctx: ParallelContext, context: Tensor) -> Tensor:
        function.ctx = ctx
        return _to_rows(ctx, (context,))[0]

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return None, _to_heads(function.ctx, (grad,))[0]


def _to_heads(ctx: ParallelContext, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange [B, heads, L, d] for [B, heads / cp, S, d] of each. Collective in the context group."""
    # by token, as the projections have it in memory
    by_rank = [part.permute(2, 0, 1, 3).unflatten(2, (ctx.context_size, -1)).movedim(2, 0) for part in parts]
    message = _joined(by_rank)
    arrived = all_to_all_rows(message, ctx.context_group, ctx)
    length = arrived.shape[0] * arrived.shape[1]
    chunks = {
        place.start: chunk
        for rank, places in enumerate(places_of_ranks(ctx, length))
        for place, chunk in zip(places, arrived[rank].split([len(place) for place in places]), strict=True)
    }
    whole = torch.cat([chunks[start] for start in sorted(chunks)])
    return tuple(part.permute(1, 2, 0, 3) for part in whole.split([part.shape[3] for part in by_rank], 2))


def _to_rows(ctx: ParallelContext, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange [B, heads / cp, S, d] for [B, heads, L, d] of each. Collective in the context group."""
    by_place = [part.permute(2, 0, 1, 3) for part in parts]
    counts = [part.shape[2] for part in by_place]
    length, batch, _, size = by_place[0].shape
    message = parts[0].new_empty((ctx.context_size, length // ctx.context_size, batch, sum(counts), size))
    for target, whole in zip(message.split(counts, 3), by_place, strict=True):
        for own, places in zip(target, places_of_ranks(ctx, length), strict=True):
            torch.cat([whole[place.start : place.stop] for place in places], out=own)
    arrived = all_to_all_rows(message, ctx.context_group, ctx)
    by_rank = arrived.split(counts, 3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3) for part in by_rank)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[cp, L, B, heads, d] of each -> all heads together, copied once."""
    counts = [part.shape[3] for part in parts]
    joined = parts[0].new_empty((*parts[0].shape[:3], sum(counts), parts[0].shape[4]))
    for target, part in zip(joined.split(counts, 3), parts, strict=True):
        target.copy_(part)
    return joined
