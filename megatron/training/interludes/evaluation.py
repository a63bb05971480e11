"""Evaluation over held-out data, during a training or alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron.data.blend import SeparateSets
from megatron.observability.metrics import MetricsLog
from megatron.options.progress import Progress
from megatron.resilience.shutdown import Shutdown
from megatron.resilience.watchdog import Watchdog
from megatron.tasks.loss_result import MetricTable
from megatron.tasks.task import Task
from megatron.training.engine import Engine


class Evaluated(NamedTuple):
    """Result of an evaluation. Loss and normaliser are right on ranks that read data, rank 0 among them."""

    loss: float
    normaliser: float
    metrics: dict[str, float]


@dataclass
class Evaluator:
    """Evaluates an engine on the validation or test data. Each rank builds one, alike; `run` is collective."""

    engine: Engine
    task: Task
    datasets: Sequence[Any]
    """For training, validation and test; None where there is none."""
    progress: Progress
    log: MetricsLog
    shutdown: Shutdown
    watchdog: Watchdog

    def run(self, split: Literal["valid", "test"]) -> tuple[float, int, dict[str, float]] | None:
        """Log and return loss, normaliser and metrics over the first eval_iters global batches: the same each time.

        Of `SeparateSets`, each is logged, then their mean; `lm_loss/NAME` of each is among the metrics that are
        returned. None, and nothing is logged, once a shutdown is requested, which is queried before each batch: an
        evaluation may take longer than the time that a signal leaves.
        """
        dataset = self.datasets[("train", "valid", "test").index(split)]
        num_batches = self.engine.config.data.eval_iters
        if num_batches == 0 or dataset is None:
            return None

        def stops() -> bool:
            self.watchdog.beat()
            # collective: all ranks leave the evaluation before the same batch
            return self.shutdown.decide(self.progress)

        self.watchdog.phase("evaluation", self.progress.iteration)
        graphs_before = self.engine.num_graphs
        is_mix = isinstance(dataset, SeparateSets)
        # one way for both: a single dataset is a set without a name
        sets = dataset if is_mix else SeparateSets([""], [dataset], None)
        evaluations = dict[str, Evaluated]()
        with self.engine.timers.on_host("evaluate"):
            for name, each in zip(sets.names, sets.datasets, strict=True):
                evaluated = evaluate(self.engine, num_batches, self.task, each, stops)
                if evaluated is None:
                    return None
                evaluations[name] = evaluated
        whole = mean_of(list(evaluations.values()), sets.weights, self.engine.metric_table)
        losses = {}
        if is_mix:
            for name, each in evaluations.items():
                losses[f"lm_loss/{name}"] = each.loss
                self._log(split, each, name)
        self._log(split, whole)
        if (count := self.engine.num_graphs) > graphs_before:  # a new shape: captures take time and memory
            self.log.message(f"{count} HPU graphs captured for evaluations, one a shape")
        return whole.loss, int(whole.normaliser), {**whole.metrics, **losses}

    def _log(self, split: Literal["valid", "test"], evaluated: Evaluated, name: str | None = None) -> None:
        iteration, consumed_samples = self.progress.iteration, self.progress.consumed_samples
        loss, normaliser, metrics = evaluated
        self.log.log_validation(iteration, consumed_samples, loss, int(normaliser), split, metrics, name)


def mean_of(
    evaluations: Sequence[Evaluated], weights: Sequence[float] | None, table: MetricTable | None = None
) -> Evaluated:
    """Return the mean of evaluations by their weights, or else by their normalisers; of those that count something.

    A metric that has nothing to count in one of them, which is NaN there, is the mean over the others. One that `table`
    reduces to a sum or a maximum is that of all.
    """
    normaliser = sum(each.normaliser for each in evaluations)
    # bit for bit what was measured: (a * n) / n may round
    if len(evaluations) == 1 or normaliser == 0:
        return evaluations[0]._replace(normaliser=normaliser)
    shares = [each.normaliser for each in evaluations]
    if weights is not None:
        # a set with nothing to count has no share, whatever its weight
        shares = [weight * (each.normaliser > 0) for weight, each in zip(weights, evaluations, strict=True)]
    reductions = {}
    if table is not None:
        reductions = dict(zip(table.names, table.reductions, strict=True))
    metrics = {}
    for name in evaluations[0].metrics:
        weighed = [
            (share, each.metrics[name]) for share, each in zip(shares, evaluations, strict=True) if _counts(each, name)
        ]
        metrics[name] = _joined(weighed, reductions.get(name, "mean"))
    losses = [each.loss for each in evaluations]
    return Evaluated(_joined(list(zip(shares, losses, strict=True)), "mean"), normaliser, metrics)


def _counts(evaluation: Evaluated, name: str) -> bool:
    """Return False for a metric that has nothing to count: it is NaN though the loss is finite."""
    return not math.isnan(evaluation.metrics[name]) or not math.isfinite(evaluation.loss)


def _joined(weighed: Sequence[tuple[float, float]], reduction: str) -> float:
    """Return one value of (share, value) pairs. A mean without any is NaN, as is the largest of none."""
    if reduction == "sum":
        return sum(value for _, value in weighed)
    if reduction == "max":
        return max((value for _, value in weighed), default=math.nan)
    # 0 times a value that is not finite would be NaN
    kept = [(share, value) for share, value in weighed if share]
    if not kept:
        return math.nan
    return sum(share * value for share, value in kept) / sum(share for share, _ in kept)


def evaluate(
    engine: Engine, num_batches: int, task: Task, dataset: Any, stops: Callable[[], bool] = lambda: False
) -> Evaluated | None:
    """Return loss, normaliser and metrics over `num_batches` global batches, or what there is of them. Collective.

    None if `stops`, which returns the same on all ranks, is true before one of the batches.
    """
    training, ctx = engine.config.training, engine.ctx
    per_epoch = task.data.facts(dataset).samples_per_epoch

    def size_at(consumed_samples: int) -> int:
        """Return 0 once the dataset was read through."""
        size = training.global_batch_size
        # a validation of chats goes through each of them once at most
        return size if per_epoch is None else min(size, per_epoch - consumed_samples)

    plan = task.data.plan(dataset, size_at, ctx.batch_rank, ctx.num_batch_ranks)
    # losses stay on the device until all batches are through
    losses: list[Tensor] = []
    normalisers: list[float] = []
    consumed_samples = 0
    metrics: Tensor | None = None
    for _ in range(num_batches):
        if stops():
            return None
        size, keys = plan(consumed_samples)
        if size == 0:
            break
        microbatches = [task.read(dataset, key) for key in keys] if engine.reads_data else []
        batch = engine.evaluate(microbatches, len(keys))
        losses.append(batch.loss)
        normalisers.append(batch.normaliser)
        consumed_samples += size
        metrics = engine.metric_table.joined(metrics, batch.metrics)
    means = torch.stack(losses).flatten().tolist() if losses else []  # one wait for the device
    # batches may differ in their tokens: a mean of means would weigh them alike
    total = sum(mean * weight for mean, weight in zip(means, normalisers, strict=True))
    normaliser = sum(normalisers, 0.0)
    return Evaluated(total / (normaliser if normaliser > 0 else 1.0), normaliser, engine.read_metrics(metrics))
