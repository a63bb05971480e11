"""The layers of decoder-only transformers.

What flows between layers is the residual stream [rows, B, H], alone or, over packed documents, as the tuple
(hidden, positions, starts) of `Packing`: DeepSpeed's pipeline passes tensors and tuples of tensors between stages. In
generation it is (hidden, tokens), with the `CachedTokens` of the pass. Every module is given its `Shards` and what the
layers share, and allocates what is declared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.attention import Packing, SelfAttention, Shared
from megatron.models.kv_cache import CachedTokens
from megatron.models.neftune import add_noise
from megatron.parallel.layers import LayerNorm, RMSNorm, VocabParallelEmbedding
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.low_rank_vocabulary import output_weight, vocabulary_adapters
from megatron.parallel.recompute import discard_output
from megatron.parallel.rng import dropout
from megatron.parallel.shards import Shards

Stream = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, CachedTokens]
Build = Callable[[Shards, Shared], nn.Module]


def unpack(stream: Stream) -> tuple[Tensor, Packing | CachedTokens | None]:
    """Return the hidden state (or tokens) of what flows between layers, and the places of its tokens."""
    if isinstance(stream, Tensor):
        return stream, None
    if len(stream) == 2:
        return stream
    hidden, positions, starts = stream
    return hidden, Packing(positions, starts)


def repack(hidden: Tensor, stream: Stream) -> Stream:
    """Return `hidden` with what came beside it in `stream`."""
    return hidden if isinstance(stream, Tensor) else (hidden, *stream[1:])


class WordEmbedding(VocabParallelEmbedding):
    """First layer, and under tied weights the last: see VocabParallelEmbedding."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__(shards, shared.ctx)
        self.noise_alpha = shared.config.training.neftune_noise_alpha

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        inside, packing = unpack(stream)
        result = super().forward(inside, project)
        if project is not None:
            return result
        if self.noise_alpha is not None and self.training and not isinstance(packing, CachedTokens):
            result = add_noise(result, inside, packing, self.noise_alpha, self.ctx)
        return repack(result, stream)


class OutputProjection(nn.Module):
    """Last layer of an untied model: passes (hidden, weight) to `project`, which computes the loss or the logits."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx, self.weight = shared.ctx, shards.allocate("weight", shared.ctx)
        self.adapters = vocabulary_adapters(self, shards, shared.ctx)

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        outputs = output_weight(self, unpack(stream)[0])
        return outputs if project is None else project(outputs)


class PositionEmbedding(nn.Module):
    """Learned positions: the table's rows for this rank's rows of the sequence, [rows, 1 or B, H]."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx = shared.ctx
        self.weight = shards.allocate("weight", self.ctx)

    def forward(self, num_rows: int, packing: Packing | CachedTokens | None) -> Tensor:
        first = self.ctx.tensor_rank * num_rows if self.ctx.sequence_parallel else 0
        if packing is None:
            return self.weight[first : first + num_rows].unsqueeze(1)
        return F.embedding(packing.positions_BS.t()[first : first + num_rows], self.weight)


class EmbeddingOutput(nn.Module):
    """Layer after the word embedding: learned positions and LayerNorm, each where declared, and dropout."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx, self.probability = shared.ctx, shared.config.model.hidden_dropout
        position, norm = shards.below("position"), shards.below("norm")
        self.position = PositionEmbedding(position, shared) if position else None
        self.norm = layer_norm(norm, shared) if norm else None

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.position is not None:
            hidden = hidden + self.position(hidden.shape[0], packing)
        if self.norm is not None:
            hidden = self.norm(hidden)
        sharded = self.ctx.sequence_parallel
        return repack(dropout(hidden, self.probability, self.training, self.ctx.streams, sharded=sharded), stream)


class _MLP(nn.Module):
    """`up` (or the fused [gate; up]), activation, down."""

    def __init__(self, shards: Shards, shared: Shared, up: str, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._up, self.activation = up, activation
        self.discards_activation = "mlp_act" in shared.config.training.recomputed_modules
        self.add_module(up, ColumnParallelLinear(shards.below(up), shared.ctx))
        self.down = RowParallelLinear(shards.below("down"), shared.ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = getattr(self, self._up)(hidden)
        if self.discards_activation and self.training:
            return discard_output(self.activation, self.down, inside)
        return self.down(self.activation(inside))


class GeluMLP(_MLP):
    """up, GELU (tanh approximation, as GPT-2 and BLOOM), down."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__(shards, shared, "up", partial(F.gelu, approximate="tanh"))


