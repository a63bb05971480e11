"""A training step with low-rank adapters, ours beside PEFT over transformers: speed, memory, profile.

    OMP_NUM_THREADS=2 python benchmarks/lora.py
    python benchmarks/lora.py --sections profile --precisions bf16 --lora-rank 64
    python benchmarks/lora.py --device cuda --sections rate [--recompute-granularity full]

A Llama of 34M parameters with rank 8 on all linear layers, sequence 512, batch 4, on a CPU: the shapes and sides of
benchmarks/step.py, the base frozen. On CUDA Llama 3.2 1B, sequence 2,048, two microbatches of 4. Ours is the engine of
a real run, PEFT's a bare loop: forward, backward, clipping and fused AdamW. In bfloat16 PEFT is measured twice: `peft`
with bfloat16 adapters and float32 copies of them, as ours, and `peft_float32` with float32 adapters, its default.
Further flags are options of a run, and change ours and the shapes; with `--recompute-granularity full` PEFT's side has
its gradient checkpointing.

Sections: rate (tokens/s and ratios, all sides in turn in one process), memory (what a side adds to a process of its own
at the peak of its build and two steps), profile (the ten largest operators of each side). Exit status 1 if ours has
less than 1.2 times the tokens/s of a peer, or takes more memory. transformers is in the extra `convert`:

    pip install peft==0.21.2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread
from benchmarks.step import MeasuredSide, builder, show_details, timed, workload

if TYPE_CHECKING:
    from benchmarks.step_sides import Side, Workload

AIM = 1.2
SECTIONS = ("rate", "memory", "profile")
ADAPTERS = ["--lora-rank", "8", "--lora-alpha", "16"]
ON_CUDA = ["--seq-length", "2048", "--micro-batch-size", "4", "--global-batch-size", "8"]


def main() -> int:
    options, flags = _parser().parse_known_args()
    if options.device == "cuda":
        flags = ["--device", "cuda", *ON_CUDA, *flags]
    reached = True
    for precision in options.precisions:
        names = ["ours", "peft", *(["peft_float32"] if precision == "bf16" else [])]
        print(f"\n## {precision}: {', '.join(names)}", flush=True)
        if "memory" in options.sections:
            reached &= _compare_memory(names, precision, flags)
        if {"rate", "profile"} & set(options.sections):
            reached &= _compare_rates(names, precision, flags, options)
    return 0 if reached else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A step with adapters beside PEFT's.", allow_abbrev=False)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"))
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=7, help="alternations (default: 7)")
    parser.add_argument("--steps", type=positive, default=2, help="steps a round (default: 2)")
    return parser


def _workload(precision: str, flags: list[str]) -> Workload:
    return workload("llama", "cuda" if flags[:2] == ["--device", "cuda"] else "cpu", precision, [*ADAPTERS, *flags])


def _builders(names: list[str], work: Workload) -> dict[str, Callable[[], Side]]:
    """Return what builds each side, everything imported. The process group is theirs to share."""
    import torch

    from megatron.parallel.context import ParallelContext

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    ctx = ParallelContext.build(work.config.parallel, work.config.parallel.device)
    return {name: builder(name, work, ctx) for name in names}


def _compare_rates(names: list[str], precision: str, flags: list[str], options: Any) -> bool:
    """Print tokens/s and ratios, and profiles; return True if ours is fast enough."""
    import torch

    work, reached = _workload(precision, flags), True
    on_cuda = work.config.parallel.device == "cuda"
    sides = {name: MeasuredSide(build, work, on_cuda) for name, build in _builders(names, work).items()}
    for name, side in sides.items():
        show_details(name, side, options)
    if "rate" in options.sections:
        times = alternate({name: timed(side, options.steps) for name, side in sides.items()}, options.rounds)
        for name, side in sides.items():
            rates = spread([work.num_tokens / seconds for seconds in times[name]], 0)
            losses = f"{side.first_loss:.3f} to {side.losses[-1]:.3f}"
            print(f"{name:14s} {rates} tokens/s, {statistics.median(times[name]) * 1000:.1f} ms a step; loss {losses}")
            if on_cuda:
                print(f"{name:14s} peak {side.peak_bytes / 2**30:.2f} GiB")
        for name in names[1:]:
            ratios = quotients(times[name], times["ours"])
            # processor time: other work on a busy machine disturbs it less
            in_cpu = spread(quotients(sides[name].cpu_s, sides["ours"].cpu_s))
            print(f"ours / {name}: {spread(ratios)} times the tokens/s; by processor time {in_cpu}", flush=True)
            reached &= statistics.median(ratios) >= AIM
    for side in sides.values():
        side.close()
    torch.distributed.destroy_process_group()
    return reached


def _compare_memory(names: list[str], precision: str, flags: list[str]) -> bool:
    """Print the peak of each side; return True if ours is the smallest."""
    peaks = {name: on_ranks(_peak_bytes, 1, name, precision, flags) for name in names}
    for name, size in peaks.items():
        print(f"{name:14s} peak {size / 2**20:.0f} MiB, {peaks['ours'] / size:.2f} times it is ours", flush=True)
    return min(peaks.values()) == peaks["ours"]


def _peak_bytes(_index: int, _port: int, name: str, precision: str, flags: list[str], results: Any) -> None:
    """Put what a side adds to this process, which holds all imports before."""
    work = _workload(precision, flags)
    (build,) = _builders([name], work).values()
    side = MeasuredSide(build, work, work.config.parallel.device == "cuda")
    results.put(side.peak_bytes)


if __name__ == "__main__":
    sys.exit(main())
