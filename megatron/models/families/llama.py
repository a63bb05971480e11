"""Llama 1, 2 and 3: RMSNorm, SwiGLU, no biases, rotary positions, MHA or GQA.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

from typing import Any

from megatron.models.decoder import attention_shards, below, decoder_layers, mlp_shards, rms_norm_shards, transformer
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig
from megatron.parallel.shards import LayerDeclaration


def declare(config: Config) -> list[LayerDeclaration]:
    model = config.model
    norm = rms_norm_shards(model)
    return decoder_layers(
        config,
        block={
            **below("attention_norm", norm),
            **below("attention", attention_shards(model, bias=False)),
            **below("mlp_norm", norm),
            **below("mlp", mlp_shards(model, gated=True, bias=False)),
        },
        build_block=transformer("TransformerLayer", norm="rms_norm", mlp="SwigluMLP"),
        norm=norm,
        build_final_norm=transformer("final_rms_norm"),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    fields.demand("mlp_bias", False)
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    groups, head_size = fields.take("num_key_value_heads", default=heads), fields.take("head_dim", default=None)
    length = fields.take("max_position_embeddings", default=2048)
    plain_size = hidden // heads if heads > 0 else None
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.take("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if head_size == plain_size else head_size,
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        **_rope_options(fields),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=False),
        "norm_epsilon": fields.take("rms_norm_eps", default=1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _rope_options(fields: ConfigFields) -> dict[str, Any]:
    """Options from transformers 5's rope_parameters, or from rope_theta and rope_scaling before."""
    theta = fields.take("rope_theta", default=10000.0)
    inner = fields.nested("rope_parameters", "rope_scaling", apart_from="rope_theta")
    fields.demand("partial_rotary_factor", 1.0)
    kind = inner.take("rope_type", "type", default="default")
    options = {"rotary_base": inner.take("rope_theta", default=theta, kind=float)}
    inner.demand("partial_rotary_factor", 1.0)
    if kind == "llama3":
        inner.demand("attention_factor", None, 1.0)
        options["rope_scaling_factor"] = inner.take("factor", kind=float)
        options["rope_scaling_low_freq_factor"] = inner.take("low_freq_factor", kind=float)
        options["rope_scaling_high_freq_factor"] = inner.take("high_freq_factor", kind=float)
        options["rope_scaling_original_length"] = inner.take("original_max_position_embeddings")
    elif kind != "default":
        inner.refuse(f"rope_type={kind!r} (supported: 'default' or 'llama3')")
    inner.finish()
    return options


def _config_fields(config: Config) -> dict[str, Any]:
    model, scaling = config.model, None
    if model.rope_scaling_factor is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_length,
        }
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": model.attention_dropout,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    positions = model.position_embedding_type
    wrong = [] if positions == "rope" else [f"position_embedding_type={positions} (it has rope only)"]
    wrong += ["embed_layernorm=True (it has False only)"] if model.embed_layernorm else []
    # transformers' own rule, even where head_dim is given
    divided = model.hidden_size % model.num_attention_heads == 0
    return wrong + ([] if divided else [f"hidden_size={model.hidden_size}"])


LLAMA = HuggingFaceForm(
    model_type="llama",
    class_name="LlamaForCausalLM",
    prefix="model.",
    modules={
        "embedding.word": ("embed_tokens",),
        "layers.*.attention_norm": ("layers.*.input_layernorm",),
        "layers.*.attention.qkv": (
            "layers.*.self_attn.q_proj",
            "layers.*.self_attn.k_proj",
            "layers.*.self_attn.v_proj",
        ),
        "layers.*.attention.dense": ("layers.*.self_attn.o_proj",),
        "layers.*.mlp_norm": ("layers.*.post_attention_layernorm",),
        "layers.*.mlp.gate_up": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
        "layers.*.mlp.down": ("layers.*.mlp.down_proj",),
        "final_norm": ("norm",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",
)

FAMILY = Family(declare=declare, huggingface={"": LLAMA})
