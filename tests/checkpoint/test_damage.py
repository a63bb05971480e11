"""Whatever befalls the files of a checkpoint is found before it is used, and the file named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.saver import Saver
from megatron.checkpoint.writer import write_checkpoint
from megatron.parallel.shards import Shard

SHARD = Shard((8, 6), dim=0, pieces=(4, 4))
VECTOR = Shard((6,))


def fragments_of(rank: int, seed: int = 0) -> Iterator[Fragment]:
    """Fragments of two tensor-parallel ranks, which have equal names and sizes."""
    values = torch.arange(24.0) + 100 * rank + 1000 * seed
    for kind in ("weight", "exp_avg"):
        yield Fragment("1.w", kind, SHARD, rank, 2, 0, values)
    if rank == 0:
        yield Fragment("1.b", "weight", VECTOR, 0, 1, 0, torch.arange(3.0) + seed)
    else:
        yield Fragment("1.b", "weight", VECTOR, 0, 1, 3, torch.arange(3.0) + seed)


def save(folder: Path, tag: str = "global_step1", seed: int = 0) -> Path:
    savers = [
        Saver(folder, rank=rank, world_size=2, asynchronous=True, keep_last=None, retain_interval=None, timeout_s=20.0)
        for rank in range(2)
    ]
    for rank, saver in enumerate(savers):
        saver.save(tag, f"token{seed}", fragments_of(rank, seed), {"seed": seed})
    for saver in savers:
        saver.wait()
    return folder / tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "save")


def fault(folder: Path) -> str:
    """Return the error of opening and verifying. Fails if there is none."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).verify()
    return str(caught.value)


def test_each_of_1000_random_bit_flips_is_found_and_its_file_named(folder: Path) -> None:
    Checkpoint(folder).verify()
    places = [(path, byte) for path in sorted(folder.iterdir()) for byte in range(path.stat().st_size)]
    # most of a small file is header: half of the flips go where the tensors are
    data = [(path, byte) for path, byte in places if path.suffix == ".safetensors" and byte >= 4096]
    source = random.Random(0)
    for flip in range(1000):
        path, byte = source.choice(places if flip % 2 else data)
        with path.open("r+b", buffering=0) as file:
            file.seek(byte)
            before = file.read(1)[0]
            file.seek(byte)
            file.write(bytes([before ^ 1 << source.randrange(8)]))
            try:
                assert str(path) in fault(folder), (path.name, byte)
            finally:
                file.seek(byte)
                file.write(bytes([before]))
    Checkpoint(folder).verify()


def test_a_damaged_tensor_is_named_with_its_bytes(folder: Path) -> None:
    path = folder / "rank_00001.safetensors"
    with path.open("r+b") as file:
        file.seek(4096 + 24 * 4 + 5)
        file.write(b"\xff")
    assert fault(folder).startswith(f"{path}: exp_avg of 1.w (bytes 4192 to 4288) has the checksum ")


