"""Resuming with another learning rate or weight decay: refused, or decided by a switch, as in Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import OptimizerConfig, TrainingConfig
from megatron.options.schedule import Schedule
from megatron.training.start import resumed_schedule
from tests import runs
from tests.ranks import RankPools

RUN: dict[str, Any] = {"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "linear", "lr_warmup_samples": 10}
TRAINING = TrainingConfig(global_batch_size=10, train_iters=20)


def schedule(training: TrainingConfig = TRAINING, **options: Any) -> Schedule:
    return Schedule(training, OptimizerConfig(**{**RUN, **options}))


def saved(**options: Any) -> Any:
    """The schedule of a checkpoint, as its manifest holds it."""
    return json.loads(json.dumps(schedule(**options).params.to_dict()))


def resume(here: Schedule, there: Any) -> tuple[Schedule, str | None]:
    return resumed_schedule(here, there, "runs/global_step5", here.optimizer)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 2e-3}, "lr=0.002 here, 0.001 there"),
    "min_lr": ({"min_lr": 0.0}, "min_lr=0 here, 0.0001 there"),
    "decoupled": ({"decoupled_lr": 3e-3}, "decoupled_lr=0.003 here, unused there"),
    "warm-up": ({"lr_warmup_samples": 20}, "lr_warmup=20 here, 10 there"),
    "no warm-up": ({"lr_warmup_samples": 0}, "lr_warmup=0 here, 10 there"),
    "warm-up init": ({"lr_warmup_init": 1e-5}, "lr_warmup_init=1e-05 here, 0 there"),
    "decay": ({"lr_decay_samples": 150}, "lr_decay_samples=150 here, 200 there"),
    "style": ({"lr_decay_style": "cosine"}, "lr_decay_style=cosine here, linear there"),
    "weight decay": ({"weight_decay": 0.1}, "end_weight_decay=0.1 here, 0.01 there"),
    "length": ({"training": TrainingConfig(global_batch_size=10, train_iters=30)}, "lr_decay_samples=300 here, 200"),
    "batch": ({"training": TrainingConfig(global_batch_size=5, train_iters=20)}, "lr_decay_samples=100 here, 200"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_schedule_is_refused_with_both_numbers_and_each_switch_decides(name: str) -> None:
    change, said = CHANGES[name]
    with pytest.raises(CheckpointError) as refused:
        resume(schedule(**change), saved())
    assert said in str(refused.value)
    assert "--override-opt-param-scheduler" in str(refused.value)
    assert "--use-checkpoint-opt-param-scheduler" in str(refused.value)

    override = schedule(**change, override_opt_param_scheduler=True)
    chosen, line = resume(override, saved())
    assert chosen.params == override.params
    assert line is not None
    assert said in line
    kept, line = resume(schedule(**change, use_checkpoint_opt_param_scheduler=True), saved())
    assert line is not None
    assert said in line
    for consumed in range(0, 320, 10):
        assert kept.learning_rate(consumed) == schedule().learning_rate(consumed)
        assert kept.decoupled_learning_rate(consumed) is None
        assert kept.weight_decay(consumed) == schedule().weight_decay(consumed)
    # the length stays this run's, and the next checkpoint holds what was used
    assert kept.total_iterations == schedule(**change).total_iterations
    assert resume(schedule(), json.loads(json.dumps(kept.params.to_dict())))[1] == ""


MUON: dict[str, Any] = {"optimizer": "muon", "muon_lr": 2e-2}


def test_another_rate_of_muon_is_another_schedule() -> None:
    with pytest.raises(CheckpointError, match=r"muon_lr=0\.03 here, 0\.02 there"):
        resume(schedule(**{**MUON, "muon_lr": 3e-2}), saved(**MUON))
    kept, _ = resume(schedule(**MUON, min_lr=0.0, use_checkpoint_opt_param_scheduler=True), saved(**MUON))
    assert kept.params.muon_lr == 2e-2
    older = {name: value for name, value in saved().items() if name != "muon_lr"}
    assert resume(schedule(), older)[1] == ""


PLUS = "--lora-rank 4 --lora-target-modules wte c_proj --loraplus-lr-ratio 4 --loraplus-lr-embedding 1e-2"


@pytest.mark.parametrize(
    ("flags", "there", "here"),
    [
        (PLUS, "--lr 1e-3", "--lr 4e-3"),
        ("--zero-stage 1", "--lr 1e-3 --decoupled-lr 1e-2", "--lr 4e-3"),
        ("--zero-stage 1", "--lr 1e-3", "--lr 4e-3 --decoupled-lr 1e-2"),
        ("--optimizer muon", "--lr 1e-3 --muon-lr 1e-2", "--lr 4e-3"),
        ("--optimizer muon", "--lr 1e-3", "--lr 1e-3 --muon-lr 1e-2"),
    ],
)
def test_every_parameter_goes_on_at_the_checkpoints_rate(
    ranks: RankPools, tmp_path: Path, flags: str, there: str, here: str
) -> None:
    """The embedding's adapter, the tables of tokens and Muon's matrices have other rates than `lr`."""
    data, base, saves = runs.write_dataset(tmp_path / "data"), tmp_path / "base", tmp_path / "saves"
    common, begin = f"--data-path {data} --eval-iters 0", ""
    if flags == PLUS:
        assert ranks(1)(runs.train, f"{common} --train-iters 1 --save {base}") == [""]
        begin = f"--load {base}"
    common += f" --train-iters 4 --lr-warmup-iters 2 {flags}"
    results = [tmp_path / name for name in ("whole", "stopped", "resumed")]
    for folder, words in zip(
        results,
        (
            f"{begin} {there}",
            f"{begin} {there} --save {saves} --exit-interval 2",
            f"--load {saves} {here} --use-checkpoint-opt-param-scheduler",
        ),
        strict=True,
    ):
        assert ranks(1)(runs.train, f"{common} --results-dir {folder} {words}") == [""]
    whole, _, resumed = ([(row["lm_loss"], row["grad_norm"]) for row in runs.rows(folder)] for folder in results)
    assert resumed == whole[2:]
    assert len(resumed) == 2


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {}),
        ({"optimizer": "muon", "muon_lr": 1e-3}, {"optimizer": "muon"}),
        ({"lr_warmup_samples": 0, "lr_warmup_iters": 1}, {}),  # of 10 samples
        ({"lr_warmup_samples": 0, "lr_warmup_fraction": 0.05}, {}),
        ({"lr_wsd_decay_style": "linear"}, {}),  # not in use
        ({"lr_decay_style": "constant", "min_lr": 0.0, "lr_decay_samples": 90}, {"lr_decay_style": "constant"}),
    ],
)
def test_the_same_rates_in_other_words_are_the_same_schedule(here: Any, there: Any) -> None:
    assert resume(schedule(**here), saved(**there))[1] == ""


def test_a_checkpoint_without_a_schedule_is_named_and_has_none_to_use() -> None:
    chosen, line = resume(schedule(), None)
    assert chosen == schedule()
    assert line is not None
    assert line.startswith("WARNING: runs/global_step5 holds no learning-rate schedule")
    with pytest.raises(CheckpointError, match="holds no learning-rate schedule for --use-checkpoint"):
        resume(schedule(use_checkpoint_opt_param_scheduler=True), None)


@pytest.mark.parametrize("damaged", [{}, {"lr_warmup": 3}, {**saved(), "more": 1}])
def test_a_damaged_schedule_is_named(damaged: Any) -> None:
    with pytest.raises(CheckpointError, match="has no usable schedule"):
        resume(schedule(), damaged)
