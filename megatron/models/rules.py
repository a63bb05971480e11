"""Rules of a model and its layout over ranks: a message for every broken one, with the values, the rule, the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.models.attention.exchange_choice import exchange_faults
from megatron.models.registry import family_named, family_of
from megatron.options.config import Config, ConfigError, ModelConfig, broken
from megatron.options.flags import divisors
from megatron.options.model import differing
from megatron.parallel.layout import Layout


def check_layout(config: Config, world_size: int) -> list[str]:
    """Return a message for every broken rule of a model and its layout, without those of a training."""
    return [
        *check_ranks(config, world_size),
        *check_tensor_parallel(config),
        *check_row_length(config, "seq_length", config.training.seq_length),
        *exchange_faults(config),
        *check_expert_ranks(config, world_size),
        *check_expert_bias(config),
        *check_family(config),
    ]


def check_ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, size = parallel.pipeline_model_parallel_size, Layout.of(parallel).model_size
    names = ["tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"]
    if parallel.context_parallel_size == 1:
        del names[1]
    if world_size % size:
        product = " x ".join(f"{name}={getattr(parallel, name)}" for name in names)
        yield (
            f"{product} = {size} does not divide the {world_size} ranks of this launch; start a multiple of {size} "
            "ranks, or change the layout"
        )
    if pp > num_layers:
        yield (f"pipeline_model_parallel_size={pp} is larger than num_layers={num_layers}; use at most {num_layers}")


def check_tensor_parallel(config: Config) -> Iterator[str]:
    model = config.model
    tp, kv = config.parallel.tensor_model_parallel_size, config.model.num_kv_heads
    yield from _undivided("tensor_model_parallel_size", tp, "num_attention_heads", model.num_attention_heads)
    if kv % tp and tp % kv:
        yield (
            f"tensor_model_parallel_size={tp} neither divides num_query_groups={kv} nor is a multiple of it; "
            f"use {divisors(kv, 64)}, or a multiple of {kv}"
        )
    elif tp > kv and (kv * model.head_size) % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide num_query_groups x head size = {kv * model.head_size}; "
            f"use {divisors(kv * model.head_size, 64)}"
        )
    yield from _undivided("tensor_model_parallel_size", tp, "ffn_hidden_size", model.ffn_size)


def _undivided(name: str, size: int, of: str, whole: int, most: int = 64) -> Iterator[str]:
    if whole % size:
        yield f"{name}={size} does not divide {of}={whole}; use {divisors(whole, most)}"


def row_multiple(config: Config) -> int:
    """Return what a row's length is a multiple of, so that its ranks have equally many places."""
    layout = Layout.of(config.parallel)
    ranks = layout.tensor_size if config.parallel.sequence_parallel else 1
    if layout.context_size == 1:
        return ranks
    # tensor-parallel ranks share the stretches of a context-parallel one
    return math.lcm(layout.stretches, layout.context_size * ranks)


def check_row_length(config: Config, option: str, length: int) -> Iterator[str]:
    """Check that the ranks of a row of this length have equally many places; `option` sets it."""
    parallel, multiple = config.parallel, row_multiple(config)
    if length % multiple == 0:
        return
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp > 1:
        needs = f"context_parallel_size={cp} needs"
        if parallel.sequence_parallel and tp > 1:
            needs = f"context_parallel_size={cp} and sequence_parallel with tensor_model_parallel_size={tp} need"
        lower = length // multiple * multiple
        use = f"{lower} or {lower + multiple}" if lower else f"{multiple}"
        yield f"{needs} {option}={length} to be a multiple of {multiple}; use {use}"
        return
    yield (
        f"sequence_parallel needs tensor_model_parallel_size={tp} to divide {option}={length}; "
        f"use {divisors(length, 64)}, or turn it off"
    )


