"""Self-attention over tensor-parallel heads: positions, masks and the kernel behind one face.

Shapes: S sequence, B batch, n query heads and k key/value heads of this rank, d head size. Projections come as
[S, B, ...]; kernels take [B, n, S, d].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.blockwise_attention import attend_blockwise, attend_widened, is_faster
from megatron.models.kv_cache import CachedTokens
from megatron.options.config import Config, ConfigError, ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.mappings import gather_channels
from megatron.parallel.operators import products
from megatron.parallel.operators.fused import choose_kernels
from megatron.parallel.shards import Shards
from megatron.runtime.device_cpu import BLOCKWISE_LENGTHS
from megatron.runtime.devices import device_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Packing:
    """Positions of a microbatch's tokens in their documents. None instead of this: one document a sample.

    positions_BS: the position each token is encoded with.
    starts_BS: the index in the sample of the first token that each token may see.
    """

    positions_BS: Tensor
    starts_BS: Tensor

    @property
    def is_token_BS(self) -> Tensor:
        """True but for padding: what sees itself alone at the end of a row, as a last document of one token does."""
        sees_others_BS = self.starts_BS != torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device)
        return sees_others_BS.int().flip(1).cummax(1).values.flip(1).bool()

    def weights_SB(self, num_rows: int, ctx: ParallelContext) -> Tensor:
        """Return 1 for each token, 0 for padding, of this rank's rows of the residual stream: [rows, B] float32."""
        first = ctx.tensor_rank * num_rows if ctx.sequence_parallel else 0
        return self.is_token_BS.t()[first : first + num_rows].float()


# ---------------------------------------------------------------------------------------------------------------------
# Positions


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, [num_heads] float32.

    For a power of two, the geometric sequence from 2^(-8/n); otherwise that of the next lower power of two, filled up
    with every other slope of the next higher one. Source: Press et al. 2021 (arXiv:2108.12409) and its published code.
    """

    def geometric(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (index + 1) for index in range(count)]

    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = geometric(lower)
    slopes += geometric(2 * lower)[::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")  # a plan allocates models on "meta"


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Radians per position for each pair of channels, [d/2] float32, with Llama 3.1's scaling if configured.

    Scaling divides long wavelengths by the factor, keeps short ones, and interpolates between.
    Source: Su et al. 2021 (arXiv:2104.09864); Llama 3.1's published model code.
    """
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
    frequencies = 1.0 / model.rotary_base**exponents
    if model.rope_scaling_factor is None:
        return frequencies
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    turns = model.rope_scaling_original_length * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / model.rope_scaling_factor)


class RotaryEmbedding:
    """cos and sin for given positions, from a table computed once and grown on demand."""

    def __init__(self, model: ModelConfig) -> None:
        self._frequencies = rotary_frequencies(model)
        self._table: tuple[Tensor, Tensor] | None = None

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of each pair of channels, each [length, d/2] float32."""
        if self._table is None or self._table[0].shape[0] < length or self._table[0].device != device:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            angles = angles.to(device, non_blocking=True)
            self._table = angles.cos(), angles.sin()
        cos, sin = self._table
        return cos[:length], sin[:length]

    def angles(self, length: int, device: torch.device, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, each [S, 1 or B, 1, d/2] float32."""
        cos, sin = self.table(length, device)
        if packing is None:
            return cos[:, None, None], sin[:, None, None]
        positions_SB = packing.positions_BS.t()
        return cos[positions_SB].unsqueeze(2), sin[positions_SB].unsqueeze(2)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


class AttentionMask:
    """The additive or boolean mask of a microbatch, made once and shared by the layers of a stage."""

    def __init__(self, slopes: Tensor | None, hidden: float = float("-inf")) -> None:
        self._slopes = slopes
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
        if packing is None and self._slopes is None and num_queries in (1, num_keys):
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
        if self._slopes is None:
            return seen
        bias = self._slopes.to(device, non_blocking=True)[None, :, None, None] * (key - query).float()
        return bias.to(dtype).masked_fill(~seen, self._hidden)


def _equal_constants(a: Any, b: Any) -> bool:
    # tensors count as equal only when they are the same object: comparing their values would cost a synchronisation
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: (q [B, n, Q, d], k and v [B, k, K, d], packing) -> [B, n, Q, d]; the queries are the last Q of the K tokens


