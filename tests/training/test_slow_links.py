"""A link that becomes slow is named within 50 steps; a slow rank and a busy machine name none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.hosts import Hosts, why_not
from tests.ranks import RankPool, RankPools
from tests.training import link_runs
from tests.training.link_runs import Disturbance

WIDE = "--num-layers 2 --hidden-size 128 --num-attention-heads 4"
FLAGS = f"{WIDE} --eval-iters 0 --log-memory-interval 0 --log-interval 10"
FROM_STEP = 21
WITHIN = 50
"""Steps within which a slow link is named."""
STEPS = FROM_STEP + WITHIN - 1
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "data", documents=200)


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four ranks, each on a host of its own."""
    if reason := why_not(with_ssh=False) or link_runs.why_not():
        pytest.skip(reason)
    with Hosts(4, tmp_path_factory.mktemp("hosts") / "hosts", with_ssh=False) as hosts:
        namespaces = [[host.namespace(kind) for kind in ("net", "uts")] for host in hosts]
        pool = RankPool(4, functools.partial(link_runs.enter, namespaces))
        yield pool
        pool.stop()


def warnings(folder: Path) -> list[str]:
    return [line for line in (folder / "train.log").read_text().splitlines() if "slow link" in line]


@pytest.mark.parametrize(
    ("layout", "pair"),
    [
        pytest.param("", (1, 2), id="ring of four"),
        # between these stages little is sent: steps are as long as before, and only probes at an interval show the link
        pytest.param("--pipeline-model-parallel-size 2 --link-probe-interval 20", (1, 3), id="stages", marks=SLOW),
    ],
)
def test_a_link_at_a_third_of_its_rate_is_named_within_fifty_steps(
    four_hosts: RankPool, tmp_path: Path, data: Path, layout: str, pair: tuple[int, int]
) -> None:
    flags = f"{FLAGS} --data-path {data} --train-iters {STEPS} {layout}"
    planned = Disturbance(FROM_STEP, links=[pair, pair[::-1]])
    rows = four_hosts(link_runs.train, str(tmp_path), flags, planned)[0]
    [warning] = warnings(tmp_path)
    one, other = (f"rank {rank} on node{rank + 1}" for rank in pair)
    assert f"slow link: between {one} and {other}, " in warning
    assert "link" in [row["cause"] for row in rows]


@SLOW
def test_an_interface_that_is_slow_is_named_as_its_host(four_hosts: RankPool, tmp_path: Path, data: Path) -> None:
    planned = Disturbance(FROM_STEP, links=[(2, receiver) for receiver in (0, 1, 3)])
    flags = f"{FLAGS} --data-path {data} --train-iters {STEPS}"
    rows = four_hosts(link_runs.train, str(tmp_path), flags, planned)[0]
    [warning] = warnings(tmp_path)
    assert "slow link: all 2 links of node3 with other hosts, " in warning
    assert "link" in [row["cause"] for row in rows]


@SLOW
def test_a_slow_rank_is_no_slow_link(four_hosts: RankPool, tmp_path: Path, data: Path) -> None:
    flags = f"{FLAGS} --data-path {data} --train-iters {STEPS} --log-straggler"
    rows = four_hosts(link_runs.train, str(tmp_path), flags, Disturbance(FROM_STEP, computes_longer=1))[0]
    assert warnings(tmp_path) == []
    assert runs.rows(tmp_path)[-1]["straggler_ranks"] == [1]
    assert ("rank", [1]) in [(row["cause"], row["longer_ranks"]) for row in rows]


@SLOW
def test_a_rank_that_shares_its_core_is_no_slow_link(four_hosts: RankPool, tmp_path: Path, data: Path) -> None:
    flags = f"{FLAGS} --data-path {data} --train-iters {STEPS} --link-probe-interval 10"
    rows = four_hosts(link_runs.train, str(tmp_path), flags, Disturbance(FROM_STEP, shares_core=1))[0]
    assert warnings(tmp_path) == []
    assert len(rows) == STEPS // 10


@SLOW
def test_a_clean_run_names_nothing(four_hosts: RankPool, tmp_path: Path, data: Path) -> None:
    flags = f"{FLAGS} --data-path {data} --train-iters 200 --link-probe-interval 10"
    rows = four_hosts(link_runs.train, str(tmp_path), flags, Disturbance(0))[0]
    assert warnings(tmp_path) == []
    assert len(rows) == 20


@SLOW
@pytest.mark.parametrize("shares_core", [None, 1])
def test_links_that_only_processors_limit_are_not_named(
    ranks: RankPools, tmp_path: Path, data: Path, shares_core: int | None
) -> None:
    flags = f"{FLAGS} --data-path {data} --train-iters 200 --link-probe-interval 10"
    rows = ranks(4)(link_runs.train_unlimited, str(tmp_path), flags, Disturbance(FROM_STEP, shares_core=shares_core))[0]
    assert warnings(tmp_path) == []
    assert len(rows) == 20
