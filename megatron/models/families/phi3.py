"""Phi-3 and Phi-4: Llama's block, with q, k and v in one tensor, and gate and up; a window in every layer or none.

Source: Abdin et al. 2024 (arXiv:2404.14219, arXiv:2412.08905); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    LLAMA_BUFFERS,
    LLAMA_MODULES,
    heads_of_the_width,
    partial_rope_options,
    rotary_fields,
    rotary_only,
    rotary_options,
    unscaled,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    rope = partial(partial_rope_options, base="rope_theta", percent="partial_rotary_factor", default=1.0)
    options, length = rotary_options(fields, length=4096, epsilon=1e-5, rope=rope)
    dropout = fields.take("resid_pdrop", default=0.0)
    fields.demand("embd_pdrop", dropout)  # one option for both
    # read by the long form of the positions alone
    fields.take("original_max_position_embeddings", default=4096)
    window = fields.take("sliding_window", default=None, kind=int)
    return {**options, "hidden_dropout": dropout, "attention_window": window}, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {name: value for name, value in rotary_fields(config).items() if name != "head_dim"}
    return {
        **fields,
        "original_max_position_embeddings": fields["max_position_embeddings"],
        "partial_rotary_factor": model.rotary_percent,
        "sliding_window": model.attention_window,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return rotary_only(model) + heads_of_the_width(model) + unscaled(model)


PHI3 = HuggingFaceForm(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES
    | {
        "layers.*.attention.qkv": ("layers.*.self_attn.qkv_proj",),
        "layers.*.mlp.gate_up": ("layers.*.mlp.gate_up_proj",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"attention_window", "rotary_percent"}),
    buffers=LLAMA_BUFFERS,
    published_code={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": PHI3})
