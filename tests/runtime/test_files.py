"""A file that is replaced is whole at every moment, and on the disk before its name is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.reader import read_latest
from megatron.generation.jsonl import _is_result
from megatron.observability.run_plots import PlotError, read_run
from megatron.runtime.files import parse_json, replacing, sync_folder, write_durably
from megatron.weights.deepspeed.deepspeed_checkpoint import _progress
from megatron.weights.folder_files import read_json

DEEP = "[" * 100_000


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Order of what reaches the disk: `sync` of a file or folder by its name, `replace` by the old one."""
    made: list[str] = []
    sync, replace = os.fsync, os.replace

    def logged_sync(descriptor: int) -> None:
        made.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def logged_replace(source: Any, target: Any) -> None:
        made.append(f"replace {Path(source).name} {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(os, "replace", logged_replace)
    return made


def test_a_written_file_is_synced(tmp_path: Path, calls: list[str]) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"an older and longer one")
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert calls == ["sync note"]


def test_a_replaced_file_is_synced_before_its_name_and_the_folder_after(tmp_path: Path, calls: list[str]) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    with replacing(path, partial_name="state.partial") as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert (tmp_path / "state.partial").read_bytes() == b"new"
    assert path.read_bytes() == b"new"
    assert calls == ["sync state.partial", "replace state.partial state.json", f"sync {tmp_path.name}"]
    assert os.listdir(tmp_path) == ["state.json"]


def test_two_that_replace_one_file_at_a_time_are_both_whole(tmp_path: Path) -> None:
    path = tmp_path / "array"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"one")
        second.write(b"two")
        assert all(name.startswith(".array.partial-") for name in os.listdir(tmp_path))
    assert path.read_bytes() == b"one"  # whose block ended last
    assert os.listdir(tmp_path) == ["array"]


@pytest.mark.parametrize("failing", ["block", "fsync", "replace"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_else(
    failing: str, fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise fault

    def replace() -> None:
        with replacing(path) as file:
            file.write(b"new")
            if failing == "block":
                fails()

    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    if failing != "block":
        monkeypatch.setattr(os, failing, fails)
    with pytest.raises(type(fault)):
        replace()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "state.partial").write_bytes(b"what a killed process had written so far")
    with replacing(tmp_path / "state.json", partial_name="state.partial") as file:
        file.write(b"new")
    assert (tmp_path / "state.json").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_file_system_that_cannot_sync_folders_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", cannot)
    sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_before
    with pytest.raises(OSError, match="Invalid argument"):  # a file's content is another matter
        write_durably(tmp_path / "note", b"lost")


def test_json_that_is_nested_too_deeply_is_a_damaged_file(tmp_path: Path) -> None:
    """Whoever reads JSON of a disk catches ValueError: Python's own parser raises RecursionError for such a text."""
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    for name in ("progress.json", "metrics.jsonl"):
        (tmp_path / name).write_text(f"{DEEP}\n")
    (tmp_path / "latest").write_text(f"global_step1\n{DEEP}")
    assert read_latest(tmp_path) == ("global_step1", None)
    for read in (_progress, lambda folder: read_json(folder / "progress.json")):
        with pytest.raises(CheckpointError, match="nested too deeply"):
            read(tmp_path)
    with pytest.raises(PlotError, match="line 1: it is nested too deeply"):
        read_run(tmp_path)
    assert not _is_result(DEEP.encode(), {})
