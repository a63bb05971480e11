"""Step time of the plan against that of a run, case by case.

    python benchmarks/plan_time.py --rates cpu.yaml [--drawn 20] [--seed 0] [--only TEXT] [--flags "FLAGS" [--ranks N]]

`megatron-plan --measure cpu.yaml` makes the file of rates: on the same machine, and as near in time as can be. Each
case trains by the whole program, data and logs included, in ranks that are forks of this process. Measured is the
lower quartile of `iteration_time_s` over the steps after the first three: what a machine's other guests add to a step
is never less than nothing. The drawn cases are any valid runs of small models on up to four ranks. Exit status 1 if
less than nine tenths of the cases are within 10 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.alternating import free_port
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.config import Config
from megatron.plan.rates.files import load_rates
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.settings.command_line import load_config
from megatron.settings.validation import check

LIMIT = 0.10
SHARE = 0.9
FIRST = 3
"""Steps that are not counted: they allocate, and DeepSpeed builds its state in them."""
STEPS = 9
TIMEOUT_S = 240
PARTS = 3
"""Largest parts of the prediction that are printed."""


class Case(NamedTuple):
    """A run: its name, its flags beside COMMON, and its ranks."""

    name: str
    flags: str
    ranks: int = 1


COMMON = (
    "--device cpu --lr 1e-4 --lr-decay-style constant --make-vocab-size-divisible-by 16 --hidden-dropout 0 "
    "--attention-dropout 0 --split 1,0,0 --eval-iters 0 --log-interval 1"
)
LLAMA = "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights"
BLOOM = "--architecture bloom --position-embedding-type alibi --embed-layernorm"
GPT2 = "--architecture bloom --position-embedding-type learned"
SMALL = (
    f"{LLAMA} --num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --num-query-groups 4 "
    "--vocab-size 4000 --seq-length 256 --micro-batch-size 2 --global-batch-size 8"
)
WIDE = (
    f"{LLAMA} --num-layers 2 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --vocab-size 8000 "
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 4"
)
LONG = (
    f"{LLAMA} --num-layers 2 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 4 --vocab-size 2000 "
    "--seq-length 2048 --micro-batch-size 1 --global-batch-size 2"
)
SMALL_BLOOM = (
    f"{BLOOM} --num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 4000 --seq-length 256 "
    "--micro-batch-size 2 --global-batch-size 8"
)
EXPERTS = f"{SMALL} --ffn-hidden-size 256 --num-experts 8 --moe-aux-loss-coeff 0.01"
TP, PP, CP = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
FIXED = [
    Case("Llama, fp32", SMALL),
    Case("Llama, bf16", f"{SMALL} --bf16"),
    Case("Llama, fp32, full", f"{SMALL} --recompute-granularity full"),
    Case("Llama, bf16, selective", f"{SMALL} --bf16 --recompute-granularity selective"),
    Case("wide, fp32", WIDE),
    Case("long, fp32", LONG),
    Case("Bloom, fp32", SMALL_BLOOM),
    Case("LoRA, fp32", f"{SMALL} --lora-rank 8 --lora-target-modules all-linear"),
    Case("DP 2, fp32", SMALL, 2),
    Case("DP 2, bf16, ZeRO 1", f"{SMALL} --bf16 --zero-stage 1", 2),
    Case("DP 2, fp32, ZeRO 3", f"{SMALL} --zero-stage 3", 2),
    Case("wide, DP 2, fp32, ZeRO 2", f"{WIDE} --zero-stage 2", 2),
    Case("TP 2, fp32", f"{SMALL} {TP}", 2),
    Case("wide, TP 2, SP, fp32", f"{WIDE} {TP} --sequence-parallel", 2),
    Case("Bloom, PP 2, fp32", f"{SMALL_BLOOM} {PP}", 2),
    Case("PP 2, zero-bubble, fp32", f"{SMALL} {PP} --pipeline-schedule zero-bubble", 2),
    Case("long, CP 2, ring, fp32", f"{LONG} {CP} --context-parallel-exchange ring", 2),
    Case("experts, EP 2, fp32", f"{EXPERTS} --expert-model-parallel-size 2", 2),
    Case("TP 2, PP 2, fp32", f"{SMALL} {TP} {PP}", 4),
    Case("PP 2, DP 2, bf16", f"{SMALL} --bf16 {PP}", 4),
]


def drawn(number: int, seed: int) -> list[Case]:
    """Return so many valid cases of hypothesis's choice."""
    import hypothesis
    from hypothesis import strategies as st

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        # of data-parallel ranks alone, or of other axes too
        chosen = draw(st.lists(st.sampled_from((TP, PP, CP)), max_size=2, unique=True))
        ranks = draw(st.sampled_from((1, 2, 4))) if not chosen else draw(st.sampled_from((2 ** len(chosen), 4)))
        heads, rows = draw(st.sampled_from((4, 8))), draw(st.integers(1, 3))
        numbers = {
            "num-layers": draw(st.sampled_from((2, 4, 6))),
            "hidden-size": draw(st.sampled_from((128, 256, 384, 512))),
            "num-attention-heads": heads,
            "vocab-size": draw(st.integers(1000, 10_000)),
            "seq-length": draw(st.sampled_from((128, 256, 512, 1024))),
            "micro-batch-size": rows,
            "global-batch-size": rows * draw(st.sampled_from((4, 8))),
            "zero-stage": draw(st.integers(0, 3)),
        }
        family = draw(st.sampled_from((f"{LLAMA} --num-query-groups 4 --ffn-hidden-size 704", LLAMA, BLOOM, GPT2)))
        kinds = ("", "", "--recompute-granularity full", "--recompute-granularity selective")
        flags = [f"--{name} {value}" for name, value in numbers.items()]
        flags += [family, *chosen, draw(st.sampled_from(("", "--bf16"))), draw(st.sampled_from(kinds))]
        if TP in chosen:
            flags.append(draw(st.sampled_from(("", "--sequence-parallel"))))
        case = Case("", " ".join(filter(None, flags)), ranks)
        hypothesis.assume(not faults(case))
        return case

    found: dict[str, Case] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=10 * number,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def draw_one(case: Case) -> None:
        found[case.flags] = case

    draw_one()
    # its first examples are the simplest of each choice
    chosen = list(found.values())[-number:]
    return [case._replace(name=f"drawn {index}") for index, case in enumerate(chosen, 1)]


