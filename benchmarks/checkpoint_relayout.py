"""From one layout to another: a checkpoint of TP2 PP2 DP2 resumed on TP1 PP1 DP2, ours against DeepSpeed's own way.

    python benchmarks/checkpoint_relayout.py [--hidden-size 1024] [--num-layers 16] [--rounds 3] [--folder PATH]

A Llama with Adam, float32, ZeRO-1. 8 processes make it once, take a step, and save it in both formats. Then, in turn,
from before the first process starts until the last rank could take its first step:
    ours                2 ranks: checksums of the whole checkpoint, engine, `restore`
    DeepSpeed           deepspeed.checkpoint.ds_to_universal with its own numbers of workers; then 2 ranks: the same
                        engine with `load_universal`, load_checkpoint. It checks no checksums, and waits for no disk
Both then take a step, whose losses must be equal to 1e-6.

Prints seconds, the ratio round by round, and by how much a rank's memory had grown when the engine was built and at
most in restoring, against what it keeps: parameters, float32 weights and moments of the optimizer. Exit status 1 if the
median ratio is below 5, our peak above 1.3 times what is kept, or the losses differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, quotients, spread
from benchmarks.checkpointing import add_folder_option, build, llama, num_parameters, run_ranks, train_step, work_folder

SPEED_LIMIT = 5.0
MEMORY_LIMIT = 1.3
SOURCE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
TAG = "global_step1"
UNIVERSAL = "universal"
PHASES = ("kept", "built", "peak")


@dataclass(frozen=True)
class Resumed:
    """Report of one rank on its start."""

    ready_s: float
    """By the machine's monotonic clock."""
    loss: float
    peak_bytes: int
    """The most resident memory at any moment of restoring, less what there was before the engine."""
    built_bytes: int
    """Likewise, when the engine had been built and nothing restored."""
    kept_bytes: int


def save_source(arguments: str, folder: Path) -> None:
    """A step, then a checkpoint in our format and one in DeepSpeed's."""
    from megatron.options.progress import Progress
    from megatron.parallel.shards import named_parameters, shard_of
    from megatron.runtime.accelerator import quiet
    from megatron.training.checkpoints import Checkpoints
    from megatron.weights.deepspeed.universal import universal_info

    engine, task = build(f"{arguments} --save {folder / 'ours'}")
    train_step(engine, task)
    checkpoints = Checkpoints(engine.config, engine.ctx)
    checkpoints.save(engine, Progress(iteration=1), "")
    checkpoints.finish(lambda _: None)
    own = {name: shard_of(parameter) for name, parameter in named_parameters(engine.module)}
    shards = {name: shard for found in engine.ctx.gather_objects(own) for name, shard in found.items()}
    client_state = {"iteration": 1, "universal_checkpoint_info": universal_info(shards, engine.ctx.tensor_size)}
    with quiet():
        engine.deepspeed.save_checkpoint(str(folder / "deepspeed"), tag=TAG, client_state=client_state)


def resume(arguments: str, folder: Path) -> Resumed:
    """Ours as train.py does it, where `folder` is a checkpoint of ours, else DeepSpeed's universal one."""
    from megatron.parallel.context import ParallelContext
    from megatron.runtime.accelerator import quiet
    from megatron.settings.command_line import parse_arguments
    from megatron.training.resume import read_progress, restore
    from megatron.weights.loader import find_checkpoint

    ours = not (folder / UNIVERSAL).is_dir()
    if ours:
        arguments = f"{arguments} --load {folder}"
    else:
        arguments = f"{arguments} --deepspeed-config {folder / 'load_universal.json'}"
    config, _ = parse_arguments(arguments.split())
    ctx = ParallelContext.build(config.parallel, "cpu")
    before_bytes = memory_bytes("VmRSS")
    checkpoint = find_checkpoint(config, ctx)
    engine, task = build(arguments, ctx, will_restore=True)
    built_bytes = memory_bytes("VmRSS")
    # makes VmHWM the memory of now
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if ours:
        assert checkpoint is not None
        restore(engine, checkpoint, read_progress(checkpoint, config.checkpoint)[0])
    else:
        with quiet():
            path, _ = engine.deepspeed.load_checkpoint(str(folder), tag=UNIVERSAL)
        assert path is not None
    ready_s = time.monotonic()
    peak_bytes = memory_bytes("VmHWM")
    return Resumed(
        ready_s,
        train_step(engine, task),
        peak_bytes - before_bytes,
        built_bytes - before_bytes,
        kept_bytes(engine.deepspeed.optimizer, engine.module),
    )


