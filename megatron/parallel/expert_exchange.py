"""Ways of tokens to their experts and back: sorted by expert, sent to the ranks that hold these, and joined again.

A device whose software compiles a graph for each shape has ways whose sizes the router does not decide (below), so that
the host waits for nothing either: with a capacity each expert takes that many slots of every rank, filled or not;
without, it computes the tokens of all ranks, and those that did not choose it weigh 0.

Shapes: N tokens of this rank, E experts, of which each passes through K, H channels, n = N x K less what is dropped.
All sums over a token's experts are in one order, so equal layouts give equal results.
Sources: the dropless dispatch of MegaBlocks (Gale et al. 2022, arXiv:2211.15841); expert parallelism and slots of
GShard (Lepikhin et al. 2020, arXiv:2006.16668); all tokens through each expert as optimum-habana's modeling_mixtral.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import all_gather_rows, all_to_all_rows, autograd_pair
from megatron.parallel.phase_clock import WAIT


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Ways of the tokens of one pass through a layer of experts."""

    ctx: ParallelContext
    num_choices: int
    """N x K."""
    order_n: Tensor
    """Choices [token][k] sorted by expert, without those that are dropped."""
    num_experts: int
    """Experts of this rank."""
    counts: Tensor
    """Tokens to each expert of all ranks, int64 [E]."""
    arriving: Tensor
    """Tokens from each rank for each expert of this one, int64 [source x expert]."""

    @classmethod
    def of(cls, experts_NK: Tensor, num_experts: int, ctx: ParallelContext, kept_NK: Tensor | None = None) -> Dispatch:
        """Return the ways to the chosen experts. Collective in the expert group.

        `kept_NK`: False for choices that are dropped; their number is waited for.
        """
        choices = experts_NK.flatten()
        if kept_NK is not None:
            # behind all experts
            choices = choices.where(kept_NK.flatten(), num_experts)
        counts = choices.new_zeros(num_experts + 1).scatter_add_(0, choices, torch.ones_like(choices))[:num_experts]
        arriving = counts
        if ctx.expert_size > 1:
            arriving = torch.empty_like(counts)
            with ctx.state.clock.phase(WAIT):
                dist.all_to_all_single(arriving, counts, group=ctx.expert_group)
        order = choices.argsort(stable=True)
        if kept_NK is not None:
            order = order[: int(counts.sum())]
        return cls(ctx, choices.numel(), order, num_experts // ctx.expert_size, counts, arriving)

    @property
    def sizes(self) -> list[int]:
        """Tokens for each expert of this rank. Waits for the device."""
        return [sum(self._received[index :: self.num_experts]) for index in range(self.num_experts)]

    @property
    def ends(self) -> Tensor:
        """Ends of the tokens of each expert of this rank, int32."""
        return self.arriving.view(-1, self.num_experts).sum(0).cumsum(0).int()

    @property
    def _sent(self) -> list[int]:
        """Tokens to each rank. Waits for the device, as sizes of messages are the host's."""
        counts = self._host_counts[0]
        return [sum(counts[first : first + self.num_experts]) for first in self._starts()]

    @property
    def _received(self) -> list[int]:
        return self._host_counts[1]

    @functools.cached_property
    def _host_counts(self) -> list[list[int]]:
        counts: list[list[int]] = torch.stack([self.counts, self.arriving]).tolist()
        return counts

    def to_experts(self, tokens_NH: Tensor) -> Tensor:
        """Return the tokens for this rank's experts, those of one expert after the other. Collective."""
        topk = self.num_choices // tokens_NH.shape[0]
        tokens = _Sort.apply(tokens_NH, self.order_n, topk)
        if self.ctx.expert_size == 1:
            return tokens  # type: ignore[no-any-return]
        tokens = _AllToAll.apply(tokens, self._sent, self._from_ranks(), self.ctx)
        return _reordered(tokens, self._received, self.ctx.expert_size, self.num_experts)

    def from_experts(self, outputs: Tensor, weights_NK: Tensor, *, is_trained: bool) -> Tensor:
        """Return the sum of each token's outputs, weighed: [N, H]. Collective.

        `is_trained`: a parameter of some expert is, on whichever rank.
        """
        num_tokens, topk = weights_NK.shape
        if self.ctx.expert_size > 1:
            by_expert = [self._received[at + expert] for expert in range(self.num_experts) for at in self._starts()]
            outputs = _reordered(outputs, by_expert, self.num_experts, self.ctx.expert_size)
            if is_trained and torch.is_grad_enabled() and not outputs.requires_grad:
                # the backward pass sends too: all ranks must have one, those whose own experts are frozen as well
                outputs = outputs.detach().requires_grad_()
            outputs = _AllToAll.apply(outputs, self._from_ranks(), self._sent, self.ctx)
        weighed = outputs * weights_NK.flatten()[self.order_n].unsqueeze(1)
        spread = _Unsort.apply(weighed.to(outputs.dtype), self.order_n, self.num_choices)
        return spread.view(num_tokens, topk, -1).sum(1)  # type: ignore[no-any-return]

    def _from_ranks(self) -> list[int]:
        return [sum(self._received[at : at + self.num_experts]) for at in self._starts()]

    def _starts(self) -> range:
        """Indices in counts of all ranks at which those of each begin."""
        return range(0, len(self.counts), self.num_experts)


def _reordered(tokens: Tensor, sizes: list[int], num_rows: int, num_columns: int) -> Tensor:
    """Return stretches of tokens that lie row by row, column by column."""
    if 1 in (num_rows, num_columns):
        return tokens
    stretches = tokens.split(sizes)
    return torch.cat([stretches[row * num_columns + at] for at in range(num_columns) for row in range(num_rows)])


def _spread(sorted_nH: Tensor, order_n: Tensor, num_choices: int) -> Tensor:
    """Put each row at its number of `order_n`; what is dropped is 0: [num_choices, H]."""
    allocate = torch.empty if len(order_n) == num_choices else torch.zeros
    spread = allocate((num_choices, sorted_nH.shape[1]), dtype=sorted_nH.dtype, device=sorted_nH.device)
    return spread.index_copy_(0, order_n, sorted_nH)


# torch's own gradient of an index adds up in whatever order the device finishes
class _Sort(torch.autograd.Function):
    """[N, H] -> [n, H]: token i stands at its choices i x K ... i x K + K - 1."""

    @staticmethod
    def forward(function: Any, tokens_NH: Tensor, order_n: Tensor, topk: int) -> Tensor:
        function.save_for_backward(order_n)
        function.shape = tokens_NH.shape[0], topk
        return tokens_NH.index_select(0, order_n // topk)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (order_n,), (num_tokens, topk) = function.saved_tensors, function.shape
        return _spread(grad, order_n, num_tokens * topk).view(num_tokens, topk, -1).sum(1), None, None


class _Unsort(torch.autograd.Function):
    """[n, H] -> [N x K, H]"""

    @staticmethod
    def forward(function: Any, sorted_nH: Tensor, order_n: Tensor, num_choices: int) -> Tensor:
        function.save_for_backward(order_n)
        return _spread(sorted_nH, order_n, num_choices)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (order_n,) = function.saved_tensors
        return grad.index_select(0, order_n), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, tokens: Tensor, sent: list[int], received: list[int], ctx: ParallelContext) -> Tensor:
        function.sizes, function.ctx = (sent, received), ctx
        return all_to_all_rows(tokens, ctx.expert_group, ctx, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (sent, received), ctx = function.sizes, function.ctx
        return all_to_all_rows(grad, ctx.expert_group, ctx, sent=received, received=sent), None, None, None


def exchange_evenly(rows: Tensor, ctx: ParallelContext) -> Tensor:
    """Send the i-th of equal parts to the i-th rank of the expert group; return what all sent. Collective."""
    sizes = [len(rows) // ctx.expert_size] * ctx.expert_size
    return _AllToAll.apply(rows, sizes, sizes, ctx)  # type: ignore[no-any-return]


def _share(tokens: Tensor, ctx: ParallelContext) -> Tensor:
    return tokens.chunk(ctx.tensor_size)[ctx.tensor_rank].clone()


def _own_gradient(grad: Tensor, ctx: ParallelContext) -> Tensor:
    return grad.chunk(ctx.tensor_size)[ctx.tensor_rank]


# of tokens that all tensor-parallel ranks hold, and of gradients that all of them hold
_own_share = autograd_pair(_share, all_gather_rows)
_all_shares = autograd_pair(all_gather_rows, _own_gradient)


def own_tokens(tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """[N, ...] that all tensor-parallel ranks hold -> this rank's share, [N/tp, ...], rounded up with zeros."""
    missing = -len(tokens) % ctx.tensor_size
    if missing:
        tokens = torch.cat([tokens, tokens.new_zeros((missing, *tokens.shape[1:]))])
    return _own_share(tokens, ctx)


def all_tokens(tokens: Tensor, num_tokens: int, ctx: ParallelContext) -> Tensor:
    """The shares of `own_tokens` -> [num_tokens, ...] on all tensor-parallel ranks."""
    return _all_shares(tokens, ctx)[:num_tokens]


# ---------------------------------------------------------------------------------------------------------------------
# Sizes that the router does not decide.

Experts = Sequence[Callable[[Tensor], Tensor]]
"""Those of this rank, [n, H] -> [n, H]."""


def through_all(
    tokens_NH: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    experts: Experts,
    ctx: ParallelContext,
    *,
    is_trained: bool,
) -> Tensor:
    """Return the weighed sum of the outputs of each token's experts, [N, H]. Collective in the expert group.

    `is_trained`: a parameter of some expert is, on whichever rank.
    """
    size, num_tokens = ctx.expert_size, len(tokens_NH)
    factors = weights_NK.new_zeros((num_tokens, size * len(experts))).scatter(1, experts_NK, weights_NK)
    tokens = tokens_NH
    if size > 1:
        # all ranks receive the tokens, and each the columns of its own experts
        tokens = exchange_evenly(tokens.expand(size, -1, -1).reshape(size * num_tokens, -1), ctx)
        columns = factors.view(num_tokens, size, len(experts)).transpose(0, 1)
        factors = exchange_evenly(columns.reshape(size * num_tokens, -1), ctx)
    total: Tensor | None = None
    for expert, factor in zip(experts, factors.unbind(1), strict=True):
        weighed = expert(tokens) * factor.unsqueeze(1)
        total = weighed if total is None else total + weighed
    assert total is not None
    output = _returned(total.to(tokens.dtype), ctx, is_trained=is_trained)
    return output if size == 1 else output.view(size, num_tokens, -1).sum(0)


def through_slots(
    tokens_NH: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    kept_NK: Tensor,
    slots: int,
    experts: Experts,
    ctx: ParallelContext,
    *,
    is_trained: bool,
) -> Tensor:
    """The same of the choices that are kept: at most `slots` of each expert. Collective in the expert group."""
    num_tokens, topk = experts_NK.shape
    size, num_choices = ctx.expert_size, num_tokens * topk
    num_slots = size * len(experts) * slots
    takes_NE = experts_NK.new_zeros((num_tokens, size * len(experts)))
    takes_NE = takes_NE.scatter_(1, experts_NK, kept_NK.to(experts_NK.dtype))
    place_NK = (takes_NE.cumsum(0) - 1).gather(1, experts_NK)
    # what is dropped shares the slot behind all others, which nothing reads
    slot_of_choice = torch.where(kept_NK, experts_NK * slots + place_NK, num_slots).flatten()
    choice_of_slot = slot_of_choice.new_full((num_slots + 1,), num_choices)
    numbers = torch.arange(num_choices, dtype=slot_of_choice.dtype, device=slot_of_choice.device)
    choice_of_slot = choice_of_slot.scatter_(0, slot_of_choice, numbers)[:-1]

    rows = _Rows.apply(tokens_NH, choice_of_slot // topk, slot_of_choice, topk)
    if size > 1:
        rows = exchange_evenly(rows, ctx)
    # from each rank, for each expert
    stretches = rows.view(size, len(experts), slots, -1).unbind(1)
    outputs = [expert(own.reshape(size * slots, -1)) for expert, own in zip(experts, stretches, strict=True)]
    computed = torch.stack([output.view(size, slots, -1) for output in outputs], dim=1)
    computed = _returned(computed.view(num_slots, -1), ctx, is_trained=is_trained)
    spread = _Rows.apply(computed, slot_of_choice, choice_of_slot, 1)
    weighed = spread * weights_NK.flatten().unsqueeze(1)
    return weighed.to(computed.dtype).view(num_tokens, topk, -1).sum(1)  # type: ignore[no-any-return]


def _returned(outputs: Tensor, ctx: ParallelContext, *, is_trained: bool) -> Tensor:
    if ctx.expert_size == 1:
        return outputs
    if is_trained and torch.is_grad_enabled() and not outputs.requires_grad:
        # as above: all ranks must have a backward pass
        outputs = outputs.detach().requires_grad_()
    return exchange_evenly(outputs, ctx)


class _Rows(torch.autograd.Function):
    """[n, H] -> [m, H], the rows of these numbers; n is a row of zeros.

    `back`: where each row went, `copies` numbers a row, m for nowhere. So the backward pass is an index too: torch's
    own adds up in whatever order the device finishes.
    """

    @staticmethod
    def forward(function: Any, rows: Tensor, numbers: Tensor, back: Tensor, copies: int) -> Tensor:
        function.save_for_backward(back)
        function.copies = copies
        return _with_zeros(rows).index_select(0, numbers)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (back,) = function.saved_tensors
        summed = _with_zeros(grad).index_select(0, back)
        return summed.view(-1, function.copies, grad.shape[1]).sum(1), None, None, None


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
