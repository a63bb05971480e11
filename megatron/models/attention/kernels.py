"""Attention kernels: (q [B, n, Q, d], k and v [B, k, K, d], packing, dropout) -> [B, n, Q, d].

The queries are the last Q of the K tokens. Shapes: S sequence, B batch, n query heads and k key/value heads of this
rank, d head size. All are causal; `Scores` says what else is done with the scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.attention.blockwise import attend_blockwise, attend_widened, is_faster
from megatron.models.attention.flex import FlexAttention, has_dropout
from megatron.models.attention.scores import PLAIN, Scores, scores_of
from megatron.models.positions import Packing
from megatron.options.config import ConfigError, ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import products
from megatron.runtime.device_cpu import BLOCKWISE_LENGTHS
from megatron.runtime.devices import device_of

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# Masks


class AttentionMask:
    """The additive or boolean mask of a microbatch, made once and shared by the layers of a stage."""

    def __init__(self, scores: Scores = PLAIN, hidden: float = float("-inf")) -> None:
        self._scores = scores
        self._hidden = hidden
        """Number that hides a key in a bias."""
        self._key: Any = None
        self._mask: Tensor | None = None

    def get(
        self, packing: Packing | None, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return [1 or B, 1 or n, Q, K], boolean (True: seen) or a bias with `hidden` (ALiBi); None: plainly causal.

        The queries are the last Q of the K tokens.
        """
        is_plain = packing is None and self._scores.slopes is None and not self._scores.is_cut(num_keys)
        if is_plain and num_queries in (1, num_keys):
            return None
        starts = None if packing is None else packing.starts_BS
        # its version counts changes in place
        key = (starts, None if starts is None else starts._version, num_queries, num_keys, dtype, device)
        if self._key is None or any(
            a is not b and not _equal_constants(a, b) for a, b in zip(key, self._key, strict=True)
        ):
            self._key, self._mask = key, self._build(packing, num_queries, num_keys, dtype, device)
        return self._mask

    def _build(
        self, packing: Packing | None, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key = torch.arange(num_keys, device=device)
        query = key[num_keys - num_queries :, None]
        seen = (key <= query)[None, None]
        if packing is not None:
            seen = seen & (key >= packing.starts_BS[:, None, :, None])
        if self._scores.window is not None:
            seen = seen & (key > query - self._scores.window)
        if self._scores.slopes is None:
            return seen
        slopes = self._scores.slopes.to(device, torch.promote_types(dtype, torch.float32), non_blocking=True)
        bias = slopes[None, :, None, None] * (key - query).to(slopes.dtype)
        return bias.to(dtype).masked_fill(~seen, self._hidden)


def _equal_constants(a: Any, b: Any) -> bool:
    # tensors count as equal only when they are the same object: comparing their values would cost a synchronisation
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


class SDPAttention:
    """torch's scaled_dot_product_attention; causal without a mask where no documents, ALiBi or window need one.

    `by_document`: one call for each document of a packed row, which costs the squares of their lengths rather than of
    the row's. For the CPU: it looks at `starts_BS` on the host, where it would have to wait for a device. `repeats`:
    repeat key/value heads in memory for their groups of query heads, also where the kernel takes fewer. `blockwise`:
    on a CPU, attend from matrix products where that is faster (megatron/models/attention/blockwise.py).
    """

    def __init__(
        self, scores: Scores = PLAIN, *, by_document: bool = False, repeats: bool = False, blockwise: bool = False
    ) -> None:
        self.scores, self.masks = scores, AttentionMask(scores)
        self._biases = self.masks if scores.window is None else AttentionMask(Scores(scores.slopes))
        """Without the window, which the blocks have by themselves."""
        self._by_document, self._repeats, self._blockwise = by_document, repeats, blockwise
        self._key: tuple[Tensor, int] | None = None
        self._documents: list[list[_Place]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        if packing is None or not self._by_document or q.shape[2] != k.shape[2]:
            return self._attend(q, k, v, packing, dropout, k.shape[2])
        documents = self._documents_of(packing)
        longest = max(place.end - place.begin for row in documents for place in row)
        rows = [
            torch.cat([self._document(q, k, v, longest, dropout, row, place) for place in places], dim=2)
            for row, places in enumerate(documents)
        ]
        return torch.cat(rows)

    def _document(
        self, q: Tensor, k: Tensor, v: Tensor, longest: int, dropout: float, row: int, place: _Place
    ) -> Tensor:
        """[1, n, end - begin, d]"""
        part = (slice(row, row + 1), slice(None), slice(place.begin, place.end))
        if place.is_single:  # all attention is on the token itself
            value, ones = repeat_heads(v[part], q.shape[1]), v.new_ones(1, q.shape[1], place.end - place.begin, 1)
            return value * F.dropout(ones, dropout) if dropout else value
        return self._attend(q[part], k[part], v[part], None, dropout, longest)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float, longest: int) -> Tensor:
        """`longest`: tokens of the longest document, whose mask serves the others too."""
        scores, by_blocks = self.scores, packing is None and not dropout and self._suits_blocks(q, k)
        masks, dtype = self._biases if by_blocks else self.masks, torch.float32 if products.widens(q) else q.dtype
        num_before = longest - k.shape[2]
        mask = masks.get(packing, q.shape[2] + num_before, longest, dtype, q.device)
        if mask is not None and num_before:
            mask = mask[..., : q.shape[2], : k.shape[2]]
        if by_blocks:
            return attend_blockwise(q, k, v, mask, scale=scores.scale, cap=scores.cap, window=scores.window)
        if scores.cap is not None:
            return attend_capped(q, k, v, mask, scores, dropout)
        grouped = q.shape[1] != k.shape[1]
        if grouped and not self._takes_groups(q, mask):
            k, v, grouped = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
        causal, scale = _is_causal(q, k, mask), scores.scale
        if products.widens(q):
            return attend_widened(q, k, v, mask, dropout=dropout, is_causal=causal, grouped=grouped, scale=scale)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    def _suits_blocks(self, q: Tensor, k: Tensor) -> bool:
        """Return True if matrix products over blocks of queries are faster than torch's kernel for these tokens."""
        # torch.compile traces torch's kernel as one operator, and would unroll the blocks
        if not self._blockwise or q.shape[2] != k.shape[2] or torch.compiler.is_compiling():
            return False
        # torch has no kernel with a cap, and computes the whole square under the mask of a window
        length, is_cut = k.shape[2], self.scores.is_cut(k.shape[2])
        if self.scores.cap is not None or (is_cut and length >= BLOCKWISE_LENGTHS.start):
            return not products.widens(q)
        return length in BLOCKWISE_LENGTHS and is_faster(q.dtype)

    def _takes_groups(self, q: Tensor, mask: Tensor | None) -> bool:
        """torch has a kernel that reads fewer key/value heads as they are; elsewhere its plain math would run."""
        if self._repeats:
            return False
        return q.is_cpu or (mask is None and q.dtype in (torch.bfloat16, torch.float16))

    def _documents_of(self, packing: Packing) -> list[list[_Place]]:
        """Return the documents of each row. Kept for the next layers, which need the same."""
        starts = packing.starts_BS
        if self._key is None or self._key[0] is not starts or self._key[1] != starts._version:
            self._key, self._documents = (starts, starts._version), [_documents(row) for row in starts.tolist()]
        return self._documents


def _is_causal(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Kernels align their own causal mask to the first key; a single query after others sees every key."""
    return mask is None and q.shape[2] == k.shape[2]


class _Place(NamedTuple):
    """Place of a document in its row, or of several of one token each, as padding is."""

    begin: int
    end: int
    is_single: bool


def _documents(starts: list[int]) -> list[_Place]:
    begins = [index for index, start in enumerate(starts) if start == index]
    found: list[_Place] = []
    for begin, end in pairwise([*begins, len(starts)]):
        is_single = end - begin == 1
        if is_single and found and found[-1].is_single:
            begin = found.pop().begin
        found.append(_Place(begin, end, is_single))
    return found


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, k, S, d] -> [B, num_heads, S, d], each key/value head for its group of query heads."""
    if x.shape[1] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, dropout: float) -> Tensor:
    """Attention from torch's plain operators, with all scores in memory, in float32 or more.

    mask: boolean (True: seen), or a bias; None: causal.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    scale, k = scores.scale or q.shape[3] ** -0.5, repeat_heads(k, q.shape[1])
    logits = torch.matmul(q.to(exact), k.to(exact).mT) * scale
    if scores.cap is not None:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    if mask is None:
        mask = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    probabilities = F.dropout(logits.softmax(-1), dropout)
    return torch.matmul(probabilities.to(v.dtype), repeat_heads(v, q.shape[1]))


# The recomputing kernel takes the softmax over slices of the keys, in which a row of -inf alone is NaN: the vendor's
# own tests (test_hpu_sdpa.py of its bridge) hide keys by a large number. This one is finite in float16 too.
HIDDEN_ON_HPU = -6e4


class FusedHPUAttention:
    """Habana's FusedSDPA.

    It takes fewer key/value heads as they are. Source: HabanaAI/gaudi-pytorch-bridge 1.19, FusedSDPA.apply(q, k, v,
    attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode).
    """

    def __init__(self, scores: Scores = PLAIN, *, fast_softmax: bool = False, recompute: bool = True) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        self._kernel, self._scale = FusedSDPA, scores.scale
        self._masks = AttentionMask(scores, HIDDEN_ON_HPU)
        self._softmax_mode = "fast" if fast_softmax else "None"
        self._recompute = recompute

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        mask = self._masks.get(packing, q.shape[2], k.shape[2], q.dtype, q.device)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, HIDDEN_ON_HPU)
        causal = _is_causal(q, k, mask)
        return self._kernel.apply(q, k, v, mask, dropout, causal, self._scale, self._softmax_mode, self._recompute)


def _choose_backend(model: ModelConfig, ctx: ParallelContext, scores: Scores, *, is_masked: bool) -> str:
    backend, device = model.attention_backend, device_of(ctx.device.type)
    if backend != "auto":
        return backend
    if model.kernels == "plain":
        return "sdpa"
    if model.uses_fused_sdpa(device):
        return "fused_hpu"
    wants_flex = "flex" in device.attention and (is_masked or scores.cap is not None)
    return "flex" if wants_flex and model.suits_flex else "sdpa"


def _in_place_of_flex(model: ModelConfig, ctx: ParallelContext) -> str:
    """Return the backend to take where flex_attention has no dropout in this torch. Raises ConfigError."""
    lacks = f"flex_attention has no dropout in torch {torch.__version__}"
    remedy = "install torch 2.9 or newer, or set attention_dropout=0"
    if model.attention_backend == "flex":
        raise ConfigError([f"attention_dropout={model.attention_dropout}, but {lacks}; {remedy}, or use sdpa"])
    if ctx.rank == 0:
        log.warning(
            "attention_dropout=%g takes SDPA with a mask in memory, slower and larger than planned: %s; %s",
            model.attention_dropout,
            lacks,
            remedy,
        )
    return "sdpa"


def build_kernel(
    model: ModelConfig,
    ctx: ParallelContext,
    *,
    packed: bool,
    window: int | None = None,
    length: int | None = None,
    scores: Scores | None = None,
) -> Callable[..., Tensor]:
    """Return the attention kernel for whole rows on the device. Raises ConfigError.

    `packed`: rows hold several documents. `length`: tokens of a row; None: more than a window. `scores`: of the heads
    that it is for; None: this rank's.
    """
    scores, device = scores or scores_of(model, ctx, window), device_of(ctx.device.type)
    is_cut = window is not None and (length is None or window < length)
    backend = _choose_backend(model, ctx, scores, is_masked=packed or is_cut or scores.slopes is not None)
    if backend == "flex" and model.attention_dropout > 0 and not has_dropout():
        backend = _in_place_of_flex(model, ctx)
    if backend == "fused_hpu":
        return FusedHPUAttention(scores, fast_softmax=model.use_fast_softmax, recompute=model.fused_sdpa_recompute)
    if backend == "flex":
        return FlexAttention(scores)
    blockwise = device.has_blockwise_attention and model.attention_backend == "auto" and model.kernels != "plain"
    repeats = model.kernels == "plain" or device.sdpa_groups == "never"
    return SDPAttention(scores, by_document=device.is_host, repeats=repeats, blockwise=blockwise)
