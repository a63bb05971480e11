"""Batch size, learning rate and weight decay as functions of the samples consumed so far. No state to save.

`consumed_samples` is always the count *before* the step: 0 for the first. Megatron sets both the same way (its
scheduler moves on after the optimizer step), so under warm-up the first step runs at learning rate 0. Unlike
Megatron's, a step skipped for an fp16 overflow moves the schedule on too: it consumed its samples.

Formulas: NVIDIA/Megatron-LM, megatron/core/optimizer_param_scheduler.py and num_microbatches_calculator.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.options.config import OptimizerConfig, TrainingConfig, batch_levels, samples_after, steps_beyond


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


ANNEALING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
}
"""Share of lr - min_lr that is left after `progress` of a decay, from 0 to 1."""


@dataclass(frozen=True)
class ParamSchedule:
    """Learning rate and weight decay of a run, with all lengths in samples from the start of the training."""

    lr: float
    min_lr: float
    lr_warmup_init: float
    lr_warmup: tuple[tuple[float, float], ...]
    """Corners (samples, share of the warm-up done) of a line from (0, 0) to the end of the warm-up; empty: none."""
    lr_decay_style: str
    lr_decay_samples: int
    lr_wsd_decay_style: str
    lr_wsd_decay_samples: int
    weight_decay_incr_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_samples: int
    # defaults: checkpoints of older releases have none
    decoupled_lr: float | None = None
    """Peak of the word embedding and the output layer; None: they have `lr`."""
    decoupled_min_lr: float | None = None
    muon_lr: float | None = None
    """Peak of Muon's matrices; None: they have `lr`."""

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts at `consumed_samples`.

        From lr_warmup_init up to lr over the warm-up, then by lr_decay_style down to min_lr, which is reached
        lr_decay_samples after the start of the training (not of the decay) and kept from there on.
        """
        warmup = self.lr_warmup[-1][0] if self.lr_warmup else 0
        # <=, as in Megatron: the step at the end of the warm-up has exactly lr
        if warmup > 0 and consumed_samples <= warmup:
            return self.lr_warmup_init + self._warmup_share(consumed_samples) * (self.lr - self.lr_warmup_init)
        if self.lr_decay_style == "constant":
            return self.lr
        # after "constant": that has no end
        if consumed_samples > self.lr_decay_samples:
            return self.min_lr
        progress = (consumed_samples - warmup) / (self.lr_decay_samples - warmup)
        # lr sqrt(warmup / samples): it is lr at the end of the warm-up; 1 in place of 0, as in Megatron
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(warmup, 1) / max(consumed_samples, 1)))
        if self.lr_decay_style == "WSD":
            # below 0 its last part has not begun
            progress = 1 - (self.lr_decay_samples - consumed_samples) / self.lr_wsd_decay_samples
            share = 1.0 if progress <= 0 else ANNEALING[self.lr_wsd_decay_style](progress)
        else:
            share = ANNEALING[self.lr_decay_style](progress)
        return self.min_lr + share * (self.lr - self.min_lr)

    def decoupled_learning_rate(self, consumed_samples: int) -> float | None:
        """Learning rate of word embedding and output layer: the same curve between their own numbers; None: no other.

        Source: Megatron-LM, megatron/core/optimizer, `_update_min_and_max_lr_in_param_groups`.
        """
        if self.decoupled_lr is None or self.decoupled_min_lr is None:
            return None
        own = dataclasses.replace(self, lr=self.decoupled_lr, min_lr=self.decoupled_min_lr)
        return own.learning_rate(consumed_samples)

    def _warmup_share(self, consumed_samples: int) -> float:
        below = (0.0, 0.0)
        # linear between the two corners around it
        for corner in self.lr_warmup:
            if consumed_samples <= corner[0]:
                break
            below = corner
        return below[1] + (corner[1] - below[1]) * (consumed_samples - below[0]) / (corner[0] - below[0])

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay, of the parameters that decay, in the step that starts at `consumed_samples`."""
        if self.weight_decay_incr_style == "constant" or consumed_samples > self.weight_decay_incr_samples:
            return self.end_weight_decay
        # over the whole training, without a warm-up
        share = consumed_samples / self.weight_decay_incr_samples
        if self.weight_decay_incr_style == "cosine":
            # Megatron's (cos(pi (1 - share)) + 1) / 2: it rises where the learning rate's falls
            share = 1 - _cosine(share)
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ParamSchedule:
        """Return the schedule of `to_dict`, also by way of JSON. Raises KeyError or TypeError."""
        return cls(**{**saved, "lr_warmup": tuple((samples, share) for samples, share in saved["lr_warmup"])})

    def counted_in(self, seq_length: int, own_length: int) -> ParamSchedule:
        """Return the schedule with samples of `seq_length` tokens counted as samples of `own_length`."""

        def counted(samples: float) -> Any:
            number = samples * seq_length / own_length
            return int(number) if number.is_integer() else number

        return dataclasses.replace(
            self,
            lr_warmup=tuple((counted(samples), share) for samples, share in self.lr_warmup),
            lr_decay_samples=counted(self.lr_decay_samples),
            lr_wsd_decay_samples=counted(self.lr_wsd_decay_samples),
            weight_decay_incr_samples=counted(self.weight_decay_incr_samples),
        )

    def in_effect(self) -> dict[str, Any]:
        """Return the values that change a learning rate or a weight decay, by name."""
        # a resume compares these: an option without effect may differ
        idle = set()
        if not self.lr_warmup:
            idle |= {"lr_warmup_init"}
        if self.lr_decay_style == "constant":
            idle |= {"min_lr", "lr_decay_samples", "decoupled_min_lr"}
        if self.lr_decay_style != "WSD":
            idle |= {"lr_wsd_decay_style", "lr_wsd_decay_samples"}
        if self.weight_decay_incr_style == "constant":
            idle |= {"start_weight_decay", "weight_decay_incr_samples"}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in idle}


