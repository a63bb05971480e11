"""Reading megatron-core's distributed checkpoints onto another layout, against plain reading of their files.

    python benchmarks/read_megatron_core.py [--gigabytes 1.5] [--rounds 3] [--folder PATH]

The weights of a Llama, `--gigabytes` of them, as `tools/convert_checkpoint.py --to megatron-core` writes them. In turn,
each with the files out of the page cache:
    ours        2 ranks, tensor-parallel: from the checkpoint's metadata to the weights in a built engine, checksums too
    the disk    2 processes read half of the files' bytes each, in blocks

Prints seconds, bytes a second, the ratio round by round, and the most memory that a rank had in restoring against that
of its built engine. Exit status 1 if the ratio of the rates is below 0.7 or that of the memory above 1.2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, quotients, spread
from benchmarks.checkpoint_relayout import memory_bytes
from benchmarks.checkpointing import (
    add_folder_option,
    build,
    files_in,
    fsync,
    llama,
    num_bytes,
    num_parameters,
    run_ranks,
    train_step,
    work_folder,
)

RATE_LIMIT, MEMORY_LIMIT = 0.7, 1.2
CONVERTER = Path(__file__).resolve().parent.parent / "tools" / "convert_checkpoint.py"
HIDDEN, VOCABULARY = 1024, 32000
NUMBER_BYTES = 4
"""Bytes of a parameter in the checkpoint."""
BLOCK = 2**23
TENSOR_PARALLEL = "--tensor-model-parallel-size 2"


@dataclass(frozen=True)
class Read:
    """Report of one rank."""

    seconds: float
    peak_bytes: int
    """The most resident memory at any moment of restoring, less what there was before the engine."""
    built_bytes: int
    """Likewise, when the engine had been built and nothing restored."""


def save(arguments: str, folder: Path) -> None:
    """Take a step, and save it in our format."""
    from megatron.options.progress import Progress
    from megatron.training.checkpoints import Checkpoints

    engine, task = build(f"{arguments} --save {folder}")
    train_step(engine, task)
    checkpoints = Checkpoints(engine.config, engine.ctx)
    checkpoints.save(engine, Progress(iteration=1), "")
    checkpoints.finish(lambda _: None)


def read(arguments: str, folder: Path) -> Read:
    """Build an engine, and restore the checkpoint into it."""
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.training.resume import read_progress, restore
    from megatron.weights.loader import find_checkpoint

    arguments = f"{arguments} --load {folder}"
    config, _ = parse_arguments(arguments.split())
    ctx = ParallelContext.build(config.parallel, "cpu")
    before_bytes = memory_bytes("VmRSS")
    engine, _ = build(arguments, ctx, will_restore=True)
    built_bytes = memory_bytes("VmRSS") - before_bytes
    # makes VmHWM the memory of now
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    ctx.gather_objects(None)  # both begin at once
    began_s = time.monotonic()
    checkpoint = find_checkpoint(config, ctx)
    assert checkpoint is not None
    restore(engine, checkpoint, read_progress(checkpoint, config.checkpoint)[0])
    seconds = time.monotonic() - began_s
    return Read(seconds, memory_bytes("VmHWM") - before_bytes, built_bytes)


def read_plainly(paths: Sequence[Path], number: int) -> None:
    """Read every other block of the files."""
    buffer = bytearray(BLOCK)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            for begin in range(number * BLOCK, path.stat().st_size, 2 * BLOCK):
                file.seek(begin)
                file.readinto(buffer)


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in files_in(folder):
        fsync(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description="Reading megatron-core's checkpoints.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=1.5, metavar="N", help="of the checkpoint (default: 1.5)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="alternations (default: 3)")
    add_folder_option(parser)
    options = parser.parse_args()

    ends, layer = num_parameters(HIDDEN, 0, VOCABULARY), num_parameters(HIDDEN, 1, 0)
    layers = max(1, round((options.gigabytes * 1e9 / NUMBER_BYTES - ends) / layer))
    model = f"{llama(HIDDEN, layers, VOCABULARY)} --global-batch-size 2 --zero-stage 1"
    read_by: list[list[Read]] = []
    with work_folder(options.folder, int(6e9 * options.gigabytes)) as folder:
        run_ranks(2, save, f"{model} {TENSOR_PARALLEL}", folder / "ours")
        core = folder / "core"
        command = [sys.executable, str(CONVERTER), "--load", str(folder / "ours"), "--save", str(core)]
        subprocess.run([*command, "--to", "megatron-core", "--no-verify"], check=True, stdout=subprocess.DEVNULL)
        paths = files_in(core)

        def ours() -> float:
            forget(core)
            read_by.append(run_ranks(2, read, f"{model} {TENSOR_PARALLEL}", core))
            return max(each.seconds for each in read_by[-1])

        def disk() -> float:
            forget(core)
            began_s = time.monotonic()
            readers = [multiprocessing.Process(target=read_plainly, args=(paths, number)) for number in range(2)]
            for each in readers:
                each.start()
            for each in readers:
                each.join()
            return time.monotonic() - began_s

        seconds = alternate({"ours": ours, "the disk": disk}, options.rounds, warm_up=False)
        size = num_bytes(core)

    print(f"{layers} layers, {size / 1e9:.2f} GB in {len(paths)} files, {options.rounds} rounds: median (from to)")
    for name, taken in seconds.items():
        print(f"  {name:9s} {spread(taken, 2)} s, {size / statistics.median(taken) / 1e9:.2f} GB/s")
    ratios = quotients(seconds["the disk"], seconds["ours"])
    print(f"  ratio of the rates {spread(ratios, 2)}, at least {RATE_LIMIT} wanted")
    most = max(each.peak_bytes / each.built_bytes for ranks in read_by for each in ranks)
    built = max(each.built_bytes for each in read_by[0]) / 1e9
    print(f"  most memory of a rank {most:.2f} times the {built:.2f} GB of its engine, at most {MEMORY_LIMIT} wanted")
    return 0 if statistics.median(ratios) >= RATE_LIMIT and most <= MEMORY_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
