"""Collation against a slow loop, and the loss against the dense mean over all loss tokens of the global batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import block_sizes
from megatron.settings.command_line import parse_arguments
from megatron.tasks.data import Microbatch
from megatron.tasks.loss_result import LossResult
from megatron.tasks.objective import CrossEntropy
from megatron.tasks.pretrain import PretrainTask
from tests.models.outputs import build_model
from tests.parallel import on_ranks
from tests.parallel.test_losses import SINGLE, Batch, Sum, assert_near
from tests.ranks import RankPools
from tests.training import layouts

EOD = 7
FLAGS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def task_with(**flags: bool) -> PretrainTask:
    return PretrainTask(from_dict({"data": {"eod_token_id": EOD, **flags}}))


def documents(tokens: list[int]) -> list[int]:
    """The index in the sample where each token's document begins."""
    starts, start = [], 0
    for index, token in enumerate(tokens):
        starts.append(start)
        if token == EOD:
            start = index + 1
    return starts


@given(
    st.lists(st.lists(st.sampled_from([EOD, 1, 2]), min_size=6, max_size=6), min_size=1, max_size=3),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_collate_equals_a_slow_loop(samples: list[list[int]], chosen: tuple[bool, bool, bool]) -> None:
    flags = dict(zip(FLAGS, chosen, strict=True))
    batch = task_with(**flags).data.collate(np.array(samples, dtype=np.int64))
    labels, loss_mask = batch.targets
    assert labels.tolist() == [sample[1:] for sample in samples]
    mask = [[float(token != EOD or not flags["eod_mask_loss"]) for token in sample[:-1]] for sample in samples]
    assert loss_mask.tolist() == mask
    assert loss_mask.dtype == torch.float32
    assert batch.normaliser == sum(map(sum, mask))
    if not (flags["reset_position_ids"] or flags["reset_attention_mask"]):
        assert batch.inputs.tolist() == [sample[:-1] for sample in samples]
        return
    tokens, positions, starts = batch.inputs
    assert tokens.tolist() == [sample[:-1] for sample in samples]
    own = [documents(sample[:-1]) for sample in samples]
    resets = flags["reset_position_ids"]
    assert positions.tolist() == [[i - start * resets for i, start in enumerate(sample)] for sample in own]
    assert starts.tolist() == [[start * flags["reset_attention_mask"] for start in sample] for sample in own]


def test_end_of_document_belongs_to_its_own_document() -> None:
    tokens, positions, starts = (
        task_with(reset_position_ids=True, reset_attention_mask=True)
        .data.collate(np.array([[EOD, 1, 2, EOD, EOD, 3, EOD]], dtype=np.int64))
        .inputs
    )
    assert tokens.tolist() == [[EOD, 1, 2, EOD, EOD, 3]]
    assert starts.tolist() == [[0, 1, 1, 1, 4, 5]]
    assert positions.tolist() == [[0, 0, 1, 2, 0, 0]]


def test_a_microbatch_stands_on_its_own_and_can_be_sent_anywhere() -> None:
    samples = np.array([[1, 2, EOD, 3]], dtype=np.int64)
    samples.setflags(write=False)  # a dataset's buffer may be read-only
    batch = task_with(reset_position_ids=True).data.collate(samples.repeat(2, axis=0))
    assert all(x.is_contiguous() and x.dtype == torch.int64 for x in (*batch.inputs, batch.targets[0]))


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def first_step(arguments: str) -> tuple[float, float, float, list[float]]:
    """Loss, gradient norm, validation loss before it, and this rank's loss tokens a microbatch."""
    engine, task = layouts.build(arguments)
    batches = layouts.step_batches(engine, task, 0)
    validation = engine.evaluate(batches, len(batches)).loss
    result = engine.train_step(batches, num_microbatches=layouts.num_microbatches(engine), consumed_samples=0, lr=1e-3)
    counts = [batch.normaliser for batch in batches]
    return float(result.loss), float(result.grad_norm), float(validation), counts


class AllBatches:
    """As much of an engine as tells layouts.step_batches to give the whole global batch."""

    def __init__(self, config: Any) -> None:
        self.config, self.ctx, self.reads_data = config, ParallelContext.single(), True


def dense_step(arguments: str) -> tuple[float, float]:
    """Mean loss over all loss tokens of the global batch, and the norm of its gradient, in float64 by torch alone."""
    config, _ = parse_arguments([*layouts.COMMON.split(), *arguments.split()])
    model = build_model(config, ParallelContext.single()).double()
    batches: list[Microbatch] = layouts.step_batches(AllBatches(config), PretrainTask(config), 0)  # type: ignore[arg-type]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:

        def sum_of_losses(outputs: tuple[Tensor, Tensor], batch: Microbatch = batch) -> Tensor:
            hidden, weight = outputs
            labels, mask = batch.targets
            logits_SBV = hidden @ weight[: config.model.vocab_size].t()
            losses = F.cross_entropy(logits_SBV.flatten(0, 1), labels.t().flatten(), reduction="none")
            return (losses * mask.t().flatten()).sum()

        total = total + model(batch.inputs, sum_of_losses)
    loss = total / sum(float(batch.targets[1].sum()) for batch in batches)
    loss.backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt())


