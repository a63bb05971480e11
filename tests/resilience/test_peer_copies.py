"""A restart from copies in memory: all ranks take the same one, or say why none, and then the disk's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.folders import CheckpointError
from megatron.resilience import job
from megatron.resilience.peer_copies import agents_folder
from tests.ranks import RankFailure, RankPools
from tests.resilience import copied

RANKS = 2


def agents(tmp_path: Path, count: int) -> list[str]:
    """Folders in the memory of the agents of so many hosts."""
    folders = [tmp_path / f"memory{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True)
    return [str(folder) for folder in folders]


def files(folder: str) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in Path(folder).glob("*/rank_*.safetensors")}


def test_the_newest_whole_copy_is_found_and_older_than_the_disk_it_is_not_used(
    ranks: RankPools, tmp_path: Path
) -> None:
    memory = agents(tmp_path, 1)
    assert ranks(RANKS)(copied.keep, memory, [10, 20, 30]) == [[10, 20]] * RANKS, "30 is not yet known to be whole"
    assert ranks(RANKS)(copied.reopen, memory, 0) == [(30, [])] * RANKS
    assert ranks(RANKS)(copied.reopen, memory, 30) == [(None, [])] * RANKS
    # the next attempt begins at it, and goes on
    assert ranks(RANKS)(copied.keep, memory, [40], kept=30) == [[]] * RANKS
    assert ranks(RANKS)(copied.reopen, memory, 0) == [(40, [])] * RANKS


def test_a_copy_that_one_rank_alone_has_completed_is_passed_over_by_all(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 1)
    ranks(RANKS)(copied.keep, memory, [10, 20])
    ranks(RANKS)(copied.tear, memory, 30, kept=20)
    line = "the copy of iteration 30 in memory is passed over: rank 1 had not completed it, or its memory is lost"
    assert ranks(RANKS)(copied.reopen, memory, 0) == [(20, [line])] * RANKS
    # the disk has as much as the whole one
    assert ranks(RANKS)(copied.reopen, memory, 20) == [(None, [line])] * RANKS


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a bit of a tensor", lambda copy: flip(copy / "rank_00001.safetensors", -5), "has the checksum"),
    ("a bit of a header", lambda copy: flip(copy / "rank_00001.safetensors", 40), "rank_00001.safetensors"),
    ("a bit of a part", lambda copy: flip(copy / "rank_00001.json", 200), "its checksum is not that of its text"),
    ("a file cut off", lambda copy: (copy / "rank_00000.safetensors").write_bytes(b"0" * 64), "it has 64 bytes"),
    ("a file gone", lambda copy: (copy / "rank_00000.safetensors").unlink(), "is not there"),
    ("a link", lambda copy: linked(copy / "rank_00000.safetensors"), "is a link, which is never followed"),
]


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_a_damaged_copy_is_named_and_not_used(
    ranks: RankPools, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    memory = agents(tmp_path, 1)
    ranks(RANKS)(copied.keep, memory, [10, 20])
    damage(Path(memory[0], "global_step20"))
    for step, lines in ranks(RANKS)(copied.reopen, memory, 10):
        assert step is None
        assert len(lines) == 1
        assert lines[0].startswith("the copy of iteration 20 in memory is passed over: ")
        assert said in lines[0]


def test_copies_of_another_number_of_ranks_are_passed_over(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 1)
    ranks(4)(copied.keep, memory, [10])
    said = "the copy of iteration 10 in memory is passed over: it was made by 4 ranks, and there are 2"
    assert ranks(RANKS)(copied.reopen, memory, 0) == [(None, [said])] * RANKS
    # their memory is given back by those that come
    ranks(RANKS)(copied.keep, memory, [20])
    assert files(memory[0]) == {f"global_step20/rank_{rank:05d}.safetensors" for rank in range(RANKS)}


def test_a_host_that_is_lost_leaves_its_copies_on_the_next_one(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 2)
    ranks(4)(copied.keep, memory, [10, 20, 30])
    everything = {f"global_step{step}/rank_{rank:05d}.safetensors" for step in (20, 30) for rank in range(4)}
    assert files(memory[0]) == files(memory[1]) == everything
    shutil.rmtree(memory[1])
    Path(memory[1]).mkdir(mode=0o700)  # that of the host in its place
    assert ranks(4)(copied.reopen, memory, 0) == [(30, [])] * 4


def test_neighbours_that_are_lost_take_a_copy_with_them(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 4)
    ranks(4)(copied.keep, memory, [10])
    assert [len(files(folder)) for folder in memory] == [2] * 4, "its rank's own, and that of the host before"
    for folder in memory[::2]:
        shutil.rmtree(folder)
        Path(folder).mkdir(mode=0o700)
    assert ranks(4)(copied.reopen, memory, 0) == [(10, [])] * 4
    assert [len(files(folder)) for folder in memory] == [4] * 4, "each host reads its own memory"
    ranks(4)(copied.keep, memory, [20, 30], kept=10)
    assert [len(files(folder)) for folder in memory] == [4] * 4, "two copies of two ranks again"
    for folder in memory[:2]:
        shutil.rmtree(folder)
        Path(folder).mkdir(mode=0o700)
    said = [f"the copy of iteration {step} in memory is passed over: rank 0 had not completed it" for step in (30, 20)]
    for step, lines in ranks(4)(copied.reopen, memory, 0):
        assert step is None
        assert [line.partition(", or")[0] for line in lines] == said


def test_an_error_where_a_copy_is_to_lie_reaches_the_neighbour_at_once(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(RANKS)(copied.refuse, agents(tmp_path, 2)) == [
        "rank 1 on the next host did not take it",
        "that of rank 0 cannot be taken: KeyError: 'unforeseen'",
    ]


def test_a_restart_over_three_hosts_has_room_for_the_copies_that_it_brings(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 3)
    ranks(6)(copied.keep, memory, [10])
    own = [{f"global_step10/rank_{rank:05d}.safetensors" for rank in range(first, first + 2)} for first in (0, 2, 4)]
    assert [files(folder) for folder in memory] == [own[host] | own[host - 1] for host in range(3)]
    assert ranks(6)(copied.reopen, memory, 0) == [(10, [])] * 6
    assert [files(folder) for folder in memory] == [set.union(*own)] * 3, "each rank reads what others have saved"
    # 2 of each of 4 ranks, and 1 of the other 2
    said = ranks(6)(copied.reserve, memory, 1 << 50)
    assert "each rank's state, and in a restart one of those of other hosts, take 10485760.00 GiB of the" in said[0]


def test_memory_that_does_not_suffice_is_refused_on_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 1)
    assert ranks(RANKS)(copied.reserve, memory, 1 << 20) == [""] * RANKS
    said = ranks(RANKS)(copied.reserve, memory, 1 << 50)
    assert "CheckpointError: peer_copy_interval: 2 copies of each rank's state take 4194304.00 GiB" in said[0]


def test_the_memory_of_a_container_does_not_suffice_where_the_hosts_does(ranks: RankPools, tmp_path: Path) -> None:
    memory, groups = agents(tmp_path, 1), tmp_path / "cgroup"
    for folder, limit, used in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder.mkdir()
        # 8 MiB are left
        for name, text in ((limit, 12 << 20), (used, 4 << 20), ("memory.stat", "inactive_file 0")):
            (folder / name).write_text(f"{text}\n")
    assert ranks(RANKS)(copied.reserve, memory, 2 << 20, str(groups)) == [""] * RANKS
    said = ranks(RANKS)(copied.reserve, memory, (2 << 20) + 1, str(groups))
    assert "take 0.01 GiB of the memory of" in said[0]
    assert f"0.01 GiB are free, in {tmp_path} and within the limit of a container" in said[0]


def test_the_remedy_is_restarts_or_memory_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job.COPIES, raising=False)
    with pytest.raises(CheckpointError, match="start them by megatron-launch with --max-restarts"):
        agents_folder()
    monkeypatch.setenv(job.COPIES, job.NO_MEMORY)
    with pytest.raises(CheckpointError, match="could make no folder in /dev/shm"):
        agents_folder()


def test_memory_of_another_user_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    memory = agents(tmp_path, 1)
    Path(memory[0]).chmod(0o755)
    with pytest.raises(RankFailure, match="is not a folder of this user alone"):
        ranks(RANKS)(copied.keep, memory, [10])
