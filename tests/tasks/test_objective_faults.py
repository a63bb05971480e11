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
from megatron.tasks.loss_function import LossBatch
from megatron.tasks.loss_result import LossError
from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.user_loss import UserLoss
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


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(function: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        CALLS.append(1)
        if len(CALLS) > FailsInBackward.calls:
            raise ValueError("a wrong formula")
        return -grad

    calls = 0


def fails_in_backward(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return FailsInBackward.apply(log_probs)  # type: ignore[no-any-return]


def writes_what_backward_needs(log_probs: Tensor, batch: LossBatch) -> Tensor:
    CALLS.append(1)
    probabilities = log_probs.exp()
    losses = probabilities * probabilities
    return losses + 0 * (probabilities.add_(1) if len(CALLS) > 16 else probabilities)


def differentiates(log_probs: Tensor, batch: LossBatch) -> Tensor:
    (slope,) = torch.autograd.grad(log_probs.sum(), log_probs, create_graph=True)
    return -log_probs * slope


def switches_gradients(log_probs: Tensor, batch: LossBatch) -> Tensor:
    torch.set_grad_enabled(False)
    return -log_probs


def sets_a_dtype(log_probs: Tensor, batch: LossBatch) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return -log_probs


def not_of_its_argument(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return torch.zeros_like(log_probs, requires_grad=True)


OWN = torch.nn.Parameter(torch.ones(()))


def has_a_parameter(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs * OWN


def seeds(log_probs: Tensor, batch: LossBatch) -> Tensor:
    torch.manual_seed(3)
    return -log_probs


def plain(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs


def drops(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return torch.nn.functional.dropout(-log_probs, 0.5)


class AnObject:
    def __call__(self, log_probs: Tensor, batch: LossBatch) -> Tensor:
        raise ValueError("an object")


an_object = AnObject()


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
    result = task.objective.loss((hidden, weight), targets, 1.0, ParallelContext.single())
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
        task.objective.loss(outputs, targets, 1.0, ParallelContext.single())
    assert str(raised.value) == (
        f"loss={__name__}:{function.__name__} ({FILE}) wrote into {what}, which is not its own; compute a new tensor, "
        "or write into a clone()"
    )


def test_what_is_left_out_has_no_label(tmp_path: Path) -> None:
    task, (_, weight), targets = of_function(unlikelihood)
    assert isinstance(task.objective, UserLoss)
    batch = task.objective._batch(task.objective._targets(targets), weight, ParallelContext.single())
    assert torch.equal(batch.labels == -100, targets[1] == 0)
    assert batch.tokens is not None
    assert torch.equal(batch.tokens, targets[0])


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (steep, "is finite in a first microbatch, its gradient is not; keep it away from log(0)"),
        (wrong_count, "returned torch.float32 [2, 15]; return the loss of each label"),
        pytest.param(fills_weights, "wrote into batch.weights, which is not its own", marks=pytest.mark.slow),
        (fails_in_backward, "raised ValueError in its backward pass: a wrong formula (line 9"),
        (differentiates, "raised RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"),
        (switches_gradients, "switched gradients for the whole process; use `with torch.no_grad():`"),
        pytest.param(
            sets_a_dtype,
            "set the default dtype of the whole process; give new tensors their own dtype",
            marks=pytest.mark.slow,
        ),
        (has_a_parameter, "computes its losses from a parameter of its own, which no optimizer trains"),
        (not_of_its_argument, "returned losses that do not depend on its first argument; compute them of it"),
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


def reset_calls(backward_passes: int = 0) -> None:
    CALLS.clear()
    FailsInBackward.calls = backward_passes


@pytest.mark.parametrize(
    ("function", "layout", "fault"),
    [
        (
            fails_in_backward,
            "--tensor-model-parallel-size 2",
            "raised ValueError in its backward pass: a wrong formula",
        ),
        (
            writes_what_backward_needs,
            "--recompute-granularity full",
            "raised RuntimeError in its backward pass: one of the variables needed for gradient computation has been",
        ),
        (fails_in_backward, "--zero-stage 3", "raised ValueError in its backward pass: a wrong formula"),
    ],
)
def test_an_error_of_a_later_backward_pass_names_the_function(
    ranks: RankPools, tmp_path: Path, function: Callable[..., Any], layout: str, fault: str
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    world_size = 2 if "tensor" in layout else 1
    flags = f"--train-iters 8 --data-path {data} --loss {__name__}:{function.__name__} {layout}"
    ranks(world_size)(reset_calls, 8)
    found = ranks(world_size)(runs.train, flags)
    assert f"LossError: loss={__name__}:{function.__name__} ({FILE}) {fault}" in found[-1]


def test_an_object_is_named_by_the_file_of_its_class(ranks: RankPools, tmp_path: Path) -> None:
    flags = f"--train-iters 2 --data-path {runs.write_dataset(tmp_path / 'data')} --loss {__name__}:an_object"
    (found,) = ranks(1)(runs.train, flags)
    assert f"loss={__name__}:an_object ({FILE}) raised ValueError: an object (line " in found


def test_what_a_function_draws_changes_no_dropout_and_is_equal_on_tensor_parallel_ranks(
    ranks: RankPools, tmp_path: Path
) -> None:
    data = runs.write_dataset(tmp_path / "data")

    def losses(function: Callable[..., Any], layout: str, more: str = "") -> list[float]:
        out = tmp_path / f"{function.__name__}{len(list(tmp_path.iterdir()))}"
        flags = f"--train-iters 3 --data-path {data} --loss {__name__}:{function.__name__} --results-dir {out} {layout}"
        world_size = 2 if layout else 1
        assert ranks(world_size)(runs.train, f"{flags} {more}") == [""] * world_size
        return [row["lm_loss"] for row in runs.rows(out)]

    assert losses(seeds, "", "--hidden-dropout 0.3") == losses(plain, "", "--hidden-dropout 0.3")
    still = "--hidden-dropout 0 --attention-dropout 0"
    drawn = losses(drops, "", still)
    assert drawn == losses(drops, "", still)
    cut = losses(drops, "--tensor-model-parallel-size 2 --sequence-parallel", still)
    assert cut == pytest.approx(drawn, rel=1e-4)
    assert drawn != pytest.approx(losses(plain, "", still), rel=1e-2)
