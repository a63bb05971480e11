"""Disks that hosts do not share: what works, and what is refused at the start, on every rank, with the hosts named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron.resilience import host_consistency as sharing
from tests import runs
from tests.ranks import RankPools

DATA = "--data-path text --data-cache-path cache --lr-decay-style constant"


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    """Of two hosts, each with a copy of the data."""
    folders = [tmp_path / "disk0", tmp_path / "disk1"]
    for folder in folders:
        folder.mkdir()
        runs.write_dataset(folder / "text")
    return [str(folder) for folder in folders]


def test_each_host_may_have_its_own_data_and_index_cache(ranks: RankPools, disks: list[str], tmp_path: Path) -> None:
    flags = f"--train-iters 3 --pipeline-model-parallel-size 2 {DATA}"
    assert ranks(2)(runs.train_apart, disks, f"{flags} --save {tmp_path}/saved --results-dir apart") == ["", ""]
    names = [sorted(path.name for path in Path(disk, "cache").glob("*.npy")) for disk in disks]
    assert names[0] == names[1] != []
    assert ranks(2)(runs.train_apart, disks[:1] * 2, f"{flags} --results-dir shared") == ["", ""]
    losses = [[row["lm_loss"] for row in runs.rows(Path(disks[0], results))] for results in ("apart", "shared")]
    assert losses[0] == losses[1]
    assert not Path(disks[1], "apart").exists(), "rank 0 alone writes results"


def test_other_data_on_a_host_is_refused(ranks: RankPools, disks: list[str]) -> None:
    runs.write_dataset(Path(disks[1], "text"), seed=1)
    for said in ranks(2)(runs.train_apart, disks, f"--train-iters 3 {DATA}"):
        assert said.startswith("DataError: data_path=text: the data on ")
        assert "(rank 1) differs from that on " in said
        assert "copy it again" in said


def saved_once(ranks: RankPools, disks: list[str], tmp_path: Path) -> Path:
    flags = f"--train-iters 2 --save {tmp_path}/saved {DATA}"
    assert ranks(2)(runs.train_apart, disks, flags) == ["", ""]
    return tmp_path / "saved"


def test_an_unshared_folder_to_save_to_is_refused_and_left_as_it_was(ranks: RankPools, disks: list[str]) -> None:
    for folder in disks:
        Path(folder, "saved").mkdir()
    for said in ranks(2)(runs.train_apart, disks, f"--train-iters 3 --save saved {DATA}"):
        assert said.startswith("CheckpointError: save=saved is not one folder: what ")
        assert "(rank 0) writes there is not seen on " in said
        assert "(rank 1); put it on a file system that all hosts share" in said
    assert [os.listdir(Path(folder, "saved")) for folder in disks] == [[".lock"], []]


def test_checkpoints_are_resumed_from_equal_copies(ranks: RankPools, disks: list[str], tmp_path: Path) -> None:
    saved = saved_once(ranks, disks, tmp_path)
    for disk in disks:
        shutil.copytree(saved, Path(disk, "saved"))
    assert ranks(2)(runs.train_apart, disks, f"--train-iters 3 --load saved {DATA}") == ["", ""]


@pytest.mark.parametrize("where", ["rank 0 alone", "rank 1 alone", "another one"])
def test_a_checkpoint_that_some_hosts_lack_is_refused(
    ranks: RankPools, disks: list[str], tmp_path: Path, where: str
) -> None:
    saved = saved_once(ranks, disks, tmp_path)
    there = {"rank 0 alone": [0], "rank 1 alone": [1], "another one": [0, 1]}[where]
    for host in there:
        shutil.copytree(saved, Path(disks[host], "saved"))
    if where == "another one":
        manifest = Path(disks[1], "saved", "global_step2", "checkpoint.json")
        manifest.write_text(manifest.read_text() + " ")
    for said in ranks(2)(runs.train_apart, disks, f"--train-iters 3 --load saved {DATA}"):
        expected = "no checkpoint on" if where == "rank 1 alone" else "global_step2 on"
        assert said.startswith(f"CheckpointError: load=saved holds {expected} ")
        assert "(rank 1); put it on a file system that all hosts share, or copy it" in said


def test_other_options_on_a_host_are_refused(ranks: RankPools, disks: list[str]) -> None:
    for disk, seed in zip(disks, (1, 2), strict=True):
        Path(disk, "own.yaml").write_text(f"training:\n  seed: {seed}\n")
    for said in ranks(2)(runs.train_apart, disks, f"--config own.yaml --train-iters 3 {DATA}"):
        assert "  - training.seed: " in said
        assert "(rank 0); use the same code and presets on every host" in said


def test_a_folder_that_a_host_may_not_write_to_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    for said in ranks(2)(runs.share_a_folder_that_rank_one_may_not_write_to, str(tmp_path)):
        assert said.startswith(f"CheckpointError: save={tmp_path} cannot be written to on ")
        assert "(rank 1) (Read-only file system); give a folder that every host may write to" in said
    assert os.listdir(tmp_path) == []


def test_hosts_are_named_once_and_not_by_the_thousand() -> None:
    places = [f"node{rank // 8} (rank {rank})" for rank in range(8000)]
    assert sharing._apart(places, [0] * 8000) == ""
    assert sharing._apart(places, [0] * 16 + [1] * 9 + [0] * 7975) == "node2 (rank 16), node3 (rank 24)"
    assert sharing._apart(places, [0] * 8 + [1] * 7992).endswith("node8 (rank 64) and 991 more hosts")
