"""Evaluations whose passes are replayed as HPU graphs, on the stand-in: losses, and how often one is captured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import runs
from tests.habana import devices
from tests.ranks import RankPools
from tests.tasks import chats, pairs

STEPS, EVALUATIONS, BATCHES = 4, 3, 2
PP2 = "--pipeline-model-parallel-size 2 --bf16"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PACKED = "--packing step --max-batch-len 64"
FLAGS = (
    f"--num-layers 4 --vocab-size 256 --seq-length 32 --train-iters {STEPS} --eval-interval 2 --eval-iters {BATCHES} "
    "--hidden-dropout 0.1 --attention-dropout 0 --split 6,4,0 --log-memory-interval 0 --micro-batch-size 1 "
    "--global-batch-size 4 --device hpu"
)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("pretrain", ""),
        ("sft", PP2),
        pytest.param("packed", TP2, marks=pytest.mark.slow),
        # its layers report metrics
        pytest.param("routed", "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        ("dpo", "--lora-rank 4"),  # its reference is the model with the adapters switched off
        pytest.param("packed", "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("pretrain", TP2, marks=pytest.mark.slow),
        pytest.param("pretrain", PP2, marks=pytest.mark.slow),
        pytest.param("sft", "", marks=pytest.mark.slow),
    ],
)
def test_replayed_evaluations_have_the_losses_of_others(
    hpu_ranks: RankPools, tmp_path: Path, task: str, layout: str
) -> None:
    if task == "dpo":
        data = pairs.write_pairs(tmp_path / "data", pairs.some_pairs(40, 30))
        flags = f"{FLAGS} --task preference --max-batch-len 96 --no-compile-ahead"
    elif task == "routed":
        data = runs.write_dataset(tmp_path / "data")
        flags = f"{FLAGS} --architecture tests.training.routed_family:FAMILY --position-embedding-type rope"
    elif task != "pretrain":
        data = chats.write_chats(tmp_path / "data", chats.some_lengths(40, 30))
        rows = PACKED if task == "packed" else "--packing none --bucketing optimal --num-buckets 3"
        flags = f"{FLAGS} --task sft {rows} --no-compile-ahead"
    else:
        data, flags = runs.write_dataset(tmp_path / "data"), FLAGS
    flags += f" --data-path {data} {layout}"
    losses, metrics = [], []
    for option in ("", "--eval-graphs"):
        found = hpu_ranks(2)(devices.train, f"{flags} {option} --results-dir {tmp_path / option}", "true")
        assert {fault for fault, *_ in found} == {""}
        logged = [row for kind in ("train", "valid") for row in runs.rows(tmp_path / option, kind)]
        losses.append([row["lm_loss"] for row in logged])
        metrics.append([row.get("metrics", {}) for row in logged])
        assert ("metrics" in logged[-1]) == (task in ("dpo", "routed"))
        for _, calls, _ in found:
            assert (calls["capture_begin"] > 0) == bool(option)
            if task == "pretrain" and option:  # each rank has all microbatches of a stage, or half of them
                assert calls["capture_begin"] == 1
                assert calls["replay"] == EVALUATIONS * BATCHES * (4 if layout else 2)
            assert calls["capture_begin"] <= (4 if task == "packed" else 3)
        if option:
            log = (tmp_path / option / "train.log").read_text(encoding="utf-8")
            counts = re.findall(r"(\d+) HPU graphs captured for evaluations", log)
            assert int(counts[-1]) == found[0][1]["capture_begin"]
    assert len(losses[0]) == STEPS + EVALUATIONS
    assert losses[0] == losses[1]
    for replayed, computed in zip(*metrics, strict=True):
        assert replayed == pytest.approx(computed, rel=1e-6)  # sums of a pass are added up apart


def test_graphs_need_lazy_mode(hpu_ranks: RankPools, tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    flags = f"{FLAGS} --data-path {data} --eval-graphs --no-torch-compile"
    ((fault, *_),) = hpu_ranks(1)(devices.train, flags, lazy=False)
    assert "eval_graphs on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1 (HL_USE_LAZY_MODE=1), or leave" in fault
