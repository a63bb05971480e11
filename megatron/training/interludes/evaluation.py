"""Evaluation over held-out data, during a training or alone, and the best validation of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron.data.blend import SeparateSets, content_of
from megatron.data.index.indexed import DataError
from megatron.observability.metrics import MetricsLog
from megatron.options.config import Config
from megatron.options.progress import BestEvaluation, Progress
from megatron.parallel.context import ParallelContext
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


# ---------------------------------------------------------------------------------------------------------------------
# The best validation of a run: early stopping, and the checkpoint that is kept for it.
#
# Rank 0 compares, and all ranks take its result, since only ranks that read data know the loss. The counts are part of
# the run's progress, so a resumed run continues them.


# Patience counts against the last improvement larger than the minimum, as in Lightning, so slow progress adds up;
# transformers compares with the best of all, and would end it.
class BestTracker:
    """Compares the validations of a run by `best_metric`. Collective in use; does nothing unless an option needs it.

    `is_lost` returns True for an iteration whose checkpoint was to be kept, and is not there. Raises DataError without
    validation data, or without the dataset that `best_metric` names.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        progress: Progress,
        dataset: Any,
        say: Callable[[str], None],
        is_lost: Callable[[int], bool],
    ) -> None:
        training = config.training
        self._ctx, self._progress, self._say, self._is_lost = ctx, progress, say, is_lost
        self._patience, self._min_delta = training.early_stopping_patience, training.early_stopping_min_delta
        self._keeps = config.checkpoint.keep_best and config.checkpoint.save is not None
        self._interval = config.data.eval_interval
        self._metric, self._sign = training.best_metric, -1 if training.best_metric_mode == "max" else 1
        self.save_is_due = False
        """The model of now is the best so far, and its checkpoint is to be kept."""
        self.is_on = config.compares_validations
        if self.is_on:
            self._check_data(dataset)
            # a value by another metric, direction or data cannot be compared with the saved one
            self._continue(self._measure(config, dataset))

    def _check_data(self, dataset: Any) -> None:
        if dataset is None:
            wanted = "keep_best" if self._keeps else f"early_stopping_patience={self._patience}"
            raise DataError(f"{wanted} compares validations, but there is no validation data; raise its share in split")
        losses = []
        if isinstance(dataset, SeparateSets):
            losses = [f"lm_loss/{name}" for name in dataset.names]
        if self._metric.startswith("lm_loss/") and self._metric not in losses:
            raise DataError(
                f"best_metric={self._metric} names no loss of the validation; give one of loss, {', '.join(losses)}"
            )

    def _measure(self, config: Config, dataset: Any) -> str:
        """Return all that must be equal for two validations to be compared."""
        identity = content_of(getattr(dataset, "fingerprint", ""))[:12]
        mode = "max" if self._sign < 0 else "min"
        return f"{self._metric} ({mode}) of {config.data.eval_iters} batches of data {identity}"

    def _continue(self, measure: str) -> None:
        """Continue the counts of a resumed run, unless it measured otherwise."""
        saved = self._progress.best
        if saved.measure == measure:
            return
        if saved.value is not None:
            self._say(f"WARNING: earlier validations were by {saved.measure}, now by {measure}; only later ones count")
        self._progress.best = BestEvaluation(measure)

    @property
    def is_evaluation_missing(self) -> bool:
        """True if a validation after the last step was due and did not take place, as after a signal."""
        iteration = self._progress.iteration
        return self.is_on and iteration % self._interval == 0 and self._progress.best.evaluated_at != iteration

    @property
    def stop_reason(self) -> str | None:
        """Reason to end the training; the same on every rank."""
        best = self._progress.best
        if self._patience is None or best.not_improved < self._patience:
            return None
        least = f" by more than {self._min_delta:g}" if self._min_delta else ""
        reason = (
            f"Stopped early: {self._metric} has not improved{least} in {best.not_improved} validations, "
            f"early_stopping_patience={self._patience}"
        )
        if best.value is not None:
            reason += f"; best: {best.value:.6g} at iteration {best.iteration}"
        return reason

    def evaluated(self, loss: float, metrics: Mapping[str, float]) -> None:
        """Count a validation of the model of now. A value that is not finite does not improve it."""
        iteration = self._progress.iteration
        if not self.is_on or iteration == 0 or self._progress.best.evaluated_at == iteration:
            return  # the untrained model has no checkpoint; a finished run that is started again is validated again
        value = {"loss": loss, **metrics}[self._metric]
        # of NaN, and of ranks that do not know the loss, each rank would decide otherwise
        found = asdict(self._after(value)) if self._ctx.rank == 0 else None
        best = BestEvaluation(**self._ctx.broadcast_object(found))
        self._say(self._line(value, best))
        self._progress.best = best
        self.save_is_due = self._keeps and best.iteration == iteration

    def _after(self, value: float) -> BestEvaluation:
        best, iteration = self._progress.best, self._progress.iteration
        # later validations would name a checkpoint that is not there
        if self._keeps and best.value is not None and self._is_lost(best.iteration):
            self._say(
                f"WARNING: the best checkpoint, of iteration {best.iteration}, is gone; only later validations count"
            )
            best = replace(best, value=None)
        # counted as no improvement first, which a value that is not finite remains
        best = replace(best, evaluated_at=iteration, not_improved=best.not_improved + 1)
        if not math.isfinite(value):
            return best
        # two comparisons: the checkpoint that is kept is the best of all, patience wants min_delta too
        if best.value is None or self._sign * value < self._sign * best.value:
            best = replace(best, value=value, iteration=iteration)
        if best.reference is None or self._sign * value < self._sign * best.reference - self._min_delta:
            best = replace(best, reference=value, not_improved=0)
        return best

    def _line(self, value: float, best: BestEvaluation) -> str:
        text = f"{self._metric} {value:.6g} at iteration {best.evaluated_at}"
        if best.iteration == best.evaluated_at:
            text += " is the best so far"
        elif best.value is not None:
            text += f" is not better than {best.value:.6g} at iteration {best.iteration}"
        if self._patience is not None and best.not_improved:
            text += f"; {best.not_improved} of {self._patience} validations without an improvement"
        return text