def faults(case: Case) -> Sequence[str]:
    """Return what keeps a case from running."""
    from megatron.settings.command_line import parse_arguments

    config, _ = parse_arguments([*COMMON.split(), *case.flags.split(), "--train-iters", "10", "--data-path", "none"])
    return check(config, case.ranks)


def config_of(case: Case, folder: Path) -> Config:
    flags = f"{COMMON} {case.flags} --train-iters {FIRST + STEPS} --data-path {folder}/data --results-dir {folder}/run"
    return load_config(flags.split(), case.ranks)


def write_data(prefix: Path, vocabulary: int) -> None:
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(200):
            builder.add_document(generator.integers(0, vocabulary, 4000).astype(np.uint16))
        builder.finalize()


def measure(case: Case) -> list[float]:
    """Train, and return the seconds of each counted step. Raises RuntimeError with the ranks' own words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", config_of(case, folder).model.vocab_size or 1000)
        fork = multiprocessing.get_context("fork")
        port = free_port()
        processes = [fork.Process(target=_rank, args=(rank, case, folder, port)) for rank in range(case.ranks)]
        for process in processes:
            process.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.1, deadline_s - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        if errors := [path.read_text() for path in folder.glob("error*")]:
            raise RuntimeError(errors[0])
        metrics = folder / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        seconds = [row["iteration_time_s"] for row in rows if row["kind"] == "train"]
        if len(seconds) < FIRST + STEPS:
            raise RuntimeError(f"{len(seconds)} steps in {TIMEOUT_S} s")
        return seconds[FIRST:]


def _rank(number: int, case: Case, folder: Path, port: int) -> None:
    threads = max(1, (os.cpu_count() or 1) // case.ranks)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        import torch

        from megatron.options.config import on_device
        from megatron.parallel.context import ParallelContext
        from megatron.training.run import run

        torch.set_num_threads(threads)
        config = config_of(case, folder)
        run(on_device(config, "cpu", lazy=False), ParallelContext.build(config.parallel, "cpu"))
    except BaseException:
        (folder / f"error{number}").write_text(traceback.format_exc())
    os._exit(0)  # without Python's end, in which gloo's threads may abort


def predict(case: Case, rates: Rates) -> StepTime:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", 1000)
        return step_time(config_of(case, folder), Cluster((case.ranks,)), rates)


def largest_parts(time: StepTime) -> str:
    return ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in time.parts.largest()[:PARTS])


def rows(cases: Sequence[Case], rates: Rates) -> Iterator[float]:
    """Print a row for each case, and yield prediction / measurement."""
    print("| case | ranks | predicted, ms | measured, ms (least to most) | ratio | largest parts, ms |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for case in cases:
        try:
            predicted = predict(case, rates)
            seconds = measure(case)
        except Exception as error:
            print(f"| {case.name} | {case.ranks} | failed: {error!r} |\n{case.flags}", flush=True)
            yield 0.0
            continue
        measured = statistics.quantiles(seconds, n=4)[0]
        ratio = predicted.seconds / measured
        spread = f"{1000 * measured:.1f} ({1000 * min(seconds):.1f} to {1000 * max(seconds):.1f})"
        figures = [f"{1000 * predicted.seconds:.1f}", spread, f"{ratio:.3f}", largest_parts(predicted)]
        print(f"| {case.name} | {case.ranks} | {' | '.join(figures)} |", flush=True)
        if abs(ratio - 1) > LIMIT:
            print(f"    {case.flags}", flush=True)
        yield ratio


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Step time of the plan against that of a run.", allow_abbrev=False)
    parser.add_argument(
        "--rates", required=True, metavar="FILE", help="made by megatron-plan --measure on this machine"
    )
    parser.add_argument("--drawn", type=int, default=20, metavar="N", help="cases of hypothesis's choice (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cases (default: 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this text in their name")
    parser.add_argument("--flags", help="flags of one run instead of the cases")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of --flags (default: 1)")
    options = parser.parse_args(argv)
    rates = load_rates(options.rates)
    cases = [Case("given", options.flags, options.ranks)] if options.flags else [*FIXED]
    if not options.flags and options.drawn:
        cases += drawn(options.drawn, options.seed)
    from megatron.train import preload

    os.environ["DS_ACCELERATOR"] = "cpu"
    preload()
    ratios = list(rows([case for case in cases if options.only in case.name], rates))
    within = sum(abs(ratio - 1) <= LIMIT for ratio in ratios)
    print(f"within {LIMIT:.0%}: {within} of {len(ratios)}; median ratio {statistics.median(ratios):.3f}")
    return 0 if within >= SHARE * len(ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
