"""Train a model: `python -m megatron.train --config tiny_bloom --data-path PREFIX`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: megatron/exit_codes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.config.command_line import load_config
from megatron.config.options import Config, ConfigError
from megatron.exit_codes import DONE, REFUSED
from megatron.observability.wandb_log import check_wandb
from megatron.resilience.shutdown import Signals

if TYPE_CHECKING:
    from megatron.observability.metrics import MetricsLog
    from megatron.parallel.context import ParallelContext
    from megatron.planning.schedule import Schedule
    from megatron.resilience.watchdog import Watchdog
    from megatron.tasks.task import Task
    from megatron.training.progress import Progress


def main(arguments: list[str], signals: Signals) -> None:
    config = load_config(arguments)  # every fault at once, before torch is imported
    check_deepspeed(config)
    check_wandb(config)

    import torch.distributed as dist

    from megatron import accelerator

    device = accelerator.choose_device(config.parallel.device)  # before anything imports deepspeed
    accelerator.check_precision(device, config.training.precision)
    if config.training.deterministic:
        accelerator.set_deterministic(device)

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
            to_tell = watchdog.fail(error)
            if to_tell is not error:
                raise to_tell from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def run(config: Config, ctx: ParallelContext, signals: Signals | None = None, watchdog: Watchdog | None = None) -> None:
    """Build everything, restore what was saved, and train. Collective.

    `signals`: those that ask for a stop, as noted since the process began; None: noted from here on. `watchdog`: which
    is told what the run is at; None: nobody watches.
    """
    from megatron.observability.memory import MemoryLog
    from megatron.observability.run_folder import RunFolder
    from megatron.planning.schedule import Schedule
    from megatron.resilience.errors import raise_on_all_ranks
    from megatron.resilience.host_consistency import check_same_config, check_same_data
    from megatron.resilience.shutdown import Shutdown
    from megatron.resilience.watchdog import Watchdog
    from megatron.tasks.registry import TASKS
    from megatron.training.checkpoints import Checkpoints, find_checkpoint, read_progress, restore, starting_options
    from megatron.training.engine import build_engine
    from megatron.training.loop import Loop
    from megatron.training.progress import Progress, check_data

    training = config.training
    watchdog = watchdog or Watchdog(config)  # one that nobody has started
    check_same_config(ctx, config)
    with Shutdown(training, ctx, signals) as shutdown:
        shutdown.exit_if_requested()
        watchdog.phase("reading the checkpoint")
        start = starting_options(config.checkpoint, ctx)
        checkpoint = find_checkpoint(dataclasses.replace(config, checkpoint=start), ctx)
        shutdown.exit_if_requested()
        progress, saved_data = Progress(), None
        if checkpoint is not None:
            progress, saved_data = raise_on_all_ranks(ctx, lambda: read_progress(checkpoint, start))
        watchdog.phase("opening the data")
        task = raise_on_all_ranks(ctx, lambda: TASKS[training.task](config, ctx))
        datasets = raise_on_all_ranks(ctx, task.open_data)
        shutdown.exit_if_requested()
        check_same_data(ctx, config, datasets)
        fingerprint = datasets[0].fingerprint
        if saved_data is not None and (
            change := raise_on_all_ranks(ctx, lambda: check_data(saved_data, config, fingerprint))
        ):
            announce(ctx, f"allow_data_change: {change}")
        schedule = Schedule(training, config.optimizer, task.samples_per_epoch(datasets[0]))
        if (described := raise_on_all_ranks(ctx, lambda: task.describe(datasets[0]))) is not None:
            announce(ctx, described)
        memory = MemoryLog(config.logging.log_memory_interval, ctx)
        memory.take("before_model", progress.iteration)
        watchdog.phase("building the model")
        engine = build_engine(
            config,
            ctx,
            task.loss(ctx),
            masks_loss=task.masks_loss,
            will_restore=checkpoint is not None,
            after_model=lambda: memory.take("after_model", progress.iteration),
        )
        memory.take("after_optimizer", progress.iteration)
        shutdown.exit_if_requested()
        if checkpoint is not None:
            watchdog.phase("restoring")
            restored = raise_on_all_ranks(ctx, lambda: restore(engine, checkpoint, progress, start))
            announce(ctx, f"{restored}; iteration {progress.iteration}, {progress.consumed_samples} samples")
            memory.take("after_restore", progress.iteration)
        shutdown.exit_if_requested()
        watchdog.open()
        # opened late: nothing is written before the data and what is resumed were found good
        beat = partial(watchdog.beat_of, "save")
        source = None if checkpoint is None else checkpoint.metadata.get("source")
        saves = config.checkpoint.save is not None
        saving = Checkpoints(config, ctx, beat, source) if saves else contextlib.nullcontext()
        with (
            saving as checkpoints,
            raise_on_all_ranks(ctx, lambda: open_log(config, ctx, progress, schedule, task, datasets[0])) as log,
            RunFolder(config, ctx, log, progress) as folder,
        ):
            memory.open(log)
            Loop(engine, task, datasets, schedule, progress, log, shutdown, checkpoints, memory, watchdog).train()
            folder.stopped = shutdown.reason


def open_log(
    config: Config, ctx: ParallelContext, progress: Progress, schedule: Schedule, task: Task, dataset: Any
) -> MetricsLog:
    """What this rank tells from here on."""
    from megatron import accelerator
    from megatron.observability.metrics import MetricsLog

    return MetricsLog(
        config,
        writes=ctx.rank == 0,
        world_size=ctx.world_size,
        device_peak_tflops=accelerator.peak_tflops(),
        total_iterations=schedule.total_iterations,
        tokens=partial(task.consumed_tokens, dataset),
        resumed_iteration=progress.iteration,
    )


def check_deepspeed(config: Config) -> None:
    """Raise ConfigError for a DeepSpeed JSON that cannot be, before any rank joins the others."""
    from megatron.training.deepspeed_config import deepspeed_config

    model_ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    data_size = int(os.environ.get("WORLD_SIZE", "1")) // model_ranks
    deepspeed_config(config, data_size)


def announce(ctx: ParallelContext, text: str) -> None:
    if ctx.rank == 0:
        print(text, flush=True)


def start() -> int:
    """`main` with the user's faults as messages instead of tracebacks; the process's exit status."""
    try:
        with Signals() as signals:  # first, since importing torch may take longer than a signal leaves
            main(sys.argv[1:], signals)
    except ConfigError as error:
        # equal on every rank, so one of them speaks
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return REFUSED
    except Exception as error:
        from megatron.resilience.errors import USER_FAULTS, PeerLostError, TrainingAborted, exit_status

        rank = os.environ.get("RANK", "0")
        if isinstance(error, TrainingAborted):
            if rank == "0":  # equal on every rank
                tell(f"training aborted: {error}")
        elif isinstance(error, PeerLostError):
            tell(str(error))
        elif isinstance(error, USER_FAULTS):
            tell(f"rank {rank}: {error}")
        else:
            tell(traceback.format_exc().rstrip())
        return exit_status(error)
    return DONE


def tell(text: str) -> None:
    """On stderr, where that can be: on a full disk the exit status must still tell."""
    with contextlib.suppress(OSError):
        if text:
            print(text, file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """End the process here, without Python's own finalization.

    gloo's threads release the tensors of the last collective after it has returned. One that does so while the
    interpreter is being torn down aborts the process: status 134 after a run that went well.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, a reader that left
            stream.flush()
    os._exit(status)


def process() -> NoReturn:
    """Run the process of a rank: the command `megatron-train`."""
    leave(start())


if __name__ == "__main__":
    process()
