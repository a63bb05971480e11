"""Speed and memory of merging adapters into a Hugging Face model, against a plain copy of its folder.

    python benchmarks/merge_adapter.py [--gigabytes 2] [--rank 16] [--rounds 5] [--peft-python PATH] [--folder PATH]

The model is a Llama of random bfloat16 weights in files of a gigabyte; the adapter is on all linear layers but the
output. "merge" is what `tools/merge_adapter.py` reports of itself: opening, merging, writing and fsync; "command" is
the whole command, with the start of Python and torch. The copy is `cp -r` of the base's folder and fsync of each file.
They run in turn, and what is read lies in the page cache. Memory is the most the command had, above that of a process
that imports the same modules.

With `--peft-python`, an interpreter with peft and transformers, PEFT loads, merges and saves the same once a round,
and the merged tensors are compared bit by bit.

Exit status 1 if the median of merge to copy is above 1.5, memory above 1.3 times the largest tensor, or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file

from benchmarks.alternating import alternate, peer_command, peer_environment, positive, quotients, spread
from benchmarks.checkpointing import add_folder_option, files_in, fsync, num_bytes, num_parameters, work_folder
from benchmarks.convert_huggingface import first_difference, weights, write_model

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LARGEST_RATIO, LARGEST_MEMORY = 1.5, 1.3
VOCAB_SIZE = 32_000
IMPORTS = """
from megatron.runtime import accelerator
accelerator.choose_device("cpu")
import megatron.weights.peft.adapter_merge
"""

# in between, a process without torch: Linux counts the most memory of a parent as its children's
MEASURED = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime)
sys.exit(status)
"""


def write_inputs(folder: Path, hidden_size: int, num_layers: int, rank: int) -> None:
    write_model(folder / "base", hidden_size, num_layers, VOCAB_SIZE, torch.bfloat16)
    tensors = {}
    for name, shape in weights(hidden_size, num_layers, VOCAB_SIZE):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module.endswith("_proj"):
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1]) * 0.02
            tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank) * 0.02
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": MODULES}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


class Finished(NamedTuple):
    """Times, memory and output of a command."""

    elapsed_s: float
    processor_s: float
    peak_bytes: int
    output: str


def finished(command: Sequence[str], environment: dict[str, str] | None = None) -> Finished:
    """Run a command. Exits if it fails."""
    began_s = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    seconds = time.perf_counter() - began_s
    if run.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {run.returncode}")
    output, _, used = run.stdout.rstrip().rpartition("\n")
    peak, processor_s = used.split()
    return Finished(seconds, float(processor_s), int(peak) * 1024, output)


