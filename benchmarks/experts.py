"""Training a mixture of experts: beside transformers, beside the bare products of its experts, and over two ranks.

    python benchmarks/experts.py [--rounds 7]

1. A Mixtral of 8 experts, top 2 and 30 million parameters over sequences of 512 tokens: one step of ours through the
   engine, and one of transformers' model with torch's fused AdamW, in turn, from random weights. Prints seconds of the
   processor, tokens a second, their ratio (aim: 1.3), and the peak memory of each in a process of its own.
2. One layer of experts at 4,096 tokens, forward and backward, and the matrix products alone that its active FLOPs are
   (aim: 1.15).
3. The same model over two data-parallel ranks, with all experts on each and with half of them (aim: 1.10), by the
   processor time of both.

transformers is in the extra `convert`. Times are of the processor, so that other work on the machine counts little.
Exit status 1 if an aim is missed.
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
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread

LAYERS, HIDDEN, FFN, HEADS, VOCABULARY, LENGTH, BATCH = 8, 256, 512, 8, 4096, 512, 4
MODEL = (
    f"--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights --num-layers {LAYERS} "
    f"--hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} --num-query-groups 4 --vocab-size "
    f"{VOCABULARY} --make-vocab-size-divisible-by 1 --seq-length {LENGTH} --hidden-dropout 0 --attention-dropout 0 "
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --train-iters 1000 --data-path none --device cpu "
    "--lr 1e-3 --clip-grad 1.0"
)


def processor_seconds(work: Callable[[], Any]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def tokens_of(step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def ours(flags: str = "", rank: int = 0, num_ranks: int = 1) -> Callable[[], float]:
    """Return one step of the engine over this rank's share of BATCH samples."""
    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import parse_arguments
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    size = BATCH // num_ranks
    config, _ = parse_arguments(f"{MODEL} --micro-batch-size {size} --global-batch-size {BATCH} {flags}".split())
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    engine = build_engine(config, ctx, task)
    step = 0

    def run() -> float:
        nonlocal step
        batch = task.data.collate(tokens_of(step).numpy()[rank * size : (rank + 1) * size])
        step += 1
        return float(engine.train_step([batch], consumed_samples=step * BATCH, lr=1e-3).loss)

    return run


def theirs() -> Callable[[], float]:
    """Return one step of transformers' Mixtral, its experts computed as it does by default."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = 0

    def run() -> float:
        nonlocal step
        tokens = tokens_of(step)[:, :-1]
        step += 1
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def peak_bytes(index: int, port: int, side: str, results: Any) -> None:
    """Put the peak memory of a process that trains, beyond what the imports take."""
    os.environ["MASTER_PORT"] = str(port)
    build = {"ours": ours, "transformers": theirs}[side]
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    before = _highest_bytes()
    step = build()
    for _ in range(3):
        step()
    results.put(_highest_bytes() - before)


def _highest_bytes() -> int:
    """Return the peak of this process's memory; getrusage would count that of its parent before the fork."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def two_ranks(index: int, port: int, flags: str, steps: int, results: Any) -> None:
    """Put the processor seconds of both ranks for a step."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    step = ours(flags, index, 2)
    step()
    dist.barrier()
    seconds = torch.tensor([processor_seconds(lambda: [step() for _ in range(steps)]) / steps])
    dist.all_reduce(seconds)
    if index == 0:
        results.put(float(seconds))


def layer_sides() -> dict[str, Callable[[], float]]:
    """Forward and backward of one layer of experts, and its products alone."""
    import torch

    from megatron.models.experts import Experts
    from megatron.models.sequential import SequentialModel, build_layers
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import initialise, named_parameters
    from megatron.settings.command_line import parse_arguments

    hidden, ffn, tokens = 1024, 2048, 4096
    flags = f"{MODEL} --num-layers 1 --hidden-size {hidden} --ffn-hidden-size {ffn} --moe-aux-loss-coeff 0"
    config, _ = parse_arguments(flags.split())
    ctx = ParallelContext.single()
    model = SequentialModel(build_layers(config, ctx))
    initialise(named_parameters(model), 1, ctx)
    (layer,) = [module for module in model.modules() if isinstance(module, Experts)]
    x = torch.randn(LENGTH, tokens // LENGTH, hidden, requires_grad=True)
    gradient = torch.randn_like(x)
    weights = [(torch.randn(2 * ffn, hidden), torch.randn(hidden, ffn)) for _ in range(8)]
    own = 2 * tokens // 8  # of each expert, where all are used alike
    inputs, inside = torch.randn(own, hidden), torch.randn(own, ffn)
    grad_outputs, grad_inside = torch.randn(own, hidden), torch.randn(own, 2 * ffn)

    def experts() -> None:
        layer(x).backward(gradient)
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None

    def products() -> None:
        for up, down in weights:
            _ = inputs @ up.t(), inside @ down.t()
            _ = grad_outputs @ down, grad_outputs.t() @ inside
            _ = grad_inside @ up, grad_inside.t() @ inputs

    return {"layer": lambda: processor_seconds(experts), "products": lambda: processor_seconds(products)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Training of a mixture of experts.", allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=7, help="alternations (default: 7)")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    missed = []

    def report(name: str, ratios: list[float], aim: float, *, at_least: bool = False) -> None:
        print(f"  ratio {spread(ratios)}, aim {aim}")
        ratio = statistics.median(ratios)
        if ratio < aim if at_least else ratio > aim:
            missed.append(name)

    with_engine, with_transformers = ours(), theirs()
    seconds = alternate(
        {
            "ours": lambda: processor_seconds(with_engine),
            "transformers": lambda: processor_seconds(with_transformers),
        },
        options.rounds,
    )
    print("1. a step of 2,048 tokens")
    for name, values in seconds.items():
        print(f"  {name:12s} {spread(values)} s, {BATCH * LENGTH / statistics.median(values):,.0f} tokens/s")
    report("transformers", quotients(seconds["transformers"], seconds["ours"]), 1.3, at_least=True)
    peaks = {name: on_ranks(peak_bytes, 1, name) / 2**20 for name in seconds}
    print(f"  peak memory: ours {peaks['ours']:,.0f} MiB, transformers {peaks['transformers']:,.0f} MiB")
    if peaks["ours"] > peaks["transformers"]:
        missed.append("memory")

    seconds = alternate(layer_sides(), options.rounds)
    print("2. a layer of experts at 4,096 tokens")
    for name, values in seconds.items():
        print(f"  {name:12s} {spread(values)} s")
    report("layer", quotients(seconds["layer"], seconds["products"]), 1.15)

    layouts = {"EP 1": "", "EP 2": "--expert-model-parallel-size 2"}
    sides = {name: lambda flags=flags: on_ranks(two_ranks, 2, flags, 5) for name, flags in layouts.items()}
    seconds = alternate(sides, max(2, options.rounds // 2), warm_up=False)
    print("3. a step over two ranks")
    for name, values in seconds.items():
        print(f"  {name:12s} {spread(values)} s of both")
    report("EP 2", quotients(seconds["EP 2"], seconds["EP 1"]), 1.10)
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
