"""Bad steps: what is not finite is never applied, spikes are logged, skipped or rolled back, drift ends the run.

The update gate has decided on each step before the optimizer changed anything (update_gate.py), from numbers that are
equal bit for bit on all ranks. So all act alike, and nothing can be saved between a spike and the decision on it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.folders import CheckpointError, Run, of_run
from megatron.checkpoint.reader import Checkpoint
from megatron.data.batches import BatchPlan
from megatron.observability.metrics import MetricsLog
from megatron.options.config import Config
from megatron.options.optimizer import STATES
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.resilience.attribution import FaultOrigin, find_origin
from megatron.resilience.errors import TrainingAborted, raise_on_all_ranks
from megatron.resilience.rank_record import RankPlace
from megatron.resilience.replica_check import ReplicaCheck
from megatron.resilience.watchdog import Watchdog
from megatron.runtime.alerts import SPIKE
from megatron.runtime.commands import command_name
from megatron.tasks.task import Task
from megatron.training.checkpoints import Checkpoints
from megatron.training.engine import Engine, StepResult
from megatron.training.optimizers.average import steps_of_average
from megatron.training.step_checks import step_record
from megatron.weights.loader import TAG, first_whole

SHOWN_STEPS = 4
SHOWN_DOCUMENTS = 8


class Suspect(NamedTuple):
    """A microbatch that stands out in a bad step."""

    samples: list[int]
    loss: float


class Guard:
    """Acts on the bad steps of one run. Every rank has one, and calls it in the same order.

    `dataset` is the training data, whose documents the report on a bad step names, and `plan` this rank's share of it.
    `checkpoints` None: nothing is saved. `watchdog` is informed of a bad step, and of what is wrong on this rank where
    it is the origin.
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
        watchdog: Watchdog,
    ) -> None:
        self._engine, self._progress, self._task, self._dataset, self._plan = engine, progress, task, dataset, plan
        self._log, self._checkpoints, self._config = log, checkpoints, engine.config
        self._watchdog, self._place = watchdog, RankPlace.of(engine.ctx)
        checks = engine.config.guard.check_replicas_interval > 0
        self._replicas = ReplicaCheck(engine.ctx, engine.state.held()) if checks else None
        self._checked_at: int | None = None
        self._skipped: list[str] = []  # the steps of the row that is being skipped
        self._loss_scale = engine.loss_scale

    def after_step(self, result: StepResult, begin: int) -> bool:
        """Report a bad step, whose samples begin at `begin`; `progress` is beyond it. Collective.

        Return True if the run was rolled back: `progress` then is that of the checkpoint. Raises TrainingAborted.
        """
        scale, self._loss_scale = self._loss_scale, self._engine.loss_scale
        spikes: tuple[str, ...] = ()
        if result.observation is not None:
            spikes = result.observation.spikes
        # the usual step: nothing is gathered, and the device is not waited for
        if not result.skipped and not spikes:
            self._progress.skipped_in_a_row = 0
            self._skipped.clear()
            return False
        # a step that fp16 loses while its scale settles is not a fault of the data
        if self._is_scale_too_large(result, scale):
            return False
        suspect, origin = self._find_suspect(result, begin)
        reason = "; ".join(spikes) or _not_finite(result, origin)
        where = f"iteration {self._progress.iteration} (samples {begin} to {self._progress.consumed_samples - 1})"
        documents = self._documents_of(suspect)
        row = {
            "iteration": self._progress.iteration,
            "consumed_samples": self._progress.consumed_samples,
            "first_sample": begin,
            "reason": reason,
            "loss": result.loss,
            **dict.fromkeys(("origin", "origin_ranks", "suspect_samples", "suspect_loss")),
            "suspect_documents": documents,
        }
        if origin is not None:
            row |= {"origin": origin.kind, "origin_ranks": list(origin.ranks)}
        if suspect is not None:
            row |= {"suspect_samples": suspect.samples, "suspect_loss": suspect.loss}
        warning = f"WARNING: {where}: {reason}. {_suspect_text(suspect, documents)}"
        if spikes and self._config.guard.spike_action == "rollback" and self._roll_back(begin, warning, row):
            return True
        if not result.skipped:
            self._report(f"{warning}The step was applied (spike_action=log)", row | {"action": "logged"})
        else:
            self._count_skipped(where, reason, warning, row)
        return False

    def _is_scale_too_large(self, result: StepResult, scale: float) -> bool:
        """Return True for a gradient beyond float16, after which DeepSpeed has just lowered the loss scale."""
        training = self._config.training
        # at the least scale it cannot fall, so there it is a bad step like others
        may_fall = training.fp16 and scale > training.min_loss_scale
        return may_fall and result.observation is None and math.isfinite(result.loss)

    def _count_skipped(self, where: str, reason: str, warning: str, row: dict[str, Any]) -> None:
        """Report a skipped step. Raises TrainingAborted after too many in a row, or among the last steps."""
        progress, options = self._progress, self._config.guard
        progress.skipped_in_a_row += 1
        first = progress.iteration - options.skipped_window
        # kept in the progress, so that restarts within the window count on
        progress.recent_skips = [step for step in progress.recent_skips if step > first]
        progress.recent_skips.append(progress.iteration)
        in_a_row, most = progress.skipped_in_a_row, options.max_skipped_in_a_row
        self._report(
            f"{warning}The step was skipped ({in_a_row} in a row, of at most {most})", row | {"action": "skipped"}
        )
        self._skipped.append(where)
        recent = len(progress.recent_skips)
        remedy = "Check the data and the learning rate, resume from an earlier checkpoint, or raise"
        if in_a_row >= most:
            shown = self._skipped[-SHOWN_STEPS:]
            if in_a_row > SHOWN_STEPS:
                shown.insert(0, "...")
            raise TrainingAborted(
                f"{in_a_row} steps in a row were skipped, max_skipped_in_a_row={most}: {'; '.join(shown)}. The "
                f"last one: {reason}. The weights are those of before these steps. {remedy} max_skipped_in_a_row"
            )
        if recent >= options.max_skipped_in_window:
            raise TrainingAborted(
                f"{recent} of the last {min(options.skipped_window, progress.iteration)} steps were skipped, "
                f"max_skipped_in_window={options.max_skipped_in_window}. The last one: {where}: {reason}. "
                f"{remedy} max_skipped_in_window"
            )

    def _find_suspect(self, result: StepResult, begin: int) -> tuple[Suspect | None, FaultOrigin | None]:
        """Return the microbatch whose loss stands out, and the origin of what is not finite, over all ranks.

        Collective. The microbatch is None where the gradient alone is not finite, the origin is None for a spike.
        """
        ctx, record = self._engine.ctx, None
        mine = []
        if result.microbatch_losses:  # inner stages compute none
            pairs = zip(self._plan(begin)[1], result.microbatch_losses, strict=True)
            mine = [Suspect(self._task.data.samples_of(key), float(loss)) for key, loss in pairs]
        worst = max(mine, key=_badness, default=None)
        if not result.is_finite:
            record = step_record(self._engine.module, ctx, self._place, self._task.objective.label)
        # a bad step is rare, so it may send objects
        gathered = ctx.gather_objects((worst, record))
        suspect = max((suspect for suspect, _ in gathered if suspect is not None), key=_badness, default=None)
        if result.is_finite:
            return suspect, None
        origin = find_origin([record for _, record in gathered], ctx.num_stages)
        # remembered by the watchdog: a rank that then fails is named with it
        if ctx.rank in origin.ranks:
            self._watchdog.note(f"in step {self._progress.iteration} {origin.what}")
        # each loss is finite, so no document is to blame
        if suspect is not None and math.isfinite(suspect.loss):
            suspect = None
        return suspect, origin

    def _documents_of(self, suspect: Suspect | None) -> list[dict[str, Any]]:
        """Return the documents in each sample of a microbatch, and their dataset; on rank 0 alone."""
        # the other ranks have the suspect, but write no row
        if suspect is None or self._engine.ctx.rank:
            return []
        entries, facts = [], self._task.data.facts(self._dataset)
        for sample in suspect.samples:
            source = facts.documents_of(sample)
            if source is not None:
                prefix, numbers = source
                entries.append({"sample": sample, "prefix": prefix, "documents": numbers})
        return entries

    def _report(self, text: str, row: dict[str, Any]) -> None:
        self._log.message(text)
        self._log.log_bad_step(row)
        self._watchdog.alert(SPIKE, text)

    # Rolling back

    def _roll_back(self, begin: int, warning: str, row: dict[str, Any]) -> bool:
        """Restore the state from before the samples around the spike, and leave them out. Collective.

        Return False, with nothing changed, if no checkpoint is as old as that. Raises TrainingAborted.
        """
        engine, progress, options = self._engine, self._progress, self._config.guard
        assert self._checkpoints is not None, "the validation demands save"
        end = progress.consumed_samples
        # the samples of so many steps, up to and with this one
        first = max(0, end - options.rollback_skip_steps * (end - begin))
        # the save under way may be the checkpoint to go back to, or be in its way
        for line in self._checkpoints.settle():
            self._log.message(line)
        checkpoint = checkpoint_before(first, engine.config, engine.ctx, self._checkpoints.run)
        if checkpoint is None:
            self._log.message(
                f"WARNING: no checkpoint from before sample {first} to roll back to; the step is skipped instead"
            )
            return False
        if progress.rollbacks >= options.max_rollbacks:
            raise TrainingAborted(
                f"iteration {progress.iteration} (samples {begin} to {end - 1}): {row['reason']}. "
                f"{progress.rollbacks} rollbacks, max_rollbacks={options.max_rollbacks}, have brought the run past no "
                f"new checkpoint. Samples left out so far: {_ranges(progress.left_out)}. Lower the learning rate, "
                "check the data, or resume from an earlier checkpoint with a larger rollback_skip_steps"
            )
        restored = Progress.from_saved(checkpoint.metadata["progress"])
        # what earlier rollbacks have left out is not in a checkpoint from before them
        for start, stop in progress.left_out:
            restored.leave_out(start, stop)
        restored.leave_out(first, end)
        # the checkpoint's count is older, and would allow rollbacks without end
        restored.rollbacks = progress.rollbacks + 1
        restore_whole(engine, checkpoint, restored)
        # in place: the loop, the spike detector and others hold this object
        vars(progress).update(vars(restored))
        self._loss_scale = engine.loss_scale
        self._skipped.clear()
        # before the report: its row would be moved out with those of the later iterations
        self._log.rewind(progress.iteration, progress.consumed_samples)
        self._report(
            f"{warning}Rolled back to {checkpoint.folder}, iteration {progress.iteration}; left out of the training: "
            f"samples {_ranges(progress.left_out)}",
            row | {"action": "rolled back", "rolled_back_to": progress.iteration},
        )
        return True

    def before_save(self) -> None:
        """Compare the copies; reset the rollback count beyond left-out samples. Collective. Raises TrainingAborted."""
        self.check_replicas(always=True)
        # the run has got past them, and may be rolled back as often again
        if all(end <= self._progress.consumed_samples for _, end in self._progress.left_out):
            self._progress.rollbacks = 0

    # Copies

    def check_replicas(self, *, always: bool = False) -> None:
        """Compare the ranks' copies if that is due. Collective. Raises TrainingAborted."""
        iteration = self._progress.iteration
        # a step that is saved would be checked twice
        if self._replicas is None or self._checked_at == iteration:
            return
        if always or iteration % self._config.guard.check_replicas_interval == 0:
            self._replicas.check(iteration)
            self._checked_at = iteration


