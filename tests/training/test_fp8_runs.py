"""Runs in fp8 with the stand-in of the transformer engine: losses, scales, layouts, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.habana.runs import train_in_fp8
from tests.ranks import RankPools
from tests.runs import rows, train, write_dataset

LLAMA = (
    "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 48 "
    "--hidden-dropout 0 --attention-dropout 0 --split 1,0,0 --log-memory-interval 0"
)
LAYERS, PRODUCTS, MICROBATCHES = 2, 4, 4
STEPS = 8


@pytest.fixture
def flags(tmp_path: Path) -> str:
    return f"--data-path {write_dataset(tmp_path / 'data')} {LLAMA} --train-iters {STEPS}"


def losses(folder: Path) -> list[float]:
    return [row["lm_loss"] for row in rows(folder)]


def assert_same_powers(scales: list[list[float]], expected: list[list[float]]) -> None:
    """Scales are powers of two: losses that differ in the third digit may fall on two sides of one."""
    assert len(scales) == len(expected)
    for ours, theirs in zip(scales, expected, strict=True):
        assert all(0.5 <= a / b <= 2 for a, b in zip(ours[:2], theirs[:2], strict=True))


@pytest.mark.parametrize("fp8_format", ["hybrid", "e5m2"])
def test_losses_in_fp8_are_near_those_in_bf16(
    ranks: RankPools, hpu_ranks: RankPools, tmp_path: Path, flags: str, fp8_format: str
) -> None:
    assert ranks(1)(train, f"--bf16 {flags} --results-dir {tmp_path / 'bf16'}") == [""]
    (run,) = hpu_ranks(1)(train_in_fp8, f"--fp8-format {fp8_format} {flags} --results-dir {tmp_path / 'fp8'}")
    assert run.fault == ""
    # e5m2 has two bits behind the point, a relative error of 1/8; the loss of all its products together is nearer
    near, expected = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert near == pytest.approx(expected, rel=0.03)
    assert near != pytest.approx(expected, rel=1e-4)  # the numbers move
    assert near[-1] < near[0] - 0.5
    assert run.readers <= {"update_gate.py", "step_log.py", "engine.py"}  # the norm, the log line, the start; no scale
    assert run.calls["te.Linear"] == LAYERS * PRODUCTS
    assert run.calls["fp8_autocast"] == STEPS * MICROBATCHES  # one a microbatch, none for evaluation
    (recipe,) = run.recipes
    assert recipe == {
        "margin": 0,
        "interval": MICROBATCHES,
        "fp8_format": fp8_format.upper(),
        "amax_history_len": 1,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, False),
        "reduce_amax": False,
    }
    # once a global batch; what is scaled by channels is converted each time
    assert sorted(run.casts) == [STEPS] * 3 * LAYERS + [STEPS * MICROBATCHES] * LAYERS
    assert (run.cached, run.smooth) == (PRODUCTS * LAYERS, LAYERS)
    largest = {"hybrid": 240, "e5m2": 57344}[fp8_format]
    for scales, history in zip(run.scales, run.histories, strict=True):
        assert len(history) == 1  # Habana's script: a sixteenth of the microbatches, rounded up
        for scale, amax in zip(scales[:2], history[0], strict=True):
            assert scale > 1  # measured, no longer as at the start
            assert amax * scale <= 2 * largest  # of the interval before


def test_every_layout_scales_and_trains_alike(hpu_ranks: RankPools, tmp_path: Path, flags: str) -> None:
    flags = f"--fp8-format hybrid {flags}"
    found = {}
    for name, layout in {
        "one": "--no-pipeline-parallel",
        "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
        "pp": "--pipeline-model-parallel-size 2",
        "dp": "--micro-batch-size 1",
    }.items():
        runs = hpu_ranks(1 if name == "one" else 2)(train_in_fp8, f"{flags} {layout} --results-dir {tmp_path / name}")
        assert {run.fault for run in runs} == {""}
        found[name] = runs
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=0.01)
    (one,) = found["one"]
    for name in ("tp", "dp"):  # their ranks hold parts of one tensor, or other rows: one scale for all
        assert found[name][0].scales == found[name][1].scales
        # forward of this, backward of the last step, at the start of each pass that follows a measurement
        assert found[name][0].calls["reduce_amax"] == 2 * STEPS - 1
        assert_same_powers(found[name][0].scales, one.scales)
    first, second = found["pp"]
    assert first.calls["reduce_amax"] == second.calls["reduce_amax"] == 0
    assert_same_powers([*first.scales, *second.scales], one.scales)


def test_options_reach_the_engine(hpu_ranks: RankPools, tmp_path: Path, flags: str) -> None:
    options = (
        "--fp8-format hybrid --fp8-margin 1 --fp8-interval 2 --fp8-amax-history-len 2 --fp8-wgrad false "
        "--fp8-amax-compute-algo most_recent --fp8-mlp-row-parallel false --cache-fp8-weight false "
        "--cache-fp8-weight-fwd false"
    )
    (run,) = hpu_ranks(1)(train_in_fp8, f"{flags} {options} --results-dir {tmp_path / 'fp8'}")
    assert run.fault == ""
    (recipe,) = run.recipes
    assert (recipe["margin"], recipe["interval"], recipe["amax_history_len"]) == (1, 2, 2)
    assert recipe["amax_compute_algo"] == "most_recent"
    assert recipe["override_linear_precision"] == (False, False, True)
    assert run.calls["te.Linear"] == LAYERS * (PRODUCTS - 1)
    assert run.cached == run.smooth == 0
    assert set(run.casts) == {STEPS * MICROBATCHES}


def test_a_resumed_run_measures_its_scales_again(hpu_ranks: RankPools, tmp_path: Path, flags: str) -> None:
    flags = f"--fp8-format hybrid {flags} --save-interval 4"
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, options in ((whole, ""), (part, "--exit-interval 4"), (part, "")):
        checkpoints = f"--save {folder / 'checkpoints'} --load {folder / 'checkpoints'}"
        (run,) = hpu_ranks(1)(train_in_fp8, f"{flags} {checkpoints} {options} --results-dir {folder}")
        assert run.fault == ""
    assert losses(part)[:4] == losses(whole)[:4]
    assert losses(part)[4] == pytest.approx(losses(whole)[4], rel=0.02)
    assert losses(part) == pytest.approx(losses(whole), rel=0.03)
    assert all(scale > 1 for scales in run.scales for scale in scales[:2])


@pytest.mark.parametrize(
    ("options", "said"),
    {
        "--recompute-granularity full": "recomputes no matrix products",
        "--recompute-granularity selective --recompute-modules layernorm": "recomputes no matrix products",
        "--lora-rank 2": "without adapters",
        "--zero-stage 3": "needs whole weights on each rank",
        "--pipeline-schedule zero-bubble --pipeline-model-parallel-size 2": "runs under pipeline_schedule=1f1b",
        "--bf16 false": "needs bf16, not fp32",
        "--fp8-interval 2 --fp8-amax-history-len 3": "fp8_amax_history_len=3 is above fp8_interval=2",
        "--rampup-batch-size 2 2 8": "needs fp8_interval, since rampup_batch_size varies",
        "--task sft --micro-batch-size 1": "needs fp8_interval, since packing=step varies",
        "--task sft --packing none --compile-ahead": "keeps the largest values of each pass, which compile_ahead would",
        "--task sft --packing dataset": "runs on Gaudi's transformer engine, but device=cpu",
        "--task preference": "trains task=pretrain and task=sft, not preference",
        "": "fp8_recipe=delayed runs on Gaudi's transformer engine, but device=cpu; leave it out",
    }.items(),
)
def test_what_fp8_cannot_have_is_refused_before_the_start(options: str, said: str) -> None:
    assert said in train(f"--bf16 --data-path x --train-iters 1 --fp8-format hybrid --fp8-recipe delayed {options}")


def test_a_missing_engine_is_named(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    (fault,) = ranks(1)(
        train_without_engine, f"{flags} --fp8-format hybrid --fp8-recipe delayed --results-dir {tmp_path / 'fp8'}"
    )
    assert re.match(r"DeviceError: fp8 needs intel_transformer_engine, .*never by pip from the public index", fault)


def train_without_engine(arguments: str) -> str:
    with patch("megatron.settings.rules.check_fp8_device", lambda config: []):
        return train(f"--bf16 {arguments}")
