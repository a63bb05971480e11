"""Arguments that Megatron saves with its checkpoints, an argparse.Namespace, as options of the model.

Releases differ in what they state: an argument that is missing has the value that Megatron had before there was it.
Source: NVIDIA/Megatron-LM, megatron/training/arguments.py and checkpointing.py (load_args_from_checkpoint)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_known_options
from megatron.options.config import Config, ModelConfig, TrainingConfig
from megatron.weights.foreign_files import Inert

_NAMES = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("ffn_hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "kv_channels": ("kv_channels",),
    "max_position_embeddings": ("max_position_embeddings",),
    "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "rotary_base": ("rope_theta", "rotary_base"),
    "rotary_percent": ("rotary_percent",),
    "untie_embeddings_and_output_weights": ("untie_embeddings_and_output_weights",),
}
"""Their names for each of ours; the first that is there counts."""
_UNCOMPARED = {
    "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_method_std": "init_method_std",
}
"""Options that leave the function of given weights as it is."""
_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "rotary": "rope", "alibi": "alibi"}
_REFUSED = {
    "apply_residual_connection_post_layernorm": "the residual stream is that of the norms' outputs",
    "apply_layernorm_1p": "weights of norms are added to 1",
    "squared_relu": "its activation is ReLU squared",
    "quick_geglu": "its activation is a quick GELU with a gate",
    "multi_latent_attention": "its attention has latent keys and values",
    "rotary_interleaved": "its rotary embedding turns neighbouring channels",
    "mtp_num_layers": "it predicts several tokens",
    "heterogeneous_layers_config_path": "its layers differ",
    "heterogeneous_layers_config_encoded_json": "its layers differ",
    "hybrid_layer_pattern": "it has layers that are not attention",
    "hybrid_override_pattern": "it has layers that are not attention",
    "no_rope_freq": "some layers have no positions",
    "retro_add_retriever": "it has a retriever",
    "experimental_attention_variant": "its attention is experimental",
    "use_mup": "its widths are scaled (muP)",
    "mup_width_mult": "its widths are scaled (muP)",
}
"""Arguments that change what is computed and have no counterpart, where they are given."""
_FAMILIES = {
    ("LayerNorm", False, True): "bloom",
    ("RMSNorm", True, False): "llama",
}
"""Family by normalization, swiglu and add_bias_linear."""
_ATTENTION = {(False, False): "llama", (True, False): "qwen3", (False, True): "qwen2"}
"""Llama's kin by qk_layernorm and add_qkv_bias."""
_MIXTURES = {(False, False): "mixtral", (True, False): "qwen3_moe"}
"""Those with experts."""
_EXPERTS = {
    **{name: name for name in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_z_loss_coeff")},
    **{name: name for name in ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups")},
    **{name: name for name in ("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_input_jitter_eps")},
    **{name: name for name in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate")},
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
"""Arguments of a mixture that are options of ours."""


def plain_arguments(saved: Any) -> dict[str, Any]:
    """Return the arguments in a file, those that are plain values; empty where another program saved."""
    # an argparse.Namespace, which is read as a record without behaviour
    state = saved.state if isinstance(saved, Inert) else None
    if not isinstance(state, dict):
        return {}
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return True for what JSON can hold: others, such as enumerations, are records without meaning."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def model_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arguments say of the model, in our options. Arguments that are missing or None are left out."""
    options = {}
    for ours, names in _NAMES.items():
        values = [arguments[name] for name in names if arguments.get(name) is not None]
        if values:
            options[ours] = values[0]
    groups = _query_groups(arguments)
    if groups is not None:
        options["num_query_groups"] = groups
    position = _POSITIONS.get(str(arguments.get("position_embedding_type")))
    # an older switch, beside which position_embedding_type may still have its default
    if arguments.get("use_rotary_position_embeddings"):
        position = "rope"
    if position is not None:
        options["position_embedding_type"] = position
    options |= _rope_scaling(arguments)
    if arguments.get("num_experts"):
        options |= _expert_options(arguments)
    return options | _window_options(arguments)


def _rope_scaling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if divisor := arguments.get("rotary_seq_len_interpolation_factor"):
        return {"rope_scaling_factor": float(divisor), "rope_scaling_type": "linear"}
    # a release without the argument says nothing of it, which is not the same as off
    if "use_rope_scaling" not in arguments:
        return {}
    if not arguments["use_rope_scaling"]:
        return {"rope_scaling_factor": None}
    factor = arguments.get("rope_scaling_factor") or 8.0  # Megatron's default
    return {"rope_scaling_factor": factor, "rope_scaling_type": "llama3"}


def _window_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    window = arguments.get("window_size")
    # (tokens before, tokens after), without the token itself
    if isinstance(window, list | tuple) and len(window) == 2 and isinstance(window[0], int) and window[0] >= 0:
        return {"attention_window": window[0] + 1}
    return {}


def _expert_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    options = {ours: arguments[name] for name, ours in _EXPERTS.items() if arguments.get(name) is not None}
    frequency = arguments.get("moe_layer_freq", 1)
    # every so many layers, the first among them; or each by itself
    if isinstance(frequency, int) and frequency > 0:
        options["moe_layer_freq"] = (1, *(0,) * (frequency - 1))
    elif isinstance(frequency, list | tuple):
        options["moe_layer_freq"] = tuple(frequency)
    # other ways to balance, and a coefficient without its type, change the training and not the model
    if arguments.get("moe_router_load_balancing_type") == "aux_loss":
        options["moe_aux_loss_coeff"] = arguments.get("moe_aux_loss_coeff") or 0.0
    return options


def _query_groups(arguments: Mapping[str, Any]) -> Any:
    # without group_query_attention Megatron ignores its num_query_groups
    if arguments.get("group_query_attention"):
        return arguments.get("num_query_groups")
    # Megatron-DeepSpeed's own argument
    groups = arguments.get("num_key_value_heads")
    if groups is None and "group_query_attention" in arguments:
        return arguments.get("num_attention_heads")
    return groups


def refusals(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments by which a model computes what no family of ours does, each with the reason."""
    for name, reason in _REFUSED.items():
        value = arguments.get(name)
        # every command of releases that have muP states the width, 1.0 of models without it
        if value and (name, value) != ("mup_width_mult", 1.0):
            yield f"{name}={value} ({reason})"
    position = arguments.get("position_embedding_type")
    if position is not None and position not in _POSITIONS and not arguments.get("use_rotary_position_embeddings"):
        yield f"position_embedding_type={position} (learned, rotary and ALiBi positions are known)"
    if arguments.get("swiglu"):
        return
    # only the fused kernel is the tanh approximation; Megatron's plain GELU is exact
    if arguments.get("bias_gelu_fusion") is False and not arguments.get("openai_gelu"):
        yield "bias_gelu_fusion=False (its GELU is exact, that of the family bloom is the tanh approximation)"


def check_arguments(arguments: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError, with every argument that is at fault, where the model computes what no family does."""
    if faults := list(refusals(arguments)):
        raise CheckpointError(
            f"{folder} is of a model that no family computes: {'; '.join(faults)}. A family of your own may: see "
            "docs/internals/extending.md"
        )


def described_config(
    arguments: Mapping[str, Any], config: Config | None, folder: Path, file: Path, vocabulary_rows: Callable[[], int]
) -> tuple[Config, list[str]]:
    """Return the model of a checkpoint, and the options of a run's `config` that could not be compared.

    `config` counts where it is given; None: the model that the arguments in the file describe. Raises CheckpointError.
    """
    if config is not None:
        check_arguments(arguments, folder)
        return config, check_known_options(folder, model_options(arguments), config)
    if not arguments:
        raise CheckpointError(f"{file} holds no args, which describe the model; describe it with --config PRESET")
    return config_of(arguments, folder, vocabulary_rows()), []


def config_of(arguments: Mapping[str, Any], folder: Path, vocab_size: int) -> Config:
    """Return the model that the arguments describe, as a config of ours, and its longest sequence.

    `vocab_size`: rows of the word embedding, since the arguments do not say which of them are padding. Raises
    CheckpointError.
    """
    check_arguments(arguments, folder)
    # what the first releases did not state, as they had it
    defaults: dict[str, Any] = {"position_embedding_type": "learned", "norm_epsilon": 1e-5}
    options = defaults | model_options(arguments)
    options |= {ours: arguments[name] for name, ours in _UNCOMPARED.items() if arguments.get(name) is not None}
    if missing := [name for name in ("num_layers", "hidden_size", "num_attention_heads") if name not in options]:
        raise CheckpointError(f"{folder}: its arguments lack {', '.join(missing)}; describe the model with --config")
    # the longest sequence of the run; the length of its table of positions where it does not state one
    length = arguments.get("seq_length") or options.get("max_position_embeddings")
    training: dict[str, Any] = {"bf16": bool(arguments.get("bf16")), "fp16": bool(arguments.get("fp16"))}
    if length is not None:
        training["seq_length"] = length
    try:
        model = ModelConfig(architecture=_family(arguments, folder), vocab_size=vocab_size, **options)
        return Config(model=model, training=TrainingConfig(**training))
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}={fault['input']!r}: {fault['msg']}" for fault in error.errors()]
        raise CheckpointError(f"{folder} has arguments that describe no model: {'; '.join(faults)}") from None


def arguments_of(config: Config) -> dict[str, Any]:
    """Return the arguments of Megatron that describe a model, as far as they can: `config_of` reads them back."""
    model = config.model
    reversed_positions = {"learned": "learned_absolute", "rope": "rope", "alibi": "alibi"}
    # the one family with LayerNorm and biases that Megatron has too
    has_biases = model.architecture == "bloom"
    arguments: dict[str, Any] = {names[0]: getattr(model, ours) for ours, names in _NAMES.items()}
    arguments |= {theirs: getattr(model, ours) for ours, theirs in _UNCOMPARED.items()}
    # Megatron's own defaults differ from ours, so that each is stated
    arguments |= {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        "rotary_base": model.rotary_base,
        "position_embedding_type": reversed_positions[model.position_embedding_type],
        "group_query_attention": model.num_kv_heads != model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "normalization": "LayerNorm" if has_biases else "RMSNorm",
        "swiglu": not has_biases,
        "add_bias_linear": has_biases,
        "add_qkv_bias": has_biases or model.architecture == "qwen2",
        "qk_layernorm": model.architecture in ("qwen3", "qwen3_moe"),
        "bias_gelu_fusion": has_biases,
        "seq_length": config.training.seq_length,
        "bf16": config.training.bf16,
        "fp16": config.training.fp16,
        "padded_vocab_size": model.vocab_size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "use_rope_scaling": False,
    }
    del arguments["rope_theta"]  # the older name of rotary_base
    # Llama 3.1's scaling and the linear one alone have arguments; others are refused when these are read back
    if model.scales_rotary and model.rope_scaling_type == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = model.rope_scaling_factor
        del arguments["use_rope_scaling"]
    elif model.scales_rotary:
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": model.rope_scaling_factor}
    # tokens before the token itself, and behind it
    if model.attention_window is not None:
        arguments["window_size"] = (model.attention_window - 1, 0)
    if model.num_experts is not None:
        arguments |= {theirs: getattr(model, ours) for theirs, ours in _EXPERTS.items()}
        # by layer: a frequency would say the same of regular ones alone
        arguments["moe_layer_freq"] = list(model.moe_layer_freq)
        if model.moe_aux_loss_coeff:
            balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": model.moe_aux_loss_coeff}
            arguments |= balance
    return arguments


def _family(arguments: Mapping[str, Any], folder: Path) -> str:
    """Return the family that computes a model of these arguments. Raises CheckpointError."""
    norm, is_gated = arguments.get("normalization") or "LayerNorm", bool(arguments.get("swiglu"))
    has_biases = arguments.get("add_bias_linear")
    # releases that have the flag save its opposite
    if has_biases is None:
        has_biases = not arguments.get("disable_bias_linear")
    has_qk_norm, has_qkv_bias = bool(arguments.get("qk_layernorm")), bool(arguments.get("add_qkv_bias"))
    family = _FAMILIES.get((norm, is_gated, bool(has_biases)))
    if arguments.get("num_experts"):
        # of RMSNorm and SwiGLU, as Mixtral's
        family = _MIXTURES.get((has_qk_norm, has_qkv_bias)) if family == "llama" else None
    elif family == "llama":
        family = _ATTENTION.get((has_qk_norm, has_qkv_bias))
    elif has_qk_norm:
        family = None
    if family == "llama" and arguments.get("window_size"):
        family = "mistral"
    if family is None:
        raise CheckpointError(
            f"{folder} is of a model that no family computes: normalization={norm}, swiglu={is_gated}, "
            f"add_bias_linear={bool(has_biases)}, qk_layernorm={has_qk_norm}, add_qkv_bias={has_qkv_bias}; known are "
            "LayerNorm and GELU with biases, and RMSNorm and SwiGLU without"
        )
    return family
