"""Batch size and learning rate as functions of the samples consumed so far. No state to save.

`consumed_samples` is always the count *before* the step: 0 for the first. Megatron sets both the same way
(its scheduler moves on after the optimizer step), so under warm-up the first step runs at learning rate 0.
Unlike Megatron's, a step skipped for an fp16 overflow moves the schedule on too: it consumed its samples.

Formulas: NVIDIA/Megatron-LM, megatron/core/{optimizer_param_scheduler,num_microbatches_calculator}.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron.config.options import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Batch size, learning rate and length of one run. Everything is a pure function of the consumed samples."""

    training: TrainingConfig
    optimizer: OptimizerConfig
    samples_per_epoch: int | None = None
    """Samples in an epoch, if the task counts epochs: a global batch never crosses from one into the next, so the last
    of an epoch may be smaller, and so may the last of all. None: a stream of samples, of which only whole global
    batches are trained."""

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples in the step that starts at `consumed_samples`.

        Ramp-up START INCREMENT SAMPLES has (global_batch_size - START) / INCREMENT levels below the full size, each
        lasting an equal part of SAMPLES. A level ends with the first step that reaches its boundary.
        """
        size = self.training.global_batch_size
        if self.samples_per_epoch is not None:
            left_in_epoch = self.samples_per_epoch - consumed_samples % self.samples_per_epoch
            return max(1, min(size, left_in_epoch, self.total_samples - consumed_samples))
        if self.training.rampup_batch_size is None:
            return size
        start, increment, ramp_samples = self.training.rampup_batch_size
        num_increments = (size - start) // increment
        if consumed_samples >= ramp_samples:
            return size
        # in whole numbers: Megatron's float quotient can miss a boundary that no float represents
        return start + consumed_samples * num_increments // ramp_samples * increment

    def is_complete(self, consumed_samples: int) -> bool:
        """Return True if too few samples are left for one more step."""
        return consumed_samples + self.global_batch_size(consumed_samples) > self.total_samples

    def ends_epoch(self, consumed_samples: int) -> bool:
        """Return True if the previous step was the last of an epoch."""
        return self.samples_per_epoch is not None and consumed_samples % self.samples_per_epoch == 0

    @property
    def total_iterations(self) -> int:
        """Steps in the whole training: train_iters, or as many as num_epochs or train_samples make."""
        return self._whole_training[0]

    @property
    def total_samples(self) -> int:
        """Samples consumed by all `total_iterations` steps. At most train_samples: of a stream, a last partial batch is
        not trained.
        """
        return self._whole_training[1]

    @cached_property
    def _whole_training(self) -> tuple[int, int]:
        """Steps and samples of the whole training."""
        if self.samples_per_epoch is not None:
            return self._whole_epochs(self.samples_per_epoch)
        iterations, samples = 0, 0
        for batch_size, level_end in self._levels():  # one ramp-up level at a time
            level_steps = max(0, -(-(level_end - samples) // batch_size)) if level_end is not None else None
            steps_left = self._steps_left(iterations, samples, batch_size)
            steps = steps_left if level_steps is None else min(level_steps, steps_left)
            iterations += steps
            samples += steps * batch_size
            if steps == steps_left:
                break
        return iterations, samples

    def _whole_epochs(self, samples_per_epoch: int) -> tuple[int, int]:
        training, size = self.training, self.training.global_batch_size
        steps_per_epoch = -(-samples_per_epoch // size)
        if training.train_iters is not None:
            epochs, steps = divmod(training.train_iters, steps_per_epoch)
            return training.train_iters, epochs * samples_per_epoch + steps * size
        samples = training.train_samples or (training.num_epochs or 0) * samples_per_epoch
        epochs, rest = divmod(samples, samples_per_epoch)
        return epochs * steps_per_epoch - (-rest // size), samples

    def _levels(self) -> list[tuple[int, int | None]]:
        """Each global batch size with the first consumed_samples beyond it (None: the last level)."""
        levels: list[tuple[int, int | None]] = []
        if self.training.rampup_batch_size is not None:
            start, increment, ramp_samples = self.training.rampup_batch_size
            num_increments = (self.training.global_batch_size - start) // increment
            for level in range(num_increments):
                levels.append((start + level * increment, -(-(level + 1) * ramp_samples // num_increments)))
        return [*levels, (self.training.global_batch_size, None)]

    def _steps_left(self, iterations: int, samples: int, batch_size: int) -> int:
        """Steps of `batch_size` until the training ends."""
        if self.training.train_iters is not None:
            return self.training.train_iters - iterations
        assert self.training.train_samples is not None, "rules.py demands a length"
        return (self.training.train_samples - samples) // batch_size

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts at `consumed_samples`.

        From 0 up to lr over the warm-up, then by lr_decay_style down to min_lr, which is reached lr_decay_samples after
        the start of the training (not of the decay) and kept from there on. Lengths in iterations count as that many
        full global batches.
        """
        optimizer, batch_size = self.optimizer, self.training.global_batch_size
        warmup = optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * batch_size
        if consumed_samples <= warmup and warmup > 0:
            return optimizer.lr * consumed_samples / warmup
        if optimizer.lr_decay_style == "constant":
            return optimizer.lr
        decay_end = self._decay_end
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

    @property
    def _decay_end(self) -> int:
        """Samples from the start of the training until min_lr."""
        optimizer, training = self.optimizer, self.training
        if optimizer.lr_decay_samples or optimizer.lr_decay_iters:
            return optimizer.lr_decay_samples or (optimizer.lr_decay_iters or 0) * training.global_batch_size
        if self.samples_per_epoch is not None:
            return self.total_samples
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