def test_the_shares_of_verification_cover_everything_once(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for count in (1, 2, 3, 7, 50):
        shares = [checkpoint.share((index, count)) for index in range(count)]
        assert [at for share in shares for at in share] == list(checkpoint.fragments)
    path = folder / "rank_00001.safetensors"
    with path.open("r+b") as file:
        file.seek(4096 + 24 * 4 + 5)
        file.write(b"\xff")
    wrong = []
    for index in range(4):
        try:
            checkpoint.verify((index, 4))
        except CheckpointError as error:
            wrong.append(str(error))
    assert len(wrong) == 1


@pytest.mark.parametrize("name", ["checkpoint.json", "rank_00000.safetensors", "rank_00001.safetensors"])
def test_a_truncated_file_is_named(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for size in {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 4, len(whole) - 1, len(whole) + 1}:
        (folder / name).write_bytes((whole + b"\0")[:size])
        with pytest.raises(CheckpointError, match=name):
            Checkpoint(folder)


@pytest.mark.parametrize("name", ["checkpoint.json", "rank_00000.safetensors", "rank_00001.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is not there"):
        Checkpoint(folder)


def test_a_checkpoint_that_its_run_has_removed_is_not_called_damaged(folder: Path) -> None:
    """As where another process evaluates the newest checkpoint of a run with --keep-last 1."""
    opened = Checkpoint(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError, match="is not there any more; a run that goes on removes its"):
        opened.verify()


def test_swapped_files_are_found_at_opening(folder: Path) -> None:
    first, second = folder / "rank_00000.safetensors", folder / "rank_00001.safetensors"
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)
    with pytest.raises(CheckpointError, match=r"it is rank_00001\.safetensors of the save global_step1 token0, not"):
        Checkpoint(folder)


def test_a_file_of_another_save_is_found_at_opening(folder: Path) -> None:
    other = save(folder.parent, "global_step2", 2)
    shutil.copy(folder / "rank_00001.safetensors", other)
    with pytest.raises(
        CheckpointError,
        match=r"it is rank_00001\.safetensors of the save global_step1 token0, not rank_00001\.safetensors of "
        "global_step2 token2; copy it again",
    ):
        Checkpoint(other)
    loaded = newest_checkpoint(folder.parent)
    assert loaded is not None
    assert loaded.folder == folder


# ---------------------------------------------------------------------------------------------------------------------
# Manifests that are sealed, but say what cannot be


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and seal it as if it were ours."""
    path = folder / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    body = json.dumps(manifest, indent=1).removesuffix("\n}")
    seal = hashlib.sha256(f"{body}\n}}\n".encode()).hexdigest()
    path.write_text(f'{body},\n "sha256": "{seal}"\n}}\n')


def entries(manifest: dict[str, Any], rank: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest["files"][f"rank_{rank:05d}.safetensors"]["fragments"]
    return found


def rename_kind(manifest: dict[str, Any], old: str, new: str) -> None:
    for rank in range(2):
        for entry in entries(manifest, rank):
            entry["kind"] = new if entry["kind"] == old else entry["kind"]


def test_a_forged_seal_is_a_seal(folder: Path) -> None:
    forge(folder, lambda manifest: None)
    Checkpoint(folder).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=1), "its version is 1; only 2 is read: use the release that wrote it, or convert"),
        (lambda m: m.update(version=3), "its version is 3; only 2 is read: use the release that wrote it$"),
        (lambda m: m.update(format="other"), "its format is 'other'; only 'megatron-3d' is read"),
        (lambda m: m.pop("parameters"), "has no 'parameters'"),
        (lambda m: m.update(files=[]), r"files is \[\], not a dict"),
        (lambda m: m["parameters"].pop("1.b"), "has a fragment of '1.b', which is not a parameter"),
        (lambda m: m["parameters"].update({"2.x": m["parameters"]["1.b"]}), "there is no weight of 2.x"),
        (lambda m: m["parameters"]["1.b"].update(shape=[7]), r"elements \[6, 7\) of it are missing"),
        (
            lambda m: m["parameters"]["1.b"].update(shape=[5]),
            r"there are 6 elements of it, but \[5\], not sharded has 5",
        ),
        (lambda m: m["parameters"]["1.b"].update(shape=[-6]), "does not describe a shard"),
        (lambda m: m["parameters"]["1.b"].update(shape=["6"]), "does not describe a shard"),
        (lambda m: m["parameters"]["1.w"].update(dim=2), "does not describe a shard"),
        (lambda m: m["parameters"]["1.w"].update(pieces=[4, 5]), r"pieces \(4, 5\) do not add up"),
        (lambda m: m["parameters"]["1.w"].update(pieces=[3, 5]), "cannot be split over 2"),
        (lambda m: m["parameters"]["1.w"].update(dtype=7), "dtype is 7, not a str"),
        (lambda m: entries(m)[0].update(start=-1), "start is -1, not a count"),
        (lambda m: entries(m)[0].update(numel=1.5), "numel is 1.5, not a count"),
        (lambda m: entries(m)[0].update(numel=2**80), "not a count"),
        (lambda m: entries(m)[0].update(numel=2**40), "but its fragments have"),
        (lambda m: entries(m)[2].update(start=1), r"elements \[0, 1\) of it are missing"),
        (lambda m: entries(m, 1)[2].update(start=2), r"elements \[2, 3\) of it are there twice"),
        (lambda m: entries(m, 1)[2].update(start=0), r"elements \[0, 3\) of it are there twice"),
        (lambda m: entries(m, 1)[0].update(tensor_rank=0), "nothing of tensor rank 1 of 2 is there"),
        (lambda m: entries(m, 1)[0].update(tensor_rank=5), "a fragment is of tensor rank 5, but there are 2"),
        (lambda m: entries(m, 1)[0].update(tensor_size=4), "its fragments are of several layouts"),
        (lambda m: entries(m, 1)[0].update(padding=2), "its fragments are of several layouts"),
        (lambda m: entries(m)[2].update(tensor_size=0), "its fragments are of several layouts"),
        (lambda m: entries(m).pop(), r"weight of 1.b: elements \[0, 3\) of it are missing"),
        (lambda m: entries(m).append(entries(m)[2]), r"elements \[0, 3\) of it are there twice"),
        (lambda m: entries(m)[1].update(crc32=5, kind="weight", name="1.b"), "are there twice|layouts"),
        (lambda m: rename_kind(m, "exp_avg", "momentum_buffer"), "its header lists other tensors"),
        (lambda m: m["files"].pop("rank_00001.safetensors"), "weight of 1.w: nothing of tensor rank 1 of 2 is there"),
    ],
)
def test_a_sealed_manifest_that_cannot_be_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    forge(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../rank_00001.safetensors", "/etc/passwd", "rank_00001.safetensors/../x", "checkpoint.json", "", "rank_1.bin"],
)
def test_a_file_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop("rank_00001.safetensors")

    forge(folder, change)
    with pytest.raises(CheckpointError, match="is not the name of a rank's file"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["checkpoint.json", "rank_00001.safetensors"])
def test_links_and_pipes_are_not_followed(folder: Path, name: str) -> None:
    path, outside = folder / name, folder.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link, which is never followed"):
        Checkpoint(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        Checkpoint(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["checkpoint.json", "rank_00000.safetensors", "../latest"])
def test_a_pickle_in_place_of_a_file_is_never_executed(folder: Path, name: str) -> None:
    trap = folder.parent.parent / "executed"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (trap,))

    path = (folder / name).resolve()
    size = path.stat().st_size
    for content in (pickle.dumps(Payload()), pickle.dumps(Payload()).ljust(size, b" ")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=path.name):
            newest_checkpoint(folder.parent, fall_back=False)
        assert not trap.exists()
    torch.save(Payload(), path)
    with pytest.raises(CheckpointError, match=path.name):
        newest_checkpoint(folder.parent, fall_back=False)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload()))  # noqa: S301
    assert trap.exists(), "the trap does not work, so the test shows nothing"


def test_deeply_nested_json_is_no_crash(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="it is not JSON"):
        Checkpoint(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Folders that cannot be written


def in_child(function: Callable[[], None]) -> int:
    """Exit status of a forked process: 0 if the function returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def alone(folder: Path) -> Saver:
    return Saver(folder, rank=0, world_size=1, asynchronous=True, keep_last=None, retain_interval=None, timeout_s=20.0)


def test_a_read_only_folder_is_reported_before_training() -> None:
    def run() -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        for place in (closed, closed / "new"):
            with pytest.raises(CheckpointError, match=r"cannot be (written to|created): Permission denied; give a"):
                alone(place)
        with pytest.raises((CheckpointError, OSError), match="Permission denied"):
            write_checkpoint(closed, "global_step1", fragments_of(0), {})

    closed = Path(tempfile.mkdtemp())  # which others may enter, as pytest's may not be
    try:
        closed.chmod(0o555)
        assert in_child(run) == 0
        assert list(closed.iterdir()) == []
    finally:
        closed.rmdir()


@pytest.mark.parametrize("limit_bytes", [100, 3000, 5000, 40_000, 3 << 20])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, limit_bytes: int) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle, with EFBIG for ENOSPC."""
    shard = Shard((1 << 20,))
    save_folder = tmp_path / "save"

    def fragments(value: float) -> list[Fragment]:
        return [Fragment("1.w", "weight", shard, 0, 1, 0, torch.full((1 << 20,), value))]

    write_checkpoint(save_folder, "global_step1", fragments(1.0), {})

    def run() -> None:
        saver = alone(save_folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for _ in range(2):
            saver.save("global_step2", "token", fragments(2.0), {})
            with pytest.raises(CheckpointError, match=r"saving global_step2 failed on rank 0: .*File too large"):
                saver.wait()
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(save_folder, "global_step3", fragments(2.0), {})

    assert in_child(run) == 0
    assert {path.name for path in save_folder.iterdir()} - {".global_step2.failed-token"} == {
        ".lock",
        "global_step1",
        "latest",
    }
    checkpoint = newest_checkpoint(save_folder)
    assert checkpoint is not None
    checkpoint.verify()
    assert torch.equal(checkpoint.read_full("1.w"), torch.ones(1 << 20))
