"""Low-rank adapters of the word embedding and of the output projection (models/adapters.py declares them).

Shapes: S sequence, B batch, H hidden, V vocabulary rows of this rank, R the rank of an adapter; "rows" as in linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import with_adapter
from megatron.parallel.low_rank import dropped, gain, magnitude_of, plus, row_norms
from megatron.parallel.shards import Shards, alias, shard_of

EMBEDDING_MAGNITUDE = "lora_embedding_magnitude_vector"


class Vocabulary(Protocol):
    """An embedding, or an output projection."""

    ctx: ParallelContext
    weight: nn.Parameter
    adapters: VocabularyAdapters | None
    training: bool

    def get_parameter(self, target: str) -> nn.Parameter: ...


@dataclass(frozen=True)
class VocabularyAdapters:
    """Computation of the adapters of a weight that is an embedding, an output projection, or both."""

    embedding: Adapter | None
    output: Adapter | None
    dropout: float
    use_dora: bool

    @property
    def starts_from_base(self) -> bool:
        return self.use_dora

    def is_used(self, name: str, ctx: ParallelContext) -> bool:
        """Return whether this pipeline stage uses an adapter's parameter: a tied weight is on the first and last."""
        return ctx.is_first_stage if name.startswith("lora_embedding") else ctx.is_last_stage

    def embed(self, layer: Vocabulary, rows_SB: Tensor, found: Tensor) -> Tensor:
        """Return the rows of the table that the base has `found`, [S, B, H], with the adapter's added."""
        if self.embedding is None or not layer.ctx.adapters.is_on:
            return found
        down, up = (
            layer.get_parameter("lora_embedding_A"),
            layer.get_parameter("lora_embedding_B") * self.embedding.scale,
        )
        found = plus(found, F.embedding(rows_SB, down.t()), up)
        if not self.use_dora:
            return found
        return found * gain(layer.get_parameter(EMBEDDING_MAGNITUDE), self._embedding_norms(layer))

    def project(self, layer: Vocabulary, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, weight) for the loss, [rows, B, H] with the adapter's R channels after those of `hidden`."""
        if self.output is None or not layer.ctx.adapters.is_on:
            return hidden, weight
        ctx = layer.ctx
        inputs = dropped(hidden, self.dropout if layer.training else 0.0, ctx, sharded=ctx.sequence_parallel)
        down, up = layer.get_parameter("lora_A"), layer.get_parameter("lora_B") * self.output.scale
        if not self.use_dora:
            return with_adapter(hidden, F.linear(inputs, down), weight, up)
        # no gradient of a magnitude without one of all logits: the scaled weight is made, and its gradient
        norms = self._output_norms(layer)
        gains = gain(layer.get_parameter(magnitude_of(self.output)), norms).unsqueeze(1)
        if inputs is not hidden:
            return with_adapter(hidden, inputs, weight, torch.addmm(weight, up, down) * gains - weight)
        scaled: Any = torch.addmm(weight, up, down) * gains
        scaled.shard = shard_of(weight)
        return hidden, scaled

    def start(self, layer: Vocabulary) -> dict[str, Tensor]:
        """Return the magnitudes at the start by local name, float32: the norms then. Collective."""
        found: dict[str, Tensor] = {}
        if self.embedding is not None and self.is_used(EMBEDDING_MAGNITUDE, layer.ctx):
            found[EMBEDDING_MAGNITUDE] = self._embedding_norms(layer)
        if self.output is not None and self.is_used(magnitude_of(self.output), layer.ctx):
            found[magnitude_of(self.output)] = self._output_norms(layer)
        return found

    def _embedding_norms(self, layer: Vocabulary) -> Tensor:
        """Return the norms of the channels over the vocabulary, as PEFT takes them, [H]."""
        assert self.embedding is not None
        down, up = layer.get_parameter("lora_embedding_A"), layer.get_parameter("lora_embedding_B")
        return row_norms(layer.weight.t(), down, up * self.embedding.scale, layer.ctx, is_partial=True)

    def _output_norms(self, layer: Vocabulary) -> Tensor:
        """Return the norms of the rows of this rank, [V]."""
        assert self.output is not None
        down, up = layer.get_parameter("lora_A"), layer.get_parameter("lora_B") * self.output.scale
        return row_norms(layer.weight, down, up, layer.ctx, is_partial=False)


def vocabulary_adapters(module: nn.Module, shards: Shards, ctx: ParallelContext) -> VocabularyAdapters | None:
    """Return the adapters declared for a module, and give it their parameters; None: it has none."""
    method: VocabularyAdapters | None = shards.method
    for name in shards:
        if method is not None and shards[name].added and method.is_used(name, ctx):
            module.register_parameter(name, shards.allocate(name, ctx))
    return method


def output_weight(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden [rows, B, H] and the weight [V, H] of an output layer, for the functions of losses.py."""
    weight = alias(layer.weight)
    return (hidden, weight) if layer.adapters is None else layer.adapters.project(layer, hidden, weight)
