"""The autograd pairs that join tensor-parallel regions to the rest of the model.

Shapes: S sequence, B batch, H hidden, tp tensor-parallel ranks. Tensors are sequence first, [S, B, ...].
Source: Shoeybi et al. 2019 (arXiv:1909.08053), operators f and g; Korthikanti et al. 2022 (arXiv:2205.05198),
operators g and g-bar of sequence parallelism. Autograd does not see the collectives, so a second derivative is refused.
"""

from __future__ import annotations

from collections.abc import Callable
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

Mapping = Callable[[Tensor, ParallelContext], Tensor]
"""Tensor of a rank -> tensor of a rank, by what the ranks exchange."""


def all_reduce(x: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum over the tensor-parallel ranks; a new tensor, no autograd."""
    ctx.state.checks.partial(x)
    x = x.clone(memory_format=torch.contiguous_format)
    with ctx.state.clock.phase(WAIT):
        dist.all_reduce(x, group=ctx.tensor_group)
    return x


def of_all_ranks(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensor of each rank of the group, in order of rank; no autograd."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


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


def autograd_pair(compute: Mapping, of_gradient: Mapping, *, over: str = "tensor_size") -> Mapping:
    """Return `compute` with `of_gradient` as its backward pass; where the size `over` is 1, the identity."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(function: Any, x: Tensor, ctx: ParallelContext) -> Tensor:
            function.ctx = ctx
            return compute(x, ctx)

        @staticmethod
        @once_differentiable
        def backward(function: Any, grad: Tensor) -> Any:
            return of_gradient(grad, function.ctx), None

    # as profiles show the two passes; torch makes the second class from the first
    Pair.__name__ = compute.__name__.strip("_")
    Pair._backward_cls.__name__ = f"{of_gradient.__name__.strip('_')}Backward"

    def pair(x: Tensor, ctx: ParallelContext) -> Tensor:
        if getattr(ctx, over) == 1:
            return x
        return Pair.apply(x, ctx)

    return pair


def _alias(x: Tensor, ctx: ParallelContext) -> Tensor:
    return x.view_as(x)


def _itself(grad: Tensor, ctx: ParallelContext) -> Tensor:
    return grad


copy_to_tensor_region = autograd_pair(_alias, all_reduce)
"""Identity; backward sums the gradient over the tensor-parallel ranks. Operator f.

For an activation of which each rank goes on to use a part.
"""
# Not overlapped: what follows a row-parallel product needs its sum. Chunks of product and sum pay where a copy engine
# moves one while the next is multiplied; over gloo each costs 0.5 ms more.
reduce_from_tensor_region = autograd_pair(all_reduce, _itself)
"""Sum the ranks' partial results; backward is the identity. Operator g."""
gather_from_sequence = autograd_pair(all_gather_rows, reduce_scatter_rows)
"""[S/tp, B, H] -> [S, B, H]; backward sums over ranks and keeps own rows."""
reduce_scatter_to_sequence = autograd_pair(reduce_scatter_rows, all_gather_rows)
"""Sum over ranks and keep own rows: [S, B, H] -> [S/tp, B, H]; backward gathers. Operator g-bar.

Raises LayoutError if tp does not divide S.
"""


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


# gathering is along the first dimension: channels are brought there and back
def _gathered_channels(x: Tensor, ctx: ParallelContext) -> Tensor:
    return all_gather_rows(x.movedim(-1, 0), ctx).movedim(0, -1)


def _own_channels_of_sum(grad: Tensor, ctx: ParallelContext) -> Tensor:
    return reduce_scatter_rows(grad.movedim(-1, 0), ctx).movedim(0, -1)


# Fewer key/value heads than ranks are gathered as activations: a replicated head would need its gradient summed over
# a subgroup and counted once in the norm.
gather_channels = autograd_pair(_gathered_channels, _own_channels_of_sum)
"""[..., C/tp] of each rank -> [..., C]; backward sums over ranks and keeps own channels."""


def _whole_vocabulary(own_NV: Tensor, ctx: ParallelContext) -> Tensor:
    ctx.state.checks.partial(own_NV)
    with ctx.state.clock.phase(WAIT):
        return torch.cat(of_all_ranks(own_NV, ctx.tensor_group), -1)


def _own_columns(grad_NV: Tensor, ctx: ParallelContext) -> Tensor:
    return grad_NV.chunk(ctx.tensor_size, -1)[ctx.tensor_rank]


gather_vocabulary = autograd_pair(_whole_vocabulary, _own_columns)
"""[N, V/tp] of each rank -> [N, V], for a loss that all ranks compute alike; backward keeps own columns."""


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
    with ctx.state.clock.phase(WAIT):
        parts = of_all_ranks(own_S, ctx.context_group)
    firsts, lasts = zip(*(part.chunk(2) for part in parts), strict=True)
    # a rank has a stretch from either end
    return torch.cat([*firsts, *reversed(lasts)])


def _checked_places(own_S: Tensor, ctx: ParallelContext) -> Tensor:
    ctx.state.checks.whole(own_S, COMPUTED)
    return all_places(own_S, ctx)


def _sum(x: Tensor, ctx: ParallelContext) -> Tensor:
    ctx.state.checks.whole(x, COMPUTED)
    x = x.clone()
    with ctx.state.clock.phase(WAIT):
        dist.all_reduce(x, group=ctx.context_group)
    return x


def _mean(x: Tensor, ctx: ParallelContext) -> Tensor:
    return _sum(x, ctx) / ctx.context_size


def _times_size(grad: Tensor, ctx: ParallelContext) -> Tensor:
    return grad * ctx.context_size


def _own_times_size(grad_S: Tensor, ctx: ParallelContext) -> Tensor:
    return own_places(grad_S, ctx) * ctx.context_size


gather_places = autograd_pair(_checked_places, _own_times_size, over="context_size")
"""[S/cp, ...] -> [S, ...], alike on all context-parallel ranks; backward keeps own places, times their number."""
mean_over_context = autograd_pair(_mean, _itself, over="context_size")
"""Mean over the context-parallel ranks, alike on all; backward is the identity."""
sum_over_context = autograd_pair(_sum, _times_size, over="context_size")
"""Sum of the context-parallel ranks' parts, alike on all; backward is that of the own part, times their number."""
