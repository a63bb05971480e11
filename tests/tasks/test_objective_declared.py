"""Options, metrics, samples as rows, and reference beside teacher of a user's loss function, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.tasks.data import LabelPlace
from megatron.tasks.loss_function import LossBatch, Teacher, row_places
from megatron.tasks.loss_result import LossError, MetricTable
from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.sft import SFTTask
from megatron.training.interludes.evaluation import Evaluated, mean_of
from tests import runs
from tests.models.outputs import build_model
from tests.ranks import RankPools
from tests.tasks.chats import write_chats

STEPS = "--train-iters 2 --hidden-dropout 0 --attention-dropout 0 --split 8,2,0 --eod-mask-loss --eod-token-id 0"


def mean_of_means(rows: Tensor, batch: LossBatch, *, power: float, base: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    counts = batch.weights.sum(1)
    losses = (-rows * batch.weights).sum(1) / counts
    values = {"confident": rows.exp(), "tokens": torch.ones_like(rows), "worst": -rows, "longest": counts}
    return base * losses**power, values


mean_of_means.metrics = {"confident": "mean", "tokens": "sum", "worst": "max", "longest": "max"}  # type: ignore[attr-defined]


def of_both(rows: Tensor, batch: LossBatch, reference: Tensor, teacher: Teacher) -> Tensor:
    """0 while the model is its reference; the teacher's part is 0 too where student and teacher agree."""
    assert reference.shape == rows.shape == teacher.ids.shape[:2]
    taught = (teacher.log_probs.exp() * (teacher.log_probs - teacher.student_log_probs)).sum(-1)
    return torch.where(batch.weights == 0, 0.0, (reference - rows).exp() - 1 + taught).sum(1)


def scalar_metric(log_probs: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Any]]:
    return -log_probs, {"mean": log_probs.mean()}


scalar_metric.metrics = {"mean": "mean"}  # type: ignore[attr-defined]


def other_metrics(log_probs: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Any]]:
    return -log_probs, {}


other_metrics.metrics = {"mean": "mean"}  # type: ignore[attr-defined]


def undeclared(log_probs: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Any]]:
    return -log_probs, {"mean": log_probs}


