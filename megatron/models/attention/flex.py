"""Attention by torch's flex_attention, for CUDA: see kernels.py for what a kernel takes and returns.

It has no dropout of its own: a hash of query and key drops keys within its kernel. With probabilities p_j over the keys
j that a query sees, of which dropout keeps those with m_j = 1, and its rate r,
    O = sum_j m_j p_j v_j / (1 - r) = O' exp(lse' - lse) / (1 - r),
where attention to the kept keys alone gives O' and the log-sum-exp lse' of its scores, and attention to all keys lse.

Shapes: B batch, n query heads and k key/value heads of this rank, Q queries, K keys, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.models.attention.scores import PLAIN, Scores
from megatron.models.positions import Packing
from megatron.options.model import MIN_FLEX_HEAD_SIZE

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, sample, head, query, key) -> score, as flex_attention takes it."""


class FlexAttention:
    """torch's flex_attention, for CUDA: ALiBi, windows, documents and their dropout without a mask in memory."""

    def __init__(self, scores: Scores = PLAIN, *, compiled: bool = True) -> None:
        from torch.nn.attention import flex_attention

        self._scores, self._slopes = scores, scores.slopes
        self._create_block_mask = flex_attention.create_block_mask
        self._kernel: Callable[..., Any] = flex_attention.flex_attention
        self._dropping_kernel: Callable[..., Tensor] = attend_dropped
        if compiled:
            self._kernel = torch.compile(self._kernel, dynamic=False)
            self._dropping_kernel = torch.compile(attend_dropped, dynamic=False)
        self._key: Any = None
        self._block_mask: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        before = k.shape[2] - q.shape[2]
        score_mod = self._score(before, q.device)
        options = {
            "block_mask": self._mask(packing, q.shape[0], q.shape[2], before, q.device),
            "scale": self._scores.scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if dropout:
            # drawn outside what is compiled, which has a generator of its own
            return self._dropping_kernel(q, k, v, draw_seeds(q), dropout, score_mod, **options)
        return self._kernel(q, k, v, score_mod=score_mod, **options)  # type: ignore[no-any-return]

    def _score(self, before: int, device: torch.device) -> Callable[..., Tensor] | None:
        cap = self._scores.cap
        if self._slopes is None:
            return None if cap is None else lambda score, *_: cap * torch.tanh(score / cap)
        slopes = self._slopes = self._slopes.to(device)

        def biased(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            score = score if cap is None else cap * torch.tanh(score / cap)
            return score + slopes[head] * (key - query - before)

        return biased

    def _mask(self, packing: Packing | None, batch: int, length: int, before: int, device: torch.device) -> Any:
        """Return the block mask of `length` queries that follow `before` keys."""
        starts = None if packing is None else packing.starts_BS
        version = None if starts is None else starts._version  # it counts changes in place
        if self._key is None or self._key[0] is not starts or self._key[1:] != (version, batch, length, before):
            window = self._scores.window

            def seen(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                is_seen = key <= query + before
                if window is not None:
                    is_seen = is_seen & (key > query + before - window)
                return is_seen if starts is None else is_seen & (key >= starts[sample, query])

            rows = None if starts is None else batch
            self._block_mask = self._create_block_mask(seen, rows, None, length, before + length, device=device)
            self._key = (starts, version, batch, length, before)
        return self._block_mask


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def has_dropout() -> bool:
    """Return False where torch's flex_attention does not give the sums of what it drops, as before torch 2.9."""
    from torch.nn.attention import flex_attention

    return hasattr(flex_attention, "AuxRequest")


def draw_seeds(q: Tensor) -> Tensor:
    """Draw three words for each head of q [B, n, Q, d] from the generator of its device: [B, 3 n] int32."""
    return torch.randint(-(2**31), 2**31, (q.shape[0], 3 * q.shape[1]), dtype=torch.int32, device=q.device)


# The bits of a key lie on a line that the query alone chooses: multiplier x hash(key) + offset, modulo 2^32. So a score
# costs one multiplication, an addition and a comparison, and the hashes are computed once a row and a column. The keys
# of a query are hashed points times a number, and so as independent as these; queries have lines of their own. (Source
# of lines: Dietzfelbinger 1996, universal hashing by multiplication.) tests/models/test_flex.py counts.
def is_kept(seeds: Tensor, rate: float, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return True where the query of this sample and head keeps the key, by seeds [B, 3 n] of `draw_seeds`."""
    num_heads = seeds.shape[1] // 3
    multiplier = _hashed(seeds[sample, head] + query)
    offset = _hashed(seeds[sample, head + num_heads] + query)
    bits = multiplier * _hashed(seeds[sample, head + 2 * num_heads] + key) + offset
    return bits >= round(rate * 2**32) - 2**31


def _hashed(x: Tensor) -> Tensor:
    """Mix 32 bits, without a loss: each bit of x changes each of the result in about half of all cases."""
    # The numbers are of C. Wellons' search for such functions ("lowbias32"). Products wrap; shifts copy the sign, which
    # the masks take away. Places are of 32 bits in the kernel; uncompiled they may be given in 64.
    x = x.to(torch.int64).to(torch.int32)
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def attend_dropped(
    q: Tensor, k: Tensor, v: Tensor, seeds: Tensor, rate: float, score_mod: ScoreMod | None, **options: Any
) -> Tensor:
    """Attend with dropout of `rate`: q [B, n, Q, d], k and v [B, k, K, d], seeds [B, 3 n] -> [B, n, Q, d].

    `options` are flex_attention's. To be compiled as a whole: everything after the two kernels is one more.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def kept(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, sample, head, query, key)
        return torch.where(is_kept(seeds, rate, sample, head, query, key), score, -math.inf)

    returned = AuxRequest(lse=True)
    context, of_kept = flex_attention(q, k, v, score_mod=kept, return_aux=returned, **options)
    few_values = k.detach()[..., :MIN_FLEX_HEAD_SIZE]
    unread, of_all = flex_attention(q, k, few_values, score_mod=score_mod, return_aux=returned, **options)
    # 0 where all keys are dropped, as the context then is: each query sees its own key, so `of_all` is finite
    share = (of_kept.lse - of_all.lse).exp() / (1 - rate)
    # torch 2.11's compiled backward pass needs a gradient of each output that it is given, a zero too
    return (context * share.unsqueeze(-1) + 0 * unread[..., :1]).to(q.dtype)