class SwigluMLP(_MLP):
    """silu(gate) * up, down. Source: Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__(shards, shared, "gate_up", shared.kernels.swiglu)


class FinalLayerNorm(LayerNorm):
    """LayerNorm before the output projection, which needs no packing."""

    def forward(self, stream: Stream) -> Tensor:
        return super().forward(unpack(stream)[0])


class FinalRMSNorm(RMSNorm):
    """RMSNorm before the output projection, which needs no packing."""

    def forward(self, stream: Stream) -> Tensor:
        return super().forward(unpack(stream)[0])


def layer_norm(shards: Shards, shared: Shared, module: type[LayerNorm] = LayerNorm) -> LayerNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx)


def rms_norm(shards: Shards, shared: Shared, module: type[RMSNorm] = RMSNorm) -> RMSNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx, kernels=shared.kernels)


final_layer_norm = partial(layer_norm, module=FinalLayerNorm)
final_rms_norm = partial(rms_norm, module=FinalRMSNorm)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches."""

    def __init__(
        self, shards: Shards, shared: Shared, *, norm: Build, mlp: Build, attention: Build = SelfAttention
    ) -> None:
        super().__init__()
        self.ctx, self.probability = shared.ctx, shared.config.model.hidden_dropout
        training = shared.config.training
        self.recompute_all = training.recompute_granularity == "full"
        self.discards_norms = "layernorm" in training.recomputed_modules
        self.recompute_mlp = "mlp" in training.recomputed_modules
        self.attention_norm = norm(shards.below("attention_norm"), shared)
        self.attention = attention(shards.below("attention"), shared)
        self.mlp_norm = norm(shards.below("mlp_norm"), shared)
        self.mlp = mlp(shards.below("mlp"), shared)

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.recompute_all and self.training:
            return repack(self.ctx.streams.recomputed(self._layer, hidden, packing), stream)
        return repack(self._layer(hidden, packing), stream)

    def _layer(self, hidden: Tensor, packing: Packing | CachedTokens | None) -> Tensor:
        attention = partial(self.attention, packing=packing)
        hidden = self._add(hidden, self._branch(self.attention_norm, attention, hidden, recomputed=False))
        return self._add(hidden, self._branch(self.mlp_norm, self.mlp, hidden, recomputed=self.recompute_mlp))

    def _branch(
        self, norm: nn.Module, branch: Callable[[Tensor], Tensor], hidden: Tensor, *, recomputed: bool
    ) -> Tensor:
        """branch(norm(hidden)), with what is to be recomputed of it."""
        discards = self.discards_norms and self.training
        if recomputed and self.training:
            streams = self.ctx.streams
            if discards:
                return streams.recomputed(lambda x: branch(norm(x)), hidden)
            return streams.recomputed(branch, norm(hidden))
        return discard_output(norm, branch, hidden) if discards else branch(norm(hidden))

    def _add(self, hidden: Tensor, branch: Tensor) -> Tensor:
        sharded = self.ctx.sequence_parallel
        return hidden + dropout(branch, self.probability, self.training, self.ctx.streams, sharded=sharded)


def project_tied(module: WordEmbedding, stream: Stream) -> tuple[Tensor, Tensor]:
    """The tied last layer in a pipeline: (hidden, weight) for the loss function."""
    return module(stream, project=lambda outputs: outputs)
