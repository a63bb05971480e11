"""Runs with replicas of ZeRO's shards, inside the ranks of tests/ranks.py: what they learn, send and hold."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.resilience.errors import TrainingAborted
from megatron.resilience.replica_check import ReplicaCheck
from megatron.training.engine import Engine
from tests.training import layouts

SMALL = 16
"""Numbers of a collective that is a loss, a norm or a decision."""


@contextlib.contextmanager
def counting(engine: Engine) -> Iterator[Counter[str]]:
    """Count the numbers that sums over ranks take from this rank, by the group that sums."""
    ctx, counts = engine.ctx, Counter[str]()
    groups = {"within": ctx.shard_groups.within, "across": ctx.shard_groups.across, "all": ctx.grad_group}
    # by their ranks: a group of DeepSpeed's may have the same ones
    kinds = {tuple(dist.get_process_group_ranks(group)): kind for kind, group in groups.items() if group is not None}

    def counted(collective: Any, place: int) -> Any:
        def call(*tensors: Any, **named: Any) -> Any:
            tensor = [*tensors, *named.values()][place]
            ranks = tuple(dist.get_process_group_ranks(named.get("group") or dist.group.WORLD))
            if tensor.numel() > SMALL and ranks in kinds:
                counts[kinds[ranks]] += tensor.numel()
            return collective(*tensors, **named)

        return call

    with contextlib.ExitStack() as patches:
        for name in ("all_reduce", "reduce"):
            patches.enter_context(patch.object(dist, name, counted(getattr(dist, name), 0)))
        yield counts


def train_and_save(arguments: str, steps: int, folder: str) -> dict[str, Any]:
    """What `steps` steps learn, saved at their end, what the last of them sent, and what the rank holds."""
    with layouts.allows_fp16():
        engine, task = layouts.build(f"{arguments} --save {folder}")
        training, losses, norms, scales = engine.config.training, [], [], []
        for step in range(steps):
            with counting(engine) as counts:
                result = engine.train_step(
                    layouts.step_batches(engine, task, step),
                    num_microbatches=layouts.num_microbatches(engine),
                    consumed_samples=step * training.global_batch_size,
                    lr=engine.config.optimizer.lr,
                )
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
            scales.append(engine.loss_scale)
        layouts.save(engine, steps)
    # of the flat tensors that the optimizer updates
    held = sum(state["exp_avg"].numel() for state in engine.state.torch_optimizer.state.values())
    saved = sum(fragment.tensor.numel() for fragment in engine.state.fragments(with_optimizer=False))
    return {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "sent": dict(counts),
        "held": held,
        "saved": saved,
    }


def check_after_damage(arguments: str, rank: int) -> str | None:
    """Return what the check of copies says once a master weight of this rank's optimizer is another than its copy's."""
    engine, task = layouts.build(arguments)
    layouts.loss_of_step(engine, task, 0)
    check = ReplicaCheck(engine.ctx, engine.state.held())
    check.check(1)
    if engine.ctx.rank == rank:
        weight = next(iter(engine.state.owned())).weight
        with torch.no_grad():
            weight[0] += 1e-3
    try:
        check.check(2)
    except TrainingAborted as error:
        return str(error)
    return None
