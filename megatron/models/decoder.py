"""Declarations that decoder-only families share: attention, MLP, and the list of layers around them. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.options.config import Config, ModelConfig
from megatron.parallel.costs import Activation, Attention, MatrixProduct, Norm, Projection, Table
from megatron.parallel.shards import BuildModule, LayerDeclaration, Shard, Shards


def transformer(name: str, **parts: str) -> BuildModule:
    """Return what builds the module `name` of models/transformer.py, which is imported when a module is built.

    `parts` are passed by keyword: further names there, such as `norm="rms_norm"`.
    """

    def build(shards: Shards, shared: Any) -> Any:
        from megatron.models import transformer as modules

        return getattr(modules, name)(shards, shared, **{key: getattr(modules, part) for key, part in parts.items()})

    return build


def _project_tied(module: Any, stream: Any) -> Any:
    from megatron.models.transformer import project_tied

    return project_tied(module, stream)


def below(prefix: str, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The shards of a submodule, named from the module above it."""
    return {f"{prefix}.{name}": shard for name, shard in shards.items()}


def rms_norm_shards(model: ModelConfig) -> dict[str, Shard]:
    """An RMSNorm over the residual stream."""
    cost = Norm(model.hidden_size, is_rms=True)
    return {"weight": Shard((model.hidden_size,), value=1.0, used_on="stream", cost=cost)}


def layer_norm_shards(model: ModelConfig, *, bias: bool = True) -> dict[str, Shard]:
    """A LayerNorm over the residual stream."""
    cost = Norm(model.hidden_size, is_rms=False)
    shards = {"weight": Shard((model.hidden_size,), value=1.0, used_on="stream", cost=cost)}
    if bias:
        shards["bias"] = Shard((model.hidden_size,), used_on="stream")
    return shards


def attention_shards(model: ModelConfig, *, bias: bool) -> dict[str, Shard]:
    """The fused projection [q; k; v], and the output projection, `dense`."""
    q_size, kv_size = model.num_attention_heads * model.head_size, model.num_kv_heads * model.head_size
    core = Attention(model.num_attention_heads, model.num_kv_heads, model.head_size)
    qkv = column_shards("qkv", model, (q_size, kv_size, kv_size), bias=bias, cost=MatrixProduct("attention"))
    return qkv | row_shards("dense", model, q_size, bias=bias, cost=MatrixProduct("attention", core))


def mlp_shards(model: ModelConfig, *, gated: bool, bias: bool) -> dict[str, Shard]:
    """`up` or the fused [gate; up], and `down`."""
    f = model.ffn_size
    if gated:
        # the plain form of SwiGLU keeps silu(gate) too
        activation = Activation(is_gated=True, kept=f if model.kernels == "plain" else 0)
        up = column_shards("gate_up", model, (f, f), bias=bias, cost=MatrixProduct("mlp"))
    else:
        activation = Activation()
        up = column_shards("up", model, (f,), bias=bias, cost=MatrixProduct("mlp"))
    return up | row_shards("down", model, f, bias=bias, cost=MatrixProduct("mlp", activation))


def column_shards(
    name: str, model: ModelConfig, pieces: tuple[int, ...], *, bias: bool, cost: MatrixProduct
) -> dict[str, Shard]:
    """A column-parallel layer from the residual stream to these fused outputs."""
    rows, std = sum(pieces), model.init_method_std
    shards = {f"{name}.weight": Shard((rows, model.hidden_size), dim=0, pieces=pieces, std=std, cost=cost)}
    if bias:
        shards[f"{name}.bias"] = Shard((rows,), dim=0, pieces=pieces)
    return shards


def row_shards(name: str, model: ModelConfig, in_size: int, *, bias: bool, cost: MatrixProduct) -> dict[str, Shard]:
    """A row-parallel layer back to the residual stream, which starts smaller with the depth of the model."""
    std = model.init_method_std / (2 * model.num_layers) ** 0.5
    shards = {f"{name}.weight": Shard((model.hidden_size, in_size), dim=1, pieces=(in_size,), std=std, cost=cost)}
    if bias:
        shards[f"{name}.bias"] = Shard((model.hidden_size,), used_on="stream")
    return shards


def decoder_layers(
    config: Config,
    *,
    block: Mapping[str, Shard],
    build_block: BuildModule,
    norm: Mapping[str, Shard],
    build_final_norm: BuildModule,
) -> list[LayerDeclaration]:
    """The list of layers: word embedding, its output, the transformer layers, final norm, output projection.

    `block` are the shards of a transformer layer with two residual branches, `norm` those of the final norm.
    """
    model = config.model
    padding = model.padded_vocab_size(config.parallel.tensor_model_parallel_size) - model.vocab_size
    vocabulary = Shard(
        (model.vocab_size, model.hidden_size),
        dim=0,
        pieces=(model.vocab_size,),
        padding=padding,
        std=model.init_method_std,
        vocabulary=True,
        cost=Table(),
    )
    embedding: dict[str, Shard] = {}
    if model.position_embedding_type == "learned":
        rows = model.max_position_embeddings or config.training.seq_length
        embedding["position.weight"] = Shard(
            (rows, model.hidden_size), std=model.init_method_std, used_on="stream", cost=Table()
        )
    if model.embed_layernorm:
        embedding |= below("norm", layer_norm_shards(model))
    word = LayerDeclaration("embedding.word", {"weight": vocabulary}, transformer("WordEmbedding"))
    head = dataclasses.replace(vocabulary, cost=Projection())
    last = LayerDeclaration("output", {"weight": head}, transformer("OutputProjection"))
    if not model.untie_embeddings_and_output_weights:
        last = dataclasses.replace(word, project=_project_tied)
    return [
        word,
        LayerDeclaration("embedding", embedding, transformer("EmbeddingOutput"), dropouts=1),
        *(LayerDeclaration(f"layers.{number}", block, build_block, dropouts=2) for number in range(model.num_layers)),
        LayerDeclaration("final_norm", norm, build_final_norm, keeps_output=True),
        last,
    ]
