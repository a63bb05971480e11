"""Replicas of ZeRO's shards: what one replica learns, saves and holds is what plain ZeRO has on the same ranks."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts, planted, replicas
from tests.training.test_checkpoints import assert_same_state, newest

MODEL = (
    f"{layouts.MODELS['llama_gqa_tied']} --num-layers 2 --hidden-size 32 --vocab-size 256 --clip-grad 0.5 "
    "--micro-batch-size 1"
)
EXPERTS = f"{MODEL} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
TP2, PP2, CP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
OFFLOAD = "--offload-optimizer"
STEPS = 3


@pytest.fixture(scope="module")
def run(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of all ranks of a run, and its checkpoint; each run once."""

    def get(world_size: int, flags: str) -> tuple[list[dict[str, Any]], Any]:
        folder = tmp_path_factory.mktemp("run")
        results = ranks(world_size)(replicas.train_and_save, flags, STEPS, str(folder))
        return results, newest(folder)

    return functools.cache(get)


def assert_alike(results: list[dict[str, Any]], expected: list[dict[str, Any]], *, rel: float) -> None:
    for name in ("losses", "norms", "scales"):
        assert all(result[name] == results[0][name] for result in results), f"ranks disagree on {name}"
        assert results[0][name] == pytest.approx(expected[0][name], rel=rel)


def assert_close_state(one: Any, other: Any, rel: float) -> None:
    """Assert that each tensor is as near as `rel`, as a vector.

    Where a gradient is next to nothing, Adam moves a single number by the learning rate, whatever its sign.
    """
    assert one.parameters == other.parameters
    for name in one.parameters:
        for kind in one.kinds_of(name):
            mine, theirs = one.read_full(name, kind), other.read_full(name, kind)
            assert (mine - theirs).norm() <= rel * theirs.norm(), f"{kind} of {name}"


