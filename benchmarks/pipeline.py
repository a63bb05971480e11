"""Idle time of pipeline stages, measured beside what the schedule makes of the same passes.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--stages 2] [--schedules NAME...] [--rounds 9] [FLAGS of a run]

Each stage is a process of this machine, over gloo, with one thread; give it as many cores as stages. The model has 7
layers and an output projection that takes as long as one here, so that two stages of it are equal. The schedules
alternate. For each one it prints the time of a step and the share of it in which the stages computed nothing, from the
trace that `--profile-instructions` writes, beside what passes of these lengths in this order make if no message takes
time, and beside the schedule's formula, where all passes are of one length. Exit status 1 if the idle time is more than
10 % (relative) away from the formula.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread

TOLERANCE = 0.1
SCHEDULES = {
    "1f1b": "",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zero-bubble": "--pipeline-schedule zero-bubble",
}
"""Options of each schedule."""
MODEL = (
    "--config tiny_llama --num-layers 7 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4 "
    "--num-query-groups 4 --vocab-size 4608 --seq-length 256 --micro-batch-size 2 --global-batch-size 16 "
    "--untie-embeddings-and-output-weights --profile-instructions --results-dir none --data-path none --device cpu"
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Idle time of pipeline stages.", allow_abbrev=False)
    parser.add_argument("--stages", type=positive, default=2, help="processes (default: 2)")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--rounds", type=positive, default=9, help="alternations of a step (default: 9)")
    options, flags = parser.parse_known_args()
    measured, traces = on_ranks(rank, options.stages, options, flags)
    print(f"{options.stages} stages, {options.rounds} rounds of a step")
    reached = [_show(name, measured, traces[name]) for name in options.schedules]
    return 0 if all(reached) else 1


def _show(name: str, measured: Mapping[str, list[float]], traces: list[Any]) -> bool:
    """Print the figures of a schedule; return True if its idle time is the formula's."""
    from megatron.observability.instruction_trace import idle_shares, simulated_idle_shares

    by_stage = [idle_shares(trace) for trace in traces]
    idle = [statistics.mean(shares) for shares in by_stage]
    own = [statistics.mean(simulated_idle_shares(trace, lengths(trace))) for trace in traces]
    formula = statistics.mean(simulated_idle_shares(traces[0]))
    ratio = [share / formula for share in idle]
    against = "" if name == "1f1b" or "1f1b" not in measured else spread(quotients(measured[name], measured["1f1b"]), 2)
    print(f"{name}: {spread(measured[name])} s a step{f', {against} times that of 1f1b' if against else ''}")
    print(f"  idle: {_percents(idle)}; by the lengths of its passes: {_percents(own)}; formula: {formula:.1%}")
    print(f"  idle by stage: {', '.join(_percents(shares) for shares in zip(*by_stage, strict=True))}")
    print(f"  idle to formula: ratio {spread(ratio, 2)}", flush=True)
    return abs(statistics.median(ratio) - 1) <= TOLERANCE


def _percents(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def lengths(trace: Mapping[str, Any]) -> Callable[[int, Any], float]:
    """Return the length of each pass of a stage, in a trace of one step."""
    found = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            one = event["args"]
            found[one["stage"], one["instruction"], one["chunk"], one["microbatch"]] = event["dur"]
    return lambda stage, one: found[stage, one.name, one.chunk, one.microbatch]


def rank(number: int, port: int, options: argparse.Namespace, flags: list[str], results: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(options.stages)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import numpy as np
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    torch.set_num_threads(1)
    traces: dict[str, list[Any]] = {name: [] for name in options.schedules}

    def side(name: str) -> Callable[[], float]:
        stages = ["--pipeline-model-parallel-size", str(options.stages)]
        config, _ = parse_arguments([*MODEL.split(), *stages, *SCHEDULES[name].split(), *flags])
        ctx = ParallelContext.build(config.parallel, "cpu")
        task, training = PretrainTask(config), config.training
        engine = build_engine(config, ctx, task)
        generator = np.random.default_rng(0)
        shape = (training.micro_batch_size, training.seq_length + 1)
        batch = [
            task.data.collate(generator.integers(0, config.model.vocab_size, shape, dtype=np.int64))
            for _ in range(training.global_batch_size // training.micro_batch_size)
        ]

        def step() -> float:
            began_s = time.perf_counter()
            engine.trace.begin_step(1)
            own = batch if engine.reads_data else []
            engine.train_step(own, num_microbatches=len(batch), consumed_samples=0, lr=1e-4)
            engine.trace.end_step()
            seconds = time.perf_counter() - began_s
            traces[name].append(engine.trace.gather())
            return seconds

        return step

    measured = alternate({name: side(name) for name in options.schedules}, options.rounds)
    if number == 0:
        results.put((measured, {name: found[1:] for name, found in traces.items()}))  # without the warm-up
    torch.distributed.barrier()
    os._exit(0)  # without Python's end, in which gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
