"""Faults planted into a few steps of a tiny model, and what they leave behind. Runs inside the ranks of
tests/ranks.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.training import state
from megatron.training.engine import Engine
from tests.training import layouts


@contextlib.contextmanager
def float16_allowed(arguments: str) -> Iterator[None]:
    """torch computes float16 on any CPU, though DeepSpeed allows it on few."""
    from deepspeed.accelerator import get_accelerator

    if "--fp16" not in arguments:
        yield
        return
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    with (
        patch.object(get_accelerator(), "is_fp16_supported", lambda: True),
        patch.object(get_accelerator(), "supported_dtypes", lambda: dtypes),
    ):
        yield


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copies of everything that a step may change on this rank: what is computed with, the optimizer's weights, and
    its moments and step counts."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        held = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
        found[name] = held.detach().clone()
    for part in state._parts(engine):
        found |= {f"{part.name} {kind}": t.detach().clone() for kind, t in {"weight": part.weight, **part.moments}.items()}
    found["step"] = torch.tensor(state.scalars(engine)["step"] or 0.0)
    return found


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def step(engine: Engine, task: Any, number: int) -> Any:
    size = engine.config.training.global_batch_size
    return engine.train_step(
        layouts.step_batches(engine, task, number), global_batch_size=size, consumed_samples=number * size, lr=1e-3
    )


@contextlib.contextmanager
def nan_gradient(engine: Engine, rank: int, name: str) -> Iterator[None]:
    """One number of the gradient of a parameter is NaN on one rank, in each backward pass."""
    parameter = dict(engine.module.named_parameters()).get(name)
    if engine.ctx.rank != rank:
        yield
        return
    assert parameter is not None, f"rank {rank} has no {name}"

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient

    handle = parameter.register_hook(spoil)
    yield
    handle.remove()


@contextlib.contextmanager
def nan_loss(engine: Engine, rank: int) -> Iterator[None]:
    """The loss of one rank's microbatches is NaN, its gradient is not."""
    original = engine.deepspeed.loss_model if engine.config.uses_pipeline else engine._loss

    def spoiled(outputs: Any, labels: Any) -> Tensor:
        loss = original(outputs, labels)
        return loss + (torch.full_like(loss, float("nan")) if engine.ctx.rank == rank else 0.0)

    if engine.config.uses_pipeline:
        spoiled_pipeline = engine.gate.recording(spoiled)
        with patch.object(engine.deepspeed, "loss_model", spoiled_pipeline):
            yield
    else:
        with patch.object(engine, "_loss", spoiled):
            yield


def plant(arguments: str, fault: str, rank: int, name: str = "") -> dict[str, Any]:
    """Two good steps, one with the fault, two good ones."""
    with float16_allowed(arguments):
        engine, task = layouts.build(arguments)
        results = [step(engine, task, 0), step(engine, task, 1)]
        before = snapshot(engine)
        with nan_gradient(engine, rank, name) if fault == "gradient" else nan_loss(engine, rank):
            results.append(step(engine, task, 2))
        kept = changed(before, snapshot(engine))
        results += [step(engine, task, 3), step(engine, task, 4)]
        return {
            "changed": kept,
            "skipped": [result.skipped for result in results],
            "finite": [result.is_finite for result in results],
            "losses": [float(result.loss) for result in results],
            "moved": len(changed(before, snapshot(engine))),
        }