class Sides:
    """Sides that run in turn, and figures beside their times."""

    def __init__(self, folder: Path, peft_python: str | None) -> None:
        self._folder, self._peft_python = folder, peft_python
        self.commands_s: list[float] = []
        self.processor_s: dict[str, list[float]] = {"merge": [], "copy": []}
        self.peaks: dict[str, int] = {"ours": 0, "PEFT": 0}
        self.differs: str | None = None

    def merge(self) -> float:
        """Return the seconds that the command reports."""
        merged = self._folder / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        os.sync()
        places = ["--base", str(self._folder / "base"), "--adapter", str(self._folder / "adapter")]
        tool = str(ROOT / "tools" / "merge_adapter.py")
        run = finished([sys.executable, tool, *places, "--save", str(merged)])
        self.commands_s.append(run.elapsed_s)
        self.processor_s["merge"].append(run.processor_s)
        self.peaks["ours"] = max(self.peaks["ours"], run.peak_bytes)
        reported = re.search(r" in ([0-9.]+) s$", run.output)
        assert reported is not None, run.output
        return float(reported[1])

    def copy(self) -> float:
        os.sync()
        copy = self._folder / "copy"
        began_s, before = time.perf_counter(), os.times()
        subprocess.run(["cp", "-r", str(self._folder / "base"), str(copy)], check=True)
        for path in files_in(copy):
            fsync(path)
        fsync(copy)
        seconds, used = time.perf_counter() - began_s, os.times()
        self.processor_s["copy"].append(sum(used[:4]) - sum(before[:4]))
        shutil.rmtree(copy)
        return seconds

    def peft(self) -> float:
        assert self._peft_python is not None
        os.sync()
        theirs = self._folder / "theirs"
        command = peer_command(self._peft_python, "peft_merge.py")
        places = [str(self._folder / name) for name in ("base", "adapter", "theirs")]
        run = finished([*command, *places], peer_environment())
        self.peaks["PEFT"] = max(self.peaks["PEFT"], run.peak_bytes)
        self.differs = first_difference(self._folder / "merged", theirs)
        shutil.rmtree(theirs)
        return run.elapsed_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Merging adapters, against a copy of the base.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="G", help="of the base (default: 2)")
    parser.add_argument("--hidden-size", type=positive, default=2048, metavar="N", help="default: 2048")
    parser.add_argument("--rank", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    parser.add_argument("--peft-python", metavar="PATH", help="interpreter with peft and transformers")
    add_folder_option(parser)
    options = parser.parse_args()

    ends, one_more = (num_parameters(options.hidden_size, layers, VOCAB_SIZE) for layers in (0, 1))
    num_layers = max(1, round((options.gigabytes * 1e9 / 2 - ends) / (one_more - ends)))
    needed_bytes = 4 * 2 * num_parameters(options.hidden_size, num_layers, VOCAB_SIZE)
    with work_folder(options.folder, needed_bytes) as folder:
        shape = folder, options.hidden_size, num_layers, options.rank
        # in a process of its own: this one stays small
        writer = multiprocessing.get_context("spawn").Process(target=write_inputs, args=shape)
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"error: writing the model ended with status {writer.exitcode}")
        sides = Sides(folder, options.peft_python)
        measured = {"merge": sides.merge, "copy": sides.copy}
        if options.peft_python:
            measured["PEFT"] = sides.peft
        times = alternate(measured, options.rounds)
        base_bytes = num_bytes(folder / "base")
        started = finished([sys.executable, "-c", IMPORTS], os.environ | {"PYTHONPATH": str(ROOT)})

    largest = max(2 * rows * columns for _, (rows, columns) in matrices(options.hidden_size))
    ratios = quotients(times["merge"], times["copy"])
    above = sides.peaks["ours"] - started.peak_bytes
    merging_s = [seconds - started.processor_s for seconds in sides.processor_s["merge"][1:]]
    print(f"{base_bytes / 1e9:.2f} GB in bfloat16, rank {options.rank}, {options.rounds} rounds: median (from to)")
    for name, values in times.items():
        print(f"  {name:8s} {spread(values, 2)} s, {base_bytes / statistics.median(values) / 1e9:.2f} GB/s")
    print(f"  command  {spread(sides.commands_s[1:], 2)} s")
    print(f"  ratio of merge to copy: {spread(ratios, 2)}, aim at most {LARGEST_RATIO}")
    print(
        f"  processor time: merge {spread(merging_s, 2)} s beside its imports, of {torch.get_num_threads()} threads; "
        f"copy {spread(sides.processor_s['copy'][1:], 2)} s"
    )
    print(
        f"  memory: {sides.peaks['ours'] / 1e6:.0f} MB, {above / 1e6:.0f} above its imports: "
        f"{above / largest:.2f} times the largest tensor of {largest / 1e6:.0f} MB, aim at most {LARGEST_MEMORY}"
    )
    if options.peft_python:
        same = "equal bit for bit" if sides.differs is None else f"{sides.differs} DIFFERS"
        print(f"  PEFT: {sides.peaks['PEFT'] / 1e6:.0f} MB; merged tensors: {same}")
        print(f"  ratio of PEFT to the whole command: {spread(quotients(times['PEFT'], sides.commands_s[1:]), 2)}")
    kept = statistics.median(ratios) <= LARGEST_RATIO and above <= LARGEST_MEMORY * largest
    return 0 if kept and sides.differs is None else 1


def matrices(hidden_size: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, shape) for name, shape in weights(hidden_size, 1, VOCAB_SIZE) if len(shape) == 2]


if __name__ == "__main__":
    sys.exit(main())
