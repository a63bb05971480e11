"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megatron import accelerator
from megatron.data.batches import Batches
from megatron.data.indexed import DataError
from megatron.parallel.context import ParallelContext
from megatron.tasks.pretrain import Microbatch, PretrainTask
from megatron.training.checkpoints import Checkpoints
from megatron.training.engine import Engine, StepResult
from megatron.training.metrics import MetricsLog, StepMetrics
from megatron.training.profiling import Profile
from megatron.training.progress import Progress
from megatron.training.schedule import global_batch_size, learning_rate, total_samples
from megatron.training.stop import StopDecision
from megatron.training.straggler import Straggler
from megatron.training.watchdog import Watchdog


class Interval:
    """What adds up between two log lines. Stays on the device until it is read: no step waits for the host."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.steps = 0
        self._loss: Tensor | None = None
        self._nan_steps: Tensor | None = None
        self._began_s = time.perf_counter()

    def add(self, result: StepResult) -> None:
        finite = torch.isfinite(result.loss)
        loss, nan = torch.where(finite, result.loss, 0.0), (~finite).int()
        self._loss = loss if self._loss is None else self._loss + loss
        self._nan_steps = nan if self._nan_steps is None else self._nan_steps + nan
        self.steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out time that was no training."""
        self._began_s += seconds

    def read(self) -> tuple[float, int, float]:
        """Mean loss of the finite steps, number of the others, seconds a step. Waits for the device."""
        assert self._loss is not None
        assert self._nan_steps is not None
        nan_steps = int(self._nan_steps)
        loss = float(self._loss) / (self.steps - nan_steps) if nan_steps < self.steps else math.nan
        return loss, nan_steps, (time.perf_counter() - self._began_s) / self.steps


class SaveTimer:
    """When the minutes between two checkpoints are over, by the clock of rank 0."""

    def __init__(self, minutes: float | None, ctx: ParallelContext) -> None:
        self._interval_s = None if minutes is None else minutes * 60
        self._ctx = ctx
        self.restart()

    def restart(self) -> None:
        self._began_s = time.monotonic()

    def is_due(self) -> bool:
        """Collective where there is such an interval."""
        if self._interval_s is None:
            return False
        return bool(self._ctx.broadcast(int(time.monotonic() - self._began_s >= self._interval_s)))


def train(
    engine: Engine,
    task: PretrainTask,
    datasets: Sequence[Any],
    fingerprint: str,
    progress: Progress,
    log: MetricsLog,
    stop: StopDecision,
    checkpoints: Checkpoints | None,
    watchdog: Watchdog,
) -> None:
    """Train from `progress` to the end of the configured samples, or until `stop` says so. Collective.

    `checkpoints` None: nothing is saved.
    """
    config, training = engine.config, engine.config.training
    training_data, validation_data, test_data = datasets
    last_sample = total_samples(training)
    batches = make_batches(engine, task, training_data, progress.consumed_samples)
    interval, saved_at, reason = Interval(), progress.iteration, None
    timer = SaveTimer(config.checkpoint.save_interval_in_mins, engine.ctx)
    straggler = Straggler(engine) if config.logging.log_straggler else None
    if checkpoints is not None:
        checkpoints.reserve(engine)
    if progress.iteration == 0:
        # where the run starts from; and a validation that cannot work fails now, not after hours
        log_evaluation(engine, task, validation_data, progress, log, "valid", watchdog)
        interval.restart()
    with batches, Profile(config.logging, writes=engine.ctx.rank == 0) as profile:
        while progress.consumed_samples < last_sample:
            size = global_batch_size(training, progress.consumed_samples)
            if progress.consumed_samples + size > last_sample:
                break
            lr = learning_rate(config.optimizer, training, progress.consumed_samples)
            step = progress.iteration + 1
            watchdog.phase("data", step)
            microbatches = next_batch(batches, straggler) if engine.reads_data else []
            watchdog.phase("train", step)
            result = engine.train_step(
                microbatches,
                global_batch_size=size,
                consumed_samples=progress.consumed_samples,
                lr=lr,
            )
            accelerator.mark_step()
            if straggler is not None:
                straggler.count_step()
            progress.iteration += 1
            progress.consumed_samples += size
            progress.skipped_iterations += result.skipped
            interval.add(result)
            profile.step(progress.iteration)

            watchdog.phase("log", step)
            if progress.iteration % config.logging.log_interval == 0:
                log_step(engine, log, progress, interval, result, lr, size, straggler)
                interval.restart()
            watchdog.started()
            watchdog.phase("agreeing on whether to stop", step)
            reason = stop.after_step(progress.iteration, progress.consumed_samples)
            paused_s = time.perf_counter()
            if progress.iteration % config.data.eval_interval == 0:
                log_evaluation(engine, task, validation_data, progress, log, "valid", watchdog)
            watchdog.phase("save", step)
            if checkpoints is not None:
                is_time = timer.is_due()
                if is_time or progress.iteration % config.checkpoint.save_interval == 0:
                    checkpoints.save(engine, progress, fingerprint)
                    timer.restart()
                    saved_at = progress.iteration
                for line in checkpoints.report():
                    log.message(line)
            interval.pause(time.perf_counter() - paused_s)
            if reason is not None:
                log.message(reason)
                break
    watchdog.phase("save", progress.iteration)
    if checkpoints is not None:
        if saved_at != progress.iteration:
            checkpoints.save(engine, progress, fingerprint)
        checkpoints.finish(log.message)
    if reason is None:
        if progress.iteration % config.data.eval_interval:
            log_evaluation(engine, task, validation_data, progress, log, "valid", watchdog)
        log_evaluation(engine, task, test_data, progress, log, "test", watchdog)


