"""Qwen3: Llama's block with an RMSNorm over each head of queries and keys, and heads of 128 channels.

Source: Yang et al. 2025 (arXiv:2505.09388); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    HEAD_NORM_MODULES,
    LLAMA_BUFFERS,
    LLAMA_MODULES,
    layered_window_fields,
    layered_window_options,
    rotary_fields,
    rotary_only,
    rotary_options,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True, head_norm="head")


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    options, length = rotary_options(fields, length=32768, epsilon=1e-6, groups=32, head_size=128)
    return options | layered_window_options(fields, options["num_layers"]), length


def _config_fields(config: Config) -> dict[str, Any]:
    return {**rotary_fields(config), **layered_window_fields(config.model), "attention_bias": False}


QWEN3 = HuggingFaceForm(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES | HEAD_NORM_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    expresses=frozenset({"attention_window", "attention_window_pattern"}),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": QWEN3})
