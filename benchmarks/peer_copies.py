"""Cost of copies of the state in memory (--peer-copy-interval) to the steps that they come between.

    python benchmarks/peer_copies.py [--config tiny_bloom] [--ranks 4] [--copies 30] [--interval 10] [FLAGS of a run]

Each rank is a process of this machine, over gloo, and keeps a copy of its weights and moments as a run does. Training
waits while the ranks agree on it and copy; beside it stands the copying of the same bytes alone, which no design saves.
Shown are the wall time of rank 0 with the ranks' waiting for each other, which is most of it on a busy machine, and the
processor time of its main thread and of the one in the background. Exit status 1 if the processor time beside the
copying is more than 1 % of `--interval` steps of 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import on_ranks, positive, spread

STEP_S = 0.05
LIMIT = 0.01
WARM_UP = 4
"""Copies that are not counted: the first two make their memory."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of copies of the state in memory.", allow_abbrev=False)
    parser.add_argument("--config", default="tiny_bloom", help="preset (default: tiny_bloom)")
    parser.add_argument("--ranks", type=positive, default=4, help="processes (default: 4)")
    parser.add_argument("--copies", type=positive, default=30, help="copies that are counted (default: 30)")
    parser.add_argument("--interval", type=positive, default=10, help="steps between two copies (default: 10)")
    options, flags = parser.parse_known_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        measured, num_bytes = on_ranks(rank, options.ranks, options, flags, folder)
    print(f"{options.config}: {options.ranks} ranks, {num_bytes / 2**20:.1f} MiB of state on rank 0")
    for name, times in measured.items():
        print(f"{name:11s} {spread([s * 1000 for s in times])} ms")
    beside_s = statistics.median(measured["processor"]) - statistics.median(measured["copied"])
    share = beside_s / (options.interval * STEP_S)
    print(f"beside the copying: {beside_s * 1000:.3f} ms, {share:.2%} of {options.interval} steps of 50 ms")
    return 0 if share <= LIMIT else 1


def rank(number: int, port: int, options: argparse.Namespace, flags: list[str], folder: str, results: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(options.ranks), "MEGATRON_PEER_COPIES": folder}
    import numpy as np
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.resilience.peer_copies import PeerCopies
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    config, _ = parse_arguments(["--config", options.config, *flags, "--data-path", "none", "--device", "cpu"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    engine = build_engine(config, ctx, task)
    training = config.training
    shape = (training.micro_batch_size, training.seq_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int64)
    # once, of one microbatch on any layout: the first step makes the moments
    batch = [task.data.collate(tokens)] if engine.reads_data else []
    engine.train_step(batch, num_microbatches=1, consumed_samples=0, lr=config.optimizer.lr)
    copies = PeerCopies(ctx, "benchmark", None)
    found: dict[str, list[float]] = {"wall": [], "processor": [], "copied": [], "background": []}
    complete = copies._own.complete

    def complete_timed(metadata: str) -> bytes:
        began_s = time.thread_time()
        part = complete(metadata)
        found["background"].append(time.thread_time() - began_s)
        return part

    copies._own.complete = complete_timed  # type: ignore[method-assign]
    fragments = engine.state.fragments(with_optimizer=True)
    alone = torch.zeros(sum(fragment.tensor.numel() for fragment in fragments))
    for step in range(1, WARM_UP + options.copies + 1):
        ctx.largest(0)  # the ranks come from a step together
        began_s, spent_s = time.perf_counter(), time.thread_time()
        copies.keep(step, engine.state.fragments(with_optimizer=True), lambda: json.dumps(config.to_dict()))
        found["wall"].append(time.perf_counter() - began_s)
        found["processor"].append(time.thread_time() - spent_s)
        assert copies._thread is not None
        copies._thread.join()
        ctx.largest(0)
        spent_s, begin = time.thread_time(), 0
        for fragment in fragments:
            alone[begin : begin + fragment.tensor.numel()].copy_(fragment.tensor)
            begin += fragment.tensor.numel()
        found["copied"].append(time.thread_time() - spent_s)
    if number == 0:
        results.put(({name: times[WARM_UP:] for name, times in found.items()}, len(alone) * 4))
    ctx.gather_objects(None)
    os._exit(0)  # without Python's end, in which gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
