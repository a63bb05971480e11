"""Declarations that decoder-only families share: what a block can be, and the list of layers around it. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from megatron.options.config import Config, ConfigError, ModelConfig
from megatron.parallel.costs import Activation, Attention, MatrixProduct, Norm, Projection, Router, Table
from megatron.parallel.shards import BuildModule, LayerDeclaration, Shard, Shards

NormKind = Literal["layer_norm", "rms_norm", "rms_norm_1p"]
"""The last multiplies by 1 + weight."""
EVERY_BIAS = frozenset({"qkv", "dense", "up", "down"})


class LayerKind(NamedTuple):
    """Difference between the transformer layers of one model."""

    window: int | None = None
    """Window of its attention; None: it sees all."""
    has_experts: bool = False
    """Experts take the place of one MLP."""


def of_embedding(name: str, **options: Any) -> BuildModule:
    """Return the builder of the module `name` of models/embedding.py, which is imported when a module is built."""

    def build(shards: Shards, shared: Any) -> Any:
        from megatron.models import embedding as modules

        return getattr(modules, name)(shards, shared, **options)

    return build


def _project_tied(module: Any, stream: Any) -> Any:
    from megatron.models.embedding import project_tied

    return project_tied(module, stream)


def below(prefix: str, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The shards of a submodule, named from the module above it."""
    return {f"{prefix}.{name}": shard for name, shard in shards.items()}


