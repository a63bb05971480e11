"""The autograd pairs that join tensor-parallel regions to the rest of the model.

Shapes: S sequence, B batch, H hidden, tp tensor-parallel ranks. Tensors are sequence first, [S, B, ...].
Source: Shoeybi et al. 2019 (arXiv:1909.08053), operators f and g; Korthikanti et al. 2022 (arXiv:2205.05198),
operators g and g-bar of sequence parallelism. Autograd does not see the collectives, so a second derivative is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import COMPUTED
from megatron.parallel.layout import LayoutError
from megatron.parallel.phase_clock import WAIT

# torch 2.13 renamed these two; Habana's torch still has the old names
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum over the tensor-parallel ranks; a new tensor, no autograd."""
    ctx.state.checks.partial(x)
    x = x.clone(memory_format=torch.contiguous_format)
    with ctx.state.clock.phase(WAIT):
        dist.all_reduce(x, group=ctx.tensor_group)
    return x


def all_gather_rows(x: Tensor, ctx: ParallelContext) -> Tensor:
    """[S/tp, ...] of each rank -> [S, ...]; no autograd."""
    ctx.state.checks.gathered(x)
    full = x.new_empty((x.shape[0] * ctx.tensor_size, *x.shape[1:]))
    x = x.contiguous()
    with ctx.state.clock.phase(WAIT):
        all_gather_into(full, x, group=ctx.tensor_group)
    return full


