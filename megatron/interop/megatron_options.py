"""Model options of a Megatron or Megatron-DeepSpeed run, from the arguments that its checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "kv_channels": ("kv_channels",),
    "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "rotary_base": ("rope_theta", "rotary_base"),
}
"""Their names for each of ours; the first that is there counts."""
_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "rotary": "rope", "alibi": "alibi"}


def model_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arguments say of the model, in our options. Arguments that are missing or None are left out."""
    found = {
        ours: next(arguments[name] for name in names if arguments.get(name) is not None)
        for ours, names in _NAMES.items()
        if any(arguments.get(name) is not None for name in names)
    }
    # without group_query_attention Megatron ignores its num_query_groups
    groups = arguments.get("num_key_value_heads")
    if arguments.get("group_query_attention"):
        groups = arguments.get("num_query_groups")
    elif groups is None and "group_query_attention" in arguments:
        groups = arguments.get("num_attention_heads")
    if groups is not None:
        found["num_query_groups"] = groups
    position = _POSITIONS.get(str(arguments.get("position_embedding_type")))
    if arguments.get("use_rotary_position_embeddings"):
        position = "rope"
    if position is not None:
        found["position_embedding_type"] = position
    if "use_rope_scaling" in arguments:
        factor = arguments.get("rope_scaling_factor") or 8.0
        found["rope_scaling_factor"] = factor if arguments["use_rope_scaling"] else None
    return found