@dataclass(frozen=True)
class DecoderBlock:
    """Structure of a family's transformer layers: x + attention(norm(x)), then x + mlp(norm(x)), unless said otherwise.

    What differs between the models of a family is an option of the model instead: sizes, windows, multipliers. A family
    with modules of its own overrides `attention_shards`, `mlp_shards` or `shards`, and `build`; with a norm of its own,
    `norm_shards`, `parts` and `build_final_norm`.
    """

    norm: NormKind
    activation: Literal["gelu", "gelu_tanh", "silu"]
    is_gated: bool = False
    """The MLP is down(activation(gate) * up), with gate and up in one weight."""
    biases: frozenset[str] = frozenset()
    """Projections with a bias: of qkv, dense, up (gated: gate and up) and down."""
    norms_inputs: bool = True
    """Each branch reads the normed stream."""
    norms_outputs: bool = False
    """The output of each branch is normed before it is added."""
    is_parallel: bool = False
    """The MLP reads what the attention reads, not its result."""
    head_norm: Literal["head", "whole"] | None = None
    """RMSNorm of queries and keys before they are rotated: over each head, or over all heads together."""
    scales_noise: bool = False
    """NEFTune's noise is added to the multiplied embedding, not to what is multiplied."""

    def norm_shards(self, model: ModelConfig) -> dict[str, Shard]:
        """A norm over the residual stream."""
        return norm_shards(model, self.norm)

    def attention_shards(self, model: ModelConfig, window: int | None) -> dict[str, Shard]:
        """The fused projection [q; k; v], and the output projection, `dense`. `window` of the layer's attention."""
        heads, kv_heads, is_capped = model.num_attention_heads, model.num_kv_heads, model.attention_softcap is not None
        q_size, kv_size = heads * model.head_size, kv_heads * model.head_size
        core = Attention(heads, kv_heads, model.head_size, window, is_capped)
        pieces = (q_size, kv_size, kv_size)
        qkv = column_shards("qkv", model, pieces, bias="qkv" in self.biases, cost=MatrixProduct("attention"))
        cost = MatrixProduct("attention", core)
        dense = row_shards("dense", model, q_size, bias="dense" in self.biases, cost=cost)
        return qkv | self._head_norms(model, q_size, kv_size) | dense

    def _head_norms(self, model: ModelConfig, q_size: int, kv_size: int) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        start = 0.0 if self.norm == "rms_norm_1p" else 1.0
        for name, size in (("q_norm", q_size), ("k_norm", kv_size)):
            cost = Norm(size, is_rms=True, adds_one=self.norm == "rms_norm_1p")
            if self.head_norm == "head":
                shards[f"{name}.weight"] = Shard((model.head_size,), value=start, used_on="heads", cost=cost)
            elif self.head_norm == "whole":
                shards[f"{name}.weight"] = Shard((size,), dim=0, pieces=(size,), value=start, cost=cost)
        return shards

    def mlp_shards(self, model: ModelConfig, ffn_size: int) -> dict[str, Shard]:
        """`up` or the fused [gate; up], and `down`. `ffn_size`: the width between them."""
        f, has_bias = ffn_size, "up" in self.biases
        if self.is_gated:
            # the plain forms keep the activated gate too
            activation = Activation(is_gated=True, kept=f if model.kernels == "plain" else 0)
            up = column_shards("gate_up", model, (f, f), bias=has_bias, cost=MatrixProduct("mlp"))
        else:
            activation = Activation()
            up = column_shards("up", model, (f,), bias=has_bias, cost=MatrixProduct("mlp"))
        cost = MatrixProduct("mlp", activation)
        return up | row_shards("down", model, f, bias="down" in self.biases, cost=cost)

    def expert_shards(self, model: ModelConfig) -> dict[str, Shard]:
        """`router`, each expert as an MLP, and the `shared` ones as one."""
        count = model.num_experts
        assert count is not None
        weight = Shard((count, model.hidden_size), std=model.init_method_std, used_on="stream", cost=Router())
        shards = {"router.weight": weight}
        if model.moe_router_enable_expert_bias:
            shards["router.bias"] = Shard((count,), trained=False, keeps_float32=True, balances=True, used_on="stream")
        # a bias behind the sum over tensor-parallel ranks would have to be each expert's; no published mixture has any
        unbiased = dataclasses.replace(self, biases=self.biases - {"up", "down"})
        one = unbiased.mlp_shards(model, model.expert_ffn_size)
        for expert in range(count):
            own = {name: _of_expert(shard, expert, count, model.moe_router_topk / count) for name, shard in one.items()}
            shards |= below(f"experts.{expert}", own)
        if model.moe_shared_expert_intermediate_size is not None:
            shards |= below("shared", self.mlp_shards(model, model.moe_shared_expert_intermediate_size))
        return shards

    def shards(self, model: ModelConfig, kind: LayerKind) -> dict[str, Shard]:
        """Return the parameters of a layer of this kind. Raises ConfigError."""
        mlp = self.expert_shards(model) if kind.has_experts else self.mlp_shards(model, model.ffn_size)
        branches = {"attention": self.attention_shards(model, kind.window), "mlp": mlp}
        shards: dict[str, Shard] = {}
        if model.shared_norm:
            if not (self.is_parallel and self.norms_inputs):
                raise ConfigError(
                    [
                        f"shared_norm=True needs attention and MLP in parallel, not architecture={model.architecture}; "
                        "leave it out"
                    ]
                )
            shards |= below("shared_norm", self.norm_shards(model))
            if not kind.has_experts:
                branches["mlp"] = _reading_as_attention(mlp)
        for name, branch in branches.items():
            if self.norms_inputs and not model.shared_norm:
                norm = self.norm_shards(model)
                if self.is_parallel and name == "mlp":
                    norm = _of_the_same_input(norm)
                shards |= below(f"{name}_norm", norm)
            shards |= below(name, branch)
            if self.norms_outputs:
                shards |= below(f"{name}_output_norm", self.norm_shards(model))
        return shards

    def build(self, shards: Shards, shared: Any) -> Any:
        """Build the module of one layer."""
        from megatron.models import transformer as modules

        return modules.TransformerLayer(shards, shared, **self.parts())

    def build_final_norm(self, shards: Shards, shared: Any) -> Any:
        """Build the norm before the output projection, which reads what flows between layers."""
        from megatron.models import transformer as modules

        return modules.final_norm(shards, shared, norm=self.norm)

    def parts(self) -> dict[str, Any]:
        """Return what a TransformerLayer is made of, by keyword."""
        from megatron.models import transformer as modules

        return {
            "norm": modules.NORMS[self.norm],
            "mlp": partial(modules.mlp_or_experts, activation=self.activation, is_gated=self.is_gated),
            "attention": partial(modules.SelfAttention, adds_one=self.norm == "rms_norm_1p"),
            "is_parallel": self.is_parallel,
        }