def _badness(suspect: Suspect) -> float:
    return suspect.loss if math.isfinite(suspect.loss) else math.inf  # no order has NaN


def _not_finite(result: StepResult, origin: FaultOrigin | None) -> str:
    norm = math.inf  # where DeepSpeed refused it
    if result.observation is not None:
        norm = result.observation.grad_norm
    of_layers = f", loss terms of layers {result.layer_loss:.4g}" if result.layer_loss else ""
    return f"loss {result.loss:.4g}{of_layers} or gradient (norm {norm:.4g}) is not finite; {origin}"


def _ranges(samples: list[tuple[int, int]]) -> str:
    return ", ".join(f"{begin} to {end - 1}" for begin, end in samples) or "none"


def _suspect_text(suspect: Suspect | None, documents: list[dict[str, Any]]) -> str:
    if suspect is None:
        return ""
    samples = "no samples"
    if suspect.samples:
        samples = f"samples {_numbers(suspect.samples)}"
    by_prefix: dict[str, list[int]] = {}
    for entry in documents:
        by_prefix.setdefault(entry["prefix"], []).extend(entry["documents"])
    if by_prefix:
        inspect = command_name("inspect_dataset")
        commands = [f"{inspect} {prefix} --documents {_first(numbers, ' ')}" for prefix, numbers in by_prefix.items()]
        samples += f" ({'; '.join(commands)})"
    return f"Highest loss of a microbatch: {suspect.loss:.4g}, {samples}. "


