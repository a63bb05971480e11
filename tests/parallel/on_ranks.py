"""What the ranks do in the tests of this folder. Everything is in float64, so that equal means equal.

Each function gets full tensors as arrays, does its rank's part and returns its rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.options.config import ParallelConfig
from megatron.parallel import chosen_log_probs, layers, linear, losses, messages
from megatron.parallel import mappings as regions
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import block_sizes
from megatron.parallel.shards import LayerDeclaration, Shard, Shards, allocate, shard_of

Array = np.ndarray[Any, Any]


def context(tp: int, sequence_parallel: bool) -> ParallelContext:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    return ParallelContext.build(parallel, "cpu") if tp > 1 else ParallelContext.single()


def fill(parameter: Tensor, full: Array, ctx: ParallelContext) -> None:
    with torch.no_grad():
        parameter.copy_(shard_of(parameter).take(torch.from_numpy(full), ctx.tensor_rank, ctx.tensor_size))


def own_rows(full_SBH: Array, ctx: ParallelContext) -> Tensor:
    """This rank's rows of the residual stream, a leaf that takes a gradient."""
    rows = torch.from_numpy(full_SBH)
    if ctx.sequence_parallel:
        rows = rows.chunk(ctx.tensor_size)[ctx.tensor_rank]
    return rows.clone().requires_grad_()


def declared(**shards: Shard) -> Shards:
    """The view of a layer `test` with these parameters; `__` stands for a dot."""
    return Shards(
        LayerDeclaration("test", {name.replace("__", "."): shard for name, shard in shards.items()}, build=nn.Module)
    )


def norm_shards(hidden_size: int, *, bias: bool) -> Shards:
    shards = {"weight": Shard((hidden_size,), value=1.0, used_on="stream")}
    return declared(**shards, **({"bias": Shard((hidden_size,), used_on="stream")} if bias else {}))


class GatedMLP(nn.Module):
    """Column, a product of its two pieces, row."""

    def __init__(self, hidden_size: int, inner_size: int, *, bias: bool, ctx: ParallelContext) -> None:
        super().__init__()
        pieces = (inner_size, inner_size)
        shards = {
            "column__weight": Shard((2 * inner_size, hidden_size), dim=0, pieces=pieces, std=1.0),
            "row__weight": Shard((hidden_size, inner_size), dim=1, pieces=(inner_size,), std=1.0),
        }
        if bias:
            shards["column__bias"] = Shard((2 * inner_size,), dim=0, pieces=pieces)
            shards["row__bias"] = Shard((hidden_size,), used_on="stream")
        self.column = linear.ColumnParallelLinear(declared(**shards).below("column"), ctx)
        self.row = linear.RowParallelLinear(declared(**shards).below("row"), ctx)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.column(hidden).chunk(2, dim=-1)
        return self.row(F.silu(gate) * up)


def gated_mlp(tp: int, sequence_parallel: bool, weights: dict[str, Array], x: Array, slope: Array) -> dict[str, Array]:
    """Output, and the gradients of <output, slope>."""
    ctx = context(tp, sequence_parallel)
    inner_size = weights["row.weight"].shape[1]
    model = GatedMLP(x.shape[-1], inner_size, bias="row.bias" in weights, ctx=ctx)
    for name, parameter in model.named_parameters():
        fill(parameter, weights[name], ctx)
    hidden = own_rows(x, ctx)
    output = model(hidden)
    (output * own_rows(slope, ctx).detach()).sum().backward()
    assert hidden.grad is not None
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach().numpy(), "hidden": hidden.grad.numpy(), **gradients}


def embedding(
    tp: int, sequence_parallel: bool, weight: Array, padded_size: int, tokens_BS: Array, slope: Array
) -> tuple[Array, Array]:
    """Output and gradient of the weight."""
    ctx = context(tp, sequence_parallel)
    vocab_size, hidden_size = weight.shape
    shard = Shard((vocab_size, hidden_size), dim=0, pieces=(vocab_size,), padding=padded_size - vocab_size, std=1.0)
    layer = layers.VocabParallelEmbedding(declared(weight=shard), ctx).double()
    fill(layer.weight, weight, ctx)
    output = layer(torch.from_numpy(tokens_BS))
    (output * own_rows(slope, ctx).detach()).sum().backward()
    assert layer.weight.grad is not None
    return output.detach().numpy(), layer.weight.grad.numpy()


def norm(
    kind: str, tp: int, sequence_parallel: bool, weights: dict[str, Array], x: Array, slope: Array
) -> dict[str, Array]:
    ctx = context(tp, sequence_parallel)
    layer: nn.Module = getattr(layers, kind)(norm_shards(x.shape[-1], bias="bias" in weights), 1e-5, ctx).double()
    for name, parameter in layer.named_parameters():
        fill(parameter, weights[name], ctx)
    output = layer(own_rows(x, ctx))
    (output * own_rows(slope, ctx).detach()).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach().numpy(), **gradients}


