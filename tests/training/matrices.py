"""Muon on made-up parameters in float64, cut over ranks in every way. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from megatron.options.config import ParallelConfig
from megatron.options.optimizer import OptimizerConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.costs import MatrixProduct, Router, Table
from megatron.parallel.shards import Shard, named_parameters
from megatron.training.engine import Engine
from megatron.training.optimizers.build import BUILDERS
from tests.training import layouts

PRODUCT = MatrixProduct("mlp")
SHARDS = {
    "embedding.word.weight": Shard((10, 8), dim=0, pieces=(10,), vocabulary=True, cost=Table()),
    "layers.0.norm.weight": Shard((8,), used_on="stream"),
    "layers.0.attention.qkv.weight": Shard((24, 8), dim=0, pieces=(16, 4, 4), cost=PRODUCT),
    "layers.0.attention.dense.weight": Shard((8, 16), dim=1, pieces=(16,), cost=PRODUCT),
    "layers.0.attention.whole.weight": Shard((12, 8), used_on="stream", cost=PRODUCT),
    "layers.0.mlp.router.weight": Shard((4, 8), used_on="stream", cost=Router()),
    **{
        f"layers.0.mlp.experts.{expert}.{name}.weight": Shard(
            shape, dim=dim, pieces=pieces, cost=PRODUCT, expert=expert, num_experts=4
        )
        for expert in range(4)
        for name, shape, dim, pieces in (("gate_up", (12, 8), 0, (6, 6)), ("down", (8, 6), 1, (6,)))
    },
}
STEPS, LR, DECAY = 20, 0.02, 0.1


def numbers(name: str, step: int) -> np.ndarray:
    """The start (step -1) or a gradient of a whole parameter."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), step + 1])
    return generator.normal(0.0, 1.0, SHARDS[name].shape)


def run(sizes: dict[str, Any], options: dict[str, Any], *, flat: bool) -> list[tuple[str, int, int, list[float]]]:
    """Train; return (name, rank of the cut, first number, numbers) of what this rank updates. `flat`: as ZeRO cuts."""
    ctx = ParallelContext.build(ParallelConfig(**sizes), "cpu")
    config = OptimizerConfig(optimizer="muon", lr=LR, weight_decay=DECAY, adam_beta2=0.95, **options)
    held = {name: shard for name, shard in SHARDS.items() if ctx.holds(shard)}
    parameters = {name: _parameter(name, shard, ctx) for name, shard in held.items()}
    groups, owned = _groups(parameters, ctx, flat=flat)
    optimizer: Any = BUILDERS["muon"](groups, config, ctx)
    for group, flats in zip(optimizer.param_groups, _flats(groups, owned), strict=True):
        group["params"] = flats
    optimizer.place(list(parameters.items()), owned, ctx, torch.float64)
    for step in range(STEPS):
        for name, part in owned.items():
            local = held[name].take(torch.from_numpy(numbers(name, step)), *ctx.cut_of(held[name]))
            if part.tensor.grad is None:
                part.tensor.grad = torch.zeros_like(part.tensor)
            stretch = local.reshape(-1)[part.start : part.start + part.weight.numel()]
            part.tensor.grad.view(-1)[part.place : part.place + part.weight.numel()] = stretch
        optimizer.step()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
    return [
        (
            name,
            ctx.cut_of(held[name])[0],
            part.start,
            part.tensor.detach().view(-1)[part.place :][: part.weight.numel()].tolist(),
        )
        for name, part in owned.items()
    ]


def _parameter(name: str, shard: Shard, ctx: ParallelContext) -> Any:
    local = shard.take(torch.from_numpy(numbers(name, -1)), *ctx.cut_of(shard))
    parameter: Any = nn.Parameter(local)
    parameter.shard, parameter.full_name = shard, name
    return parameter


