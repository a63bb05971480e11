"""Time of a family's layers for each FLOP, beside Llama's; and of attention under a window, beside the whole.

    python benchmarks/families.py [--families mistral qwen3] [--rounds 9] [--bf16]

All models have one shape (hidden 512, two layers, sequence 512) and differ in what the family declares. Each runs
forward and backward in turn, on a CPU, timed by processor time, which other work disturbs less; FLOPs are the plan's.
The window is 1/8 of 4,096 tokens. Prints medians over rounds. Exit status 1 if a family takes more than 1.03 of Llama's
time for each FLOP, or the window more than 0.3 of the whole.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, positive, quotients

if TYPE_CHECKING:
    from torch import Tensor

LIMIT, WINDOW_LIMIT = 1.03, 0.3
SHAPE = (
    "--position-embedding-type rope --num-layers 2 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 "
    "--num-query-groups 2 --vocab-size 1024 --seq-length 512 --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 1 --data-path none --hidden-dropout 0 --attention-dropout 0 --device cpu "
    "--untie-embeddings-and-output-weights"
)
FAMILIES = {
    "llama": "",
    "mistral": "",
    "qwen2": "",
    "qwen3": "",
    "granite": "--embedding-multiplier 12 --attention-multiplier 0.0156 --residual-multiplier 0.22 --logits-scaling 8",
    "olmo2": "",
    "phi3": "",
    "starcoder2": "",
    "gpt_neox": "--rotary-percent 0.25",
    "gemma2": "--embedding-multiplier 22.6 --logits-softcap 30",
    "gemma3": "--embedding-multiplier 22.6",
}
"""Options of each beside the shape; windows are as long as the sequence, and Gemma 2 is without its cap of scores."""
LENGTH = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of each family's layers for a FLOP.", allow_abbrev=False)
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES), help="default: all")
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--bf16", action="store_true", help="instead of float32")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    torch.set_num_threads(1)  # threads that wait for each other take processor time too
    names = ["llama", *(name for name in options.families if name != "llama")]
    times = alternate({name: step_of(name, bf16=options.bf16) for name in names}, options.rounds)
    print(f"{options.rounds} rounds, {'bf16' if options.bf16 else 'fp32'}\n")
    print("| family | ns a MFLOP | ratio |\n|---|---|---|")
    worst = 0.0
    for name in names:
        ratio = statistics.median(quotients(times[name], times["llama"]))
        worst = max(worst, ratio)
        print(f"| {name} | {statistics.median(times[name]):.1f} | ratio {ratio:.3f} |", flush=True)
    windows = alternate(attention_sides(bf16=options.bf16), options.rounds)
    share = statistics.median(quotients(windows["window"], windows["whole"]))
    print(f"window of {LENGTH // 8} of {LENGTH}: ratio {share:.3f} of the attention to all tokens")
    return 0 if worst <= LIMIT and share <= WINDOW_LIMIT else 1


def step_of(name: str, *, bf16: bool) -> Callable[[], float]:
    """Return what trains one step without an update, and returns its processor time in ns for a million FLOPs."""
    import torch

    from megatron.models.sequential import SequentialModel, build_layers, compute_dtype, default_dtype
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.losses import linear_cross_entropy
    from megatron.parallel.shards import initialise, named_parameters
    from megatron.plan.flops import flops_per_token
    from megatron.settings.command_line import parse_arguments

    words = f"--architecture {name} {SHAPE} {FAMILIES[name]} {'--bf16' if bf16 else ''}"
    config, _ = parse_arguments(words.split())
    ctx, training = ParallelContext.single(), config.training
    with default_dtype(compute_dtype(config)):
        model = SequentialModel(build_layers(config, ctx))
    initialise(named_parameters(model), training.seed, ctx)
    tokens = torch.arange(training.seq_length)[None] * 7 % config.model.vocab_size
    weights = torch.full(tokens.shape, 1.0 / tokens.numel())

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return linear_cross_entropy(*outputs, tokens, weights, ctx)

    flops = flops_per_token(config) * tokens.numel()

    def step() -> float:
        model.zero_grad()
        began_s = time.process_time()
        model(tokens, project=loss).backward()
        return (time.process_time() - began_s) / flops * 1e15

    return step


def attention_sides(*, bf16: bool) -> Mapping[str, Callable[[], float]]:
    """Return the kernel of a layer with the window, and of one without, forward and backward."""
    import torch

    from megatron.models.attention.kernels import build_kernel
    from megatron.options.config import ModelConfig
    from megatron.parallel.context import ParallelContext

    model = ModelConfig(num_attention_heads=8, num_query_groups=2, kv_channels=128, attention_dropout=0.0)
    ctx, dtype = ParallelContext.single(), torch.bfloat16 if bf16 else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, LENGTH, 128, generator=generator).to(dtype).requires_grad_() for heads in (8, 2, 2)
    )
    windows = {"whole": None, "window": LENGTH // 8}
    kernels = {
        name: build_kernel(model, ctx, packed=False, window=window, length=LENGTH) for name, window in windows.items()
    }

    def seconds(name: str) -> float:
        began_s = time.process_time()
        kernels[name](q, k, v, None, 0.0).sum().backward()
        return time.process_time() - began_s

    return {name: partial(seconds, name) for name in kernels}


if __name__ == "__main__":
    sys.exit(main())
