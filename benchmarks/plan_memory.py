"""Memory of the plan against the memory of a run, case by case.

    python benchmarks/plan_memory.py [--device auto] [--only TEXT] [--explain 0.05] [--flags "FLAGS" [--ranks N]]

Each case trains in processes of its own. Measured is the largest number of bytes from the second step on, on the rank
of each pipeline stage that holds most: on CUDA `torch.cuda.max_memory_allocated`; on the CPU tensors and buffers of
communication together, at the allocator (benchmarks/allocations.py), where host memory of an offloaded optimizer is the
same memory.
Prints plan, measurement and ratio, and on the CPU what the plan leaves out: kernels' work space, and by how much the
process grew since it built its model. Exit status 1 if a ratio is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.allocations import MIB, Allocations, Peak, library
from benchmarks.alternating import free_port
from megatron.parallel.costs import Router, Table
from megatron.parallel.shards import Shard

LIMIT = 0.05
STEPS = 2
"""Measured on CUDA, after one that allocates the optimizer's state. On the CPU, where no cache grows, one is."""
TIMEOUT_S = 180
AHEAD = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Cases whose processes import while others train."""


class Case(NamedTuple):
    """A run: its name, the flags beside COMMON, and its ranks."""

    name: str
    flags: str
    ranks: int = 1


COMMON = (
    "--lr 1e-4 --lr-decay-style constant --train-iters 100 --data-path none --make-vocab-size-divisible-by 16 "
    "--hidden-dropout 0 --attention-dropout 0"
)
LLAMA = "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights"
BLOOM = "--architecture bloom --position-embedding-type alibi --embed-layernorm"
GPT2 = "--architecture bloom --position-embedding-type learned"
TINY = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --vocab-size 1000 --seq-length 256 "
    "--micro-batch-size 2 --global-batch-size 8"
)
TINY_LLAMA = f"{TINY} {LLAMA} --ffn-hidden-size 352"
TINY_GQA = f"{TINY_LLAMA} --num-query-groups 2"
TINY_BLOOM = f"{TINY} {BLOOM}"
WEIGHTS = f"{TINY} {LLAMA} --ffn-hidden-size 704 --hidden-size 256 --vocab-size 2000 --seq-length 16"
"""Far more bytes in weights than in activations, so that the reduction or the update is the peak."""
FEW_LAYERS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 4000 --seq-length 128 "
    "--micro-batch-size 1 --global-batch-size 4"
)
"""A table as large as all layers."""
EXPERTS = f"{TINY} {LLAMA} --num-query-groups 2 --ffn-hidden-size 192 --num-experts 8 --moe-aux-loss-coeff 0.01"
NF4 = "--quantize-base nf4 --freeze *qkv.weight *dense.weight *mlp* *word* output.weight"
DORA = "--lora-rank 4 --use-dora --lora-target-modules all-linear lm_head embed_tokens"
LORA = "--lora-rank 4"
FEW_TOKENS = "--seq-length 32 --hidden-size 256 --vocab-size 4000"
"""The loss is the peak, and a product for the gradient of its weight would be the largest there."""
CP = "--context-parallel-size 2 --context-parallel-exchange"
RING, HEADS = f"{CP} ring", f"{CP} all-to-all"
ATTENTION = (
    f"{TINY} {LLAMA} --num-query-groups 4 --ffn-hidden-size 64 --num-layers 2 --vocab-size 128 --seq-length 2048 "
    "--kv-channels 64 --global-batch-size 4 --recompute-granularity full"
)
"""Attention is wider than all else, so that its backward pass is the peak."""
SMALL = (
    "--hidden-size 2048 --num-attention-heads 16 --num-layers 4 --vocab-size 32000 --seq-length 2048 "
    "--micro-batch-size 2 --global-batch-size 4"
)
SMALL_LLAMA = f"{SMALL} {LLAMA} --ffn-hidden-size 5632 --num-query-groups 4"
PARTS = "--recompute-granularity selective --recompute-modules"
PP = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
ZERO_BUBBLE = f"{PP} --pipeline-schedule zero-bubble"
EXPERTS_OVER_TENSOR_RANKS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
)
OFFLOAD = "--offload-optimizer --offload-param"

CPU_CASES = [
    Case("Llama, bf16", f"{TINY_LLAMA} --bf16"),
    Case("Llama GQA, fp32, LoRA of q and v", f"{TINY_GQA} {LORA} --lora-target-modules q_proj v_proj"),
    Case("Llama GQA, fp32, LoRA, dropout", f"{TINY_GQA} {LORA} --lora-dropout 0.1"),
    Case(
        "Llama GQA, bf16, LoRA, few tokens", f"{TINY_GQA} --bf16 {FEW_TOKENS} {LORA} --lora-target-modules all-linear"
    ),
    Case("Llama GQA, fp32, frozen layers", f"{TINY_GQA} --freeze layers.*"),
    Case("weights in nf4, bf16, LoRA", f"{WEIGHTS} --bf16 --quantize-base nf4 {LORA}"),
    Case("Llama, bf16, loss in chunks", f"{TINY_LLAMA} --bf16 --num-layers 1 --seq-length 1024 --vocab-size 8000"),
    Case("Llama GQA, fp32, one microbatch", f"{TINY_GQA} --global-batch-size 2"),
    Case("Llama GQA, bf16, selective", f"{TINY_GQA} --bf16 --recompute-granularity selective"),
    Case("Llama GQA, bf16, layernorm, mlp_act", f"{TINY_GQA} --bf16 {PARTS} layernorm,mlp_act"),
    Case("Bloom, fp32, core_attn, mlp", f"{TINY_BLOOM} {PARTS} core_attn,mlp"),
    Case("Llama GQA, bf16, full", f"{TINY_GQA} --bf16 --recompute-granularity full"),
    Case("Llama GQA, fp32, full", f"{TINY_GQA} --recompute-granularity full"),
    Case("Bloom, bf16", f"{TINY_BLOOM} --bf16"),
    Case("Bloom, fp32, selective, dropout", f"{TINY_BLOOM} --hidden-dropout 0.1 --recompute-granularity selective"),
    Case("Bloom, bf16, attention dropout", f"{TINY_BLOOM} --bf16 --attention-dropout 0.1"),
    Case("GPT-2, fp32, full, dropout", f"{TINY} {GPT2} --hidden-dropout 0.1 --recompute-granularity full"),
    Case("Llama GQA, fp32, ZeRO 1", f"{TINY_GQA} --zero-stage 1"),
    Case("Llama GQA, bf16, ZeRO 2", f"{TINY_GQA} --bf16 --zero-stage 2"),
    Case("Llama GQA, fp32, ZeRO 3", f"{TINY_GQA} --zero-stage 3"),
    Case("weights, bf16", f"{WEIGHTS} --bf16"),
    Case("weights in nf4, bf16, full", f"{WEIGHTS} --bf16 --recompute-granularity full {NF4}"),
    Case("Llama GQA, bf16, DoRA", f"{TINY_GQA} --bf16 {DORA}"),
    Case("weights, fp32, ZeRO 1", f"{WEIGHTS} --zero-stage 1"),
    Case("weights, fp32, ZeRO 2, offload", f"{WEIGHTS} --zero-stage 2 --offload-optimizer"),
    Case("weights, bf16, ZeRO 3, offload", f"{WEIGHTS} --bf16 --zero-stage 3 {OFFLOAD}"),
    Case("weights, bf16, DP 2", f"{WEIGHTS} --bf16", 2),
    Case("weights, fp32, DP 2", WEIGHTS, 2),
    Case("weights, bf16, 2 replicas, DP 4", f"{WEIGHTS} --bf16 --num-replicas 2", 4),
    Case("weights, bf16, sums in bf16, DP 2", f"{WEIGHTS} --bf16 --grad-reduce-dtype bf16", 2),
    Case("weights, bf16, ZeRO 2, DP 2", f"{WEIGHTS} --bf16 --zero-stage 2", 2),
    Case("weights, fp32, ZeRO 2, DP 2", f"{WEIGHTS} --zero-stage 2", 2),
    Case("Bloom, fp32, ZeRO 2, DP 2", f"{FEW_LAYERS} {BLOOM} --zero-stage 2", 2),
    Case("weights, bf16, ZeRO 3, DP 2", f"{WEIGHTS} --bf16 --zero-stage 3", 2),
    Case(
        "Bloom, bf16, ZeRO 3, one microbatch, DP 2",
        f"{FEW_LAYERS} {BLOOM} --bf16 --zero-stage 3 --global-batch-size 2",
        2,
    ),
    Case("Bloom, fp32, ZeRO 3, CP 2", f"{FEW_LAYERS} {BLOOM} --hidden-size 512 --zero-stage 3 {RING}", 2),
    Case(
        "Bloom, fp32, LoRA, ZeRO 3, full, DP 2",
        f"{FEW_LAYERS} {BLOOM} --hidden-size 384 --num-layers 4 --seq-length 200 --micro-batch-size 2 "
        f"--global-batch-size 8 --zero-stage 3 --recompute-granularity full {LORA} --lora-target-modules all-linear",
        2,
    ),
    Case(
        "Llama GQA, fp32, DoRA, ZeRO 3, DP 2",
        f"{FEW_LAYERS} {LLAMA} --num-query-groups 2 --ffn-hidden-size 352 --vocab-size 6378 --seq-length 512 "
        f"--zero-stage 3 {LORA} --use-dora --lora-target-modules all-linear",
        2,
    ),
    Case(
        "GPT-2, bf16, ZeRO 3, long rows, DP 2",
        f"{FEW_LAYERS} {GPT2} --bf16 --zero-stage 3 --seq-length 512 --micro-batch-size 3 --global-batch-size 12",
        2,
    ),
    Case(
        "weights, bf16, LoRA, ZeRO 3, DP 2",
        f"{WEIGHTS} --bf16 --zero-stage 3 {LORA} --lora-target-modules all-linear",
        2,
    ),
    Case(
        "layers, bf16, LoRA, ZeRO 3, full, DP 2",
        "--num-layers 3 --hidden-size 512 --num-attention-heads 8 --vocab-size 3000 --seq-length 128 "
        f"--micro-batch-size 1 --global-batch-size 4 {LLAMA} --ffn-hidden-size 352 --bf16 --zero-stage 3 "
        "--recompute-granularity full --lora-rank 8 --lora-target-modules all-linear",
        2,
    ),
    Case("weights, fp32, average, DP 2", f"{WEIGHTS} --ema-decay 0.99", 2),
    Case("weights, bf16, average", f"{WEIGHTS} --bf16 --ema-decay 0.99"),
    Case("weights, fp32, Muon", f"{WEIGHTS} --optimizer muon"),
    Case("weights, bf16, Muon, DP 2", f"{WEIGHTS} --bf16 --optimizer muon", 2),
    Case("weights, fp32, Muon, ZeRO 1, DP 2", f"{WEIGHTS} --optimizer muon --zero-stage 1", 2),
    Case("Llama GQA, fp32, Muon, TP 2", f"{TINY_GQA} --optimizer muon --tensor-model-parallel-size 2", 2),
    Case("experts, bf16, Muon, EP 2", f"{EXPERTS} --bf16 --optimizer muon --expert-model-parallel-size 2", 2),
    Case("Bloom, bf16, PP 2", f"{TINY_BLOOM} --bf16 {PP}", 2),
    Case("Llama GQA, fp32, PP 2, one microbatch", f"{TINY_GQA} --global-batch-size 2 {PP}", 2),
    Case("Llama GQA, bf16, interleaved", f"{TINY_GQA} --bf16 --num-layers 4 --global-batch-size 12 {INTERLEAVED}", 2),
    Case("Bloom, bf16, zero-bubble", f"{TINY_BLOOM} --bf16 {ZERO_BUBBLE}", 2),
    Case("Llama GQA, bf16, TP 2", f"{TINY_GQA} --bf16 --tensor-model-parallel-size 2", 2),
    Case("Bloom, fp32, TP 2, SP", f"{TINY_BLOOM} --tensor-model-parallel-size 2 --sequence-parallel", 2),
    Case("Llama GQA, fp32, CP 2, ring", f"{TINY_GQA} {RING}", 2),
    Case("Bloom, bf16, CP 2, ring, full", f"{TINY_BLOOM} --bf16 --recompute-granularity full {RING}", 2),
    Case("Llama GQA, bf16, CP 2, all-to-all", f"{TINY_GQA} --bf16 {HEADS} --seq-length 1024 --global-batch-size 4", 2),
    Case("Bloom, fp32, CP 2, all-to-all", f"{TINY_BLOOM} {HEADS}", 2),
    Case("attention, bf16, full", f"{ATTENTION} --bf16"),
    Case("attention, bf16, full, CP 2, ring", f"{ATTENTION} --bf16 {RING}", 2),
    Case("attention, fp32, full, CP 2, all-to-all", f"{ATTENTION} {HEADS}", 2),
    Case("experts, fp32", EXPERTS),
    Case("experts, bf16, full", f"{EXPERTS} --bf16 --recompute-granularity full"),
    Case("experts, bf16, EP 2", f"{EXPERTS} --bf16 --expert-model-parallel-size 2", 2),
    Case("experts, bf16, EP 2, TP 2, SP", f"{EXPERTS} --bf16 {EXPERTS_OVER_TENSOR_RANKS}", 2),
]
CUDA_CASES = [
    Case("Llama, bf16", f"{SMALL_LLAMA} --bf16"),
    Case("Llama, bf16, one microbatch of 1", f"{SMALL_LLAMA} --bf16 --micro-batch-size 1 --global-batch-size 1"),
    Case("Llama, fp32", SMALL_LLAMA),
    Case("Llama, bf16, selective", f"{SMALL_LLAMA} --bf16 --recompute-granularity selective"),
    Case("Llama, bf16, full", f"{SMALL_LLAMA} --bf16 --recompute-granularity full"),
    Case("Llama MHA, bf16", f"{SMALL_LLAMA} --bf16 --num-query-groups 16"),
    Case("Llama, bf16, vocabulary 128,256", f"{SMALL_LLAMA} --bf16 --vocab-size 128256"),
    Case("Llama, bf16, sequence 4096", f"{SMALL_LLAMA} --bf16 --seq-length 4096 --hidden-size 1024 --num-layers 8"),
    Case("GPT-2, bf16, dropout", f"{SMALL} {GPT2} --bf16 --hidden-dropout 0.1 --attention-dropout 0.1"),
    Case("GPT-2, fp32, full", f"{SMALL} {GPT2} --recompute-granularity full"),
    Case("Bloom, bf16", f"{SMALL} {BLOOM} --bf16"),
    Case("Bloom, bf16, dropout", f"{SMALL} {BLOOM} --bf16 --hidden-dropout 0.1 --attention-dropout 0.1"),
    Case("Llama, fp32, ZeRO 1", f"{SMALL_LLAMA} --zero-stage 1"),
    Case("Llama, bf16, ZeRO 2", f"{SMALL_LLAMA} --bf16 --zero-stage 2"),
    Case("Llama, fp32, ZeRO 2", f"{SMALL_LLAMA} --zero-stage 2"),
    Case("Llama, bf16, ZeRO 3", f"{SMALL_LLAMA} --bf16 --zero-stage 3"),
    Case("Llama, bf16, ZeRO 2, offload", f"{SMALL_LLAMA} --bf16 --zero-stage 2 --offload-optimizer"),
    Case("Llama, bf16, ZeRO 3, offload", f"{SMALL_LLAMA} --bf16 --zero-stage 3 {OFFLOAD}"),
]


class Result(NamedTuple):
    """Bytes of one stage, planned and measured."""

    stage: int
    planned: int
    measured: int
    peak: str
    """Moment at which the plan has its peak."""
    parts: Peak | None = None
    """Parts of `measured`, and others, on a CPU."""
    largest: tuple[str, ...] = ()
    """Tensors that the run held at its peak, if that was to be explained."""

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def compare(flags: str, device: str, explain: float = 1.0) -> Result | None:
    """Train on this rank, and return its stage's result; None on all but the first rank of a stage.

    An error of more than `explain` is explained, on CUDA.
    """
    import numpy as np
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.plan.memory import memory_by_stage
    from megatron.settings.command_line import parse_arguments
    from megatron.settings.validation import check
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    config, _ = parse_arguments([*COMMON.split(), *flags.split(), "--device", device])
    ctx = ParallelContext.build(config.parallel, device)
    if faults := check(config, ctx.world_size):
        raise SystemExit("\n".join(faults))
    allocations = Allocations() if device == "cpu" else None
    if allocations:
        torch.set_num_threads(1)  # blocks of other threads count as communication
        allocations.start()
    task, training = PretrainTask(config), config.training
    with patch.object(Shard, "initial", _constant):  # drawing would take longer than the training
        engine = build_engine(config, ctx, task)
    generator = np.random.default_rng(0)
    shape = (training.micro_batch_size, training.seq_length + 1)
    number = training.global_batch_size // (training.micro_batch_size * ctx.num_batch_ranks)

    def step(number: int = number) -> None:
        tokens = [generator.integers(0, config.model.vocab_size, shape, dtype=np.int64) for _ in range(number)]
        batches = [task.data.collate(part) for part in tokens] if engine.reads_data else []
        result = engine.train_step(batches, num_microbatches=number, consumed_samples=0, lr=config.optimizer.lr)
        assert result.is_finite, "the update was refused, so it is not measured"

    step(1)  # it allocates what later ones hold, whatever their number of microbatches
    parts = _peak_cpu(step, allocations) if allocations else None
    measured = _most_of_stage(parts.tensors + parts.communication if parts else _peak_cuda(step), ctx)
    stage = memory_by_stage(config, ctx)[ctx.stage]
    planned = stage.memory.total + (stage.host_bytes if device == "cpu" else 0)
    result = Result(ctx.stage, planned, measured, stage.peak, parts)
    if device == "cuda" and abs(result.ratio - 1) > explain:
        sizes = [f"{part}={size / MIB:.1f}" for part, size in vars(stage.memory).items()]
        result = result._replace(largest=("plan: " + " ".join(sizes), *_largest_cuda(step)))
    return None if ctx.tensor_rank or ctx.grad_rank else result


_DRAWN = Shard.initial


def _constant(shard: Shard, name: str, seed: int, rank: int, size: int) -> Any:
    import torch

    # tokens that a router scores alike all go to the same experts
    if isinstance(shard.cost, Router | Table):
        return _DRAWN(shard, name, seed, rank, size)
    return torch.full(shard.local_shape(size), 0.01)


def _peak_cuda(step: Any) -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _largest_cuda(step: Any) -> list[str]:
    """Train one more step, and return what it allocated and still held at its peak, by line of this project's code."""
    import torch

    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2_000_000)
    step()
    torch.cuda.synchronize()
    (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    now, peak, peak_at, sizes = 0, 0, -1, {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"], 0)
        if now > peak:
            peak, peak_at = now, index
    alive: dict[int, Any] = {}
    for event in trace[: peak_at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    by_line: dict[str, list[int]] = {}
    for event in alive.values():
        files = [(frame["filename"].rpartition("/")[2], frame) for frame in event.get("frames", [])]
        own = [f"{file}:{frame['line']}" for file, frame in files if "megatron" in frame["filename"]]
        other = [f"{file}:{frame['line']}" for file, frame in files[:2]]
        by_line.setdefault(" < ".join([*other, *own[:3]]), []).append(event["size"])
    groups = sorted(by_line.items(), key=lambda group: -sum(group[1]))[:14]
    lines = [f"{sum(sizes) / MIB:9.1f} in {len(sizes):3d}, largest {max(sizes)}: {line}" for line, sizes in groups]
    return [f"measured: {held / MIB:.1f} before the step, {peak / MIB:.1f} more at its peak", *lines]


def _peak_cpu(step: Any, allocations: Allocations) -> Peak:
    """Return the lower peak of two steps: in one of them a thread of gloo may hold for longer what it has reduced."""
    peaks = []
    for _ in range(2):
        gc.collect()
        allocations.reset_peak()
        step()
        peaks.append(allocations.peak())
    allocations.stop()
    return min(peaks, key=lambda peak: peak.tensors + peak.communication)


def _most_of_stage(measured: int, ctx: Any) -> int:
    """Return the most bytes of a rank of this stage: those that share parameters keep unequal parts of them."""
    import torch
    import torch.distributed as dist

    if ctx.world_size == 1:
        return measured
    by_stage = torch.zeros(ctx.num_stages, dtype=torch.int64)
    by_stage[ctx.stage] = measured
    dist.all_reduce(by_stage, op=dist.ReduceOp.MAX)
    return int(by_stage[ctx.stage])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory of the plan against that of a run.", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this text in their name")
    parser.add_argument("--explain", type=float, default=0.03, help="CUDA: list what a run held that is off by more")
    parser.add_argument("--flags", help="flags of one run instead of the cases")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of --flags; on CUDA one (default: 1)")
    options = parser.parse_args(argv)
    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CUDA_CASES if device == "cuda" else CPU_CASES
    cases = [case for case in cases if options.only in case.name]
    if options.flags:
        cases = [Case("given", options.flags, options.ranks)]
    columns = [device, "plan, MiB", "measured, MiB", "ratio", "peak of the plan"]
    if device == "cpu":
        columns += ["communication, MiB", "kernels, MiB", "process, MiB"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    worst, waiting = 0.0, [Runner(case, device, options.explain) for case in cases[:AHEAD]]
    for index, case in enumerate(cases):
        if index + AHEAD < len(cases):
            waiting.append(Runner(cases[index + AHEAD], device, options.explain))
        results = waiting.pop(0).run()
        for result in results:
            if isinstance(result, str):
                print(f"| {case.name} | failed |\n{result}", flush=True)
                worst = 1.0
                continue
            worst = max(worst, abs(result.ratio - 1))
            name = case.name if len(results) == 1 else f"{case.name}: stage {result.stage}"
            planned, measured = f"{result.planned / MIB:.1f}", f"{result.measured / MIB:.1f}"
            others = [f"{size / MIB:.1f}" for size in (result.parts or ())[1:]]
            figures = [planned, measured, f"{result.ratio:.3f}", result.peak, *others]
            print("\n    ".join([f"| {name} | {' | '.join(figures)} |", *result.largest]), flush=True)
    print(f"largest error: {worst:.1%}")
    return 0 if worst <= LIMIT else 1


class Runner:
    """The processes of a case, which import at once and wait for `run`."""

    def __init__(self, case: Case, device: str, explain: float) -> None:
        port = free_port()
        spawn = multiprocessing.get_context("spawn")
        self._results: Any = spawn.Queue()
        self._start = spawn.Event()
        arguments = (case, device, explain, port, self._start, self._results)
        self._processes = [spawn.Process(target=_rank, args=(rank, *arguments)) for rank in range(case.ranks)]
        counted = {"LD_PRELOAD": str(library())} if device == "cpu" else {}
        with patch.dict(os.environ, counted):
            for process in self._processes:
                process.daemon = True
                process.start()

    def run(self) -> list[Result | str]:
        """Return the result of each stage, or the error of the first rank that failed."""
        self._start.set()
        found: list[Result | str] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        for _ in self._processes:
            try:
                answer = self._results.get(timeout=max(1.0, deadline_s - time.monotonic()))
            except queue.Empty:
                answer = f"no answer in {TIMEOUT_S} s"
            if isinstance(answer, str):
                found = [answer]
                break
            found += [] if answer is None else [answer]
        for process in self._processes:
            if not isinstance(found[0], str):
                process.join(10)
            process.kill()
            process.join()
        return sorted(found)


def _rank(number: int, case: Case, device: str, explain: float, port: int, start: Any, results: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": device}
    try:
        import megatron.training.build  # noqa: F401  # before it waits

        start.wait()
        results.put(compare(case.flags, device, explain))
    except BaseException:
        results.put(traceback.format_exc())
    results.close()
    results.join_thread()
    os._exit(0)  # without Python's end, in which gloo's threads may abort


if __name__ == "__main__":
    sys.exit(main())
