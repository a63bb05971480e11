"""Gemma 3, text: norms around both branches and over heads, a GELU gate, windows in five of six layers.

Every norm multiplies by 1 + weight, the embedding is multiplied by the root of the width, and layers with a window have
rotary positions of their own base. Source: Gemma Team 2025 (arXiv:2503.19786); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    FULL,
    GEMMA_MODULES,
    HEAD_NORM_MODULES,
    LLAMA_BUFFERS,
    SLIDING,
    gemma_options,
    gemma_unsupported,
    layer_types,
    query_scalar,
    rope_options_of,
    rotary_fields,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(
    norm="rms_norm_1p", activation="gelu_tanh", is_gated=True, norms_outputs=True, head_norm="head", scales_noise=True
)


def _rope(fields: ConfigFields, length: int) -> dict[str, Any]:
    """Options from parameters by kind of layer, as transformers 5 has them, or from those of both kinds before."""
    theta, local = fields.take("rope_theta", default=1e6), fields.take("rope_local_base_freq", default=10000.0)
    by_kind = fields.nested("rope_parameters")
    windowed = by_kind.nested(SLIDING)
    windowed.demand("rope_type", "default")
    local = windowed.take("rope_theta", default=local, kind=float)
    windowed.finish()
    whole = by_kind.nested(FULL) if by_kind.has(FULL) else fields.nested("rope_scaling")
    # transformers looks for it one level above, where it is not
    whole.demand("truncate", True)
    options = rope_options_of(whole, theta, length) | {"rotary_base_local": local}
    by_kind.finish()
    return options


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("use_bidirectional_attention", False, None)
    fields.demand("attn_logit_softcapping", None)
    fields.demand("final_logit_softcapping", None)
    pattern = fields.take("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return gemma_options(fields, length=131072, pattern=pattern, rope=_rope)


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {name: value for name, value in rotary_fields(config).items() if name != "hidden_act"}
    return {
        **fields,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": model.rotary_base_local or model.rotary_base,
        "query_pre_attn_scalar": query_scalar(model),
        "sliding_window": model.attention_window,
        "layer_types": layer_types(model),
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    wrong = gemma_unsupported(model)
    if not model.rope_scaling_truncate:
        wrong.append("rope_scaling_truncate=False")
    return wrong


GEMMA3 = HuggingFaceForm(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    prefix="model.",
    modules=GEMMA_MODULES | HEAD_NORM_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset(
        {
            "attention_window",
            "attention_window_pattern",
            "attention_multiplier",
            "embedding_multiplier",
            "rotary_base_local",
        }
    ),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": GEMMA3})
