"""OLMo 2: norms of the branches' outputs in place of their inputs, and an RMSNorm over all queries, and all keys.

Source: Team OLMo 2024 (arXiv:2501.00656); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    HEAD_NORM_MODULES,
    LLAMA_BUFFERS,
    LLAMA_MODULES,
    rotary_fields,
    rotary_only,
    rotary_options,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config

BLOCK = DecoderBlock(
    norm="rms_norm", activation="silu", is_gated=True, norms_inputs=False, norms_outputs=True, head_norm="whole"
)
OUTPUT_NORMS = {
    "layers.*.attention_output_norm": ("layers.*.post_attention_layernorm",),
    "layers.*.mlp_output_norm": ("layers.*.post_feedforward_layernorm",),
}
INPUT_NORMS = ("layers.*.attention_norm", "layers.*.mlp_norm")


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    return rotary_options(fields, length=2048, epsilon=1e-5)


def _config_fields(config: Config) -> dict[str, Any]:
    return {**rotary_fields(config), "attention_bias": False}


OLMO2 = HuggingFaceForm(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    prefix="model.",
    modules={name: theirs for name, theirs in LLAMA_MODULES.items() if name not in INPUT_NORMS}
    | OUTPUT_NORMS
    | HEAD_NORM_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=rotary_only,
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": OLMO2})
