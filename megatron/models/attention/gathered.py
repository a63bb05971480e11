"""Attention of ranks that share rows of tokens: each gathers the rows, and keeps its own places of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import all_places, own_places
from megatron.parallel.phase_clock import WAIT


class _Gather(torch.autograd.Function):
    """[B, n, S/cp, d] -> [B, n, S, d]; backward sums the gradients over ranks, and keeps own places."""

    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        return all_places(x.movedim(2, 0), ctx).movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        ctx: ParallelContext = function.ctx
        grad = grad.clone(memory_format=torch.contiguous_format)
        with ctx.state.clock.phase(WAIT):
            dist.all_reduce(grad, group=ctx.context_group)
        return own_places(grad, ctx, dim=2), None


class GatheredAttention:
    """The device's kernel over whole rows."""

    def __init__(self, kernel: Callable[..., Tensor], ctx: ParallelContext) -> None:
        self._kernel, self._ctx = kernel, ctx

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        q, k, v = (_Gather.apply(x, self._ctx) for x in (q, k, v))
        return own_places(self._kernel(q, k, v, packing, dropout), self._ctx, dim=2)
