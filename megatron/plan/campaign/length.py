"""Steps of a run and their time, by the sizes that change: batch ramp-up, and stages of the sequence length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megatron.options.config import Config, ConfigError, batch_levels, length_stages, steps_beyond
from megatron.options.schedule import Schedule
from megatron.parallel.layout import Layout
from megatron.plan.flops import flops_per_token
from megatron.plan.pipeline import schedule_bubble
from megatron.tasks.registry import load_task


class Phase(NamedTuple):
    """Steps of one size."""

    steps: int
    global_batch_size: int
    row_length: int


def phases(config: Config) -> list[Phase]:
    """Return the phases of a run, in order. Raises ConfigError where its length is not known without its data."""
    training = config.training
    if training.num_epochs is not None:
        raise ConfigError(
            [f"num_epochs={training.num_epochs} has as many steps as the data makes; plan it with train_iters"]
        )
    if training.train_iters is None and training.train_samples is None:
        raise ConfigError(["the time to train needs a length: give train_iters or train_samples"])
    schedule = Schedule(training, config.optimizer)
    ends = {end for _, end in [*batch_levels(training), *length_stages(training)] if end is not None}
    found: list[Phase] = []
    consumed, steps_left = 0, schedule.total_iterations
    while steps_left:
        size = schedule.global_batch_size(consumed)
        length = next(length for length, end in length_stages(training) if end is None or consumed < end)
        steps = min([steps_left, *(steps_beyond(end, consumed, size) for end in ends if end > consumed)])
        # an end that changes neither, as of a level that a large step passes, begins no phase
        if found and found[-1][1:] == (size, length):
            steps_before = found.pop().steps
        else:
            steps_before = 0
        found.append(Phase(steps_before + steps, size, length))
        consumed += steps * size
        steps_left -= steps
    return found


def config_of(config: Config, phase: Phase) -> Config:
    """Return the config of a run all of whose steps are as those of the phase."""
    training = config.training
    # a sample is cut into rows, so that a microbatch has as many tokens
    rows = training.seq_length // phase.row_length
    steady = dataclasses.replace(
        training,
        seq_length=phase.row_length,
        seq_length_stages=None,
        micro_batch_size=training.micro_batch_size * rows,
        global_batch_size=phase.global_batch_size * rows,
        rampup_batch_size=None,
    )
    return dataclasses.replace(config, training=steady)


def seconds_by_phase(
    config: Config, layout: Layout, measured_s: float | None, seconds_of: Callable[[Config], float] | None
) -> list[tuple[Phase, float]]:
    """Return the phases of a run with the seconds of a step: measured for one of full size, or predicted for each.

    Raises ConfigError without either, and as `phases`.
    """
    if measured_s is None and seconds_of is None:
        raise ConfigError(["the time to train needs that of a step: give --rates, or --step-seconds as measured"])
    found = []
    for phase in phases(config):
        steady = config_of(config, phase)
        # what is measured is better than what is predicted
        if measured_s is not None:
            seconds = measured_s * _share(steady, config, layout)
        else:
            assert seconds_of is not None
            seconds = seconds_of(steady)
        found.append((phase, seconds))
    return found


def _share(steady: Config, config: Config, layout: Layout) -> float:
    """Return the time of a step of a phase as a share of one of full size, by FLOPs, microbatches and bubble."""
    full = Phase(1, config.training.global_batch_size, config.training.seq_length)
    return _work(steady, layout) / _work(config_of(config, full), layout)


def _work(steady: Config, layout: Layout) -> float:
    tokens = steady.training.global_batch_size * steady.training.seq_length
    number = load_task(steady).data.num_microbatches(layout.num_batch_ranks)
    bubble = 0.0
    # None: the data decides, and no ramp-up changes it
    if number is not None:
        bubble = schedule_bubble(steady, number)
    return flops_per_token(steady) * tokens / (1 - bubble)
