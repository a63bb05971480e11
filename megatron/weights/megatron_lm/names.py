"""Names of a Megatron-LM model's tensors, in both of its nestings, and how their rows make ours.

    language_model.encoder.layers.0.self_attention.query_key_value.weight    Megatron-LM's own, or `transformer`
    decoder.layers.0.self_attention.linear_qkv.weight                        megatron-core's

Each pipeline rank, and each of its virtual stages, counts its layers from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.format import CheckpointError
from megatron.options.model import ModelConfig
from megatron.parallel.layout import LayoutError
from megatron.parallel.shards import Shard
from megatron.weights.deepspeed.origins import MEGATRON_BLOCK, OUTPUT, VOCABULARY, WORD_EMBEDDING

BLOCK = {
    **MEGATRON_BLOCK,
    # the names of releases from 2023, when a norm could be another than LayerNorm
    "input_norm": "attention_norm",
    "post_attention_norm": "mlp_norm",
    # megatron-core's
    "pre_mlp_layernorm": "mlp_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.dense",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
"""Modules of a transformer layer."""
FUSED_NORM = {"self_attention.linear_qkv.layer_norm_": "attention_norm.", "mlp.linear_fc1.layer_norm_": "mlp_norm."}
"""Transformer Engine's layers that have the norm before them: `linear_qkv.layer_norm_weight`."""
ENDS = {
    "embedding.word_embeddings.weight": WORD_EMBEDDING,
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "final_layernorm.weight": "final_norm.weight",
    "final_layernorm.bias": "final_norm.bias",
    "final_norm.weight": "final_norm.weight",
    "final_norm.bias": "final_norm.bias",
    "output_layer.weight": OUTPUT,
}
"""Parameters outside the layers."""
TIED_COPY = "word_embeddings_for_head.weight"
"""The last stage's copy of the word embedding, in Megatron-LM's own model; megatron-core's is in output_layer."""
OUTER = re.compile(r"^(?:language_model\.)?(?:(?:encoder|transformer|decoder)\.)?")
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class OptimizerError(Exception):
    """The optimizer's state cannot be read, the weights can."""


@dataclass(frozen=True)
class TensorPlace:
    """A parameter of a rank's model."""

    chunk: int
    name: str
    """Theirs."""


@dataclass(frozen=True)
class Named:
    """Place of a tensor in a chunk's model."""

    layer: int | None
    """Number within the chunk; None: outside the layers."""
    name: str
    """Our name, below the layer's where there is one."""

    def full_name(self, offset: int) -> str:
        return self.name if self.layer is None else f"layers.{offset + self.layer}.{self.name}"


def named(theirs: str, *, is_gated: bool, is_tied: bool) -> Named | None:
    """Return the place of a tensor by its name; None: a decoder of this kind has none of that name."""
    name = OUTER.sub("", theirs)
    match = LAYER.fullmatch(name)
    if match is None:
        ours = WORD_EMBEDDING if theirs == TIED_COPY else ENDS.get(name)
        if ours == OUTPUT and is_tied:
            ours = WORD_EMBEDDING
        return None if ours is None else Named(None, ours)
    number, name = int(match[1]), re.sub(r"^attention\.", "self_attention.", match[2])
    for theirs_norm, norm in FUSED_NORM.items():
        if name.startswith(theirs_norm):
            return Named(number, norm + name.removeprefix(theirs_norm))
    module, _, kind = name.rpartition(".")
    ours = BLOCK.get(module)
    if ours is None or kind not in ("weight", "bias"):
        return None
    if ours == "mlp.up" and is_gated:
        ours = "mlp.gate_up"
    return Named(number, f"{ours}.{kind}")


