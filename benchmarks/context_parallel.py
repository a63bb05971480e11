"""Rows of 8,192 tokens that two ranks share, beside rows that each computes alone: attention, and a model's step.

    python benchmarks/context_parallel.py [--rounds 3] [--sections attention model]

Both ranks compute two rows, each on a core of its own: one row each, or half of both, exchanged in a ring or by
all-to-all. Prints the processor seconds of both ranks, and ratios: of a shared row to one alone (aim: 1.10), and of the
exchanges to each other (aim: within 1.15), in float32 and bfloat16.

attention: forward and backward of 8 heads of 64 channels, as many of keys and values.
model: a step of a Llama of 2 layers, 23 million parameters and such heads, through the engine.

Times are of the processor, so that other work on the machine counts little. Exit status 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread

SECTIONS = ("attention", "model")
HEADS, HEAD_SIZE, LENGTH, BATCH = 8, 64, 8192, 2
MODEL = (
    "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights --num-layers 2 "
    f"--hidden-size {HEADS * HEAD_SIZE} --ffn-hidden-size 1408 --num-attention-heads {HEADS} --vocab-size 16384 "
    f"--make-vocab-size-divisible-by 1 --seq-length {LENGTH} --hidden-dropout 0 --attention-dropout 0 "
    f"--micro-batch-size 1 --global-batch-size {BATCH} --train-iters 1000 --data-path none --device cpu --lr 1e-3"
)
SIDES = {
    "alone": "",
    "ring": "--context-parallel-size 2 --context-parallel-exchange ring",
    "all-to-all": "--context-parallel-size 2 --context-parallel-exchange all-to-all",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16"}


def join_world(index: int, port: int) -> None:
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(1)


def seconds_of_both(work: Callable[[], Any]) -> float:
    """Return the processor seconds of both ranks."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began_s = time.process_time()
    work()
    seconds = torch.tensor([time.process_time() - began_s])
    dist.all_reduce(seconds)
    return float(seconds)


def attention_sides(precision: str) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of an attention by each side's kernel."""
    import torch

    from megatron.models.attention.kernels import build_kernel
    from megatron.models.attention.layer import build_context_kernel
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    def side(flags: str) -> Callable[[], Any]:
        config, _ = parse_arguments(f"{MODEL} {flags}".split())
        ctx = ParallelContext.build(config.parallel, "cpu")
        if ctx.context_size == 1:
            kernel = build_kernel(config.model, ctx, packed=False, length=LENGTH)
        else:
            kernel = build_context_kernel(config, ctx, packed=False)
        shape = LENGTH // ctx.context_size, BATCH // ctx.num_batch_ranks, HEADS, HEAD_SIZE
        q, k, v, grad = (torch.randn(shape).to(dtype).permute(1, 2, 0, 3) for _ in range(4))
        inputs = [part.requires_grad_() for part in (q, k, v)]

        def run() -> None:
            torch.autograd.grad(kernel(*inputs, None, 0.0), inputs, grad)

        return run

    return {name: side(flags) for name, flags in SIDES.items()}


def model_sides(precision: str) -> dict[str, Callable[[], Any]]:
    """Return a step of each side's engine over BATCH rows."""
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    def side(flags: str) -> Callable[[], Any]:
        config, _ = parse_arguments(f"{MODEL} {PRECISIONS[precision]} {flags}".split())
        ctx = ParallelContext.build(config.parallel, "cpu")
        task = PretrainTask(config)
        engine = build_engine(config, ctx, task)
        tokens = torch.randint(0, config.model.vocab_size, (BATCH, LENGTH + 1)).numpy()
        share = tokens[ctx.batch_rank :: ctx.num_batch_ranks]
        batches = [task.data.collate(share[row : row + 1]) for row in range(len(share))]
        consumed = 0

        def run() -> None:
            nonlocal consumed
            consumed += BATCH
            engine.train_step(batches, consumed_samples=consumed, lr=1e-3)

        return run

    return {name: side(flags) for name, flags in SIDES.items()}


def measured(index: int, port: int, section: str, precision: str, rounds: int, results: Any) -> None:
    """Put the processor seconds of both ranks by side, round by round."""
    join_world(index, port)
    sides = {"attention": attention_sides, "model": model_sides}[section](precision)
    found = alternate({name: partial(seconds_of_both, run) for name, run in sides.items()}, rounds)
    if index == 0:
        results.put(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Rows that two ranks share.", allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=3, help="alternations (default: 3)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: both")
    options = parser.parse_args()
    missed = []
    for section in options.sections:
        for precision in PRECISIONS:
            print(f"{section}, {precision}", flush=True)
            seconds = on_ranks(measured, 2, section, precision, options.rounds)
            for name, values in seconds.items():
                ratios = quotients(values, seconds["alone"])
                print(f"  {name:12s} {spread(values)} s of both, ratio {spread(ratios)}, aim 1.10", flush=True)
                if statistics.median(ratios) > 1.10:
                    missed.append(f"{section} {precision} {name}")
            ratios = quotients(seconds["all-to-all"], seconds["ring"])
            print(f"  all-to-all to ring {spread(ratios)}, aim 0.87 to 1.15")
            if not 1 / 1.15 <= statistics.median(ratios) <= 1.15:
                missed.append(f"{section} {precision} exchanges")
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
