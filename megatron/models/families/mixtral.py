"""Mixtral: Mistral's block with experts in place of the MLP, two of eight for each token.

Source: Jiang et al. 2024 (arXiv:2401.04088); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models import config_json, expert_config
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="rms_norm", activation="silu", is_gated=True)
ROOM = "layers.*.block_sparse_moe"
"""Room of the experts in files; transformers 5 holds them under `mlp`."""


def _rope_options(fields: ConfigFields, length: int) -> dict[str, Any]:
    theta = fields.take("rope_theta", default=1e6)
    rope = fields.nested("rope_parameters", "rope_scaling", apart_from="rope_theta")
    return config_json.rope_options_of(rope, theta, length)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    options, length = config_json.rotary_options(fields, length=131072, epsilon=1e-5, groups=8, rope=_rope_options)
    window = fields.take("sliding_window", default=None, kind=int)
    experts = expert_config.expert_options(fields, options["num_layers"], count=8, topk=2, coefficient=0.001)
    return {**options, "attention_window": window, **experts}, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **config_json.rotary_fields(config),
        **expert_config.expert_fields(model, count="num_local_experts"),
        "intermediate_size": model.expert_ffn_size,
        "sliding_window": model.attention_window,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return config_json.rotary_only(model) + expert_config.without_experts(model)


MIXTRAL = HuggingFaceForm(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    prefix="model.",
    modules=expert_config.ATTENTION_MODULES
    | {
        "layers.*.mlp.router": (f"{ROOM}.gate",),
        "layers.*.mlp.experts.*.gate_up": (f"{ROOM}.experts.*.w1", f"{ROOM}.experts.*.w3"),
        "layers.*.mlp.experts.*.down": (f"{ROOM}.experts.*.w2",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"attention_window", "num_experts"}),
    buffers=config_json.LLAMA_BUFFERS,
    fused_experts={
        "layers.*.mlp.experts.*.gate_up": f"{ROOM}.experts.gate_up_proj",
        "layers.*.mlp.experts.*.down": f"{ROOM}.experts.down_proj",
    },
    renamed={r"\.mlp\.": ".block_sparse_moe."},
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": MIXTRAL})