def next_batch(batches: Batches[Microbatch], straggler: Straggler | None) -> list[Microbatch]:
    """This rank's microbatches of the next step. Raises DataError where there are none: other ranks may have some."""
    began_s = time.perf_counter()
    try:
        microbatches = next(batches)
    except StopIteration:
        raise DataError(
            f"this rank has no data after {batches.consumed_samples} samples, though the run goes on; see to it that "
            "every host has the same files"
        ) from None
    if straggler is not None:
        straggler.add_data_wait(time.perf_counter() - began_s)
    return microbatches


def make_batches(engine: Engine, task: PretrainTask, dataset: Any, consumed_samples: int) -> Batches[Microbatch]:
    """This rank's share of `dataset`, step by step, from `consumed_samples` on."""
    config = engine.config

    def size_at(samples: int) -> int:
        return global_batch_size(config.training, samples)

    return Batches(
        dataset,
        collate=task.collate,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=engine.ctx.data_rank,
        data_parallel_size=engine.ctx.data_size,
        global_batch_size=size_at,
        consumed_samples=consumed_samples,
        num_workers=config.data.num_workers if engine.reads_data else 0,
    )


def log_step(
    engine: Engine,
    log: MetricsLog,
    progress: Progress,
    interval: Interval,
    result: StepResult,
    lr: float,
    size: int,
    straggler: Straggler | None,
) -> None:
    loss, nan_steps, elapsed_s = interval.read()
    progress.nan_iterations += nan_steps
    log.log_step(
        StepMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * engine.config.training.seq_length,
            elapsed_s=elapsed_s,
            learning_rate=lr,
            global_batch_size=size,
            lm_loss=loss,
            loss_scale=engine.loss_scale,
            grad_norm=None if result.grad_norm is None else float(result.grad_norm),
            skipped_iterations=progress.skipped_iterations,
            nan_iterations=progress.nan_iterations,
            memory=accelerator.memory_stats(),
            spread=None if straggler is None else straggler.read(),
        )
    )


def log_evaluation(
    engine: Engine,
    task: PretrainTask,
    dataset: Any,
    progress: Progress,
    log: MetricsLog,
    split: Literal["valid", "test"],
    watchdog: Watchdog,
) -> None:
    """Loss over the first eval_iters global batches of `dataset`: the same samples each time."""
    config = engine.config
    if config.data.eval_iters == 0 or dataset is None:
        return
    watchdog.phase("evaluation", progress.iteration)
    loss, tokens = evaluate(engine, config.data.eval_iters, task, dataset, watchdog.beat)
    log.log_validation(progress.iteration, progress.consumed_samples, loss, int(tokens), split)


def evaluate(
    engine: Engine, num_batches: int, task: PretrainTask, dataset: Any, beat: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Mean loss per loss token over `num_batches` global batches, and the number of those tokens.

    `beat` is called after each of them. Both are right on ranks that read data, rank 0 among them.
    """
    training = engine.config.training
    num_microbatches = training.global_batch_size // (training.micro_batch_size * engine.ctx.data_size)
    batches = Batches(
        dataset,
        collate=task.collate,
        micro_batch_size=training.micro_batch_size,
        data_parallel_rank=engine.ctx.data_rank,
        data_parallel_size=engine.ctx.data_size,
        global_batch_size=lambda _: training.global_batch_size,
        consumed_samples=0,
        num_workers=0,
    )
    total, tokens = 0.0, 0.0
    for _ in range(num_batches):
        loss, count = engine.evaluate(next(batches) if engine.reads_data else [], num_microbatches)
        total, tokens = total + float(loss) * count, tokens + count
        beat()
    return total / max(tokens, 1.0), tokens
