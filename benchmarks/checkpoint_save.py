"""Time of a checkpoint, and the time that training waits for it: ours against torch's and DeepSpeed's.

    python benchmarks/checkpoint_save.py [--gigabytes 1] [--rounds 5] [--folder PATH] [FLAGS of megatron.train]

4 processes hold a Llama and the moments of Adam, all float32: `--gigabytes` of state. The layout is TP2 PP2, where
DeepSpeed writes every number once, as ours does; FLAGS such as `--tensor-model-parallel-size 1 --zero-stage 1` change
it.

A durable save, from a barrier before to a barrier after, fsync counted:
    ours                what a run does: `Checkpoints.save` and `finish`, without --async-save
    torch               torch.distributed.checkpoint.save of the same tensors, which waits for its files; then, what it
                        does not, fsync of the folder
    DeepSpeed           save_checkpoint of the same engine, then fsync of its files and folder, as it waits for neither
The asynchronous save, on the slowest rank, when nothing else is going on:
    ours                `Checkpoints.save` alone: what training waits for
    memcpy              a copy of the same tensors into buffers that are there and were written to before
One round before is not counted, so buffers are warm on both sides.

Prints medians and ratios. Exit status 1 if ours is not 2.5 times as fast as each peer, or blocks 1.25 times a memcpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, quotients, spread
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

if TYPE_CHECKING:
    from megatron.training.checkpoints import Checkpoints
    from megatron.training.engine import Engine

DURABLE_LIMIT = 2.5
BLOCKING_LIMIT = 1.25
NUM_RANKS = 4
VOCAB_SIZE = 4096
BYTES_PER_PARAMETER = 12
"""A float32 weight and two moments."""
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"

Times = dict[str, list[float]]


def measure(arguments: str, folder: Path, rounds: int) -> tuple[Times, Times, dict[str, int]]:
    """On each rank: seconds of the durable saves, seconds of the blocking ones, bytes that each durable save wrote."""
    engine, task = build(arguments)
    train_step(engine, task)
    saved, written = durable_saves(engine, folder, rounds)
    return saved, blocking_saves(engine, folder, rounds), written


def durable_saves(engine: Engine, folder: Path, rounds: int) -> tuple[Times, dict[str, int]]:
    """Seconds of each save, and the bytes that it wrote. Collective."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_checkpoint

    from megatron.options.progress import Progress
    from megatron.runtime.accelerator import quiet

    rank, world_size = engine.ctx.rank, engine.ctx.world_size
    written: dict[str, int] = {}

    checkpoints = checkpoints_in(engine, folder / "ours", asynchronous=False)

    def ours(_: Path, turn: int) -> None:
        checkpoints.save(engine, Progress(iteration=turn), "")
        checkpoints.finish(lambda _: None)

    # plain tensors of one name are one tensor to it; each rank's are its own
    owned = engine.state.fragments(with_optimizer=True)
    tensors = {f"rank{rank}/{fragment.kind}/{fragment.name}": fragment.tensor for fragment in owned}

    def torchs(place: Path, turn: int) -> None:
        torch_checkpoint.save(tensors, checkpoint_id=place / str(turn))
        if rank == 0:
            fsync(place / str(turn))
            fsync(place)

    def deepspeeds(place: Path, turn: int) -> None:
        with quiet():
            engine.deepspeed.save_checkpoint(str(place), tag=str(turn))
        dist.barrier()
        for path in files_in(place)[rank::world_size]:
            fsync(path)
        if rank == 0:
            fsync(place / str(turn))
            fsync(place)

    sides = {"ours": ours, "torch": torchs, "DeepSpeed": deepspeeds}
    return alternate({name: timed(save, folder / name, rank, written) for name, save in sides.items()}, rounds), written


def timed(save: Callable[[Path, int], None], place: Path, rank: int, written: dict[str, int]) -> Callable[[], float]:
    """Return a function that saves into `place`, removes the save, and returns its seconds. Collective."""
    import torch.distributed as dist

    turn = 0

    def side() -> float:
        nonlocal turn
        turn += 1
        if rank == 0:
            os.sync()  # finishes the removal of the previous save
        dist.barrier()
        began_s = time.perf_counter()
        save(place, turn)
        dist.barrier()
        seconds = time.perf_counter() - began_s
        if rank == 0:
            written[place.name] = num_bytes(place)
            for path in place.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
        dist.barrier()
        return seconds

    return side


