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
from typing import TYPE_CHECKING, Any

from megatron.command_line import load_config
from megatron.config import Config, ConfigError
from megatron.exit_codes import DONE, REFUSED
from megatron.training.stop import Signals
from megatron.training.wandb_log import check_wandb

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext
    from megatron.training.metrics import MetricsLog
    from megatron.training.progress import Progress
    from megatron.training.watchdog import Watchdog


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
    from megatron.training.faults import together
    from megatron.training.watchdog import Watchdog

    with Watchdog(config) as watchdog:
        try:
            watchdog.phase("joining the other ranks")
            ctx = ParallelContext.build(config.parallel, device)
            watchdog.connect(ctx)
            run(config, ctx, signals, watchdog)
            watchdog.phase("end", watchdog.step)
            together(ctx, lambda: None)  # no rank leaves while another still needs it
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
    from megatron.tasks.registry import TASKS
    from megatron.training.checkpoints import Checkpoints, find_checkpoint, read_progress, restore, starting_options
    from megatron.training.engine import build_engine
    from megatron.training.faults import together
    from megatron.training.loop import Loop
    from megatron.training.memory import MemoryLog
    from megatron.training.progress import Progress, check_data
    from megatron.training.run_folder import RunFolder
    from megatron.training.schedule import global_batch_size
    from megatron.training.sharing import check_same_config, check_same_data
    from megatron.training.stop import StopDecision
    from megatron.training.watchdog import Watchdog

    training, data = config.training, config.data
    watchdog = watchdog or Watchdog(config)  # one that nobody has started
    check_same_config(ctx, config)
    with StopDecision(training, ctx, signals) as stop:
        stop.leave_if_asked()
        watchdog.phase("reading the checkpoint")
        start = starting_options(config.checkpoint, ctx)
        checkpoint = find_checkpoint(dataclasses.replace(config, checkpoint=start), ctx)
        stop.leave_if_asked()
        progress, saved_data = Progress(), None
        if checkpoint is not None:
            progress, saved_data = together(ctx, lambda: read_progress(checkpoint, start))
        watchdog.phase("opening the data")
        datasets = together(ctx, lambda: open_data(config))
        stop.leave_if_asked()
        check_same_data(ctx, config, datasets)
        fingerprint = datasets[0].fingerprint
        if saved_data is not None and (change := together(ctx, lambda: check_data(saved_data, config, fingerprint))):
            announce(ctx, f"allow_data_change: {change}")
        task = TASKS[training.task](data, together(ctx, lambda: end_of_document(config)))
        memory = MemoryLog(config.logging.log_memory_interval, ctx)
        memory.take("before_model", progress.iteration)
        watchdog.phase("building the model")
        engine = build_engine(
            config,
            ctx,
            task.loss(ctx),
            masks_loss=task.masks_loss,
            global_batch_size=global_batch_size(training, progress.consumed_samples),
            will_restore=checkpoint is not None,
            after_model=lambda: memory.take("after_model", progress.iteration),
        )
        memory.take("after_optimizer", progress.iteration)
        stop.leave_if_asked()
        if checkpoint is not None:
            watchdog.phase("restoring")
            restored = together(ctx, lambda: restore(engine, checkpoint, progress, start))
            announce(ctx, f"{restored}; iteration {progress.iteration}, {progress.consumed_samples} samples")
            memory.take("after_restore", progress.iteration)
        stop.leave_if_asked()
        watchdog.open()
        # opened late: nothing is written before the data and what is resumed were found good
        beat = partial(watchdog.beat_of, "save")
        source = None if checkpoint is None else checkpoint.metadata.get("source")
        saves = config.checkpoint.save is not None
        saving = Checkpoints(config, ctx, beat, source) if saves else contextlib.nullcontext()
        with (
            saving as checkpoints,
            together(ctx, lambda: open_log(config, ctx, progress)) as log,
            RunFolder(config, ctx, log, progress) as folder,
        ):
            memory.open(log)
            Loop(engine, task, datasets, fingerprint, progress, log, stop, checkpoints, memory, watchdog).train()
            folder.stopped = stop.reason


