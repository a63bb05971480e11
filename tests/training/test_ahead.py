"""Compilation before the first step: every shape of the run, and losses as without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import runs
from tests.habana import devices
from tests.ranks import RankPools
from tests.tasks import chats, pairs
from tests.training import layouts

STEPS, BUCKETS = 4, 4
FLAGS = (
    f"--vocab-size 256 --seq-length 32 --train-iters {STEPS} --split 1,0,0 --eval-iters 0 --hidden-dropout 0.1 "
    f"--attention-dropout 0 --bucketing optimal --num-buckets {BUCKETS} --packing step --micro-batch-size 1 "
    "--global-batch-size 6 --log-memory-interval 0"
)
SFT = "--task sft --max-batch-len 64"
PREFERENCE = "--task preference --max-batch-len 96 --lora-rank 4 --preference-loss"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "sft": chats.write_chats(folder / "chats", chats.some_lengths(24, 30)),
        "preference": pairs.write_pairs(folder / "pairs", pairs.some_pairs(18, 30)),
    }


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", marks=pytest.mark.slow),
        "--pipeline-model-parallel-size 2 --bf16 --lora-rank 4 --lora-dropout 0.1",
        pytest.param("--zero-stage 3 --spike-action skip", marks=pytest.mark.slow),
        "--fp16 --initial-loss-scale 65536 --loss-scale-window 3",
        pytest.param("--zero-stage 1 --bf16", marks=pytest.mark.slow),
        pytest.param("--zero-stage 2", marks=pytest.mark.slow),
        pytest.param("--zero-stage 2 --offload-optimizer", marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_a_run_that_compiles_as_it_goes(
    ranks: RankPools, data: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    found, run = [], layouts.run_fp16 if "--fp16" in layout else runs.train
    for ahead in ("--compile-ahead", "--no-compile-ahead"):
        flags = f"{FLAGS} {SFT} {layout.replace('--fp16', '')} --data-path {data['sft']} {ahead}"
        assert ranks(2)(run, f"{flags} --results-dir {tmp_path / ahead}") == ["", ""]
        rows = runs.rows(tmp_path / ahead)
        found.append([(row["lm_loss"], row["grad_norm"], row["loss_scale"]) for row in rows])
        lines = re.findall(r"compiled (\d+) shapes? in [\d.]+ s", (tmp_path / ahead / "train.log").read_text())
        assert [int(number) > 1 for number in lines] == [True] * (ahead == "--compile-ahead")
    assert len(found[0]) == STEPS
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("sft", f"{SFT} --pipeline-model-parallel-size 2"),
        ("preference", f"{PREFERENCE} sigmoid"),
        pytest.param("preference", f"{PREFERENCE} kto", marks=pytest.mark.slow),
        pytest.param("sft", f"{SFT} --packing none --micro-batch-size 2", marks=pytest.mark.slow),
    ],
)
def test_hpu_meets_no_new_shape_after_the_first_step(
    hpu_ranks: RankPools, data: dict[str, Path], tmp_path: Path, task: str, options: str
) -> None:
    found = hpu_ranks(2)(
        devices.shapes, f"{FLAGS} {options} --data-path {data[task]} --device hpu --results-dir {tmp_path}"
    )
    for seen in found:
        assert seen.fault == ""
        assert len(seen.trained) > 1
        assert seen.trained <= seen.ahead
        assert seen.attention_trained <= seen.attention_ahead
        assert len({length for _, _, length, _ in seen.attention_ahead}) <= BUCKETS
