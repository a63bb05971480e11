"""Train a model: `python -m megatron.train --config tiny_bloom --data-path PREFIX`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: 0 trained or stopped as wanted, 2 a fault of the user's (message on stderr), 1 anything else.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from megatron.command_line import load_config, to_yaml
from megatron.config import Config, ConfigError

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext


def main(arguments: list[str]) -> None:
    config = load_config(arguments)  # every fault at once, before torch is imported
    check_deepspeed(config)

    import torch.distributed as dist

    from megatron import accelerator

    device = accelerator.choose_device(config.parallel.device)  # before anything imports deepspeed
    accelerator.check_precision(device, config.training.precision)
    if config.training.deterministic:
        accelerator.set_deterministic(device)

    from megatron.parallel.context import ParallelContext
    from megatron.training.faults import together

    ctx = ParallelContext.build(config.parallel, device)
    try:
        run(config, ctx)
        together(ctx, lambda: None)  # no rank leaves while another still needs it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(config: Config, ctx: ParallelContext) -> None:
    """Build everything, restore what was saved, and train. Collective."""
    from megatron import accelerator
    from megatron.tasks.registry import TASKS
    from megatron.training.engine import build_engine
    from megatron.training.faults import together
    from megatron.training.loop import train
    from megatron.training.metrics import MetricsLog
    from megatron.training.progress import Progress, find_checkpoint, read_progress
    from megatron.training.schedule import global_batch_size, total_iterations
    from megatron.training.stop import StopDecision

    training, data = config.training, config.data
    with StopDecision(training, broadcast=ctx.broadcast, decides=ctx.rank == 0) as stop:
        if reason := stop.before_start():
            announce(ctx, reason)
            return
        checkpoint = together(ctx, lambda: find_checkpoint(config.checkpoint.load))
        progress, saved_data = Progress(), ""
        if checkpoint is not None:
            progress, saved_data = together(ctx, lambda: read_progress(checkpoint, config, ctx))
        datasets = together(ctx, lambda: open_data(config))
        fingerprint = datasets[0].fingerprint
        task = TASKS[training.task](data, together(ctx, lambda: end_of_document(config)))
        engine = build_engine(
            config,
            ctx,
            task.loss(ctx),
            masks_loss=task.masks_loss,
            global_batch_size=global_batch_size(training, progress.consumed_samples),
        )
        if checkpoint is not None:
            engine.load(str(checkpoint.parent), checkpoint.name)
            announce(ctx, f"resumed {checkpoint}: iteration {progress.iteration}, {progress.consumed_samples} samples")
            if saved_data != fingerprint:
                announce(ctx, "WARNING: the data, or its split, differs from what this run was saved with")
        write_config(config, ctx)
        with MetricsLog(
            config,
            writes=ctx.rank == 0,
            world_size=ctx.world_size,
            device_peak_tflops=accelerator.peak_tflops(),
            total_iterations=total_iterations(training),
            resumed_iteration=progress.iteration,
        ) as log:
            train(engine, task, datasets, fingerprint, progress, log, stop)


def open_data(config: Config) -> tuple[Any, Any, Any]:
    """Training, validation and test samples; the last two None where the config leaves none. Raises DataError."""
    from megatron.data.gpt import build_datasets
    from megatron.data.indexed import DataError
    from megatron.training.schedule import total_samples

    training, data = config.training, config.data
    eval_samples = data.eval_iters * training.global_batch_size
    datasets = build_datasets(
        data,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples=(total_samples(training), eval_samples, eval_samples),
        vocab_size=config.model.vocab_size,
    )
    if datasets[0] is None:
        raise DataError(f"split={data.split} leaves no documents to train on; raise its first share")
    datasets[0][0]  # a dataset of another tokenizer's ids fails here, before anything is built or written
    return datasets


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
        data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file, config.model.vocab_size
    )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model vocab_size={config.model.vocab_size}; "
            f"set vocab_size to {tokenizer.vocab_size} or more"
        )
    needs = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    if needs and tokenizer.eod is None:
        raise DataError(f"tokenizer_type={data.tokenizer_type} has no end-of-document token; give eod_token_id")
    return tokenizer.eod


def write_config(config: Config, ctx: ParallelContext) -> None:
    """Leave the resolved config in the results folder."""
    folder = config.logging.results_dir
    if ctx.rank == 0 and folder is not None:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.yaml"), "w", encoding="utf-8") as file:
            file.write(to_yaml(config))


def announce(ctx: ParallelContext, text: str) -> None:
    if ctx.rank == 0:
        print(text, flush=True)


def start() -> int:
    """`main` with the user's faults as messages instead of tracebacks; the process's exit status."""
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        # equal on every rank, so one of them speaks
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return 2
    except Exception as error:
        from megatron.training.faults import USER_FAULTS

        if not isinstance(error, USER_FAULTS):
            raise
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    return 0


def leave(status: int) -> None:
    """End the process here, without Python's own finalization.

    gloo's threads release the tensors of the last collective after it has returned. One that does so while the
    interpreter is being torn down aborts the process: status 134 after a run that went well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(start())
