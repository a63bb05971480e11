"""Saving by many ranks: in the background, retention, failures, and kills at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import newest_checkpoint
from megatron.checkpoint.saver import SaveResult
from megatron.checkpoint.writer import write_checkpoint
from tests.checkpoint.states import assert_holds, fragments_of, newest, save_by_threads, saver, write


def test_memory_can_be_changed_once_an_asynchronous_save_has_returned(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    owned = list(fragments_of(0, 1, 1))
    one.reserve(owned)
    addresses = {one._buffer.data_ptr()}
    for iteration in (1, 2, 3):
        one.save(f"global_step{iteration}", f"token{iteration}", owned, {"progress": {"iteration": 0}})
        addresses.add(one._buffer.data_ptr())
        for fragment in owned:
            fragment.tensor.add_(1.0)
        one.wait()
        for fragment in owned:
            fragment.tensor.sub_(1.0)
        owned = list(fragments_of(0, 1, 1))
    assert [outcome.tag for outcome in one.finished()] == ["global_step1", "global_step2", "global_step3"]
    assert one.finished() == []
    assert len(addresses) == 1, "the host buffer is allocated once"
    for iteration in (1, 2, 3):
        assert_holds(newest(tmp_path, tag=f"global_step{iteration}"))


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = threading.Event()
    go_on = threading.Event()
    sync = os.fsync

    def slow_sync(file: int) -> None:
        under_way.set()
        assert go_on.wait(20)
        sync(file)

    monkeypatch.setattr(os, "fsync", slow_sync)
    one = saver(tmp_path, asynchronous=True)
    one.save("global_step1", "a", fragments_of(0, 1, 1, 1), {"progress": {"iteration": 1}})
    assert under_way.wait(20)
    assert one.finished() == []
    threading.Timer(0.1, go_on.set).start()
    one.save("global_step2", "b", fragments_of(0, 1, 1, 2), {"progress": {"iteration": 2}})
    assert newest(tmp_path, tag="global_step1").tag == "global_step1"
    one.wait()
    assert_holds(newest(tmp_path), 2)


def test_metadata_is_that_of_the_call(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    metadata = {"progress": {"iteration": 0}, "nested": [1, {"a": None}], "text": "ü\n", "float": 0.1, "large": 2**100}
    one.save("global_step1", "a", fragments_of(0, 1, 1), metadata)
    expected = json.loads(json.dumps(metadata))
    metadata["progress"] = {"iteration": 5}
    one.wait()
    assert newest(tmp_path).metadata == expected


def test_what_fails_while_streaming_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, "global_step1", 1)

    def breaks() -> Iterator[Fragment]:
        yield from list(fragments_of(0, 1, 1))[:4]
        raise CheckpointError("the source is damaged")

    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_checkpoint(tmp_path, "global_step1", breaks(), {})
    with pytest.raises(CheckpointError, match="there is nothing to save in it"):
        write_checkpoint(tmp_path, "global_step1", [], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    assert_holds(newest(tmp_path), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Keeping and replacing


def tags(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))


def test_the_newest_and_every_so_many_are_kept(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=2, retain_interval=30)
    for iteration in range(10, 110, 10):
        one.save(f"global_step{iteration}", f"token{iteration}", fragments_of(0, 1, 1), {})
        one.wait()
    assert tags(tmp_path) == [30, 60, 90, 100]
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".lock"]


@pytest.mark.parametrize(
    ("retain_interval", "kept"),
    [(None, [[10], [10, 20], [10, 20, 30], [10, 20, 30, 40]]), (20, [[10], [20], [20, 30], [20, 40]])],
)
def test_without_keep_last_all_are_kept_or_with_a_retain_interval_the_newest(
    tmp_path: Path, retain_interval: int | None, kept: list[list[int]]
) -> None:
    """The interval alone as in Megatron: the checkpoint before is removed unless it is a multiple."""
    one = saver(tmp_path, keep_last=None, retain_interval=retain_interval)
    for iteration, left in zip(range(10, 50, 10), kept, strict=True):
        one.save(f"global_step{iteration}", f"token{iteration}", fragments_of(0, 1, 1), {})
        assert tags(tmp_path) == left


def test_the_one_just_saved_is_kept_even_if_it_has_the_lowest_number(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=1)
    for iteration in (300, 100, 200):  # a run that went back
        one.save(f"global_step{iteration}", f"token{iteration}", fragments_of(0, 1, 1), {})
        assert newest(tmp_path).tag == f"global_step{iteration}"
    assert tags(tmp_path) == [200, 300]


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("global_step5", "tensorboard", "notes3"):
        (tmp_path / name).mkdir(parents=True)
    one = saver(tmp_path, keep_last=1)
    for iteration in (1, 2):
        one.save(f"global_step{iteration}", f"token{iteration}", fragments_of(0, 1, 1), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "global_step2",
        "global_step5",
        "latest",
        "notes3",
        "tensorboard",
    ]


def test_a_tag_is_written_over(tmp_path: Path) -> None:
    save_by_threads(tmp_path, "global_step7", 2, 2, seed=1, token="a")
    save_by_threads(tmp_path, "global_step7", 1, 3, seed=2, token="b")
    assert_holds(newest(tmp_path), 2)
    write(tmp_path, "global_step7", 3)
    assert_holds(newest(tmp_path), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "global_step7", "latest"]


def test_leftovers_of_dead_runs_go_at_the_first_save(tmp_path: Path) -> None:
    write(tmp_path, "global_step1", 1)
    shutil.copytree(tmp_path / "global_step1", tmp_path / ".global_step8.replaced-dead")
    for name in (".global_step9.partial-dead", ".global_step3.deleted-dead", ".global_step1.replaced-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").touch()
    for name in (".global_step9.failed-dead", ".global_step9.failed-dead.3", ".global_step9.latest-dead", ".other"):
        (tmp_path / name).touch()
    one = saver(tmp_path)
    assert len(list(tmp_path.iterdir())) == 11
    one.save("global_step10", "token", fragments_of(0, 1, 1), {"progress": {"iteration": 0}})
    one.wait()
    whole = ["global_step1", "global_step10", "global_step8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".other", *whole, "latest"]
    assert_holds(newest(tmp_path, tag="global_step8"), 1)


# ---------------------------------------------------------------------------------------------------------------------
# What fails


def in_child(function: Callable[[], int]) -> int:
    """A forked process that ends with what the function returns. Returns its id."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def other() -> int:
        saver(tmp_path)
        os.write(writing, b"x")
        signal.pause()
        return 0

    child = in_child(other)
    os.read(reading, 1)
    with pytest.raises(CheckpointError, match=f"is in use by another run \\(process {child} on .*own"):
        saver(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saver(tmp_path)


def test_a_closed_saver_leaves_the_folder_to_another_process(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    one.save("global_step1", "a", fragments_of(0, 1, 1), {"progress": {"iteration": 0}})
    one.close()
    one.close()
    assert_holds(newest(tmp_path))

    def other() -> int:
        saver(tmp_path)
        return 0

    assert os.waitpid(in_child(other), 0)[1] == 0


def failures(outcomes: Sequence[SaveResult]) -> list[str]:
    return [str(outcome.error) for outcome in outcomes]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_on_one_rank_is_reported_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, asynchronous: bool
) -> None:
    save_by_threads(tmp_path, "global_step1", 1, 3, seed=1, token="a")
    savers = [saver(tmp_path, rank, 3, asynchronous=asynchronous) for rank in range(3)]
    sync = os.fsync

    def full_disk(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(f"rank_{failing:05d}.safetensors"):
            raise OSError(28, "No space left on device", "the file")
        sync(file)

    def save_all(tag: str, token: str) -> None:
        def run(rank: int) -> None:
            savers[rank].save(tag, token, fragments_of(rank, 1, 3, 2), {"progress": {"iteration": 2}})

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    monkeypatch.setattr(os, "fsync", full_disk)
    save_all("global_step2", "b")
    for rank, each in enumerate(savers):
        with pytest.raises(CheckpointError) as caught:
            each.wait()
        assert str(caught.value) == f"saving global_step2 failed on rank {failing}: the file: No space left on device"
        each.wait()  # reported once
        assert each.finished() == [], rank
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".global_step2.failed-b",
        ".lock",
        "global_step1",
        "latest",
    ]
    assert_holds(newest(tmp_path), 1)
    monkeypatch.setattr(os, "fsync", sync)
    save_all("global_step2", "c")
    for each in savers:
        each.wait()
        assert [outcome.error for outcome in each.finished()] == [None]
    assert_holds(newest(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "global_step1", "global_step2", "latest"]


def test_a_write_that_fails_once_is_repeated_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, calls = os.fsync, []

    def fails_once(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise OSError(5, "Input/output error", "the file")
        sync(file)

    monkeypatch.setattr(os, "fsync", fails_once)
    one = saver(tmp_path, asynchronous=True)
    one.save("global_step1", "a", fragments_of(0, 1, 1), {"progress": {"iteration": 0}})
    one.wait()
    (outcome,) = one.finished()
    assert outcome.error is None
    assert outcome.retried == "the file: Input/output error"
    assert_holds(newest(tmp_path))


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    savers = [saver(tmp_path, rank, 4, asynchronous=True, timeout_s=0.2) for rank in (0, 2)]
    for rank, each in zip((0, 2), savers, strict=True):
        each.save("global_step1", "a", fragments_of(rank, 1, 4), {})
    for each in savers:
        with pytest.raises(CheckpointError, match="failed on rank 0: timeout after 0 s without a sign of ranks 1, 3"):
            each.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".global_step1.failed-a", ".lock"]


def test_ranks_give_up_when_rank_0_has_died(tmp_path: Path) -> None:
    one = saver(tmp_path, 1, 2, timeout_s=0.1)
    one.save("global_step1", "a", fragments_of(1, 1, 2), {})
    with pytest.raises(CheckpointError, match="failed on rank 1: timeout after 0 s without a sign of rank 0"):
        one.wait()
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_leaves_by_an_error_does_not_wait_for_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr("megatron.checkpoint.saver.LEAVING_TIMEOUT_S", 0.1)
    one = saver(tmp_path, 1, 2, asynchronous=True, timeout_s=600.0)
    one.save("global_step1", "a", fragments_of(1, 1, 2), {})
    one.leave(lost=lost)
    [outcome] = one.finished()
    reason = "another rank has ended" if lost else "timeout after 0 s without a sign of rank 0"
    assert str(outcome.error) == f"saving global_step1 failed on rank 1: {reason}"
    assert (tmp_path / ".global_step1.failed-a").read_text() == str(outcome.error)


def test_a_rank_that_leaves_by_its_own_error_finishes_what_the_others_continue(tmp_path: Path) -> None:
    savers = [saver(tmp_path, rank, 2, asynchronous=True, timeout_s=600.0) for rank in range(2)]
    for rank, each in enumerate(savers):
        each.save("global_step1", "a", fragments_of(rank, 1, 2, 1), {"progress": {"iteration": 1}})
    savers[1].leave(lost=False)
    savers[0].wait()
    assert [outcome.error for each in savers for outcome in each.finished()] == [None, None]
    assert_holds(newest(tmp_path), 1)


def test_a_rank_may_own_nothing(tmp_path: Path) -> None:
    savers = [saver(tmp_path, rank, 2, asynchronous=True) for rank in range(2)]
    savers[1].save("global_step1", "a", [], {})
    savers[0].save("global_step1", "a", fragments_of(0, 1, 1), {"progress": {"iteration": 0}})
    for each in savers:
        each.wait()
    assert_holds(newest(tmp_path))


def test_an_incomplete_state_gets_no_name(tmp_path: Path) -> None:
    one = saver(tmp_path)
    one.save("global_step1", "a", list(fragments_of(0, 1, 1))[1:], {})
    with pytest.raises(CheckpointError, match=r"there is no weight of 0\.norm\.weight"):
        one.wait()
    one.save("global_step2", "b", fragments_of(0, 2, 1), {})
    with pytest.raises(CheckpointError, match=r"weight of 1\.qkv\.weight: nothing of tensor rank 1 of 2 is there"):
        one.wait()
    assert newest_checkpoint(tmp_path) is None


# ---------------------------------------------------------------------------------------------------------------------
# Killed


COUNTED = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def die_at(call: int) -> None:
    """From now on: end, as by SIGKILL, at the nth call that changes the file system; a write gets half done."""
    left = call

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*positional: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    function(positional[0], positional[1][: len(positional[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*positional, **named)

        return stand_in

    for name in COUNTED:
        setattr(os, name, counted(name, getattr(os, name)))


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: these tests are about the order of calls, not about the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def run_ranks(folder: Path, victim: int, call: int, *, others_live_on: bool) -> bool:
    """Three ranks replace global_step5 and add global_step6; one dies at a call. False: it ended by itself."""

    def run(rank: int) -> int:
        if rank == victim:
            die_at(call)
        one = saver(folder, rank, 3, asynchronous=rank != 1, keep_last=1, timeout_s=0.1 if others_live_on else 20.0)
        for tag, seed in (("global_step5", 2), ("global_step6", 3)):
            one.save(tag, f"token{seed}", fragments_of(rank, 1, 3, seed), {"progress": {"iteration": seed}})
        one.wait()
        return 0

    children = [in_child(partial(run, rank)) for rank in range(3)]
    _, status = os.waitpid(children[victim], 0)
    for rank, child in enumerate(children):
        if rank != victim:
            if not others_live_on and os.WIFSIGNALED(status):
                os.kill(child, signal.SIGKILL)  # as a launcher does
            os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def assert_next_run_goes_on(folder: Path) -> int:
    """A whole checkpoint is found, and another can be saved, which clears up. Returns what was found."""
    checkpoint = newest(folder)
    seed: int = checkpoint.metadata["progress"]["iteration"]
    assert_holds(checkpoint, seed)
    one = saver(folder, keep_last=1)
    one.save("global_step7", "token9", fragments_of(0, 1, 1, 9), {"progress": {"iteration": 9}})
    one.wait()
    assert_holds(newest(folder), 9)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "global_step7", "latest"]
    return seed


@pytest.mark.parametrize(
    ("victim", "every"),
    [(0, 2), (1, 2), *(pytest.param(victim, 1, marks=pytest.mark.slow) for victim in range(3))],
)
def test_a_kill_of_any_rank_at_any_change_of_the_file_system_leaves_a_whole_checkpoint(
    memory_path: Path, victim: int, every: int
) -> None:
    """Or at every second one."""
    found = set()
    for call in range(1, 1000, every):
        folder = memory_path / str(call)
        write(folder, "global_step5", 1)
        was_killed = run_ranks(folder, victim, call, others_live_on=False)
        found.add(assert_next_run_goes_on(folder))
        if not was_killed:
            break
    assert found == {1, 2, 3}
    assert call > (50 if victim == 0 else 10)


@pytest.mark.parametrize(("victim", "calls"), [(0, range(1, 50, 9)), (2, range(1, 11, 3))])
def test_ranks_that_live_on_do_no_harm(memory_path: Path, victim: int, calls: range) -> None:
    for call in calls:
        folder = memory_path / str(call)
        write(folder, "global_step5", 1)
        run_ranks(folder, victim, call, others_live_on=True)
        assert_next_run_goes_on(folder)
