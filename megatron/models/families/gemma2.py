"""Gemma 2: norms around both branches, a GELU gate, a window in every other layer, soft caps of scores and logits.

Every norm multiplies by 1 + weight, and the embedding is multiplied by the root of the width.
Source: Gemma Team 2024 (arXiv:2408.00118); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import (
    GEMMA_MODULES,
    LLAMA_BUFFERS,
    gemma_options,
    gemma_unsupported,
    layer_types,
    query_scalar,
    rotary_fields,
)
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config

BLOCK = DecoderBlock(norm="rms_norm_1p", activation="gelu_tanh", is_gated=True, norms_outputs=True, scales_noise=True)
CAPS = {"attention_softcap": ("attn_logit_softcapping", 50.0), "logits_softcap": ("final_logit_softcapping", 30.0)}
"""Their names and defaults; null: none."""


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("use_bidirectional_attention", None, False)
    options, length = gemma_options(fields, length=8192, pattern=2)
    for ours, (theirs, default) in CAPS.items():
        options[ours] = fields.take(theirs, default=None if fields.has(theirs) else default, kind=float)
    return options, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {name: value for name, value in rotary_fields(config).items() if name != "hidden_act"}
    return {
        **fields,
        **{theirs: getattr(model, ours) for ours, (theirs, _) in CAPS.items()},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar(model),
        "sliding_window": model.attention_window,
        "layer_types": layer_types(model),
        "attention_bias": False,
    }


GEMMA2 = HuggingFaceForm(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    prefix="model.",
    modules=GEMMA_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=gemma_unsupported,
    expresses=frozenset(
        {"attention_window", "attention_window_pattern", "attention_multiplier", "embedding_multiplier", *CAPS}
    ),
    buffers=LLAMA_BUFFERS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": GEMMA2})
