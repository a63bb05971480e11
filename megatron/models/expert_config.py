"""Fields of config.json about experts, and our options, each as the other. No torch."""

from __future__ import annotations

from typing import Any

from megatron.models.config_json import LLAMA_MODULES
from megatron.models.family import ConfigFields
from megatron.options.config import ModelConfig

DENSE = ("layers.*.mlp.gate_up", "layers.*.mlp.down")
ATTENTION_MODULES = {name: theirs for name, theirs in LLAMA_MODULES.items() if name not in DENSE}
"""Those of Llama's classes without the MLP, where every layer has experts."""
EXPERT_MODULES = {
    "layers.*.mlp.router": ("layers.*.mlp.gate",),
    "layers.*.mlp.experts.*.gate_up": ("layers.*.mlp.experts.*.gate_proj", "layers.*.mlp.experts.*.up_proj"),
    "layers.*.mlp.experts.*.down": ("layers.*.mlp.experts.*.down_proj",),
}
"""Names that Qwen's classes have, and those after them."""
FUSED_EXPERTS = {
    "layers.*.mlp.experts.*.gate_up": "layers.*.mlp.experts.gate_up_proj",
    "layers.*.mlp.experts.*.down": "layers.*.mlp.experts.down_proj",
}
"""Names of transformers 5 in memory, which it may write too."""


def expert_options(
    fields: ConfigFields, num_layers: int, *, count: int | None, topk: int, coefficient: float
) -> dict[str, Any]:
    """Return the options of experts in all layers. `count`, `topk` and `coefficient` are the class's defaults.

    transformers' balancing loss is that of all layers' choices together, and counts each token once for every expert
    that it passes through; ours is the sum of the layers' losses, and 1 in each where all experts are used alike.
    """
    fields.demand("router_jitter_noise", 0.0, 0, None)
    topk = fields.take("num_experts_per_tok", default=topk)
    theirs = fields.take("router_aux_loss_coef", default=coefficient, kind=float)
    # a coefficient alone does nothing
    is_trained = fields.take("output_router_logits", default=False)
    return {
        "num_experts": fields.take("num_local_experts", "num_experts", default=... if count is None else count),
        "moe_router_topk": topk,
        "moe_aux_loss_coeff": _rounded(theirs * topk / max(1, num_layers)) if is_trained else 0.0,
    }


def expert_fields(model: ModelConfig, *, count: str) -> dict[str, Any]:
    """Return the fields of experts; `count` is the name of their number."""
    layers = sum(map(model.has_experts, range(model.num_layers)))
    return {
        count: model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "output_router_logits": model.moe_aux_loss_coeff > 0,
        "router_aux_loss_coef": _rounded(model.moe_aux_loss_coeff * layers / model.moe_router_topk),
    }


def sparse_layers(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    """Options from decoder_sparse_step and mlp_only_layers, as Qwen's classes have them."""
    step, dense = fields.take("decoder_sparse_step", default=1), fields.integers("mlp_only_layers")
    if step < 1:
        fields.refuse(f"decoder_sparse_step={step} (supported: 1 or more)")
    if step <= 1 and not dense:
        return {}
    flags = tuple(int(number not in dense and (number + 1) % step == 0) for number in range(num_layers))
    if not any(flags):
        fields.refuse("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return {} if all(flags) else {"moe_layer_freq": flags}


def sparse_fields(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_layers)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [n for n in layers if not model.has_experts(n)]}


def without_experts(model: ModelConfig) -> list[str]:
    """Return the option of a form that has experts in its layers."""
    return ["num_experts=None (it has experts)"] if model.num_experts is None else []


def _rounded(value: float) -> float:
    """12 digits: the same number comes back after both ways."""
    return float(f"{value:.12g}")