def num_layers(names: Iterable[str]) -> int:
    """Return the number of layers in a chunk. Raises ValueError, naming the first that is missing between others."""
    found = {int(match[1]) for name in names if (match := LAYER.fullmatch(OUTER.sub("", name)))}
    for number in range(len(found)):
        if number not in found:
            raise ValueError(f"layer {number} of its own")
    return len(found)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class RowPart:
    """Rows [begin, begin + count) of our full tensor, from `column` on: in a rank's tensor first, first + step, ..."""

    begin: int
    count: int
    rank: int
    first: int = 0
    step: int = 1
    column: int = 0


@dataclass(frozen=True)
class RowOrder:
    """Order of the rows in a checkpoint's tensors, as far as a parameter's shard does not give it."""

    model: ModelConfig
    tensor_size: int
    version: float
    """checkpoint_version: 0 has rows of q, k and v one after the other, 1 by channel, 2 and 3 by head or group."""

    def local_shape(self, name: str, shard: Shard) -> tuple[int, ...]:
        """Return the shape of each rank's tensor, of a vocabulary without its padding. Raises CheckpointError."""
        if name in VOCABULARY:
            return shard.shape
        groups = self.model.num_kv_heads
        if ".attention.qkv." in name and groups % self.tensor_size:
            raise CheckpointError(
                f"{groups} key/value heads do not divide over {self.tensor_size} tensor-parallel ranks, which then "
                "hold parts of a head; save it with fewer ranks"
            )
        try:
            return shard.local_shape(self.tensor_size)
        except LayoutError as error:
            raise CheckpointError(str(error)) from None

    def parts(self, name: str, shard: Shard, local_rows: int) -> list[RowPart]:
        """Return the parts of a parameter, of which each rank's tensor has `local_rows` rows."""
        if shard.dim is None:
            return [RowPart(0, shard.shape[0], 0)]
        ranks = range(self.tensor_size)
        if shard.dim == 1:
            width = shard.shape[1] // self.tensor_size
            return [RowPart(0, shard.shape[0], rank, column=rank * width) for rank in ranks]
        if name in VOCABULARY:
            # rows behind the vocabulary are padding
            ends = [min(shard.shape[0], (rank + 1) * local_rows) for rank in ranks]
            return [
                RowPart(rank * local_rows, end - rank * local_rows, rank)
                for rank, end in enumerate(ends)
                if end > rank * local_rows
            ]
        if ".attention.qkv." in name:
            return [part for rank in ranks for part in self._heads(rank)]
        return [part for rank in ranks for part in _pieces(shard, rank, self.tensor_size)]

    def _heads(self, rank: int) -> Iterator[RowPart]:
        """Yield the rows of a rank's heads: ours are those of all q, then of all k, then of all v."""
        size, groups = self.model.head_size, self.model.num_kv_heads
        queries, per_rank = self.model.num_attention_heads // groups, groups // self.tensor_size
        q_size, kv_size = self.model.num_attention_heads * size, groups * size
        for index in range(per_rank):
            group = rank * per_rank + index
            begins = (group * queries * size, q_size + group * size, q_size + kv_size + group * size)
            counts = (queries * size, size, size)
            for piece, (begin, count) in enumerate(zip(begins, counts, strict=True)):
                if self.version == 0:
                    yield RowPart(begin, count, rank, piece * per_rank * size + index * size)
                elif self.version == 1:
                    yield RowPart(begin, count, rank, index * size * 3 + piece, step=3)
                else:
                    yield RowPart(begin, count, rank, index * sum(counts) + sum(counts[:piece]))


def _pieces(shard: Shard, rank: int, size: int) -> Iterator[RowPart]:
    first = 0
    for begin, end in shard.spans(rank, size):
        yield RowPart(begin, end - begin, rank, first)
        first += end - begin


def check_version(folder: Path, order: RowOrder) -> None:
    """Raise CheckpointError for an order of rows that no Megatron wrote."""
    # grouped queries are newer than version 3
    if order.version < 2 and order.model.num_kv_heads != order.model.num_attention_heads:
        raise CheckpointError(
            f"{folder} has checkpoint_version {order.version:g}, which knows no grouped queries, but its model has "
            "them; Megatron-LM has written none such"
        )
