"""Llama 1, 2 and 3: RMSNorm, SwiGLU, no biases, rotary positions, MHA or GQA.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import LLAMA_BUFFERS, LLAMA_MODULES, rotary_fields, rotary_only, rotary_options
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    fields.demand("mlp_bias", False)
    return rotary_options(fields, length=2048, epsilon=1e-6)


def _config_fields(config: Config) -> dict[str, Any]:
    return {**rotary_fields(config), "attention_bias": False, "mlp_bias": False}


def _unsupported(model: ModelConfig) -> list[str]:
    # transformers' own rule, even where head_dim is given
    divided = model.hidden_size % model.num_attention_heads == 0
    return rotary_only(model) + ([] if divided else [f"hidden_size={model.hidden_size}"])


LLAMA = HuggingFaceForm(
    model_type="llama",
    class_name="LlamaForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": LLAMA})
