"""GPT-NeoX, as Pythia: LayerNorm, exact GELU, biases, attention and MLP in parallel, a quarter of each head rotated.

Source: Black et al. 2022 (arXiv:2204.06745); Biderman et al. 2023 (arXiv:2304.01373); the published config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    heads_of_the_width,
    one_kv_head_each,
    partial_rope_options,
    rope_fields,
    rotary_only,
)
from megatron.models.decoder import EVERY_BIAS, DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="layer_norm", activation="gelu", biases=EVERY_BIAS, is_parallel=True)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "gelu")
    fields.demand("attention_bias", True)
    fields.demand("use_parallel_residual", True)
    length = fields.take("max_position_embeddings", default=2048)
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": fields.take("hidden_size"),
        "ffn_hidden_size": fields.take("intermediate_size"),
        "num_attention_heads": fields.take("num_attention_heads"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        **partial_rope_options(fields, length, base="rotary_emb_base", percent="rotary_pct", default=0.25),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=False),
        "norm_epsilon": fields.take("layer_norm_eps", default=1e-5),
        "hidden_dropout": fields.take("hidden_dropout", default=0.0),
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": "gelu",
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        "layer_norm_eps": model.norm_epsilon,
        **{name: value for name, value in rope_fields(model).items() if name != "rope_theta"},
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_percent,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return rotary_only(model) + one_kv_head_each(model) + heads_of_the_width(model)


GPT_NEOX = HuggingFaceForm(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    modules={
        "embedding.word": ("embed_in",),
        "layers.*.attention_norm": ("layers.*.input_layernorm",),
        "layers.*.attention.qkv": ("layers.*.attention.query_key_value",),
        "layers.*.attention.dense": ("layers.*.attention.dense",),
        "layers.*.mlp_norm": ("layers.*.post_attention_layernorm",),
        "layers.*.mlp.up": ("layers.*.mlp.dense_h_to_4h",),
        "layers.*.mlp.down": ("layers.*.mlp.dense_4h_to_h",),
        "final_norm": ("final_layer_norm",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"rotary_percent"}),
    output="embed_out.weight",
    qkv_by_head=True,
    buffers=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": GPT_NEOX})
