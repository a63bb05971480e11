"""Attention on a CPU: causal from matrix products, a block of queries at a time, and of 16-bit numbers in float32.

torch's flash kernel multiplies small tiles one by one, which oneDNN's batched products outrun on processors with
AVX-512. As that kernel does, this keeps the inputs alone, computes the probabilities of a block again in backward, and
holds scores, probabilities and their gradients in float32: in bfloat16 a score of 20 could be off by 0.06.
Shapes: B batch, n query and k key/value heads, g = n / k heads of a group, S sequence, d head size, Q queries of a
block, E keys that they see: those up to the block's end, or the latest under a window.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.operators.block_sizes import ATTENTION_QUERIES
from megatron.runtime.device_cpu import attends_blockwise


@functools.cache
def is_faster(dtype: torch.dtype) -> bool:
    """Return True if this CPU computes such attention faster from matrix products than in torch's flash kernel."""
    return attends_blockwise({torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, ""))


@dataclass(frozen=True)
class _Heads:
    """The inputs by key/value head, in memory as matrix products read them."""

    q: Tensor
    """[B k, g, S, d]"""
    k: Tensor
    """[B k, S, d]"""
    v: Tensor
    """[B k, S, d]"""
    mask: Tensor | None
    """[1 or B, n, S, S], added to the scores; None: causal."""
    scale: float
    cap: float | None
    window: int | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: _Form) -> _Heads:
        batch, heads, length, size = q.shape
        groups = batch * k.shape[1], heads // k.shape[1]
        key, value = (x.reshape(groups[0], length, size) for x in (k, v))
        scale = size**-0.5 if form.scale is None else form.scale
        return cls(q.reshape(*groups, length, size), key, value, mask, scale, form.cap, form.window)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries of each block, and the keys that any of them sees."""
        length = self.q.shape[2]
        for begin in range(0, length, ATTENTION_QUERIES):
            end, first = min(begin + ATTENTION_QUERIES, length), 0
            if self.window is not None:
                # at the start of a block, so that few shapes occur
                first = max(0, begin + 1 - self.window) // ATTENTION_QUERIES * ATTENTION_QUERIES
            yield slice(begin, end), slice(first, end)

    def rows(self, x: Tensor, block: slice) -> Tensor:
        """[B k, g, S, d] or [B, n, S, d] -> [B k, g Q, d]"""
        kv_heads, _, length, size = self.q.shape
        return x.reshape(kv_heads, -1, length, size)[:, :, block].reshape(kv_heads, -1, size)

    def probabilities(self, rows: Tensor, keys_T: Tensor, block: slice, seen: slice) -> tuple[Tensor, Tensor | None]:
        """Return [B k, g Q, E] of the queries `rows` [B k, g Q, d] and all keys [B k, d, S], in the keys' dtype.

        With a cap, return tanh(scores / cap) too, of which its derivative follows.
        """
        rows, keys = rows.to(keys_T.dtype), keys_T[..., seen]
        if self.cap is None and self.mask is not None:
            bias = self.mask[:, :, block, seen]
            scores = rows.new_empty((keys.shape[0], rows.shape[1], keys.shape[2]))
            scores.view(-1, *bias.shape[1:]).copy_(bias)
            scores.baddbmm_(rows, keys, alpha=self.scale)
            self._hide(scores, block, seen, later=False)
            return torch.softmax(scores, -1, out=scores), None
        scores, capped = scaled_product(rows, keys, self.scale), None
        if self.cap is not None:
            capped = scores.div_(self.cap).tanh_()
            scores = capped * self.cap
        if self.mask is not None:
            bias = self.mask[:, :, block, seen]
            scores.view(-1, *bias.shape[1:]).add_(bias)
        self._hide(scores, block, seen, later=self.mask is None)
        return torch.softmax(scores, -1, out=scores), capped

    def _hide(self, scores: Tensor, block: slice, seen: slice, *, later: bool) -> None:
        """Set the scores of keys before the window, and of `later` keys, to -inf in place."""
        count, groups = block.stop - block.start, self.q.shape[1]
        by_query = scores.view(scores.shape[0], groups, count, -1)
        if later:
            by_query[..., block.start - seen.start :] += torch.full(
                (count, count), -torch.inf, dtype=scores.dtype
            ).triu_(1)
        # the last query of the block sees the keys from block.stop - window
        hidden = 0 if self.window is None else block.stop - self.window - seen.start
        if self.window is not None and hidden > 0:
            before = torch.full((count, hidden), -torch.inf, dtype=scores.dtype)
            by_query[..., :hidden] += before.tril_(block.start - self.window - seen.start)


class _Form(NamedTuple):
    """Operations on the scores, as `Scores` of kernels.py has them."""

    scale: float | None
    cap: float | None
    window: int | None


def transposed(x: Tensor) -> Tensor:
    """[b, S, d] -> [b, d, S] in float32, or in float64 if x is."""
    return x.mT.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[b, m, k], [b, k, n] -> scale x product, scaled before it is rounded."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: _Form) -> Tensor:
        function.save_for_backward(q, k, v, mask)
        function.form = form
        heads = _Heads.of(q, k, v, mask, form)
        keys_T = transposed(heads.k)
        context = _by_token(q)
        for block, seen in heads.blocks():
            probabilities, _ = heads.probabilities(heads.rows(heads.q, block), keys_T, block, seen)
            product = torch.bmm(probabilities.to(q.dtype), heads.v[:, seen])
            context[:, :, block] = product.view_as(context[:, :, block])
        return context

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        q, k, v, mask = function.saved_tensors
        heads = _Heads.of(q, k, v, mask, function.form)
        keys_T, values_T = transposed(heads.k), transposed(heads.v)
        grad_q = _by_token(q)
        # sums over blocks, which 16 bits would round once a block
        grad_k, grad_v = (torch.zeros(heads.k.shape, dtype=keys_T.dtype) for _ in "kv")
        for block, seen in heads.blocks():
            rows, grad_rows = heads.rows(heads.q, block), heads.rows(grad, block)
            probabilities, capped = heads.probabilities(rows, keys_T, block, seen)
            grad_v[:, seen] += torch.bmm(probabilities.to(q.dtype).mT, grad_rows)
            grad_scores = torch.bmm(grad_rows.to(values_T.dtype), values_T[..., seen])
            grad_scores = torch._softmax_backward_data(grad_scores, probabilities, -1, values_T.dtype)
            if capped is not None:  # the derivative of tanh
                grad_scores *= capped.square_().neg_().add_(1.0)
            grad_scores = grad_scores.to(q.dtype)
            part = scaled_product(grad_scores, heads.k[:, seen], heads.scale)
            grad_q[:, :, block] = part.view_as(grad_q[:, :, block])
            grad_k[:, seen] += scaled_product(grad_scores.mT, rows, heads.scale)
        return grad_q, *(total.to(k.dtype).view(k.shape) for total in (grad_k, grad_v)), None, None


def _by_token(q: Tensor) -> Tensor:
    """Return new memory [B, n, S, d] that lies as [S, B, n, d], as the projections around the attention have it."""
    batch, heads, length, size = q.shape
    return q.new_empty((length, batch, heads, size)).permute(1, 2, 0, 3)


def attend_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of q [B, n, S, d] over k and v [B, k, S, d], each for a group of n / k heads: [B, n, S, d].

    mask: [1 or B, n, S, S], added to the scores, with -inf for later keys; None: causal without a bias. The others as
    in `Scores`; of a window only the blocks that it touches are computed.
    """
    window = None if window is None or window >= q.shape[2] else window
    return _BlockwiseAttention.apply(q, k, v, mask, _Form(scale, cap, window))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------------
