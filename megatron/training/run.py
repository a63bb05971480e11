"""A run from its parts: checkpoint, data, engine, saves and log are built one after the other, and then it trains."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.data.blend import describe_mix
from megatron.data.index.indexed import DataError
from megatron.observability.memory import MemoryLog
from megatron.observability.metrics import MetricsLog
from megatron.observability.run_folder import RunFolder
from megatron.options.config import Config
from megatron.options.progress import Progress, tokens_of_run
from megatron.options.schedule import Schedule
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import dequantizer
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_config, check_same_data
from megatron.resilience.shutdown import Shutdown, Signals
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import accelerator
from megatron.tasks.registry import load_task
from megatron.tasks.task import Task
from megatron.training.build import build_engine
from megatron.training.checkpoints import Checkpoints
from megatron.training.engine import Engine
from megatron.training.interludes.evaluation import Evaluator
from megatron.training.loop import Loop
from megatron.training.losses import SpikeDetector
from megatron.training.resume import Start, check_data, find_start, restore_start
from megatron.training.start import prepare_task, resumed_schedule


def run(config: Config, ctx: ParallelContext, signals: Signals | None = None, watchdog: Watchdog | None = None) -> None:
    """Train, or with skip_train evaluate only. Collective.

    `signals`: those noted since the process began; None: noted from here on. `watchdog`: the one that is informed of
    the progress; None: nothing watches.
    """
    watchdog = watchdog or Watchdog(config)  # one that was never started
    # first of all: ranks with other options could wait for each other in different collectives
    check_same_config(ctx, config)
    job = evaluate if config.training.skip_train else train
    with Shutdown(config.training, ctx, signals) as shutdown:
        job(config, ctx, shutdown, watchdog)


def train(config: Config, ctx: ParallelContext, shutdown: Shutdown, watchdog: Watchdog) -> None:
    """Build all parts of a run, restore a saved state, and train. Collective."""
    begin = partial(_begin, shutdown, watchdog)
    # the checkpoint before the data, and both before the model: what is refused is refused before minutes of building
    begin("reading the checkpoint")
    start = find_start(config, ctx)
    progress = start.progress
    begin("opening the data")
    task, datasets = open_data(config, ctx, start)
    schedule = build_schedule(config, ctx, start, task, datasets[0])
    begin("building the model")
    memory = MemoryLog(config.logging, ctx)
    # a checkpoint's rates may replace this command's
    in_effect = dataclasses.replace(config, optimizer=schedule.rates)
    engine = build_training_engine(in_effect, ctx, start, task, memory)
    if start.checkpoint is not None:
        begin("restoring")
        restore(engine, start)
        memory.take("after_restore", progress.iteration)
    begin("computing before training")
    complete_data(engine, task, datasets, start, watchdog)
    # opened late: nothing is written before the data and the checkpoint were found good
    with (
        open_checkpoints(config, ctx, start, watchdog) as checkpoints,
        open_log(config, ctx, progress, schedule.total_iterations, task, datasets[0]) as log,
        RunFolder(config, ctx, log, progress, task.data.facts(datasets[0]).drawn) as folder,
    ):
        watchdog.open()  # from here on it expects steps
        memory.open(log)
        loop = Loop(engine, task, datasets, schedule, progress, log, shutdown, checkpoints, memory, watchdog)
        folder.stopped = loop.train()


def evaluate(config: Config, ctx: ParallelContext, shutdown: Shutdown, watchdog: Watchdog) -> None:
    """Evaluate a checkpoint on the validation and test data. Collective. Raises CheckpointError or DataError."""
    begin = partial(_begin, shutdown, watchdog)
    begin("reading the checkpoint")
    options = config.checkpoint
    # nothing is saved, so another run's folder may be given as `save`
    # what a training saves to is what its evaluation reads
    source = dataclasses.replace(options, load=options.load or options.save, save=None)
    start = find_start(dataclasses.replace(config, checkpoint=source), ctx)
    begin("opening the data")
    task, datasets = _open_datasets(config, ctx)
    if all(dataset is None for dataset in datasets[1:]) and config.training.teacher_top_k is None:
        raise DataError("skip_train finds neither validation nor test data; raise their shares in split, or give paths")
    begin("building the model")
    # an evaluation always restores: there is nothing to measure in random weights
    engine = build_engine(config, ctx, task, will_restore=True)
    begin("restoring")
    # no optimizer is built, and the seed of dropout has no use
    weights_only = dataclasses.replace(start.options, finetune=True)
    restore(engine, dataclasses.replace(start, options=weights_only))
    begin("computing before training")
    complete_data(engine, task, datasets, start, watchdog)
    watchdog.open()
    with open_log(config, ctx, start.progress, start.progress.iteration, task, datasets[0]) as log:
        evaluator = Evaluator(engine, task, datasets, start.progress, log, shutdown, watchdog)
        evaluator.run("valid")
        evaluator.run("test")


def _begin(shutdown: Shutdown, watchdog: Watchdog, phase: str) -> None:
    shutdown.exit_if_requested()
    watchdog.phase(phase)


def open_data(config: Config, ctx: ParallelContext, start: Start) -> tuple[Task, Sequence[Any]]:
    """Return the task and its datasets, after the checks that they fit the checkpoint and all hosts. Collective."""
    task, datasets = _open_datasets(config, ctx)
    saved, fingerprint = start.saved_data, datasets[0].fingerprint
    if saved is not None:
        change = raise_on_all_ranks(ctx, lambda: check_data(saved, config, task, fingerprint))
        if change:
            announce(ctx, f"WARNING: the data is not that of the checkpoint (allow_data_change): {change}")
    if description := raise_on_all_ranks(ctx, task.data.facts(datasets[0]).describe):
        announce(ctx, description)
    return task, datasets


def _open_datasets(config: Config, ctx: ParallelContext) -> tuple[Task, Sequence[Any]]:
    task = load_task(config)
    with _warnings_of_data():
        datasets = raise_on_all_ranks(ctx, lambda: task.data.open(ctx))
    # hosts with different files would train on different samples, each by itself without an error
    check_same_data(ctx, config, datasets)
    return task, datasets


@contextlib.contextmanager
def _warnings_of_data() -> Iterator[None]:
    """Let one rank of each host warn of the data, which all of its ranks open alike."""
    log = logging.getLogger("megatron.data")
    level = log.level
    # each host opens files of its own, which may differ
    if os.environ.get("LOCAL_RANK", "0") != "0":
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def build_schedule(config: Config, ctx: ParallelContext, start: Start, task: Task, dataset: Any) -> Schedule:
    """Return the schedule of a run, after the check that it continues the checkpoint's. Collective.

    Announce how much of each dataset of a mix the run reads.
    """
    facts = task.data.facts(dataset)
    schedule = Schedule(config.training, config.optimizer, facts.samples_per_epoch)
    for each in raise_on_all_ranks(ctx, lambda: describe_mix(facts.drawn(schedule.total_samples))):
        announce(ctx, f"mix: {each}")
    checkpoint = start.checkpoint
    if checkpoint is not None and start.progress.iteration and not start.options.no_load_optim:
        saved, where = checkpoint.metadata.get("schedule"), str(checkpoint.folder)
        # as in Megatron, which loads optimizer and scheduler together or neither
        schedule, line = raise_on_all_ranks(
            ctx, lambda: resumed_schedule(schedule, saved, where, config.optimizer, start.counted_from)
        )
        if line:
            announce(ctx, line)
    if warning := schedule.unended_warmup():
        announce(ctx, f"WARNING: {warning}")
    return schedule


def build_training_engine(config: Config, ctx: ParallelContext, start: Start, task: Task, memory: MemoryLog) -> Engine:
    """Return the engine, with the memory that model and optimizer take noted. Collective."""
    progress = start.progress

    def take(moment: str) -> None:
        memory.take(moment, progress.iteration)

    take("before_model")
    engine = build_engine(
        config,
        ctx,
        task,
        SpikeDetector(config.guard, progress),
        will_restore=start.checkpoint is not None,
        after_model=lambda: take("after_model"),
    )
    take("after_optimizer")
    return engine


def restore(engine: Engine, start: Start) -> None:
    """Restore what the start says, and announce it. Collective."""
    for line in restore_start(engine, start):
        announce(engine.ctx, line)


def complete_data(engine: Engine, task: Task, datasets: Sequence[Any], start: Start, watchdog: Watchdog) -> None:
    """Let the task compute what it needs of the model at the start; announce how its products are computed. Collective.

    Raises DataError.
    """
    if line := accelerator.widened_line(accelerator.current(), engine.config.training.precision):
        announce(engine.ctx, line)
    if engine.config.model.quantize_base != "none":
        announce(engine.ctx, dequantizer(engine.ctx.device))
    for line in prepare_task(engine, task, datasets, start, watchdog.beat):
        announce(engine.ctx, line)


def open_checkpoints(
    config: Config, ctx: ParallelContext, start: Start, watchdog: Watchdog
) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """Return the saves of the run; nothing where it saves none. Collective."""
    if config.checkpoint.save is None:
        return contextlib.nullcontext()
    source = None
    if start.checkpoint is not None:
        source = start.checkpoint.metadata.get("source")
    checkpoints = Checkpoints(config, ctx, partial(watchdog.beat_of, "save"), source, start.run, start.kept)
    if start.checkpoint is not None:
        watchdog.saved(start.progress.iteration)  # the attempt that saved it may have ended before it could
    return checkpoints


def open_log(
    config: Config, ctx: ParallelContext, progress: Progress, total_iterations: int, task: Task, dataset: Any
) -> MetricsLog:
    """Return the log, which rank 0 writes. Collective."""
    of_data = task.data.facts(dataset).consumed_tokens
    return raise_on_all_ranks(
        ctx,
        lambda: MetricsLog(
            config,
            writes=ctx.rank == 0,
            world_size=ctx.world_size,
            device_peak_tflops=accelerator.peak_tflops(),
            total_iterations=total_iterations,
            tokens=of_data if dataset is None else tokens_of_run(of_data, progress),
            resumed_iteration=progress.iteration,
            loss_unit=task.objective.loss_unit,
            loss_name=task.objective.loss_name,
        ),
    )


def announce(ctx: ParallelContext, text: str) -> None:
    """Print a line on rank 0."""
    if ctx.rank == 0:
        print(text, flush=True)