def _of_expert(shard: Shard, expert: int, count: int, share: float) -> Shard:
    cost = shard.cost
    if isinstance(cost, MatrixProduct):
        cost = dataclasses.replace(cost, share=share)
    return dataclasses.replace(shard, expert=expert, num_experts=count, cost=cost)


def _reading_as_attention(branch: Mapping[str, Shard]) -> dict[str, Shard]:
    """An MLP whose products that read the stream keep the attention's input."""
    return {
        name: dataclasses.replace(shard, cost=dataclasses.replace(shard.cost, shares_input=True))
        if isinstance(shard.cost, MatrixProduct) and shard.cost.reads is None
        else shard
        for name, shard in branch.items()
    }


def _of_the_same_input(norm: Mapping[str, Shard]) -> dict[str, Shard]:
    """A norm of what the norm before it reads."""
    return {
        name: dataclasses.replace(shard, cost=dataclasses.replace(shard.cost, shares_input=True))
        if isinstance(shard.cost, Norm)
        else shard
        for name, shard in norm.items()
    }


def norm_shards(model: ModelConfig, kind: NormKind) -> dict[str, Shard]:
    """A norm over the residual stream."""
    cost = Norm(model.hidden_size, is_rms=kind != "layer_norm", adds_one=kind == "rms_norm_1p")
    start = 0.0 if kind == "rms_norm_1p" else 1.0
    shards = {"weight": Shard((model.hidden_size,), value=start, used_on="stream", cost=cost)}
    if kind == "layer_norm":
        shards["bias"] = Shard((model.hidden_size,), used_on="stream")
    return shards


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


def router_terms(model: ModelConfig) -> dict[str, float]:
    """Coefficients of the loss terms that a layer of experts adds, by name."""
    terms = {"load_balancing_loss": model.moe_aux_loss_coeff, "router_z_loss": model.moe_z_loss_coeff}
    return {name: coefficient for name, coefficient in terms.items() if coefficient > 0}


def decoder_layers(config: Config, block: DecoderBlock) -> list[LayerDeclaration]:
    """The list of layers: word embedding, its output, the transformer layers, final norm, output projection."""
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
        embedding |= below("norm", norm_shards(model, "layer_norm"))
    build_word = of_embedding("WordEmbedding", scales_noise=block.scales_noise)
    word = LayerDeclaration("embedding.word", {"weight": vocabulary}, build_word)
    head = dataclasses.replace(vocabulary, cost=Projection())
    last = LayerDeclaration("output", {"weight": head}, of_embedding("OutputProjection"))
    if not model.untie_embeddings_and_output_weights:
        last = dataclasses.replace(word, project=_project_tied)
    kinds = [LayerKind(model.window_of(number), model.has_experts(number)) for number in range(model.num_layers)]
    shards = {kind: block.shards(model, kind) for kind in set(kinds)}
    terms = {kind: router_terms(model) if kind.has_experts else {} for kind in shards}
    return [
        word,
        LayerDeclaration("embedding", embedding, of_embedding("EmbeddingOutput"), dropouts=1),
        *(
            LayerDeclaration(f"layers.{number}", shards[kind], block.build, dropouts=2, loss_terms=terms[kind])
            for number, kind in enumerate(kinds)
        ),
        LayerDeclaration("final_norm", block.norm_shards(model), block.build_final_norm, keeps_output=True),
        last,
    ]