def memory_bytes(field: str) -> int:
    """VmRSS: what this process has in memory. VmHWM: the most it had."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def kept_bytes(optimizer: Any, module: Any) -> int:
    """Bytes of the parameters and of their float32 weights and moments."""
    inner = optimizer.optimizer
    tensors = [*module.parameters(), *(tensor for group in inner.param_groups for tensor in group["params"])]
    tensors += [value for state in inner.state.values() for value in state.values() if hasattr(value, "numel")]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def convert(folder: Path) -> None:
    """DeepSpeed's own tool, in a process of its own as its documentation has it. Raises CalledProcessError."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / TAG), "--output_folder", str(folder / UNIVERSAL)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Changing the layout, against DeepSpeed's way.", allow_abbrev=False)
    parser.add_argument("--hidden-size", type=positive, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--num-layers", type=positive, default=16, metavar="N", help="even; default: 16")
    parser.add_argument("--vocab-size", type=positive, default=32000, metavar="N", help="default: 32000")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="alternations (default: 3)")
    add_folder_option(parser)
    options = parser.parse_args()

    sizes = options.hidden_size, options.num_layers, options.vocab_size
    model = f"{llama(*sizes)} --global-batch-size 2 --zero-stage 1"
    conversions: list[float] = []
    resumed: dict[str, list[Resumed]] = {"ours": [], "DeepSpeed": []}
    with work_folder(options.folder, 70 * num_parameters(*sizes)) as folder:
        run_ranks(8, save_source, f"{model} {SOURCE}", folder)
        settings = {"checkpoint": {"load_universal": True}}
        (folder / "deepspeed" / "load_universal.json").write_text(json.dumps(settings), encoding="ascii")

        def ours() -> float:
            os.sync()  # what the other side did not wait for
            began_s = time.monotonic()
            resumed["ours"] = run_ranks(2, resume, model, folder / "ours")
            return max(rank.ready_s for rank in resumed["ours"]) - began_s

        def theirs() -> float:
            shutil.rmtree(folder / "deepspeed" / UNIVERSAL, ignore_errors=True)
            os.sync()
            began_s = time.monotonic()
            convert(folder / "deepspeed")
            conversions.append(time.monotonic() - began_s)
            resumed["DeepSpeed"] = run_ranks(2, resume, model, folder / "deepspeed")
            return max(rank.ready_s for rank in resumed["DeepSpeed"]) - began_s

        seconds = alternate({"ours": ours, "DeepSpeed": theirs}, options.rounds, warm_up=False)

    print(f"{num_parameters(*sizes) / 1e6:.0f} million parameters, {options.rounds} rounds: median (from to)")
    print(f"  ours       {spread(seconds['ours'], 2)} s")
    print(f"  DeepSpeed  {spread(seconds['DeepSpeed'], 2)} s, {spread(conversions, 2)} s of it ds_to_universal")
    ratios = quotients(seconds["DeepSpeed"], seconds["ours"])
    print(f"  ratio      {spread(ratios, 2)}, at least {SPEED_LIMIT:g} wanted")
    for name, ranks in resumed.items():
        kept, built, peak = (max(getattr(rank, f"{what}_bytes") for rank in ranks) / 1e9 for what in PHASES)
        print(
            f"  memory of a rank, {name:9s} keeps {kept:.2f} GB; engine built {built:.2f}, most in restoring {peak:.2f}"
        )
    peak = max(rank.peak_bytes / rank.kept_bytes for rank in resumed["ours"])
    print(f"  our peak   {peak:.2f} times what is kept, at most {MEMORY_LIMIT:g} wanted")
    losses = {name: ranks[0].loss for name, ranks in resumed.items()}
    equal = math.isclose(losses["ours"], losses["DeepSpeed"], rel_tol=1e-6)
    print(f"  next loss  {losses['ours']:.7f} and {losses['DeepSpeed']:.7f}: {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal and statistics.median(ratios) >= SPEED_LIMIT and peak <= MEMORY_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
