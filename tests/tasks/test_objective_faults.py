"""What a user's loss function is given cannot be written, what is not in the loss cannot harm, its faults name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import token_log_probs
from megatron.tasks.loss_result import LossError
from megatron.tasks.objective import LossBatch
from megatron.tasks.pretrain import PretrainTask
from tests import runs
from tests.models.outputs import build_model, config_of
from tests.ranks import RankPools

FILE = __file__
CALLS: list[int] = []
"""Calls of a function within this process."""


def unlikelihood(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -torch.log1p(-log_probs.exp())


def unlikelihood_of_hidden(hidden: Tensor, batch: LossBatch) -> Tensor:
    return unlikelihood(token_log_probs(hidden, batch.output_weight, batch.labels, batch.ctx), batch)


def unlikelihood_of_rows(rows: Tensor, batch: LossBatch) -> Tensor:
    return torch.where(batch.weights == 0, 0.0, unlikelihood(rows, batch)).sum(1)


def fills_weights(log_probs: Tensor, batch: LossBatch) -> Tensor:
    batch.weights.fill_(1.0)
    return -log_probs


def fills_a_view(log_probs: Tensor, batch: LossBatch) -> Tensor:
    batch.labels[0, 1:].zero_()
    return -log_probs


def fills_data(log_probs: Tensor, batch: LossBatch) -> Tensor:
    batch.sources.data.fill_(1)
    return -log_probs


def fills_by_numpy(log_probs: Tensor, batch: LossBatch) -> Tensor:
    batch.weights.numpy()[:] = 1
    return -log_probs


def fills_log_probs(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs.mul_(2)


def fills_the_model(log_probs: Tensor, batch: LossBatch) -> Tensor:
    batch.output_weight.data.mul_(0.5)
    return -log_probs


def nan_after_the_check(log_probs: Tensor, batch: LossBatch) -> Tensor:
    CALLS.append(1)
    return -log_probs * (torch.nan if len(CALLS) > 8 else 1.0)


def steep_after_the_check(log_probs: Tensor, batch: LossBatch) -> Tensor:
    CALLS.append(1)
    return -log_probs + (0 * log_probs if len(CALLS) <= 8 else (0 * log_probs).sqrt())


def steep(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs + (0 * log_probs).sqrt()


def wrong_count(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs[:, 1:]


def of_function(function: Callable[..., Any]) -> tuple[PretrainTask, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """A task with this loss, outputs of a model, and targets of which the first place of each row is left out.

    There the label's probability is 1, in the second row also that of the next.
    """
    config = config_of(f"{runs.TINY} --train-iters 1 --data-path none --loss {__name__}:{function.__name__}")
    tokens = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))
    model = build_model(config, ParallelContext.single())
    hidden, weight = model(tokens[:, :-1], lambda outputs: outputs)
    hidden = hidden.detach().clone()
    labels, weights = tokens[:, 1:].clone(), torch.ones(2, 8)
    for row, place in ((0, 0), (1, 0), (1, 1)):
        hidden[place, row] *= 1e4
        labels[row, place] = (hidden[place, row] @ weight[: config.model.vocab_size].t()).argmax()
        weights[row, place] = 0
    nothing = torch.zeros_like(labels)
    targets: tuple[Tensor, ...] = (labels, weights, nothing, nothing.clone())
    if function.__name__.endswith("rows"):
        targets = (*targets, torch.arange(16).view(2, 8))
    return PretrainTask(config), (hidden.requires_grad_(), weight), targets


@pytest.mark.parametrize("function", [unlikelihood, unlikelihood_of_hidden, unlikelihood_of_rows])
def test_labels_outside_the_loss_leave_gradients_finite(function: Callable[..., Any]) -> None:
    task, (hidden, weight), targets = of_function(function)
    result = task.loss((hidden, weight), targets, 1.0, ParallelContext.single())
    found = torch.autograd.grad(result.total, [hidden, weight])
    kept = targets[1].bool()
    logits = (hidden.double() @ weight[: task.config.model.vocab_size].double().t()).transpose(0, 1)[kept]
    log_probs = logits.log_softmax(-1).gather(-1, targets[0][kept].unsqueeze(-1))
    expected = torch.autograd.grad(-(1 - log_probs.exp()).log().sum(), [hidden, weight])
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (fills_weights, "batch.weights"),
        (fills_a_view, "batch.labels"),
        (fills_data, "batch.sources"),
        (fills_by_numpy, "batch.weights"),
        (fills_log_probs, "its first argument"),
        (fills_the_model, "batch.output_weight"),
    ],
)
def test_a_tensor_that_the_function_writes_is_named(function: Callable[..., Any], what: str) -> None:
    task, outputs, targets = of_function(function)
    with pytest.raises(LossError) as raised:
        task.loss(outputs, targets, 1.0, ParallelContext.single())
    assert str(raised.value) == (
        f"loss={__name__}:{function.__name__} ({FILE}) wrote into {what}, which is not its own; compute a new tensor, "
        "or write into a clone()"
    )


def test_what_is_left_out_has_no_label(tmp_path: Path) -> None:
    task, (_, weight), targets = of_function(unlikelihood)
    assert task.objective is not None
    batch = task.objective._batch(task.objective._targets(targets), weight, ParallelContext.single())
    assert torch.equal(batch.labels == -100, targets[1] == 0)
    assert batch.tokens is not None
    assert torch.equal(batch.tokens, targets[0])


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (steep, "is finite in a first microbatch, its gradient is not; keep it away from log(0)"),
        (wrong_count, "returned torch.float32 [2, 15]; return the loss of each label"),
        (fills_weights, "wrote into batch.weights, which is not its own"),
    ],
)
def test_before_training_faults_name_function_and_file(
    ranks: RankPools, tmp_path: Path, function: Callable[..., Any], fault: str
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    flags = f"--train-iters 2 --data-path {data} --loss {__name__}:{function.__name__} --tensor-model-parallel-size 2"
    found = ranks(2)(runs.train, flags)
    assert all(f"loss={__name__}:{function.__name__} ({FILE}) {fault}" in message for message in found), found


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (nan_after_the_check, "{} is not finite, the log-probabilities that it was given are"),
        (steep_after_the_check, "the gradient of {} is not finite, its losses are"),
    ],
)
def test_a_step_that_the_function_spoils_is_not_blamed_on_data_or_device(
    ranks: RankPools, tmp_path: Path, function: Callable[..., Any], what: str
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    flags = f"--train-iters 4 --data-path {data} --loss {__name__}:{function.__name__} --results-dir {tmp_path / 'out'}"
    ranks(1)(reset_calls)
    assert ranks(1)(runs.train, flags) == [""]
    bad = [row for row in map(json.loads, (tmp_path / "out/metrics.jsonl").open()) if row["kind"] == "bad_step"]
    assert bad
    for row in bad:
        assert f"loss function: {what.format(f'loss={__name__}:{function.__name__} ({FILE})')}" in row["reason"]


def reset_calls() -> None:
    CALLS.clear()
