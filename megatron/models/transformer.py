"""The layers that BLOOM and Llama are lists of.

What flows between layers is the residual stream [rows, B, H], alone or, over packed documents, as the tuple
(hidden, positions, starts) of `Packing`: DeepSpeed's pipeline passes tensors and tuples of tensors between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from megatron.config.options import Config, ModelConfig
from megatron.config.plugins import load_task
from megatron.models.attention import AttentionParts, Packing, SelfAttention
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.parallel.mappings import replicated_parameter
from megatron.parallel.rng import dropout
from megatron.parallel.shards import Shard, alias, sharded_parameter

Stream = Tensor | tuple[Tensor, Tensor, Tensor]
Norm = Callable[[], nn.Module]


def unpack(stream: Stream) -> tuple[Tensor, Packing | None]:
    """The hidden state (or tokens) and the packing of what flows between layers."""
    if isinstance(stream, Tensor):
        return stream, None
    hidden, positions, starts = stream
    return hidden, Packing(positions, starts)


def repack(hidden: Tensor, stream: Stream) -> Stream:
    """`hidden` with what came beside it in `stream`."""
    return hidden if isinstance(stream, Tensor) else (hidden, *stream[1:])


class WordEmbedding(VocabParallelEmbedding):
    """First layer, and under tied weights the last: see VocabParallelEmbedding."""

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        inside, _ = unpack(stream)
        result = super().forward(inside, project)
        return result if project is not None else repack(result, stream)


class OutputProjection(nn.Module):
    """Last layer of an untied model: hands (hidden, weight) to `project`, which computes the loss or the logits."""

    def __init__(
        self, vocab_size: int, padded_size: int, hidden_size: int, *, std: float, ctx: ParallelContext
    ) -> None:
        super().__init__()
        shard = Shard((vocab_size, hidden_size), dim=0, pieces=(vocab_size,), padding=padded_size - vocab_size, std=std)
        self.weight = sharded_parameter(shard, ctx.tensor_size)

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        hidden, _ = unpack(stream)
        outputs = (hidden, alias(self.weight))
        return outputs if project is None else project(outputs)


class EmbeddingOutput(nn.Module):
    """What follows the word embedding: learned positions, embedding LayerNorm, dropout; each where configured."""

    def __init__(self, model: ModelConfig, seq_length: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx, self.probability = ctx, model.hidden_dropout
        self.positions = None
        if model.position_embedding_type == "learned":
            rows = model.max_position_embeddings or seq_length
            self.positions = sharded_parameter(
                Shard((rows, model.hidden_size), std=model.init_method_std), ctx.tensor_size
            )
        self.norm = LayerNorm(model.hidden_size, model.norm_epsilon, ctx) if model.embed_layernorm else None

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.positions is not None:
            hidden = hidden + self._position_rows(hidden, packing)
        if self.norm is not None:
            hidden = self.norm(hidden)
        sharded = self.ctx.sequence_parallel
        return repack(dropout(hidden, self.probability, self.training, self.ctx.streams, sharded=sharded), stream)

    def _position_rows(self, hidden: Tensor, packing: Packing | None) -> Tensor:
        """The position table's rows for this rank's rows of the sequence, [rows, 1 or B, H]."""
        assert self.positions is not None
        table = replicated_parameter(self.positions, self.ctx)
        rows = hidden.shape[0]
        first = self.ctx.tensor_rank * rows if self.ctx.sequence_parallel else 0
        if packing is None:
            return table[first : first + rows].unsqueeze(1)
        return F.embedding(packing.positions_BS.t()[first : first + rows], table)


class GeluMLP(nn.Module):
    """up, GELU (tanh approximation, as GPT-2 and BLOOM), down."""

    def __init__(self, model: ModelConfig, ctx: ParallelContext, *, bias: bool) -> None:
        super().__init__()
        h, f, std = model.hidden_size, model.ffn_size, model.init_method_std
        self.up = ColumnParallelLinear(h, (f,), bias=bias, std=std, ctx=ctx)
        self.down = RowParallelLinear(f, h, bias=bias, std=std / (2 * model.num_layers) ** 0.5, ctx=ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


class SwigluMLP(nn.Module):
    """silu(gate) * up, down. Source: Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, model: ModelConfig, ctx: ParallelContext, *, bias: bool) -> None:
        super().__init__()
        h, f, std = model.hidden_size, model.ffn_size, model.init_method_std
        self.gate_up = ColumnParallelLinear(h, (f, f), bias=bias, std=std, ctx=ctx)
        self.down = RowParallelLinear(f, h, bias=bias, std=std / (2 * model.num_layers) ** 0.5, ctx=ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches."""

    def __init__(
        self,
        model: ModelConfig,
        ctx: ParallelContext,
        parts: AttentionParts,
        *,
        norm: Norm,
        mlp: type[GeluMLP] | type[SwigluMLP],
        bias: bool,
        recompute: str,
    ) -> None:
        super().__init__()
        self.ctx, self.probability = ctx, model.hidden_dropout
        self.recompute_all = recompute == "full"
        self.attention_norm = norm()
        self.attention = SelfAttention(model, ctx, parts, bias=bias, recompute_core=recompute == "selective")
        self.mlp_norm = norm()
        self.mlp = mlp(model, ctx, bias=bias)

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.recompute_all and self.training:
            return repack(self.ctx.streams.recomputed(self._layer, hidden, packing), stream)
        return repack(self._layer(hidden, packing), stream)

    def _layer(self, hidden: Tensor, packing: Packing | None) -> Tensor:
        hidden = hidden + self._drop(self.attention(self.attention_norm(hidden), packing))
        return hidden + self._drop(self.mlp(self.mlp_norm(hidden)))

    def _drop(self, branch: Tensor) -> Tensor:
        sharded = self.ctx.sequence_parallel
        return dropout(branch, self.probability, self.training, self.ctx.streams, sharded=sharded)


class FinalNorm(nn.Module):
    """The normalisation before the output projection."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm()

    def forward(self, stream: Stream) -> Stream:
        hidden, _ = unpack(stream)
        return self.norm(hidden)  # the output projection needs no packing


def hand_over(module: WordEmbedding, stream: Stream) -> tuple[Tensor, Tensor]:
    """The tied last layer in a pipeline: (hidden, weight) for the loss function."""
    return module(stream, project=_identity)


def _identity(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs


def transformer(
    config: Config,
    ctx: ParallelContext,
    *,
    norm: type[LayerNorm] | type[RMSNorm],
    mlp: type[GeluMLP] | type[SwigluMLP],
    bias: bool,
) -> list[LayerSpec]:
    """The list of layers: word embedding, its output, the transformer layers, final norm, output projection."""
    model, seq_length = config.model, config.training.seq_length
    parts = AttentionParts.build(model, ctx, load_task(config).packs_documents)

    def make_norm() -> nn.Module:
        if norm is RMSNorm:
            fused = ctx.device.type == "hpu" and model.use_fused_rmsnorm
            return RMSNorm(model.hidden_size, model.norm_epsilon, ctx, fused_hpu=fused)
        return LayerNorm(model.hidden_size, model.norm_epsilon, ctx)

    vocabulary = (model.vocab_size, model.padded_vocab_size(ctx.tensor_size), model.hidden_size)
    ends: dict[str, Any] = {"std": model.init_method_std, "ctx": ctx}
    tied = not model.untie_embeddings_and_output_weights
    layers: list[LayerSpec] = [
        TiedLayerSpec("word_embedding", WordEmbedding, *vocabulary, **ends)
        if tied
        else LayerSpec(WordEmbedding, *vocabulary, **ends),
        LayerSpec(EmbeddingOutput, model, seq_length, ctx),
    ]
    recompute = config.training.recompute_granularity
    layers += [
        LayerSpec(TransformerLayer, model, ctx, parts, norm=make_norm, mlp=mlp, bias=bias, recompute=recompute)
        for _ in range(model.num_layers)
    ]
    layers.append(LayerSpec(FinalNorm, make_norm))
    layers.append(
        TiedLayerSpec("word_embedding", WordEmbedding, *vocabulary, forward_fn=hand_over, **ends)
        if tied
        else LayerSpec(OutputProjection, *vocabulary, **ends)
    )
    return layers


def compute_dtype(config: Config) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.training.precision]