def _groups(
    parameters: dict[str, Any], ctx: ParallelContext, *, flat: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups as training/optimizers/groups.py makes them, and this rank's slices by name."""
    by_key: dict[tuple[bool, bool], list[str]] = {}
    for name, parameter in parameters.items():
        by_key.setdefault((parameter.shard.is_linear_weight, parameter.shard.expert is not None), []).append(name)
    groups: list[Any] = []
    owned: dict[str, Any] = {}
    for (by_muon, _), names in by_key.items():
        groups.append(
            {"params": [parameters[name] for name in names], "by_muon": by_muon, "weight_decay": DECAY, "lr": LR}
        )
        owned |= _cut(names, parameters, ctx) if flat else {name: whole(parameters[name]) for name in names}
    return groups, owned


def whole(parameter: Any) -> Any:
    return SimpleNamespace(start=0, weight=parameter, tensor=parameter, place=0)


def _cut(names: list[str], parameters: dict[str, Any], ctx: ParallelContext) -> dict[str, Any]:
    """One flat tensor of a group, cut into equal stretches over the ranks that shard it, as ZeRO does."""
    rank, size = ctx.shard_place(parameters[names[0]].shard)
    whole = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    per_rank = -(-len(whole) // size)
    partition = nn.Parameter(
        torch.nn.functional.pad(whole, (0, per_rank * size - len(whole)))[rank * per_rank :][:per_rank]
    )
    owned, begin = {}, 0
    for name in names:
        stop = begin + parameters[name].numel()
        first, last = max(begin, rank * per_rank), min(stop, (rank + 1) * per_rank)
        if first < last:
            place = first - rank * per_rank
            weight = partition.detach()[place : place + last - first]
            owned[name] = SimpleNamespace(start=first - begin, weight=weight, tensor=partition, place=place)
        begin = stop
    return owned


def _flats(groups: list[dict[str, Any]], owned: dict[str, Any]) -> list[list[Tensor]]:
    """What takes the place of the parameters of each group."""
    return [
        list(
            {
                id(owned[p.full_name].tensor): owned[p.full_name].tensor
                for p in group["params"]
                if p.full_name in owned
            }.values()
        )
        for group in groups
    ]


Stretch = tuple[str, int, int, np.ndarray]
"""Name, rank of the cut, first number and numbers of what a rank saves of a parameter."""


def step_of(engine: Engine, task: Any, step: int) -> float:
    """Take a step with the learning rate of the options; its loss."""
    result = engine.train_step(
        layouts.step_batches(engine, task, step),
        num_microbatches=layouts.num_microbatches(engine),
        consumed_samples=step * engine.config.training.global_batch_size,
        lr=engine.config.optimizer.lr,
    )
    return float(result.loss)


def train(arguments: str, steps: int) -> tuple[list[float], list[Stretch]]:
    """Losses of steps, and the float32 weights after them."""
    engine, task = layouts.build(arguments)
    losses = [step_of(engine, task, step) for step in range(steps)]
    return losses, stretches(engine)


def stretches(engine: Engine) -> list[Stretch]:
    return [
        (owned.name, engine.ctx.cut_of(owned.shard)[0], owned.start, owned.weight.detach().numpy().copy())
        for owned in engine.state.owned()
        if owned.is_saved_here
    ]


def resume_elsewhere(arguments: str, load: str, steps: int) -> tuple[list[float], list[Stretch]]:
    """Resume, take steps, and return their losses and the weights."""
    engine, task = layouts.build(f"{arguments} --load {load}")
    first = layouts.resume(engine)
    losses = [step_of(engine, task, first + step) for step in range(steps)]
    return losses, stretches(engine)


def shadowed(arguments: str, steps: int) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Of one process: the clipped gradients of each step by name, and the weights after it."""
    engine, task = layouts.build(arguments)
    optimizer: Any = engine.state.torch_optimizer.inner
    update, seen = optimizer.step, dict[str, np.ndarray]()

    def record(closure: Any = None) -> Any:
        for name, parameter in named_parameters(engine.module):
            assert parameter.grad is not None
            seen[name] = parameter.grad.double().numpy().copy()
            if optimizer.grad_scale is not None:
                seen[name] /= float(optimizer.grad_scale)
        return update(closure)

    found = []
    with patch.object(optimizer, "step", record):
        for step in range(steps):
            step_of(engine, task, step)
            weights = {name: p.detach().double().numpy().copy() for name, p in named_parameters(engine.module)}
            found.append((dict(seen), weights))
    return found
