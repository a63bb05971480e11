"""Copies of states in memory: a checkpoint like any other, in two files a rank, that a fault never passes for whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.copies import RankCopies, copied_bytes, held_bytes, part_paths, read_part, write_manifest
from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from tests.checkpoint.states import assert_holds, fragments_of, write

RANKS = 4
METADATA = '{"progress": {"iteration": STEP}}'


def copy(folder: Path, step: int, kept: int | None, copies: list[RankCopies], *, whole: bool = True) -> None:
    for rank, each in enumerate(copies):
        each.copy(step, "token", list(fragments_of(rank, 2, 2, seed=step)), kept)
        if whole or rank:
            each.complete(METADATA.replace("STEP", str(step)) if rank == 0 else "")


def ranks_of(folder: Path, kept: int | None = None) -> list[RankCopies]:
    return [RankCopies(folder, rank, RANKS, kept) for rank in range(RANKS)]


def test_a_copy_is_a_checkpoint_in_memory_that_is_used_again_and_again(tmp_path: Path) -> None:
    copies = ranks_of(tmp_path)
    memory: set[int] = set()
    for step, kept in ((10, None), (20, 10), (30, 20), (40, 30)):
        copy(tmp_path, step, kept, copies)
        assert_holds(Checkpoint(write_manifest(tmp_path, step, RANKS)), seed=step)
        files = list(tmp_path.glob("*/*.safetensors"))
        memory |= {path.stat().st_ino for path in files}
    assert len(memory) == len(files) == 2 * RANKS, "two of each rank, the same all the time"
    assert {path.parent.name for path in part_paths(tmp_path)} == {"global_step30", "global_step40"}
    sizes = [copied_bytes(list(fragments_of(rank, 2, 2))) for rank in range(RANKS)]
    assert sum(path.stat().st_size for path in files) == 2 * sum(sizes)
    assert held_bytes(tmp_path) >= 2 * sum(sizes)


def test_the_file_is_the_one_that_a_save_writes(tmp_path: Path) -> None:
    copies = RankCopies(tmp_path / "memory", 0, 1, None)
    (tmp_path / "memory").mkdir()
    copies.copy(7, "token", list(fragments_of(0, 1, 1, 7)), None)
    copies.complete(METADATA.replace("STEP", "7"))
    ours = Checkpoint(write_manifest(tmp_path / "memory", 7, 1))
    saved = Checkpoint(write(tmp_path / "disk", "global_step7", seed=7))
    assert [(at.name, at.kind, at.start, at.numel, at.crc32) for at in ours.fragments] == [
        (at.name, at.kind, at.start, at.numel, at.crc32) for at in saved.fragments
    ]


def test_a_rank_killed_in_a_copy_leaves_the_one_before_whole(tmp_path: Path) -> None:
    copies = ranks_of(tmp_path)
    copy(tmp_path, 10, None, copies)
    copy(tmp_path, 20, 10, copies)
    copy(tmp_path, 30, 20, copies, whole=False)  # over that of iteration 10
    assert_holds(Checkpoint(write_manifest(tmp_path, 20, RANKS)), seed=20)
    with pytest.raises(CheckpointError, match=r"rank_00000\.json is not there"):
        write_manifest(tmp_path, 30, RANKS)


def test_a_later_attempt_takes_over_the_memory_and_keeps_the_copy_it_began_at(tmp_path: Path) -> None:
    copies = ranks_of(tmp_path)
    copy(tmp_path, 10, None, copies)
    copy(tmp_path, 20, 10, copies)
    memory = {path.stat().st_ino for path in tmp_path.glob("*/*.safetensors")}
    later = ranks_of(tmp_path, kept=10)
    assert {path.parent.name for path in part_paths(tmp_path)} == {"global_step10"}
    copy(tmp_path, 15, 10, later, whole=False)
    assert_holds(Checkpoint(write_manifest(tmp_path, 10, RANKS)), seed=10)
    assert {path.stat().st_ino for path in tmp_path.glob("*/*.safetensors")} == memory
    ranks_of(tmp_path, kept=None)
    assert part_paths(tmp_path) == [], "after a start from the disk no older copy is left to begin at"


@pytest.mark.parametrize("is_restart", [False, True], ids=["rollback", "restart from the disk"])
def test_iterations_that_come_again_leave_two_files_and_one_of_them_whole(tmp_path: Path, *, is_restart: bool) -> None:
    copies = ranks_of(tmp_path)
    for step, kept in ((10, None), (20, 10), (30, 20)):
        copy(tmp_path, step, kept, copies)
    if is_restart:
        copies = ranks_of(tmp_path, kept=None)
    else:
        for each in copies:
            each.discard()
    assert part_paths(tmp_path) == []
    for step, kept in ((20, None), (30, 20), (40, 30)):
        copy(tmp_path, step, kept, copies)
        for whole in filter(None, (kept, step)):
            assert_holds(Checkpoint(write_manifest(tmp_path, whole, RANKS)), seed=whole)
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 2 * RANKS


def test_a_file_is_never_renamed_over_another(tmp_path: Path) -> None:
    copies = RankCopies(tmp_path, 0, 1, None)
    copies.open(1, 64, None)
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "global_step2" / "rank_00000.safetensors").write_bytes(b"another")
    with pytest.raises(FileExistsError):
        copies.open(2, 64, None)
    assert (tmp_path / "global_step2" / "rank_00000.safetensors").read_bytes() == b"another"


def test_memory_that_is_full_fails_before_anything_is_written(tmp_path: Path) -> None:
    copies = RankCopies(tmp_path, 0, 1, None)
    with pytest.raises(OSError):
        copies.open(1, 1 << 60, None)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert copies.open(1, 64, None).dtype == torch.uint8


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.replace(b'"rank": 0', b'"rank": 1'),
        lambda text: b"0" * 64 + text[64:],
        lambda text: b"",
        lambda text: b"[" * 100_000,
    ],
)
def test_a_damaged_part_is_refused(tmp_path: Path, damage: object) -> None:
    copy(tmp_path, 10, None, ranks_of(tmp_path))
    path = tmp_path / "global_step10" / "rank_00000.json"
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"rank_00000\.json"):
        read_part(path)


def test_a_part_of_another_rank_or_step_is_refused(tmp_path: Path) -> None:
    copy(tmp_path, 10, None, ranks_of(tmp_path))
    (tmp_path / "global_step10" / "rank_00001.json").rename(tmp_path / "global_step10" / "rank_00002.json")
    with pytest.raises(CheckpointError, match="it is that of rank 1, iteration 10"):
        read_part(tmp_path / "global_step10" / "rank_00002.json")
    (tmp_path / "global_step10").rename(tmp_path / "global_step11")
    with pytest.raises(CheckpointError, match="it is that of rank 0, iteration 10"):
        read_part(tmp_path / "global_step11" / "rank_00000.json")
