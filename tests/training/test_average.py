"""The moving average of the weights that a training keeps: by hand, on layouts, after a resume and as weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.cli import convert_checkpoint, ds_to_universal
from megatron.generation.loading import load_model
from megatron.generation.options import LoadOptions
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.shards import named_parameters
from megatron.plan.campaign.saves import checkpoint_bytes
from megatron.plan.flops import count_parameters
from megatron.plan.memory import Stage, memory_by_stage
from megatron.settings.command_line import parse_arguments
from tests import runs
from tests.ranks import RankPools
from tests.training import averages, layouts

MODEL = f"{layouts.MODELS['llama_gqa']} --num-layers 2"
EMA = "--ema-decay 0.8 --adam-eps 1e-2"
"""Adam's update of a gradient near zero is its sign, which the rounding of a layout's sums decides, unless its eps is
large."""
LAYOUTS = {
    "tensor": "--tensor-model-parallel-size 2 --micro-batch-size 4",
    "pipeline": "--pipeline-model-parallel-size 2",
    "data": "",
    "ZeRO-1": "--zero-stage 1",
    "ZeRO-3": "--zero-stage 3",
}


@pytest.mark.parametrize(("flags", "interval"), [("", 1), ("--offload-ema", 3), ("--bf16", 1)])
def test_twenty_steps_by_hand(ranks: RankPools, flags: str, interval: int) -> None:
    ((distance, behind),) = ranks(1)(averages.by_hand, f"{MODEL} {flags}", 20, 0.9, interval)
    # each update rounds numbers near 1 twice to 2**-24, and 0.9 forgets: 10 x 2 x 2**-24
    assert distance < 1.2e-6 < 1e-3 < behind


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder / f"global_step{step}")
    checkpoint.verify()
    return {name: checkpoint.read_full(name, "ema") for name in checkpoint.parameters}


@pytest.fixture(scope="module")
def alone(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, saved after 3 steps and after 5."""
    folder = tmp_path_factory.mktemp("alone")
    ranks(1)(averages.train_and_save, f"{MODEL} {EMA}", 0, 3, str(folder))
    ranks(1)(averages.train_and_save, f"{MODEL} {EMA} --load {folder}", 3, 5, str(folder))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_keeps_the_same_average_each_number_once(
    ranks: RankPools, tmp_path: Path, alone: Path, layout: str
) -> None:
    kept = ranks(2)(averages.train_and_save, f"{MODEL} {EMA} {LAYOUTS[layout]}", 0, 3, str(tmp_path))
    expected, found = saved(alone, 3), saved(tmp_path, 3)
    assert found.keys() == expected.keys()
    for name, average in expected.items():
        torch.testing.assert_close(found[name], average, rtol=1e-4, atol=2e-6, msg=name)
    numbers = sum(average.numel() for average in expected.values())
    assert numbers <= sum(kept) < 1.01 * numbers, "the padding of the vocabulary is kept too"
    assert max(kept) < 0.8 * sum(kept)


@pytest.mark.parametrize("flags", ["", "--zero-stage 1"])
def test_a_resume_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    words, world_size = f"{MODEL} {EMA} --ema-interval 2 {flags}", 2 if flags else 1
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(world_size)(averages.train_and_save, words, 0, 5, str(whole))
    ranks(world_size)(averages.train_and_save, words, 0, 3, str(parts))  # one step after an update
    ranks(world_size)(averages.train_and_save, f"{words} --load {parts}", 3, 5, str(parts))
    expected, found = saved(whole, 5), saved(parts, 5)
    assert all(torch.equal(found[name], average) for name, average in expected.items())
    assert Checkpoint(parts / "global_step3").metadata["ema"] == {"decay": 0.8, "interval": 2, "steps": 1}


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "ZeRO-1"])
def test_another_layout_takes_it_over_whole(ranks: RankPools, tmp_path: Path, alone: Path, layout: str) -> None:
    ranks(2)(averages.train_and_save, f"{MODEL} {EMA} --load {alone} {LAYOUTS[layout]}", 5, 5, str(tmp_path))
    expected, found = saved(alone, 5), saved(tmp_path, 5)
    assert all(torch.equal(found[name], average) for name, average in expected.items())


