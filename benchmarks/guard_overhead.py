"""Cost of checking each step, of deciding with it on a stop, and of attribution; and of a check of the copies.

    python benchmarks/guard_overhead.py [--config tiny_bloom] [--ranks 1] [--rounds 9] [--steps 10] [FLAGS of a run]

Each rank is a process of this machine, over gloo. The check travels with the norm of the gradient, so it is compared
with the norm alone: each rank's share of it, and an all-reduce of one number. "Free" steps find the norm so, and answer
the optimizer at once. Prints how much longer a step takes, in which the ranks' waiting for each other is most of the
noise; the processor time of norm, check and decision on a stop, that of the norm, and their difference as a share of a
step of 50 ms; how many collectives and bytes a step has, and torch's operators for the three; and the time of a check
of all copies.

Attribution is each rank's checks of what it computes (parallel/finite_checks.py), and the clock of --log-straggler.
Shown is the processor time of the rank's main thread within their calls, which other processes of a busy machine
disturb less than the clock; a check also loads into the cache what the next operator reads. Exit status 1 if check,
decision and finite checks take more than 1 % of a step of 50 ms; the clock is off by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, on_ranks, positive, spread

STEP_S = 0.05
LIMIT = 0.01
CALLS = 100
"""Calls of each in a round, by turns; the round's time is their median."""
STEPS = 40
"""Steps in which the time of attribution is taken."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of checking each step.", allow_abbrev=False)
    parser.add_argument("--config", default="tiny_bloom", help="preset (default: tiny_bloom)")
    parser.add_argument("--ranks", type=positive, default=1, help="processes (default: 1)")
    parser.add_argument("--rounds", type=positive, default=9, help="alternations (default: 9)")
    parser.add_argument("--steps", type=positive, default=10, help="steps a round (default: 10)")
    options, flags = parser.parse_known_args()
    measured, check_step_s, norm_s, check_s, processor_s, counts = on_ranks(rank, options.ranks, options, flags)
    added_s = [checked - free for checked, free in zip(measured["checked"], measured["free"], strict=True)]
    more_s = [check - norm for check, norm in zip(check_step_s, norm_s, strict=True)]
    decision_s = statistics.median(more_s)
    total_s = decision_s + statistics.median(processor_s["checks"])
    print(f"{options.config}: {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps")
    for name, times in measured.items():
        print(f"{name:7s} {spread([s * 1000 for s in times])} ms a step")
    print(f"added   {spread([s * 1000 for s in added_s])} ms a step")
    check_us, norm_us, more_us = ([seconds * 1e6 for seconds in times] for times in (check_step_s, norm_s, more_s))
    print(f"norm, check and decision: {spread(check_us, 0)} us")
    print(f"norm alone:               {spread(norm_us, 0)} us")
    share = f"{decision_s / STEP_S:.2%} of a step of {STEP_S * 1000:.0f} ms"
    print(f"check and decision add:   {spread(more_us, 0)} us, {share}")
    print(f"a step has {len(counts[0])} collectives, of {' + '.join(map(str, counts[0]))} bytes a rank")
    print(f"norm, check and decision: {counts[1]} operators; norm alone: {counts[2]}")
    step_s = statistics.median(processor_s.pop("step"))
    for name, spent_s in processor_s.items():
        shares = spread([100 * seconds / step_s for seconds in spent_s], 2)
        print(f"attribution, {name}: {spread([s * 1e6 for s in spent_s], 0)} us, {shares} % of {step_s * 1000:.1f} ms")
    print(f"check, decision and attribution: {total_s / STEP_S:.2%} of a step of {STEP_S * 1000:.0f} ms")
    print(f"a check of the copies: {spread([s * 1000 for s in check_s])} ms")
    return 0 if total_s <= LIMIT * STEP_S else 1


def norm_alone(engine: Any) -> Any:
    """Return the norm of the gradient, found and reduced without anything else."""
    import torch
    import torch.distributed as dist

    buffers = getattr(engine.deepspeed.optimizer, "buffers", None)
    squares = torch.zeros(())
    if buffers is not None:
        squares = torch.stack(torch._foreach_norm(buffers.counted, dtype=torch.float32)).square().sum()
    if engine.ctx.world_size > 1:
        dist.all_reduce(squares)
    return squares.sqrt()


def alone(engine: Any, rounds: int) -> dict[str, list[float]]:
    """Processor time of this process in norm, check and decision on a stop, and in the norm alone, by round.

    In seconds, of the median call; gloo's threads count too.
    """
    from megatron.options.progress import Progress
    from megatron.resilience.shutdown import Shutdown

    gate, progress, shutdown = engine._gate, Progress(), Shutdown(engine.config.training, engine.ctx)
    engine.join_stop_decision(shutdown.sees_reason)
    buffers = getattr(engine.deepspeed.optimizer, "buffers", None)
    gradients = ([], []) if buffers is None else (buffers.counted, buffers.uncounted)

    def check() -> None:
        gate.begin_step()
        gate.find_norm(*gradients)
        gate.is_open()
        assert gate.observation is not None
        shutdown.decide(progress, is_reason_seen=gate.observation.is_stop_seen)

    def timed(call: Callable[[], Any]) -> float:
        began_s = time.process_time()
        call()
        return time.process_time() - began_s

    found: dict[str, list[float]] = {"check": [], "norm": []}
    for _ in range(rounds):
        pairs = [(timed(check), timed(lambda: norm_alone(engine))) for _ in range(CALLS)]
        for name, times in zip(found, zip(*pairs, strict=True), strict=True):
            found[name].append(statistics.median(times))  # a call that another process interrupts counts once
    return found


def counted_work(engine: Any, step: Callable[[], None]) -> tuple[list[int], int, int]:
    """Bytes of each collective of a step, and operators of norm, check and decision, and of the norm alone."""
    from benchmarks.step_counts import AllOperators, counted

    sent_bytes = counted(step).sent_bytes
    gate, buffers = engine._gate, getattr(engine.deepspeed.optimizer, "buffers", None)
    with AllOperators() as all_of_gate:
        gate.begin_step()
        if buffers is not None:
            gate.find_norm(buffers.counted, buffers.uncounted)
        gate.is_open()
    with AllOperators() as of_norm:
        norm_alone(engine)
    return sent_bytes, all_of_gate.number, of_norm.number


def attribution(ctx: Any, step: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of processor time of this thread in each step: of all of it, of the finite checks, and of the clock."""
    found: dict[str, list[float]] = {"step": [], "checks": [], "clock": []}
    spent_s = dict.fromkeys(found, 0.0)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began_s = time.thread_time()
            result = call(*arguments)
            spent_s[name] += time.thread_time() - began_s
            return result

        return run

    ctx.state.clock.start(ctx.device)
    clock, checks = ctx.state.clock._clock, ctx.state.checks
    clock.begin, clock.end = counted("clock", clock.begin), counted("clock", clock.end)
    checks._add = counted("checks", checks._add)
    for _ in range(STEPS):
        spent_s.update(dict.fromkeys(found, 0.0))
        with ctx.state.clock.step():
            counted("step", step)()
        ctx.state.clock.read()
        for name, seconds in spent_s.items():
            found[name].append(seconds)
    return found


