"""Log-likelihoods of multiple choice: lm-eval over this project's model beside lm-eval's own `hf` model.

    MEGATRON_TEST_DATA=... OMP_NUM_THREADS=2 python benchmarks/evaluate.py
    MEGATRON_TEST_DATA=... python benchmarks/evaluate.py --precisions fp32 --sections profile

The Llama of 34M parameters of benchmarks/step.py, exported to a folder that both sides load, with a tokenizer trained
on the text. Requests are passages of tinyshakespeare.txt, of 8 to 200 words, each with four continuations of 1 to 12
words. Both sides get the same requests through `loglikelihood`, tokenization included, in turn in one process. The `hf`
model runs with each of --batch-sizes, and the fastest counts.

Exit status 1 if ours is below 1.3 times as fast, or if a log-likelihood in float32 differs by more than 1e-4.
lm-eval is in the extra `eval`, transformers in `convert`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.alternating import alternate, positive, quotients, spread
from benchmarks.step import workload
from megatron.options.config import Config
from megatron.parallel.layout import Layout

AIM, TOLERANCE = 1.3, 1e-4
CONTEXT_WORDS, CONTINUATION_WORDS, CHOICES = (8, 200), (1, 12), 4
SECTIONS = ("rate", "profile")

Answers = list[tuple[float, bool]]


def main() -> int:
    options = _parser().parse_args()
    data = os.environ.get("MEGATRON_TEST_DATA")
    if data is None:
        print("set MEGATRON_TEST_DATA to the folder of the tests' corpora", file=sys.stderr)
        return 2

    from megatron.runtime import accelerator

    accelerator.choose_device("cpu")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    text = (Path(data) / "tinyshakespeare.txt").read_text()
    requests = _requests(text, options.questions)
    reached = True
    for precision in options.precisions:
        config = workload("llama", "cpu", precision, []).config
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            _write_model(folder, config, text)
            print(f"\n## llama, {precision}", flush=True)
            reached &= _compare(folder, precision, requests, options)
    return 0 if reached else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="lm-eval beside its own hf model.", allow_abbrev=False)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"))
    parser.add_argument("--questions", type=positive, default=32, help="contexts of four requests each (default: 32)")
    parser.add_argument("--batch-sizes", nargs="+", type=positive, default=[1, 8, 32], help="of lm-eval's own model")
    parser.add_argument("--sections", nargs="+", default=["rate"], choices=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=3, help="alternations (default: 3)")
    return parser


def _requests(text: str, questions: int) -> list[Any]:
    """Return lm-eval's requests, the four of a question in turn."""
    from lm_eval.api.instance import Instance

    words, random = text.split(), np.random.default_rng(0)

    def passage(shortest: int, longest: int) -> str:
        length = int(random.integers(shortest, longest + 1))
        begin = int(random.integers(len(words) - length))
        return " ".join(words[begin : begin + length])

    found = []
    for number in range(questions):
        context = passage(*CONTEXT_WORDS)
        for _ in range(CHOICES):
            pair = (context, " " + passage(*CONTINUATION_WORDS))
            found.append(Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number))
    return found


def _write_model(folder: Path, config: Config, text: str) -> None:
    """Write the model with random weights, and a tokenizer of the text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from megatron.generation.model import build_stage
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import initialise, named_parameters
    from megatron.weights.huggingface import export_huggingface

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = config.model.vocab_size
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    beside = folder.with_name("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(beside)
    device = torch.device("cpu")
    _, modules = build_stage(config, ParallelContext(device=device), device)
    named = dict(named_parameters(modules))
    initialise(named.items(), config.training.seed, Layout())
    folder.mkdir()
    # without the padding of the vocabulary
    tensors = ((name, weight.detach().float()[:size] if "embedding" in name else weight.detach().float())
               for name, weight in named.items())  # fmt: skip
    export_huggingface(folder, config, tensors, tokenizer=beside)


# ---------------------------------------------------------------------------------------------------------------------
# Sides


def _ours(folder: Path) -> Any:
    from megatron.evaluation.commands import Commands
    from megatron.evaluation.harness import HarnessModel
    from megatron.evaluation.options import EvaluationOptions
    from megatron.generation.generator import BatchSettings
    from megatron.generation.loading import load_model
    from megatron.generation.options import LoadOptions
    from megatron.generation.prompts import PromptEncoder
    from megatron.generation.saved_model import parallel_options
    from megatron.parallel.context import ParallelContext

    load = LoadOptions(load=str(folder), device="cpu")
    model = load_model(load, ParallelContext.build(parallel_options(load), "cpu"))
    return HarnessModel(Commands(model, BatchSettings()), PromptEncoder(model), EvaluationOptions())


def _theirs(folder: Path, precision: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    dtype = "bfloat16" if precision == "bf16" else "float32"
    return HFLM(pretrained=str(folder), device="cpu", dtype=dtype)


class _Side:
    """Seconds of each run, by the clock and of the processor, and the last answers."""

    def __init__(self, run: Callable[[], Answers]) -> None:
        self._run = run
        self.answers: Answers = []
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self) -> float:
        began, began_cpu = time.perf_counter(), time.process_time()
        self.answers = self._run()
        self.wall.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - began_cpu)
        return self.wall[-1]


def _compare(folder: Path, precision: str, requests: list[Any], options: argparse.Namespace) -> bool:
    ours, theirs = _ours(folder), _theirs(folder, precision)

    def in_batches(batch_size: int) -> Answers:
        theirs.batch_size_per_gpu = batch_size
        return theirs.loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return]

    def alone() -> Answers:
        return ours.loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return]

    tokens = [len(ours.tok_encode(request.args[0])) for request in requests[::CHOICES]]
    print(f"{len(requests)} requests, contexts of {min(tokens)} to {max(tokens)} tokens", flush=True)
    if "profile" in options.sections:
        _show_profile(alone)
    if "rate" not in options.sections:
        return True
    peers = {f"hf, batch {size}": _Side(partial(in_batches, size)) for size in options.batch_sizes}
    sides = {"ours": _Side(alone)} | peers
    alternate(dict(sides), options.rounds, warm_up=False)
    for name, side in sides.items():
        print(f"{name:14s} {spread(side.wall, 2)} s, processor {spread(side.cpu, 2)} s")
    ratios = {}
    for clock in ("wall", "cpu"):
        times = [getattr(side, clock) for side in peers.values()]
        ratios[clock] = quotients(min(times, key=statistics.median), getattr(sides["ours"], clock))
    wall, cpu = (spread(ratios[clock], 2) for clock in ("wall", "cpu"))
    print(f"ours is {wall} times as fast; by processor time {cpu}", flush=True)
    both = zip(sides["ours"].answers, next(iter(peers.values())).answers, strict=True)
    largest = max(abs(own - other) for (own, _), (other, _) in both)
    print(f"log-likelihoods differ by {largest:.2g} at most", flush=True)
    return statistics.median(ratios["wall"]) >= AIM and (precision != "fp32" or largest <= TOLERANCE)


def _show_profile(run: Callable[[], Answers]) -> None:
    import torch

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))


if __name__ == "__main__":
    sys.exit(main())