def open_log(config: Config, ctx: ParallelContext, progress: Progress) -> MetricsLog:
    """What this rank tells from here on."""
    from megatron import accelerator
    from megatron.training.metrics import MetricsLog
    from megatron.training.schedule import total_iterations

    return MetricsLog(
        config,
        writes=ctx.rank == 0,
        world_size=ctx.world_size,
        device_peak_tflops=accelerator.peak_tflops(),
        total_iterations=total_iterations(config.training),
        resumed_iteration=progress.iteration,
    )


def open_data(config: Config) -> tuple[Any, Any, Any]:
    """Training, validation and test samples; the last two None where the config leaves none. Raises DataError."""
    from megatron.data.gpt import build_datasets
    from megatron.data.indexed import DataError

    training, data, asked = config.training, config.data, samples_needed(config)
    datasets = build_datasets(
        data,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples=asked,
        vocab_size=config.model.vocab_size,
    )
    if datasets[0] is None:
        raise DataError(f"split={data.split} leaves no documents to train on; raise its first share")
    for dataset, (option, words), needed, length in zip(
        datasets, data.paths, asked, ("train_samples or train_iters", "eval_iters", "eval_iters"), strict=True
    ):
        if dataset is not None and len(dataset) < needed:
            raise DataError(
                f"{option}={' '.join(words)!r} has no weights, so it is read once: {len(dataset)} samples, but "
                f"{needed} are asked for; give weights, which repeat the data as needed, or lower {length}"
            )
    datasets[0][0]  # a dataset of another tokenizer's ids fails here, before anything is built or written
    return datasets


def samples_needed(config: Config) -> tuple[int, int, int]:
    """Samples that the run takes from its training, validation and test data."""
    from megatron.training.schedule import total_samples

    eval_samples = config.data.eval_iters * config.training.global_batch_size
    return total_samples(config.training), eval_samples, eval_samples


def check_deepspeed(config: Config) -> None:
    """Raise ConfigError for a DeepSpeed JSON that cannot be, before any rank joins the others."""
    from megatron.training.deepspeed_config import deepspeed_config

    model_ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    data_size = int(os.environ.get("WORLD_SIZE", "1")) // model_ranks
    deepspeed_config(config, data_size, config.training.global_batch_size)


def end_of_document(config: Config) -> int | None:
    """The id that ends a document, where the config needs one. Raises DataError if the tokenizer has none."""
    from megatron.data.indexed import DataError
    from megatron.data.tokenizer import build_tokenizer

    data = config.data
    if data.eod_token_id is not None or data.tokenizer_type is None:
        return data.eod_token_id
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        data.tokenizer_model,
        data.vocab_file,
        data.merge_file,
        config.model.vocab_size,
        eod_token=data.eod_token,
        tiktoken_pattern=data.tiktoken_pattern,
    )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model vocab_size={config.model.vocab_size}; "
            f"set vocab_size to {tokenizer.vocab_size} or more"
        )
    needs = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    if needs and tokenizer.eod is None:
        raise DataError(f"tokenizer_type={data.tokenizer_type} has no end-of-document token; give eod_token")
    return tokenizer.eod


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
        from megatron.training.faults import USER_FAULTS, GaveUp, PeerLostError, exit_status

        rank = os.environ.get("RANK", "0")
        if isinstance(error, GaveUp):
            if rank == "0":  # equal on every rank
                tell(f"gave up: {error}")
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


def leave(status: int) -> None:
    """End the process here, without Python's own finalization.

    gloo's threads release the tensors of the last collective after it has returned. One that does so while the
    interpreter is being torn down aborts the process: status 134 after a run that went well.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, a reader that left
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(start())
