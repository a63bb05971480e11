"""The best validation of a run: early stopping, and the checkpoint that is kept for it.

Rank 0 compares, and all ranks take its result, since only ranks that read data know the loss. The counts are part of
the run's progress, so a resumed run continues them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron.data.blend import SeparateSets, content_of
from megatron.data.index.indexed import DataError
from megatron.options.config import Config
from megatron.options.progress import BestEvaluation, Progress
from megatron.parallel.context import ParallelContext


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
