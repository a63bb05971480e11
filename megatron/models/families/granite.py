"""Granite 3, dense: Llama's block with multipliers of embedding, attention scores, residual branches and logits.

Source: the published checkpoints' config.json and transformers' modeling_granite.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import LLAMA_BUFFERS, LLAMA_MODULES, rotary_fields, rotary_only, rotary_options
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Their fields have the names of our options."""


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    fields.demand("mlp_bias", False)
    options, length = rotary_options(fields, length=2048, epsilon=1e-6)
    return options | {name: fields.take(name, default=1.0) for name in MULTIPLIERS}, length


def _config_fields(config: Config) -> dict[str, Any]:
    return {
        **rotary_fields(config),
        **multiplier_fields(config.model),
        "attention_bias": False,
        "mlp_bias": False,
    }


def multiplier_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": model.embedding_multiplier,
        "attention_multiplier": model.score_factor or model.head_size**-0.5,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_divisor,
    }


GRANITE = HuggingFaceForm(
    model_type="granite",
    class_name="GraniteForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    expresses=frozenset(MULTIPLIERS),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": GRANITE})
