"""BLOOM: LayerNorm, GELU, biases, learned or ALiBi positions, tied embeddings.

BLOOM-13B (tr1-13B) has learned positions and no embedding LayerNorm, which is GPT-2 to Hugging Face; BLOOM-176B and its
family have ALiBi and one.
Source: Le Scao et al. 2022 (arXiv:2211.05100).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from megatron.models.config_json import heads_of_the_width, one_kv_head_each
from megatron.models.decoder import EVERY_BIAS, DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

log = logging.getLogger(__name__)


BLOCK = DecoderBlock(norm="layer_norm", activation="gelu_tanh", biases=EVERY_BIAS)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face: Bloom (ALiBi) and GPT-2 (learned positions)


def _bloom_options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("apply_residual_connection_post_layernorm", False)
    hidden = fields.take("n_embed", "hidden_size")
    length = fields.take("seq_length", default=None) or 2048
    fields.demand("n_inner", None, 4 * hidden)
    return {
        "num_layers": fields.take("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head", "num_attention_heads"),
        "vocab_size": fields.take("vocab_size"),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=True),
        "norm_epsilon": fields.take("layer_norm_epsilon", default=1e-5),
        "hidden_dropout": fields.take("hidden_dropout", default=0.0),
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _bloom_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "hidden_size": model.hidden_size,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "apply_residual_connection_post_layernorm": False,
        "seq_length": config.training.seq_length,
    }


def _not_bloom(model: ModelConfig) -> list[str]:
    wrong = [] if model.embed_layernorm else ["embed_layernorm=False (it has True only)"]
    wrong += one_kv_head_each(model) + heads_of_the_width(model)
    return wrong + ([] if model.ffn_size == 4 * model.hidden_size else [f"ffn_hidden_size={model.ffn_hidden_size}"])


BLOOM = HuggingFaceForm(
    model_type="bloom",
    class_name="BloomForCausalLM",
    prefix="transformer.",
    modules={
        "embedding.word": ("word_embeddings",),
        "embedding.norm": ("word_embeddings_layernorm",),
        "layers.*.attention_norm": ("h.*.input_layernorm",),
        "layers.*.attention.qkv": ("h.*.self_attention.query_key_value",),
        "layers.*.attention.dense": ("h.*.self_attention.dense",),
        "layers.*.mlp_norm": ("h.*.post_attention_layernorm",),
        "layers.*.mlp.up": ("h.*.mlp.dense_h_to_4h",),
        "layers.*.mlp.down": ("h.*.mlp.dense_4h_to_h",),
        "final_norm": ("ln_f",),
    },
    options=_bloom_options,
    config_fields=_bloom_fields,
    unsupported=_not_bloom,
    qkv_by_head=True,
)


def _gpt2_options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    # three spellings of the same tanh approximation
    fields.demand("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    fields.demand("scale_attn_weights", True)
    fields.demand("scale_attn_by_inverse_layer_idx", False)
    fields.demand("add_cross_attention", False)
    dropout = fields.take("resid_pdrop", default=0.1)
    if fields.take("embd_pdrop", default=0.1) != dropout:
        log.warning("%s: resid_pdrop=%s becomes the dropout after the embedding too", fields.where, dropout)
    length = fields.take("n_positions", "max_position_embeddings", default=1024)
    return {
        "num_layers": fields.take("n_layer", "num_hidden_layers"),
        "hidden_size": fields.take("n_embd", "hidden_size"),
        "ffn_hidden_size": fields.take("n_inner", default=None),
        "num_attention_heads": fields.take("n_head", "num_attention_heads"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "learned",
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=True),
        "norm_epsilon": fields.take("layer_norm_epsilon", default=1e-5),
        "hidden_dropout": dropout,
        "attention_dropout": fields.take("attn_pdrop", default=0.1),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _gpt2_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_size,
        "n_positions": model.max_position_embeddings or config.training.seq_length,
        "activation_function": "gelu_new",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _not_gpt2(model: ModelConfig) -> list[str]:
    positions = model.position_embedding_type
    wrong = [] if positions == "learned" else [f"position_embedding_type={positions} (it has learned only)"]
    wrong += ["embed_layernorm=True (it has False only)"] if model.embed_layernorm else []
    return wrong + one_kv_head_each(model) + heads_of_the_width(model)


GPT2 = HuggingFaceForm(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding.word": ("wte",),
        "embedding.position": ("wpe",),
        "layers.*.attention_norm": ("h.*.ln_1",),
        "layers.*.attention.qkv": ("h.*.attn.c_attn",),
        "layers.*.attention.dense": ("h.*.attn.c_proj",),
        "layers.*.mlp_norm": ("h.*.ln_2",),
        "layers.*.mlp.up": ("h.*.mlp.c_fc",),
        "layers.*.mlp.down": ("h.*.mlp.c_proj",),
        "final_norm": ("ln_f",),
    },
    options=_gpt2_options,
    config_fields=_gpt2_fields,
    unsupported=_not_gpt2,
    transposed=True,
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"alibi": BLOOM, "": GPT2})