def reduce_scatter_rows(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum over ranks, keep own rows: [S, ...] -> [S/tp, ...]; no autograd."""
    if x.shape[0] % ctx.tensor_size:
        raise LayoutError(f"{x.shape[0]} rows cannot be split over {ctx.tensor_size} tensor-parallel ranks")
    ctx.state.checks.partial(x)
    own = x.new_empty((x.shape[0] // ctx.tensor_size, *x.shape[1:]))
    x = x.contiguous()
    with ctx.state.clock.phase(WAIT):
        reduce_scatter_into(own, x, group=ctx.tensor_group)
    return own


def all_to_all_rows(
    x: Tensor,
    group: dist.ProcessGroup | None,
    ctx: ParallelContext,
    *,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Send rows to each rank of the group; return what all sent, in order of rank. No autograd.

    `sent`, `received`: rows to and from each rank; None: as many for each.
    """
    # what is not finite would be on other ranks next
    ctx.state.checks.whole(x, COMPUTED)
    arrived = x.new_empty((len(x) if received is None else sum(received), *x.shape[1:]))
    with ctx.state.clock.phase(WAIT):
        dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return all_reduce(grad, function.ctx), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        return all_reduce(x, ctx)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        return all_gather_rows(x, ctx)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return reduce_scatter_rows(grad, function.ctx), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        return reduce_scatter_rows(x, ctx)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return all_gather_rows(grad, function.ctx), None


def copy_to_tensor_region(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Identity; backward sums the gradient over the tensor-parallel ranks. Operator f.

    For an activation of which each rank goes on to use a part.
    """
    if ctx.tensor_size == 1:
        return x
    return _Copy.apply(x, ctx)


# Not overlapped: what follows a row-parallel product needs its sum. Chunks of product and sum pay where a copy engine
# moves one while the next is multiplied; over gloo each costs 0.5 ms more.
def reduce_from_tensor_region(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum the ranks' partial results; backward is the identity. Operator g."""
    if ctx.tensor_size == 1:
        return x
    return _Reduce.apply(x, ctx)


def gather_from_sequence(x_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """[S/tp, B, H] -> [S, B, H]; backward sums over ranks and keeps own rows."""
    if ctx.tensor_size == 1:
        return x_SBH
    return _GatherSequence.apply(x_SBH, ctx)


def reduce_scatter_to_sequence(partial_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum over ranks and keep own rows: [S, B, H] -> [S/tp, B, H]; backward gathers. Operator g-bar.

    Raises LayoutError if tp does not divide S.
    """
    if ctx.tensor_size == 1:
        return partial_SBH
    return _ReduceScatterSequence.apply(partial_SBH, ctx)


def enter_tensor_region(hidden: Tensor, ctx: ParallelContext) -> Tensor:
    """From the residual stream to what every rank of a layer sees: [S, B, H] on each."""
    if ctx.sequence_parallel:
        return gather_from_sequence(hidden, ctx)
    return copy_to_tensor_region(hidden, ctx)


def leave_tensor_region(partial_SBH: Tensor, ctx: ParallelContext) -> Tensor:
    """From the ranks' partial sums back to the residual stream, [S, B, H] or [S/tp, B, H]."""
    if ctx.sequence_parallel:
        return reduce_scatter_to_sequence(partial_SBH, ctx)
    return reduce_from_tensor_region(partial_SBH, ctx)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        # gathering is along the first dimension: bring the channels there and back
        return all_gather_rows(x.movedim(-1, 0), ctx).movedim(0, -1)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return reduce_scatter_rows(grad.movedim(-1, 0), function.ctx).movedim(0, -1), None


# Fewer key/value heads than ranks are gathered as activations: a replicated head would need its gradient summed over
# a subgroup and counted once in the norm.
def gather_channels(x: Tensor, ctx: ParallelContext) -> Tensor:
    """[..., C/tp] of each rank -> [..., C]; backward sums over ranks and keeps own channels."""
    if ctx.tensor_size == 1:
        return x
    return _GatherHeads.apply(x, ctx)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of tokens that context-parallel ranks share. What is of whole rows is alike on all of them: a loss of whole rows
# counts once on each, and its gradient there by the rank's own places alone. DeepSpeed takes the mean of gradients over
# these ranks too, so each one's part is multiplied by their number.


def own_places(whole: Tensor, ctx: ParallelContext, dim: int = 0) -> Tensor:
    """Return the places of rows that this rank computes, in their order: [..., S, ...] -> [..., S/cp, ...]."""
    if ctx.context_size == 1:
        return whole
    return torch.cat([whole.narrow(dim, part.start, len(part)) for part in ctx.places(whole.shape[dim])], dim)


def own_numbers(places_K: Tensor, num_rows: int, own_length: int, ctx: ParallelContext) -> Tensor:
    """Return the numbers, s * B + b, among this rank's places of those of whole rows: [K] -> [K]; -1: it has it not.

    `num_rows`: B; `own_length`: the places of a row that this rank computes. Waits for nothing.
    """
    if ctx.context_size == 1:
        return places_K
    place_K, row_K = places_K // num_rows, places_K % num_rows
    own_K, begin = torch.full_like(places_K, -1), 0
    for part in ctx.places(own_length * ctx.context_size):
        is_inside = (place_K >= part.start) & (place_K < part.stop)
        own_K = torch.where(is_inside, (place_K - part.start + begin) * num_rows + row_K, own_K)
        begin += len(part)
    return own_K


def own_rows(whole_S: Tensor, ctx: ParallelContext) -> Tensor:
    """Return this rank's rows of the residual stream, of those of whole rows: [S, ...] -> [rows, ...]."""
    own = own_places(whole_S, ctx)
    if not ctx.sequence_parallel:
        return own
    return own.chunk(ctx.tensor_size)[ctx.tensor_rank]


def all_places(own_S: Tensor, ctx: ParallelContext) -> Tensor:
    """Join the places of all ranks to whole rows: [S/cp, ...] -> [S, ...]; no autograd."""
    own_S = own_S.contiguous()
    parts = [torch.empty_like(own_S) for _ in range(ctx.context_size)]
    with ctx.state.clock.phase(WAIT):
        dist.all_gather(parts, own_S, group=ctx.context_group)
    firsts, lasts = zip(*(part.chunk(2) for part in parts), strict=True)
    # a rank has a stretch from either end
    return torch.cat([*firsts, *reversed(lasts)])


class _GatherPlaces(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, own_S: Tensor, ctx: ParallelContext) -> Tensor:
        function.ctx = ctx
        ctx.state.checks.whole(own_S, COMPUTED)
        return all_places(own_S, ctx)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad_S: Tensor) -> Any:
        return own_places(grad_S, function.ctx) * function.ctx.context_size, None


class _SumOverContext(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        ctx.state.checks.whole(x, COMPUTED)
        function.size = ctx.context_size
        x = x.clone()
        with ctx.state.clock.phase(WAIT):
            dist.all_reduce(x, group=ctx.context_group)
        return x

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return grad * function.size, None


class _MeanOverContext(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
        ctx.state.checks.whole(x, COMPUTED)
        x = x.clone()
        with ctx.state.clock.phase(WAIT):
            dist.all_reduce(x, group=ctx.context_group)
        return x / ctx.context_size

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        return grad, None


def gather_places(own_S: Tensor, ctx: ParallelContext) -> Tensor:
    """[S/cp, ...] -> [S, ...], alike on all context-parallel ranks; backward keeps own places, times their number."""
    if ctx.context_size == 1:
        return own_S
    return _GatherPlaces.apply(own_S, ctx)


def mean_over_context(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Return the mean over the context-parallel ranks, alike on all; backward is the identity."""
    if ctx.context_size == 1:
        return x
    return _MeanOverContext.apply(x, ctx)


def sum_over_context(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Return the sum of the context-parallel ranks' parts, alike on all; backward is that of the own part, times their
    number."""
    if ctx.context_size == 1:
        return x
    return _SumOverContext.apply(x, ctx)