class SDPAttention:
    """torch's scaled_dot_product_attention; causal without a mask where neither documents nor ALiBi need one.

    `by_document`: one call for each document of a packed row, which costs the squares of their lengths rather than of
    the row's. For the CPU: it looks at `starts_BS` on the host, where it would have to wait for a device. `repeats`:
    repeat key/value heads in memory for their groups of query heads, also where the kernel takes fewer. `blockwise`:
    on a CPU, attend from matrix products where that is faster (megatron/models/blockwise_attention.py).
    """

    def __init__(
        self, slopes: Tensor | None, *, by_document: bool = False, repeats: bool = False, blockwise: bool = False
    ) -> None:
        self.masks = AttentionMask(slopes)
        self._by_document, self._repeats, self._blockwise = by_document, repeats, blockwise
        self._key: tuple[Tensor, int] | None = None
        self._documents: list[list[_Place]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        dtype = torch.float32 if products.widens(q) else q.dtype
        if packing is None or not self._by_document or q.shape[2] != k.shape[2]:
            return self._attend(q, k, v, self.masks.get(packing, q.shape[2], k.shape[2], dtype, q.device), dropout)
        documents = self._documents_of(packing)
        longest = max(place.end - place.begin for row in documents for place in row)
        mask = self.masks.get(None, longest, longest, dtype, q.device)
        rows = [
            torch.cat([self._document(q, k, v, mask, dropout, row, place) for place in places], dim=2)
            for row, places in enumerate(documents)
        ]
        return torch.cat(rows)

    def _document(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, row: int, place: _Place
    ) -> Tensor:
        """[1, n, end - begin, d]"""
        length = place.end - place.begin
        part = (slice(row, row + 1), slice(None), slice(place.begin, place.end))
        if place.is_single:  # all attention is on the token itself
            value = repeat_heads(v[part], q.shape[1])
            return value * F.dropout(v.new_ones(1, q.shape[1], length, 1), dropout) if dropout else value
        own = None if mask is None else mask[..., :length, :length]
        return self._attend(q[part], k[part], v[part], own, dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        suits = q.shape[2] == k.shape[2] and k.shape[2] in BLOCKWISE_LENGTHS
        # torch.compile traces torch's kernel as one operator, and would unroll the blocks
        if self._blockwise and suits and not dropout and is_faster(q.dtype) and not torch.compiler.is_compiling():
            return attend_blockwise(q, k, v, mask)
        grouped = q.shape[1] != k.shape[1]
        if grouped and not self._takes_groups(q, mask):
            k, v, grouped = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
        causal = _is_causal(q, k, mask)
        if products.widens(q):
            return attend_widened(q, k, v, mask, dropout=dropout, is_causal=causal, grouped=grouped)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
        )

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


class FlexAttention:
    """torch's flex_attention, for CUDA: ALiBi and document masks without a mask in memory. No dropout."""

    def __init__(self, slopes: Tensor | None, *, compiled: bool = True) -> None:
        from torch.nn.attention import flex_attention

        self._slopes = slopes
        self._create_block_mask = flex_attention.create_block_mask
        kernel: Callable[..., Any] = flex_attention.flex_attention
        self._kernel: Callable[..., Tensor] = torch.compile(kernel, dynamic=False) if compiled else kernel
        self._key: Any = None
        self._block_mask: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        before = k.shape[2] - q.shape[2]
        block_mask = self._mask(packing, q.shape[0], q.shape[2], before, q.device)
        grouped = q.shape[1] != k.shape[1]
        return self._kernel(q, k, v, score_mod=self._score(before, q.device), block_mask=block_mask, enable_gqa=grouped)

    def _score(self, before: int, device: torch.device) -> Callable[..., Tensor] | None:
        if self._slopes is None:
            return None
        slopes = self._slopes = self._slopes.to(device)
        return lambda score, _batch, head, query, key: score + slopes[head] * (key - query - before)

    def _mask(self, packing: Packing | None, batch: int, length: int, before: int, device: torch.device) -> Any:
        """Return the block mask of `length` queries that follow `before` keys."""
        starts = None if packing is None else packing.starts_BS
        version = None if starts is None else starts._version  # it counts changes in place
        if self._key is None or self._key[0] is not starts or self._key[1:] != (version, batch, length, before):

            def seen(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                causal = key <= query + before
                return causal if starts is None else causal & (key >= starts[sample, query])

            rows = None if starts is None else batch
            self._block_mask = self._create_block_mask(seen, rows, None, length, before + length, device=device)
            self._key = (starts, version, batch, length, before)
        return self._block_mask


# The recomputing kernel takes the softmax over slices of the keys, in which a row of -inf alone is NaN: the vendor's
# own tests (test_hpu_sdpa.py of its bridge) hide keys by a large number. This one is finite in float16 too.
HIDDEN_ON_HPU = -6e4


class FusedHPUAttention:
    """Habana's FusedSDPA.

    It takes fewer key/value heads as they are. Source: HabanaAI/gaudi-pytorch-bridge 1.19, FusedSDPA.apply(q, k, v,
    attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode).
    """

    def __init__(self, slopes: Tensor | None, *, fast_softmax: bool = False, recompute: bool = True) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        self._kernel = FusedSDPA
        self._masks = AttentionMask(slopes, HIDDEN_ON_HPU)
        self._softmax_mode = "fast" if fast_softmax else "None"
        self._recompute = recompute

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dropout: float) -> Tensor:
        mask = self._masks.get(packing, q.shape[2], k.shape[2], q.dtype, q.device)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, HIDDEN_ON_HPU)
        causal = _is_causal(q, k, mask)
        return self._kernel.apply(q, k, v, mask, dropout, causal, None, self._softmax_mode, self._recompute)