MASKED = f"--eod-mask-loss --eod-token-id {EOD}"


@pytest.mark.parametrize(
    ("engine", "packed"),
    [
        ("", False),
        ("", True),
        ("--zero-stage 1", False),
        ("--no-pipeline-parallel", True),
        ("--zero-stage 2", False),
    ],
)
def test_loss_is_the_mean_over_loss_tokens_of_all_ranks(ranks: RankPools, engine: str, packed: bool) -> None:
    arguments = f"{layouts.MODELS['llama_gqa']} {MASKED}"
    arguments += " --reset-position-ids --reset-attention-mask" if packed else ""
    loss, norm = dense_step(arguments)
    results = ranks(2)(first_step, f"{arguments} {engine}")
    counts = [result[3] for result in results]
    # else a mean of means would do
    assert len(set(counts[0] + counts[1])) > 1
    assert sum(counts[0]) != sum(counts[1])
    for ours, ours_norm, validation, _ in results:
        assert ours == pytest.approx(loss, rel=1e-6)
        assert validation == pytest.approx(loss, rel=1e-6)
        assert ours_norm == pytest.approx(norm, rel=1e-5)


def test_masking_makes_the_normaliser_vary() -> None:
    assert task_with(eod_mask_loss=True).data.varies_normaliser
    assert not task_with(reset_position_ids=True).data.varies_normaliser


class HalfLoss(CrossEntropy):
    def loss(self, *arguments: Any) -> LossResult:
        result = super().loss(*arguments)
        return dataclasses.replace(result, total=result.total / 2)


class HalfTask(PretrainTask):
    Objective = HalfLoss


@pytest.mark.parametrize("task", [PretrainTask, HalfTask])
def test_a_task_may_scale_the_loss_of_its_base(monkeypatch: pytest.MonkeyPatch, task: type[PretrainTask]) -> None:
    """Also in several chunks, where the optimizer's sum would take the gradient before that factor is known."""
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 5)
    batch, factor = Batch(), 0.5 if task is HalfTask else 1.0
    hidden = torch.from_numpy(batch.hidden).requires_grad_()
    weight = on_ranks.vocabulary_weight(batch.weight, len(batch.weight), SINGLE)
    weight.gradient_sum = into = Sum(weight, 1.0)  # type: ignore[attr-defined]
    targets = torch.from_numpy(batch.labels), torch.from_numpy(batch.token_weights)
    result = task(from_dict({})).objective.loss((hidden, weight), targets, 1.0, SINGLE)
    result.total.backward()
    assert_near(result.total, batch.loss * factor)
    assert hidden.grad is not None
    assert_near(hidden.grad, batch.grad_hidden * factor)
    assert (weight.grad is None) == (task is PretrainTask), "added straight to the sum"
    assert_near(into.total if weight.grad is None else weight.grad, batch.grad_weight * factor)
