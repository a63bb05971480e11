"""Start times, from trainings and the seconds that the plan predicts for them without any."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron.measuring.trainings import (
    FEW_LAYERS,
    FEW_MICROBATCHES,
    MORE_LAYERS,
    MORE_MICROBATCHES,
    Training,
)
from megatron.options.config import Config
from megatron.plan.flops import declared_layers
from megatron.plan.rates.rates import Rates, Starts
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.settings.command_line import load_config


def starts_of(trainings: Sequence[Training], rates: Rates) -> Starts:
    """Return the seconds of a step, a microbatch and a layer that the plan's pieces leave; a message's is 0.

    A step takes step + m (microbatch + L (layer forward + layer backward)) more, so that four trainings, of two depths
    and two numbers of microbatches, determine all of them.
    """
    by_size = {(each.layers, each.microbatches): each for each in trainings}
    plain = dataclasses.replace(rates, starts=Starts(0.0, 0.0, 0.0, 0.0, 0.0))
    few, many = FEW_MICROBATCHES, MORE_MICROBATCHES
    predicted = {size: _predicted(training, plain) for size, training in by_size.items()}
    left = {size: statistics.median(training.steps) - predicted[size].seconds for size, training in by_size.items()}

    more = MORE_LAYERS - FEW_LAYERS
    layer = max(0.0, (left[MORE_LAYERS, many] - left[FEW_LAYERS, many]) / (many * more))
    # the ends of the model, such as the embedding, are layers too
    layers = len(declared_layers(config_of(by_size[FEW_LAYERS, few], rates.device)))
    microbatch = (left[FEW_LAYERS, many] - left[FEW_LAYERS, few]) / (many - few) - layers * layer
    step = left[FEW_LAYERS, few] - few * (max(0.0, microbatch) + layers * layer)

    taken = statistics.median(by_size[MORE_LAYERS, many].forward) - statistics.median(by_size[FEW_LAYERS, many].forward)
    pieces = _forward(predicted[MORE_LAYERS, many]) - _forward(predicted[FEW_LAYERS, many])
    forward = (taken / many - pieces) / more
    forward = min(max(0.0, forward), layer)
    return Starts(max(0.0, step), max(0.0, microbatch), forward, layer - forward, 0.0)


def mean_starts(starts: Sequence[Starts]) -> Starts:
    """Return the means over precisions: what starts an operation does not depend on its numbers."""
    return Starts(*(statistics.mean(each) for each in zip(*starts, strict=True)))


def config_of(training: Training, device: str) -> Config:
    """Return the config of a training, whose data is not read."""
    return load_config(training.flags(Path("data"), Path("results"), device, 1), training.stages)


def _predicted(training: Training, rates: Rates) -> StepTime:
    return step_time(config_of(training, rates.device), Cluster.of(1, 1), rates)


def _forward(time: StepTime) -> float:
    """Return the seconds of a forward pass of one microbatch."""
    return sum(chunk.forward for stage in time.stages for chunk in stage)
