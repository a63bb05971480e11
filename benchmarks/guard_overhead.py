"""Cost of checking each step, and of deciding with it on a stop; and of a check of the copies.

    python benchmarks/guard_overhead.py [--config tiny_bloom] [--ranks 1] [--rounds 9] [--steps 10] [FLAGS of a run]

Each rank is a process of this machine, over gloo. "Free" steps answer the optimizer at once, without a look at loss and
norm and without the all-reduce. Prints how much longer a step takes, in which the ranks' waiting for each other is most
of the noise; the time of one step check with its decision on a stop alone, one after the other, and its share of a step
of 50 ms; and the time of a check of all copies. Exit status 1 if the share is above 1 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, spread

STEP_S = 0.05
LIMIT = 0.01
CALLS = 100
"""In one timing."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of checking each step.", allow_abbrev=False)
    parser.add_argument("--config", default="tiny_bloom", help="preset (default: tiny_bloom)")
    parser.add_argument("--ranks", type=positive, default=1, help="processes (default: 1)")
    parser.add_argument("--rounds", type=positive, default=9, help="alternations (default: 9)")
    parser.add_argument("--steps", type=positive, default=10, help="steps a round (default: 10)")
    options, flags = parser.parse_known_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.SimpleQueue()
    processes = [spawn.Process(target=rank, args=(r, port, options, flags, results)) for r in range(options.ranks)]
    for process in processes:
        process.start()
    measured, check_step_s, reduce_s, check_s = results.get()
    for process in processes:
        process.join()
    added_s = [checked - free for checked, free in zip(measured["checked"], measured["free"], strict=True)]
    share = statistics.median(check_step_s) / STEP_S
    print(f"{options.config}: {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps")
    for name, times in measured.items():
        print(f"{name:7s} {spread([s * 1000 for s in times])} ms a step")
    print(f"added   {spread([s * 1000 for s in added_s])} ms a step")
    check_us, reduce_us = ([seconds * 1e6 for seconds in times] for times in (check_step_s, reduce_s))
    print(f"check and decision alone: {spread(check_us, 0)} us, {share:.2%} of a step of {STEP_S * 1000:.0f} ms")
    print(f"a bare all-reduce of four numbers: {spread(reduce_us, 0)} us")
    print(f"a check of the copies: {spread([s * 1000 for s in check_s])} ms")
    return 0 if share <= LIMIT else 1


def alone(engine: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of a check with its decision on a stop, and of a bare all-reduce of as many numbers, by round."""
    import torch
    import torch.distributed as dist

    from megatron.planning.progress import Progress
    from megatron.resilience.shutdown import Shutdown

    gate, progress, shutdown = engine._gate, Progress(), Shutdown(engine.config.training, engine.ctx)
    engine.join_stop_decision(shutdown.sees_reason)
    numbers = torch.zeros(4)

    def timed(call: Callable[[], Any]) -> float:
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - began_s) / CALLS

    def check() -> None:
        gate.begin_step()
        gate.is_open()
        assert gate.observation is not None
        shutdown.decide(progress, is_reason_seen=gate.observation.is_stop_seen)

    def reduce() -> None:
        if engine.ctx.world_size > 1:
            dist.all_reduce(numbers)

    return alternate({"check": lambda: timed(check), "reduce": lambda: timed(reduce)}, rounds)


def rank(number: int, port: int, options: argparse.Namespace, flags: list[str], results: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import numpy as np

    from megatron.config.command_line import parse_arguments
    from megatron.parallel.context import ParallelContext
    from megatron.resilience.replica_check import ReplicaCheck
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine
    from megatron.training.optimizer import Observation

    config, _ = parse_arguments(["--config", options.config, *flags, "--data-path", "none", "--device", "cpu"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    training = config.training
    size = training.global_batch_size
    engine = build_engine(config, ctx, task)
    shape = (training.micro_batch_size, training.seq_length + 1)
    generator = np.random.default_rng(0)
    batch = [
        task.collate(generator.integers(0, config.model.vocab_size, shape, dtype=np.int64))
        for _ in range(size // training.micro_batch_size // ctx.num_batch_ranks)
    ]
    gate = engine._gate
    observe, free = gate._observe, Observation(1.0, 1.0, True, False)

    def steps(judges: bool) -> float:
        gate._observe = observe if judges else lambda: free  # type: ignore[method-assign]
        began_s = time.perf_counter()
        for _ in range(options.steps):
            engine.train_step(
                batch if engine.reads_data else [],
                num_microbatches=len(batch),
                consumed_samples=0,
                lr=config.optimizer.lr,
            )
        return (time.perf_counter() - began_s) / options.steps

    measured = alternate({"checked": lambda: steps(True), "free": lambda: steps(False)}, options.rounds)
    gate._observe = observe  # type: ignore[method-assign]

    alone_s = alone(engine, options.rounds)
    replicas, check_s = ReplicaCheck(ctx, engine.state.held()), []
    for _ in range(options.rounds):
        began_s = time.perf_counter()
        replicas.check(0)
        check_s.append(time.perf_counter() - began_s)
    if number == 0:
        results.put((measured, alone_s["check"], alone_s["reduce"], check_s))
    ctx.gather_objects(None)
    os._exit(0)  # without Python's end, in which gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