def own_slopes(model: ModelConfig, ctx: ParallelContext) -> Tensor | None:
    """Return the ALiBi slopes of this rank's heads, [n] float32; None: the model has other positions."""
    if model.position_embedding_type != "alibi":
        return None
    own = ctx.slice_size(model.num_attention_heads)
    return alibi_slopes(model.num_attention_heads)[ctx.tensor_rank * own : (ctx.tensor_rank + 1) * own]


def build_kernel(model: ModelConfig, ctx: ParallelContext, *, packed: bool) -> Callable[..., Tensor]:
    """Return the attention kernel for the device, with this rank's ALiBi slopes."""
    slopes = own_slopes(model, ctx)
    backend, device = model.attention_backend, device_of(ctx.device.type)
    if backend == "auto" and model.kernels == "plain":
        backend = "sdpa"
    if backend == "auto":
        wants_flex = "flex" in device.attention and (slopes is not None or packed)
        backend = "sdpa"
        if model.uses_fused_sdpa(device):
            backend = "fused_hpu"
        elif wants_flex and model.suits_flex:
            backend = "flex"
        if wants_flex and model.attention_dropout > 0 and ctx.rank == 0:
            log.warning(
                "attention_dropout=%g takes SDPA with a mask in memory, since flex_attention, the faster kernel for "
                "ALiBi and documents, has no dropout; set attention_dropout=0 for that",
                model.attention_dropout,
            )
    if backend == "flex" and model.attention_dropout > 0:
        raise ConfigError(
            [
                f"attention_backend=flex has no dropout, but attention_dropout={model.attention_dropout}; "
                "set it to 0, or use sdpa"
            ]
        )
    if backend == "fused_hpu":
        return FusedHPUAttention(slopes, fast_softmax=model.use_fast_softmax, recompute=model.fused_sdpa_recompute)
    if backend == "flex":
        return FlexAttention(slopes)
    blockwise = device.has_blockwise_attention and model.attention_backend == "auto" and model.kernels != "plain"
    repeats = model.kernels == "plain" or device.sdpa_groups == "never"
    return SDPAttention(slopes, by_document=device.is_host, repeats=repeats, blockwise=blockwise)


# ---------------------------------------------------------------------------------------------------------------------


class Shared:
    """Config and context of a model's layers, and what they share on one rank: kernels and the rotary table.

    Made before any layer: where ZeRO-3 builds the layers, new constants would be rounded to 16 bits. `packs_documents`
    as the task's (megatron/tasks/task.py): it decides which kernel is fastest.
    """

    def __init__(
        self, config: Config, ctx: ParallelContext, *, packs_documents: bool = False, trains: bool = True
    ) -> None:
        self.config, self.ctx = config, ctx
        self.kernels = choose_kernels(config, ctx.device, trains=trains)
        self.kernel = build_kernel(config.model, ctx, packed=packs_documents)
        self.prompt_kernel = self.kernel
        """For prompts of a batch: they have many lengths, and flex_attention is compiled for each."""
        slopes = own_slopes(config.model, ctx)
        if isinstance(self.kernel, FlexAttention):
            self.prompt_kernel = SDPAttention(slopes)
        self.slopes = None if slopes is None else slopes.to(ctx.device)
        self.rotary = RotaryEmbedding(config.model) if config.model.position_embedding_type == "rope" else None


