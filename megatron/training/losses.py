"""Detection of spikes in the loss and the gradient norm.

A spike is more than `spike_threshold` standard deviations above a running mean, of the loss or of the logarithm of the
gradient norm. Source: OLMo-core's SkipStepOptimizer (six deviations over 128 steps, loss and norm), here weighted
exponentially as in ZClip (arXiv:2504.02507), so that it follows warm-up and batch ramp-up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.options.config import GuardConfig
from megatron.options.progress import Progress, RunningEstimate
from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import LOSS
from megatron.tasks.loss_result import LossError, LossResult
from megatron.tasks.objective import Objective, OfOutputs


# Two numbers each for loss and norm, with an outlier cut off at its limit, are saved as JSON and restored exactly.
class SpikeDetector:
    """Compares each step with the running estimates in `progress`, which it updates. Alike on every rank."""

    def __init__(self, options: GuardConfig, progress: Progress) -> None:
        self._options, self._progress = options, progress
        self.refuses_spikes = options.spike_action != "log"
        """Steps with a spike are not applied."""

    def find(self, loss: float, grad_norm: float) -> tuple[str, ...]:
        """Return a reason for each spike of a step, whose loss and norm are finite. Call it once a step."""
        options, progress = self._options, self._progress
        if options.spike_action == "off":
            return ()
        threshold, window, spikes = options.spike_threshold, options.spike_window, []
        watched: list[tuple[str, float, RunningEstimate, Callable[[float], float]]]
        watched = [("loss", loss, progress.loss, float)]
        if grad_norm > 0.0:  # 0 where DeepSpeed is configured to compute none
            watched.append(("gradient norm", math.log(grad_norm), progress.log_grad_norm, math.exp))
        for name, value, estimate, shown in watched:
            limit = estimate.limit(threshold, window)
            if value > limit:
                spikes.append(
                    f"{name} {shown(value):.4g} is above {shown(limit):.4g}, {threshold:g} deviations from "
                    f"{shown(estimate.mean):.4g}"
                )
            estimate.follow(value, threshold, window)
        return tuple(spikes)


class StepLosses:
    """The loss function that an engine calls for each microbatch; it keeps the losses and adds up the metrics.

    Everything stays on the device. Ranks without the last pipeline stage never call it.
    """

    def __init__(self, objective: Objective, ctx: ParallelContext) -> None:
        self._objective, self._ctx = objective, ctx
        self.begin_step(1.0)

    def begin_step(self, scale: float) -> None:
        """Forget the previous step. `scale` multiplies the weight of every single loss."""
        self._scale = scale
        self.values: list[Tensor] = []
        """The loss of each microbatch."""
        self.metrics: Tensor | None = None
        """[number of metrics, 2]: sum and weight of each metric of the task; None before the first microbatch."""
        self._of_outputs: OfOutputs | None = None
        self._results: list[Tensor] = []

    @contextlib.contextmanager
    def collect(self, of_outputs: OfOutputs) -> Iterator[list[Tensor]]:
        """Within it compute this of each microbatch in place of the loss; yields the list of the results."""
        self._of_outputs, self._results = of_outputs, []
        try:
            yield self._results
        finally:
            self._of_outputs = None

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        total = self.compute(outputs, targets)
        self.keep(total)
        return total

    def keep(self, total: Tensor) -> None:
        """Keep the loss of a microbatch."""
        self.values.append(total.detach())
        self._ctx.state.checks.whole(total, LOSS)

    def compute(self, outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        """Return the loss of one microbatch, without keeping it."""
        if self._of_outputs is not None:
            self._results.append(self._of_outputs(outputs, targets))
            return torch.zeros((), device=self._ctx.device)
        result = self._objective.loss(outputs, targets, self._scale, self._ctx)
        if self._objective.metrics:
            self._add_metrics(result)
        return result.total

    @torch.no_grad()
    def _add_metrics(self, result: LossResult) -> None:
        if set(result.metrics) != set(self._objective.metrics):
            raise LossError(
                f"the loss of {type(self._objective).__name__} returns the metrics {sorted(result.metrics)}, but it "
                f"declares {sorted(self._objective.metrics)}; make them equal"
            )
        device = result.total.device
        numbers = [number for name in self._objective.metrics for number in result.metrics[name]]
        # numbers of the host without a wait for the device, which `as_tensor` has if it is given one
        parts = [torch.as_tensor(n, dtype=torch.float32).to(device, non_blocking=True) for n in numbers]
        sums = torch.stack(parts).view(-1, 2)
        self.metrics = self._objective.metric_table.joined(self.metrics, sums)
