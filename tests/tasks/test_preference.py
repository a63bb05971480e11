"""Preference training: packed pairs have the losses, rewards and gradients of answers alone, on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPools
from tests.tasks import pairs
from tests.tasks.test_sft import LAYOUTS
from tests.training.layouts import MODELS

LORA = "--lora-rank 4 --lora-alpha 8 --global-batch-size 5 --beta 0.5"
STEPS = 3
LR = {"llama_gqa": 3.0, "bloom_alibi": 300.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.write_pairs(tmp_path_factory.mktemp("pairs") / "pairs", pairs.some_pairs(15, 33))


@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    [
        ("llama_gqa", "", "--max-batch-len 96"),
        ("bloom_alibi", "tp2 sp", "--max-batch-len 96"),
        (
            "llama_gqa",
            "pp2",
            "--packing none --micro-batch-size 2 --lora-target-modules all-linear embed_tokens",
        ),
        ("bloom_alibi", "zero3", "--packing dataset --global-batch-size 2"),
        *(
            pytest.param(model, layout, "--max-batch-len 96", marks=pytest.mark.slow)
            for model in ("bloom_alibi", "llama_gqa")
            for layout in LAYOUTS
        ),
    ],
)
def test_packed_pairs_are_trained_as_answers_alone(
    ranks: RankPools, data: Path, model: str, layout: str, packing: str
) -> None:
    """The reference is the base without its adapters, which the first step moves away from it."""
    world_size, flags = LAYOUTS[layout] if layout else (1, "")
    common = f"{MODELS[model]} --data-path {data} {LORA} {packing} --lr {LR[model]}"
    (expected,) = ranks(1)(pairs.dense, common, STEPS)
    for found in ranks(world_size)(pairs.train, f"{common} {flags}", STEPS):
        for step, there in zip(found, expected, strict=True):
            assert step == pytest.approx(there, rel=1e-5, abs=2e-5)
    assert expected[0]["rewards/margins"] == 0
    assert abs(expected[-1]["rewards/margins"]) > 0.01
