"""Time to save the adapters of Llama 2 7B (rank 16), as a run saves them on one rank.

    python benchmarks/adapter_save.py [--rounds 5] [--folder PATH] [FLAGS of megatron.train]

Weights and Adam's moments, float32, of adapters on every linear layer; FLAGS such as `--lora-target-modules q_proj
v_proj` change that.
    training waits      an asynchronous save returns: what the next step waits for
    durable             the same save until it is complete and on disk
    PEFT                export of the weights as a folder of PEFT, on disk
    write               the bytes of the durable save in one file, fsync counted

Prints medians of wall-clock and of processor time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import positive
from benchmarks.checkpointing import add_folder_option, work_folder

MODEL = "--config llama2_7b --lora-rank 16 --data-path none --train-iters 1 --device cpu"


def measure(folder: Path, arguments: list[str], rounds: int) -> None:
    import torch

    from megatron.checkpoint.format import Fragment
    from megatron.checkpoint.saver import Saver
    from megatron.settings.command_line import parse_arguments
    from megatron.weights.peft.export import AdaptedModel, export_adapter

    config, _ = parse_arguments([*MODEL.split(), *arguments])
    shards = AdaptedModel(config).shards
    weights = {name: torch.rand(shard.shape) for name, shard in shards.items()}
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    fragments = [
        Fragment(n, kind, shards[n], 0, 1, 0, w.flatten().clone()) for n, w in weights.items() for kind in kinds
    ]
    num_bytes = sum(4 * fragment.tensor.numel() for fragment in fragments)
    content = b"\1" * num_bytes
    savers = {
        kind: Saver(
            folder / kind,
            rank=0,
            world_size=1,
            asynchronous=kind == "waits",
            keep_last=1,
            retain_interval=None,
            timeout_s=600.0,
        )
        for kind in ("waits", "durable")
    }
    turn = 0

    def saved(kind: str) -> None:
        savers[kind].save(f"global_step{turn}", f"token{turn}", fragments, {})

    def exported() -> None:
        (folder / f"peft{turn}").mkdir()
        export_adapter(folder / f"peft{turn}", config, iter(weights.items()), base_name="base")

    def written() -> None:
        with (folder / "raw").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    sides: dict[str, Callable[[], None]] = {
        "training waits": lambda: saved("waits"),
        "durable": lambda: saved("durable"),
        "PEFT": exported,
        "write": written,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):  # the first is not counted
        for name, side in sides.items():
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            side()
            times[name].append((time.monotonic() - began_s, time.process_time() - began_cpu_s))
            savers["waits"].wait()
        shutil.rmtree(folder / f"peft{turn}")
    print_medians(times, num_bytes)


def print_medians(times: dict[str, list[tuple[float, float]]], num_bytes: int) -> None:
    print(f"{num_bytes // 12 / 1e6:.1f}M parameters, {num_bytes / 1e6:.0f} MB in a checkpoint")
    for name, found in times.items():
        wall, processor = (statistics.median(column) for column in zip(*found[1:], strict=True))
        print(f"{name:15} {wall * 1e3:7.1f} ms, {processor * 1e3:7.1f} ms of the processor")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5)
    add_folder_option(parser)
    options, arguments = parser.parse_known_args()
    with work_folder(options.folder, 4 * 10**9) as folder:
        measure(folder, arguments, options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
