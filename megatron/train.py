"""Train a model: `python -m megatron.train --config tiny_bloom --data-path PREFIX`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: megatron/runtime/commands.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from megatron.runtime.early_interrupt import end_process_at_interrupt

    end_process_at_interrupt()

import contextlib
import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.observability.metric_writers import check_wandb
from megatron.options.config import Config, ConfigError, on_device
from megatron.options.dependents import slow_mode
from megatron.parallel.layout import Layout
from megatron.resilience.process import leave, print_error
from megatron.resilience.shutdown import Signals, is_launched
from megatron.runtime.commands import DONE, REFUSED
from megatron.runtime.descriptors import limit_fault
from megatron.runtime.devices import defer_backends, set_graph_variables
from megatron.runtime.network import adopt_mpi_variables
from megatron.settings.command_line import load_command_line
from megatron.settings.validation import check_device, idle
from megatron.tasks.registry import load_task
from megatron.training.deepspeed.config import check_deepspeed as deepspeed_faults
from megatron.training.deepspeed.config import check_values

if TYPE_CHECKING:
    from megatron.observability.metrics import MetricsLog
    from megatron.options.progress import Progress
    from megatron.options.schedule import Schedule
    from megatron.parallel.context import ParallelContext
    from megatron.resilience.shutdown import Shutdown
    from megatron.resilience.watchdog import Watchdog
    from megatron.tasks.task import Task
    from megatron.training.checkpoints import Checkpoints
    from megatron.training.engine import Engine
    from megatron.training.resume import Start


def main(arguments: list[str], signals: Signals) -> None:
    command = load_command_line(arguments, None, deepspeed_faults)  # every fault at once, before torch is imported
    config = command.config
    if "RANK" not in os.environ:  # the launcher has printed them
        for line in command.notes:
            print_error(line)
    is_first = os.environ.get("RANK", "0") == "0"
    is_unsaid = is_first and not is_launched()  # warnings of the options
    if is_unsaid:
        _warn(idle(config))
    settings = check_deepspeed(config)
    check_wandb(config)

    import torch.distributed as dist

    from megatron.runtime import accelerator

    accelerator.keep_recipes(config.parallel.device, config.logging.results_dir)
    if config.data.eval_graphs:
        set_graph_variables(config.parallel.device, config.parallel.tensor_model_parallel_size)
    device = accelerator.choose_device(config.parallel.device)  # before anything imports deepspeed
    is_unsaid |= is_first and config.parallel.device == "auto"  # which the launcher did not know
    config = on_device(config, device, lazy=accelerator.is_lazy(device))
    if is_unsaid:
        _warn(slow_mode(config, lazy=accelerator.is_lazy(device)))
    if device == "hpu" and os.environ.get("LOCAL_RANK", "0") == "0":
        from megatron.observability.hpu_health import driver_warning

        if warning := driver_warning():
            print_error(f"WARNING: {warning}")
    if faults := list(check_device(config)):
        raise ConfigError(faults)
    accelerator.check_precision(device, config.training.precision)
    if config.training.deepspeed_config is not None:
        check_values(settings, config.training.deepspeed_config)
    if config.training.deterministic:
        accelerator.set_deterministic(device)
    if fault := limit_fault(device, int(os.environ.get("WORLD_SIZE", "1")), len(config.data.prefixes)):
        raise OSError(fault)

    from megatron.parallel.context import ParallelContext
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.resilience.watchdog import Watchdog

    with Watchdog(config) as watchdog:
        try:
            watchdog.phase("joining the other ranks")
            ctx = ParallelContext.build(config.parallel, device)
            watchdog.connect(ctx)
            run(config, ctx, signals, watchdog)
            watchdog.phase("end", watchdog.step)
            raise_on_all_ranks(ctx, lambda: None)  # no rank leaves while another still needs it
        except BaseException as error:
            to_raise = watchdog.fail(error)
            if to_raise is not error:
                raise to_raise from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        print_error(f"WARNING: {line}")


def run(config: Config, ctx: ParallelContext, signals: Signals | None = None, watchdog: Watchdog | None = None) -> None:
    """Build all parts of a run, restore a saved state, and train; with skip_train evaluate only. Collective.

    `signals`: those noted since the process began; None: noted from here on. `watchdog`: the one that is informed of
    the progress; None: nothing watches.
    """
    from megatron.observability.memory import MemoryLog
    from megatron.observability.run_folder import RunFolder
    from megatron.resilience.host_consistency import check_same_config
    from megatron.resilience.shutdown import Shutdown
    from megatron.resilience.watchdog import Watchdog
    from megatron.training.build import build_engine
    from megatron.training.loop import Loop
    from megatron.training.losses import SpikeDetector
    from megatron.training.resume import find_start, restore_start

    watchdog = watchdog or Watchdog(config)  # one that was never started
    check_same_config(ctx, config)
    with Shutdown(config.training, ctx, signals) as shutdown:

        def begin(phase: str) -> None:
            shutdown.exit_if_requested()
            watchdog.phase(phase)

        if config.training.skip_train:
            return evaluate_only(config, ctx, shutdown, watchdog, begin)
        begin("reading the checkpoint")
        start = find_start(config, ctx)
        progress = start.progress
        begin("opening the data")
        task, datasets = open_data(config, ctx, start)
        schedule = build_schedule(config, ctx, start, task, datasets[0])
        begin("building the model")
        memory = MemoryLog(config.logging, ctx)
        memory.take("before_model", progress.iteration)
        engine = build_engine(
            config,
            ctx,
            task,
            SpikeDetector(config.guard, progress),
            will_restore=start.checkpoint is not None,
            after_model=lambda: memory.take("after_model", progress.iteration),
        )
        memory.take("after_optimizer", progress.iteration)
        if start.checkpoint is not None:
            begin("restoring")
            for line in restore_start(engine, start):
                announce(ctx, line)
            memory.take("after_restore", progress.iteration)
        complete_data(engine, task, datasets, start, watchdog, begin)
        watchdog.open()
        # opened late: nothing is written before the data and the checkpoint were found good
        with (
            open_checkpoints(config, ctx, start, watchdog) as checkpoints,
            open_log(config, ctx, progress, schedule.total_iterations, task, datasets[0]) as log,
            RunFolder(config, ctx, log, progress, partial(task.data.drawn, datasets[0])) as folder,
        ):
            memory.open(log)
            loop = Loop(engine, task, datasets, schedule, progress, log, shutdown, checkpoints, memory, watchdog)
            folder.stopped = loop.train()


def evaluate_only(
    config: Config, ctx: ParallelContext, shutdown: Shutdown, watchdog: Watchdog, begin: Callable[[str], None]
) -> None:
    """Evaluate a checkpoint on the validation and test data. Collective. Raises CheckpointError or DataError."""
    from megatron.data.index.indexed import DataError
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.resilience.host_consistency import check_same_data
    from megatron.training.build import build_engine
    from megatron.training.evaluation import Evaluator
    from megatron.training.resume import find_start, restore_start

    begin("reading the checkpoint")
    options = config.checkpoint
    folder = options.load or options.save
    # nothing is saved, so another run's folder may be given as `save`
    source = dataclasses.replace(options, load=folder, save=None)
    start = find_start(dataclasses.replace(config, checkpoint=source), ctx)
    begin("opening the data")
    task: Task = load_task(config)
    with warnings_of_data():
        datasets = raise_on_all_ranks(ctx, lambda: task.data.open(ctx))
    check_same_data(ctx, config, datasets)
    if all(dataset is None for dataset in datasets[1:]) and config.training.teacher_top_k is None:
        raise DataError("skip_train finds neither validation nor test data; raise their shares in split, or give paths")
    begin("building the model")
    engine = build_engine(config, ctx, task, will_restore=True)
    begin("restoring")
    weights_only = dataclasses.replace(start.options, finetune=True)
    for line in restore_start(engine, dataclasses.replace(start, options=weights_only)):
        announce(ctx, line)
    complete_data(engine, task, datasets, start, watchdog, begin)
    watchdog.open()
    with open_log(config, ctx, start.progress, start.progress.iteration, task, datasets[0]) as log:
        evaluator = Evaluator(engine, task, datasets, start.progress, log, shutdown, watchdog)
        evaluator.run("valid")
        evaluator.run("test")


def open_data(config: Config, ctx: ParallelContext, start: Start) -> tuple[Task, Sequence[Any]]:
    """Return the task and its datasets, after the checks that they fit the checkpoint and all hosts. Collective."""
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.resilience.host_consistency import check_same_data
    from megatron.training.resume import check_data

    task: Task = load_task(config)
    with warnings_of_data():
        datasets = raise_on_all_ranks(ctx, lambda: task.data.open(ctx))
    check_same_data(ctx, config, datasets)
    saved, fingerprint = start.saved_data, datasets[0].fingerprint
    if saved is not None and (change := raise_on_all_ranks(ctx, lambda: check_data(saved, config, task, fingerprint))):
        announce(ctx, f"WARNING: the data is not that of the checkpoint (allow_data_change): {change}")
    if description := raise_on_all_ranks(ctx, lambda: task.data.describe(datasets[0])):
        announce(ctx, description)
    return task, datasets


@contextlib.contextmanager
def warnings_of_data() -> Iterator[None]:
    """Let one rank of each host warn of the data, which all of its ranks open alike."""
    log = logging.getLogger("megatron.data")
    level = log.level
    if os.environ.get("LOCAL_RANK", "0") != "0":
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def complete_data(
    engine: Engine,
    task: Task,
    datasets: Sequence[Any],
    start: Start,
    watchdog: Watchdog,
    begin: Callable[[str], None],
) -> None:
    """Let the task compute what it needs of the model at the start; announce how its products are computed. Collective.

    Raises DataError.
    """
    from megatron.parallel.operators.nf4 import dequantizer
    from megatron.runtime.accelerator import widened_line
    from megatron.training.start import prepare_task

    if line := widened_line(engine.ctx.device.type, engine.config.training.precision):
        announce(engine.ctx, line)
    if engine.config.model.quantize_base != "none":
        announce(engine.ctx, dequantizer(engine.ctx.device))
    begin("computing before training")
    for line in prepare_task(engine, task, datasets, start, watchdog.beat):
        announce(engine.ctx, line)


def build_schedule(config: Config, ctx: ParallelContext, start: Start, task: Task, dataset: Any) -> Schedule:
    """Return the schedule of a run, after the check that it continues the checkpoint's. Collective.

    Announce how much of each dataset of a mix the run reads.
    """
    from megatron.data.blend import describe_mix
    from megatron.options.schedule import Schedule
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.training.start import resumed_schedule

    schedule = Schedule(config.training, config.optimizer, task.data.samples_per_epoch(dataset))
    for each in raise_on_all_ranks(ctx, lambda: describe_mix(task.data.drawn(dataset, schedule.total_samples))):
        announce(ctx, f"mix: {each}")
    checkpoint = start.checkpoint
    if checkpoint is not None and start.progress.iteration and not start.options.no_load_optim:
        saved, where = checkpoint.metadata.get("schedule"), str(checkpoint.folder)
        schedule, line = raise_on_all_ranks(ctx, lambda: resumed_schedule(schedule, saved, where, config.optimizer))
        if line:
            announce(ctx, line)
    if warning := schedule.unended_warmup():
        announce(ctx, f"WARNING: {warning}")
    return schedule


def open_checkpoints(
    config: Config, ctx: ParallelContext, start: Start, watchdog: Watchdog
) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """Return the saves of the run; nothing where it saves none. Collective."""
    from megatron.training.checkpoints import Checkpoints

    if config.checkpoint.save is None:
        return contextlib.nullcontext()
    source = None if start.checkpoint is None else start.checkpoint.metadata.get("source")
    checkpoints = Checkpoints(config, ctx, partial(watchdog.beat_of, "save"), source, start.run)
    checkpoints.on_complete = watchdog.saved
    if start.checkpoint is not None:
        watchdog.saved(start.progress.iteration)  # the attempt that saved it may have ended before it could
    return checkpoints


def open_log(
    config: Config, ctx: ParallelContext, progress: Progress, total_iterations: int, task: Task, dataset: Any
) -> MetricsLog:
    """Return the log, which rank 0 writes. Collective."""
    from megatron.observability.metrics import MetricsLog
    from megatron.options.progress import tokens_of_run
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.runtime import accelerator

    of_data = partial(task.data.consumed_tokens, dataset)
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


def check_deepspeed(config: Config) -> dict[str, Any]:
    """Return DeepSpeed's settings. Raises ConfigError for a JSON that is missing or contradicts the config."""
    from megatron.training.deepspeed.config import deepspeed_config

    return deepspeed_config(config, Layout.of(config.parallel, int(os.environ.get("WORLD_SIZE", "1"))))


