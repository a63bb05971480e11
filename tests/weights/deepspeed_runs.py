"""Tiny runs that save and resume with DeepSpeed's own checkpoints. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format import Fragment
from megatron.checkpoint.saver import Saver
from megatron.parallel.shards import Shard, named_parameters, shard_of
from megatron.training.engine import Engine
from megatron.weights.deepspeed.universal import universal_info
from tests.training import layouts

TAG = "global_step2"
STEPS = 2


@dataclass(frozen=True)
class Run:
    """Results of one rank."""

    state: list[Fragment]
    """Weights and moments that it owns."""
    next_loss: float


def save_deepspeed(arguments: str, folder: str) -> Run:
    """Two steps, DeepSpeed's own checkpoint, and one more step."""
    engine, task = layouts.build(arguments)
    for step in range(STEPS):
        loss_of_step(engine, task, step)
    shards = {name: shard_of(parameter) for name, parameter in named_parameters(engine.module)}
    engine.deepspeed.save_checkpoint(
        folder,
        tag=TAG,
        client_state={
            "iteration": STEPS,
            "universal_checkpoint_info": universal_info(_whole_model(engine, shards), engine.ctx.tensor_size),
        },
    )
    return Run(state_of(engine), loss_of_step(engine, task, STEPS))


def save_native(arguments: str, folder: str) -> Run:
    """Two steps, our own checkpoint, and one more step."""
    engine, task = layouts.build(arguments)
    for step in range(STEPS):
        loss_of_step(engine, task, step)
    ctx = engine.ctx
    saver = Saver(
        Path(folder),
        rank=ctx.rank,
        world_size=ctx.world_size,
        asynchronous=False,
        keep_last=None,
        retain_interval=None,
        timeout_s=60.0,
    )
    metadata = {
        "progress": {"iteration": STEPS, "consumed_samples": 16},
        "config": engine.config.to_dict(),
        "optimizer": engine.state.scalars(),
    }
    saver.save(TAG, f"{ctx.broadcast(7):x}", engine.state.fragments(with_optimizer=True), metadata)
    return Run(state_of(engine), loss_of_step(engine, task, STEPS))


def resume_universal(arguments: str, folder: str, tag: str) -> Run:
    """Load a universal folder with DeepSpeed's own loader, and make one step. `arguments` name its JSON."""
    engine, task = layouts.build(arguments)
    with torch.no_grad():
        path, client = engine.deepspeed.load_checkpoint(folder, tag=tag)
    assert path is not None
    assert client["iteration"] == STEPS
    return Run(state_of(engine), loss_of_step(engine, task, STEPS))


def loss_of_step(engine: Engine, task: Any, step: int) -> float:
    size = engine.config.training.global_batch_size
    batches = layouts.step_batches(engine, task, step)
    result = engine.train_step(
        batches, num_microbatches=layouts.num_microbatches(engine), consumed_samples=step * size, lr=1e-3
    )
    return float(result.loss)


def state_of(engine: Engine) -> list[Fragment]:
    owned = engine.state.fragments(with_optimizer=True)
    return [replace(fragment, tensor=fragment.tensor.clone()) for fragment in owned]  # the next step changes them


def _whole_model(engine: Engine, own: dict[str, Shard]) -> dict[str, Shard]:
    """The shards of every stage: each rank knows its own."""
    gathered: list[Any] = [None] * engine.ctx.world_size
    if engine.ctx.world_size == 1:
        return own
    torch.distributed.all_gather_object(gathered, own)
    return {name: shard for shards in gathered for name, shard in shards.items()}
