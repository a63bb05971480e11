"""Ring of context-parallel ranks: keys and values travel, while queries stay where they are.

In step t a rank computes with the keys of the rank t before it, while those of the next step are on their way. Each
rank sends its own, and only what its receiver sees, instead of passing on what came: of a causal row that is three
quarters, under a window or documents less, no rank waits for another's computation, and the gradients of its keys come
straight back to it, which adds them in float32 in the order of steps. Blocks are joined by the log-sum-exp of their
scores; the backward pass has that of all keys, so it keeps q, k, v, the context and the log-sum-exp of own rows alone.

Shapes: B samples, n query and k key/value heads, L own rows, d head size, T rows of a message.
Sources: Liu et al. 2023 (arXiv:2310.01889); two chunks a rank from the ends of the row inwards, as zigzag ring
attention and Megatron-LM have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.models.attention.block_kernels import BlockKernels, Inputs, Results
from megatron.models.attention.ring_plan import RingPlan, ScoreBlock, Visibility, plan_ring
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import COMPUTED
from megatron.parallel.mappings import own_places
from megatron.parallel.messages import Exchange, post_exchange
from megatron.parallel.operators import products
from megatron.parallel.phase_clock import WAIT
from megatron.runtime.devices import device_of


class RingAttention:
    """Causal attention of this rank's rows to those of the context group. No dropout."""

    def __init__(self, scores: Scores, ctx: ParallelContext, *, is_plain: bool = False) -> None:
        """`is_plain`: from torch's plain operators alone."""
        self._scores, self._ctx = scores, ctx
        device = device_of(ctx.device.type)
        self._kernels = BlockKernels(scores, device, is_plain=is_plain)
        # its graphs are compiled for shapes, so these must not depend on the documents
        self._masks_documents = device.compiles_shapes
        self._key: Any = None
        self._plan: RingPlan | None = None

    # torch.compile would trace the messages of one plan
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        if dropout:
            raise ValueError("ring attention has no dropout; the options check that")
        work = _Work(self._ctx, self._kernels, self._plan_for(q.shape[2], packing), self._starts(packing))
        return _RingAttention.apply(q, k, v, work)  # type: ignore[no-any-return]

    def _plan_for(self, num_rows: int, packing: Packing | None) -> RingPlan:
        """Return the plan for a microbatch. Kept for the next layers, which need the same."""
        starts = None if packing is None or self._masks_documents else packing.starts_BS
        version = None if starts is None else starts._version  # it counts changes in place
        if self._plan is None or self._key[0] is not starts or self._key[1:] != (version, num_rows):
            length, window = num_rows * self._ctx.context_size, self._scores.window
            sees = Visibility(
                window if self._scores.is_cut(length) else None,
                () if starts is None else tuple(_begins(row) for row in starts.tolist()),
                is_joined=packing is None and self._scores.slopes is None and not self._scores.is_cut(length),
            )
            self._plan = plan_ring(self._ctx.context_rank, places_of_ranks(self._ctx, length), sees)
            self._key = (starts, version, num_rows)
        return self._plan

    def _starts(self, packing: Packing | None) -> Tensor | None:
        """Return the first place that each own query sees, [B, L], where a mask hides other documents."""
        if packing is None or not self._masks_documents:
            return None
        return own_places(packing.starts_BS, self._ctx, dim=1)


def places_of_ranks(ctx: ParallelContext, length: int) -> list[list[range]]:
    """Return the places of a row that each rank of the context group computes."""
    ranks = (ctx.rank_at(context_rank=rank) for rank in range(ctx.context_size))
    return [dataclasses.replace(ctx, rank=rank).places(length) for rank in ranks]


