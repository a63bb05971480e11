"""Short trainings of small models through the project's own loop: what a step, a microbatch and a layer start with.

They count what no piece has: Python, autograd's hooks, reading of data, DeepSpeed's step, logging.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.config import on_device
from megatron.parallel.context import ParallelContext
from megatron.plan.flops import count_parameters
from megatron.runtime.devices import find_device
from megatron.runtime.network import is_first_rank
from megatron.settings.command_line import load_config
from megatron.training.run import run

VOCABULARY, LENGTH = 256, 32
HEAD_SIZE = 16
FEW_LAYERS, MORE_LAYERS = 2, 6
FEW_MICROBATCHES, MORE_MICROBATCHES = 1, 4


@dataclass
class Training:
    """A training of a small Llama, and what its steps took."""

    precision: str
    layers: int = FEW_LAYERS
    microbatches: int = FEW_MICROBATCHES
    hidden: int = 64
    optimizer: str = "adamw"
    steps: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    numbers: int = 0
    """Parameters."""
    stages: int = 1

    def flags(self, data: Path, results: Path, device: str, steps: int) -> list[str]:
        sizes = f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {4 * self.hidden}"
        heads = f"--num-attention-heads {max(1, self.hidden // HEAD_SIZE)} --vocab-size {VOCABULARY}"
        batch = f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {self.microbatches}"
        rest = f"--train-iters {steps} --split 1,0,0 --log-interval 1 --timing-log-level 1 --device {device}"
        rest += f" --optimizer {self.optimizer} --pipeline-model-parallel-size {self.stages}"
        # without dropout, as most models are trained
        model = f"--architecture llama --hidden-dropout 0 --attention-dropout 0 {sizes} {heads}"
        words = f"{model} {batch} {rest}".split()
        if self.precision != "fp32":
            words.append(f"--{self.precision}")
        return [*words, "--data-path", str(data), "--results-dir", str(results)]

    def run(self, folder: Path, device: str, steps: int) -> None:
        """Train, and note what each step but the first ones took. Raises what a training does."""
        results = folder / "results"
        config = load_config(self.flags(folder / "data", results, device, steps), self.stages)
        self.numbers = count_parameters(config)
        # two runs in one process have a log each
        with contextlib.redirect_stdout(io.StringIO()):
            run(
                on_device(config, device, lazy=find_device(device).is_lazy()),
                ParallelContext.build(config.parallel, device),
            )
        log = results / "metrics.jsonl"
        # the first rank alone writes it
        if not log.is_file() or not is_first_rank():
            return
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        log.unlink()
        # the first steps allocate, and the first of all compiles
        first = max(1, steps // 4)
        self.steps += [each["iteration_time_s"] for each in records if each["kind"] == "train"][first:]
        timers = [each for each in records if each["kind"] == "timers"][first:]
        for name, into in (("forward-compute", self.forward), ("backward-compute", self.backward)):
            into += [each[f"{name}-time"]["mean"] for each in timers]
        self.update += [each["optimizer-time"]["mean"] for each in timers]


def write_data(folder: Path) -> None:
    """Write a dataset of counting tokens, for all trainings."""
    with IndexedDatasetBuilder(folder / "data", np.uint16) as builder:
        for first in range(40):
            tokens = (first + np.arange(40 * LENGTH)) % (VOCABULARY - 1) + 1
            builder.add_document(tokens.astype(np.uint16))
        builder.finalize()


def of_starts(precision: str) -> list[Training]:
    """Return the trainings from whose differences starts follow."""
    return [
        Training(precision, layers, microbatches)
        for layers in (FEW_LAYERS, MORE_LAYERS)
        for microbatches in (FEW_MICROBATCHES, MORE_MICROBATCHES)
    ]


def of_updates(precision: str, hidden: Sequence[int]) -> list[Training]:
    """Return the trainings whose updates are timed."""
    return [Training(precision, hidden=each, optimizer=name) for name in ("adamw", "sgd") for each in hidden]


def threads_of(threads: int | None) -> contextlib.AbstractContextManager[None]:
    """Compute with so many threads."""
    return _with_threads(threads) if threads is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _with_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