def region(name: str, tp: int, inputs: list[Array], slopes: list[Array]) -> tuple[Array, Array]:
    """Output of rank's input, and the gradient of <output, slope of this rank>."""
    ctx = context(tp, sequence_parallel=True)
    function: Callable[[Tensor, ParallelContext], Tensor] = getattr(regions, name)
    x = torch.from_numpy(inputs[ctx.tensor_rank]).requires_grad_()
    output = function(x, ctx)
    # neither may alias the other's memory across a collective
    (output * torch.from_numpy(slopes[ctx.tensor_rank])).sum().backward()
    assert x.grad is not None
    return output.detach().numpy(), x.grad.numpy()


def names_of_backward_passes(names: list[str]) -> list[str]:
    """What autograd, and with it a profile, calls each region's backward pass."""
    ctx, x = context(2, sequence_parallel=True), torch.ones(4, 1, 1, requires_grad=True)
    outputs = [getattr(regions, name)(x, ctx) for name in names]
    return [output.grad_fn.name() for output in outputs]


def reduce_scatter_of_odd_rows(tp: int) -> str:
    try:
        regions.reduce_scatter_to_sequence(torch.ones(2 * tp + 1, 1, 1), context(tp, True))
    except ValueError as error:
        return str(error)
    return "no error"


def vocabulary_weight(full: Array, padded_size: int, ctx: ParallelContext) -> nn.Parameter:
    shard = Shard(full.shape, dim=0, pieces=full.shape[:1], padding=padded_size - full.shape[0])
    weight = allocate("test", shard, ctx, dtype=torch.from_numpy(full).dtype)
    fill(weight, full, ctx)
    return weight


def cross_entropy(
    tp: int,
    sequence_parallel: bool,
    weight: Array,
    padded_size: int,
    hidden: Array,
    labels_BS: Array,
    token_weights_BS: Array,
    chunk_tokens: int,
    scale: float,
    dtype: str = "float32",
    smoothing: float = 0.0,
) -> dict[str, Any]:
    """Loss, log-probabilities, gathered logits, and the gradients of scale x loss computed both ways.

    With smoothing the second way is the loss again: log-probabilities have none.
    """
    ctx = context(tp, sequence_parallel)
    rows, own = own_rows(hidden, ctx), vocabulary_weight(weight, padded_size, ctx)
    rows.data, own.data = rows.data.to(getattr(torch, dtype)), own.data.to(getattr(torch, dtype))
    labels, token_weights = torch.from_numpy(labels_BS), torch.from_numpy(token_weights_BS)
    with mock.patch.object(block_sizes, "least_tokens", return_value=chunk_tokens):
        loss = losses.linear_cross_entropy(rows, own, labels, token_weights, ctx, label_smoothing=smoothing)
        gradients = torch.autograd.grad(loss * scale, (rows, own))
        log_probs = losses.token_log_probs(rows, own, labels, ctx)
        again = gradients
        if not smoothing:
            again = torch.autograd.grad(-(log_probs * token_weights).sum() * scale, (rows, own))
    return {
        "loss": float(loss.detach()),
        "log_probs": log_probs.detach().numpy(),
        "hidden": [grads[0].float().numpy() for grads in (gradients, again)],
        "weight": [grads[1].float().numpy() for grads in (gradients, again)],
        "logits": losses.gather_logits(rows, own, ctx).float().numpy(),
        "own_tokens": losses.own_vocabulary(own, ctx)[1],
    }


def chosen(
    tp: int, sequence_parallel: bool, weight: Array, hidden: Array, ids_BSK: Array, grads_BSK: Array, dtype: str
) -> dict[str, Array]:
    """Log-probabilities of these ids and their gradients, in chunks of 5 tokens, and the 4 likeliest tokens."""
    ctx = context(tp, sequence_parallel)
    rows, own = own_rows(hidden, ctx), vocabulary_weight(weight, 32, ctx)
    rows.data, own.data = rows.data.to(getattr(torch, dtype)), own.data.to(getattr(torch, dtype))
    with mock.patch.object(block_sizes, "least_tokens", return_value=5):
        log_probs = chosen_log_probs.chosen_log_probs(rows, own, torch.from_numpy(ids_BSK), ctx)
        gradients = torch.autograd.grad((log_probs * torch.from_numpy(grads_BSK)).sum(), (rows, own))
        top, ids = chosen_log_probs.top_log_probs(rows, own, 4, ctx)
    numbers = (log_probs.detach(), *gradients, top, ids)
    names = ("log_probs", "hidden", "weight", "top", "ids")
    return {name: number.double().numpy() for name, number in zip(names, numbers, strict=True)}


