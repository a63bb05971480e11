"""Low-rank adapters of the word embedding and of the output projection (models/adapters.py declares them).

Shapes: S sequence, B batch, H hidden, V vocabulary rows of this rank, R the rank of an adapter; "rows" as in linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import with_adapter
from megatron.parallel.low_rank import dropped, plus
from megatron.parallel.shards import Shards, alias


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

    def is_used(self, name: str, ctx: ParallelContext) -> bool:
        """Return whether this pipeline stage uses an adapter's parameter: a tied weight is on the first and last."""
        return ctx.is_first_stage if name.startswith("lora_embedding") else ctx.is_last_stage

    def embed(self, layer: Vocabulary, rows_SB: Tensor, found: Tensor) -> Tensor:
        """Return the rows of the table that the base has `found`, [S, B, H], with the adapter's added."""
        if self.embedding is None:
            return found
        low = F.embedding(rows_SB, layer.get_parameter("lora_embedding_A").t())
        return plus(found, low, layer.get_parameter("lora_embedding_B") * self.embedding.scale)

    def project(self, layer: Vocabulary, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, weight) for the loss, [rows, B, H] with the adapter's R channels after those of `hidden`."""
        if self.output is None:
            return hidden, weight
        ctx = layer.ctx
        x = dropped(hidden, self.dropout if layer.training else 0.0, ctx, sharded=ctx.sequence_parallel)
        low = F.linear(x, layer.get_parameter("lora_A"))
        return with_adapter(hidden, low, weight, layer.get_parameter("lora_B") * self.output.scale)


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
