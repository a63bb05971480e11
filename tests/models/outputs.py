"""Logits, loss and gradients of a model with given weights, on any layout. Runs in ranks too: it imports little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits, linear_cross_entropy
from megatron.parallel.operators import fp8
from megatron.parallel.shards import initialise, named_parameters, shard_of
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --vocab-size 123 --make-vocab-size-divisible-by 16 "
    "--seq-length 24 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --data-path none --hidden-dropout 0 "
    "--attention-dropout 0 --device cpu"
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outputs:
    """Plain arrays, as they travel between processes. Gradients are this rank's, by our names."""

    logits: Array
    """[S, B, true vocabulary]."""
    loss: float
    gradients: dict[str, Array]


def config_of(arguments: str) -> Config:
    config, _ = parse_arguments([*COMMON.split(), *arguments.split()])
    parallel = config.parallel
    faults = check(config, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    assert not faults, faults
    return config


def context_of(config: Config) -> ParallelContext:
    """One process alone where the config names no ranks, else the world of these ranks."""
    alone = config.parallel.tensor_model_parallel_size == 1
    return ParallelContext.single() if alone else ParallelContext.build(config.parallel, "cpu")


def build_model(config: Config, ctx: ParallelContext, weights: Mapping[str, Array] | None = None) -> SequentialModel:
    """The layers in sequence, started from the seed or from these full tensors by our names, each used."""
    model = SequentialModel(build_layers(config, ctx))
    parameters = dict(named_parameters(model))
    if weights is None:
        initialise(parameters.items(), config.training.seed, ctx)
        return model
    assert set(weights) == set(parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            full = torch.from_numpy(weights[name])
            parameter.copy_(shard_of(parameter).take(full, ctx.tensor_rank, ctx.tensor_size))
    return model


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 inside, also where a model says float32: norms, softmax, rotations, the loss."""
    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(Tensor, "float", Tensor.double):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(_FLOAT32)


_FLOAT32 = torch.float32


def logits_of(model: SequentialModel, inputs: Any, ctx: ParallelContext) -> Tensor:
    with torch.no_grad():
        return model(inputs, project=lambda outputs: gather_logits(outputs[0], outputs[1], ctx))  # type: ignore[no-any-return]


def mean_loss(labels_BS: Tensor, ctx: ParallelContext) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return partial(_mean_loss, labels_BS=labels_BS, ctx=ctx)


def _mean_loss(outputs: tuple[Tensor, Tensor], labels_BS: Tensor, ctx: ParallelContext) -> Tensor:
    token_weights = torch.full(labels_BS.shape, 1.0 / labels_BS.numel())
    return linear_cross_entropy(*outputs, labels_BS, token_weights, ctx)


def run(arguments: str, weights: Mapping[str, Array] | None, tokens_BS: Array, labels_BS: Array) -> Outputs:
    """Logits, mean loss and its gradients. On ranks: of the world these arguments describe."""
    config = config_of(arguments)
    ctx = context_of(config)
    model = build_model(config, ctx, weights)
    tokens, labels = torch.from_numpy(tokens_BS), torch.from_numpy(labels_BS)
    logits = logits_of(model, tokens, ctx)
    passes = ctx.state.fp8
    if config.fp8.uses_fp8:
        fp8.set_up(passes, config, ctx)
    loss = passes.around(model)(tokens, project=mean_loss(labels, ctx))
    passes.around_backward(loss.backward)()
    gradients = {name: p.grad.numpy() for name, p in named_parameters(model) if p.grad is not None}
    return Outputs(logits.numpy(), float(loss.detach()), gradients)


def run_in_float64(*arguments: Any) -> Outputs:
    with in_float64():
        return run(*arguments)