def of_shared_rows(
    cp: int,
    tp: int,
    weight: Array,
    hidden: Array,
    labels_BS: Array,
    ids_BSK: Array,
    places_K: Array,
    slopes: dict[str, Array],
) -> dict[str, Any]:
    """Each function of hidden states on ranks that share rows: its values and, of <values, slope>, the gradients by
    this rank's places and by its rows of the vocabulary. The labels of `places_K` also as each rank computes its own.
    """
    parallel = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=tp > 1)
    ctx = ParallelContext.build(parallel, "cpu")
    parts = np.split(hidden, 2 * cp)
    own_places = np.concatenate([parts[ctx.context_rank], parts[-1 - ctx.context_rank]])
    rows, own = own_rows(own_places, ctx), vocabulary_weight(weight, 32, ctx)
    labels, ids, places = map(torch.from_numpy, (labels_BS, ids_BSK, places_K))
    labels_K = labels.t().flatten()[places]
    mine = torch.from_numpy(chosen_log_probs.own_labels(places_K, labels.shape, ctx))
    calls: dict[str, Callable[[], Tensor]] = {
        "label": lambda: losses.token_log_probs(rows, own, labels, ctx),
        "chosen": lambda: chosen_log_probs.chosen_log_probs(rows, own, ids, ctx),
        "some": lambda: chosen_log_probs.log_probs_of(places, rows, own, labels_K, ctx, mine),
        "some by all": lambda: chosen_log_probs.log_probs_of(places, rows, own, labels_K, ctx),
    }
    found: dict[str, Any] = {"coordinates": (ctx.context_rank, ctx.tensor_rank), "own": mine.tolist()}
    with mock.patch.object(block_sizes, "least_tokens", return_value=5):
        for name, call in calls.items():
            values = call()
            gradients = torch.autograd.grad((values * torch.from_numpy(slopes[name.split()[0]])).sum(), (rows, own))
            found[name] = [part.detach().numpy() for part in (values, *gradients)]
        found["top"] = [part.numpy() for part in chosen_log_probs.top_log_probs(rows, own, 4, ctx)]
        # several labels at a place, as an evaluation has them
        twice = torch.cat([places, places]), torch.cat([labels_K, (labels_K + 1) % weight.shape[0]])
        scores = chosen_log_probs.label_scores(twice[0], rows, own, twice[1], ctx)
        found["scores"] = [part.numpy() for part in scores]
    return found | {"logits": losses.gather_logits(rows, own, ctx).numpy()}


def dropped(tp: int, step_seeds: list[int]) -> list[tuple[Array, Array]]:
    """What the replicated and the sharded stream drop on this rank, step by step."""
    from megatron.parallel.rng import dropout

    ctx = context(tp, sequence_parallel=False)
    drawn = []
    for consumed_samples in step_seeds:
        ctx.state.streams.seed_step(1, consumed_samples, ctx)
        replicated, sharded = (
            dropout(torch.ones(256), 0.5, True, ctx.state.streams, sharded=sharded).numpy() for sharded in (False, True)
        )
        drawn.append((replicated, sharded))
    return drawn


def whole_and_short_messages(dtype: str) -> list[str]:
    """What the second rank says of a whole message, of one of NaN alone, and of one that lacks a number."""
    ctx, kind, shape = ParallelContext.build(ParallelConfig(), "cpu"), getattr(torch, dtype), (3, 2, 5)
    nan = torch.full(shape, float("nan") if kind.is_floating_point else -1).to(kind)
    found = []
    for full in (torch.arange(30).view(shape).to(kind), nan, nan.view(-1)[:-1]):
        if ctx.rank == 0:
            dist.send(full, 1)
            continue
        try:
            got = messages.receive(torch.empty(shape, dtype=kind), 0)
            found.append("equal" if torch.equal(got.nan_to_num(7.0), full.nan_to_num(7.0)) else "another")
        except messages.MessageError as error:
            found.append(str(error))
    return found


def truncated_step(arguments: str) -> str:
    """What each rank of two stages says when the first one's output lacks a row, after a step without a fault."""
    from tests.training import layouts

    engine, task = layouts.build(arguments)
    layouts.loss_of_step(engine, task, 0)
    cut: list[Tensor] = []

    def without_the_last_row(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        cut.append(output[:-1])
        return cut[-1]

    if engine.ctx.is_first_stage:
        engine.module.register_forward_hook(without_the_last_row)
    try:
        layouts.loss_of_step(engine, task, 1)
    except messages.MessageError as error:
        if engine.ctx.is_first_stage:  # as if it had not noticed
            dist.send(cut[-1].detach(), 1)
        return str(error)
    return "no error"
