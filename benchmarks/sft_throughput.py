"""Loss-bearing tokens a second of fine-tuning: packed rows against padded ones, the same chats, the same model.

    python benchmarks/sft_throughput.py --data-path PREFIX [--config tiny_llama] [--rounds 9] [FLAGS of megatron.train]

PREFIX is what tools/preprocess_chat.py wrote. Three engines in one process take turns over the same global batches:
packed (packing=step), padded (packing=none, chats of like length beside each other), and padded as they come, which is
what a plain data loader gives. All see at most max_batch_len places at once. Prints trained tokens a second,
the ratios round by round, and the losses, which must agree.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, quotients, spread

STEPS = 2
"""A round."""


def side(options: argparse.Namespace, flags: list[str], packing: str) -> tuple[Callable[[], float], list[float]]:
    """A function that trains STEPS steps and gives the trained tokens a second, and the losses it adds."""
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.sft import SFTTask
    from megatron.training.build import build_engine

    words = ["--config", options.config, "--task", "sft", "--num-epochs", "1", "--train-samples", "none"]
    words += ["--data-path", options.data_path, "--split", "1,0,0", "--device", "cpu"]
    words += ["--global-batch-size", str(options.global_batch_size), "--seq-length", str(options.seq_length)]
    if packing == "packed":
        words += ["--packing", "step", "--micro-batch-size", "1", "--max-batch-len", str(options.max_batch_len)]
    else:
        per_microbatch = options.max_batch_len // options.seq_length
        words += ["--packing", "none", "--micro-batch-size", str(per_microbatch)]
    config, _ = parse_arguments([*words, *flags])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = SFTTask(config)
    dataset: Any = task.data.open(ctx)[0]
    size = config.training.global_batch_size
    plan = task.data.plan(dataset, lambda _: size, 0, 1)
    engine = build_engine(config, ctx, task)
    losses: list[float] = []
    consumed = 0

    def run() -> float:
        nonlocal consumed
        began_s, trained = time.perf_counter(), 0.0
        for _ in range(STEPS):
            if consumed + size > len(dataset):
                consumed = 0
            keys = plan(consumed)[1]
            if packing == "as they come":
                chats = dataset.order(0)[consumed : consumed + size]
                count = config.training.micro_batch_size
                keys = [[chats[i : i + 1] for i in range(at, min(at + count, size))] for at in range(0, size, count)]
            batches = [task.read(dataset, key) for key in keys]
            trained += sum(batch.normaliser for batch in batches)
            result = engine.train_step(batches, consumed_samples=consumed, lr=config.optimizer.lr)
            losses.append(float(result.loss))
            consumed += size
        return trained / (time.perf_counter() - began_s)

    print(f"{packing}: {task.data.facts(dataset).describe()}")
    return run, losses


def main() -> int:
    parser = argparse.ArgumentParser(description="Packed against padded fine-tuning.", allow_abbrev=False)
    parser.add_argument("--data-path", required=True, help="prefix of a chat dataset")
    parser.add_argument("--config", default="tiny_llama", help="preset (default: tiny_llama)")
    parser.add_argument("--rounds", type=positive, default=9, help="alternations (default: 9)")
    parser.add_argument("--seq-length", type=positive, default=1024, help="longest chat (default: 1024)")
    parser.add_argument("--max-batch-len", type=positive, default=4096, help="places of a microbatch (default: 4096)")
    parser.add_argument("--global-batch-size", type=positive, default=64, help="chats of a step (default: 64)")
    options, flags = parser.parse_known_args()

    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    names = ("packed", "padded", "as they come")
    built = {name: side(options, flags, name) for name in names}
    measured = alternate({name: run for name, (run, _) in built.items()}, options.rounds)
    print(f"{options.config}: {torch.get_num_threads()} threads, {options.rounds} rounds of {STEPS} steps")
    for name in names:
        print(f"{name:13s} {spread(measured[name], 0)} trained tokens/s")
    for name in names[1:]:
        print(f"packed / {name}: {spread(quotients(measured['packed'], measured[name]), 2)}")
    apart = max(abs(a - b) for name in names[1:] for a, b in zip(built["packed"][1], built[name][1], strict=True))
    print(f"largest difference of the losses: {apart:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