def _begins(starts: list[int]) -> tuple[int, ...]:
    return tuple(place for place, start in enumerate(starts) if start == place)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One pass of a microbatch through the ring."""

    ctx: ParallelContext
    kernels: BlockKernels
    plan: RingPlan
    starts: Tensor | None

    def post_keys(self, step: int, k: Tensor, v: Tensor) -> Exchange | None:
        """Start to send and receive the keys and values of a step, [2, B, k, T, d]; None after the last step."""
        if step == len(self.plan.steps):
            return None
        to_send = self.plan.steps[step].sent
        message = None
        if to_send:
            message = torch.stack([_rows_of(part, to_send) for part in (k, v)])
        return self._post(message, (2, *k.shape[:2], self.plan.steps[step].num_received, k.shape[3]), step, k)

    def _post(
        self, message: Tensor | None, shape: Sequence[int], step: int, like: Tensor, *, back: bool = False
    ) -> Any:
        """Start an exchange; `back`: from the destination and to the source."""
        ranks = self.plan.steps[step].destination, self.plan.steps[step].source
        to, source = (self.ctx.rank_at(context_rank=rank) for rank in (reversed(ranks) if back else ranks))
        buffer = like.new_empty(shape) if shape[3] else None
        return post_exchange(message, to, buffer, source, self.ctx.context_group)

    def post_gradients(self, step: int, gradients: Tensor | None, k: Tensor) -> Exchange:
        """Start to send the gradients of what came in a step to its owner, and to receive those of what was sent."""
        num_rows = sum(rows.stop - rows.start for rows in self.plan.steps[step].sent)
        exchange: Exchange = self._post(gradients, (2, *k.shape[:2], num_rows, k.shape[3]), step, k, back=True)
        return exchange

    def arrived(self, exchange: Exchange | None) -> Tensor | None:
        """Wait for an exchange, and return what it brought."""
        if exchange is None:
            return None
        with self.ctx.state.clock.phase(WAIT):
            return exchange.wait()

    def inputs(self, block: ScoreBlock, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        keys = (block.samples, slice(None), block.keys)
        starts = None if self.starts is None else self.starts[block.samples, block.queries]
        return Inputs(q[_queries(block)], k[keys], v[keys], starts)


def _queries(block: ScoreBlock) -> tuple[slice, slice, slice]:
    return block.samples, slice(None), block.queries


def _rows_of(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """[B, k, L, d] -> [B, k, T, d]"""
    if len(rows) == 1:
        return x[:, :, rows[0]]
    return torch.cat([x[:, :, part] for part in rows], 2)


def _exact(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return what products of a dtype without instructions for it are computed from."""
    return tuple(part.float() if products.widens(part) else part for part in parts)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
        for part in (k, v):
            # what is not finite would be on other ranks next
            work.ctx.state.checks.whole(part, COMPUTED)
        coming = work.post_keys(0, k, v)
        total = _Total(q)
        own_q, own_k, own_v = _exact(q, k, v)
        for block in work.plan.own:
            total.add(block, *work.kernels.forward(work.inputs(block, own_q, own_k, own_v), block))
        for index, step in enumerate(work.plan.steps):
            came = work.arrived(coming)
            coming = work.post_keys(index + 1, k, v)
            if came is not None:
                keys, values = _exact(*came.unbind())
                for block in step.blocks:
                    total.add(block, *work.kernels.forward(work.inputs(block, own_q, keys, values), block))
        context = total.context.to(q.dtype)
        function.work = work
        function.save_for_backward(q, k, v, context, total.log_sums)
        return context

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        q, k, v, context, log_sums = function.saved_tensors
        work: _Work = function.work
        coming = work.post_keys(0, k, v)
        exact = torch.promote_types(q.dtype, torch.float32)
        sums = (grad.to(exact) * context.to(exact)).sum(-1)
        exact_grad, exact_context = _exact(grad, context)
        results = Results(exact_grad, exact_context, log_sums, sums)
        own_q, own_k, own_v = _exact(q, k, v)
        gradients = _Gradients(q, k)
        for block in work.plan.own:
            found = work.kernels.backward(work.inputs(block, own_q, own_k, own_v), _part(results, block), block)
            gradients.add_queries(block, found[0])
            gradients.add_keys(gradients.keys, block, found[1:])
        returning: Exchange | None = None
        for index, step in enumerate(work.plan.steps):
            came = work.arrived(coming)
            coming = work.post_keys(index + 1, k, v)
            message = None
            if came is not None:
                keys, values = _exact(*came.unbind())
                theirs = torch.zeros(came.shape, dtype=exact, device=came.device)
                for block in step.blocks:
                    found = work.kernels.backward(work.inputs(block, own_q, keys, values), _part(results, block), block)
                    gradients.add_queries(block, found[0])
                    gradients.add_keys(theirs, block, found[1:])
                message = theirs.to(k.dtype)
                work.ctx.state.checks.whole(message, COMPUTED)
            before, returning = returning, work.post_gradients(index, message, k)
            gradients.add_returned(work.plan.steps[index - 1].sent, work.arrived(before))
        gradients.add_returned(work.plan.steps[-1].sent, work.arrived(returning))
        return gradients.queries.to(q.dtype), *(part.to(k.dtype) for part in gradients.keys.unbind()), None


def _part(results: Results, block: ScoreBlock) -> Results:
    return Results(*(part[_queries(block)] for part in results))


class _Total:
    """Context and log-sum-exp of this rank's queries over the keys so far."""

    def __init__(self, q: Tensor) -> None:
        exact = torch.promote_types(q.dtype, torch.float32)
        batch, heads, length, size = q.shape
        # by token, as the projections around the attention have it
        self.context = q.new_empty((length, batch, heads, size), dtype=exact).permute(1, 2, 0, 3)
        self.log_sums = q.new_empty((batch, heads, length), dtype=exact)

    def add(self, block: ScoreBlock, context: Tensor, log_sums: Tensor) -> None:
        """Join the result of a block; that of the block with a query's own key comes first, and sees at least it."""
        total, total_log_sums = self.context[_queries(block)], self.log_sums[_queries(block)]
        if block.is_diagonal:
            total.copy_(context)
            total_log_sums.copy_(log_sums)
            return
        share = torch.sigmoid(log_sums - total_log_sums).unsqueeze(-1)
        total.lerp_(context.to(total.dtype), share)
        total_log_sums.copy_(torch.logaddexp(total_log_sums, log_sums))


class _Gradients:
    """Sums over blocks, in float32 or more: 16 bits would round once a block."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        exact = torch.promote_types(q.dtype, torch.float32)
        batch, heads, length, size = q.shape
        self.queries = q.new_zeros((length, batch, heads, size), dtype=exact).permute(1, 2, 0, 3)
        """[B, n, L, d]"""
        self.keys = k.new_zeros((2, length, batch, k.shape[1], size), dtype=exact).permute(0, 2, 3, 1, 4)
        """Those of own keys and values, [2, B, k, L, d]."""

    def add_queries(self, block: ScoreBlock, gradient: Tensor) -> None:
        self.queries[_queries(block)] += gradient

    def add_keys(self, sums: Tensor, block: ScoreBlock, gradients: tuple[Tensor, ...]) -> None:
        """Add a block's gradients of keys and values to sums of own ones or of a message's."""
        for total, gradient in zip(sums, gradients, strict=True):
            total[block.samples, :, block.keys] += gradient

    def add_returned(self, rows: Sequence[slice], gradients: Tensor | None) -> None:
        """Add what the rank to which these rows went has computed."""
        if gradients is None:
            return
        first = 0
        for part in rows:
            count = part.stop - part.start
            self.keys[:, :, :, part] += gradients[:, :, :, first : first + count]
            first += count
