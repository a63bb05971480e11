"""Attention dropout by torch's flex_attention, which has none: a hash of query and key drops keys within its kernel.

With probabilities p_j over the keys j that a query sees, of which dropout keeps those with m_j = 1, and its rate r,
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

from megatron.options.model import MIN_FLEX_HEAD_SIZE

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, sample, head, query, key) -> score, as flex_attention takes it."""


def draw_seeds(q: Tensor) -> Tensor:
    """Draw three words for each head of q [B, n, Q, d] from the generator of its device: [B, 3 n] int32."""
    return torch.randint(-(2**31), 2**31, (q.shape[0], 3 * q.shape[1]), dtype=torch.int32, device=q.device)


# The bits of a key lie on a line that the query alone chooses: multiplier x hash(key) + offset, modulo 2^32. So a score
# costs one multiplication, an addition and a comparison, and the hashes are computed once a row and a column. The keys
# of a query are hashed points times a number, and so as independent as these; queries have lines of their own. (Source
# of lines: Dietzfelbinger 1996, universal hashing by multiplication.) tests/models/test_flex_dropout.py counts.
def is_kept(seeds: Tensor, rate: float, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return True where the query of this sample and head keeps the key, by seeds [B, 3 n] of `draw_seeds`."""
    num_heads = seeds.shape[1] // 3
    multiplier = _hashed(seeds[sample, head] + query)
    offset = _hashed(seeds[sample, head + num_heads] + query)
    bits = multiplier * _hashed(seeds[sample, head + 2 * num_heads] + key) + offset
    return bits >= round(rate * 2**32) - 2**31


def _hashed(x: Tensor) -> Tensor:
    """Mix 32 bits, without a loss: each bit of x changes each of the result in about half of all cases."""
    # The numbers are of C. Wellons' search for such functions ("lowbias32"). Products wrap; shifts copy the sign
    # places have 32 bits in the kernel and in what is traced; uncompiled, what was traced may be given 64
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
