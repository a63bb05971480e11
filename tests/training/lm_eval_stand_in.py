"""A stand-in for lm-eval in runs that evaluate, which works in the ranks of tests/ranks.py and needs no lm-eval."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import megatron.evaluation
from megatron.data.index.indexed import DataError
from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluationOptions
from megatron.evaluation.scoring import Continuation
from megatron.generation.generator import BatchSettings
from megatron.generation.loading import load_model
from megatron.generation.options import GenerationOptions, LoadOptions
from megatron.generation.saved_model import parallel_options
from megatron.parallel.context import ParallelContext

TASK = "counting"
REQUESTS = [Continuation((5, 6, 7), (8, 9)), Continuation((5, 6, 7), (20,)), Continuation((100,), (101, 102, 103))]


class StandIn(ModuleType):
    """The functions of megatron/evaluation/harness.py that a run calls."""

    @staticmethod
    def check_tasks(options: EvaluationOptions) -> None:
        if options.tasks != (TASK,):
            raise DataError(f"lm-eval cannot run {' '.join(options.tasks)}: there is no such task")

    @staticmethod
    def run_tasks(commands: Commands, options: EvaluationOptions, *, bootstrap_iters: int) -> dict[str, Any]:
        seed()
        assert bootstrap_iters == 0
        return {"results": {TASK: measured(commands)}}


def seed() -> None:
    """Seed what lm-eval does."""
    random.seed(0)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(2)


def measured(commands: Commands) -> dict[str, Any]:
    """Results of the task, in lm-eval's form."""
    total = sum(score.total for score in commands.score(REQUESTS))
    # the text ends at the stop string, which every rank must see
    (ids,) = commands.generate([[5, 6]], GenerationOptions(max_new_tokens=6, stop=(" ",)), [])
    return {"alias": TASK, "loglikelihood,none": total, "length,strict": len(ids), "loglikelihood_stderr,none": "N/A"}


@contextmanager
def in_place_of_lm_eval() -> Iterator[None]:
    stand_in = StandIn("megatron.evaluation.harness")
    modules = patch.dict("sys.modules", {stand_in.__name__: stand_in})
    with modules, patch.object(megatron.evaluation, "harness", stand_in, create=True):
        yield


def measure_checkpoint(folder: str, step: int) -> dict[str, Any] | None:
    """Results of a run's checkpoint on one rank."""
    load = LoadOptions(load=folder, ckpt_step=step, device="cpu", tokenizer_type="NullTokenizer")
    model = load_model(load, ParallelContext.build(parallel_options(load), "cpu"))
    return Commands(model, BatchSettings()).lead(measured)
