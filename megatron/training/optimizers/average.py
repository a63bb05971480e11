"""An exponential moving average of the weights while they are trained (Polyak and Juditsky 1992).

It is float32, and cut as the weights that the optimizer updates: each number is on the one rank that saves it, so that
of the ranks that hold copies none keeps it twice. A checkpoint has it under a kind of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.source import AVERAGE, WeightSource
from megatron.options.config import Config
from megatron.options.optimizer import OptimizerConfig


class WeightAverage:
    """The average of these weights, by name: with each update it takes 1 - ema_decay of them.

    It starts as the weights before the first step. Steps that are refused do not count.
    """

    def __init__(self, weights: Mapping[str, Tensor], options: OptimizerConfig) -> None:
        """`weights`: flat float32 views, which every step changes."""
        assert options.ema_decay is not None
        self._decay, self._interval, self._is_offloaded = options.ema_decay, options.ema_interval, options.offload_ema
        self._weights = dict(weights)
        device = torch.device("cpu") if self._is_offloaded else None
        # now, so that a lack of memory shows at the start
        self._averages = {name: torch.empty_like(weight, device=device) for name, weight in weights.items()}
        self._has_started = False
        self._steps = 0
        """Steps applied since the last update."""

    @torch.no_grad()
    def start(self) -> None:
        """Begin with the weights of now, unless it has begun. Before the first step."""
        if self._has_started:
            return
        for name, average in self._averages.items():
            average.copy_(self._weights[name])
        self._has_started = True

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step that was applied, and take the weights in where an update is due."""
        self._steps += 1
        if self._steps < self._interval:
            return
        self._steps = 0
        if not self._averages:  # a rank may own nothing
            return
        averages, weights = list(self._averages.values()), list(self._weights.values())
        if not self._is_offloaded:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay)
            return
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.to(average.device), 1.0 - self._decay)

    def of(self, name: str) -> Tensor | None:
        """Return the average of a parameter's slice; None: it is not kept here."""
        self.start()
        return self._averages.get(name)

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the numbers. JSON values."""
        return {"decay": self._decay, "interval": self._interval, "steps": self._steps}

    @torch.no_grad()
    def restore(self, steps: int | None, read: Callable[[str, int], Tensor | None]) -> None:
        """Go on from the numbers that `read` returns by name and length; None: from the weights.

        `steps`: of the checkpoint's record; None: it begins with the restored weights.
        """
        self._has_started, self._steps = False, steps or 0
        if steps is None:
            return
        self.start()
        for name, average in self._averages.items():
            saved = read(name, average.numel())
            if saved is not None:
                average.copy_(saved)


def steps_of_average(checkpoint: WeightSource) -> int | None:
    """Return the applied steps since the last update of the average that a checkpoint holds; None: it has none."""
    record = checkpoint.metadata.get("ema")
    if not isinstance(record, dict) or AVERAGE not in checkpoint.kinds:
        return None
    return int(record["steps"])


def saved_average(checkpoint: WeightSource, config: Config) -> tuple[int | None, list[str]]:
    """Return the steps to go on from, None where the average begins with the restored weights, and what is lost."""
    steps = steps_of_average(checkpoint)
    if config.optimizer.ema_decay is None:
        lost = [f"the average of the weights in {checkpoint.folder} is not continued (ema_decay is unset)"]
        return None, [] if steps is None else lost
    if steps is None:
        return None, [f"{checkpoint.folder} holds no average of the weights (ema_decay); it begins with these weights"]
    return steps, []
