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
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)

SCALINGS = {"longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Names under which the class reads its only scaling."""


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("full_attn_mod", 1, None)  # of Phi-4 mini; transformers reads neither
    fields.demand("interpolate_factor", 1, None)
    rope = partial(
        partial_rope_options,
        base="rope_theta",
        percent="partial_rotary_factor",
        default=1.0,
        kinds=SCALINGS,
        original=fields.take("original_max_position_embeddings", default=4096),
    )
    options, length = rotary_options(fields, length=4096, epsilon=1e-5, rope=rope)
    dropout = fields.take("resid_pdrop", default=0.0)
    fields.demand("embd_pdrop", dropout)  # one option for both
    window = fields.take("sliding_window", default=None, kind=int)
    return {**options, "hidden_dropout": dropout, "attention_window": window}, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {name: value for name, value in rotary_fields(config).items() if name != "head_dim"}
    original, scaling = fields["max_position_embeddings"], fields.pop("rope_scaling")
    if scaling is not None:
        original = scaling.pop("original_max_position_embeddings")
        # transformers 4 refuses a mapping of more than these, where they suffice
        factor = scaling.pop("factor")
        if factor != fields["max_position_embeddings"] / original:
            scaling["factor"] = factor
        scaling["type"] = scaling.pop("rope_type")
    return {
        **fields,
        "rope_scaling": scaling,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": model.rotary_percent,
        "sliding_window": model.attention_window,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    wrong = rotary_only(model) + heads_of_the_width(model)
    if model.scales_rotary and model.rope_scaling_type != "longrope":
        wrong.append(f"rope_scaling_type={model.rope_scaling_type} (it has longrope only)")
    return wrong


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
        "AutoTokenizer": "Xenova/gpt-4o",  # Phi-4 mini's, whose files lie in the folder too
    },
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": PHI3})
