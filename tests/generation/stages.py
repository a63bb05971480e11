"""Logits of a loaded model on any layout. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.evaluation.scoring import Continuation, score
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel, training_model
from megatron.generation.options import GenerationOptions, LoadOptions
from megatron.generation.requests import Request
from megatron.generation.saved_model import parallel_options
from megatron.models.embedding import unpack
from megatron.models.transformer import TransformerLayer
from megatron.parallel.context import ParallelContext
from tests.training import layouts

Array = np.ndarray[Any, Any]
Forms = dict[str, tuple[list[list[int]], list[Array], list[Array]]]
"""Generated ids on the first rank; log-probabilities [new, V] of each text, from the cache there, and without one on
the ranks of the last stage."""


def loaded(options: dict[str, Any]) -> InferenceModel:
    """The model that these options load, on the world of these ranks."""
    chosen = LoadOptions(**{"device": "cpu", **options})
    return load_model(chosen, ParallelContext.build(parallel_options(chosen), "cpu"))


def logits_of(model: InferenceModel, tokens_BS: Array) -> Array | None:
    """[S, B, V] on the ranks of the last stage, None elsewhere."""
    ctx, tokens = model.ctx, torch.from_numpy(tokens_BS)
    stream: Any = tokens
    if not ctx.is_first_stage:
        rows, length = tokens.shape
        stream = torch.empty(length, rows, model.config.model.hidden_size, dtype=model.dtype)
        dist.recv(stream, ctx.rank - ctx.world_size // ctx.num_stages)
    outputs = model.forward_stage(stream)
    if not ctx.is_last_stage:
        hidden: Tensor = unpack(outputs)[0]
        dist.send(hidden.contiguous(), ctx.rank + ctx.world_size // ctx.num_stages)
        return None
    return model.logits(outputs).float().numpy()


def loaded_logits(options: dict[str, Any], tokens_BS: Array) -> Array | None:
    return logits_of(loaded(options), tokens_BS)


def logits_in_training(arguments: str, tokens_BS: Array) -> tuple[Array | None, float]:
    """Logits of a run after its first step, and the loss of the next one."""
    engine, task = layouts.build(arguments)
    layouts.loss_of_step(engine, task, 0)
    with training_model(engine.module, engine.config, engine.ctx) as model:
        logits = logits_of(model, tokens_BS)
    assert engine.module.training
    return logits, layouts.loss_of_step(engine, task, 1)


def scores(options: dict[str, Any], requests: list[tuple[tuple[int, ...], tuple[int, ...]]], **settings: Any) -> Any:
    """Log-probabilities and greedy flag of each request, on every rank, and the tokens that this rank computed."""
    model = loaded(options)
    computed: list[int] = []
    forward = model.forward_stage

    def counted(stream: Any) -> Any:
        computed.append(stream[0].shape[1] if model.ctx.is_first_stage else len(stream[0]))
        return forward(stream)

    model.forward_stage = counted  # type: ignore[method-assign]
    found = score(model, [Continuation(*request) for request in requests], **settings)
    return [(each.logprobs, each.is_greedy) for each in found], sum(computed)


def tokens_of_mlps(options: dict[str, Any], requests: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """Number of tokens that each layer's MLP computes for these requests."""
    model = loaded(options)
    layers = [layer for layer in model.module.modules() if isinstance(layer, TransformerLayer)]
    counts = [0] * len(layers)

    def count(number: int, hidden: torch.Tensor) -> None:
        counts[number] += len(hidden)

    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda _, inputs, number=number: count(number, inputs[0]))
    score(model, [Continuation(*request) for request in requests], row_tokens=40)
    return counts


def texts_by_form(
    base: str, adapter: str, layout: dict[str, int], prompts: list[list[int]], options: dict[str, Any]
) -> Forms:
    """Texts, three at a time, of a model, and of its adapters off, beside it and merged into it."""
    beside = loaded({"load": adapter, **layout})
    found = {
        "whole": texts(loaded({"load": base, **layout}), prompts, options),
        "beside": texts(beside, prompts, options),
    }
    with beside.ctx.state.adapters.off():
        found["off"] = texts(beside, prompts, options)
    return found | {"merged": texts(loaded({"load": adapter, "merge_adapter": True, **layout}), prompts, options)}


def texts(
    model: InferenceModel, prompts: list[list[int]], options: dict[str, Any]
) -> tuple[list[list[int]], list[Array], list[Array]]:
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    chosen = GenerationOptions(**options, logprobs=model.vocab_size)
    completions = list(generate(model, requests, chosen, settings=BatchSettings(batch_size=3)))
    cached = []
    for each in completions:
        assert each.alternatives is not None
        pairs = np.array([sorted(row) for row in each.alternatives])
        assert (pairs[..., 0] == np.arange(model.vocab_size)).all()
        cached.append(pairs[..., 1])
    ids = model.ctx.broadcast_object([list(each.ids) for each in completions])
    uncached = []
    for prompt, text in zip(prompts, ids, strict=True):
        logits = logits_of(model, np.array([[*prompt, *text[:-1]]]))
        if logits is not None:
            uncached.append(torch.from_numpy(logits[len(prompt) - 1 :, 0]).log_softmax(-1).numpy())
    return ids, cached, uncached
