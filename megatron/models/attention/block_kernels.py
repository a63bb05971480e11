"""Attention of a block of queries to a block of keys, whose results are joined later by their log-sum-exp.

Shapes: B samples, n query and k key/value heads, g = n / k heads of a group, Q queries, K keys, d head size, E keys of
the block that some queries see. The log of the sum of exp(scores) is [B, n, Q], in float32 or, as the scores of float64
are, float64; that of a query that sees no key is -inf, and its output 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.models.attention.blockwise import scaled_product, transposed
from megatron.models.attention.kernels import repeat_heads
from megatron.models.attention.ring_plan import ALL, Form, ScoreBlock
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import all_places
from megatron.parallel.operators.block_sizes import ATTENTION_QUERIES, DEVICE_SCORES
from megatron.runtime.device import Device

Parts = tuple[Tensor, Tensor, Tensor]


class Inputs(NamedTuple):
    """Queries, keys and values of a block."""

    q: Tensor
    """[B, n, Q, d]"""
    k: Tensor
    """[B, k, K, d]"""
    v: Tensor
    """[B, k, K, d]"""
    starts: Tensor | None = None
    """First place of the document of each query, [B, Q]; None: the block is of one document."""


class Results(NamedTuple):
    """Context of the queries of a block over all their keys, and what its backward pass needs."""

    grad: Tensor
    context: Tensor
    """[B, n, Q, d]"""
    log_sums: Tensor
    products: Tensor
    """Sum of gradient times context of each query, [B, n, Q]."""


class BlockKernels:
    """The fastest kernel for each block on this device. All of them hold a bounded part of the scores at once."""

    def __init__(self, scores: Scores, device: Device, *, is_plain: bool = False) -> None:
        """`is_plain`: from torch's plain operators alone."""
        self._device, self._is_plain, self._scores = device, is_plain, scores
        self._is_unscored = scores.slopes is None and scores.cap is None
        self._products = ProductKernel(scores)

    def forward(self, x: Inputs, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        """Return the context over the block's keys alone, [B, n, Q, d], and the log-sum-exp of their scores."""
        return self._kernel(x, block).forward(x, block)

    def backward(self, x: Inputs, results: Results, block: ScoreBlock) -> Parts:
        """Return the block's parts of the gradients of q, k and v."""
        return self._kernel(x, block).backward(x, results, block)

    def _kernel(self, x: Inputs, block: ScoreBlock) -> Any:
        if block.form is Form.ITSELF and x.starts is None:
            return ItselfKernel(self._scores)
        has_fused = block.form is not Form.PARTIAL and x.starts is None and self._is_unscored and not self._is_plain
        if has_fused and self._device.is_host:
            # at all lengths faster than products, which take a pass over the scores more than those of blockwise.py
            return HostKernel(self._scores)
        if has_fused and self._device.has_flash_attention and _suits_flash(x.q):
            return FlashKernel(self._scores)
        return self._products


def _suits_flash(q: Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256


class HostKernel:
    """torch's flash kernel of a CPU."""

    def __init__(self, scores: Scores) -> None:
        self._scale = scores.scale

    def forward(self, x: Inputs, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        context, log_sums = attend(x.q, x.k, x.v, 0.0, block.form is Form.CAUSAL, scale=self._scale)
        return context, log_sums

    def backward(self, x: Inputs, results: Results, block: ScoreBlock) -> Parts:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, context, log_sums, _ = results
        is_causal = block.form is Form.CAUSAL
        q, k, v = attend(grad, x.q, x.k, x.v, context, log_sums, 0.0, is_causal, scale=self._scale)
        return q, k, v


class FlashKernel:
    """torch's flash kernel of CUDA, of 16-bit numbers. It reads fewer key/value heads as they are."""

    def __init__(self, scores: Scores) -> None:
        self._scale = scores.scale

    def forward(self, x: Inputs, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        found = attend(x.q, x.k, x.v, 0.0, block.form is Form.CAUSAL, scale=self._scale)
        return found[0], found[1]

    def backward(self, x: Inputs, results: Results, block: ScoreBlock) -> Parts:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_backward
        random = x.q.new_empty(2, dtype=torch.int64)  # the state of a dropout, of which there is none
        grad, context, log_sums = (part.contiguous() for part in results[:3])
        sizes = x.q.shape[2], x.k.shape[2], 0.0, block.form is Form.CAUSAL, random, random
        q, k, v = attend(grad, x.q, x.k, x.v, context, log_sums, None, None, *sizes, scale=self._scale)
        return q, k, v


class ItselfKernel:
    """Each query sees its own key alone."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def _logits(self, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return keys and values of each head, the scores, and with a cap their tanh, of which its derivative follows.

        The bias of a query's own place is 0.
        """
        exact = torch.promote_types(x.q.dtype, torch.float32)
        k, v = (repeat_heads(part, x.q.shape[1]).to(exact) for part in (x.k, x.v))
        logits = (x.q.to(exact) * k).sum(-1) * scale_of(self._scores, x.q)
        if self._scores.cap is None:
            return k, v, logits, None
        capped = torch.tanh(logits / self._scores.cap)
        return k, v, capped * self._scores.cap, capped

    def forward(self, x: Inputs, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        return repeat_heads(x.v, x.q.shape[1]), self._logits(x)[2]

    def backward(self, x: Inputs, results: Results, block: ScoreBlock) -> Parts:
        k, v, logits, capped = self._logits(x)
        probabilities = (logits - results.log_sums).exp()
        grad = results.grad.to(v.dtype)
        grad_logits = probabilities * ((grad * v).sum(-1) - results.products)
        if capped is not None:
            grad_logits *= 1 - capped.square()
        grad_logits = (grad_logits * scale_of(self._scores, x.q)).unsqueeze(-1)
        grad_k, grad_v = grad_logits * x.q.to(k.dtype), probabilities.unsqueeze(-1) * grad
        groups = x.k.shape[1], -1
        return grad_logits * k, grad_k.unflatten(1, groups).sum(2), grad_v.unflatten(1, groups).sum(2)


def scale_of(scores: Scores, q: Tensor) -> float:
    return q.shape[3] ** -0.5 if scores.scale is None else scores.scale


class ProductKernel:
    """Matrix products over some queries after the other, of all kinds of scores, on any device.

    As in blockwise.py, scores are computed and kept in float32, or in float64.
    """

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def forward(self, x: Inputs, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        tiles = Tiles(x, block, self._scores)
        context = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
        log_sums = context.new_full(x.q.shape[:3], -torch.inf, dtype=tiles.keys_T.dtype)
        for queries, keys in tiles:
            scores, _ = tiles.scores(queries, keys)
            # finite also where a query sees none of the keys
            highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
            exponentials = scores.sub_(highest).exp_()
            total = exponentials.sum(-1, keepdim=True)
            product = torch.bmm(exponentials.to(x.v.dtype), tiles.v[:, keys])
            product = product / total.clamp(min=torch.finfo(total.dtype).tiny)
            tiles.put(context, queries, product)
            tiles.put(log_sums.unsqueeze(-1), queries, highest + total.log())
        return context, log_sums

    def backward(self, x: Inputs, results: Results, block: ScoreBlock) -> Parts:
        tiles = Tiles(x, block, self._scores)
        values_T, scale = transposed(tiles.v), tiles.scale
        grad_q = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
        # sums over blocks, which 16 bits would round once a block
        grad_k, grad_v = (torch.zeros(tiles.k.shape, dtype=values_T.dtype, device=x.q.device) for _ in "kv")
        for queries, keys in tiles:
            rows, grad = tiles.rows(x.q, queries), tiles.rows(results.grad, queries)
            scores, capped = tiles.scores(queries, keys)
            log_sums, products = (tiles.rows(part.unsqueeze(-1), queries) for part in (results[2], results[3]))
            probabilities = scores.sub_(log_sums).exp_()
            grad_v[:, keys] += torch.bmm(probabilities.to(grad.dtype).mT, grad)
            grad_scores = torch.bmm(grad.to(values_T.dtype), values_T[..., keys]).sub_(products).mul_(probabilities)
            if capped is not None:  # the derivative of tanh
                grad_scores *= capped.square_().neg_().add_(1.0)
            grad_scores = grad_scores.to(rows.dtype)
            tiles.put(grad_q, queries, scaled_product(grad_scores, tiles.k[:, keys], scale))
            grad_k[:, keys] += scaled_product(grad_scores.mT, rows, scale)
        return grad_q, grad_k.view(x.k.shape), grad_v.view(x.v.shape)


class Tiles:
    """Queries of a block that are computed at once, with the keys that some of them see."""

    def __init__(self, x: Inputs, block: ScoreBlock, scores: Scores) -> None:
        self._x, self._block, self._scores = x, block, scores
        kv_heads, self._num_keys = x.k.shape[0] * x.k.shape[1], x.k.shape[2]
        self.k, self.v = (part.reshape(kv_heads, self._num_keys, -1) for part in (x.k, x.v))
        self.keys_T = transposed(self.k)
        self.scale = scale_of(scores, x.q)
        self._window = scores.window if block.form is Form.PARTIAL else None
        self._ahead = block.first_query - block.first_key
        """Places by which the first query is behind the first key."""

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        count = self._x.q.shape[2]
        size = ATTENTION_QUERIES
        if not self._x.q.is_cpu:
            # scores need not stay in a cache there, and each operator is a launch
            per_query = self._x.q.shape[0] * self._x.q.shape[1] * self._num_keys
            size = max(1, DEVICE_SCORES // (per_query * size)) * size
        for begin in range(0, count, size):
            end, first, last = min(begin + size, count), 0, self._num_keys
            if self._block.form is not Form.FULL:
                last = min(last, end + self._ahead)
            if self._window is not None:
                # a multiple, so that few shapes occur
                first = max(0, begin + self._ahead + 1 - self._window) // ATTENTION_QUERIES * ATTENTION_QUERIES
            if first < last:
                yield slice(begin, end), slice(first, last)

    def rows(self, part: Tensor, queries: slice) -> Tensor:
        """[B, n, Q, c] -> [B k, g queries, c]"""
        return part[:, :, queries].reshape(self.k.shape[0], -1, part.shape[3])

    def put(self, target: Tensor, queries: slice, rows: Tensor) -> None:
        """Write [B k, g queries, c] to [B, n, Q, c]."""
        place = target[:, :, queries]
        place.copy_(rows.view(place.shape))

    def scores(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Return [B k, g queries, E], -inf where a key is hidden, in the dtype of `keys_T`; with a cap its tanh too."""
        scores = scaled_product(self.rows(self._x.q, queries).to(self.keys_T.dtype), self.keys_T[..., keys], self.scale)
        capped = None
        if self._scores.cap is not None:
            capped = scores.div_(self._scores.cap).tanh_()
            scores = capped * self._scores.cap
        batch, heads = self._x.q.shape[:2]
        by_query = scores.view(batch, heads, queries.stop - queries.start, -1)
        if self._scores.slopes is not None:
            query, key = self._places(queries, keys)
            slopes = self._scores.slopes.to(device=scores.device, dtype=scores.dtype)
            by_query += slopes[:, None, None] * (key - query)
        self._hide(by_query, queries, keys)
        return scores, capped

    def _places(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Return those of queries [Q, 1] and keys [E], counted from the block's first key."""
        query = torch.arange(queries.start, queries.stop, device=self.k.device) + self._ahead
        return query[:, None], torch.arange(keys.start, keys.stop, device=self.k.device)

    def _hide(self, by_query: Tensor, queries: slice, keys: slice) -> None:
        """Set the scores [B, n, queries, E] of hidden keys to -inf in place."""
        query, key = self._places(queries, keys)
        if self._x.starts is not None:
            start = self._x.starts[:, None, queries, None] - self._block.first_key
            by_query.masked_fill_(key < start, -torch.inf)
        if self._block.form is Form.ITSELF:
            by_query.masked_fill_(key != query, -torch.inf)
        # only where some of these queries do not see a key
        later = queries.start + self._ahead + 1 - keys.start
        if self._block.form in (Form.CAUSAL, Form.PARTIAL) and later < len(key):
            by_query[..., later:].masked_fill_(key[later:] > query, -torch.inf)
        if self._window is not None:
            before = queries.stop + self._ahead - self._window - keys.start
            if before > 0:
                by_query[..., :before].masked_fill_(key[:before] <= query - self._window, -torch.inf)


# ---------------------------------------------------------------------------------------------------------------------
# The largest score of each head

# No fused kernel returns it, so queries and keys are multiplied once more: half a forward pass of the attention. It is
# of the two alone, without ALiBi's bias and the cap, since QK-clip scales what makes them.


# what is recorded lies in a dict of the host's, of which a compiled graph would know nothing
@torch._disable_dynamo  # type: ignore[untyped-decorator]
@torch.no_grad()
def record_largest_logits(
    layer: int,
    q_LBnd: Tensor,
    k_LBkd: Tensor,
    packing: Packing | None,
    scores: Scores,
    ctx: ParallelContext,
    *,
    above: float,
) -> None:
    """Keep the largest score of each head that a query sees in this pass of a layer, [n] float32.

    q_LBnd, k_LBkd: of this rank's L places. On a CPU -inf where no score can be larger than `above`. Collective over
    the context-parallel ranks, whose keys are gathered.
    """
    if not ctx.state.logits.is_wanted:
        return
    plain = Scores(window=scores.window, scale=scores.scale)
    q = q_LBnd.permute(1, 2, 0, 3)
    whole = k_LBkd if ctx.context_size == 1 else all_places(k_LBkd, ctx)
    k = whole.permute(1, 2, 0, 3)
    # the host need not wait for a device to know it
    if q.is_cpu and float(_bounds(q, k, plain).max()) <= above:
        largest = torch.full((q.shape[1],), -torch.inf)
    else:
        largest = _largest(q, k, packing, plain, ctx)
    ctx.state.logits.add(layer, largest)


def _bounds(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """Return the product of the longest query and the longest key of each head, [n], which no score exceeds."""
    of_q, of_k = (torch.linalg.vector_norm(part, dim=3, dtype=torch.float32).amax(2) for part in (q, k))
    of_k = repeat_heads(of_k[..., None, None], q.shape[1])[..., 0, 0]
    return (of_q * of_k).amax(0) * scale_of(scores, q)


def _largest(q: Tensor, k: Tensor, packing: Packing | None, scores: Scores, ctx: ParallelContext) -> Tensor:
    """[B, n, L, d], [B, k, S, d] -> [n]"""
    batch, heads = q.shape[:2]
    largest = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    first = 0
    for places in ctx.places(k.shape[2]):
        queries, keys = q[:, :, first : first + len(places)], k[:, :, : places.stop]
        starts = None if packing is None else packing.starts_BS[:, places.start : places.stop]
        block = ScoreBlock(ALL, ALL, ALL, places.start, 0, Form.PARTIAL)
        tiles = Tiles(Inputs(queries, keys, keys, starts), block, scores)
        for rows, columns in tiles:
            found, _ = tiles.scores(rows, columns)
            by_head = found.view(batch, heads, -1).amax((0, 2)).float()
            largest = torch.maximum(largest, by_head)
        first += len(places)
    return largest
