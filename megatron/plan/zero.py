"""Memory of weights, gradients and optimizer states as DeepSpeed 0.19.8 allocates them, by optimizer and ZeRO stage.

Its optimizers and training/deepspeed/reduction.py hold flat buffers, and reduce gradients in buckets; both count.
Sizes in bytes, of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.options.config import Config, ConfigError
from megatron.options.deepspeed_file import read_settings
from megatron.parallel.layout import Layout
from megatron.parallel.operators import nf4_layout
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.flops import declared_layers, number_size, parameters_of_layer
from megatron.plan.pipeline import stage_ranges
from megatron.runtime.devices import planned_device

REDUCE_BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: numbers that it reduces at once, and allocates a buffer for."""
ALLGATHER_BUCKET = 500_000_000
"""DeepSpeed's `allgather_bucket_size`: updated weights that ranks gather at once."""
REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's `stage3_max_reuse_distance`: gathered parameters stay until they are used again, if within so many."""
PERSISTENT_PARAMETER = 100_000
"""DeepSpeed's `stage3_param_persistence_threshold`: smaller parameters are never cut."""


BUCKETS = 8
"""Into which we cut the gradients of a model, within the two sizes below: more overlap, and fewer large collectives."""
SMALLEST_BUCKET, LARGEST_BUCKET = 1_000_000, 40_000_000


