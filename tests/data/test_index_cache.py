"""Cache of index arrays: shared if possible, replaced by memory if not, and always checked."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index import index_cache
from megatron.data.index.index_cache import Arrays, ArraySpec, cached_arrays
from tests.data.datasets import write_dataset
from tests.ranks import HANG_S

SPECS = {"numbers": ArraySpec((5,), np.dtype(np.int32))}


class Builder:
    """Builder that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Arrays:
        self.count += 1
        return {"numbers": np.arange(5, dtype=np.int32)}


def test_existing_arrays_are_not_built(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        found = cached_arrays(tmp_path / "c", "key", SPECS, build).arrays["numbers"]
        assert found.tolist() == list(range(5))
        assert not found.flags.writeable
    assert build.count == 1
    cached_arrays(tmp_path / "c", "other", SPECS, build)
    assert build.count == 2


def refuse(error: OSError) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise error

    return refused


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("numpy.save", OSError(28, "No space left on device")),
        ("numpy.save", OSError("1250000 requested and 8192 written")),  # what ndarray.tofile says of a full disk
        ("os.fsync", OSError(5, "Input/output error")),
        ("os.replace", OSError(30, "Read-only file system")),
        ("pathlib.Path.mkdir", PermissionError(13, "Permission denied")),
        ("pathlib.Path.open", OSError(30, "Read-only file system")),
    ],
)
def test_on_a_full_or_read_only_disk_arrays_are_built_in_memory(
    tmp_path: Path, place: str, error: OSError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    monkeypatch.setattr(place, refuse(error))
    found = cached_arrays(tmp_path / "c", "key", SPECS, build).arrays["numbers"]
    monkeypatch.undo()
    assert found.tolist() == list(range(5))
    assert build.count == 1
    assert str(error.strerror or error) in caplog.text
    assert "--data-cache-path" in caplog.text
    assert not list(tmp_path.rglob("*.npy*"))
    cached_arrays(tmp_path / "c", "key", SPECS, build)  # once the disk is there again, it is used
    assert build.count == 2
    assert len(list(tmp_path.rglob("*.npy"))) == 1


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_arrays(tmp_path, "key", SPECS, Builder())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x93NUMPY\x01\x00",
        np.arange(6, dtype=np.int32),
        np.arange(5, dtype=np.int64),
        np.zeros((5, 1), np.int32),
    ],
    ids=["empty", "garbage", "header cut off", "longer", "wider", "another shape"],
)
def test_a_damaged_file_is_reported_and_rebuilt(
    tmp_path: Path, content: bytes | np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key-numbers.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    build = Builder()
    assert cached_arrays(tmp_path, "key", SPECS, build).arrays["numbers"].tolist() == list(range(5))
    assert build.count == 1
    assert "key-numbers.npy" in caplog.text
    assert "rebuilt" in caplog.text
    assert np.load(path).tolist() == list(range(5))


def test_a_folder_in_place_of_a_file_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key-numbers.npy").mkdir()
    assert cached_arrays(tmp_path, "key", SPECS, Builder()).arrays["numbers"].tolist() == list(range(5))
    assert "in memory" in caplog.text


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(3600)
"""


def test_the_lock_of_a_dead_process_is_released(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (tmp_path / ".lock").open("ab") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.send_signal(signal.SIGKILL)
    holder.wait(HANG_S)
    holder.stdout.close()
    (tmp_path / ".key-numbers.npy.partial-0123456789ab").write_bytes(b"half")  # what such a process leaves
    build = Builder()
    assert cached_arrays(tmp_path, "key", SPECS, build).arrays["numbers"].tolist() == list(range(5))
    assert build.count == 1


def test_a_file_system_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache.fcntl, "flock", refuse(OSError(95, "Operation not supported")))
    cached_arrays(tmp_path, "key", SPECS, Builder())
    assert (tmp_path / "key-numbers.npy").exists()


# Builds a split, and says the digest of what it read and how many arrays this process built itself.
RANK = """
import hashlib, sys
from megatron.options.config import DataConfig
from megatron.data import gpt, helpers
from megatron.data.gpt import build_datasets
built = []
build = gpt.GPTDataset._build_index
gpt.GPTDataset._build_index = lambda self: built.append(1) or build(self)
data = DataConfig(data_cache_path=sys.argv[1], split="1", **{sys.argv[2]: tuple(sys.argv[3:])})
train, _, _ = build_datasets(data, seq_length=4, seed=1, num_samples=(5000, 0, 0), vocab_size=60000)
digest = hashlib.sha256(train.get_batch(range(len(train))).tobytes()).hexdigest()
print(digest, train.fingerprint, sum(built))
"""


def start(folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RANK, str(folder), *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("option", "words", "members"),
    [
        ("data_path", "{a}", 1),
        ("data_path", "0.3 {a} 0.7 {b}", 2),
        ("data_path", "{a} {b}", 2),
        ("train_data_path", "0.3 {a} 0.7 {b}", 2),
    ],
    ids=["single", "by weight", "by size", "own path"],
)
def test_each_node_without_the_cache_builds_it_once_and_all_agree(
    tmp_path: Path, option: str, words: str, members: int
) -> None:
    """Two folders stand for the disks of two nodes, with two ranks each."""
    a, b = write_dataset(tmp_path / "a", [10] * 1500), write_dataset(tmp_path / "b", [7, 0, 30] * 500)
    given = [option, *words.format(a=a, b=b).split()]
    ranks = [start(tmp_path / node, given) for node in ("node0", "node0", "node1", "node1")]
    said = [rank.communicate(timeout=HANG_S)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len({(digest, fingerprint) for digest, fingerprint, _ in said}) == 1
    built = [int(count) for _, _, count in said]
    assert [built[0] + built[1], built[2] + built[3]] == [members, members]
    names = [sorted(path.name for path in (tmp_path / node).glob("*.npy")) for node in ("node0", "node1")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "node0" / name).read_bytes() == (tmp_path / "node1" / name).read_bytes()
