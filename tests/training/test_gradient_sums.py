"""The dtype in which gradients are summed over ranks, seen at torch's collectives, in each engine and ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts

# 48: as wide as nothing else that ranks sum
MODEL = f"{layouts.MODELS['bloom_learned']} --num-layers 2 --hidden-size 48 --seq-length 16 --micro-batch-size 1"
HALF = "--fp16 --initial-loss-scale 1024"
PIPELINE = "--pipeline-model-parallel-size 2"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"

FP32, BF16, FP16 = ["float32"], ["bfloat16"], ["float16"]
ON_TWO = {
    "": FP32,
    "--bf16": FP32,
    "--bf16 --no-pipeline-parallel": FP32,
    "--bf16 --zero-stage 2": FP32,
    "--bf16 --zero-stage 3": FP32,
    "--bf16 --zero-stage 2 --offload-optimizer": FP32,
    "--bf16 --zero-stage 3 --offload-optimizer --offload-param": FP32,
    HALF: FP32,
    "--bf16 --grad-reduce-dtype bf16": BF16,
    "--bf16 --zero-stage 3 --grad-reduce-dtype bf16": BF16,
    f"{HALF} --grad-reduce-dtype fp16": FP16,
    "--bf16 --grad-accum-dtype bf16": BF16,
    "--bf16 --grad-accum-dtype bf16 --grad-reduce-dtype fp32": FP32,
}
"""By flags, on two data-parallel ranks."""
ON_FOUR = {
    f"--bf16 {SEQUENCE}": {"data": FP32, "tensor": FP32},
    f"--bf16 {PIPELINE}": {"data": FP32, "tied": FP32},
    f"{HALF} {PIPELINE}": {"data": FP32, "tied": FP32},
    f"--bf16 {PIPELINE} --grad-accum-dtype bf16": {"data": BF16, "tied": BF16},
}
"""By flags, over the ranks that share data, layers and tied weights."""


def found(ranks: RankPools, world_size: int, cases: Iterable[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Dtypes and gradient norms by flags."""
    by_rank = ranks(world_size)(layouts.gradient_sums, [f"{MODEL} --global-batch-size 4 {flags}" for flags in cases])
    assert all(result == by_rank[0] for result in by_rank), "ranks disagree"
    dtypes, norms = zip(*by_rank[0], strict=True)
    return dict(zip(cases, dtypes, strict=True)), dict(zip(cases, norms, strict=True))


def test_data_parallel_ranks_sum_gradients_in_grad_reduce_dtype(ranks: RankPools) -> None:
    """The norm shows that nothing is rounded around the sum: one process has the same microbatches, summed in float32.
    16-bit sums move it by 6e-6 to 1e-4."""
    dtypes, norms = found(ranks, 2, ON_TWO)
    assert dtypes == {flags: {"data": expected} for flags, expected in ON_TWO.items()}
    # of the output weight, ZeRO-2 and 3 have a gradient in 16 bits that the others have not
    starts = ["--bf16 --zero-stage", "--bf16", HALF, ""]
    _, alone = found(ranks, 1, ["--bf16 --zero-stage 2", *starts[1:]])
    alone[starts[0]] = alone["--bf16 --zero-stage 2"]
    for flags, norm in norms.items():
        expected = alone[next(start for start in starts if flags.startswith(start))]
        if ON_TWO[flags] == FP32 and "--grad-accum-dtype" not in flags:
            assert norm == pytest.approx(expected, rel=2e-6), flags


def test_tied_and_replicated_gradients_are_summed_in_float32(ranks: RankPools) -> None:
    assert found(ranks, 4, ON_FOUR)[0] == ON_FOUR
