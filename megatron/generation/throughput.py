"""A table of tokens per second over batch sizes and lengths, with random prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.config.options import ConfigError
from megatron.generation.command import GenerateCommand
from megatron.generation.generator import BatchSettings, GenerationStatistics, generate, request_faults
from megatron.generation.model import InferenceModel
from megatron.generation.requests import Request

COLUMNS = ("batch", "prompt", "new", "prefill tok/s", "decode tok/s", "ms/token", "first token ms", "cache GB")


def print_throughput(model: InferenceModel, command: GenerateCommand) -> None:
    """Measure every batch size with every length, and print a line for each. Collective. Raises ConfigError.

    Sequences of one length, as many as the batches of all copies hold; the first run of a shape is not counted.
    """
    options = replace(command.generation, ignore_eos=True, stop=(), stop_token_ids=())
    options = replace(options, min_new_tokens=options.max_new_tokens)
    sizes = [
        (batch_size, length)
        for length in command.prompts.benchmark_prompt_lengths
        for batch_size in command.prompts.benchmark_batch_sizes
    ]
    settings = BatchSettings(use_graphs=command.prompts.use_graphs)
    cases = [(replace(settings, batch_size=size), list(_requests(model, size, length))) for size, length in sizes]
    if faults := [fault for each, found in cases for fault in request_faults(model, found, options, each)]:
        raise ConfigError(list(dict.fromkeys(faults)))
    if model.ctx.rank == 0:
        print("  ".join(COLUMNS), flush=True)
    for (size, length), (each, requests) in zip(sizes, cases, strict=True):
        for first in (requests[: 2 * model.ctx.num_batch_ranks], requests):
            statistics = GenerationStatistics()
            began = time.perf_counter()
            first_s: list[float] = []

            def on_token(
                number: int, sample: int, token: int, began: float = began, seen: list[float] = first_s
            ) -> None:
                if not seen:
                    seen.append(time.perf_counter() - began)

            list(generate(model, first, options, settings=each, on_token=on_token, statistics=statistics))
        if model.ctx.rank == 0:
            copies = model.ctx.num_batch_ranks
            decoded = statistics.new_tokens - len(requests) // copies
            values = (
                f"{size}",
                f"{length}",
                f"{options.max_new_tokens}",
                _rate(copies * statistics.prompt_tokens, statistics.prefill_s),
                _rate(copies * decoded, statistics.decode_s),
                f"{1000 * statistics.decode_s / max(1, options.max_new_tokens - 1):,.1f}",
                f"{1000 * first_s[0]:,.0f}",
                f"{statistics.cache_bytes / 2**30:.3f}",
            )
            print("  ".join(value.rjust(len(name)) for value, name in zip(values, COLUMNS, strict=True)), flush=True)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _requests(model: InferenceModel, batch_size: int, length: int) -> Iterator[Request]:
    for number in range(batch_size * model.ctx.num_batch_ranks):
        generator = torch.Generator().manual_seed(number)
        yield Request(number, tuple(torch.randint(model.vocab_size, (length,), generator=generator).tolist()))
