"""Fields of config.json that many of transformers' classes share, and our options, each as the other. No torch.

A family's form calls these with the defaults of its own class, which hold where a config.json leaves a field out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.models.family import ConfigFields
from megatron.options.config import Config, ModelConfig
from megatron.options.model import ROPE_SCALING

RopeReader = Callable[[ConfigFields, int], dict[str, Any]]
"""Options of the rotary positions from the fields of a class, and its longest sequence."""


def rotary_options(
    fields: ConfigFields,
    *,
    length: int,
    epsilon: float,
    groups: int | None = None,
    head_size: int | None = None,
    tied: bool = False,
    rope: RopeReader | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return the options and the longest sequence of a model of Llama's shape: RMSNorm, rotary positions, GQA.

    `length`, `epsilon`, `groups`, `head_size` and `tied` are the class's defaults; None: as many key/value heads as
    query heads, and heads that make up the width. `rope` reads the fields of the positions; None: `rope_options`.
    """
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    # null has a meaning of its own: all query heads
    default_groups = heads if groups is None or fields.has("num_key_value_heads") else groups
    groups = fields.take("num_key_value_heads", default=default_groups)
    head_size = fields.take("head_dim", default=head_size, kind=int)
    length = fields.take("max_position_embeddings", default=length)
    plain_size = hidden // heads if heads > 0 else None
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.take("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if head_size == plain_size else head_size,
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        **(rope or rope_options)(fields, length),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=tied),
        "norm_epsilon": fields.take("rms_norm_eps", default=epsilon),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def rotary_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a model of Llama's shape."""
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        **rope_fields(model),
        "attention_dropout": model.attention_dropout,
    }


def gemma_options(
    fields: ConfigFields, *, length: int, pattern: int, rope: RopeReader | None = None
) -> tuple[dict[str, Any], Any]:
    """Options of Gemma's later classes. Every layer has a window but each `pattern`-th, unless layer_types says."""
    fields.demand("hidden_activation", "gelu_pytorch_tanh")
    fields.demand("hidden_act", None, "gelu_pytorch_tanh")
    fields.demand("attention_bias", False)
    options, length = rotary_options(fields, length=length, epsilon=1e-6, groups=4, head_size=256, tied=True, rope=rope)
    layers, width = options["num_layers"], options["hidden_size"]
    window = sliding_window(fields)
    kinds = fields.texts("layer_types") or [
        FULL if number % pattern == 0 else SLIDING for number in range(1, layers + 1)
    ]
    options |= window_options(fields, window, kinds, layers)
    if "attention_window" not in options:
        options.pop("rotary_base_local", None)
    head_size = options["kv_channels"] or width // max(1, options["num_attention_heads"])
    scalar = fields.take("query_pre_attn_scalar", default=256, kind=float)
    return {
        **options,
        "embedding_multiplier": width**0.5,
        "attention_multiplier": None if scalar == head_size else scalar**-0.5,
    }, length


def query_scalar(model: ModelConfig) -> float:
    """Return the number whose root divides the scores: query_pre_attn_scalar, an integer where it is one."""
    if model.score_factor is None:
        return model.head_size
    scalar = model.score_factor**-2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar


def gemma_unsupported(model: ModelConfig) -> list[str]:
    wrong = rotary_only(model)
    if model.embedding_multiplier != model.hidden_size**0.5:
        wrong.append(f"embedding_multiplier={model.embedding_multiplier} (it has the root of hidden_size)")
    if model.hidden_size % model.num_attention_heads:  # transformers' own rule, even where head_dim is given
        wrong.append(f"hidden_size={model.hidden_size}")
    return wrong


FULL, SLIDING = "full_attention", "sliding_attention"


def sliding_window(fields: ConfigFields) -> int | None:
    """Read the window of many classes: left out, it is 4096; null: none."""
    window: int | None = fields.take("sliding_window", default=None if fields.has("sliding_window") else 4096, kind=int)
    return window


