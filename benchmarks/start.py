"""Time from a command to its first training step, as a multiple of `import torch` in the same round.

    python benchmarks/start.py [--rounds 5] [FLAGS of a run]

A tiny model on the CPU: one rank (`python -m megatron.train`), and four (the launcher; two stages of two data-parallel
ranks). Every process is new; the files that it reads are in memory after the first round, which is not counted. Exit
status 1 if a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, quotients, spread
from megatron.data.index.indexed_builder import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"one rank": 2.5, "four ranks": 5.0}
FLAGS = "--config tiny_bloom --train-samples 3200 --exit-interval 1 --log-interval 1 --eval-iters 0 --data-path"
STEP = "iteration        1/"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to the first training step.", allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=5, help="alternations (default: 5)")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(f"{folder}/text")
        flags = [*FLAGS.split(), f"{folder}/text", *flags]
        launch = [str(ROOT / "tools" / "launch.py"), "--device", "cpu", "--devices-per-node", "4", "--"]
        commands = {
            "import torch": ["-c", f"import torch; print({STEP!r})"],
            "one rank": ["-m", "megatron.train", "--device", "cpu", *flags],
            "four ranks": [*launch, "--pipeline-model-parallel-size", "2", *flags],
        }
        measured = alternate(
            {name: partial(seconds_to_step, command) for name, command in commands.items()},
            options.rounds,
        )
    is_met = True
    print(f"import torch: {spread(measured['import torch'])} s")
    for name, limit in LIMITS.items():
        ratios = quotients(measured[name], measured["import torch"])
        is_met &= statistics.median(ratios) <= limit
        print(f"{name}: {spread(measured[name])} s, {spread(ratios)} times import torch (limit: {limit})")
    return 0 if is_met else 1


def seconds_to_step(command: list[str]) -> float:
    """Return the seconds until a Python command prints the row of its first step. Raises RuntimeError."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    start_s = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if STEP in line:
                elapsed_s = time.perf_counter() - start_s
                process.communicate()
                return elapsed_s
    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before its first step")


def write_dataset(prefix: str) -> None:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in np.random.default_rng(0).integers(0, 512, (512, 128), np.uint16):
            builder.add_document(document)
        builder.finalize()


if __name__ == "__main__":
    sys.exit(main())
