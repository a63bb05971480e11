"""Faults planted into the training of a tiny model. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.saver import Saver
from megatron.data.blend import BlendedDataset
from megatron.data.gpt import GPTDataset
from megatron.models.experts import Expert
from megatron.options.progress import Progress
from megatron.parallel.linear import RowParallelLinear
from megatron.parallel.shards import named_parameters
from megatron.resilience.attribution import find_origin
from megatron.resilience.rank_record import RankPlace
from megatron.resilience.watchdog import Watchdog
from megatron.training.engine import Engine, StepResult
from megatron.training.step_checks import step_record
from tests import runs
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
    for name, parameter in named_parameters(engine.module):
        held = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
        found[name] = held.detach().clone()
    for part in engine.state.owned():
        found |= {
            f"{part.name} {kind}": t.detach().clone() for kind, t in {"weight": part.weight, **part.moments}.items()
        }
    found["step"] = torch.tensor(engine.state.scalars()["step"] or 0.0)
    return found


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def step(engine: Engine, task: Any, number: int) -> Any:
    size = engine.config.training.global_batch_size
    return engine.train_step(
        layouts.step_batches(engine, task, number),
        num_microbatches=layouts.num_microbatches(engine),
        consumed_samples=number * size,
        lr=1e-3,
    )


@contextlib.contextmanager
def nan_gradient(engine: Engine, rank: int, name: str) -> Iterator[None]:
    """One number of the gradient of a parameter is NaN on one rank, in each backward pass."""
    parameter = dict(named_parameters(engine.module)).get(name)
    if engine.ctx.rank != rank:
        yield
        return
    assert parameter is not None, f"rank {rank} has no {name}"

    def spoil(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # deferred: it comes later
            return None
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient

    handle = parameter.register_hook(spoil)
    yield
    handle.remove()


@contextlib.contextmanager
def nan_loss(engine: Engine, rank: int) -> Iterator[None]:
    """The loss of one rank's microbatches is NaN, its gradient is not."""
    original = engine._losses.compute

    def spoiled(outputs: Any, targets: Any) -> Tensor:
        loss = original(outputs, targets)
        return loss + (torch.full_like(loss, float("nan")) if engine.ctx.rank == rank else 0.0)

    with patch.object(engine._losses, "compute", spoiled):
        yield


