"""A task of this file alone trains by its name: its options, data, normaliser and metrics need no change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from megatron.options.config import Config, ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits, linear_cross_entropy
from megatron.settings.command_line import load_config
from megatron.settings.validation import idle
from megatron.tasks.data import Microbatch, TaskData
from megatron.tasks.loss_result import LossResult, Metric
from megatron.tasks.objective import Objective
from megatron.tasks.task import Task
from tests import runs
from tests.models.outputs import build_model
from tests.ranks import RankPools

NAME = f"{__name__}:WeightedTask"


class Numbers:
    """Rows of random tokens, in memory."""

    def __init__(self, rows: int, config: Config, seed: int) -> None:
        shape = (rows, config.training.seq_length + 1)
        self.tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, shape)
        self.fingerprint = f"numbers-{rows}-{seed}"

    def __len__(self) -> int:
        return len(self.tokens)


class WeightedData(TaskData):
    """Random tokens, whose labels have weights."""

    reads_data_path = False

    def open(self, ctx: ParallelContext) -> Sequence[Numbers | None]:
        return Numbers(400, self.config, 1), Numbers(64, self.config, 2), None

    def read(self, dataset: Numbers, key: range) -> Microbatch:
        tokens = torch.from_numpy(dataset.tokens[list(key)])
        labels = tokens[:, 1:].contiguous()
        weights = self.options.base + (labels % self.options.modulus).float()
        return Microbatch(tokens[:, :-1].contiguous(), (labels, weights), float(weights.sum()))


class WeightedLoss(Objective):
    """Cross-entropy weighted by the labels, divided by the sum of the weights."""

    metrics = ("probability", "odd labels")

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        labels, weights = targets
        logits = gather_logits(*outputs, ctx).float()
        probabilities = logits.softmax(-1).gather(-1, labels.t().unsqueeze(-1))
        metrics = {
            "odd labels": Metric((labels % 2).sum(), labels.numel()),
            "probability": Metric(probabilities.sum(), labels.numel()),
        }
        return LossResult(linear_cross_entropy(*outputs, labels, weights * scale, ctx), metrics)


class WeightedTask(Task):
    """Next-token prediction with losses weighted by the labels."""

    @dataclass(frozen=True)
    class Options:
        modulus: int = Field(gt=1)
        base: float = 0.25

    Data = WeightedData
    Objective = WeightedLoss


ARGUMENTS = (
    f"--task {NAME} --task-options modulus=3 base=0.5 --train-iters 4 --log-interval 2 --hidden-dropout 0 "
    "--attention-dropout 0"
)


def expected(data: Numbers, samples: slice) -> tuple[float, float]:
    """Loss and mean probability of the labels under the initial model, in float64 by torch alone."""
    config = load_config([*runs.TINY.split(), *ARGUMENTS.split()])
    model = build_model(config, ParallelContext.single()).double()
    tokens = torch.from_numpy(data.tokens[samples])
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    weights = 0.5 + (labels % 3).double()
    with torch.no_grad():
        logits = model(inputs, lambda outputs: outputs[0] @ outputs[1][: config.model.vocab_size].t()).transpose(0, 1)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    return float(loss), float((-losses).exp().mean())


def scalars(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(2, "--zero-stage 2", marks=pytest.mark.slow),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --no-pipeline-parallel"),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
    ],
    ids=["PP2 TP2", "DP2", "DP2 ZeRO-2", "TP2 SP sequential", "CP2"],
)
def test_its_loss_and_metrics_are_those_of_plain_torch(
    ranks: RankPools, tmp_path: Path, world_size: int, layout: str
) -> None:
    results = tmp_path / "results"
    # at this learning rate the weights stay what they were, to float32's last digits
    flags = f"{ARGUMENTS} {layout} --lr 1e-9 --results-dir {results}"
    assert set(ranks(world_size)(runs.train, flags)) == {""}
    config = load_config([*runs.TINY.split(), *ARGUMENTS.split()])
    train, valid, _ = WeightedTask(config).data.open(ParallelContext.single())
    assert train is not None
    assert valid is not None
    held_out, *_ = runs.rows(results, "valid")
    loss, probability = expected(valid, slice(0, 16))  # two global batches
    assert held_out["lm_loss"] == pytest.approx(loss, rel=1e-5)
    assert held_out["metrics"]["probability"] == pytest.approx(probability, rel=1e-5)
    first, second = runs.rows(results)
    assert [row["iteration"] for row in (first, second)] == [2, 4]
    for row, samples in ((first, slice(0, 16)), (second, slice(16, 32))):
        odd = (train.tokens[samples, 1:] % 2).mean()  # of both steps since the last log line
        assert row["metrics"]["odd labels"] == pytest.approx(odd, rel=1e-6)
        assert row["metrics"]["probability"] == pytest.approx(expected(train, samples)[1], rel=1e-5)
        steps = [expected(train, slice(begin, begin + 8))[0] for begin in (samples.start, samples.start + 8)]
        assert row["lm_loss"] == pytest.approx(np.mean(steps), rel=1e-5)
    events = scalars(results / "tensorboard")
    for key in WeightedLoss.metrics:
        written = [(event.step, event.value) for event in events.Scalars(f"metrics-training/{key}")]
        assert written == [(row["iteration"], pytest.approx(row["metrics"][key])) for row in (first, second)]
    assert events.Scalars("metrics-validation/probability validation")[0].value == pytest.approx(probability, rel=1e-5)


def test_every_layout_learns_the_same(ranks: RankPools, tmp_path: Path) -> None:
    """Losses and metrics of four steps, on one rank and on four."""
    found = []
    for world_size, layout in ((1, ""), (4, "--pipeline-model-parallel-size 2 --zero-stage 1")):
        flags = f"{ARGUMENTS} {layout} --log-interval 1 --results-dir {tmp_path / str(world_size)}"
        assert set(ranks(world_size)(runs.train, flags)) == {""}
        found.append(runs.rows(tmp_path / str(world_size)))
    for one, other in zip(*found, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], abs=1e-4)
        assert other["metrics"] == {key: pytest.approx(value, rel=1e-3) for key, value in one["metrics"].items()}


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (f"--task {NAME}", "task_options lacks modulus"),
        (f"--task {NAME} --task-options modulus=1", "modulus='1': Input should be greater than 1"),
        (f"--task {NAME} --task-options modulus=3 rest=2", "rest='2' is unknown to task="),
        (f"--task {NAME} --task-options modulus", "'modulus' is not NAME=VALUE"),
        (f"--task {NAME} --task-options modulus=3 --global-batch-size 9", "is not a multiple of micro_batch_size"),
        ("--task-options modulus=3", "task=pretrain has no options"),
        ("--task pretrian", "use preference, pretrain, sft, or your own as package.module:"),
        (f"--task {__name__}:Nothing", "cannot be loaded"),
        (f"--task {__name__}:Numbers", "give a subclass of megatron.tasks.task.Task"),
    ],
)
def test_its_faults_are_reported_with_the_others(flags: str, fault: str) -> None:
    words = [*runs.TINY.split(), "--train-iters", "4", "--data-path", "none", "--min-lr", "9", *flags.split()]
    with pytest.raises(ConfigError) as refused:
        load_config(words, 1)
    assert any(fault in found for found in refused.value.faults), refused.value.faults
    assert any("min_lr=9" in found for found in refused.value.faults)


def test_an_option_of_another_task_is_named_in_a_warning() -> None:
    flags = f"--train-iters 4 --data-path none --task {NAME} --task-options modulus=3 --packing none"
    (warning,) = idle(load_config([*runs.TINY.split(), *flags.split()], 1))
    assert warning.startswith("packing=none has no effect without task=sft")


class ForgetfulLoss(WeightedLoss):
    """Declares two metrics, and returns one."""

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        result = super().loss(outputs, targets, scale, ctx)
        return LossResult(result.total, {"probability": result.metrics["probability"]})


class ForgetfulTask(WeightedTask):
    Objective = ForgetfulLoss


def test_a_declared_metric_that_the_loss_lacks_is_named(ranks: RankPools) -> None:
    (fault,) = ranks(1)(runs.train, ARGUMENTS.replace("WeightedTask", "ForgetfulTask"))
    assert "returns the metrics ['probability'], but it declares ['odd labels', 'probability']" in fault
