"""A rank that is slowed down is named in the log line with the phase in which it is slow, though all step alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.ranks import RankPools
from tests.training import slowed

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
EP = "--architecture llama --position-embedding-type rope --num-experts 4 --expert-model-parallel-size 2"
FOUR = "--num-layers 4 --pipeline-partition-method"
FLAGS = "--eval-iters 0 --log-memory-interval 0 --train-iters 5 --log-interval 5"
PAUSE_S = 0.8
"""Of a step, which takes this model some 20 ms: a busy machine makes it no 40 times as long."""
SLOW = pytest.mark.slow
CASES = [
    pytest.param("", 1, "forward", id="DP2 forward", marks=SLOW),
    pytest.param("", 1, "backward", id="DP2 backward", marks=SLOW),
    pytest.param("", 0, "optimizer", id="DP2 optimizer", marks=SLOW),
    pytest.param("--zero-stage 1 --bf16", 1, "optimizer", id="DP2 ZeRO-1 optimizer", marks=SLOW),
    pytest.param("", 1, "data", id="DP2 data", marks=SLOW),
    pytest.param(TP, 1, "forward", id="TP2 forward", marks=SLOW),
    pytest.param(TP, 0, "backward", id="TP2 backward", marks=SLOW),
    pytest.param(TP, 1, "optimizer", id="TP2 optimizer", marks=SLOW),
    pytest.param(TP, 1, "data", id="TP2 data", marks=SLOW),
    pytest.param(f"{TP} --sequence-parallel", 1, "backward", id="TP2 SP backward", marks=SLOW),
    pytest.param(PP, 0, "forward", id="PP2 forward", marks=SLOW),
    pytest.param(PP, 1, "backward", id="PP2 backward"),
    pytest.param(PP, 1, "optimizer", id="PP2 optimizer", marks=SLOW),
    pytest.param(PP, 0, "data", id="PP2 data", marks=SLOW),
    pytest.param(EP, 1, "forward", id="EP2 forward", marks=SLOW),
    pytest.param(CP, 1, "forward", id="CP2 forward"),
    pytest.param(CP, 0, "backward", id="CP2 backward", marks=SLOW),
    pytest.param(CP, 1, "optimizer", id="CP2 optimizer", marks=SLOW),
    pytest.param(EP, 0, "backward", id="EP2 backward", marks=SLOW),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "data")


def pause_of(layout: str) -> float:
    """Return the pause of one attention: two layers of two microbatches, four with TP, or one layer of four with PP."""
    return PAUSE_S / (8 if TP in layout else 4)


@pytest.mark.parametrize(("layout", "slow_rank", "phase"), CASES)
def test_a_slow_rank_is_named_with_its_phase(
    ranks: RankPools, tmp_path: Path, data: Path, layout: str, slow_rank: int, phase: str
) -> None:
    seconds = pause_of(layout) if phase in ("forward", "backward") else PAUSE_S
    flags = f"{FLAGS} --data-path {data} {layout}"
    *rows, watchdog = ranks(2)(slowed.train, str(tmp_path), flags, slow_rank, phase, seconds)[0]
    [row] = [row for row in rows if row["kind"] == "train"]
    assert row["straggler_ranks"] == [slow_rank], row
    assert row["slowest_phase"] == phase, row
    assert f"straggler: rank {slow_rank} on " in (tmp_path / "train.log").read_text()
    assert watchdog["known"] == f"until step {row['iteration']}: {row['stragglers']}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", TP, f"{PP} {FOUR} 3,1"])
def test_a_rank_that_becomes_slow_is_named_within_twenty_steps(
    ranks: RankPools, tmp_path: Path, data: Path, layout: str
) -> None:
    flags = f"{FLAGS} --train-iters 40 --log-interval 10 --data-path {data} {layout}"
    rows = ranks(2)(slowed.train, str(tmp_path), flags, 1, "forward", pause_of(layout) / 4, 21)[0]
    named = {row["iteration"]: row["straggler_ranks"] for row in rows if row["kind"] == "train"}
    assert named[40] == [1], named


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(f"{FOUR} 3,1", id="3,1"),
        pytest.param(f"{FOUR} 1,3 --recompute-granularity full", id="1,3 recomputed", marks=SLOW),
        pytest.param("--vocab-size 2048", id="large output projection", marks=SLOW),
    ],
)
def test_none_is_named_where_stages_are_unequal_by_plan(
    ranks: RankPools, tmp_path: Path, data: Path, layout: str
) -> None:
    flags = f"{FLAGS} --train-iters 8 --log-interval 8 --data-path {data} {PP} {layout}"
    rows = ranks(2)(slowed.train, str(tmp_path), flags, -1, "", 0.0)[0]
    assert [row["straggler_ranks"] for row in rows if row["kind"] == "train"] == [[]], rows
