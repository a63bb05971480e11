"""Qwen3 with experts: Qwen3's block, 8 of 128 experts for each token, and the plain MLP in the layers that have none.

Source: Yang et al. 2025 (arXiv:2505.09388); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models import config_json, expert_config
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True, head_norm="head")


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    options, length = config_json.rotary_options(fields, length=32768, epsilon=1e-6, groups=4)
    layers = expert_config.sparse_layers(fields, options["num_layers"])
    options |= layers
    count = sum(layers.get("moe_layer_freq", ())) or options["num_layers"]
    options |= expert_config.expert_options(fields, count, count=128, topk=8, coefficient=0.001)
    options["moe_ffn_hidden_size"] = fields.take("moe_intermediate_size", default=768)
    options["moe_router_pre_softmax"] = not fields.take("norm_topk_prob", default=False)
    # all layers have it: the class reads no max_window_layers
    if fields.take("use_sliding_window", default=False):
        options["attention_window"] = config_json.sliding_window(fields)
    return options, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **config_json.rotary_fields(config),
        **expert_config.expert_fields(model, count="num_experts"),
        **expert_config.sparse_fields(model),
        "attention_bias": False,
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "use_sliding_window": model.attention_window is not None,
        "sliding_window": model.attention_window,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return config_json.rotary_only(model) + expert_config.without_experts(model)


QWEN3_MOE = HuggingFaceForm(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    prefix="model.",
    modules=config_json.LLAMA_MODULES | config_json.HEAD_NORM_MODULES | expert_config.EXPERT_MODULES,
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"attention_window", "num_experts", "moe_layer_freq", "moe_router_pre_softmax"}),
    buffers=config_json.LLAMA_BUFFERS,
    fused_experts=expert_config.FUSED_EXPERTS,
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": QWEN3_MOE})
