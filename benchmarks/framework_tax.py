"""Cost of the engine: a training step through it against a bare PyTorch loop over the same layers.

    python benchmarks/framework_tax.py [--config tiny_bloom] [--rounds 9] [--steps 10] [FLAGS of megatron.train]

Both run in one process, in turn, from the same weights on the same batches: ours is `Engine.train_step` (DeepSpeed's
pipeline engine, gradient norm, clipping and random streams included), theirs forward, backward, clip_grad_norm_ and
torch's fused AdamW. Prints the median seconds a step of each, their ratio round by round, and that both learned alike.
Exit status 1 if the median ratio is above 1.05.
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

LIMIT = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of the engine over a bare loop.", allow_abbrev=False)
    parser.add_argument("--config", default="tiny_bloom", help="preset (default: tiny_bloom)")
    parser.add_argument("--rounds", type=int, default=9, help="alternations (default: 9)")
    parser.add_argument("--steps", type=int, default=10, help="steps a round (default: 10)")
    options, flags = parser.parse_known_args()

    os.environ["DS_ACCELERATOR"] = "cpu"
    import numpy as np
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    config, _ = parse_arguments(["--config", options.config, *flags, "--data-path", "none", "--device", "cpu"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    size = config.training.global_batch_size
    engine = build_engine(config, ctx, task)

    generator = np.random.default_rng(0)
    shape = (config.training.micro_batch_size, config.training.seq_length + 1)
    batch = [
        task.data.collate(generator.integers(0, config.model.vocab_size, shape, dtype=np.int64))
        for _ in range(size // config.training.micro_batch_size)
    ]
    lr = config.optimizer.lr
    consumed = 0

    def ours() -> float:
        nonlocal consumed
        loss = engine.train_step(batch, consumed_samples=consumed, lr=lr).loss
        consumed += size
        return float(loss)

    theirs = bare_loop(config, ctx, task, batch)
    losses: dict[str, list[float]] = {"engine": [], "bare": []}
    seconds: dict[str, list[float]] = {"engine": [], "bare": []}
    for turn in range(options.rounds + 1):
        # whichever goes first may find colder caches
        order: list[tuple[str, Callable[[], float]]] = [("engine", ours), ("bare", theirs)]
        for name, step in order if turn % 2 else reversed(order):
            began_s = time.perf_counter()
            losses[name] += [step() for _ in range(options.steps)]
            if turn:  # the first round warms up
                seconds[name].append((time.perf_counter() - began_s) / options.steps)
    ratios = [mine / bare for mine, bare in zip(seconds["engine"], seconds["bare"], strict=True)]
    difference = max(abs(a - b) / b for a, b in zip(losses["engine"], losses["bare"], strict=True))
    print(f"{options.config}: {torch.get_num_threads()} threads, {options.rounds} rounds of {options.steps} steps")
    for name, times in seconds.items():
        print(f"{name:7s} {statistics.median(times) * 1000:8.2f} ms a step (median)")
    print(f"ratio   {statistics.median(ratios):8.3f} (median; {min(ratios):.3f} to {max(ratios):.3f}), limit {LIMIT}")
    print(f"largest relative difference of the losses: {difference:.1e}")
    return 0 if statistics.median(ratios) <= LIMIT else 1


def bare_loop(config: Any, ctx: Any, task: Any, batch: list[Any]) -> Callable[[], float]:
    """One training step in plain PyTorch over the layers that the engine runs."""
    import torch

    from megatron.models.sequential import SequentialModel, build_layers
    from megatron.parallel.shards import initialise, named_parameters, shard_of

    model = SequentialModel(build_layers(config, ctx))
    initialise(named_parameters(model), config.training.seed, ctx)
    options = config.optimizer
    decayed = [p for p in model.parameters() if len(shard_of(p).shape) > 1]
    others = [p for p in model.parameters() if len(shard_of(p).shape) == 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (options.adam_beta1, options.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)

    def step() -> float:
        total = 0.0
        scale = 1 / sum(microbatch.normaliser for microbatch in batch)
        for microbatch in batch:
            targets = microbatch.targets
            loss = model(
                microbatch.inputs,
                lambda outputs, targets=targets: task.objective.loss(outputs, targets, scale, ctx).total,
            )
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    sys.exit(main())
