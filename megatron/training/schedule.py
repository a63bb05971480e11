"""How batch size and learning rate follow from the samples consumed so far. Pure functions, no state to save.

`consumed_samples` is always the count *before* the step asked about: 0 for the first. Megatron sets both the same way
(its scheduler moves on after the optimizer step), so under warm-up the first step runs at learning rate 0.
Unlike Megatron's, a step skipped for an fp16 overflow moves the schedule on too: it consumed its samples.

Formulas: NVIDIA/Megatron-LM, megatron/core/{optimizer_param_scheduler,num_microbatches_calculator}.py.
"""

from __future__ import annotations

import math

from megatron.config import OptimizerConfig, TrainingConfig


def global_batch_size(training: TrainingConfig, consumed_samples: int) -> int:
    """Samples in the step that starts at `consumed_samples`.

    Ramp-up START INCREMENT SAMPLES has (global_batch_size - START) / INCREMENT levels below the full size, each lasting
    an equal part of SAMPLES. A level ends with the first step that reaches its boundary.
    """
    if training.rampup_batch_size is None:
        return training.global_batch_size
    start, increment, ramp_samples = training.rampup_batch_size
    num_increments = (training.global_batch_size - start) // increment
    if consumed_samples >= ramp_samples:
        return training.global_batch_size
    # in whole numbers: Megatron's float quotient can miss a boundary that no float represents
    return start + consumed_samples * num_increments // ramp_samples * increment


def total_iterations(training: TrainingConfig) -> int:
    """Steps in the whole training: train_iters, or as many whole global batches as train_samples holds."""
    return _whole_training(training)[0]


def total_samples(training: TrainingConfig) -> int:
    """Samples consumed by all `total_iterations` steps. At most train_samples: a last partial batch is not trained."""
    return _whole_training(training)[1]


def _whole_training(training: TrainingConfig) -> tuple[int, int]:
    """Steps and samples of the whole training, one ramp-up level at a time."""
    iterations, samples = 0, 0
    for batch_size, level_end in _levels(training):
        level_steps = max(0, -(-(level_end - samples) // batch_size)) if level_end is not None else None
        steps_left = _steps_left(training, iterations, samples, batch_size)
        steps = steps_left if level_steps is None else min(level_steps, steps_left)
        iterations += steps
        samples += steps * batch_size
        if steps == steps_left:
            break
    return iterations, samples


def _levels(training: TrainingConfig) -> list[tuple[int, int | None]]:
    """Each global batch size with the first consumed_samples beyond it (None: the last level)."""
    levels: list[tuple[int, int | None]] = []
    if training.rampup_batch_size is not None:
        start, increment, ramp_samples = training.rampup_batch_size
        num_increments = (training.global_batch_size - start) // increment
        for level in range(num_increments):
            levels.append((start + level * increment, -(-(level + 1) * ramp_samples // num_increments)))
    return [*levels, (training.global_batch_size, None)]


def _steps_left(training: TrainingConfig, iterations: int, samples: int, batch_size: int) -> int:
    """Steps of `batch_size` until the training ends."""
    if training.train_iters is not None:
        return training.train_iters - iterations
    assert training.train_samples is not None, "rules.py demands train_samples or train_iters"
    return (training.train_samples - samples) // batch_size


def learning_rate(optimizer: OptimizerConfig, training: TrainingConfig, consumed_samples: int) -> float:
    """Learning rate of the step that starts at `consumed_samples`.

    From 0 up to lr over the warm-up, then by lr_decay_style down to min_lr, which is reached lr_decay_samples after
    the start of the training (not of the decay) and kept from there on. Lengths in iterations count as that many full
    global batches.
    """
    batch_size = training.global_batch_size
    warmup = optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * batch_size
    if consumed_samples <= warmup and warmup > 0:
        return optimizer.lr * consumed_samples / warmup
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    decay_end = _decay_end(optimizer, training)
    if consumed_samples > decay_end:
        return optimizer.min_lr
    progress = (consumed_samples - warmup) / (decay_end - warmup)
    match optimizer.lr_decay_style:
        case "linear":
            share = 1 - progress
        case "cosine":
            share = _cosine(progress)
        case "WSD":
            anneal = optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * batch_size
            share = _anneal(optimizer, 1 - (decay_end - consumed_samples) / anneal)
    return optimizer.min_lr + share * (optimizer.lr - optimizer.min_lr)


def _decay_end(optimizer: OptimizerConfig, training: TrainingConfig) -> int:
    """Samples from the start of the training until min_lr."""
    if optimizer.lr_decay_samples or optimizer.lr_decay_iters:
        return optimizer.lr_decay_samples or (optimizer.lr_decay_iters or 0) * training.global_batch_size
    return training.train_samples or (training.train_iters or 0) * training.global_batch_size


def _anneal(optimizer: OptimizerConfig, progress: float) -> float:
    """Share of lr - min_lr left after `progress` of WSD's last part; below 0 that part has not begun."""
    if progress <= 0:
        return 1.0
    match optimizer.lr_wsd_decay_style:
        case "linear":
            return 1 - progress
        case "cosine":
            return _cosine(progress)
        case "exponential":
            return 2 * 0.5**progress - 1


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
