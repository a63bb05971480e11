"""OLMoE: Llama's block with an RMSNorm over all queries, and all keys, and 8 of 64 experts for each token.

Source: Muennighoff et al. 2024 (arXiv:2409.02060); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models import config_json, expert_config
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True, head_norm="whole")


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    fields.demand("clip_qkv", None)
    options, length = config_json.rotary_options(fields, length=4096, epsilon=1e-5)
    options |= expert_config.expert_options(fields, options["num_layers"], count=64, topk=8, coefficient=0.01)
    options["moe_router_pre_softmax"] = not fields.take("norm_topk_prob", default=False)
    return options, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **config_json.rotary_fields(config),
        **expert_config.expert_fields(model, count="num_experts"),
        "intermediate_size": model.expert_ffn_size,
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return config_json.rotary_only(model) + config_json.heads_of_the_width(model) + expert_config.without_experts(model)


OLMOE = HuggingFaceForm(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    prefix="model.",
    modules=expert_config.ATTENTION_MODULES | config_json.HEAD_NORM_MODULES | expert_config.EXPERT_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"num_experts", "moe_router_pre_softmax"}),
    buffers=config_json.LLAMA_BUFFERS,
    fused_experts=expert_config.FUSED_EXPERTS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": OLMOE})
