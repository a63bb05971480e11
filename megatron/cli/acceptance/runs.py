"""Short runs of tiny models on the cards, their losses compared with the CPU's; throughput of a larger model."""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli.acceptance.report import Check, Group, read_rows
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.launch.child_processes import end_with_parent, kill_tree, python_path
from megatron.runtime.commands import DONE

MODELS = {
    "llama": "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 344 "
    "--untie-embeddings-and-output-weights",
    "bloom": "--architecture bloom --position-embedding-type alibi --embed-layernorm",
}
# without dropout, whose random numbers differ from device to device
TINY = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --vocab-size 512 --seq-length 128 --micro-batch-size 2 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95"
)
SHARED = "--split 1,0,0 --log-interval 1 --watchdog-timeout-s 300"

FIRST_LOSS = 1e-4
"""Bound of the relative difference of the first loss, which float32 rounds alone."""
LATER_LOSSES = 0.01
"""Bound of that of each later loss: differences of rounding grow with each update."""
SETTLED = 5
"""Steps after which no further graph may be compiled."""
TIMEOUT_S = 900


@dataclass(frozen=True)
class CardLayout:
    """Tensor, pipeline and data parallel sizes."""

    tensor: int
    pipeline: int
    data: int

    @classmethod
    def of(cls, devices: int) -> CardLayout:
        """Return the layout of so many cards that has every kind of parallelism that fits."""
        tensor = math.gcd(devices, 2)
        pipeline = math.gcd(devices, 4) // tensor
        return cls(tensor, pipeline, devices // (tensor * pipeline))

    @property
    def flags(self) -> list[str]:
        flags = ["--tensor-model-parallel-size", str(self.tensor), "--pipeline-model-parallel-size", str(self.pipeline)]
        if self.tensor > 1:
            flags.append("--sequence-parallel")
        return flags

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}, DP {self.data}"


@dataclass(frozen=True)
class Outcome:
    """Rows and faults of a run that has ended."""

    rows: list[dict[str, Any]]
    """Its steps."""
    fault: str
    """Description of a bad end; empty after a good one."""
    fallbacks: list[str]
    """Operators that the CPU computed for the device, with their numbers of calls."""


