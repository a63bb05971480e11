"""Runs that go on from copies in memory: bit for bit as an undisturbed one, with every save that was cut short."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.chaos import differing
from megatron.checkpoint.reader import Checkpoint
from tests import runs
from tests.ranks import RankPools
from tests.resilience import copied

RANKS = 2
FLAGS = "--train-iters 6 --save-interval 3 --bf16 --tensor-model-parallel-size 2"
COPIES = "--peer-copy-interval 2"


@pytest.fixture(scope="module")
def died(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with copies of iterations 4 and 6 in memory, which looks as if it was killed in the save of iteration 6."""
    folder = tmp_path_factory.mktemp("died")
    runs.write_dataset(folder / "data")
    (folder / "memory").mkdir(mode=0o700)
    run(ranks, folder, FLAGS)
    shutil.copytree(folder / "saved", folder / "whole")
    cut_short(folder / "saved", 6, newest=3)
    return folder


@pytest.fixture
def again(died: Path, tmp_path: Path) -> Path:
    return shutil.copytree(died, tmp_path / "again")


def run(ranks: RankPools, folder: Path, flags: str, saved: str = "saved") -> list[str]:
    """Return what rank 0 says of a start: of what it resumed, and of copies."""
    command = f"{flags} {COPIES} --data-path {folder}/data --save {folder}/{saved}"
    said: Sequence[Sequence[str]] = ranks(RANKS)(copied.train, [str(folder / "memory")], command)
    return [line for line in said[0] if line.startswith("resumed ") or "in memory" in line]


def cut_short(saved: Path, iteration: int, newest: int) -> None:
    shutil.rmtree(saved / f"global_step{iteration}")
    text = (saved / "latest").read_text()
    (saved / "latest").write_text(text.replace(f"global_step{iteration}", f"global_step{newest}"))


@pytest.mark.parametrize("loads", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_restart_goes_on_from_the_newest_copy_and_saves_what_was_cut_short(
    ranks: RankPools, again: Path, loads: bool
) -> None:
    flags = f"{FLAGS} --load {again}/saved" if loads else FLAGS
    (line,) = run(ranks, again, flags)
    assert line.startswith(f"resumed {again}/memory/global_step6: weights, optimizer, random streams; iteration 6, ")
    assert differing(again / "saved", again / "whole") == []
    # now the disk has as much
    (line,) = run(ranks, again, flags)
    assert line.startswith(f"resumed {again}/saved/global_step6: ")


def test_a_torn_copy_is_passed_over_and_the_one_before_trains_to_the_same_bits(ranks: RankPools, again: Path) -> None:
    (again / "memory" / "global_step6" / "rank_00001.json").unlink()
    resumed, passed_over = run(ranks, again, FLAGS)
    assert passed_over.startswith("the copy of iteration 6 in memory is passed over: rank 1 had not completed it")
    assert resumed.startswith(f"resumed {again}/memory/global_step4: ")
    assert differing(again / "saved", again / "whole") == []


def test_a_damaged_checkpoint_gives_way_to_the_copy_of_its_iteration_not_to_an_older_checkpoint(
    ranks: RankPools, again: Path
) -> None:
    damaged = again / "whole" / "global_step6" / "rank_00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    resumed, instead = run(ranks, again, FLAGS, saved="whole")
    assert resumed.startswith(f"resumed {again}/memory/global_step6: ")
    assert instead == (
        f"{again}/memory/global_step6 in memory is loaded instead of {again}/whole/global_step3, which is older: the "
        "checkpoint of iteration 6 is damaged"
    )
    assert Checkpoint(again / "whole" / "global_step6").verify()


def test_copies_of_another_layout_are_passed_over_for_the_disk(ranks: RankPools, again: Path) -> None:
    resumed, *passed_over = run(ranks, again, FLAGS.replace("tensor", "pipeline"))
    for iteration, line in zip((6, 4), passed_over, strict=True):
        assert line.startswith(f"the copy of iteration {iteration} in memory is passed over: it was made on another ")
        assert "tensor_model_parallel_size=2, now 1" in line
    assert resumed.startswith(f"resumed {again}/saved/global_step3: ")


def test_a_run_that_had_saved_nothing_goes_on_from_memory_as_the_same_run(ranks: RankPools, again: Path) -> None:
    shutil.rmtree(again / "saved")
    run(ranks, again, FLAGS)
    assert differing(again / "saved", again / "whole") == []
    names = [json.loads((again / name / "latest").read_text().splitlines()[1])["id"] for name in ("saved", "whole")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_save_that_was_to_be_exported_is_not_left_out(ranks: RankPools, died: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir(mode=0o700)
    runs.write_dataset(tmp_path / "data")
    flags = FLAGS.replace("--save-interval 3", "--save-interval 100 --save-samples 24")  # 3 iterations
    run(ranks, tmp_path, flags)
    shutil.rmtree(tmp_path / "saved" / "global_step3")
    cut_short(tmp_path / "saved", 6, newest=3)
    for line in run(ranks, tmp_path, flags):
        assert "the save of iteration 3, to be exported or kept as the best, was cut short" in line
    assert differing(tmp_path / "saved", died / "whole") == []


def test_ranks_without_an_agent_that_restarts_them_are_refused(ranks: RankPools, died: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} {COPIES} --data-path {died}/data --save {tmp_path}/saved"
    for said in ranks(RANKS)(runs.train, flags):
        assert "start them by megatron-launch with --max-restarts (HL_MAX_RESTARTS), or leave it out" in said
