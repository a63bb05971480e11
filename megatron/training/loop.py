"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.folders import SaveError
from megatron.data.batches import Batches
from megatron.data.index.indexed import DataError
from megatron.observability.memory import MemoryLog
from megatron.observability.metrics import MetricsLog
from megatron.observability.profiling import Profile
from megatron.options.progress import Progress
from megatron.options.schedule import Schedule
from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import DATA
from megatron.resilience.errors import TrainingAborted
from megatron.resilience.shutdown import Shutdown
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import accelerator
from megatron.runtime.alerts import SAVE
from megatron.runtime.commands import counted
from megatron.tasks.data import Microbatch
from megatron.tasks.task import Task
from megatron.training.callbacks import Events
from megatron.training.checkpoints import Checkpoints, Kept
from megatron.training.engine import Engine, StepResult, pinned
from megatron.training.guard import Guard
from megatron.training.interludes.evaluation import BestTracker, Evaluator
from megatron.training.interludes.step_log import StepLog
from megatron.training.recheck import Recheck

if TYPE_CHECKING:
    from megatron.training.interludes.answers import Interlude

COMPILED_MICROBATCHES = 3
"""The first of a step stores its gradients, further ones add to them, and the last begins their sum over ranks."""


class SaveTimer:
    """Timer of the minutes between two checkpoints, by the clock of rank 0; None: never."""

    def __init__(self, minutes: float | None, ctx: ParallelContext) -> None:
        self._minutes, self._ctx = minutes, ctx
        self.restart()

    def restart(self) -> None:
        self._began_s = time.monotonic()

    def is_due(self) -> bool:
        """Return True once the interval is over. Collective where there is one."""
        if self._minutes is None:
            return False
        is_over = time.monotonic() - self._began_s >= 60 * self._minutes
        return bool(self._ctx.broadcast(int(is_over)))