def announce(ctx: ParallelContext, text: str) -> None:
    """Print a line on rank 0."""
    if ctx.rank == 0:
        print(text, flush=True)


def start(signals: Signals) -> int:
    """Run `main`, print the user's faults as messages without traceback, and return the exit status."""
    try:
        adopt_mpi_variables()
        defer_backends()
        main(sys.argv[1:], signals)
    except ConfigError as error:
        # equal on every rank, so one of them prints it
        if os.environ.get("RANK", "0") == "0":
            print_error(str(error))
        return REFUSED
    except Exception as error:
        from megatron.resilience.errors import USER_FAULTS, PeerLostError, TrainingAborted, exit_status, message_of

        rank = os.environ.get("RANK", "0")
        if isinstance(error, TrainingAborted):
            if rank == "0":  # equal on every rank
                print_error(f"training aborted: {error}")
        elif isinstance(error, PeerLostError):
            print_error(str(error))
        elif isinstance(error, USER_FAULTS):
            print_error(f"rank {rank}: {message_of(error)}")
        else:
            print_error(traceback.format_exc().rstrip())
        return exit_status(error)
    return DONE


def preload() -> None:
    """Import what the ranks of a run on a CPU need, before they are forked."""
    import numpy.ma  # noqa: F401  # numpy imports it late

    import megatron.data.tokenizers.build
    import megatron.models.families.bloom
    import megatron.models.families.llama
    import megatron.models.transformer
    import megatron.observability.run_folder
    import megatron.tasks.pretrain
    import megatron.training.build
    import megatron.training.loop
    import megatron.training.start  # noqa: F401


def process() -> NoReturn:
    """Run the process of a rank: the command `megatron-train`."""
    # from the first, since importing torch may take longer than a signal leaves, to the end of the process: a signal
    # that comes when the work is done changes no status
    with Signals() as signals:
        leave(start(signals))


if __name__ == "__main__":
    process()
