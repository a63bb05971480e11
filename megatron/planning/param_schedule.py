"""Learning rate and weight decay as functions of the samples consumed before a step.

Formulas: NVIDIA/Megatron-LM, megatron/core/optimizer_param_scheduler.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts at `consumed_samples`.

        From lr_warmup_init up to lr over the warm-up, then by lr_decay_style down to min_lr, which is reached
        lr_decay_samples after the start of the training (not of the decay) and kept from there on.
        """
        warmup = self.lr_warmup[-1][0] if self.lr_warmup else 0
        if warmup > 0 and consumed_samples <= warmup:
            return self.lr_warmup_init + self._warmup_share(consumed_samples) * (self.lr - self.lr_warmup_init)
        if self.lr_decay_style == "constant":
            return self.lr
        if consumed_samples > self.lr_decay_samples:
            return self.min_lr
        progress = (consumed_samples - warmup) / (self.lr_decay_samples - warmup)
        match self.lr_decay_style:
            case "inverse-square-root":
                return max(self.min_lr, self.lr * math.sqrt(max(warmup, 1) / max(consumed_samples, 1)))
            case "linear":
                share = 1 - progress
            case "cosine":
                share = _cosine(progress)
            case "WSD":
                share = self._anneal(1 - (self.lr_decay_samples - consumed_samples) / self.lr_wsd_decay_samples)
        return self.min_lr + share * (self.lr - self.min_lr)

    def _warmup_share(self, consumed_samples: int) -> float:
        below = (0.0, 0.0)
        for corner in self.lr_warmup:
            if consumed_samples <= corner[0]:
                break
            below = corner
        return below[1] + (corner[1] - below[1]) * (consumed_samples - below[0]) / (corner[0] - below[0])

    def _anneal(self, progress: float) -> float:
        """Share of lr - min_lr left after `progress` of WSD's last part; below 0 that part has not begun."""
        if progress <= 0:
            return 1.0
        match self.lr_wsd_decay_style:
            case "linear":
                return 1 - progress
            case "cosine":
                return _cosine(progress)
            case "minus_sqrt":
                return 1 - math.sqrt(progress)
        return 2 * 0.5**progress - 1

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay, of the parameters that decay, in the step that starts at `consumed_samples`."""
        if self.weight_decay_incr_style == "constant" or consumed_samples > self.weight_decay_incr_samples:
            return self.end_weight_decay
        share = consumed_samples / self.weight_decay_incr_samples
        if self.weight_decay_incr_style == "cosine":
            share = 1 - _cosine(share)
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ParamSchedule:
        """Return the schedule of `to_dict`, also by way of JSON. Raises KeyError or TypeError."""
        return cls(**{**saved, "lr_warmup": tuple((samples, share) for samples, share in saved["lr_warmup"])})

    def in_effect(self) -> dict[str, Any]:
        """Return the values that change a learning rate or a weight decay, by name."""
        idle = set()
        if not self.lr_warmup:
            idle |= {"lr_warmup_init"}
        if self.lr_decay_style == "constant":
            idle |= {"min_lr", "lr_decay_samples"}
        if self.lr_decay_style != "WSD":
            idle |= {"lr_wsd_decay_style", "lr_wsd_decay_samples"}
        if self.weight_decay_incr_style == "constant":
            idle |= {"start_weight_decay", "weight_decay_incr_samples"}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in idle}


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
