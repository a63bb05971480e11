"""Bad steps: what is not finite is never applied, spikes are told, skipped or rolled back, drifted copies end the run.

Each step is judged before the optimizer changes anything, from numbers that are equal bit for bit on all ranks
(`optimizers.py: Gate`), so that all decide alike, and nothing can be saved between a spike and its judgement. What a
spike is: more than so many standard deviations above a running mean, in the loss or in the logarithm of the gradient
norm. Source: OLMo-core's SkipStepOptimizer (six deviations over 128 steps, loss and norm), here weighted exponentially
as in ZClip (arXiv:2504.02507), so that it follows warm-up and batch ramp-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron.data.batches import BatchPlan
from megatron.observability.metrics import MetricsLog
from megatron.resilience.errors import TrainingAborted
from megatron.resilience.replica_check import ReplicaCheck
from megatron.tasks.task import Task
from megatron.training.checkpoints import Checkpoints, checkpoint_before, restore_whole
from megatron.training.engine import Engine, StepResult
from megatron.training.progress import Progress, RunningEstimate

SHOWN_STEPS = 4
SHOWN_DOCUMENTS = 8


class Suspect(NamedTuple):
    """A microbatch that stands out in a bad step."""

    samples: list[int]
    loss: float


class Guard:
    """Watches the steps of one run. Every rank makes one, and asks it the same things in the same order.

    `dataset` is the training data, of which `plan` says what this rank reads, and whose documents a bad step names.
    `checkpoints` None: nothing is saved.
    """

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        task: Task,
        dataset: Any,
        plan: BatchPlan[Any],
        log: MetricsLog,
        checkpoints: Checkpoints | None,
    ) -> None:
        self._engine, self._progress, self._task, self._dataset, self._plan = engine, progress, task, dataset, plan
        self._log, self._checkpoints, self._config = log, checkpoints, engine.config
        self._replicas = ReplicaCheck(engine) if engine.config.guard.check_replicas_interval else None
        self._checked_at: int | None = None
        self._spikes: list[str] = []
        self._skipped: list[str] = []  # the steps of the row that is being skipped
        self._loss_scale = engine.loss_scale
        engine.gate.judge = self._judge

    def _judge(self, loss: float, grad_norm: float) -> bool:
        """Whether to apply a step. Asked by the optimizer."""
        options, self._spikes = self._config.guard, []
        if options.spike_action == "off":
            return True
        progress, threshold, window = self._progress, options.spike_threshold, options.spike_window
        watched: list[tuple[str, float, RunningEstimate, Callable[[float], float]]]
        watched = [("loss", loss, progress.loss, float)]
        if grad_norm > 0.0:  # 0 where DeepSpeed was told to find none
            watched.append(("gradient norm", math.log(grad_norm), progress.log_grad_norm, math.exp))
        for what, value, estimate, shown in watched:
            limit = estimate.limit(threshold, window)
            if value > limit:
                self._spikes.append(
                    f"{what} {shown(value):.4g} is above {shown(limit):.4g}, {threshold:g} deviations from "
                    f"{shown(estimate.mean):.4g}"
                )
            estimate.follow(value, threshold, window)
        return not self._spikes or options.spike_action == "log"

    def after_step(self, result: StepResult, begin: int) -> bool:
        """Tell of the step, whose samples begin at `begin`; `progress` is beyond it. Collective.

        Whether the run was rolled back: `progress` then is that of the checkpoint. Raises TrainingAborted.
        """
        spikes, self._spikes = self._spikes, []
        scale, self._loss_scale = self._loss_scale, self._engine.loss_scale
        if not result.skipped and not spikes:
            self._progress.skipped_in_a_row = 0
            self._skipped.clear()
            return False
        training = self._config.training
        if training.fp16 and result.observed is None and scale > training.min_loss_scale and _is_finite(result.loss):
            return False  # too large a loss scale, which DeepSpeed has just lowered
        suspect, ranks = self._find_suspect(result, begin)
        reasons = spikes or [_not_finite(result, ranks)]
        where = f"iteration {self._progress.iteration} (samples {begin} to {self._progress.consumed_samples - 1})"
        documents = self._documents_of(suspect)
        row = {
            "iteration": self._progress.iteration,
            "consumed_samples": self._progress.consumed_samples,
            "first_sample": begin,
            "reason": "; ".join(reasons),
            "loss": float(result.loss),
            "suspect_samples": None if suspect is None else suspect.samples,
            "suspect_loss": None if suspect is None else suspect.loss,
            "suspect_documents": documents,
        }
        told = f"WARNING: {where}: {row['reason']}. {_said(suspect, documents)}"
        if spikes and self._config.guard.spike_action == "rollback" and self._roll_back(begin, told, row):
            return True
        if not result.skipped:
            self._tell(f"{told}The step was applied (spike_action=log)", row | {"action": "logged"})
            return False
        self._progress.skipped_in_a_row += 1
        in_a_row, most = self._progress.skipped_in_a_row, self._config.guard.max_skipped_in_a_row
        self._tell(f"{told}The step was skipped ({in_a_row} in a row, of at most {most})", row | {"action": "skipped"})
        self._skipped.append(where)
        if in_a_row >= most:
            raise TrainingAborted(
                f"{in_a_row} steps in a row were skipped, max_skipped_in_a_row={most}: "
                f"{'; '.join([*(['...'] if in_a_row > SHOWN_STEPS else []), *self._skipped[-SHOWN_STEPS:]])}. The "
                f"last one: {'; '.join(reasons)}. The weights are those of before these steps. Look at the data and "
                "the learning rate, resume from an earlier checkpoint, or raise max_skipped_in_a_row"
            )
        return False

    def _find_suspect(self, result: StepResult, begin: int) -> tuple[Suspect | None, list[int]]:
        """The microbatch whose loss is not finite, or else highest, over all ranks; and the ranks that saw a loss, or a
        gradient that the norm leaves out, that is not finite. Collective.
        """
        ctx, losses = self._engine.ctx, result.microbatch_losses
        keys = self._plan(begin)[1] if losses else []
        mine = [Suspect(self._task.samples_of(key), float(loss)) for key, loss in zip(keys, losses, strict=True)]
        worst = max(mine, key=_badness, default=None)
        told = ctx.gather_objects((worst, bool(self._engine.gate.is_bad_here)))
        found = [suspect for suspect, _ in told if suspect is not None]
        return max(found, key=_badness, default=None), [rank for rank, (_, is_bad) in enumerate(told) if is_bad]

    def _documents_of(self, suspect: Suspect | None) -> list[dict[str, Any]]:
        """The documents in each sample of a microbatch, of the dataset that the sample is from; on rank 0 alone."""
        if suspect is None or self._engine.ctx.rank:
            return []
        found = []
        for sample in suspect.samples:
            prefix, documents = self._dataset.documents_of(sample)
            found.append({"sample": sample, "prefix": prefix, "documents": documents})
        return found

    def _tell(self, text: str, row: dict[str, Any]) -> None:
        self._log.message(text)
        self._log.log_bad_step(row)

    # Rolling back

    def _roll_back(self, begin: int, told: str, row: dict[str, Any]) -> bool:
        """Go back to before the samples around the spike, and leave them out from now on. Collective.

        False, and nothing is changed, where no checkpoint is as old as that. Raises TrainingAborted.
        """
        engine, progress, options = self._engine, self._progress, self._config.guard
        assert self._checkpoints is not None, "rules.py demands save"
        end = progress.consumed_samples
        first = max(0, end - options.rollback_skip_steps * (end - begin))
        for line in self._checkpoints.settle():
            self._log.message(line)
        checkpoint = checkpoint_before(first, engine.config, engine.ctx)
        if checkpoint is None:
            self._log.message(
                f"WARNING: no checkpoint from before sample {first} to roll back to; the step is skipped instead"
            )
            return False
        if progress.rollbacks >= options.max_rollbacks:
            raise TrainingAborted(
                f"iteration {progress.iteration} (samples {begin} to {end - 1}): {row['reason']}. "
                f"{progress.rollbacks} rollbacks, max_rollbacks={options.max_rollbacks}, have brought the run past no "
                f"new checkpoint. Samples left out so far: {_ranges(progress.left_out)}. Lower the learning rate, look "
                "at the data, or resume from an earlier checkpoint with a larger rollback_skip_steps"
            )
        restored = Progress.from_saved(checkpoint.metadata["progress"])
        for start, stop in progress.left_out:
            restored.leave_out(start, stop)
        restored.leave_out(first, end)
        restored.rollbacks = progress.rollbacks + 1
        restore_whole(engine, checkpoint, restored)
        vars(progress).update(vars(restored))
        self._loss_scale = engine.loss_scale
        self._skipped.clear()
        self._log.rewind(progress.iteration, progress.consumed_samples)
        self._tell(
            f"{told}Rolled back to {checkpoint.folder}, iteration {progress.iteration}; left out from now on: samples "
            f"{_ranges(progress.left_out)}",
            row | {"action": "rolled back", "rolled_back_to": progress.iteration},
        )
        return True

    def before_save(self) -> None:
        """Compare the copies; reset the rollback count beyond left-out samples. Collective. Raises TrainingAborted."""
        self.check_replicas(always=True)
        if all(end <= self._progress.consumed_samples for _, end in self._progress.left_out):
            self._progress.rollbacks = 0

    # Copies

    def check_replicas(self, *, always: bool = False) -> None:
        """Compare the ranks' copies where that is due. Collective. Raises TrainingAborted."""
        iteration = self._progress.iteration
        is_due = always or (self._replicas is not None and iteration % self._config.guard.check_replicas_interval == 0)
        if self._replicas is not None and is_due and self._checked_at != iteration:
            self._replicas.check(iteration)
            self._checked_at = iteration


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(float(loss))


