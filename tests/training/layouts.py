"""A few steps of a tiny model on any layout: what the parity tests compare. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config import check, parse_arguments
from megatron.parallel.context import ParallelContext
from megatron.tasks.pretrain import PretrainTask
from megatron.training.engine import Engine, build_engine

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
    task = PretrainTask(config.data, EOD)
    engine = build_engine(
        config, ctx, task.loss(ctx), masks_loss=task.masks_loss, global_batch_size=config.training.global_batch_size
    )
    return engine, task


def step_batches(engine: Engine, task: PretrainTask, step: int) -> list[Any]:
    """This rank's microbatches of random, learnable tokens; the same global batch on every layout."""
    training, ctx = engine.config.training, engine.ctx
    generator = np.random.default_rng(step)
    start = generator.integers(0, 250, (training.global_batch_size, 1))
    tokens = (start + np.arange(training.seq_length + 1) * 3) % 250
    noise = generator.random(tokens.shape) < 0.2
    tokens = np.where(noise, generator.integers(0, 250, tokens.shape), tokens).astype(np.int64)
    tokens[generator.random(tokens.shape) < 0.05] = EOD
    size = training.micro_batch_size
    rows = range(ctx.data_rank * size, training.global_batch_size, size * ctx.data_size)
    return [task.collate(tokens[row : row + size]) for row in rows] if engine.reads_data else []


def train(arguments: str, steps: int) -> dict[str, Any]:
    """Losses and gradient norms of `steps` steps, then the validation loss."""
    engine, task = build(arguments)
    training = engine.config.training
    losses, norms = [], []
    for step in range(steps):
        result = engine.train_step(
            step_batches(engine, task, step),
            global_batch_size=training.global_batch_size,
            consumed_samples=step * training.global_batch_size,
            lr=engine.config.optimizer.lr,
        )
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    held_out = step_batches(engine, task, 10_000)
    count = training.global_batch_size // training.micro_batch_size // engine.ctx.data_size
    return {"losses": losses, "norms": norms, "validation": float(engine.evaluate(held_out, count)[0])}
