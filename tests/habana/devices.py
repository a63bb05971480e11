"""Whole runs on the device `hpu` of the stand-in, inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import real_accelerator

from tests import runs
from tests.generation import commands
from tests.habana.runs import importable


@contextlib.contextmanager
def on_hpu() -> Iterator[Any]:
    """Give this process, in lazy mode, the device that DeepSpeed and torch know as hpu; yield the stand-in."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with importable(), patch.dict(os.environ, {"PT_HPU_LAZY_MODE": "1", "DS_ACCELERATOR": "hpu"}):
        importlib.import_module("habana_frameworks.torch")
        on_cpu = importlib.import_module("habana_frameworks.torch.on_cpu")
        accelerator = importlib.import_module("deepspeed.accelerator.hpu_accelerator").HPU_Accelerator()
        with on_cpu.known(), patch.object(real_accelerator, "ds_accelerator", accelerator):
            yield on_cpu
    torch.use_deterministic_algorithms(deterministic)  # DeepSpeed's accelerator demands them


def train(arguments: str) -> tuple[str, Counter[str]]:
    """Return the fault of a run, and the calls of Habana's kernels and step marks."""
    with on_hpu() as stand_in:
        return runs.train(arguments, "hpu"), stand_in.counts()


def generate(arguments: list[str]) -> tuple[str, Counter[str]]:
    """Return what a generation prints, and its calls."""
    with on_hpu() as stand_in:
        return commands.generate(arguments, "hpu")[0], stand_in.counts()