@dataclass
class Loop:
    """Training, and all its parts. Each rank builds one, alike; `train` is collective."""

    engine: Engine
    task: Task
    datasets: Sequence[Any]
    """For training, validation and test; None where there is none."""
    schedule: Schedule
    progress: Progress
    """The point to begin at; advances with the training."""
    log: MetricsLog
    shutdown: Shutdown
    checkpoints: Checkpoints | None
    """None: nothing is saved."""
    memory: MemoryLog
    watchdog: Watchdog

    def __post_init__(self) -> None:
        config, ctx = self.engine.config, self.engine.ctx
        self._plan = self.task.data.plan(
            self.datasets[0], self.schedule.global_batch_size, ctx.batch_rank, ctx.num_batch_ranks
        )
        self._batches = Batches(
            self._plan,
            self._read,
            consumed_samples=self.progress.consumed_samples,
            num_workers=config.data.num_workers if self.engine.reads_data else 0,  # inner stages read nothing
        )
        self._step_log = StepLog(self.engine, self.progress, self.log, self.watchdog, self._is_saving)
        self._saved_at = self.progress.iteration
        self._is_saved_for_use = False  # that save is to be exported, or kept as the best
        if self.checkpoints is not None and self.checkpoints.kept is not None:  # the run begins at none on the disk
            self._saved_at = self.checkpoints.kept.saved_at
        self._is_stop_seen: bool | None = None  # by some rank in the last step; None: not decided with it
        self.engine.join_stop_decision(self.shutdown.sees_reason)
        self._timer = SaveTimer(config.checkpoint.save_interval_in_mins, ctx)
        acts_on = self.task, self.datasets[0], self._plan, self.log, self.checkpoints
        self._guard = Guard(self.engine, self.progress, *acts_on, self.watchdog)
        self._recheck = self._wanted_recheck()
        self._evaluator = Evaluator(
            self.engine, self.task, self.datasets, self.progress, self.log, self.shutdown, self.watchdog
        )
        self._best = BestTracker(config, ctx, self.progress, self.datasets[1], self.log.message, self._is_lost)
        self._events = Events(config, self.engine, self.progress, self.schedule, self.log.tokens_of)
        self.shutdown.find_error = self._error
        if self.checkpoints is not None:
            self.checkpoints.on_saved = self._events.saved
            self.checkpoints.on_complete = self._saved
            self.checkpoints.on_copied = self.watchdog.saved
            self.checkpoints.on_failed = partial(self.watchdog.alert, SAVE)
        self._interludes = self._wanted_interludes()

    def _wanted_recheck(self) -> Recheck | None:
        config, ctx = self.engine.config, self.engine.ctx
        if config.guard.recheck_interval == 0:
            return None
        # one and the same on all ranks, that of the first
        plan = self.task.data.plan(self.datasets[0], self.schedule.global_batch_size, 0, ctx.num_batch_ranks)
        return Recheck(self.engine, self.task, self.datasets[0], plan, self.log, self.watchdog)

    def _wanted_interludes(self) -> list[Interlude]:
        options, parts = self.engine.config.logging, (self.engine, self.progress, self.log, self.watchdog)
        wanted: list[Interlude] = []
        if options.generate_prompts is not None:
            from megatron.training.interludes.answers import Answers  # late: few runs generate

            wanted.append(Answers(*parts))
        if options.lm_eval_tasks:
            from megatron.training.interludes.answers import TaskEvaluation

            wanted.append(TaskEvaluation(*parts))
        return wanted

    def _error(self) -> str | None:
        """Return what on this rank is to end the run: the error of a callback, or saves that fail."""
        error = self._events.error()
        if error is None and self.checkpoints is not None:
            return self.checkpoints.fault
        return error

    def _saved(self, iteration: int) -> None:
        """Take note of a complete checkpoint."""
        self.watchdog.saved(iteration)
        self.log.log_saved(iteration)

    def _is_saving(self) -> bool:
        """Return whether a save goes on in the background."""
        return self.checkpoints is not None and self.checkpoints.is_saving

    def _read(self, key: Any) -> Microbatch:
        """Read a microbatch, in a thread of its own."""
        return pinned(self.task.read(self.datasets[0], key), self.engine.ctx.device)

    def train(self) -> str | None:
        """Train to the end of the configured samples, or until validations or `shutdown` give a reason, and return it.

        Raises TrainingAborted if that is an error.
        """
        config, progress, shutdown = self.engine.config, self.progress, self.shutdown
        self._events.begin()
        if self.checkpoints is not None:
            self.checkpoints.reserve(self.engine)
            self.watchdog.phase("save", progress.iteration)
            self.checkpoints.export_what_is_due(progress, self.log.message, self.watchdog.beat)
            kept = self.checkpoints.kept
            if kept is not None and kept.save_is_due:
                self._save(and_export=kept.export_is_due)
        if progress.iteration == 0:
            # the loss at the start; and a validation that cannot work fails now, not after hours
            self._evaluator.run("valid")
            self._run_interludes()
        # a signal cut it short; without it the counts would differ from those of an undisturbed run
        elif self._best.is_evaluation_missing:
            self._validate()
            self._save_if_best()
        self._compile_ahead()
        self._step_log.restart()  # start, validation and compilation are not part of the first step's time
        profile = Profile(
            config.logging,
            rank=self.engine.ctx.rank,
            iteration=progress.iteration,
            trace=self.engine.trace,
            say=self.log.message,
        )
        with self._batches, profile:
            while shutdown.reason is None and not self._is_over():
                consumed_before = progress.consumed_samples
                self._events.step_begins()
                with profile.mark(progress.iteration + 1):
                    is_rolled_back = self._step()
                if is_rolled_back:
                    continue
                profile.step(progress.iteration)
                self.memory.after_step(progress.iteration)
                self._guard.check_replicas()
                self.watchdog.started()
                self.watchdog.phase("agreeing on whether to stop", progress.iteration)
                # most steps have decided with their own reduction, so that this sends nothing
                shutdown.decide(progress, is_reason_seen=self._is_stop_seen)
                paused_s = time.perf_counter()
                if self._recheck is not None:
                    self._recheck.run_if_due(progress, consumed_before)
                if progress.iteration % config.data.eval_interval == 0:
                    self._validate()
                self._run_interludes()
                self._step_log.watch_links()
                self._save_where_due(consumed_before)
                self._events.step_ends()
                self._step_log.pause(time.perf_counter() - paused_s)
                if not self._is_over():
                    shutdown.check_exit_interval(progress)
        self._end()
        return self._end_reason

    def _compile_ahead(self) -> None:
        """Run each shape that the rest of the run has, where the task names them, in a step that is refused.

        Losses and weights do not change. Ends early once a shutdown is requested. Raises DataError.
        """
        began_s, phase = time.perf_counter(), "compiling each shape of rows"
        self.watchdog.phase(phase, self.progress.iteration)
        # met later, in one rank's step, a new shape would keep the others waiting for its compilation
        engine, dataset, begin = self.engine, self.datasets[0], self.progress.consumed_samples
        keys = self.task.data.keys_of_shapes(
            dataset, self.schedule.global_batch_size, begin, self.schedule.total_samples
        )
        done = 0
        for key in keys:
            self.watchdog.phase(phase, self.progress.iteration)
            batches = []
            if engine.reads_data:
                batches = [pinned(self.task.read(dataset, key), engine.ctx.device)] * COMPILED_MICROBATCHES
            engine.run_without_update(batches, num_microbatches=COMPILED_MICROBATCHES, consumed_samples=begin)
            accelerator.current().mark_step()
            done += 1
            if self.shutdown.decide(self.progress):
                break
        if done:
            self.log.message(f"compiled {counted(done, 'shape')} in {time.perf_counter() - began_s:.1f} s")

    def _validate(self) -> None:
        evaluated = self._evaluator.run("valid")
        if evaluated is not None:
            loss, count, metrics = evaluated
            self._best.evaluated(loss, metrics)
            self._events.evaluated(loss, count, metrics, self.task.objective.loss_unit)

    def _run_interludes(self) -> None:
        for interlude in self._interludes:
            if self.shutdown.reason is None:
                interlude.run_if_due()

    def _is_complete(self) -> bool:
        return self.schedule.is_complete(self.progress.consumed_samples)

    def _is_over(self) -> bool:
        """Return True after the last sample, or once the validations are a reason to stop."""
        return self._is_complete() or self._best.stop_reason is not None

    @property
    def _end_reason(self) -> str | None:
        """Reason of an end before the last sample; None: there is none."""
        if self.shutdown.reason is None and not self._is_complete():
            return self._best.stop_reason
        return self.shutdown.reason

    def _step(self) -> bool:
        """Train on the next global batch, unless a rollback leaves it out. Return True if the run was rolled back."""
        progress = self.progress
        begin, step = progress.consumed_samples, progress.iteration + 1
        size, lr = self.schedule.global_batch_size(begin), self.schedule.learning_rate(begin)
        self.watchdog.phase("data", step)
        result, num_microbatches = None, 0
        if progress.leaves_out(begin, begin + size):
            # the step counts, so that the iterations after it have the samples that they would have had
            self._batches.seek(begin + size)
        else:
            result, num_microbatches = self._train_step(begin, step, lr)
        # before the guard acts, whose rollback replaces all of it
        progress.iteration = step
        progress.consumed_samples += size
        progress.skipped_iterations += result is None or result.skipped
        # None also for a step that is left out, or that DeepSpeed refused: these reduce nothing
        self._is_stop_seen = None
        if result is not None and result.observation is not None:
            self._is_stop_seen = result.observation.is_stop_seen
        self._events.step_done(result, lr, size, num_microbatches)
        self.watchdog.phase("log", step)
        if result is not None:
            self._step_log.add(result, size, num_microbatches)
            if self._guard.after_step(result, begin):
                self._batches.seek(progress.consumed_samples)
                self._step_log.roll_back()
                self._saved_at, self._is_saved_for_use = progress.iteration, False
                if self.checkpoints is not None:
                    self.checkpoints.discard_copies()
                return True
        self._step_log.write_if_due(result, lr, self.schedule.decoupled_learning_rate(begin), size)
        return False

    def _train_step(self, begin: int, step: int, lr: float) -> tuple[StepResult, int]:
        """Read and train a global batch that begins at sample `begin`; return its number of microbatches too."""
        engine, clock, microbatches = self.engine, self.engine.ctx.state.clock, list[Microbatch]()
        with clock.step():
            with engine.timers.on_host("batch-generator"), clock.phase(DATA):
                if engine.reads_data:
                    microbatches = self._next_batch()
                    num_microbatches = len(microbatches)
                else:  # the plan has as many for every rank, and reads nothing
                    num_microbatches = len(self._plan(begin)[1])
            self.watchdog.phase("train", step)
            result = engine.train_step(
                microbatches,
                num_microbatches=num_microbatches,
                consumed_samples=begin,
                lr=lr,
                decoupled_lr=self.schedule.decoupled_learning_rate(begin),
                weight_decay=self.schedule.weight_decay(begin),
            )
        accelerator.current().mark_step()  # where the device is lazy, it computes now
        self._step_log.count_positions(sum(batch.num_positions for batch in microbatches))
        return result, num_microbatches

    def _next_batch(self) -> list[Microbatch]:
        """Return this rank's microbatches. Raises DataError where there are none: other ranks may have some."""
        try:
            return next(self._batches)
        except StopIteration:
            raise DataError(
                f"this rank has no data after {self._batches.consumed_samples} samples, though the run continues; "
                "give every host the same files"
            ) from None

    def _save_where_due(self, consumed_before: int) -> None:
        """Begin a save if one is due, and report on earlier ones.

        `consumed_before`: samples before this step.
        """
        if self.checkpoints is None:
            return
        self.watchdog.phase("save", self.progress.iteration)
        is_time, is_export = self._timer.is_due(), self._is_export_due(consumed_before)
        is_due = is_time or is_export or self._best.save_is_due
        is_due = is_due or self.progress.iteration % self.engine.config.checkpoint.save_interval == 0
        if self.checkpoints.copy_is_due(self.progress.iteration):
            self._keep_copy(save_is_due=is_due, export_is_due=is_export)
        if is_due:
            self._save(and_export=is_export)
            self._timer.restart()
            # a save may take minutes: no further step, and no second save, after a signal
            self.shutdown.decide(self.progress)
        for line in self.checkpoints.report():
            self.log.message(line)

    def _keep_copy(self, *, save_is_due: bool, export_is_due: bool) -> None:
        """Copy the state into memory, from which a restart goes on: also where the save that follows is cut short."""
        assert self.checkpoints is not None
        self._guard.before_save()
        progress = self.progress
        progress.consumed_tokens = self.log.tokens_of(progress.consumed_samples)
        kept = Kept(progress.iteration, save_is_due, export_is_due, self._saved_at, self._is_saved_for_use)
        with self.engine.timers.on_host("keep-copy"):
            self.checkpoints.keep_copy(
                self.engine, progress, self.datasets[0].fingerprint, schedule=self.schedule.params, kept=kept
            )

    def _save_if_best(self) -> None:
        if self._best.save_is_due:
            self.watchdog.phase("save", self.progress.iteration)
            self._save(and_export=False)

    def _is_lost(self, iteration: int) -> bool:
        """Return True if the save of an iteration has left no checkpoint."""
        return self.checkpoints is not None and self.checkpoints.is_lost(iteration)

    def _is_export_due(self, consumed_before: int) -> bool:
        """Return True if the last step reached or passed a multiple of save_samples, or ended an epoch."""
        options, consumed = self.engine.config.checkpoint, self.progress.consumed_samples
        every = options.save_samples
        if every is not None and consumed // every > consumed_before // every:
            return True
        return options.save_at_epoch and self.schedule.ends_epoch(consumed)

    def _save(self, *, and_export: bool) -> None:
        assert self.checkpoints is not None
        self._guard.before_save()  # copies that differ must not be what a restart begins from
        # for a resume with another seq_length, which could not count earlier tokens
        self.progress.consumed_tokens = self.log.tokens_of(self.progress.consumed_samples)
        with self.engine.timers.on_host("save-checkpoint"):
            self.checkpoints.save(
                self.engine,
                self.progress,
                self.datasets[0].fingerprint,
                schedule=self.schedule.params,
                to_export=and_export,
                expert_loads=self._step_log.loads.record(),
            )
        self._is_saved_for_use = and_export or self._best.save_is_due
        self._saved_at, self._best.save_is_due = self.progress.iteration, False
        if and_export:
            self._export()

    def _export(self) -> None:
        """Export, in the phase of the save, which it waits for first."""
        assert self.checkpoints is not None
        self.checkpoints.export(self.progress, self.log.message, self.watchdog.beat)

    def _end(self) -> None:
        """Log the reason, save and export what is not yet, and evaluate a run that is over."""
        progress = self.progress
        # unless the last step was followed by one, and not after a stop: it may take longer than a signal leaves
        if self.shutdown.reason is None and progress.iteration % self.engine.config.data.eval_interval:
            self._validate()
        if self._end_reason is not None and not self.shutdown.is_error:
            self.log.message(self._end_reason)
        if self._is_complete():
            self.log.message(
                f"Training is complete, iteration={progress.iteration}, {progress.consumed_samples} samples"
            )
        if self.checkpoints is not None:
            self._end_saves(self.checkpoints)
        if self.shutdown.reason is None:
            self._evaluator.run("test")
            for interlude in self._interludes:
                interlude.run_at_end()
        self._events.end()
        if self.engine.config.logging.callbacks:  # the last hooks may have failed
            self.shutdown.decide_error()
        if self.checkpoints is not None:
            self.checkpoints.finish_exports()  # last: what it raises must not keep the rest from its end
        if self.shutdown.is_error:
            self._raise_error()

    def _end_saves(self, checkpoints: Checkpoints) -> None:
        """Save and export what is not yet."""
        progress = self.progress
        self.watchdog.phase("save", progress.iteration)
        unsaved = self._saved_at != progress.iteration or self._best.save_is_due
        if unsaved or not checkpoints.can_export(progress):
            self._save(and_export=True)
        else:
            self._export()
        if self.engine.config.checkpoint.keep_best and self._is_over():
            checkpoints.export_best(progress, self.log.message, self.watchdog.beat)
        checkpoints.finish(self.log.message)

    def _raise_error(self) -> None:
        is_save = self.checkpoints is not None and self.checkpoints.fault is not None
        # the status must be one on all ranks, though one alone may have seen its saves fail
        if self.engine.ctx.largest(is_save):
            raise SaveError(self.shutdown.reason)  # a restart may find a file system that works again
        raise TrainingAborted(self.shutdown.reason)