# In float32


class _WidenedAttention(torch.autograd.Function):
    """torch's flash kernel in float32, which keeps what it does in 16 bits: inputs, context and a number a query."""

    @staticmethod
    def forward(
        function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        context, log_sums = flash(q.float(), k.float(), v.float(), 0.0, is_causal, attn_mask=mask, scale=scale)
        context = context.to(q.dtype)
        function.is_causal, function.scale = is_causal, scale
        function.save_for_backward(q, k, v, mask, context, log_sums)
        return context

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        q, k, v, mask, context, log_sums = function.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        exact = (x.float() for x in (grad, q, k, v, context))
        gradients = flash(*exact, log_sums, 0.0, function.is_causal, attn_mask=mask, scale=function.scale)
        return *(each.to(q.dtype) for each in gradients), None, None, None


def attend_widened(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    grouped: bool,
    scale: float | None = None,
) -> Tensor:
    """Attention of 16-bit q [B, n, Q, d] over k and v [B, k, K, d] in float32, rounded once: [B, n, Q, d].

    mask: boolean (True: seen), or a float32 bias. `grouped`: fewer key/value heads than query heads.
    """
    if dropout or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        context = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), mask, dropout, is_causal, scale=scale, enable_gqa=grouped
        )
        return context.to(q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return _WidenedAttention.apply(q, k, v, mask, is_causal, scale)  # type: ignore[no-any-return]
