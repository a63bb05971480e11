"""Granite 3 with experts: Granite's block and multipliers, 8 of 32 or 40 experts for each token.

Source: the published checkpoints' config.json and transformers' modeling_granitemoe.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models import config_json, expert_config
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.families.granite import MULTIPLIERS, multiplier_fields
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)
ROOM = "layers.*.block_sparse_moe"


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    options, length = config_json.rotary_options(fields, length=2048, epsilon=1e-6)
    options |= expert_config.expert_options(fields, options["num_layers"], count=8, topk=2, coefficient=0.001)
    return options | {name: fields.take(name, default=1.0) for name in MULTIPLIERS}, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **config_json.rotary_fields(config),
        **multiplier_fields(model),
        **expert_config.expert_fields(model, count="num_local_experts"),
        "intermediate_size": model.expert_ffn_size,
        "attention_bias": False,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return config_json.rotary_only(model) + expert_config.without_experts(model)


GRANITE_MOE = HuggingFaceForm(
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    prefix="model.",
    # files have one tensor for all experts: the names of each are for adapters and messages
    modules=expert_config.ATTENTION_MODULES
    | {
        "layers.*.mlp.router": (f"{ROOM}.router.layer",),
        "layers.*.mlp.experts.*.gate_up": (f"{ROOM}.experts.*.input_linear",),
        "layers.*.mlp.experts.*.down": (f"{ROOM}.experts.*.output_linear",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({*MULTIPLIERS, "num_experts"}),
    buffers=config_json.LLAMA_BUFFERS,
    fused_experts={
        "layers.*.mlp.experts.*.gate_up": f"{ROOM}.input_linear.weight",
        "layers.*.mlp.experts.*.down": f"{ROOM}.output_linear.weight",
    },
    writes_fused=True,
    # transformers 5 in memory
    renamed={
        r"\.experts\.gate_up_proj$": ".input_linear.weight",
        r"\.experts\.down_proj$": ".output_linear.weight",
        r"\.router\.weight$": ".router.layer.weight",
    },
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": GRANITE_MOE})
