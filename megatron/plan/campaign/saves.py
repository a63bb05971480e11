"""Size of a checkpoint, time of a save, and how often a run saves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.campaign.failures import Save
from megatron.plan.campaign.question import Question
from megatron.plan.flops import count_parameters, declared_layers
from megatron.plan.pipeline import stage_ranges
from megatron.plan.zero import FLOAT32, held_layers
from megatron.runtime.devices import planned_device

if TYPE_CHECKING:
    from megatron.plan.rates.rates import Rates


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: float32 weights, and average and optimizer's states of trained ones."""
    numbers = count_parameters(config, lambda shard: _is_saved(config, shard))
    if config.optimizer.ema_decay is not None:
        numbers += count_parameters(config, lambda shard: shard.trained)
    if not config.checkpoint.no_save_optim:
        for is_linear_weight in (False, True):
            kinds = config.optimizer.states_of(is_linear_weight=is_linear_weight)
            numbers += len(kinds) * count_parameters(config, partial(_is_trained, is_linear_weight=is_linear_weight))
    return FLOAT32 * numbers


def _is_trained(shard: Shard, *, is_linear_weight: bool) -> bool:
    return shard.trained and shard.is_linear_weight == is_linear_weight


def _is_saved(config: Config, shard: Shard) -> bool:
    # a checkpoint of adapters leaves out their base, and 4-bit weights are always of one
    return shard.trained or config.lora.lora_rank is None


def rank_bytes(config: Config, layout: Layout) -> int:
    """Return what a rank of the stage that holds most has to save; the ranks of a stage share it."""
    layers, largest = declared_layers(config), 0
    for ranges in stage_ranges(config, layers):
        stage = held_layers([layer for start, stop in ranges for layer in layers[start:stop]])
        largest = max(largest, sum(map(_trained_numbers, stage)))
    trained = count_parameters(config, lambda shard: shard.trained)
    ranks_per_stage = layout.world_size // layout.num_stages
    return math.ceil(checkpoint_bytes(config) * largest / max(trained, 1) / ranks_per_stage)


def copied_bytes(config: Config, layout: Layout, *, nodes: int, devices_per_node: int) -> int:
    """Return the host memory of a node for copies of the state, on the node whose ranks hold most (peer_copies.py).

    It includes the copies of other nodes that a restart brings there.
    """
    # the optimizer is in each of them, whatever a save leaves out
    whole = replace(config, checkpoint=replace(config.checkpoint, no_save_optim=False))
    ranks = min(layout.world_size, devices_per_node)
    # the whole copy and the one that is made; over several nodes those of the node before too
    copies = 2 if nodes == 1 else 4
    kept = copies * ranks * rank_bytes(whole, layout)
    if nodes <= 2:
        return kept
    return kept + max(0, checkpoint_bytes(whole) - kept // 2)


def _trained_numbers(layer: LayerDeclaration) -> int:
    return sum(math.prod(shard.shape) for shard in layer.shards.values() if shard.trained)


def save_time(config: Config, layout: Layout, question: Question, rates: Rates | None) -> Save | None:
    """Return the time of a save; None: nothing says it. Raises ConfigError."""
    seconds = _whole_seconds(config, question, rates)
    if not config.checkpoint.async_save:
        if question.save_wait_seconds is not None:
            raise ConfigError(
                ["--save-wait-seconds has no effect without async_save: training waits for the whole save"]
            )
        return None if seconds is None else Save(seconds)
    if seconds is None:
        return None
    wait_s = question.save_wait_seconds
    if wait_s is None:
        wait_s = _copy_seconds(config, layout, rates)
    # what is known of the whole comes from another source than the copy, and may be too short
    return Save(wait_s, max(0.0, seconds - wait_s))


def _whole_seconds(config: Config, question: Question, rates: Rates | None) -> float | None:
    if question.save_seconds is not None:
        return question.save_seconds
    rate = None
    if question.disk_gb_per_second is not None:
        rate = 1e9 * question.disk_gb_per_second
    elif rates is not None:
        rate = rates.disk_bytes_per_s
    return None if rate is None else checkpoint_bytes(config) / rate


def _copy_seconds(config: Config, layout: Layout, rates: Rates | None) -> float:
    """Return the time of the copy that training waits for, before a save goes on in the background."""
    if rates is None:
        raise ConfigError(
            [
                "a save goes on in the background (async_save) after a wait that nothing says: give "
                "--save-wait-seconds (the timer save-checkpoint), --rates, or --no-async-save"
            ]
        )
    size_bytes = rank_bytes(config, layout)
    if planned_device(config.parallel.device).is_host:
        return rates.copy(size_bytes)
    return rates.host_copy(size_bytes)


def save_interval_s(config: Config, step_s: float) -> float:
    """Return the mean training between two saves, by the options of the run."""
    options, steps = config.checkpoint, float(config.checkpoint.save_interval)
    if options.save_samples is not None:
        steps = min(steps, options.save_samples / config.training.global_batch_size)
    # at least a step
    interval_s = step_s * max(1.0, steps)
    if options.save_interval_in_mins is None:
        return interval_s
    # its clock begins with each save, so that the last stretch before a save of the other kind is shorter
    own_s = max(step_s, 60.0 * options.save_interval_in_mins)
    return interval_s / math.ceil(interval_s / own_s)
