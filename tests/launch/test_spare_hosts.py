"""Spare hosts that take the place of others, over hosts with their own addresses and processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.host_runs import Run, assert_equal_runs, kill_rank, python_processes
from tests.hosts import Hosts, why_not
from tests.ranks import RankPools

pytestmark = pytest.mark.slow

STEPS = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "text").parent


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    flags = f"--config tiny_bloom --train-samples {8 * STEPS} --results-dir {folder} --save {folder}/checkpoints"
    assert set(RankPools()(2)(runs.train, f"{flags} --save-interval 5 --data-path {data}/text")) == {""}
    return folder


class SpareRun(Run):
    """Two hosts and a spare one, from `whole`'s options."""

    def __init__(self, hosts: Hosts, data: Path, results: Path, max_restarts: int) -> None:
        layout = {"HL_DP": "2", "HL_TP": "1", "HL_PP": "1", "HL_SAVE_INTERVAL": "5"}
        layout |= {"HL_SPARE_HOSTS": "1", "HL_MAX_RESTARTS": str(max_restarts)}
        flags = ["--train-samples", str(8 * STEPS)]
        super().__init__(hosts, hosts.login, data, results, *flags, nodes=2, **layout)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3, tmp_path / "hosts") as three:
        yield three


def test_a_spare_host_takes_the_place_of_one_that_is_lost(
    hosts: Hosts, data: Path, whole: Path, tmp_path: Path
) -> None:
    run = SpareRun(hosts, data, tmp_path / "run", max_restarts=1)
    run.wait_for_words("node3 waits as a spare host")
    run.wait_for_iteration(12)
    lost_s = time.monotonic()
    hosts[1].cut_off()
    hosts[1].run("pkill", "-KILL", "-f", "megatron|deepspeed|multiprocessing")
    run.wait_for_words("another node has failed or is lost; the ranks restart")
    run.wait_for_words("node3 takes a place in the run")
    took_s = time.monotonic() - lost_s
    run.wait_for_words(": resumed ")
    print(
        f"the spare host had its place {took_s:.1f} s after the other one was lost, and resumed after "
        f"{time.monotonic() - lost_s:.1f} s"
    )
    assert run.status() == 0, run.said
    assert not any(python_processes(host) for host in hosts)
    assert_equal_runs(tmp_path / "run", whole, STEPS)


def test_a_spare_host_takes_the_place_of_one_that_fails_twice(
    hosts: Hosts, data: Path, whole: Path, tmp_path: Path
) -> None:
    run = SpareRun(hosts, data, tmp_path / "run", max_restarts=2)
    run.wait_for_words("node3 waits as a spare host")
    run.wait_for_iteration(8)
    kill_rank(hosts[1])
    run.wait_for_words("rank 1 on node2 was killed by SIGKILL; restart 1 of 2")
    run.wait_for_words(": resumed ")  # the next checkpoint, at which the host is forgiven, is five steps away
    kill_rank(hosts[1])
    run.wait_for_words("rank 1 on node2 was killed by SIGKILL; restart 2 of 2")
    run.wait_for_words("node3 takes a place in the run")
    assert run.status() == 0, run.said
    assert "node2 waits as a spare host" in run.said
    assert not any(python_processes(host) for host in hosts)
    assert_equal_runs(tmp_path / "run", whole, STEPS)