def _badness(suspect: Suspect) -> float:
    return suspect.loss if math.isfinite(suspect.loss) else math.inf


def _not_finite(result: StepResult, ranks: list[int]) -> str:
    norm = math.inf if result.observed is None else result.observed[1]
    where = f", on rank {', '.join(map(str, ranks))}" if ranks else ""
    return f"loss {float(result.loss):.4g} or gradient (norm {norm:.4g}) is not finite{where}"


def _ranges(samples: list[tuple[int, int]]) -> str:
    return ", ".join(f"{begin} to {end - 1}" for begin, end in samples) or "none"


def _said(suspect: Suspect | None, documents: list[dict[str, Any]]) -> str:
    if suspect is None:
        return ""
    by_prefix: dict[str, list[int]] = {}
    for entry in documents:
        by_prefix.setdefault(entry["prefix"], []).extend(entry["documents"])
    commands = [
        f"python tools/inspect_dataset.py {prefix} --documents {' '.join(map(str, numbers[:SHOWN_DOCUMENTS]))}"
        + (" ..." if len(numbers) > SHOWN_DOCUMENTS else "")
        for prefix, numbers in by_prefix.items()
    ]
    shown = f" ({'; '.join(commands)})" if commands else ""
    samples = f"samples {_numbers(suspect.samples)}" if suspect.samples else "no samples"
    return f"Highest loss of a microbatch: {suspect.loss:.4g}, {samples}{shown}. "


def _numbers(samples: list[int]) -> str:
    if samples == list(range(samples[0], samples[-1] + 1)):
        return f"{samples[0]} to {samples[-1]}"
    return ", ".join(map(str, samples[:SHOWN_DOCUMENTS])) + (" ..." if len(samples) > SHOWN_DOCUMENTS else "")
