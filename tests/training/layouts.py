"""A few steps of a tiny model on any layout: what the parity tests compare. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron.checkpoint.reader import newest_checkpoint
from megatron.options.progress import Progress
from megatron.options.schedule import Schedule
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.tasks.pretrain import PretrainTask
from megatron.training.build import build_engine
from megatron.training.checkpoints import Checkpoints
from megatron.training.engine import Engine
from megatron.training.resume import read_progress, restore
from megatron.weights.loader import find_checkpoint

EOD = 7

MODELS = {
    "bloom_learned": "--architecture bloom --position-embedding-type learned",
    "bloom_alibi": "--architecture bloom --position-embedding-type alibi --embed-layernorm --num-attention-heads 12 "
    "--hidden-size 48",
    "llama_mha": "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights",
    "llama_gqa": "--architecture llama --position-embedding-type rope --num-query-groups 2 "
    "--untie-embeddings-and-output-weights",
    "llama_gqa_tied": "--architecture llama --position-embedding-type rope --num-query-groups 2",
}
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 250 --make-vocab-size-divisible-by 16 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 1000 --data-path none --hidden-dropout 0 "
    "--attention-dropout 0 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1 --device cpu"
)


def build(arguments: str) -> tuple[Engine, PretrainTask]:
    config, _ = parse_arguments([*COMMON.split(), *arguments.split()])
    ctx = ParallelContext.build(config.parallel, "cpu")
    faults = check(config, ctx.world_size)
    assert not faults, faults
    task = PretrainTask(config)
    return build_engine(config, ctx, task), task


def num_microbatches(engine: Engine, samples: int | None = None) -> int:
    """Of each rank, in a step of so many samples."""
    training = engine.config.training
    return (samples or training.global_batch_size) // (training.micro_batch_size * engine.ctx.num_batch_ranks)


def step_tokens(step: int, samples: int, seq_length: int) -> np.ndarray:
    """Random, learnable tokens [samples, seq_length + 1]."""
    generator = np.random.default_rng(step)
    start = generator.integers(0, 250, (samples, 1))
    tokens = (start + np.arange(seq_length + 1) * 3) % 250
    noise = generator.random(tokens.shape) < 0.2
    tokens = np.where(noise, generator.integers(0, 250, tokens.shape), tokens).astype(np.int64)
    tokens[generator.random(tokens.shape) < 0.05] = EOD
    return tokens


def step_batches(engine: Engine, task: PretrainTask, step: int, samples: int | None = None) -> list[Any]:
    """This rank's microbatches of a step; the same global batch on every layout."""
    training, ctx = engine.config.training, engine.ctx
    samples = samples or training.global_batch_size
    tokens = step_tokens(step, samples, training.seq_length)
    size = training.micro_batch_size
    rows = range(ctx.batch_rank * size, samples, size * ctx.num_batch_ranks)
    return [task.data.collate(tokens[row : row + size]) for row in rows] if engine.reads_data else []


HELD_OUT = 10_000


def evaluate_loaded(arguments: str, load: str) -> float:
    """The held-out loss of the weights in `load`."""
    engine, task = build(f"{arguments} --load {load} --finetune")
    resume(engine)
    return _evaluate(engine, task)


def train(
    arguments: str, steps: int, build: Callable[[str], tuple[Engine, PretrainTask]] = build, *, first: str = ""
) -> dict[str, Any]:
    """Losses and gradient norms of `steps` steps, then the validation loss. The state after one is saved in `first`."""
    engine, task = build(f"{arguments} --save {first}" if first else arguments)
    training = engine.config.training
    schedule = Schedule(training, engine.config.optimizer)
    losses, norms, scales = [], [], []
    for step in range(steps):
        consumed_samples = step * training.global_batch_size
        result = engine.train_step(
            step_batches(engine, task, step),
            num_microbatches=num_microbatches(engine),
            consumed_samples=consumed_samples,
            lr=engine.config.optimizer.lr,
            weight_decay=schedule.weight_decay(consumed_samples),
        )
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        scales.append(engine.loss_scale)
        if first and step == 0:
            save(engine, 1)
    return {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "skipped": engine.deepspeed.skipped_steps,
        "validation": _evaluate(engine, task),
    }