def rank(number: int, port: int, options: argparse.Namespace, flags: list[str], results: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import numpy as np

    from megatron.parallel.context import ParallelContext
    from megatron.resilience.replica_check import ReplicaCheck
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine
    from megatron.training.optimizers.update_gate import Observation

    config, _ = parse_arguments(["--config", options.config, *flags, "--data-path", "none", "--device", "cpu"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    training = config.training
    size = training.global_batch_size
    engine = build_engine(config, ctx, task)
    shape = (training.micro_batch_size, training.seq_length + 1)
    generator = np.random.default_rng(0)
    batch = [
        task.data.collate(generator.integers(0, config.model.vocab_size, shape, dtype=np.int64))
        for _ in range(size // training.micro_batch_size // ctx.num_batch_ranks)
    ]
    gate = engine._gate
    observe, find_norm, free = gate._observe, gate.find_norm, Observation(1.0, 1.0, True)

    def step() -> None:
        engine.train_step(
            batch if engine.reads_data else [],
            num_microbatches=len(batch),
            consumed_samples=0,
            lr=config.optimizer.lr,
        )

    def steps(judges: bool) -> float:
        gate._observe = observe if judges else lambda: free  # type: ignore[method-assign]
        gate.find_norm = find_norm if judges else lambda *_: norm_alone(engine)  # type: ignore[method-assign]
        began_s = time.perf_counter()
        for _ in range(options.steps):
            step()
        return (time.perf_counter() - began_s) / options.steps

    measured = alternate({"checked": lambda: steps(True), "free": lambda: steps(False)}, options.rounds)
    gate._observe, gate.find_norm = observe, find_norm  # type: ignore[method-assign]

    counts = counted_work(engine, step)
    alone_s = alone(engine, options.rounds)
    processor_s = attribution(ctx, step)
    replicas, check_s = ReplicaCheck(ctx, engine.state.held()), []
    for _ in range(options.rounds):
        began_s = time.perf_counter()
        replicas.check(0)
        check_s.append(time.perf_counter() - began_s)
    if number == 0:
        results.put((measured, alone_s["check"], alone_s["norm"], check_s, processor_s, counts))
    ctx.gather_objects(None)
    os._exit(0)  # without Python's end, in which gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
