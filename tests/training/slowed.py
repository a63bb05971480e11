"""Runs of a tiny model in which one rank is slowed down. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatron.models.attention.layer import SelfAttention
from megatron.parallel.phase_clock import HostTicks
from megatron.resilience.watchdog import Watchdog
from megatron.training.loop import Loop
from megatron.training.optimizers.build import AdamW
from tests import runs


class _SlowBackward(torch.autograd.Function):
    """Identity whose backward pass takes longer."""

    @staticmethod
    def forward(function: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        function.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(function: Any, grad: torch.Tensor) -> Any:
        time.sleep(function.seconds)
        return grad, None


@contextlib.contextmanager
def slowed(phase: str, seconds: float, from_step: int) -> Iterator[None]:
    """Each phase of this name takes so much longer, from a step on."""
    iteration = 0
    step, attention, next_batch = Loop._step, SelfAttention.forward, Loop._next_batch

    def pause(of: str) -> None:
        if of == phase and iteration >= from_step:
            time.sleep(seconds)

    def count_step(loop: Loop) -> bool:
        nonlocal iteration
        iteration = loop.progress.iteration + 1
        return step(loop)

    def attend(layer: SelfAttention, hidden: Any, *others: Any, **options: Any) -> Any:
        if layer.training:
            pause("forward")
            if phase == "backward" and iteration >= from_step:
                hidden = _SlowBackward.apply(hidden, seconds)
        return attention(layer, hidden, *others, **options)

    def read(loop: Loop) -> Any:
        pause("data")
        return next_batch(loop)

    update = AdamW.step

    def update_slowly(optimizer: Any, *arguments: Any) -> Any:
        pause("optimizer")
        return update(optimizer, *arguments)

    with (
        patch.object(AdamW, "step", update_slowly),
        patch.object(Loop, "_step", count_step),
        patch.object(SelfAttention, "forward", attend),
        patch.object(Loop, "_next_batch", read),
    ):
        yield


class ProcessorTicks(HostTicks):
    """Clock of the processor time of the rank's main thread: other processes of a busy machine do not count."""

    def now(self) -> float:
        return time.thread_time()


def train(
    folder: str, arguments: str, rank: int, phase: str, seconds: float, from_step: int = 1
) -> list[dict[str, Any]]:
    """Rows of a run in which this rank is slowed down; -1: none is, and only processor time counts.

    The last is what the watchdog knows of stragglers then.
    """
    own = slowed(phase, seconds, from_step) if int(os.environ["RANK"]) == rank else contextlib.nullcontext()
    ticks = ProcessorTicks if rank < 0 else HostTicks
    known = [""]
    with (
        own,
        patch("megatron.parallel.phase_clock.HostTicks", ticks),
        patch.object(Watchdog, "note_stragglers", lambda watchdog, text: known.append(text)),
    ):
        fault = runs.train(f"--log-straggler --results-dir {folder} {arguments}")
    assert not fault, fault
    return [*runs.rows(Path(folder)), {"kind": "watchdog", "known": known[-1]}] if os.environ["RANK"] == "0" else []


def train_predicted(folder: str, arguments: str, rank: int, phase: str, seconds: float, from_step: int) -> None:
    """A run in which this rank is slowed down from a step on."""
    own = slowed(phase, seconds, from_step) if int(os.environ["RANK"]) == rank else contextlib.nullcontext()
    with own:
        fault = runs.train(f"--results-dir {folder} {arguments}")
    assert not fault, fault
