"""Qwen2 and Qwen2.5: Llama's block with biases of q, k and v, and windows of attention in the upper layers, or none.

Source: Yang et al. 2024 (arXiv:2407.10671, arXiv:2412.15115); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
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

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True, biases=frozenset({"qkv"}))


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    options, length = rotary_options(fields, length=32768, epsilon=1e-6, groups=32)
    return options | layered_window_options(fields, options["num_layers"]), length


def _config_fields(config: Config) -> dict[str, Any]:
    return rotary_fields(config) | layered_window_fields(config.model)


QWEN2 = HuggingFaceForm(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    expresses=frozenset({"attention_window", "attention_window_pattern"}),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": QWEN2})