class SelfAttention(nn.Module):
    """Multi-head or grouped-query self-attention, [rows, B, H] -> [rows, B, H].

    The fused projection's full weight is [q; k; v], each with its heads in order and cut evenly over the ranks. With
    fewer key/value heads than ranks, each rank projects a part of a head, and the heads are gathered: parameters are
    never replicated, so their gradients need no further sum.
    """

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        model, ctx = shared.config.model, shared.ctx
        self.ctx, self.shared = ctx, shared
        self.head_size = model.head_size
        self.dropout = model.attention_dropout
        self.recompute_core = "core_attn" in shared.config.training.recomputed_modules
        self.own_kv_head = (
            ctx.tensor_rank * model.num_kv_heads // ctx.tensor_size if model.num_kv_heads < ctx.tensor_size else None
        )
        self.num_kv_heads = max(1, model.num_kv_heads // ctx.tensor_size)
        self.sizes = [ctx.slice_size(piece) for piece in shards["qkv.weight"].pieces]
        self.qkv = ColumnParallelLinear(shards.below("qkv"), ctx)
        self.dense = RowParallelLinear(shards.below("dense"), ctx)
        # a subclass may change what is projected, and parts of heads have to be gathered
        is_plain = type(self).project is SelfAttention.project and self.own_kv_head is None
        self.attend_at_once = shared.kernels.attend if is_plain else None

    def forward(self, hidden: Tensor, packing: Packing | CachedTokens | None = None) -> Tensor:
        if isinstance(packing, CachedTokens):
            return self.dense(self._cached(hidden, packing))
        q, k, v = self.project(hidden)
        if self.recompute_core and self.training:
            context = self.ctx.state.streams.recomputed(self._core, q, k, v, packing)
        else:
            context = self._core(q, k, v, packing)
        return self.dense(context)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of this rank's heads: [S, B, heads, d]."""
        return self._heads(self.qkv(hidden))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.own_kv_head is not None:
            begin = self.own_kv_head * self.head_size
            k, v = (gather_channels(part, self.ctx)[..., begin : begin + self.head_size] for part in (k, v))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        return q, k, v

    def _cached(self, hidden: Tensor, tokens: CachedTokens) -> Tensor:
        """Context over the cache of earlier tokens: [S, B, H] -> [S, B, n d]."""
        rotary = self.shared.rotary
        angles = None if rotary is None else tokens.angles(rotary.table)
        if self.attend_at_once is None:
            q_SBnd, k_SBkd, v_SBkd = self.project(hidden)
        else:
            qkv = self.qkv(hidden)
            context = tokens.attend_at_once(self, qkv, angles, self.attend_at_once)
            if context is not None:
                return context
            q_SBnd, k_SBkd, v_SBkd = self._heads(qkv)
        if angles is not None:
            q_SBnd, k_SBkd = self.shared.kernels.rotate(q_SBnd, k_SBkd, *angles)
        return tokens.attend(self, q_SBnd, k_SBkd, v_SBkd)

    @property
    def slopes(self) -> Tensor | None:
        """ALiBi slopes of this rank's heads."""
        return self.shared.slopes

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, n, Q, d], [B, k, K, d] -> [B, n, Q, d] by the device's kernel; the queries are the last Q of K tokens."""
        return self.shared.prompt_kernel(q, k, v, None, 0.0)

    def _core(self, q_SBnd: Tensor, k_SBkd: Tensor, v_SBkd: Tensor, packing: Packing | None) -> Tensor:
        """Heads in, context out: [S, B, n, d] -> [S, B, n d]."""
        if self.shared.rotary is not None:
            angles = self.shared.rotary.angles(q_SBnd.shape[0], q_SBnd.device, packing)
            q_SBnd, k_SBkd = self.shared.kernels.rotate(q_SBnd, k_SBkd, *angles)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBnd, k_SBkd, v_SBkd))
        dropout = self.dropout if self.training else 0.0
        if dropout:
            with self.ctx.state.streams.sharded():
                context = self.shared.kernel(q, k, v, packing, dropout)
        else:
            context = self.shared.kernel(q, k, v, packing, 0.0)
        return context.permute(2, 0, 1, 3).flatten(2)
