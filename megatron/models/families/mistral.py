"""Mistral: Llama's block, with a window of attention in every layer or none.

Source: Jiang et al. 2023 (arXiv:2310.06825); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    LLAMA_BUFFERS,
    LLAMA_MODULES,
    rotary_fields,
    rotary_only,
    rotary_options,
    sliding_window,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    options, length = rotary_options(fields, length=131072, epsilon=1e-6, groups=8)
    return {**options, "attention_window": sliding_window(fields)}, length


def _config_fields(config: Config) -> dict[str, Any]:
    return {**rotary_fields(config), "sliding_window": config.model.attention_window}


MISTRAL = HuggingFaceForm(
    model_type="mistral",
    class_name="MistralForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    expresses=frozenset({"attention_window"}),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": MISTRAL})