def _numbers(samples: list[int]) -> str:
    if samples == list(range(samples[0], samples[-1] + 1)):
        return f"{samples[0]} to {samples[-1]}"
    return _first(samples, ", ")


def _first(numbers: list[int], separator: str) -> str:
    text = separator.join(map(str, numbers[:SHOWN_DOCUMENTS]))
    if len(numbers) > SHOWN_DOCUMENTS:
        text += " ..."
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints to go back to


def checkpoint_before(sample: int, config: Config, ctx: ParallelContext, run: Run) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, optimizer included, from before `sample` was consumed, or None.

    Collective. It is the run's own or its ancestors', in the run's folder, or else in the one that it resumed from.
    """
    options = config.checkpoint
    folders = [options.save]
    # what a start without the optimizer was given cannot be gone back to
    if options.load != options.save and not (options.universal_checkpoint or options.finetune or options.no_load_optim):
        folders.append(options.load)

    def choose(damaged: set[Path]) -> Path | None:
        # the run's own folder first, since its checkpoints are newer
        for folder in folders:
            for path in _newest_first(folder):
                if path in damaged or not of_run(run, [path], with_ancestors=True):
                    continue
                if _is_before(path, sample, config):
                    return path
        return None

    return first_whole(ctx, choose, load=None)


def _newest_first(folder: str | None) -> list[Path]:
    """Return the checkpoints in a folder by their iteration, from the highest on."""
    if folder is None:
        return []
    by_step = {}
    for path in Path(folder).glob(f"{TAG}*"):
        step = path.name.removeprefix(TAG)
        # by number: global_step10 comes after global_step9, which names compared as text have the other way round
        if step.isdigit():
            by_step[int(step)] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _is_before(folder: Path, sample: int, config: Config) -> bool:
    try:
        checkpoint = Checkpoint(folder)
        # before an extension of the context samples were others
        if checkpoint.metadata["config"]["training"]["seq_length"] != config.training.seq_length:
            return False
        # weights alone cannot be gone back to, and a damaged one is as if it were not there
        has_states = any(kind in STATES for kind in checkpoint.kinds)
        return has_states and int(checkpoint.metadata["progress"]["consumed_samples"]) <= sample
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False


def restore_whole(engine: Engine, checkpoint: Checkpoint, progress: Progress) -> None:
    """Restore a running engine to one of its own checkpoints. Collective."""
    optimizer, trained_only = checkpoint.metadata["optimizer"], engine.config.lora.lora_rank is not None
    average_steps = steps_of_average(checkpoint)
    raise_on_all_ranks(
        engine.ctx,
        lambda: engine.state.restore(checkpoint, optimizer, average_steps=average_steps, trained_only=trained_only),
    )
    # collective, so after the restore has ended on all ranks without an error
    engine.state.regather()
    engine.dropout_seed = checkpoint.metadata["rng"]["seed"]
    engine.count_from(progress)
