"""The output projection and cross-entropy in one, over a vocabulary cut across tensor-parallel ranks.

N tokens of the microbatch (S x B), H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import enter_tensor_region
from megatron.parallel.shards import shard_of

MAX_FLOAT32_LOGITS = 1 << 22
"""Logits held in float32 at once, 16 MiB; a microbatch goes through in chunks of tokens of this size."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of weighted token losses. The gradients of both inputs are computed in forward, chunk by chunk, so that no
    logits outlive their chunk; backward only scales them by the gradient of the sum.
    """

    @staticmethod
    def forward(
        function: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        token_weights_N: Tensor,
        first_row: int,
        num_rows: int,
        ctx: ParallelContext,
        with_gradients: bool,
    ) -> Tensor:
        needs_hidden, needs_weight = (with_gradients and needed for needed in function.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        rows = weight_VH[:num_rows]  # padded rows are no tokens: they take no part in the softmax
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        # by the rows with padding, of which every rank has as many: all must come to each reduction equally often
        chunk = max(1, MAX_FLOAT32_LOGITS // weight_VH.shape[0])
        unit = _unit(token_weights_N, hidden_NH.dtype)
        for begin in range(0, hidden_NH.shape[0], chunk):
            part = slice(begin, begin + chunk)
            hidden, weights = hidden_NH[part], token_weights_N[part].float()
            local = labels_N[part] - first_row
            elsewhere = (local < 0) | (local >= num_rows)
            local = local.masked_fill(elsewhere, 0).unsqueeze(-1)

            logits = (hidden @ rows.t()).float()
            peak = logits.amax(-1) if num_rows else logits.new_full(logits.shape[:1], float("-inf"))
            if ctx.tensor_size > 1:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ctx.tensor_group)
            logits -= peak.unsqueeze(-1)
            # one reduction for both: the label's logit lies on one rank alone
            target = logits.gather(-1, local).squeeze(-1) if num_rows else torch.zeros_like(peak)
            target = target.masked_fill(elsewhere, 0.0)
            exponentials = logits.exp_()
            sums = torch.stack([target, exponentials.sum(-1)])
            if ctx.tensor_size > 1:
                dist.all_reduce(sums, group=ctx.tensor_group)
            target, denominator = sums
            total += torch.dot(denominator.log() - target, weights)

            if needs_hidden or needs_weight:
                weights = weights / unit
                grad_logits = exponentials.mul_((weights / denominator).unsqueeze(-1))
                if num_rows:
                    grad_logits.scatter_add_(-1, local, -weights.masked_fill(elsewhere, 0.0).unsqueeze(-1))
                grad_logits = grad_logits.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad_logits, rows, out=grad_hidden[part])
                if grad_weight is not None:
                    grad_weight[:num_rows] += grad_logits.t() @ hidden
        function.save_for_backward(grad_hidden, grad_weight, unit)
        function.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(function: Any, grad: Tensor) -> Any:
        grad_hidden, grad_weight, unit = function.saved_tensors
        grad = grad * unit
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(function.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _unit(token_weights_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit that gradients computed in forward are divided by, and multiplied by again in backward.

    float16 cannot hold one token's share of a large batch, and the loss scale that would lift it is known only in
    backward. By then, 65536 x the share is a number of ordinary size.
    """
    if dtype != torch.float16:
        return token_weights_N.new_ones((), dtype=torch.float32)
    tiny = torch.finfo(torch.float32).tiny  # where no token counts
    return token_weights_N.float().abs().amax().clamp(min=tiny)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels_BS: Tensor, token_weights_BS: Tensor, ctx: ParallelContext
) -> Tensor:
    """Sum over tokens of token_weight x cross-entropy of hidden @ weight^T: a float32 scalar, equal on all ranks.

    hidden is the residual stream [S, B, H] ([S/tp, B, H] under sequence parallelism); weight this rank's rows of the
    vocabulary; labels [B, S] int64; token_weights [B, S] (the loss mask times whatever normalises the sum).
    Never holds more than MAX_FLOAT32_LOGITS logits.
    """
    hidden_NH = enter_tensor_region(hidden, ctx).flatten(0, 1)
    first_row, num_rows = own_vocabulary(weight, ctx)
    labels_N, token_weights_N = labels_BS.t().flatten(), token_weights_BS.t().flatten()
    return _LinearCrossEntropy.apply(
        hidden_NH, weight, labels_N, token_weights_N, first_row, num_rows, ctx, torch.is_grad_enabled()
    )


def own_vocabulary(weight: Tensor, ctx: ParallelContext) -> tuple[int, int]:
    """First token id of this rank's rows, and how many of them are tokens rather than padding."""
    shard = shard_of(weight)
    ((start, stop),) = shard.spans(ctx.tensor_rank, ctx.tensor_size)
    return start, max(0, min(stop, shard.shape[0]) - start)


def gather_logits(hidden: Tensor, weight: Tensor, ctx: ParallelContext) -> Tensor:
    """[S, B, true vocabulary] on every rank, padding cut off; no autograd. For evaluation and generation."""
    with torch.no_grad():
        local = enter_tensor_region(hidden, ctx) @ weight.t()
        if ctx.tensor_size > 1:
            parts = [torch.empty_like(local) for _ in range(ctx.tensor_size)]
            dist.all_gather(parts, local.contiguous(), group=ctx.tensor_group)
            local = torch.cat(parts, dim=-1)
        return local[..., : shard_of(weight).shape[0]]
