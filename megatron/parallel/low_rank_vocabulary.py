"""Low-rank adapters of the word embedding and of the output projection (models/adapters.py declares them).

Shapes: S sequence, B batch, H hidden, V vocabulary rows of this rank, R the rank of an adapter; "rows" as in linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import capped, with_adapter
from megatron.parallel.low_rank import START, dropped, gain, plus, row_norms, start_of
from megatron.parallel.mappings import copy_to_tensor_region
from megatron.parallel.operators import products
from megatron.parallel.shards import Adapter, Shards, alias, shard_of

EMBEDDING_MAGNITUDE, OUTPUT_MAGNITUDE = "lora_embedding_magnitude_vector", "lora_magnitude_vector"


class Vocabulary(Protocol):
    """An embedding, or an output projection."""

    ctx: ParallelContext
    weight: nn.Parameter
    adapters: VocabularyAdapters | None
    logits_cap: float | None
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
        return self.use_dora or (self.output is not None and self.output.is_principal)

    def is_used(self, name: str, ctx: ParallelContext) -> bool:
        """Return whether this pipeline stage uses an adapter's parameter: a tied weight is on the first and last."""
        return ctx.is_first_stage if name.startswith("lora_embedding") else ctx.is_last_stage

    def embed(self, layer: Vocabulary, rows_SB: Tensor, found: Tensor) -> Tensor:
        """Return the rows of the table that the base has `found`, [S, B, H], with the adapter's added."""
        if self.embedding is None or not layer.ctx.state.adapters.is_on:
            return found
        low = F.embedding(rows_SB, layer.get_parameter("lora_embedding_A").t())
        found = plus(found, low, layer.get_parameter("lora_embedding_B") * self.embedding.scale)
        if not self.use_dora:
            return found
        return found * gain(layer.get_parameter(EMBEDDING_MAGNITUDE), self._embedding_norms(layer))

    def project(self, layer: Vocabulary, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, weight) for the loss, [rows, B, H] with the adapter's R channels after those of `hidden`."""
        if self.output is None or not layer.ctx.state.adapters.is_on:
            return hidden, weight
        sharded = layer.ctx.sequence_parallel
        inputs = dropped(hidden, self.dropout if layer.training else 0.0, layer.ctx, sharded=sharded)
        down, up = self._factors(layer)
        started = [self._factors(layer, START)] if self.output.is_principal else []
        less = [(products.linear(hidden, start_down), -start_up) for start_down, start_up in started]
        if not self.use_dora:
            return with_adapter(hidden, weight, [(products.linear(inputs, down), up), *less])
        # a magnitude's gradient needs that of all logits: the scaled weight is made instead, and its gradient
        if not layer.ctx.sequence_parallel:  # of A each rank has the part of its rows; else A's role sums the parts
            down = copy_to_tensor_region(down, layer.ctx)
        base = weight
        for start_down, start_up in started:
            base = products.add_mm(weight, -start_up, start_down)
        norms = row_norms(base, down, up, layer.ctx, is_partial=False)
        scaled: Any = products.add_mm(base, up, down) * gain(layer.get_parameter(OUTPUT_MAGNITUDE), norms).unsqueeze(1)
        if inputs is not hidden:
            return with_adapter(hidden, weight, [(inputs, scaled - base), *less])
        scaled.shard = shard_of(weight)
        return hidden, scaled

    def start(self, layer: Vocabulary) -> dict[str, Tensor]:
        """Return DoRA's magnitudes, the norms at the start, and PiSSA's factors by local name, float32. Collective."""
        found: dict[str, Tensor] = {}
        ctx = layer.ctx
        if self.embedding is not None and self.use_dora and ctx.is_first_stage:
            found[EMBEDDING_MAGNITUDE] = self._embedding_norms(layer)
        if self.output is not None and ctx.is_last_stage:
            if self.use_dora:
                found[OUTPUT_MAGNITUDE] = row_norms(layer.weight, *self._factors(layer), ctx, is_partial=False)
            if self.output.is_principal:
                found |= start_of(layer, self.output, layer.weight, shard_of(layer.weight), ctx)
        return found

    def _factors(self, layer: Vocabulary, kind: str = "lora_") -> tuple[Tensor, Tensor]:
        """Return A [R, H] and B [V, R] of the output, scaled."""
        assert self.output is not None
        return layer.get_parameter(f"{kind}A"), layer.get_parameter(f"{kind}B") * self.output.scale

    def _embedding_norms(self, layer: Vocabulary) -> Tensor:
        """Return the norms of the channels over the vocabulary, as PEFT takes them, [H]."""
        assert self.embedding is not None
        down, up = layer.get_parameter("lora_embedding_A"), layer.get_parameter("lora_embedding_B")
        return row_norms(layer.weight.t(), down, up * self.embedding.scale, layer.ctx, is_partial=True)


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
    if layer.adapters is not None:
        hidden, weight = layer.adapters.project(layer, hidden, weight)
    return hidden, capped(weight, layer.logits_cap)
