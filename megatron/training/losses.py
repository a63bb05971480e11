"""Losses and metrics of the microbatches of one step, as the task's loss function returns them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import LOSS
from megatron.tasks.loss_result import LossError, LossResult
from megatron.tasks.task import OfOutputs, Task


class StepLosses:
    """The loss function that an engine calls for each microbatch; it keeps the losses and adds up the metrics.

    Everything stays on the device. Ranks without the last pipeline stage never call it.
    """

    def __init__(self, task: Task, ctx: ParallelContext) -> None:
        self._task, self._ctx = task, ctx
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
        self._ctx.checks.whole(total, LOSS)

    def compute(self, outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        """Return the loss of one microbatch, without keeping it."""
        if self._of_outputs is not None:
            self._results.append(self._of_outputs(outputs, targets))
            return torch.zeros((), device=self._ctx.device)
        result = self._task.loss(outputs, targets, self._scale, self._ctx)
        if self._task.metrics:
            self._add_metrics(result)
        return result.total

    @torch.no_grad()
    def _add_metrics(self, result: LossResult) -> None:
        if set(result.metrics) != set(self._task.metrics):
            raise LossError(
                f"the loss of {type(self._task).__name__} returns the metrics {sorted(result.metrics)}, but the task "
                f"declares {sorted(self._task.metrics)}; make them equal"
            )
        device = result.total.device
        numbers = [number for name in self._task.metrics for number in result.metrics[name]]
        # numbers of the host without a wait for the device, which `as_tensor` has if it is given one
        parts = [torch.as_tensor(n, dtype=torch.float32).to(device, non_blocking=True) for n in numbers]
        sums = torch.stack(parts).view(-1, 2)
        self.metrics = self._task.metric_table.joined(self.metrics, sums)
