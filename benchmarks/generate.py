"""Generation beside transformers' `generate`: prefill and decode, ratios of each, memory; and with graphs of a device.

    OMP_NUM_THREADS=2 python benchmarks/generate.py
    python benchmarks/generate.py --models llama --precisions bf16 --batch-sizes 1 --sections profile
    python benchmarks/generate.py --device cuda

The Llama and Bloom of 34M parameters of benchmarks/step.py with equal weights on both sides, greedy, prompts of 128
tokens and 64 new ones; on CUDA Llama 3.2 1B and Bloom 1.7B. transformers runs with its growing cache and its static
one, and the faster of both counts. Prefill is the time until the first token, decode that of the others.

Sections: rate (ratios, all sides in turn in one process), flat (time of a token late in a text by that of an early
one), memory (what a side adds to a process of its own), profile (the largest operators of ours). Exit status 1 if a
bound is missed: decode 1.5 times as fast at batch 1 and 1.2 at larger ones, prefill as fast, on CUDA the ids of graphs
equal those without. transformers is in the extra `convert`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread
from benchmarks.step import workload
from megatron.options.config import Config
from megatron.parallel.layout import Layout

SECTIONS = ("rate", "flat", "memory", "profile")
CACHES = ("dynamic", "static")
BOUNDS = {1: 1.5}
BOUND_OF_BATCHES, BOUND_OF_PREFILL = 1.2, 1.0

Generate = Callable[[int], list[list[int]]]
"""Number of new tokens -> the generated ids of each prompt."""


def main() -> int:
    options = _parser().parse_args()

    from megatron.runtime import accelerator

    accelerator.choose_device(options.device)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    reached = True
    for model in options.models:
        for precision in options.precisions:
            config = workload(model, options.device, precision, options.flags.split()).config
            for batch_size in options.batch_sizes:
                print(f"\n## {model}, {precision}, batch {batch_size}", flush=True)
                if "memory" in options.sections:
                    _show_memory(model, precision, batch_size, options)
                if {"rate", "flat", "profile"} & set(options.sections):
                    reached &= _compare(config, batch_size, options)
    return 0 if reached else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Generation beside transformers' generate.", allow_abbrev=False)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", default=["llama", "bloom"], choices=("llama", "bloom"))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"))
    parser.add_argument("--batch-sizes", nargs="+", type=positive, default=[1, 16])
    parser.add_argument("--prompt-length", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--sections", nargs="+", default=["rate", "flat", "memory"], choices=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=5, help="alternations (default: 5)")
    parser.add_argument("--flags", default="", help="further options of the model, in one argument")
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Sides


def _their_model(config: Config) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from megatron.models.sequential import compute_dtype
    from megatron.weights.huggingface_config import their_config

    fields = their_config(config, config.training.precision, {})
    their = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(their, dtype=compute_dtype(config)).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(config.parallel.device)


def _our_model(config: Config, theirs: Any) -> Any:
    """Return our model with their weights; None: random ones."""
    import torch

    from megatron.generation.model import InferenceModel, build_stage
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import initialise, named_parameters
    from megatron.weights.huggingface import name_map

    device = torch.device(config.parallel.device)
    ctx = ParallelContext(device=device)
    layers, modules = build_stage(config, ctx, device)
    if theirs is None:
        initialise(named_parameters(modules), config.training.seed, Layout())
        return InferenceModel(config, ctx, layers, modules)
    names, state = name_map(config), dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in named_parameters(modules):
            full = names.assemble(name, lambda part, begin, end: state[part].detach()[begin:end])
            parameter[: len(full)] = full
    return InferenceModel(config, ctx, layers, modules)


def _ours(model: Any, prompts: list[list[int]], *, use_graphs: bool = False) -> Generate:
    from megatron.generation.generator import BatchSettings, generate
    from megatron.generation.options import GenerationOptions
    from megatron.generation.requests import Request

    settings = BatchSettings(batch_size=len(prompts), use_graphs=use_graphs)
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]

    def run(count: int) -> list[list[int]]:
        options = GenerationOptions(max_new_tokens=count)
        return [list(each.ids) for each in generate(model, requests, options, settings=settings)]

    return run


def _theirs(model: Any, prompts: list[list[int]], cache: str) -> Generate:
    import torch

    ids = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"

    def run(count: int) -> list[list[int]]:
        found = model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **options)
        return found[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return run


def _prompts(config: Config, batch_size: int, length: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.model.vocab_size, (batch_size, length), generator=generator).tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------------
# Sections


class _Measured:
    """Seconds of each run of a side: until the first token, and for all; by the clock and of the processor."""

    def __init__(self, run: Generate, new_tokens: int) -> None:
        self._run, self._new_tokens = run, new_tokens
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self.prefill_cpu: list[float] = []
        self.decode_cpu: list[float] = []

    def __call__(self) -> float:
        first = self._timed(1)
        whole = self._timed(1 + self._new_tokens)
        for values, value in (
            (self.prefill, first[0]),
            (self.decode, (whole[0] - first[0]) / self._new_tokens),
            (self.prefill_cpu, first[1]),
            (self.decode_cpu, (whole[1] - first[1]) / self._new_tokens),
        ):
            values.append(value)
        return whole[0]

    def _timed(self, count: int) -> tuple[float, float]:
        began, began_cpu = time.perf_counter(), time.process_time()
        self._run(count)
        return time.perf_counter() - began, time.process_time() - began_cpu


def _compare(config: Config, batch_size: int, options: Any) -> bool:
    theirs = _their_model(config)
    model = _our_model(config, theirs)
    prompts = _prompts(config, batch_size, options.prompt_length)
    runs = {"ours": _ours(model, prompts)}
    if options.device == "cuda":
        runs["ours_graphs"] = _ours(model, prompts, use_graphs=True)
    reached = True
    if "profile" in options.sections:
        _show_profile(runs["ours"], options.new_tokens)
    if "flat" in options.sections:
        _show_flatness(model, prompts)
    if "rate" not in options.sections:
        return True
    runs |= {cache: _theirs(theirs, prompts, cache) for cache in _caches(config)}
    ids = {name: run(options.new_tokens) for name, run in runs.items()}
    for name in list(runs)[1:]:
        same = [_common(*pair) for pair in zip(ids["ours"], ids[name], strict=True)]
        print(f"ids of {name} equal ours for {min(same)} tokens or more of {options.new_tokens}")
        reached &= name != "ours_graphs" or min(same) == options.new_tokens
    sides = {name: _Measured(run, options.new_tokens) for name, run in runs.items()}
    alternate(dict(sides), options.rounds, warm_up=False)
    for name, side in sides.items():
        print(
            f"{name:12s} first token {spread([1e3 * each for each in side.prefill], 1)} ms, then "
            f"{spread([1e3 * each for each in side.decode])} ms a token "
            f"({batch_size / statistics.median(side.decode):.0f} tokens/s)"
        )
    best = sides["ours_graphs"] if "ours_graphs" in sides else sides["ours"]
    reached &= _show_ratio("prefill", sides, sides["ours"], BOUND_OF_PREFILL)
    return reached & _show_ratio("decode", sides, best, BOUNDS.get(batch_size, BOUND_OF_BATCHES))


def _caches(config: Config) -> list[str]:
    return list(CACHES) if config.model.architecture == "llama" else ["dynamic"]  # their Bloom has no static one


def _show_ratio(part: str, sides: dict[str, _Measured], ours: _Measured, bound: float) -> bool:
    """Print how many times as fast ours is as the fastest of theirs; return True if that is enough."""
    peers = [side for name, side in sides.items() if name in CACHES]
    peer = min(peers, key=lambda side: statistics.median(getattr(side, part)))
    ratios = quotients(getattr(peer, part), getattr(ours, part))
    in_cpu = quotients(getattr(peer, f"{part}_cpu"), getattr(ours, f"{part}_cpu"))
    print(f"{part}: ours is {spread(ratios, 2)} times as fast; by processor time {spread(in_cpu, 2)}", flush=True)
    return statistics.median(ratios) >= bound


def _common(a: list[int], b: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def _show_flatness(model: Any, prompts: list[list[int]]) -> None:
    """Print the time of tokens 385 to 448 by that of tokens 1 to 64, of the same prompts."""
    run = _ours(model, prompts)
    times = alternate({str(count): partial(_cpu_s, run, count) for count in (1, 65, 385, 449)}, 3)
    early = quotients(
        *([b - a for a, b in zip(times[x], times[y], strict=True)] for x, y in (("385", "449"), ("1", "65")))
    )
    print(f"a token after 400 takes {spread(early, 2)} times one of the first 64, by processor time", flush=True)


def _cpu_s(run: Generate, count: int) -> float:
    began = time.process_time()
    run(count)
    return time.process_time() - began


def _show_profile(run: Generate, new_tokens: int) -> None:
    import torch

    run(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(new_tokens)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))


def _show_memory(model: str, precision: str, batch_size: int, options: Any) -> None:
    shape = (model, precision, batch_size, options.prompt_length, options.new_tokens, options.flags, options.device)
    peaks = {name: on_ranks(_peak_bytes, 1, name, *shape) for name in ("ours", "dynamic")}
    for name, size in peaks.items():
        print(f"{name:12s} adds {size / 2**20:.0f} MiB, {peaks['ours'] / size:.2f} times it is ours", flush=True)


def _peak_bytes(
    _index: int, _port: int, name: str, model: str, precision: str, batch_size: int, length: int, new_tokens: int,
    flags: str, device: str, results: Any,
) -> None:  # fmt: skip
    """Put what a model and a run add to this process, which holds all imports before."""
    import torch
    import transformers  # noqa: F401

    import megatron.generation.generator  # noqa: F401
    from megatron.runtime.accelerator import MAX_ALLOCATED, memory_stats

    torch.set_num_threads(2)
    config = workload(model, device, precision, flags.split()).config
    prompts = _prompts(config, batch_size, length)
    torch.nn.functional.linear(torch.zeros(8, 8), torch.zeros(8, 8))
    before = memory_stats()[MAX_ALLOCATED]
    run = _ours(_our_model(config, None), prompts) if name == "ours" else _theirs(_their_model(config), prompts, name)
    run(new_tokens)
    results.put((memory_stats()[MAX_ALLOCATED] - before) * 2**30)


if __name__ == "__main__":
    sys.exit(main())