@pytest.mark.parametrize("zero", [pytest.param(1), pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_replicas_learn_as_plain_zero(run: Any, zero: int) -> None:
    expected, plain = run(4, f"{MODEL} --zero-stage 1")
    results, saved = run(4, f"{MODEL} --zero-stage {zero} --num-replicas 2")
    assert_alike(results, expected, rel=1e-6)
    assert_close_state(saved, plain, rel=1e-5)
    numel = sum(math.prod(shard.shape) for shard in plain.parameters.values())
    # written once, and about as much by each rank
    assert sum(result["saved"] for result in results) == numel
    for result in results:
        assert 0.15 * numel < result["saved"] < 0.35 * numel
        # a shard is half of the model here, and a quarter there; with what aligns the shards
        assert numel / 2 <= result["held"] <= numel / 2 + 64
        # two microbatches a step, of which ZeRO-2 and 3 sum each
        sums = 1 if zero == 1 else 2
        assert sums * numel / 2 <= result["sent"]["across"] <= sums * (numel / 2 + 64)
        assert result["sent"].keys() <= {"within", "across"}
    assert expected[0]["held"] <= numel / 4 + 64


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_of_one_rank_are_bit_for_bit_plain_zero(run: Any, zero: int) -> None:
    """Each number is a sum of two, in either case."""
    flags = f"{MODEL} --zero-stage {zero}"
    if zero == 2:
        # its norm adds up the squares of a shard, in the order of the processor's vectors: clipping moves last bits
        flags += " --clip-grad 0"
    expected, plain = run(2, flags)
    results, saved = run(2, f"{flags} --num-replicas 2")
    assert_same_state(saved, plain)
    assert results[0]["losses"] == results[1]["losses"] == expected[0]["losses"]
    assert results[0]["norms"] == pytest.approx(expected[0]["norms"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        # nothing is sharded, and a warning says so
        (MODEL, 1e-6),
        (f"{MODEL} --zero-stage 1 {TP2} --sequence-parallel", 1e-6),
        (f"{MODEL} --zero-stage 1 {CP2}", 1e-6),
        (f"{MODEL} --zero-stage 3 {CP2}", 1e-6),
        (f"{MODEL} --zero-stage 1 {PP2}", 1e-6),
        (f"{MODEL} --zero-stage 1 {PP2} --pipeline-schedule zero-bubble", 1e-6),
        (f"{MODEL} --zero-stage 2 {TP2}", 1e-6),
        (f"{MODEL} --zero-stage 3 {TP2}", 1e-6),
        (f"{MODEL} --zero-stage 1 {OFFLOAD}", 1e-6),
        (f"{MODEL} --zero-stage 2 {OFFLOAD}", 1e-6),
        (f"{MODEL} --zero-stage 3 {OFFLOAD} --offload-param", 1e-6),
        (f"{MODEL} --zero-stage 2 --bf16 {OFFLOAD}", 1e-4),
        (f"{MODEL} --bf16", 1e-4),
        (f"{MODEL} --bf16 --zero-stage 3", 1e-4),
        # each sum is rounded to 1/256, and its square is a moment
        (f"{MODEL} --bf16 --grad-reduce-dtype bf16", 2e-3),
        # the first steps overflow
        (f"{MODEL} --fp16 --initial-loss-scale 4194304", 1e-4),
        (f"{MODEL} --fp16 --initial-loss-scale 4194304 --zero-stage 2", 1e-4),
        (f"{MODEL} --fp16 --initial-loss-scale 4194304 --zero-stage 3", 1e-4),
        (f"{MODEL} --zero-stage 1 --lora-rank 4", 1e-6),
        (f"{MODEL} --zero-stage 3 --lora-rank 4", 1e-6),
        (f"{EXPERTS} --zero-stage 1", 1e-6),
        (f"{EXPERTS} --bf16", 1e-4),
        (f"{EXPERTS} --zero-stage 1 {TP2} --expert-tensor-parallel-size 1", 1e-6),
    ],
)
def test_replicas_learn_as_plain_zero_beside_everything_else(run: Any, flags: str, rel: float) -> None:
    expected, plain = run(4, flags)
    results, saved = run(4, f"{flags} --num-replicas 2")
    assert_alike(results, expected, rel=rel)
    assert_close_state(saved, plain, rel=10 * rel)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, f"--zero-stage 1 {TP2}"),
        pytest.param(4, "--zero-stage 3 --num-replicas 4", marks=pytest.mark.slow),
        pytest.param(4, f"--zero-stage 1 {PP2} --num-replicas 2", marks=pytest.mark.slow),
        pytest.param(1, "", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_replicas_resumes_anywhere(
    ranks: RankPools, tmp_path: Path, world_size: int, flags: str
) -> None:
    mine, theirs, back = (tmp_path / name for name in ("mine", "theirs", "back"))
    expected = ranks(4)(layouts.train_then_save, f"{MODEL} --zero-stage 1 --num-replicas 2", 2, str(mine))
    next_there = ranks(world_size)(layouts.resume_then_save, f"{MODEL} {flags}", str(mine), str(theirs))
    assert_same_state(newest(mine), newest(theirs))
    flags = f"{MODEL} --zero-stage 3 --num-replicas 2"
    next_here = ranks(4)(layouts.resume_then_save, flags, str(theirs), str(back))
    assert_same_state(newest(mine), newest(back))
    assert next_there[0] == pytest.approx(expected[0], rel=1e-5)
    assert next_here[0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_replica_that_computes_otherwise_is_found(ranks: RankPools, zero: int) -> None:
    found = ranks(4)(replicas.check_after_damage, f"{MODEL} --zero-stage {zero} --num-replicas 2", 3)
    for text in found:
        # rank 1 has the only copy
        assert "on rank 3 (" in text
        assert "differs from its copy on rank 1" in text
        assert ": 1 of " in text


@pytest.mark.parametrize(
    "flags", ["--zero-stage 1", pytest.param("--zero-stage 2", marks=pytest.mark.slow), "--zero-stage 3"]
)
def test_a_nan_is_attributed_to_its_rank_alone(ranks: RankPools, flags: str) -> None:
    fault = ("gradient", 3, "layers.0.mlp.down.weight")
    for found in ranks(4)(planted.origins, f"{MODEL} {flags} --num-replicas 2", [fault]):
        ((_, named, text, _),) = found
        assert named == (3,), text