def layered_window_options(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    """Options from use_sliding_window, sliding_window, max_window_layers and layer_types, as Qwen's classes have them.

    Without use_sliding_window the first two do nothing.
    """
    if not fields.take("use_sliding_window", default=False):
        return {}
    window = sliding_window(fields)
    first = fields.take("max_window_layers", default=28)
    kinds = fields.texts("layer_types") or [SLIDING if number >= first else FULL for number in range(num_layers)]
    return window_options(fields, window, kinds, num_layers)


def window_options(fields: ConfigFields, window: int | None, kinds: list[str], num_layers: int) -> dict[str, Any]:
    """Options of a window in the layers of kind sliding_attention."""
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        fields.refuse(f"layer_types={kinds} (supported: {FULL} or {SLIDING} for each of the {num_layers} layers)")
    flags = tuple(int(kind == SLIDING) for kind in kinds)
    if window is None or not any(flags):
        return {}
    return {"attention_window": window, "attention_window_pattern": _shortest_pattern(flags)}


def _shortest_pattern(flags: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shortest start that gives these flags when it is repeated."""
    for length in range(1, len(flags)):
        if all(flag == flags[index % length] for index, flag in enumerate(flags)):
            return flags[:length]
    return flags


def layer_types(model: ModelConfig) -> list[str]:
    return [SLIDING if model.window_of(number) else FULL for number in range(model.num_layers)]


def layered_window_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of Qwen's classes; readers that know no layer_types take max_window_layers."""
    if model.attention_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = layer_types(model)
    return {
        "use_sliding_window": True,
        "sliding_window": model.attention_window,
        "max_window_layers": kinds.index(SLIDING),
        "layer_types": kinds,
    }


def rope_options(fields: ConfigFields, length: int) -> dict[str, Any]:
    """Options from transformers 5's rope_parameters, or from rope_theta and rope_scaling before."""
    theta = fields.take("rope_theta", default=10000.0)
    fields.demand("partial_rotary_factor", 1.0)
    return rope_options_of(fields.nested("rope_parameters", "rope_scaling", apart_from="rope_theta"), theta, length)


def partial_rope_options(
    fields: ConfigFields, length: int, *, base: str, percent: str, default: float, **special: Any
) -> dict[str, Any]:
    """Options of a class that rotates a part of each head; `base` and `percent` are its own names of the fields.

    `special`: `kinds` and `original` of rope_options_of.
    """
    theta, share = fields.take(base, default=10000.0), fields.take(percent, default=default, kind=float)
    inner = fields.nested("rope_parameters", "rope_scaling")
    share = inner.take("partial_rotary_factor", default=share, kind=float)
    return rope_options_of(inner, theta, length, partial=None, **special) | {"rotary_percent": float(share)}


def rope_options_of(
    inner: ConfigFields,
    theta: float,
    length: int,
    *,
    partial: float | None = 1.0,
    kinds: Mapping[str, str] | None = None,
    original: int | None = None,
) -> dict[str, Any]:
    """Options from one mapping of rotary parameters.

    `length` of the longest sequence. `partial`: the only share of each head that may be rotated. `kinds`: our
    rope_scaling_type by the names of a class; None: all. `original`: wins over the mapping's original length.
    """
    known = kinds or {kind: kind for kind in ROPE_SCALING}
    kind = inner.take("rope_type", "type", default="default")
    options = {"rotary_base": inner.take("rope_theta", default=theta, kind=float)}
    if partial is not None:
        inner.demand("partial_rotary_factor", partial)
    if kind in known:
        options |= _scaling_options(inner, known[kind], length, original)
    elif kind != "default":
        inner.refuse(f"rope_type={kind!r} (supported: {', '.join(map(repr, known))} or 'default')")
    inner.finish()
    return options


def _scaling_options(inner: ConfigFields, kind: str, length: int, original: int | None) -> dict[str, Any]:
    if kind == "linear":
        return {"rope_scaling_type": kind, "rope_scaling_factor": inner.take("factor", kind=float)}
    if kind == "dynamic":
        # read by some releases alone: of two lengths one would be ignored in silence
        inner.demand("original_max_position_embeddings", length, None)
        factor = inner.take("factor", kind=float)
        return {"rope_scaling_type": kind, "rope_scaling_factor": factor, "rope_scaling_original_length": length}
    given = inner.take("original_max_position_embeddings", default=length)
    given = original or given
    options = {"rope_scaling_type": kind, "rope_scaling_original_length": given}
    if kind == "llama3":
        inner.demand("attention_factor", None, 1.0)
        return options | {
            "rope_scaling_factor": inner.take("factor", kind=float),
            "rope_scaling_low_freq_factor": inner.take("low_freq_factor", kind=float),
            "rope_scaling_high_freq_factor": inner.take("high_freq_factor", kind=float),
        }
    # left out, it is the ratio of the two lengths
    factor = inner.take("factor", default=None, kind=float) or length / max(1, given)
    options["rope_scaling_factor"] = factor
    options["rope_scaling_attention_factor"] = inner.take("attention_factor", default=None, kind=float)
    if kind == "longrope":
        for side in ("short", "long"):
            options[f"rope_scaling_{side}_factors"] = tuple(inner.numbers(f"{side}_factor"))
        return options
    numerator, denominator = (inner.take(name, default=None, kind=float) for name in ("mscale", "mscale_all_dim"))
    # transformers' rule: one of them alone does nothing
    if options["rope_scaling_attention_factor"] is None and numerator and denominator:
        logarithm = 0.1 * math.log(max(1.0, factor))
        options["rope_scaling_attention_factor"] = (numerator * logarithm + 1) / (denominator * logarithm + 1)
    truncates = inner.take("truncate", default=not inner.has("truncate"))  # null: False
    return options | {
        "rope_scaling_beta_fast": inner.take("beta_fast", default=None, kind=float) or 32.0,
        "rope_scaling_beta_slow": inner.take("beta_slow", default=None, kind=float) or 1.0,
        "rope_scaling_truncate": truncates,
    }


_SCALING_FIELDS = {
    "rope_scaling_factor": "factor",
    "rope_scaling_original_length": "original_max_position_embeddings",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_attention_factor": "attention_factor",
    "rope_scaling_beta_fast": "beta_fast",
    "rope_scaling_beta_slow": "beta_slow",
    "rope_scaling_truncate": "truncate",
    "rope_scaling_short_factors": "short_factor",
    "rope_scaling_long_factors": "long_factor",
}


def rope_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the rotary positions, as transformers 4 and 5 read them."""
    base = {"rope_theta": model.rotary_base, "rope_scaling": None}
    if model.rope_scaling_factor is None:
        return base
    kind = model.rope_scaling_type
    values = {name: getattr(model, name) for name in ("rope_scaling_factor", *ROPE_SCALING[kind])}
    # lists, as JSON has them
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    scaling = {_SCALING_FIELDS[name]: value for name, value in values.items() if value is not None}
    if kind != "dynamic":
        return base | {"rope_scaling": {"rope_type": kind, **scaling}}
    # its original length is the longest sequence that the class names
    length = scaling.pop("original_max_position_embeddings")
    return base | {"rope_scaling": {"rope_type": kind, **scaling}, "max_position_embeddings": length}


def rotary_only(model: ModelConfig) -> list[str]:
    """Return the options that a form with rotary positions and no norm of the embedding cannot express."""
    positions = model.position_embedding_type
    wrong = [] if positions == "rope" else [f"position_embedding_type={positions} (it has rope only)"]
    return wrong + (["embed_layernorm=True (it has False only)"] if model.embed_layernorm else [])


def one_kv_head_each(model: ModelConfig) -> list[str]:
    """Return the options of a form without GQA: key and value heads are as many as query heads."""
    return [] if model.num_kv_heads == model.num_attention_heads else [f"num_query_groups={model.num_query_groups}"]


def heads_of_the_width(model: ModelConfig) -> list[str]:
    """Return the options of a form without head_dim: its heads make up the width."""
    is_width = model.head_size * model.num_attention_heads == model.hidden_size
    return [] if is_width else [f"kv_channels={model.kv_channels}"]


LLAMA_MODULES = {
    "embedding.word": ("embed_tokens",),
    "layers.*.attention_norm": ("layers.*.input_layernorm",),
    "layers.*.attention.qkv": (
        "layers.*.self_attn.q_proj",
        "layers.*.self_attn.k_proj",
        "layers.*.self_attn.v_proj",
    ),
    "layers.*.attention.dense": ("layers.*.self_attn.o_proj",),
    "layers.*.mlp_norm": ("layers.*.post_attention_layernorm",),
    "layers.*.mlp.gate_up": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    "layers.*.mlp.down": ("layers.*.mlp.down_proj",),
    "final_norm": ("norm",),
}
"""Names of the modules that transformers took over from Llama to most classes after it."""
GEMMA_MODULES = LLAMA_MODULES | {
    "layers.*.attention_output_norm": ("layers.*.post_attention_layernorm",),
    "layers.*.mlp_norm": ("layers.*.pre_feedforward_layernorm",),
    "layers.*.mlp_output_norm": ("layers.*.post_feedforward_layernorm",),
}
HEAD_NORM_MODULES = {
    "layers.*.attention.q_norm": ("layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("layers.*.self_attn.k_norm",),
}
LLAMA_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