def reduce_bucket_size(config: Config) -> int:
    """Return the number of gradients that are reduced at once, no more than a rank has.

    Under ZeRO-2 and 3 and offload DeepSpeed's default: it allocates the whole bucket, 2 GB in float32, for a model of
    any size.
    """
    layers, t = declared_layers(config), config.parallel.tensor_model_parallel_size
    held = [
        held_layers([layer for start, stop in ranges for layer in layers[start:stop]])
        for ranges in stage_ranges(config, layers)
    ]
    most = max(1, *(_parameters(stage, t, trained_only=True) for stage in held))
    if not has_gradient_buffers(config):
        return min(REDUCE_BUCKET, most)
    return min(max(SMALLEST_BUCKET, min(LARGEST_BUCKET, most // BUCKETS)), most)


def has_gradient_buffers(config: Config) -> bool:
    """Return True where gradients are summed from flat buffers of ours; under ZeRO-2 and 3 and offload by DeepSpeed."""
    return config.effective_zero_stage < 2 and not config.optimizer.offload_optimizer


def zero_settings(config: Config) -> dict[str, Any]:
    """Return the values of the user's own `zero_optimization`; {} without one, or if the file cannot be read."""
    if config.training.deepspeed_config is None:
        return {}
    try:
        section = read_settings(config.training.deepspeed_config).get("zero_optimization")
    except ConfigError:  # reported where the file is checked
        return {}
    return section if isinstance(section, dict) else {}


def held_layers(layers: Sequence[LayerDeclaration]) -> list[LayerDeclaration]:
    """Return each layer once: a stage holds a tied weight once."""
    return list({layer.name: layer for layer in layers}.values())


@dataclass(frozen=True)
class SharedState:
    """Bytes that a rank allocates for its parameters, by when it holds them."""

    weights: int
    master_weights: int
    optimizer_states: int
    gradients: int
    """Held always."""
    step_gradients: int
    """Held from the first gradient of a step to its end."""
    later_gradients: int
    """Held from the end of a step's first microbatch to the end of the step."""
    microbatch_gradients: int
    """Held from the first to the last gradient of each microbatch: the buckets."""
    bucket: int
    """Gradients of so many numbers are reduced together, while the backward pass runs; 0: all of a step at its end."""
    keeps_gradients: bool
    """Each parameter's gradient, in the dtype of the weights, stays from its first microbatch to the end of the step;
    otherwise it moves into the bucket as soon as it is complete."""
    at_reduction: int
    """Allocated for a moment to reduce the gradients of a step, or of a full bucket."""
    at_update: int
    """Allocated for a moment when the optimizer updates, instead of `microbatch_gradients`."""
    gathered: int
    """Weights gathered, from other ranks or the host, at the end of the forward pass (ZeRO-3)."""
    host: int = 0
    """Offloaded to the host's memory."""


def shared_state(config: Config, layout: Layout, layers: Sequence[LayerDeclaration]) -> SharedState:
    """Return what a rank that holds these layers allocates for its parameters and quantised weights."""
    state, t = _state_of_parameters(config, layout, layers), layout.tensor_size
    # each rank's own at every stage: DeepSpeed cuts and offloads parameters alone
    quantized = sum(nf4_layout.num_bytes(shard, t) for layer in layers for shard in _quantized(layer))
    return replace(state, weights=state.weights + quantized)


def _state_of_parameters(config: Config, layout: Layout, layers: Sequence[LayerDeclaration]) -> SharedState:
    t, dp, number = layout.tensor_size, layout.grad_size, number_size(config)
    parameters, trained = _parameters(layers, t), _parameters(layers, t, trained_only=True)
    share = -(-trained // dp)
    stage = config.effective_zero_stage
    optimizer = config.optimizer
    bare = SharedState(
        weights=parameters * number,
        master_weights=0 if stage == 0 else 4 * share,
        optimizer_states=4 * len(optimizer.states) * (trained if stage == 0 else share),
        gradients=0,
        step_gradients=0,
        later_gradients=0,
        microbatch_gradients=0,
        bucket=0,
        keeps_gradients=True,
        at_reduction=0,
        at_update=0,
        gathered=0,
    )
    if config.training.skip_train:
        weights = parameters * number if stage < 3 else -(-parameters * number // dp)
        return replace(bare, weights=weights, master_weights=0, optimizer_states=0)
    if stage == 0 and dp == 1:
        return bare
    dense = (shard for layer in layers for shard in layer.shards.values() if not shard.quantized)
    sizes = [math.prod(shard.local_shape(t)) for shard in dense]
    largest = max(sizes, default=0)
    if stage == 3:
        persistent = sum(size for size in sizes if size <= PERSISTENT_PARAMETER)
        ends = _parameters(held_layers([layers[0], layers[-1]]), t)
        state = _zero_3(config, bare, dp, parameters, share, persistent, ends)
    elif has_gradient_buffers(config):
        state = _buffered(config, bare, dp, trained, share)
    else:
        state = _zero_1_and_2(config, bare, dp, trained, share)
    if optimizer.kind.copies_gradient and optimizer.weight_decay > 0:
        state = replace(state, at_update=state.at_update + 4 * share)
    if optimizer.offload_optimizer:
        state = _offloaded(config, state, share, largest)
    if stage in (1, 2) and dp > 1 and planned_device(config.parallel.device).collectives_are_gloo:
        # gloo gathers the updated weights into a tensor of its own before it copies them
        state = replace(state, at_update=max(state.at_update, number * min(trained, ALLGATHER_BUCKET)))
    return state


def _buffered(config: Config, bare: SharedState, dp: int, trained: int, share: int) -> SharedState:
    """Gradients are added to flat buffers as soon as they exist, and reduced in place, or as copies in `sent` bytes."""
    accumulated = 4 if config.training.grad_accum_dtype == "fp32" else 2
    sent = 4 if (config.training.grad_reduce_dtype or config.training.grad_accum_dtype) == "fp32" else 2
    return replace(
        bare,
        gradients=accumulated * trained,
        keeps_gradients=False,
        at_reduction=sent * trained if dp > 1 and sent != accumulated else 0,
        at_update=4 * share if accumulated == 2 else 0,
    )


def _zero_1_and_2(config: Config, bare: SharedState, dp: int, trained: int, share: int) -> SharedState:
    """DeepSpeedZeroOptimizer: gradients are copied into a bucket, reduced, and kept as this rank's partition."""
    number, stage, user = number_size(config), config.effective_zero_stage, zero_settings(config)
    bucket = user.get("reduce_bucket_size", reduce_bucket_size(config))
    full = min(bucket, trained)
    accumulated = 4 if config.training.grad_accum_dtype == "fp32" else 2
    separate = accumulated != number
    # ZeRO-1 puts the accumulated gradients into its bucket; ZeRO-2 those of the weights' dtype
    staged = accumulated if stage == 1 else number
    buffers = 2 if user.get("overlap_comm", False) else 1
    # flattened, and in the dtype of communication, where that differs
    flat = staged * full if dp > 1 or separate else 0
    sent = 4 if (config.training.grad_reduce_dtype or config.training.grad_accum_dtype) == "fp32" else 2
    flat += sent * full if sent != staged else 0
    partition = accumulated * share
    if stage == 1:
        # every gradient lives until then; accumulated in float32, each slice is added to the partition as it comes
        reduced = flat + partition if separate else max(flat, partition)
        at_reduction = max(0, reduced - staged * full)
        step = accumulated * trained if separate else 0
        return replace(
            bare,
            step_gradients=step + staged * bucket * buffers,
            keeps_gradients=not separate,
            at_reduction=at_reduction,
            at_update=0,
        )
    return replace(
        bare,
        step_gradients=partition if separate else 0,
        later_gradients=0 if separate else partition,
        microbatch_gradients=staged * bucket * buffers,
        bucket=bucket,
        keeps_gradients=False,
        at_reduction=max(flat, 0 if separate else partition),
        # the partition flattened, and in float32
        at_update=0 if separate else partition + (4 * share if accumulated == 2 else 0),
    )


def _zero_3(
    config: Config, bare: SharedState, dp: int, parameters: int, share: int, persistent: int, ends: int
) -> SharedState:
    """DeepSpeedZeroOptimizer_Stage3: weights are cut too, and gathered for use; gradients live in one flat partition.

    `persistent` parameters are held whole as well; those of the two `ends`, the first and the last layer, are still
    gathered at the reduction.
    """
    number, user = number_size(config), zero_settings(config)
    bucket = user.get("reduce_bucket_size", reduce_bucket_size(config))
    sent = 4 if (config.training.grad_reduce_dtype or config.training.grad_accum_dtype) == "fp32" else 2
    accumulated = 4 if config.training.grad_accum_dtype == "fp32" else 2
    full = sent * min(bucket, parameters)
    device = planned_device(config.parallel.device)
    copied = full if device.collectives_are_gloo else 0  # gloo copies what it reduces
    gathers = dp > 1 or (config.optimizer.offload_param and not device.is_host)
    return replace(
        bare,
        weights=(-(-parameters // dp) + (persistent if dp > 1 else 0)) * number,
        gradients=sent * bucket + accumulated * share,
        bucket=bucket,
        keeps_gradients=False,
        at_reduction=full + copied + (ends * number if gathers else 0),
        at_update=0,
        gathered=min(parameters, REUSE_DISTANCE // 2) * number if gathers else 0,
    )


def _offloaded(config: Config, state: SharedState, share: int, largest: int) -> SharedState:
    """Master weights, moments and a copy of the gradients in host memory."""
    number = number_size(config)
    accumulated = 4 if config.training.grad_accum_dtype == "fp32" else 2
    host = state.master_weights + state.optimizer_states + 4 * share
    state = replace(state, master_weights=0, optimizer_states=0, at_update=0)
    if config.effective_zero_stage == 3:
        host += accumulated * share
        if config.optimizer.offload_param:
            host, state = host + state.weights, replace(state, weights=0)
        return replace(state, gradients=state.gradients - accumulated * share, host=host)
    host += number * (share + largest)
    if accumulated == number:  # partial sums of the microbatches
        host += number * share
    of_norm = 8 if planned_device(config.parallel.device).has_64_bits else 4
    return replace(
        state,
        gradients=state.gradients + number * largest,
        later_gradients=0,
        at_reduction=max(state.at_reduction if accumulated != number else 0, of_norm * largest),
        host=host,
    )


def _parameters(layers: Sequence[LayerDeclaration], t: int, *, trained_only: bool = False) -> int:
    """Numbers of the parameters that a rank holds, which quantised weights are not among."""
    total = sum(parameters_of_layer(layer, t, trained_only=trained_only) for layer in layers)
    if trained_only:
        return total
    return total - sum(math.prod(shard.local_shape(t)) for layer in layers for shard in _quantized(layer))


def _quantized(layer: LayerDeclaration) -> list[Shard]:
    return [shard for shard in layer.shards.values() if shard.quantized]
