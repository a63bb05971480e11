"""Muon beside AdamW: the time of a step and its state, and the loss on real text.

    python benchmarks/muon.py --data FOLDER [--sections step loss] [--rounds 5] [--steps 600] [--rates 5]

step: a Llama of 30 million parameters, two data-parallel ranks of one core each, ZeRO-1, 16 rows of 1,024 tokens.
Prints the ratio of the steps' times, alternated (aim: 1.15), and that of the optimizers' states (aim: 0.55).
loss: a small Llama over the bytes of FOLDER/tinyshakespeare.txt, one process. Both optimizers train at each of so many
learning rates; prints the losses on the held-out tenth of the text, and the ratio of the best ones (aim: 0.985).

Exit status 1 if an aim is missed.
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
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread

SECTIONS = ("step", "loss")
TIME, STATE, LOSS = 1.15, 0.55, 0.985
BATCH, LENGTH = 16, 1024
COMMON = (
    "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --make-vocab-size-divisible-by 1 --data-path none --device cpu --weight-decay 0.1 "
    "--adam-beta2 0.95"
)
STEP = (
    f"{COMMON} --num-layers 9 --hidden-size 512 --ffn-hidden-size 1376 --num-attention-heads 8 --vocab-size 2048 "
    f"--seq-length {LENGTH} --micro-batch-size 4 --global-batch-size {BATCH} --train-iters 1000 --lr 1e-3 "
    "--zero-stage 1"
)
TEXT = (
    f"{COMMON} --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --vocab-size 256 "
    "--seq-length 128 --micro-batch-size 16 --global-batch-size 16 --lr-warmup-fraction 0.1"
)
RATES = {"adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)}
HELD_OUT = 16
"""Batches of held-out text."""


def engine_of(flags: str) -> tuple[Any, Any]:
    """Return an engine and its task."""
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    config, _ = parse_arguments(flags.split())
    task = PretrainTask(config)
    return build_engine(config, ParallelContext.build(config.parallel, "cpu"), task), task


def side(optimizer: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a function that times a step, and one that counts the numbers of its optimizer's states on this rank."""
    import torch
    import torch.distributed as dist

    engine, task = engine_of(f"{STEP} --optimizer {optimizer}")
    tokens = torch.randint(0, 2048, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).numpy()
    share = tokens[engine.ctx.batch_rank :: 2]
    batches = [task.data.collate(share[row : row + 4]) for row in range(0, len(share), 4)]

    def run() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        engine.train_step(batches, consumed_samples=0, lr=1e-3)
        dist.barrier()
        return time.perf_counter() - began_s

    def count() -> int:
        return sum(tensor.numel() for owned in engine.state.owned() for tensor in owned.moments.values())

    return run, count


def measure_step(index: int, port: int, rounds: int, results: Any) -> None:
    """Put the seconds of steps and the numbers of states by optimizer."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(1)
    sides = {optimizer: side(optimizer) for optimizer in ("adamw", "muon")}
    seconds = alternate({name: run for name, (run, _) in sides.items()}, rounds)
    if index == 0:
        results.put((seconds, {name: count() for name, (_, count) in sides.items()}))


def loss_of(optimizer: str, lr: float, steps: int, text: Any) -> float:
    """Return the held-out loss after so many steps."""
    import numpy as np

    from megatron.options.schedule import Schedule

    engine, task = engine_of(f"{TEXT} --optimizer {optimizer} --lr {lr} --min-lr {lr / 10} --train-iters {steps}")
    training = engine.config.training
    schedule = Schedule(training, engine.config.optimizer)
    size, length = training.global_batch_size, training.seq_length
    train, held = np.split(text, [len(text) * 9 // 10])

    def batch(seed: int, source: Any) -> Any:
        starts = np.random.default_rng(seed).integers(0, len(source) - length, size)
        return task.data.collate(np.stack([source[start : start + length + 1] for start in starts]))

    for step in range(steps):
        consumed = step * size
        engine.train_step(
            [batch(step, train)],
            consumed_samples=consumed,
            lr=schedule.learning_rate(consumed),
            weight_decay=schedule.weight_decay(consumed),
        )
    losses = [float(engine.evaluate([batch(number, held)], 1).loss) for number in range(HELD_OUT)]
    return sum(losses) / len(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description="Muon beside AdamW.", allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of tinyshakespeare.txt")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts (default: all)")
    parser.add_argument("--rounds", type=positive, default=5, help="alternations of steps (default: 5)")
    parser.add_argument("--steps", type=positive, default=600, help="steps on text (default: 600)")
    parser.add_argument("--rates", type=positive, default=5, help="learning rates of each, of five (default: 5)")
    options = parser.parse_args()
    kept = True
    if "step" in options.sections:
        seconds, numbers = on_ranks(measure_step, 2, options.rounds)
        for name, times in seconds.items():
            print(f"{name:6s} {spread(times)} s a step, {numbers[name] / 1e6:.1f} million numbers of state on a rank")
        ratios, state = quotients(seconds["muon"], seconds["adamw"]), numbers["muon"] / numbers["adamw"]
        print(f"ratio of the time {spread(ratios)}, of the state {state:.3f}; aims {TIME} and {STATE}")
        kept = sorted(ratios)[len(ratios) // 2] <= TIME and state <= STATE
    if "loss" in options.sections:
        kept = compare_losses(options) and kept
    return 0 if kept else 1


def compare_losses(options: argparse.Namespace) -> bool:
    import numpy as np

    text = np.frombuffer((options.data / "tinyshakespeare.txt").read_bytes(), dtype=np.uint8).astype(np.int64)
    best: dict[str, float] = {}
    for name, rates in RATES.items():
        # from the middle on, where fewer are tried
        tried = sorted(rates, key=lambda rate: abs(rates.index(rate) - 2))[: options.rates]
        losses = {rate: loss_of(name, rate, options.steps, text) for rate in tried}
        best[name] = min(losses.values())
        print(f"{name:6s} " + ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(losses.items())))
    ratio = best["muon"] / best["adamw"]
    print(f"ratio of the best losses after {options.steps} steps {ratio:.4f}; aim {LOSS}")
    return ratio <= LOSS


if __name__ == "__main__":
    sys.exit(main())