@dataclass(frozen=True)
class Schedule:
    """Batch size, learning rate, weight decay and length of one run: pure functions of the consumed samples."""

    training: TrainingConfig
    optimizer: OptimizerConfig
    samples_per_epoch: int | None = None
    """Samples in an epoch, if the task counts epochs: a global batch never crosses from one into the next, so the last
    of an epoch may be smaller, and so may the last of all. None: a stream of samples, of which only whole global
    batches are trained."""
    restored: ParamSchedule | None = None
    """Learning rate and weight decay of the checkpoint resumed, where these replace the options'."""

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples in the step that starts at `consumed_samples`.

        Ramp-up START INCREMENT SAMPLES has (global_batch_size - START) / INCREMENT levels below the full size, each
        lasting an equal part of SAMPLES. A level ends with the first step that reaches its boundary.
        """
        size = self.training.global_batch_size
        if self.samples_per_epoch is not None:
            # no ramp-up here: a rule refuses it with epochs
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
        # level by level: a ramp over millions of samples needs no loop over steps
        for batch_size, level_end in batch_levels(self.training):
            steps = steps_left = self._steps_left(iterations, samples, batch_size)
            if level_end is not None:
                steps = min(steps_left, steps_beyond(level_end, samples, batch_size))
            iterations += steps
            samples += steps * batch_size
            # the training ends within this level; the last level has no end of its own
            if steps == steps_left:
                break
        return iterations, samples

    def _whole_epochs(self, samples_per_epoch: int) -> tuple[int, int]:
        training, size = self.training, self.training.global_batch_size
        steps_per_epoch = -(-samples_per_epoch // size)
        if training.train_iters is not None:
            return training.train_iters, self.samples_after(training.train_iters)
        samples = training.train_samples or (training.num_epochs or 0) * samples_per_epoch
        epochs, rest = divmod(samples, samples_per_epoch)
        # - (-rest // size): rounded up, as the last batch may be smaller
        return epochs * steps_per_epoch - (-rest // size), samples

    def _steps_left(self, iterations: int, samples: int, batch_size: int) -> int:
        """Steps of `batch_size` until the training ends."""
        if self.training.train_iters is not None:
            return self.training.train_iters - iterations
        assert self.training.train_samples is not None, "settings/validation.py demands a length"
        # rounded down: of a stream only whole batches are trained
        return (self.training.train_samples - samples) // batch_size

    def samples_after(self, iterations: int) -> int:
        """Return the samples in the first `iterations` steps, ramp-up and small last batches of epochs included."""
        if self.samples_per_epoch is None:
            return samples_after(self.training, iterations)
        size = self.training.global_batch_size
        epochs, steps = divmod(iterations, -(-self.samples_per_epoch // size))
        return epochs * self.samples_per_epoch + steps * size

    @cached_property
    def params(self) -> ParamSchedule:
        """Learning rate and weight decay. The training is as long as configured, a last partial batch included."""
        if self.restored is not None:
            return self.restored
        options, training, size = self.optimizer, self.training, self.training.global_batch_size
        length = training.train_samples or samples_after(training, training.train_iters or 0)
        if self.samples_per_epoch is not None:
            length = self.total_samples
        # Megatron's defaults: the decay ends with the training
        decay = options.lr_decay_samples or self.samples_after(options.lr_decay_iters or 0) or length
        # constant: Megatron returns the end's value, so that both are the same
        start_weight_decay = end_weight_decay = options.weight_decay
        if options.weight_decay_incr_style != "constant":
            start_weight_decay, end_weight_decay = options.start_weight_decay or 0.0, options.end_weight_decay or 0.0
        return ParamSchedule(
            lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_init=options.lr_warmup_init,
            lr_warmup=self._warmup(decay),
            lr_decay_style=options.lr_decay_style,
            lr_decay_samples=decay,
            lr_wsd_decay_style=options.lr_wsd_decay_style,
            lr_wsd_decay_samples=options.lr_wsd_decay_samples or (options.lr_wsd_decay_iters or 0) * size,
            weight_decay_incr_style=options.weight_decay_incr_style,
            start_weight_decay=start_weight_decay,
            end_weight_decay=end_weight_decay,
            weight_decay_incr_samples=length,
            decoupled_lr=options.decoupled_lr,
            decoupled_min_lr=options.decoupled_end,
            muon_lr=options.muon_peak,
        )

    @property
    def rates(self) -> OptimizerConfig:
        """The optimizer's options with the learning rates in effect, of which groups of parameters have multiples."""
        if self.restored is None:
            return self.optimizer
        restored = self.restored
        return dataclasses.replace(
            self.optimizer,
            lr=restored.lr,
            min_lr=restored.min_lr,
            decoupled_lr=restored.decoupled_lr,
            decoupled_min_lr=restored.decoupled_min_lr,
            muon_lr=restored.muon_lr,
        )

    def _warmup(self, decay_samples: int) -> tuple[tuple[float, float], ...]:
        """Return the corners of the warm-up.

        In steps it is a straight line over them, and so bends over the samples where the batch size changes.
        """
        options = self.optimizer
        # a share of the decay, not of the training, as in Megatron
        samples = options.lr_warmup_samples or (options.lr_warmup_fraction or 0) * decay_samples
        if samples:
            return ((samples, 1.0),)
        last = options.lr_warmup_iters
        if not last:
            return ()
        # only those within the warm-up; its end is a corner in any case
        bends = {step for step in self._resized_at(last) if 0 < step < last}
        return tuple((self.samples_after(step), step / last) for step in sorted(bends | {last}))

    def _resized_at(self, last: int) -> list[int]:
        """Return the numbers of steps, up to about `last`, before and after which the batch size differs."""
        size = self.training.global_batch_size
        if self.samples_per_epoch is not None:
            # all steps of the epochs are equal, so the line over steps is one over samples
            if self.samples_per_epoch % size == 0:
                return []
            steps_per_epoch = -(-self.samples_per_epoch // size)  # the last of them is smaller
            ends = range(steps_per_epoch, last + 2, steps_per_epoch)
            # two bends around each smaller step, the last of its epoch
            return [step for end in ends for step in (end - 1, end)]
        steps, samples, resized_at = 0, 0, []
        for batch_size, level_end in batch_levels(self.training)[:-1]:
            assert level_end is not None
            level_steps = steps_beyond(level_end, samples, batch_size)
            steps += level_steps
            samples += level_steps * batch_size
            resized_at.append(steps)
        return resized_at

    def unended_warmup(self) -> str | None:
        """Return a warning if the warm-up is longer than the run, which then never has its learning rate."""
        params, total = self.params, self.total_samples
        end = params.lr_warmup[-1][0] if params.lr_warmup else 0
        if end <= total:
            return None
        highest = self.learning_rate(self.samples_after(max(0, self.total_iterations - 1)))
        return (
            f"the warm-up of {end:,.0f} samples is longer than the run of {total:,}: its learning rate reaches "
            f"{highest:.3g} instead of lr={params.lr:g}; lower {self.optimizer.given_warmup}"
        )

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts at `consumed_samples`."""
        return self.params.learning_rate(consumed_samples)

    def decoupled_learning_rate(self, consumed_samples: int) -> float | None:
        """Learning rate of word embedding and output layer in that step; None: that of all others."""
        return self.params.decoupled_learning_rate(consumed_samples)

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay, of the parameters that decay, in the step that starts at `consumed_samples`."""
        return self.params.weight_decay(consumed_samples)