def wrong_reduction(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs


wrong_reduction.metrics = {"a": "median", "nll": "mean"}  # type: ignore[attr-defined]


def own(function: str) -> str:
    return f"--loss {__name__}:{function}"


def test_a_mean_of_means_and_its_metrics_are_those_of_plain_torch_on_every_layout(
    ranks: RankPools, tmp_path: Path
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    flags = f"{STEPS} --data-path {data} {own('mean_of_means')} --loss-options power=2 base=3"
    config = load_config([*runs.TINY.split(), *flags.split()])
    dataset: Any = PretrainTask(config).data.open(ParallelContext.single())[0]
    tokens = torch.from_numpy(dataset.get_batch(range(8)))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    model = build_model(config, ParallelContext.single()).double()
    logits = model(inputs, lambda outputs: outputs[0] @ outputs[1][: config.model.vocab_size].t()).transpose(0, 1)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    counts = (inputs != 0).double()
    assert len(set(counts.sum(1).tolist())) > 1  # else a mean over labels is the same
    loss = 3 * ((-log_probs * counts).sum(1) / counts.sum(1)).pow(2).mean()
    loss.backward()
    norm = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    expected = {
        "confident": float((log_probs.detach().exp() * counts).sum() / counts.sum()),
        "tokens": float(counts.sum()),
        "worst": float((-log_probs.detach() * counts).max()),
        "longest": float(counts.sum(1).max()),
    }
    for number, (world_size, layout) in enumerate(
        [
            (1, "--micro-batch-size 4"),
            (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
            (2, "--zero-stage 2 --micro-batch-size 1"),
        ]
    ):
        results = tmp_path / str(number)
        assert set(ranks(world_size)(runs.train, f"{flags} {layout} --results-dir {results}")) == {""}
        first = runs.rows(results)[0]
        assert first["lm_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert {name: first["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert "longest: " in (results / "train.log").read_text()


def test_a_chat_is_a_row(tmp_path: Path) -> None:
    prefix = write_chats(tmp_path / "chats", [7, 5, 9])
    flags = (
        f"--task sft --num-epochs 1 --data-path {prefix} --split 1,0,0 {own('mean_of_means')} --loss-options power=1"
    )
    task = SFTTask(load_config([*runs.TINY.split(), *flags.split(), "--micro-batch-size", "1", "--vocab-size", "250"]))
    dataset: Any = task.data.open(ParallelContext.single())[0]
    assert task.objective.loss_unit == "samples"
    batch = task.read(dataset, [np.array([2, 0])])
    assert batch.normaliser == 2
    labels, weights, _, _, places = batch.targets
    lengths = dataset.lengths[[2, 0]].tolist()
    assert [(row >= 0).sum().item() for row in places] == lengths
    model = build_model(task.config, ParallelContext.single())
    hidden, weight = model(batch.inputs, lambda outputs: outputs)
    result = task.objective.loss((hidden, weight), batch.targets, 0.5, ParallelContext.single())
    log_probs = (hidden[:, 0].double() @ weight[:250].double().t()).log_softmax(-1)
    of_labels = log_probs.gather(-1, labels[0].unsqueeze(-1)).squeeze(-1)
    begin, means = 0, []
    for length in lengths:
        kept = weights[0, begin : begin + length].bool()
        assert 0 < kept.sum() < length
        means.append(-of_labels[begin : begin + length][kept].mean())
        begin += length
    assert float(result.total.detach()) == pytest.approx(float(torch.stack(means).sum().detach()) / 2, rel=1e-5)


def test_a_row_without_labels_and_a_microbatch_without_samples_count_for_nothing() -> None:
    assert row_places([], (1, 4)).tolist() == [[-1]]
    assert row_places([LabelPlace(7, 1, slice(None)), LabelPlace(3, 0, slice(1, 3))], (2, 4)).tolist() == [
        [4, 5, 6, 7],
        [1, 2, -1, -1],
    ]
    flags = f"--train-iters 1 --data-path none {own('mean_of_means')} --loss-options power=1"
    task = PretrainTask(load_config([*runs.TINY.split(), *flags.split()]))
    model = build_model(task.config, ParallelContext.single())
    hidden, weight = model(torch.ones(2, 4, dtype=torch.int64), lambda outputs: outputs)
    weights = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    nothing = torch.zeros(2, 4, dtype=torch.int64)
    targets = nothing + 1, weights, nothing, nothing, torch.arange(8).view(2, 4)
    result = task.objective.loss((hidden, weight), targets, 1.0, ParallelContext.single())
    result.total.backward()
    assert result.total.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert result.metrics["longest"].sum == 3


def test_reference_and_teacher_are_given_together(ranks: RankPools, tmp_path: Path) -> None:
    """The reference is stored, or the model without its adapters; the teacher knows the whole vocabulary."""
    data = runs.write_dataset(tmp_path / "data")
    base = f"--data-path {data} --hidden-dropout 0 --attention-dropout 0"
    assert ranks(1)(runs.train, f"{base} --train-iters 2 --save {tmp_path / 'model'}") == [""]
    teach = f"{base} --train-iters 2 --load {tmp_path / 'model'} --skip-train --teacher-top-k 64"
    assert ranks(1)(runs.train, teach) == [""]
    files = " ".join(map(str, tmp_path.glob("data.teacher-*")))
    flags = (
        f"{base} --train-iters 2 --load {tmp_path / 'model'} --finetune {own('of_both')} --teacher {files} --lr 1e-2"
    )
    for number, more in enumerate(("", "--lora-rank 2 --lora-alpha 4 --pipeline-model-parallel-size 2")):
        out = tmp_path / f"out{number}"
        assert set(ranks(1 + number)(runs.train, f"{flags} {more} --results-dir {out}")) == {""}
        losses = [row["lm_loss"] for row in runs.rows(out)]
        # the teacher's numbers have 16 bits
        assert abs(losses[0]) < 1e-3 < abs(losses[1])


def test_metrics_that_are_not_declared_or_not_of_each_label_are_refused() -> None:
    for function, fault in (
        ("scalar_metric", r"returned a tensor \[\] as metric mean; return its value of each label \[2, 4\]"),
        ("other_metrics", "declares the metrics mean and returned none; make them equal"),
        ("undeclared", "returned a tuple, but declares no metrics; set its attribute `metrics`"),
    ):
        flags = f"--train-iters 1 --data-path none {own(function)}"
        task = PretrainTask(load_config([*runs.TINY.split(), *flags.split()]))
        model = build_model(task.config, ParallelContext.single())
        tokens = torch.ones(2, 4, dtype=torch.int64)
        outputs = model(tokens, lambda outputs: outputs)
        nothing = torch.zeros_like(tokens)
        targets = tokens, torch.ones(2, 4), nothing, nothing
        with pytest.raises(LossError, match=fault):
            task.objective.loss(outputs, targets, 1.0, ParallelContext.single())


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (own("mean_of_means"), "loss_options lacks power, which loss="),
        (f"{own('mean_of_means')} --loss-options power=a", "loss_options power='a': Input should be a valid number"),
        (f"{own('mean_of_means')} --loss-options power=1 power=2", "loss_options has power 2 times; keep one"),
        (f"{own('mean_of_means')} --loss-options power=1 bas=2", "loss_options bas='2' is unknown to loss="),
        (f"{own('of_both')} --loss-options power=1", "has no options; leave it out"),
        (own("wrong_reduction"), "has metric a='median'; use mean, sum, max"),
        (own("wrong_reduction"), "has a metric 'nll'; give it a name of its own, not nll"),
    ],
)
def test_wrong_options_and_metrics_are_reported_with_the_others(flags: str, fault: str) -> None:
    words = [*runs.TINY.split(), "--train-iters", "4", "--data-path", "none", "--min-lr", "9", *flags.split()]
    with pytest.raises(ConfigError) as refused:
        load_config(words, 1)
    assert any(fault in found for found in refused.value.faults), refused.value.faults


def test_sums_and_maxima_are_joined_as_they_are_declared() -> None:
    table = MetricTable(("a", "b", "c"), ("mean", "sum", "max"))
    one, other = torch.tensor([[6.0, 2], [3, 1], [-5, 4]]), torch.tensor([[2.0, 2], [4, 1], [-7, 1]])
    joined = table.joined(table.joined(None, one), other)
    assert joined is not None
    assert table.over_ranks(joined, lambda numbers, is_max: None) == [2.0, 7.0, -5.0]
    nothing = table.nothing(torch.device("cpu"))
    assert torch.equal(joined, table.joined(joined, nothing))  # type: ignore[arg-type]
    assert torch.equal(table.rows({"c": (-5.0, 4.0)}, nothing.device)[:2], torch.zeros(2, 2))
    values = table.over_ranks(nothing, lambda numbers, is_max: None)
    assert np.isnan(values[0])
    assert values[1] == 0
    assert np.isnan(values[2])
    sets = [Evaluated(1.0, 10, {"a": 1.0, "b": 2.0, "c": 3.0}), Evaluated(2.0, 30, {"a": 2.0, "b": 5.0, "c": 1.0})]
    assert mean_of(sets, None, table).metrics == {"a": pytest.approx(1.75), "b": 7.0, "c": 3.0}
