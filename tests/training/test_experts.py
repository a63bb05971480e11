"""A mixture of experts on every layout, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts

FLAGS = (
    "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights --num-layers 2 "
    "--ffn-hidden-size 48 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)
STEPS = 3
TP2, PP2, SP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--sequence-parallel"
EP2, EP4, ETP1 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1"


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(layouts.train, f"{FLAGS} {flags}", STEPS)[0])


@pytest.mark.parametrize(
    ("ranks_needed", "flags", "micro_batch_size"),
    [
        (2, EP2, 2),
        (2, f"{EP2} --zero-stage 1", 2),
        (4, f"{EP4} --zero-stage 1", 1),
        (4, EP2, 1),
        (4, f"{EP2} --zero-stage 1", 1),
        (2, TP2, 4),
        (2, f"{TP2} {ETP1}", 4),
        (2, f"{TP2} {SP} {ETP1}", 4),
        (2, f"{TP2} {SP} {EP2} {ETP1}", 4),
        (2, f"{TP2} {EP2} {ETP1} --zero-stage 1", 4),
        (4, f"{TP2} {SP} {EP2}", 2),
        (4, f"{TP2} {EP4} {ETP1}", 2),
        (4, f"{PP2} {EP2} --recompute-granularity full", 2),
        (4, f"{PP2} {EP2} --zero-stage 1", 2),
        (2, "--zero-stage 3", 2),
    ],
)
@pytest.mark.parametrize("capacity", ["", "--moe-expert-capacity-factor 0.75"])
def test_every_layout_trains_as_one_process(
    ranks: RankPools, alone: Any, ranks_needed: int, flags: str, micro_batch_size: int, capacity: str
) -> None:
    expected = alone(f"--micro-batch-size 4 {capacity}")
    for found in ranks(ranks_needed)(
        layouts.train, f"{FLAGS} --micro-batch-size {micro_batch_size} {flags} {capacity}", STEPS
    ):
        for name in ("losses", "norms", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name