@pytest.mark.parametrize("flags", ["", "--zero-stage 1"])
def test_a_step_that_is_refused_does_not_move_it(ranks: RankPools, flags: str) -> None:
    by_rank = ranks(2 if flags else 1)(averages.after_a_bad_step, f"{MODEL} {EMA} {flags}")
    assert {tuple(moved) for *moved, _ in by_rank} == {(True, False, False)}
    by_rank = ranks(2 if flags else 1)(averages.after_a_bad_step, f"{MODEL} {EMA} --ema-interval 4 {flags}")
    assert [counts for *_, counts in by_rank] == [[2, 2, 2]] * len(by_rank)


@pytest.mark.parametrize("flags", ["", "--zero-stage 1"])
def test_a_rollback_brings_back_that_of_its_checkpoint(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    words = f"{MODEL} {EMA} --ema-interval 2 {flags}"
    found = ranks(2 if flags else 1)(averages.after_a_rollback, words, str(tmp_path))
    assert set(found) == {(True, True)}


def test_a_run_says_what_becomes_of_its_average(
    ranks: RankPools, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, save = runs.write_dataset(tmp_path / "data"), tmp_path / "saves"
    words = f"--data-path {data} --lr-decay-samples 80 --save {save}"
    (said,) = ranks(1)(runs.announced, f"{words} --train-iters 2 {EMA}")
    (said,) = ranks(1)(runs.announced, f"{words} --train-iters 4 {EMA}")
    assert any(re.search(r"resumed .*global_step2: weights and their average, optimizer", line) for line in said), said
    (said,) = ranks(1)(runs.announced, f"{words} --train-iters 6")
    assert any("is not continued (ema_decay is unset)" in line for line in said)
    (said,) = ranks(1)(runs.announced, f"{words} --train-iters 8 {EMA}")
    assert any("holds no average of the weights (ema_decay); it begins with these weights" in line for line in said)


# Its use


def test_it_is_generated_with_and_converted_as_the_weights(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, trained = saved(alone, 5), Checkpoint(alone / "global_step5")
    for choice in ("ema", "trained"):
        model = load_model(LoadOptions(load=str(alone), weights=choice), ParallelContext.single())  # type: ignore[arg-type]
        for name, parameter in named_parameters(model.module):
            kind = expected[name] if choice == "ema" else trained.read_full(name)
            assert torch.equal(parameter[: len(kind)].detach(), kind), name
    for target in ("native", "hf"):
        flags = ["--load", str(alone), "--save", str(tmp_path / target), "--to", target, "--weights", "ema"]
        assert convert_checkpoint.main(flags) == 0
    converted = Checkpoint(tmp_path / "native" / "global_step0")
    assert all(torch.equal(converted.read_full(name), average) for name, average in expected.items())
    assert "verified" in capsys.readouterr().out
    flags = ["--load", str(tmp_path / "native"), "--save", str(tmp_path / "x"), "--to", "hf", "--weights", "ema"]
    assert convert_checkpoint.main(flags) != 0
    assert "holds no moving average of the weights" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="reads the moving average in a run's own checkpoint, but"):
        load_model(LoadOptions(load=str(tmp_path / "hf"), weights="ema"), ParallelContext.single())


def test_deepspeeds_folder_is_written_without_it(alone: Path, tmp_path: Path) -> None:
    flags = ["--input_folder", str(alone / "global_step5"), "--output_folder", str(tmp_path / "universal")]
    assert ds_to_universal.main(flags) == 0
    files = {path.name for path in (tmp_path / "universal" / "zero").glob("*/*.pt")}
    assert files == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}


# The plan


def stage_of(flags: str, world_size: int = 1) -> tuple[Stage, Config]:
    config, _ = parse_arguments(f"{layouts.COMMON} {MODEL} {flags}".split())
    (stage,) = memory_by_stage(config, Layout.of(config.parallel, world_size))
    return stage, config


@pytest.mark.parametrize(("flags", "world_size"), [("", 1), ("--zero-stage 1 --bf16", 2), ("", 2)])
def test_the_plan_has_its_memory_and_that_of_its_saves(flags: str, world_size: int) -> None:
    (without, plain), (kept, config) = (stage_of(f"{flags} {more}", world_size) for more in ("", EMA))
    numbers = count_parameters(config)
    added = kept.memory.total - without.memory.total
    # whole parameters in turns: the embedding is more than half of this model's
    assert 4 * numbers / world_size <= added <= 4 * numbers * (1 if world_size == 1 else 0.7)
    offloaded, _ = stage_of(f"{flags} {EMA} --offload-ema", world_size)
    assert (offloaded.memory.total, offloaded.host_bytes) == (without.memory.total, without.host_bytes + added)
    assert checkpoint_bytes(config) - checkpoint_bytes(plain) == 4 * numbers
