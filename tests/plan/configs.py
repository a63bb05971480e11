"""Configs that the tests of this folder plan."""

from __future__ import annotations

from typing import Any

from megatron.options.config import Config
from megatron.options.stored import from_dict
from megatron.parallel.layout import Layout
from megatron.plan.activations import layer_memory
from megatron.plan.flops import declared_layers

BLOOM_13B = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 32, "max_position_embeddings": 2048}
LLAMA_8B = {
    "architecture": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def config(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return from_dict({"model": model or {}, **sections})


def copies(run: Config, number: int) -> Layout:
    """The layout of so many copies of the run's model."""
    return Layout.of(run.parallel, number * Layout.of(run.parallel).model_size)


def bytes_of_a_layer(run: Config) -> int:
    return layer_memory(next(layer for layer in declared_layers(run) if layer.number == 0), run).kept
