"""Detection of spikes in the loss and the gradient norm.

A spike is more than `spike_threshold` standard deviations above a running mean, of the loss or of the logarithm of the
gradient norm. Source: OLMo-core's SkipStepOptimizer (six deviations over 128 steps, loss and norm), here weighted
exponentially as in ZClip (arXiv:2504.02507), so that it follows warm-up and batch ramp-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.config.options import GuardConfig
from megatron.planning.progress import Progress, RunningEstimate


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