def train_compiled(arguments: str, steps: int, backend: str) -> dict[str, Any]:
    """`train` with the operators compiled by this backend of torch.compile, and the number of graphs as `graphs`."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch._dynamo.utils import counters

    # after eight shapes of other runs it would compute as it is written
    torch._dynamo.reset()
    counters.clear()
    with patch.object(get_accelerator(), "get_compile_backend", lambda: backend):
        result = train(f"{arguments} --kernels fused", steps)
    return result | {"graphs": counters["stats"]["unique_graphs"]}


def text_of(path: str) -> np.ndarray:
    """Tokens of a file, one a byte."""
    return np.frombuffer(Path(path).read_bytes(), dtype=np.uint8).astype(np.int64)


def stretches(text: np.ndarray, step: int, samples: int, seq_length: int) -> np.ndarray:
    """Tokens [samples, seq_length + 1] of a step, from random places."""
    starts = np.random.default_rng(step).integers(0, len(text) - seq_length, samples)
    return np.stack([text[start : start + seq_length + 1] for start in starts])


def train_on_text(arguments: str, steps: int, path: str) -> list[float]:
    """Losses of steps over random stretches of a file."""
    engine, task = build(f"{arguments} --vocab-size 256")
    training, text, losses = engine.config.training, text_of(path), []
    for step in range(steps):
        tokens = stretches(text, step, training.global_batch_size, training.seq_length)
        result = engine.train_step(
            [task.data.collate(rows) for rows in np.split(tokens, num_microbatches(engine))],
            consumed_samples=step * training.global_batch_size,
            lr=engine.config.optimizer.lr,
        )
        losses.append(float(result.loss))
    return losses


def train_in_chunks(arguments: str, steps: int, chunk_tokens: int) -> tuple[dict[str, Any], int]:
    """`train` with a loss in chunks of so many tokens, and how often it adds to the optimizer's gradients itself."""
    from megatron.training.deepspeed.reduction import BufferedSum

    with (
        patch("megatron.parallel.operators.block_sizes.least_tokens", lambda _: chunk_tokens),
        patch.object(BufferedSum, "open", autospec=True, side_effect=BufferedSum.open) as opened,
    ):
        return train(arguments, steps), opened.call_count


def train_fp16(arguments: str, steps: int) -> dict[str, Any]:
    """`train` in float16, which torch computes on any CPU, though DeepSpeed allows it on few."""
    with allows_fp16():
        return train(f"{arguments} --fp16", steps)


def run_fp16(arguments: str) -> str:
    """Return the fault of a whole run in float16."""
    from tests import runs

    with allows_fp16():
        return runs.train(f"{arguments} --fp16")


@contextlib.contextmanager
def allows_fp16() -> Iterator[None]:
    """Let DeepSpeed train in float16 on any CPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    with (
        patch.object(get_accelerator(), "is_fp16_supported", lambda: True),
        patch.object(get_accelerator(), "supported_dtypes", lambda: dtypes),
    ):
        yield


def gradient_sums(arguments: list[str]) -> list[tuple[dict[str, list[str]], float]]:
    """Of each of these runs: the dtypes in which its second step sums gradients over ranks, by the kind of the sum, and
    the norm of its first step's gradient."""
    import torch.distributed as dist

    sums: list[tuple[Any, Any]] = []  # group and tensor of each

    def recording(collective: Any, place: int) -> Any:
        def call(*tensors: Any, **named: Any) -> Any:
            sums.append((named.get("group"), [*tensors, *named.values()][place]))
            return collective(*tensors, **named)

        return call

    found = []
    with contextlib.ExitStack() as patches:
        # reduce_scatter_tensor(output, input). DeepSpeed looks it up once, so all runs share the patch
        for name, place in {"all_reduce": 0, "reduce": 0, "reduce_scatter_tensor": 1}.items():
            patches.enter_context(patch.object(dist, name, recording(getattr(dist, name), place)))
        patches.enter_context(allows_fp16())
        for flags in arguments:
            engine, task = build(flags)
            loss_of_step(engine, task, 0)
            norm = float(engine.deepspeed.get_global_grad_norm())
            sums.clear()
            loss_of_step(engine, task, 1)
            found.append((_dtypes_by_kind(engine, sums), norm))
    return found


