"""Parameters of megatron-core's checkpoints by our names: which of its tensors, and which of their leading numbers.

Layers, and the experts of a layer, are stacked in one tensor each, or have one each, by the release and its options.
The norm in front of a projection is named after the projection (`linear_qkv.layer_norm_weight`), or by itself.

Source: NVIDIA/Megatron-LM, megatron/core 0.7 to 0.16: sharded_state_dict of models/gpt and transformer
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.weights.huggingface import MappedTensor

_ENDS = {
    "embedding.word.": "embedding.word_embeddings.",
    "embedding.position.": "embedding.position_embeddings.",
    "final_norm.": "decoder.final_layernorm.",
    "output.": "output_layer.",
}
_LAYERS = "decoder.layers."
_BLOCK: Mapping[str, tuple[str, ...]] = {
    "attention_norm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "attention.qkv.": ("self_attention.linear_qkv.",),
    "attention.q_norm.": ("self_attention.q_layernorm.",),
    "attention.k_norm.": ("self_attention.k_layernorm.",),
    "attention.dense.": ("self_attention.linear_proj.",),
    "mlp_norm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.gate_up.": ("mlp.linear_fc1.",),
    "mlp.up.": ("mlp.linear_fc1.",),
    "mlp.down.": ("mlp.linear_fc2.",),
    "mlp.router.bias": ("mlp.router.expert_bias",),
    "mlp.router.": ("mlp.router.",),
    "mlp.shared.gate_up.": ("mlp.shared_experts.linear_fc1.",),
    "mlp.shared.down.": ("mlp.shared_experts.linear_fc2.",),
}
"""Modules of a layer; of several names, the first that is there counts."""
_EXPERT = {"gate_up.": "linear_fc1.", "up.": "linear_fc1.", "down.": "linear_fc2."}
_OUR_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUR_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
VOCABULARY = ("embedding.word.weight", "output.weight")
"""Parameters with rows of padding behind those of the tokens."""
FUSED_QKV = ".attention.qkv."


@dataclass(frozen=True)
class Place:
    """A parameter, or a half of one, in the files."""

    key: str
    index: tuple[int, ...] = ()
    """Numbers of the layer and the expert in a stack."""

    @property
    def name(self) -> str:
        return f"{self.key}{list(self.index) if self.index else ''}"


def places(name: str, held: Collection[str]) -> tuple[Place, ...] | None:
    """Return where the files hold our parameter: at one place, or its gate and up apart; None: they do not."""
    # in the order of preference: a folder holds one of the forms
    for key, index in _candidates(name):
        if key in held:
            return (Place(key, index),)
        # each of the two halves of a gated projection has its own where every shard has (singleton_local_shards)
        if f"{key}_w" in held and f"{key}_v" in held:
            return Place(f"{key}_w", index), Place(f"{key}_v", index)
    return None


def _candidates(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the keys that a parameter may have, each with the numbers in a stack."""
    layer = _OUR_LAYER.fullmatch(name)
    if layer is None:
        for ours, theirs in _ENDS.items():
            if name.startswith(ours):
                yield theirs + name.removeprefix(ours), ()
        return
    # stacked first, as most releases save
    number, rest = int(layer[1]), layer[2]
    for theirs, index in _in_layer(rest):
        yield f"{_LAYERS}{theirs}", (number, *index)
        yield f"{_LAYERS}{number}.{theirs}", index


def _in_layer(rest: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    expert = _OUR_EXPERT.fullmatch(rest)
    if expert is None:
        # the longest: a router's bias is another tensor than its weight
        ours = max((ours for ours in _BLOCK if rest.startswith(ours)), key=len, default=None)
        for theirs in _BLOCK[ours] if ours is not None else ():
            yield theirs + rest.removeprefix(str(ours)), ()
        return
    number, module = int(expert[1]), expert[2]
    # all experts in one tensor, or each with its own
    for ours, theirs in _EXPERT.items():
        if module.startswith(ours):
            end = theirs + module.removeprefix(ours)
            yield f"mlp.experts.experts.{end}", (number,)
            yield f"mlp.experts.experts.{number}.{end}", ()


def stack_lengths(place: Place, config: Config) -> tuple[int, ...]:
    """Return the lengths of the stacks of layers and experts that a place is in."""
    layers, experts = config.model.num_layers, config.model.num_experts or 0
    # a stack of experts alone is that of a layer with a key of its own
    of_one = experts if re.match(rf"{_LAYERS}\d", place.key) else layers
    return {0: (), 1: (of_one,), 2: (layers, experts)}[len(place.index)]


def written_place(name: str) -> Place:
    """Return the place that a parameter is written to: stacked, as the default specification names it."""
    found = next(iter(_candidates(name)), None)
    if found is None:
        raise CheckpointError(f"megatron-core has no place for {name}; keep the model as native or universal")
    key, index = found
    return Place(key, index)


def parts(name: str, shard: Shard, at: tuple[Place, ...], config: Config) -> tuple[MappedTensor, ...]:
    """Return the tensors of theirs that make a parameter of ours, in the order of its rows."""
    # gate and up are of one size
    rows = shard.shape[0] // len(at)
    heads = None
    # whole groups of heads follow each other: [key/value head][its queries, k, v]
    if FUSED_QKV in name:
        heads = config.model.num_attention_heads, config.model.num_kv_heads
    # numbered in the order of our rows
    shape = (rows, *shard.shape[1:])
    return tuple(MappedTensor(place.name, shape, number * rows, rows, heads=heads) for number, place in enumerate(at))
