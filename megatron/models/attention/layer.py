"""Self-attention over tensor-parallel heads: projections, positions and the kernel behind one face.

Shapes: S sequence, B batch, n query heads and k key/value heads of this rank, d head size. Projections come as
[S, B, ...]; kernels take [B, n, S, d].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.models.attention.block_kernels import record_largest_logits
from megatron.models.attention.exchange_choice import exchange_of
from megatron.models.attention.flex import FlexAttention
from megatron.models.attention.head_exchange import HeadExchange
from megatron.models.attention.kernels import SDPAttention, build_kernel
from megatron.models.attention.kv_cache import CachedTokens
from megatron.models.attention.ring import RingAttention
from megatron.models.attention.scores import Scores, scores_of
from megatron.models.offload import Offload
from megatron.models.positions import Packing, RotaryEmbedding, own_slopes, rotary_embedding
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import RMSNorm, SplitRMSNorm
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.mappings import gather_channels
from megatron.parallel.operators.fused import choose_kernels
from megatron.parallel.shards import Shards
from megatron.runtime.devices import device_of


def build_context_kernel(
    config: Config, ctx: ParallelContext, *, packed: bool, window: int | None = None
) -> Callable[..., Tensor]:
    """Return the kernel that attends over the rows of all context ranks. Raises ConfigError.

    As build_kernel's, but q, k and v are of this rank's own rows, and a packing is of whole ones. Collective.
    """
    model, scores = config.model, scores_of(config.model, ctx, window)
    if exchange_of(config, device_of(ctx.device.type), window) == "ring":
        return RingAttention(scores, ctx, is_plain=model.kernels == "plain")
    if scores.slopes is not None:
        scores = dataclasses.replace(scores, slopes=scores.slopes.chunk(ctx.context_size)[ctx.context_rank])
    length = config.training.seq_length
    kernel = build_kernel(model, ctx, packed=packed, window=window, length=length, scores=scores)
    return HeadExchange(kernel, ctx)


class Core(NamedTuple):
    """Kernels of an attention, for whole rows and for the prompts of a batch, with what they do."""

    scores: Scores
    kernel: Callable[..., Tensor]
    prompt_kernel: Callable[..., Tensor]
    """Prompts have many lengths, and flex_attention is compiled for each."""
    rotary: RotaryEmbedding | None


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
        self.offload = None
        if trains and config.training.offload_activations and not config.training.skip_train:
            self.offload = Offload(ctx.device)
        slopes = own_slopes(config.model, ctx)
        self.slopes = None if slopes is None else slopes.to(ctx.device)
        self._packed = packs_documents
        model = config.model
        whole = local = rotary_embedding(model) if model.position_embedding_type == "rope" else None
        if whole is not None and model.rotary_base_local is not None:
            local = rotary_embedding(model, is_local=True)
        windows = {model.window_of(number) for number in (None, *range(model.num_layers))}
        self.cores = {window: self._core(window, whole if window is None else local) for window in windows}

    def _core(self, window: int | None, rotary: RotaryEmbedding | None) -> Core:
        model, ctx = self.config.model, self.ctx
        scores, length = scores_of(model, ctx, window), self.config.training.seq_length
        kernel = build_kernel(model, ctx, packed=self._packed, window=window, length=length)
        prompt_kernel = SDPAttention(scores) if isinstance(kernel, FlexAttention) else kernel
        if ctx.context_size > 1:
            kernel = build_context_kernel(self.config, ctx, packed=self._packed, window=window)
        return Core(scores, kernel, prompt_kernel, rotary)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query self-attention, [rows, B, H] -> [rows, B, H].

    The fused projection's full weight is [q; k; v], each with its heads in order and cut evenly over the ranks. With
    fewer key/value heads than ranks, each rank projects a part of a head, and the heads are gathered: parameters are
    never replicated, so their gradients need no further sum.
    """

    def __init__(self, shards: Shards, shared: Shared, *, adds_one: bool = False) -> None:
        """`adds_one`: as for RMSNorm, of the norms of queries and keys."""
        super().__init__()
        model, ctx = shared.config.model, shared.ctx
        self.ctx, self.shared = ctx, shared
        self.head_size = model.head_size
        self.scores, self.kernel, self.prompt_kernel, self.rotary = shared.cores[model.window_of(shards.layer_number)]
        self.dropout = model.attention_dropout
        self.layer_number = shards.layer_number
        self.records_above = shared.config.records_logits_above
        self.recompute_core = "core_attn" in shared.config.training.recomputed_modules
        self.own_kv_head = (
            ctx.tensor_rank * model.num_kv_heads // ctx.tensor_size if model.num_kv_heads < ctx.tensor_size else None
        )
        self.num_kv_heads = max(1, model.num_kv_heads // ctx.tensor_size)
        self.sizes = [ctx.slice_size(piece) for piece in shards["qkv.weight"].pieces]
        self.qkv = ColumnParallelLinear(shards.below("qkv"), ctx)
        self.dense = RowParallelLinear(shards.below("dense"), ctx)
        self.q_norm, self.k_norm = (self._declared_norm(shards.below(name), adds_one) for name in ("q_norm", "k_norm"))
        # a subclass may change what is projected, and parts of heads have to be gathered
        is_plain = type(self).project is SelfAttention.project and self.own_kv_head is None
        is_plain = is_plain and self.scores.scale is None and self.scores.cap is None
        is_plain = is_plain and self.q_norm is None and model.rotary_size == model.head_size
        self.attend_at_once = shared.kernels.attend if is_plain else None

    def _declared_norm(self, shards: Shards, adds_one: bool) -> RMSNorm | None:
        epsilon, kernels = self.shared.config.model.norm_epsilon, self.shared.kernels
        if not shards:
            return None
        if shards["weight"].dim == 0:
            return SplitRMSNorm(shards, epsilon, self.ctx, kernels=kernels)
        return RMSNorm(shards, epsilon, self.ctx, kernels=kernels, adds_one=adds_one)

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
        if isinstance(self.q_norm, SplitRMSNorm) and isinstance(self.k_norm, SplitRMSNorm):
            q, k = self.q_norm(q), self.k_norm(k)  # of all heads together: before parts of them are gathered
        if self.own_kv_head is not None:
            begin = self.own_kv_head * self.head_size
            k, v = (gather_channels(part, self.ctx)[..., begin : begin + self.head_size] for part in (k, v))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not isinstance(self.q_norm, SplitRMSNorm):
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _rotated(self, q_SBnd: Tensor, k_SBkd: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Turn the first channels of each head, for which there are angles."""
        size = 2 * angles[0].shape[-1]
        if size == self.head_size:
            return self.shared.kernels.rotate(q_SBnd, k_SBkd, *angles)
        rotated = self.shared.kernels.rotate(q_SBnd[..., :size], k_SBkd[..., :size], *angles)
        q, k = (torch.cat([part, x[..., size:]], -1) for part, x in zip(rotated, (q_SBnd, k_SBkd), strict=True))
        return q, k

    def _cached(self, hidden: Tensor, tokens: CachedTokens) -> Tensor:
        """Context over the cache of earlier tokens: [S, B, H] -> [S, B, n d]."""
        angles = None if self.rotary is None else tokens.angles(self.rotary)
        if self.attend_at_once is None:
            q_SBnd, k_SBkd, v_SBkd = self.project(hidden)
        else:
            qkv = self.qkv(hidden)
            context = tokens.attend_at_once(self, qkv, angles, self.attend_at_once)
            if context is not None:
                return context
            q_SBnd, k_SBkd, v_SBkd = self._heads(qkv)
        if angles is not None:
            q_SBnd, k_SBkd = self._rotated(q_SBnd, k_SBkd, angles)
        return tokens.attend(self, q_SBnd, k_SBkd, v_SBkd)

    @property
    def slopes(self) -> Tensor | None:
        """ALiBi slopes of this rank's heads."""
        return self.shared.slopes

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, n, Q, d], [B, k, K, d] -> [B, n, Q, d] by the device's kernel; the queries are the last Q of K tokens."""
        return self.prompt_kernel(q, k, v, None, 0.0)

    def _core(self, q_SBnd: Tensor, k_SBkd: Tensor, v_SBkd: Tensor, packing: Packing | None) -> Tensor:
        """Heads in, context out: [S, B, n, d] -> [S, B, n d], of this rank's places where ranks share the rows."""
        if self.rotary is not None:
            angles = self.rotary.angles(q_SBnd.shape[0], q_SBnd.device, packing, self.ctx)
            q_SBnd, k_SBkd = self._rotated(q_SBnd, k_SBkd, angles)
        if self.records_above is not None and self.training and self.layer_number is not None:
            record_largest_logits(
                self.layer_number, q_SBnd, k_SBkd, packing, self.scores, self.ctx, above=self.records_above
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBnd, k_SBkd, v_SBkd))
        dropout = self.dropout if self.training else 0.0
        if dropout:
            with self.ctx.state.streams.sharded():
                context = self.kernel(q, k, v, packing, dropout)
        else:
            context = self.kernel(q, k, v, packing, 0.0)
        return context.permute(2, 0, 1, 3).flatten(2)