def _dtypes_by_kind(engine: Engine, sums: list[tuple[Any, Any]]) -> dict[str, list[str]]:
    import torch.distributed as dist

    ctx, width = engine.ctx, engine.config.model.hidden_size
    module: Any = engine.module
    kinds = {"data": ctx.grad_group, "tensor": ctx.tensor_group}
    if ctx.num_stages > 1:
        kinds["tied"] = module.get_tied_weights_and_groups()[0][1]
    # DeepSpeed's pipeline makes groups of its own
    kind_of = {tuple(dist.get_process_group_ranks(group)): kind for kind, group in kinds.items() if group is not None}
    dtypes: dict[str, set[str]] = {}
    for group, tensor in sums:
        kind = kind_of.get(tuple(dist.get_process_group_ranks(group)))
        # norms' gradients under sequence parallelism; otherwise anything but a few losses, norms and flags
        if kind is not None and (tensor.shape == (width,) if kind == "tensor" else tensor.numel() >= width):
            dtypes.setdefault(kind, set()).add(str(tensor.dtype).removeprefix("torch."))
    return {kind: sorted(names) for kind, names in dtypes.items()}


def calls_marked(arguments: str, steps: int) -> list[str]:
    """Names of the functions after which HPU's lazy mode would launch what they recorded, call by call."""
    calls: list[str] = []

    def marked(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            calls.append(function.__name__)
            return result

        return call

    with (
        patch("megatron.training.deepspeed.pipeline_engine.marked", marked),
        patch("megatron.training.engine.marked", marked),
    ):
        engine, task = build(arguments)
        for step in range(steps):
            loss_of_step(engine, task, step)
    return calls


def train_sizes(arguments: str, sizes: list[int]) -> list[float]:
    """Losses of steps whose global batches have these sizes."""
    engine, task = build(arguments)
    losses, consumed = [], 0
    for step, size in enumerate(sizes):
        result = engine.train_step(
            step_batches(engine, task, step, size),
            num_microbatches=num_microbatches(engine, size),
            consumed_samples=consumed,
            lr=1e-3,
        )
        losses.append(float(result.loss))
        consumed += size
    return losses


def save(engine: Engine, step: int) -> None:
    """A checkpoint of `engine` after `step` steps, durable when this returns on every rank."""
    size = engine.config.training.global_batch_size
    with Checkpoints(engine.config, engine.ctx) as checkpoints:
        checkpoints.reserve(engine)
        checkpoints.save(engine, Progress(iteration=step, consumed_samples=step * size), "data")
        checkpoints.finish(lambda _: None)


def resume(engine: Engine) -> int:
    """Restore the newest checkpoint of the config's `load`; the step to go on with."""
    checkpoint = find_checkpoint(engine.config, engine.ctx)
    assert checkpoint is not None
    progress, _ = read_progress(checkpoint, engine.config.checkpoint)
    restore(engine, checkpoint, progress)
    engine.state.finish_restore()
    return progress.iteration


def train_interrupted(arguments: str, stop_after: int, steps: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a whole run, which saves after `stop_after` steps, and those of a new engine that resumes there."""
    arguments = f"{arguments} --save {folder} --load {folder}"
    engine, task = build(arguments)
    whole = []
    for step in range(steps):
        if step == stop_after:
            save(engine, step)
        whole.append(loss_of_step(engine, task, step))
    engine, task = build(arguments)
    assert resume(engine) == stop_after
    return whole, [loss_of_step(engine, task, step) for step in range(stop_after, steps)]


def train_then_save(arguments: str, steps: int, folder: str) -> float:
    """Save after `steps` steps; the loss of the next."""
    engine, task = build(f"{arguments} --save {folder}")
    for step in range(steps):
        loss_of_step(engine, task, step)
    save(engine, steps)
    return loss_of_step(engine, task, steps)


def resume_then_save(arguments: str, load: str, folder: str) -> float:
    """Resume, save at once what was restored, and go on by a step; its loss."""
    engine, task = build(f"{arguments} --load {load} --save {folder}")
    step = resume(engine)
    save(engine, step)
    return loss_of_step(engine, task, step)


def check_against(arguments: str, load: str) -> None:
    """Compare names and shapes of an engine's parameters with the newest checkpoint, whatever its options."""
    engine, _ = build(arguments)
    checkpoint = newest_checkpoint(load)
    assert checkpoint is not None
    engine.state.check_model(checkpoint, with_optimizer=True)


def drift_then_save(arguments: str, folder: str, rank: int, name: str) -> None:
    """Move one number of a parameter on one rank alone, then save."""
    import torch

    from megatron.parallel.shards import named_parameters

    engine, _ = build(f"{arguments} --save {folder} --verify-checkpoint")
    if engine.ctx.rank == rank:
        with torch.no_grad():
            dict(named_parameters(engine.module))[name].view(-1)[0] += 1e-3
    save(engine, 1)


def save_onto_a_full_disk(arguments: str, folder: str, gets_better: bool = True) -> list[str]:
    """What is reported of a save that fails twice on rank 1, followed by one that works or by the end."""
    import errno
    import os

    engine, _ = build(f"{arguments} --save {folder}")
    sync, left = os.fsync, 2 if engine.ctx.rank == 1 else 0

    def full_at_first(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    lines: list[str] = []
    with patch("os.fsync", full_at_first), Checkpoints(engine.config, engine.ctx) as checkpoints:
        checkpoints.save(engine, Progress(iteration=1, consumed_samples=8), "data")
        if gets_better:
            while not lines:
                lines += checkpoints.report()
            checkpoints.save(engine, Progress(iteration=2, consumed_samples=16), "data")
        checkpoints.finish(lines.append)
    return lines


def _evaluate(engine: Engine, task: PretrainTask) -> float:
    """The held-out loss."""
    return float(engine.evaluate(step_batches(engine, task, HELD_OUT), num_microbatches(engine)).loss)


def loss_of_step(engine: Engine, task: PretrainTask, step: int) -> float:
    size = engine.config.training.global_batch_size
    result = engine.train_step(
        step_batches(engine, task, step),
        num_microbatches=num_microbatches(engine),
        consumed_samples=step * size,
        lr=1e-3,
    )
    return float(result.loss)


def train_schedules(arguments: str, schedules: list[str], steps: int) -> list[dict[str, Any]]:
    """`train` for each of these schedules, with a digest of the rank's final weights by name."""
    import hashlib

    from megatron.parallel.shards import named_parameters

    found = []
    for schedule in schedules:
        built: list[Engine] = []

        def remembered(flags: str, built: list[Engine] = built) -> tuple[Engine, PretrainTask]:
            engine, task = build(flags)
            built.append(engine)
            return engine, task

        result = train(f"{arguments} {schedule}", steps, build=remembered)
        (engine,) = built
        weights = {
            name: hashlib.sha256(parameter.detach().float().numpy().tobytes()).hexdigest()
            for name, parameter in named_parameters(engine.module)
        }
        found.append(result | {"weights": weights, "tensor_rank": engine.ctx.tensor_rank})
    return found