def environment(mode: str) -> dict[str, str]:
    """Return the variables of a run in 'lazy' or 'eager' mode, or on the 'cpu', which loads nothing of Habana's."""
    if mode == "cpu":
        # else torch loads Habana's plug-in as it is imported
        return {**os.environ, "PYTHONPATH": python_path(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {**os.environ, "PYTHONPATH": python_path(), "PT_HPU_LAZY_MODE": str(int(mode == "lazy"))}


def run_process(command: list[str], variables: Mapping[str, str], log: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command, its output to `log`; return why it did not end well, with its last lines, '' if it did.

    None of its processes outlives the call, whatever ends it, nor this process.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches this process alone, which ends the others
            preexec_fn=end_with_parent(),
        )
        try:
            status = process.wait(timeout_s)
            if status == DONE:
                return ""
            ended = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {timeout_s:g} s"
        finally:
            if process.poll() is None:
                _kill(process)
    # what a process prints last mostly names its error
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([ended, *"\n".join(lines[-6:])[-900:].splitlines()])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, and wait until they are gone: the next ones need their cards."""
    import psutil

    # listed before: of a process that has ended the children cannot be found
    descendants = psutil.Process(process.pid).children(recursive=True)
    kill_tree(process.pid)
    process.wait()
    psutil.wait_procs(descendants, timeout=30)


def train(folder: Path, flags: list[str], mode: str, devices: int) -> Outcome:
    """Train on so many cards in 'lazy' or 'eager' mode, or on one rank of the 'cpu'. `folder` is new."""
    device = "cpu" if mode == "cpu" else "hpu"
    command = [sys.executable, "-m", "megatron.cli.launch", "--devices-per-node", str(devices), "--", *flags]
    command += ["--device", device, "--results-dir", str(folder)]
    fault = run_process(command, environment(mode), folder.with_suffix(".log"))
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    log = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    # the warning of megatron/ that names the operators
    named = re.findall(r"computed them on the CPU, waiting each time: (.*)", log)
    return Outcome(rows, fault, sorted(set(", ".join(named).split(", ")) - {""}))


@functools.cache
def train_on_cpu(folder: Path, flags: tuple[str, ...]) -> Outcome:
    """Train on one rank of the CPU, once for both modes."""
    return train(folder, list(flags), "cpu", 1)


def write_data(prefix: Path, vocabulary: int) -> Path:
    """Write a dataset of counting sequences, which a model learns in few steps, and return its prefix."""
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(400):
            steps = np.arange(generator.integers(50, 1000)) * generator.integers(1, 4)
            builder.add_document((generator.integers(0, vocabulary) + steps) % vocabulary)
        builder.finalize()
    return prefix


def compare_losses(folder: Path, model: str, mode: str, devices: int, steps: int) -> Group:
    """Train a tiny model on the cards and on the CPU from one start, in float32, and compare their losses."""
    layout = CardLayout.of(devices)
    data = folder / "tiny"
    # once for all models and modes
    if not data.with_suffix(".idx").is_file():
        write_data(data, 512)
    # a multiple of the microbatch, 2, for every data-parallel rank
    batch = math.lcm(8, 2 * layout.data)
    words = f"{MODELS[model]} {TINY} {SHARED} --global-batch-size {batch} --train-iters {steps}".split()
    words += ["--data-path", str(data)]
    name = f"{model}, {mode} mode"
    group = Group(f"{steps} steps of a tiny {name}, {layout}, against one rank of the CPU")
    # tuple: functools.cache needs arguments that can be hashed
    reference = train_on_cpu(folder / f"{model}_cpu", tuple(words))
    if reference.fault:
        group.checks.append(Check(f"{model} on the CPU", None, 0.0, reference.fault))
        return group
    expected = [row["lm_loss"] for row in reference.rows]
    outcome = train(folder / f"{model}_{mode}", words + layout.flags, mode, devices)
    losses = [row["lm_loss"] for row in outcome.rows]
    names = (f"{name}: first loss, relative difference", f"{name}: every loss, relative difference")
    # both checks fail, so that the number of checks is that of a whole test
    if outcome.fault or len(losses) != len(expected):
        detail = outcome.fault or f"{len(losses)} losses, {len(expected)} on the CPU"
        bounds = (FIRST_LOSS, LATER_LOSSES)
        group.checks += [Check(each, None, bound, detail) for each, bound in zip(names, bounds, strict=True)]
        return group
    apart = [abs(a - e) / e for a, e in zip(losses, expected, strict=True)]
    group.checks += [Check(names[0], apart[0], FIRST_LOSS), Check(names[1], max(apart), LATER_LOSSES)]
    group.facts = {
        "first and last loss": f"{losses[0]:.4f}, {losses[-1]:.4f}; CPU {expected[0]:.4f}, {expected[-1]:.4f}"
    }
    _describe(group, name, outcome)
    return group


def throughput_flags(preset: str, layout: CardLayout, steps: int, length: int) -> list[str]:
    """Return the flags of the run whose throughput is measured: a constant rate, whatever schedule the preset has."""
    flags = f"--config {preset} {SHARED} --bf16 --train-iters {steps} --seq-length {length} --micro-batch-size 1"
    flags += f" --global-batch-size {8 * layout.data} --lr 1e-4 --min-lr 0 --lr-decay-style constant"
    flags += " --lr-warmup-samples 0 --lr-warmup-iters 0 --lr-warmup-fraction none"
    return [*flags.split(), *layout.flags]


def measure_throughput(folder: Path, preset: str, mode: str, devices: int, steps: int, length: int) -> Group:
    """Train a preset in bfloat16 on the cards, with sequences of `length`; report throughput, memory and graphs."""
    layout = CardLayout.of(devices)
    data = write_data(folder / "larger", 512)
    flags = [*throughput_flags(preset, layout, steps, length), "--data-path", str(data)]
    name = f"{preset}, {mode} mode"
    group = Group(f"throughput of {name}, {layout}, bfloat16, {steps} steps of sequences of {length:,}")
    outcome = train(folder / f"throughput_{mode}", flags, mode, devices)
    losses = [row["lm_loss"] for row in outcome.rows]
    check = f"{name}: last loss over the first"
    if outcome.fault or len(losses) != steps:
        group.checks.append(Check(check, None, 1.0, outcome.fault or f"{len(losses)} of {steps} steps"))
        return group
    group.checks.append(Check(check, losses[-1] / losses[0], 1.0))
    # the second half: the first steps compile their graphs
    settled = outcome.rows[len(outcome.rows) // 2 :]

    def median(key: str) -> float:
        return statistics.median(float(row.get(key) or 0.0) for row in settled)

    group.facts = {
        "tokens/s a card": f"{median('tokens_per_second_per_device'):,.0f}",
        "TFLOP/s a card": f"{median('tflops_per_device'):.4g}",
        "MFU": f"{100 * median('mfu'):.1f} %",
        "seconds a step": f"{median('iteration_time_s'):.4g}",
        "seconds of the first step": f"{outcome.rows[0]['iteration_time_s']:.4g}",
    }
    _describe(group, name, outcome)
    return group


def _describe(group: Group, name: str, outcome: Outcome) -> None:
    """Add graphs, memory and fallbacks of a run that ended well."""
    last = outcome.rows[-1]
    graphs = [int(row["compiled_graphs"]) for row in outcome.rows]
    if len(graphs) > SETTLED:
        later = float(graphs[-1] - graphs[SETTLED - 1])
        group.checks.append(Check(f"{name}: graphs compiled after step {SETTLED}", later, 0.0))
    keys = ("memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)")
    group.facts |= {
        "graphs compiled by rank 0": f"{graphs[-1]}",
        "memory of rank 0 in GB: in use, peak, total": ", ".join(f"{last[key]:.2f}" for key in keys),
        "operators computed by the CPU": ", ".join(outcome.fallbacks) or "none",
    }
