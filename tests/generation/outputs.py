"""A model with given weights that generates on any layout. Runs in ranks too: it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from megatron.generation.generator import BatchSettings, GenerationStatistics, generate
from megatron.generation.model import InferenceModel, build_stage
from megatron.generation.options import GenerationOptions
from megatron.generation.passes import KeptText
from megatron.generation.requests import Completion, Request
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import named_parameters, shard_of
from tests.models.outputs import Array, config_of

LAYOUT = "--tensor-model-parallel-size {} --pipeline-model-parallel-size {}"


def inference_model(arguments: str, weights: Mapping[str, Array], *, is_alone: bool) -> InferenceModel:
    """The model of these arguments with these full tensors by our names."""
    config = config_of(arguments)
    ctx = ParallelContext.single() if is_alone else ParallelContext.build(config.parallel, "cpu")
    return model_on(ctx, config, weights)


def model_on(ctx: ParallelContext, config: Config, weights: Mapping[str, Array]) -> InferenceModel:
    """The stage of this rank."""
    layers, modules = build_stage(config, ctx, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in named_parameters(modules):
            full = torch.from_numpy(weights[name])
            parameter.copy_(shard_of(parameter).take(full, ctx.tensor_rank, ctx.tensor_size))
        for name, weight in quantized_weights(modules):
            own = weight.shard.take(torch.from_numpy(weights[name]), ctx.tensor_rank, ctx.tensor_size).reshape(-1)
            weight.fill(lambda begin, count, own=own: own[begin : begin + count])  # type: ignore[misc]
            weight.finish()
    return InferenceModel(config, ctx, layers, modules)


def completions(
    arguments: str,
    weights: Mapping[str, Array],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    batch_size: int = 16,
    eos_ids: Sequence[int] = (),
    *,
    is_alone: bool = False,
) -> list[Completion]:
    """Texts for these prompts, numbered from 10 on; empty on other ranks than the first."""
    model = inference_model(arguments, weights, is_alone=is_alone)
    requests = [Request(10 + number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    return list(
        generate(
            model,
            requests,
            GenerationOptions(**options),
            eos_ids=eos_ids,
            settings=BatchSettings(batch_size=batch_size),
        )
    )


def completions_of_cuts(
    arguments: str,
    num_stages: int,
    cuts: Sequence[Sequence[int]],
    weights: Mapping[str, Array],
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> list[list[list[int]]]:
    """Ids of each prompt for each of the cuts through the list of layers; empty on other ranks than the first."""
    config = config_of(f"{arguments} {LAYOUT.format(1, num_stages)}")
    ctx = ParallelContext.build(config.parallel, "cpu")
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    found = []
    for cut in cuts:
        with patch("megatron.generation.model.stage_bounds", lambda *_, cut=cut: list(cut)):
            model = model_on(ctx, config, weights)
        done = generate(model, requests, GenerationOptions(**options), settings=BatchSettings(batch_size=4))
        found.append([list(each.ids) for each in done])
    return found


def turns(
    arguments: str,
    weights: Mapping[str, Array],
    added: Sequence[tuple[int, Sequence[int]]],
    num_new: int,
    is_alone: bool,
) -> list[tuple[list[int], list[int], int, int]]:
    """For each turn of a chat on this rank: its ids, those of a fresh start, tokens read, places of the cache.

    `added`: a turn's prompt begins with the earlier tokens up to this place, as a slice, and goes on with these.
    """
    model = inference_model(arguments, weights, is_alone=is_alone)
    kept, before, found = KeptText(), tuple[int, ...](), []
    for place, (begin, new) in enumerate(added):
        request = Request(place, (*before[:begin], *new))
        both, counts = [], GenerationStatistics()
        for each in (kept, None):
            options, read = GenerationOptions(max_new_tokens=num_new), GenerationStatistics()
            done = list(generate(model, [request], options, kept=each, statistics=read))
            both.append([token for completion in done for token in completion.ids])
            counts = counts if each is None else read
        assert counts.kept_tokens + counts.prompt_tokens == len(request.prompt)
        before = (*request.prompt, *model.ctx.broadcast_object(both[1]))
        found.append((both[0], both[1], counts.prompt_tokens, counts.cache_bytes))
    return found
