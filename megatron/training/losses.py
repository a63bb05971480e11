"""Detection of spikes in the loss and the gradient norm.

A spike is more than `spike_threshold` standard deviations above a running mean, of the loss or of the logarithm of the
gradient norm. Source: OLMo-core's SkipStepOptimizer (six deviations over 128 steps, loss and norm), here weighted
exponentially as in ZClip (arXiv:2504.02507), so that it follows warm-up and batch ramp-up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.options.config import ConfigError, GuardConfig
from megatron.options.progress import Progress, RunningEstimate
from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import BACKWARD, LAYER_TERM, LOSS
from megatron.parallel.pass_state import Sums
from megatron.parallel.shards import LayerDeclaration
from megatron.tasks.loss_result import LossError, LossResult, MetricTable
from megatron.tasks.objective import Objective, OfOutputs

T = TypeVar("T")


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
        if grad_norm > 0.0:  # it is 0 where every token is masked
            # norms are spread over orders of magnitude, so deviations are those of the logarithm
            watched.append(("gradient norm", math.log(grad_norm), progress.log_grad_norm, math.exp))
        for name, value, estimate, shown in watched:
            limit = estimate.limit(threshold, window)
            if value > limit:
                spikes.append(
                    f"{name} {shown(value):.4g} is above {shown(limit):.4g}, {threshold:g} deviations from "
                    f"{shown(estimate.mean):.4g}"
                )
            # also by a spike, cut off at its limit: a lasting change becomes the new normal in time
            estimate.follow(value, threshold, window)
        return tuple(spikes)


class StepLosses:
    """The loss function that an engine calls for each microbatch; it keeps the losses and adds up the metrics.

    So it does with the loss terms and metrics of `layers`, those of the whole model. Everything stays on the device.
    Ranks without the last pipeline stage never call it as the loss function.
    """

    def __init__(self, objective: Objective, ctx: ParallelContext, layers: Sequence[LayerDeclaration] = ()) -> None:
        self._objective, self._ctx = objective, ctx
        self._of_layers, self.coefficients = _declared(layers)
        self.table = objective.metric_table + self._of_layers
        """The task's metrics, then the layers' terms and metrics."""
        self.begin_step(1.0)

    def begin_step(self, scale: float, num_tokens: float = 1.0) -> None:
        """Forget the previous step. `scale` multiplies the weight of every single loss.

        `num_tokens`: those of the global batch, by which the layers' terms are divided.
        """
        self._scale, self._num_tokens = scale, num_tokens
        self.values: list[Tensor] = []
        """The loss of each microbatch."""
        self._loss_metrics: Tensor | None = None
        self._layer_metrics: Tensor | None = None
        self._of_outputs: OfOutputs | None = None
        self._results: list[Tensor] = []

    @property
    def metrics(self) -> Tensor | None:
        """Rows of `table`: sums and weights that this rank adds to those of all; None: nothing."""
        ctx = self._ctx
        # the loss is of whole rows; the residual stream, and so what layers compute of it, is alike on tensor-parallel
        # ranks unless they share it
        of_loss = self._loss_metrics if ctx.leads_rows else None
        of_layers = self._layer_metrics if ctx.tensor_rank == 0 or ctx.sequence_parallel else None
        if of_loss is None and of_layers is None:
            return None
        if of_loss is None:
            of_loss = self._objective.metric_table.nothing(ctx.device)
        if of_layers is None:
            of_layers = self._of_layers.nothing(ctx.device)
        return torch.cat([of_loss, of_layers])

    def layer_loss(self) -> Tensor | None:
        """Return the weighed terms of this rank's layers so far, as the loss of the global batch has them."""
        if self._layer_metrics is None:
            return None
        # the terms are the first rows; numbers of the host are multiplied without a wait for the device
        terms = zip(self.coefficients.values(), self._layer_metrics[:, 0], strict=False)
        weighed = torch.stack([coefficient * term for coefficient, term in terms]).sum()
        return weighed / self._num_tokens

    def layer_terms(self, loss_scale: float = 1.0) -> contextlib.AbstractContextManager[None]:
        """Within it record the layers' terms and metrics, and differentiate the terms with the loss."""
        if not self._of_layers.names:
            # most models have none, and copy no scalar to the device
            return contextlib.nullcontext()
        # DeepSpeed takes the mean over data-parallel ranks. It divides the loss by the number of microbatches, but not
        # what joins its gradient on the way
        gradient = torch.tensor(self._ctx.grad_size * loss_scale / self._num_tokens)
        gradient = gradient.to(self._ctx.device, non_blocking=True)
        return self._ctx.state.terms.recorded(self._add_of_layer, self.coefficients, gradient)

    def _add_of_layer(self, values: Mapping[str, Sums]) -> None:
        checks = self._ctx.state.checks
        if checks.place.direction == BACKWARD:
            return  # computed again; its values are known
        rows = self._of_layers.rows(values, self._ctx.device)
        checks.whole(rows[: len(self.coefficients), 0], LAYER_TERM)
        self._layer_metrics = self._of_layers.joined(self._layer_metrics, rows)

    def of_layers(self, forward: Callable[[], T]) -> tuple[T, Tensor | None]:
        """Return what `forward` returns, and apart from earlier ones the rows that its layers have recorded."""
        # apart, so that a graph can have them among its outputs: a replay runs no Python
        before, self._layer_metrics = self._layer_metrics, None
        try:
            return forward(), self._layer_metrics
        finally:
            self._layer_metrics = before

    def join_of_layers(self, rows: Tensor | None) -> None:
        """Add rows that `of_layers` has returned."""
        self._layer_metrics = self._of_layers.joined(self._layer_metrics, rows)

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
        self._ctx.state.checks.number(self.values[-1], LOSS)

    def compute(self, outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        """Return the loss of one microbatch, without keeping it."""
        if self._of_outputs is not None:
            self._results.append(self._of_outputs(outputs, targets))
            # each pass returns a loss, which nothing reads here
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
        table = self._objective.metric_table
        self._loss_metrics = table.joined(self._loss_metrics, table.rows(result.metrics, result.total.device))


def _declared(layers: Sequence[LayerDeclaration]) -> tuple[MetricTable, dict[str, float]]:
    """Return the table of the layers' terms, the first rows, and metrics; and the coefficients of the terms.

    Raises ConfigError where layers differ in what they declare under one name.
    """
    coefficients: dict[str, float] = {}
    reductions: dict[str, str] = {}
    for layer in layers:
        _join(coefficients, layer.loss_terms, layer.name)
        _join(reductions, layer.metrics, layer.name)
    terms = MetricTable(tuple(coefficients), ("mean",) * len(coefficients))
    return terms + MetricTable(tuple(reductions), tuple(reductions.values())), coefficients


def _join(declared: dict[str, T], own: Mapping[str, T], layer: str) -> None:
    for name, value in own.items():
        if declared.setdefault(name, value) != value:
            raise ConfigError([f"{layer} declares {name}={value}, an earlier layer {declared[name]}; make them equal"])
