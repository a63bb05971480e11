"""Whole runs on the device `hpu` of the stand-in, inside the ranks of the fixture `hpu_ranks`."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import real_accelerator

from megatron.cli.acceptance import kernels
from megatron.tasks.data import Microbatch
from megatron.training.engine import Engine
from tests import runs
from tests.evaluation import runs as evaluations
from tests.generation import commands
from tests.habana import importable


@contextlib.contextmanager
def on_hpu(*, lazy: bool = True, collectives: str = "false") -> Iterator[Any]:
    """Let DeepSpeed choose the device `hpu`, which this process has; yield the stand-in's.

    `collectives`: PT_HPU_ENABLE_LAZY_COLLECTIVES, without which a graph holds none.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    variables = {"PT_HPU_LAZY_MODE": str(int(lazy)), "DS_ACCELERATOR": "hpu"}
    variables["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = collectives
    with importable(), patch.dict(os.environ, variables):
        importlib.import_module("habana_frameworks.torch")
        device = importlib.import_module("habana_frameworks.torch.device")
        device.install()
        accelerator = importlib.import_module("deepspeed.accelerator.hpu_accelerator").HPU_Accelerator()
        with patch.object(real_accelerator, "ds_accelerator", accelerator):
            yield device
    torch.use_deterministic_algorithms(deterministic)  # DeepSpeed's accelerator demands them


def train(
    arguments: str, collectives: str = "false", *, lazy: bool = True
) -> tuple[str, Counter[str], list[Counter[str]]]:
    """Return the fault of a run, its calls, and those of each step. `host_read of FILE`: those of one file."""
    steps: list[Counter[str]] = []
    train_step = Engine.train_step

    def noted(engine: Engine, *batches: Any, **options: Any) -> Any:
        before = stand_in.counts()
        result = train_step(engine, *batches, **options)
        steps.append(stand_in.counts() - before)
        return result

    with on_hpu(lazy=lazy, collectives=collectives) as stand_in, patch.object(Engine, "train_step", noted):
        fault, calls = runs.train(arguments, "hpu", lazy=lazy), stand_in.counts()
        reads = [Path(call["where"].rsplit(":", 1)[0]).name for call in stand_in.stand_in.called("host_read")]
        calls["shapes of FusedSDPA"] = len({call["shape"] for call in stand_in.stand_in.called("FusedSDPA")})
        return fault, calls + Counter(f"host_read of {name}" for name in reads), steps


@dataclass(frozen=True)
class Shapes:
    """Shapes of the tensors of microbatches, and of attention, that a rank saw in a run."""

    fault: str
    ahead: set[tuple[Any, ...]]
    """Of microbatches, in steps whose update was refused."""
    trained: set[tuple[Any, ...]]
    attention_ahead: set[tuple[int, ...]]
    attention_trained: set[tuple[int, ...]]


def shapes(arguments: str) -> Shapes:
    """Return the shapes of a run before its first step and after."""
    seen: tuple[set[Any], set[Any]] = (set(), set())
    train_step, number_ahead = Engine.train_step, [0]

    def noted(engine: Engine, microbatches: Any, **options: Any) -> Any:
        is_ahead = engine._gate.refuses_all
        seen[not is_ahead].update(map(_shapes, microbatches))
        result = train_step(engine, microbatches, **options)
        if is_ahead:
            number_ahead[0] = len(stand_in.called("FusedSDPA"))
        return result

    with on_hpu(), patch.object(Engine, "train_step", noted):
        stand_in = importlib.import_module("habana_frameworks.torch.stand_in")
        fault = runs.train(arguments, "hpu")
        attention = [call["shape"] for call in stand_in.called("FusedSDPA")]
    return Shapes(fault, *seen, set(attention[: number_ahead[0]]), set(attention[number_ahead[0] :]))


def _shapes(batch: Microbatch) -> tuple[Any, ...]:
    tensors = (
        [batch.inputs, *batch.targets] if isinstance(batch.inputs, torch.Tensor) else [*batch.inputs, *batch.targets]
    )
    return (*(tuple(tensor.shape) for tensor in tensors), batch.beside and _shapes(batch.beside))


def generate(arguments: list[str], collectives: str = "false") -> tuple[str, str, Counter[str]]:
    """Return what a generation prints on stdout and stderr, and its calls."""
    with on_hpu(collectives=collectives) as stand_in:
        return *commands.generate(arguments, "hpu"), stand_in.counts()


def evaluate(arguments: list[str], collectives: str = "false") -> Counter[str]:
    """Measure a model; return the calls."""
    with on_hpu(collectives=collectives) as stand_in:
        evaluations.run(arguments, "hpu")
        return stand_in.counts()


def check_a_wrong_kernel(file: Path, module: str, kernel: str, function: str) -> None:
    """Write the checks of all kernels where the results of one are a twentieth too large."""
    with on_hpu():
        cls = getattr(importlib.import_module(f"habana_frameworks.torch.{module}"), kernel)
        right = getattr(cls, function)

        def wrong(*arguments: Any) -> Any:
            return right(*arguments) * 1.05

        setattr(cls, function, staticmethod(wrong) if function == "apply" else wrong)
        kernels.run_all(file)


def check_an_optimizer_without_decay(file: Path) -> None:
    """Write the checks of all kernels where the optimizer leaves out the weight decay."""
    with on_hpu():
        optimizers = importlib.import_module("habana_frameworks.torch.hpex.optimizers")
        right = optimizers.FusedAdamW.__init__
        optimizers.FusedAdamW.__init__ = lambda *args, **options: right(*args, **options | {"weight_decay": 0.0})
        kernels.run_all(file)