def check_expert_ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, count = config.parallel, config.model.num_experts
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    tp = parallel.tensor_model_parallel_size
    if count is None:
        given = {"expert_model_parallel_size": ep > 1, "expert_tensor_parallel_size": etp is not None}
        for name in (name for name, is_given in given.items() if is_given):
            yield f"{name}={getattr(parallel, name)} divides experts, but there are none; set num_experts, or unset it"
        return
    yield from _undivided("expert_model_parallel_size", ep, "num_experts", count)
    if etp not in (None, 1, tp):
        yield f"expert_tensor_parallel_size={etp} must be 1 or tensor_model_parallel_size={tp}; use either"
        return
    layout = Layout.of(parallel, world_size)
    ranks = world_size // layout.num_stages // layout.expert_tensor_size
    if ranks % ep:
        axes = {"tensor": layout.experts_are_whole, "context": layout.context_size > 1, "data": True}
        what = " x ".join(axis for axis, counts in axes.items() if counts)
        use = divisors(ranks, 64)
        yield f"expert_model_parallel_size={ep} does not divide the {ranks} {what}-parallel ranks; use {use}"
    yield from _check_expert_widths(config.model, tp, is_cut=layout.expert_tensor_size > 1)
    optimizer = config.optimizer
    if layout.divides_experts and (optimizer.zero_stage >= 2 or optimizer.offload_optimizer):
        reason = "offload_optimizer" if optimizer.offload_optimizer else f"zero_stage={optimizer.zero_stage}"
        yield (
            f"{reason} shards all parameters over the data-parallel ranks, but with expert_model_parallel_size={ep} "
            f"and expert_tensor_parallel_size={layout.expert_tensor_size} these hold different experts; use zero_stage "
            "0 or 1 without offload, or leave both out"
        )


def check_expert_bias(config: Config) -> Iterator[str]:
    model, stage = config.model, config.optimizer.zero_stage
    if not model.moe_router_enable_expert_bias:
        return
    if model.num_experts is None:
        yield "moe_router_enable_expert_bias balances experts, but there are none; set num_experts, or leave it out"
    elif stage == 3:
        yield (
            "moe_router_enable_expert_bias with zero_stage=3: DeepSpeed would cut up the biases of the routers in 16 "
            "bits; use zero_stage 0, 1 or 2, or balance by moe_aux_loss_coeff"
        )


def check_experts_of_copies(config: Config, option: str) -> Iterator[str]:
    """Check that no two copies of the model share experts, where each generates for itself by this `option`."""
    parallel = config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    ranks = tp if parallel.expert_tensor_parallel_size == 1 else 1
    if ranks % ep:
        yield (
            f"{option} lets each copy of the model generate for prompts of its own, but with "
            f"expert_model_parallel_size={ep} several copies share experts, and would wait for each other; use "
            f"{divisors(ranks, 64)} (at most tensor_model_parallel_size, with expert_tensor_parallel_size=1)"
        )


def _check_expert_widths(model: ModelConfig, tp: int, *, is_cut: bool) -> Iterator[str]:
    width, shared = model.expert_ffn_size, model.moe_shared_expert_intermediate_size
    if is_cut and width % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide the experts' width, {width}; use {divisors(width, 64)}, "
            "or expert_tensor_parallel_size=1"
        )
    if shared is not None:
        yield from _undivided("tensor_model_parallel_size", tp, "moe_shared_expert_intermediate_size", shared)


def check_family(config: Config) -> Iterator[str]:
    try:
        yield from family_of(config).faults(config)
    except ConfigError as error:
        yield from error.faults


def check_model(config: Config) -> Iterator[str]:
    model, seq_length = config.model, config.training.seq_length
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"num_attention_heads={model.num_attention_heads} does not divide hidden_size={model.hidden_size}; "
            f"use {divisors(model.hidden_size, 128)}, or set kv_channels"
        )
    yield from _undivided("num_query_groups", model.num_kv_heads, "num_attention_heads", model.num_attention_heads, 128)
    yield from _check_experts(model)
    if model.position_embedding_type == "rope":
        yield from check_rotary(model)
    if not model.attention_window_pattern or not set(model.attention_window_pattern) <= {0, 1}:
        given = " ".join(map(str, model.attention_window_pattern)) or "nothing"
        yield f"attention_window_pattern={given} must be 1 (a window) or 0 for each layer; correct it, or leave it out"
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned" and positions and positions < seq_length:
        yield (
            f"seq_length={seq_length} is larger than max_position_embeddings={positions}; "
            "shorten it, or enlarge max_position_embeddings"
        )


def _check_experts(model: ModelConfig) -> Iterator[str]:
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield f"moe_router_topk={model.moe_router_topk} is larger than num_experts={model.num_experts}; lower it"
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if (groups is None) != (chosen is None):
        yield "moe_router_num_groups and moe_router_group_topk belong together; give both, or leave both out"
    elif groups is not None and chosen is not None and model.num_experts is not None:
        size = model.num_experts // groups
        if model.num_experts % groups or size < 2 or chosen > groups or chosen * size < model.moe_router_topk:
            yield (
                f"moe_router_num_groups={groups} must divide num_experts={model.num_experts} into groups of 2 or "
                f"more, and moe_router_group_topk={chosen} of them hold moe_router_topk={model.moe_router_topk}; "
                "change them"
            )
    if not model.moe_layer_freq or not set(model.moe_layer_freq) <= {0, 1}:
        given = " ".join(map(str, model.moe_layer_freq)) or "nothing"
        yield f"moe_layer_freq={given} must be 1 (experts) or 0 (one MLP) for each layer; correct it, or leave it out"