def plant_all(arguments: str, faults: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    """What each (fault, rank, parameter) does to one step of a training whose other steps are good."""
    found = []
    with float16_allowed(arguments):
        engine, task = layouts.build(arguments)
        number = 0
        for fault, rank, name in faults:
            good = step(engine, task, number)
            before = snapshot(engine)
            with nan_gradient(engine, rank, name) if fault == "gradient" else nan_loss(engine, rank):
                bad = step(engine, task, number + 1)
            unchanged = changed(before, snapshot(engine))
            following = step(engine, task, number + 2)
            found.append(
                {
                    "changed": unchanged,
                    "good": (good.skipped, good.is_finite),
                    "bad": (bad.skipped, bad.is_finite),
                    "following": (following.skipped, following.is_finite),
                    "moved": len(changed(before, snapshot(engine))),
                    "loss": float(following.loss),
                }
            )
            number += 3
    return found


@contextlib.contextmanager
def nan_pass(engine: Engine, rank: int, direction: str) -> Iterator[None]:
    """One number that enters (forward) or leaves (backward) a product of one rank's last attention is NaN."""
    rows = [m for name, m in engine.module.named_modules() if isinstance(m, RowParallelLinear)]

    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[5] = float("nan")
        return tensor

    def enter(module: Any, inputs: Any) -> Any:
        if engine.ctx.rank == rank and direction == "backward" and inputs[0].requires_grad:
            inputs[0].register_hook(spoil)
        return (spoil(inputs[0]), *inputs[1:]) if engine.ctx.rank == rank and direction == "forward" else None

    handle = rows[-1].register_forward_pre_hook(enter)
    yield
    handle.remove()


@contextlib.contextmanager
def nan_expert(engine: Engine, rank: int, direction: str) -> Iterator[None]:
    """One number that an expert of one rank computes (forward), or its gradient (backward), is NaN in each pass."""
    experts = [module for module in engine.module.modules() if isinstance(module, Expert)]

    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[3:4] = float("nan")  # of no tokens there is none
        return tensor

    def leave(module: Any, inputs: Any, output: Tensor) -> Any:
        if engine.ctx.rank != rank or not module.training:
            return None
        if direction == "forward":
            return spoil(output)
        inputs[0].register_hook(spoil)
        return None

    handles = [expert.register_forward_hook(leave) for expert in experts]
    yield
    for handle in handles:
        handle.remove()


def origins(arguments: str, faults: list[tuple[str, int, str]]) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """Kind, ranks and text of the origin of each planted fault, and True if the losses are finite."""
    found = []
    with float16_allowed(arguments):
        engine, task = layouts.build(arguments)
        for number, (fault, rank, name) in enumerate(faults):
            planted = {
                "gradient": nan_gradient(engine, rank, name),
                "loss": nan_loss(engine, rank),
                "forward": nan_pass(engine, rank, "forward"),
                "backward": nan_pass(engine, rank, "backward"),
                "expert forward": nan_expert(engine, rank, "forward"),
                "expert backward": nan_expert(engine, rank, "backward"),
            }
            with planted[fault]:
                result = step(engine, task, number)
            assert result.skipped
            place = dataclasses.replace(RankPlace.of(engine.ctx), host=f"node{engine.ctx.rank}")
            record = step_record(engine.module, engine.ctx, place)
            records = engine.ctx.gather_objects(record)
            origin = find_origin(records, engine.ctx.num_stages)
            found.append((origin.kind, origin.ranks, str(origin), math.isfinite(result.loss)))
    return found


# Whole runs


HELD_OUT = 50
"""Validation and test sets are smaller."""


@contextlib.contextmanager
def poisoned(begin: int, end: int) -> Iterator[None]:
    """Training samples [begin, end) are noise, which a model that has learned anything finds most unlikely."""
    originals = {cls: cls.get_batch for cls in (GPTDataset, BlendedDataset)}

    def get_batch(self: Any, indices: Any) -> Any:
        samples = originals[type(self)](self, indices)
        for row, index in enumerate(np.asarray(indices)):
            if begin <= index < end and len(self) > HELD_OUT:
                samples[row] = np.random.default_rng(int(index)).integers(0, 128, samples.shape[1])
        return samples

    with patch.object(GPTDataset, "get_batch", get_batch), patch.object(BlendedDataset, "get_batch", get_batch):
        yield


@contextlib.contextmanager
def knowing(begin: int, end: int) -> Iterator[None]:
    """A new run that leaves out the samples [begin, end), as one does after a rollback."""
    with patch("megatron.training.resume.Progress", partial(Progress, left_out=[(begin, end)])):
        yield


@contextlib.contextmanager
def absent(begin: int, end: int) -> Iterator[None]:
    """Steps over the samples [begin, end) never reach the engine."""
    original = Engine.train_step

    def train_step(self: Engine, microbatches: Any, *, consumed_samples: int, **options: Any) -> StepResult:
        if begin <= consumed_samples < end:
            return StepResult(1.0, 1.0, skipped=False)
        return original(self, microbatches, consumed_samples=consumed_samples, **options)

    with patch.object(Engine, "train_step", train_step):
        yield


@contextlib.contextmanager
def nan_from(consumed_samples: int, good_every: int = 0) -> Iterator[None]:
    """Every loss from there on is NaN, on rank 0 alone, except after each multiple of `good_every` samples."""
    original = Engine.train_step

    def train_step(self: Engine, microbatches: Any, **options: Any) -> StepResult:
        consumed = options["consumed_samples"]
        if consumed < consumed_samples or (good_every and consumed % good_every == 0):
            return original(self, microbatches, **options)
        with nan_loss(self, 0):
            return original(self, microbatches, **options)

    with patch.object(Engine, "train_step", train_step):
        yield


@contextlib.contextmanager
def overflowing(consumed_samples: int) -> Iterator[None]:
    """Every gradient from there on is NaN on rank 0, in a float16 run; the losses are not."""
    original = Engine.train_step

    def train_step(self: Engine, microbatches: Any, **options: Any) -> StepResult:
        if options["consumed_samples"] < consumed_samples:
            return original(self, microbatches, **options)
        with nan_gradient(self, 0, "layers.0.attention_norm.weight"):
            return original(self, microbatches, **options)

    with patch.object(Engine, "train_step", train_step):
        yield


@contextlib.contextmanager
def full_disk(iteration: int) -> Iterator[None]:
    """No save from this iteration on succeeds."""
    original = Saver.save

    def save(self: Saver, tag: str, *arguments: Any, **options: Any) -> None:
        fails = int(tag.removeprefix("global_step")) >= iteration
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with patch("os.fsync", side_effect=error) if fails else contextlib.nullcontext():
            original(self, tag, *arguments, **options)

    with patch.object(Saver, "save", save):
        yield


@contextlib.contextmanager
def drift(rank: int, name: str, consumed_samples: int) -> Iterator[None]:
    """One number of a parameter moves on one rank alone, right after the step over these samples."""
    original = Engine.train_step

    def train_step(self: Engine, microbatches: Any, **options: Any) -> StepResult:
        result = original(self, microbatches, **options)
        if self.ctx.rank == rank and options["consumed_samples"] == consumed_samples:
            parameter = dict(named_parameters(self.module))[name]
            held = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
            with torch.no_grad():
                held.view(-1)[1] += 0.25
        return result

    with patch.object(Engine, "train_step", train_step):
        yield


def run(arguments: str, plan: str = "", *values: Any) -> str:
    """A whole run with one of the above; the fault that ended it, or ''."""
    plans: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
        "poisoned": poisoned,
        "knowing": knowing,
        "absent": absent,
        "nan_from": nan_from,
        "overflowing": overflowing,
        "full_disk": full_disk,
        "drift": drift,
    }
    with float16_allowed(arguments), plans[plan](*values) if plan else contextlib.nullcontext():
        return runs.train(arguments)


def run_and_note(arguments: str, plan: str, *values: Any) -> tuple[str, list[str]]:
    """The same, and what the guard has noted for the watchdog of this rank."""
    noted: list[str] = []
    with patch.object(Watchdog, "note", lambda watchdog, remark: noted.append(remark)):
        return run(arguments, plan, *values), noted