def blocking_saves(engine: Engine, folder: Path, rounds: int) -> Times:
    """Seconds that training waits for an asynchronous save, and for a copy of the same tensors. Collective."""
    import torch
    import torch.distributed as dist

    from megatron.options.progress import Progress

    checkpoints, turn = checkpoints_in(engine, folder / "asynchronous", asynchronous=True), 0

    def blocking() -> float:
        nonlocal turn
        turn += 1
        dist.barrier()
        began_s = time.perf_counter()
        checkpoints.save(engine, Progress(iteration=turn), "")
        seconds = time.perf_counter() - began_s
        checkpoints.finish(lambda _: None)
        if engine.ctx.rank == 0:
            shutil.rmtree(folder / "asynchronous" / f"global_step{turn}")
        return seconds

    owned = engine.state.fragments(with_optimizer=True)
    buffers = [torch.empty_like(fragment.tensor) for fragment in owned]

    def memcpy() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        for buffer, fragment in zip(buffers, owned, strict=True):
            buffer.copy_(fragment.tensor)
        return time.perf_counter() - began_s

    return alternate({"ours": blocking, "memcpy": memcpy}, rounds)


def checkpoints_in(engine: Engine, folder: Path, *, asynchronous: bool) -> Checkpoints:
    """Checkpoints object of a run with `--save folder`. Collective."""
    from megatron.training.checkpoints import Checkpoints

    options = dataclasses.replace(engine.config.checkpoint, save=str(folder), async_save=asynchronous)
    return Checkpoints(dataclasses.replace(engine.config, checkpoint=options), engine.ctx)


def main() -> int:
    parser = argparse.ArgumentParser(description="Saving, against torch's and DeepSpeed's.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=1.0, metavar="G", help="of state (default: 1)")
    parser.add_argument("--hidden-size", type=positive, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    add_folder_option(parser)
    options, flags = parser.parse_known_args()

    wanted, hidden_size = options.gigabytes * 1e9 / BYTES_PER_PARAMETER, options.hidden_size
    ends, one_more = (num_parameters(hidden_size, layers, VOCAB_SIZE) for layers in (0, 1))
    num_layers = max(2, 2 * round((wanted - ends) / (one_more - ends) / 2))  # as many on each stage
    arguments = f"{llama(hidden_size, num_layers, VOCAB_SIZE)} --global-batch-size {NUM_RANKS} {LAYOUT}"
    state_bytes = num_parameters(hidden_size, num_layers, VOCAB_SIZE) * BYTES_PER_PARAMETER
    with work_folder(options.folder, 2 * state_bytes) as folder:
        results = run_ranks(NUM_RANKS, measure, " ".join([arguments, *flags]), folder, options.rounds)

    saved, _, written = results[0]
    print(f"{state_bytes / 1e9:.2f} GB of state, {NUM_RANKS} ranks, {options.rounds} rounds: median (from to)")
    passed = True
    for name, times in saved.items():
        speed = written[name] / statistics.median(times) / 1e9
        print(f"  durable save, {name:10s} {spread(times)} s, {written[name] / 1e9:.2f} GB, {speed:.2f} GB/s")
    for name in ("torch", "DeepSpeed"):
        ratios = quotients(saved[name], saved["ours"])
        print(f"  ratio to {name:15s} {spread(ratios, 2)}, at least {DURABLE_LIMIT:g} wanted")
        passed &= statistics.median(ratios) >= DURABLE_LIMIT
    blocked = {
        name: [max(turn) for turn in zip(*(result[1][name] for result in results), strict=True)]
        for name in ("ours", "memcpy")
    }
    print(f"  asynchronous save waits  {spread(blocked['ours'])} s")
    print(f"  memcpy                   {spread(blocked['memcpy'])} s")
    ratios = quotients(blocked["ours"], blocked["memcpy"])
    print(f"  ratio                    {spread(ratios, 2)}, at most {BLOCKING_LIMIT:g} wanted")
    return 0 if passed and statistics.median(ratios) <= BLOCKING_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