def check_rotary(model: ModelConfig) -> Iterator[str]:
    """Yield the faults of rotary positions."""
    if model.rotary_percent == 1 and model.head_size % 2:
        yield (
            f"position_embedding_type=rope needs an even head size, not {model.head_size}; change hidden_size or "
            "kv_channels"
        )
    # without a rotated channel the model has no positions; an odd number is rounded up, as in transformers
    if model.rotary_size == 0:
        yield (
            f"rotary_percent={model.rotary_percent} rotates none of the {model.head_size} channels of a head; raise it"
        )
    if model.scales_rotary:
        yield from _check_scaling(model)


def _check_scaling(model: ModelConfig) -> Iterator[str]:
    kind, pairs = model.rope_scaling_type, model.rotary_size // 2
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if kind == "llama3" and low >= high:
        yield f"rope_scaling_low_freq_factor={low} must be below rope_scaling_high_freq_factor={high}; lower it"
    slow, fast = model.rope_scaling_beta_slow, model.rope_scaling_beta_fast
    if kind == "yarn" and slow >= fast:
        yield f"rope_scaling_beta_slow={slow} must be below rope_scaling_beta_fast={fast}; lower it"
    if kind == "yarn" and model.rotary_base <= 1:
        yield f"rotary_base={model.rotary_base} must be above 1 for rope_scaling_type=yarn; raise it"
    if kind == "dynamic" and pairs < 2:
        yield f"rope_scaling_type=dynamic needs heads of which 4 channels or more are rotated, not {model.rotary_size}"
    if kind != "longrope":
        return
    if model.rope_scaling_original_length == 1:
        yield "rope_scaling_original_length=1 must be above 1 for rope_scaling_type=longrope; raise it"
    for name in ("rope_scaling_short_factors", "rope_scaling_long_factors"):
        count = len(getattr(model, name))
        if count != pairs:
            yield f"{name} has {count} numbers; rope_scaling_type=longrope needs one for each of {pairs} frequencies"


# ---------------------------------------------------------------------------------------------------------------------
# Experts from a dense model


def upcycle_faults(config: Config, dense: Config) -> Iterator[str]:
    """Yield why a model with experts cannot start from this dense one as what that computes."""
    model, theirs = config.model, dense.model
    if model.num_experts is None or theirs.num_experts is not None:
        yield (
            f"upcycle makes experts of the MLPs of a dense model, but num_experts={model.num_experts} here, "
            f"{theirs.num_experts} there; set it here alone, or leave upcycle out"
        )
        return
    here, there = (_block_of(architecture) for architecture in (model.architecture, theirs.architecture))
    yield from broken(
        (
            model.moe_shared_expert_intermediate_size is not None,
            "upcycle has nothing to start shared experts from; leave moe_shared_expert_intermediate_size out",
        ),
        (
            model.moe_router_pre_softmax or model.moe_router_topk_scaling_factor != 1,
            "upcycle needs weights of a token's experts that add up to 1, as an MLP has; leave moe_router_pre_softmax "
            "and moe_router_topk_scaling_factor out",
        ),
        (
            model.expert_ffn_size != theirs.ffn_size,
            f"upcycle copies MLPs of width {theirs.ffn_size}, but the experts have moe_ffn_hidden_size="
            f"{model.expert_ffn_size}; give {theirs.ffn_size}",
        ),
        (
            here is None or here != there,
            f"upcycle needs layers of one structure, but those of architecture={model.architecture} are not "
            f"{theirs.architecture}'s; give a family whose layers are, such as {theirs.architecture} itself",
        ),
    )
    plain = replace(model, architecture=theirs.architecture, num_experts=None, ffn_hidden_size=theirs.ffn_hidden_size)
    found = differing(plain.computed(config.training.seq_length), theirs.computed(dense.training.seq_length))
    if found:
        yield f"upcycle takes all but the MLPs as it is, but the models differ in {'; '.join(found)}; give theirs"


def _block_of(architecture: str) -> Any:
    """Return the structure of a family's layers; None: it is not declared as a block."""
    return getattr(family_named(architecture).declare, "keywords", {}).get("block")
