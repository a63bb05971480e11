"""Folders of torch.distributed.checkpoint: boxes of the tensors that torch itself wrote, and each damage by name."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron.checkpoint.format import CheckpointError
from megatron.weights.distributed.folder import DistributedFolder
from tests.weights import dcp_files

TENSORS = dcp_files.tensors()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "step"
    dcp_files.save(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "step"))


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Write the metadata again as `edit` leaves it."""
    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def some_file(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_every_box_is_read_as_it_was_written(written: Path) -> None:
    """Chunks by rows, columns, both, unevenly, of a stack and of a transposed tensor; each box within them."""
    folder = DistributedFolder(written)
    assert len(folder.tensors["grid"].chunks) == 4
    for name, tensor in TENSORS.items():
        assert torch.equal(folder.read(name), tensor)
        bounds = [itertools.combinations(range(size + 1), 2) for size in tensor.shape]
        for box in itertools.product(*bounds):
            found = folder.read(name, [begin for begin, _ in box], [end for _, end in box])
            assert torch.equal(found, tensor[tuple(slice(*each) for each in box)]), (name, box)


def test_a_box_is_read_into_another_dtype_and_part_of_a_tensor(written: Path) -> None:
    target = torch.zeros(4, 9)
    DistributedFolder(written).read_into(target[:, 2:5], "grid", (3, 1))
    expected = torch.zeros(4, 9)
    expected[:, 2:5] = TENSORS["grid"][3:7, 1:4]
    assert torch.equal(target, expected)


def test_rows_of_one_of_a_stack(written: Path) -> None:
    stored = DistributedFolder(written).stored("stack", (2,), rows=(1, 3))
    assert stored.shape == (2, 5)
    assert torch.equal(stored.rows(0, 2), TENSORS["stack"][2, 1:3])
    assert torch.equal(stored.matrix(1, 2, (2, 4)), TENSORS["stack"][2, 2:3, 2:4])


def test_an_object_is_read_as_plain_values(written: Path) -> None:
    folder = DistributedFolder(written)
    assert folder.object("progress.seen") == [1.5, "text"]
    assert folder.object("progress.step") == 7
    assert torch.equal(folder.read("progress.mean"), torch.ones(2))


def test_checksums_are_shared_by_ranks(folder: Path) -> None:
    number = sum(len(tensor.chunks) for tensor in DistributedFolder(folder).tensors.values())
    assert f"{number} chunks" in DistributedFolder(folder).verify((0, 2))
    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    info = some_file(metadata, "whole")
    flip(folder / info.relative_path, info.offset + info.length // 2)
    faults = []
    for share in (0, 1):
        try:
            DistributedFolder(folder).verify((share, 2))
        except CheckpointError as error:
            faults.append(str(error))
    assert len(faults) == 1
    assert "whole" in faults[0]
    # what was not damaged is read all the same
    assert DistributedFolder(folder).read("rows").shape == (7, 5)
    with pytest.raises(CheckpointError, match=r"distcp.*whole"):
        DistributedFolder(folder).read("whole", (0, 0), (1, 1))


def test_a_changed_bit_of_a_tensor_is_found_wherever_it_is(folder: Path) -> None:
    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    info = some_file(metadata, "vector")
    path = folder / info.relative_path
    content = path.read_bytes()
    for at in range(info.offset, info.offset + info.length, 11):
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([content[at] ^ (1 << at % 8)]), at)
            with pytest.raises(CheckpointError, match=path.name):
                DistributedFolder(folder).verify(names=["vector"])
            os.pwrite(file.fileno(), content[at : at + 1], at)
    DistributedFolder(folder).verify()


class Bomb:
    """Writes a file when its pickle is opened by one that executes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_the_metadata_is_executed(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"

    def plant(metadata: Any) -> None:
        metadata.planner_data = Bomb(proof)

    change(folder, plant)
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it names .*touch"):
        DistributedFolder(folder)
    assert not proof.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - the plant works
    assert proof.exists()


def test_nothing_in_a_tensor_is_executed(folder: Path, tmp_path: Path) -> None:
    """The pickle of a chunk, with right checksums."""
    proof = tmp_path / "executed"
    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    info = some_file(metadata, "whole")
    hostile = folder / "hostile.distcp"
    torch.save(Bomb(proof), hostile)

    def plant(metadata: Any) -> None:
        place = some_file(metadata, "whole")
        place.relative_path, place.offset, place.length = hostile.name, 0, hostile.stat().st_size

    assert info.relative_path != hostile.name
    change(folder, plant)
    with pytest.raises(CheckpointError, match=r"hostile\.distcp: whole at \[0, 0\] is refused: it names"):
        DistributedFolder(folder).read("whole")
    assert not proof.exists()


def shift(name: str, offsets: tuple[int, ...]) -> Callable[[Any], None]:
    """Move the last chunk of a tensor, and the place of its bytes, to these offsets."""

    def edit(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[name].chunks
        last = chunks.pop()
        info = metadata.storage_data.pop(MetadataIndex(name, last.offsets))
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), last.sizes))
        metadata.storage_data[MetadataIndex(name, offsets)] = info

    return edit


def drop_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["grid"].chunks.pop()


def drop_file(metadata: Any) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "grid"}


def rename(name: str) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        some_file(metadata, "grid").relative_path = name

    return edit


def move(offset: int) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        some_file(metadata, "grid").offset = offset

    return edit


def transform(metadata: Any) -> None:
    some_file(metadata, "grid").transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (shift("columns", (0, 2)), r"chunks of 'columns' at .* overlap"),
        (shift("columns", (0, 7)), r"chunk of 'columns' at \(0, 7\) of .* is outside"),
        (drop_chunk, r"chunks of 'grid' have 36 of its 48 elements"),
        (drop_file, r"names no file for \"?'?grid"),
        (rename("__9_0.distcp"), r"__9_0\.distcp is missing"),
        (rename("../step/__0_0.distcp"), r"names '\.\./step/__0_0\.distcp' as a file of its own"),
        (rename("/etc/passwd"), r"only plain file names"),
        (move(10**9), r"distcp has \d+ bytes, but \.metadata has grid at .*truncated"),
        (move(-8), r"grid at .*\[-8, "),
        (move(3), r"distcp is damaged or truncated|is not a tensor as torch\.save writes it|files of two checkpoints"),
        (transform, r"transformed by .*zstd"),
    ],
)
def test_each_damage_of_the_metadata_is_named(folder: Path, edit: Callable[[Any], None], fault: str) -> None:
    change(folder, edit)
    with pytest.raises(CheckpointError, match=fault):
        DistributedFolder(folder).verify()


def test_files_of_two_checkpoints_are_named(folder: Path) -> None:
    """A chunk of another size at the place of one."""

    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["whole"]
        entry.size = torch.Size((4, 3))
        entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=torch.Size((4, 3)))

    change(folder, edit)
    with pytest.raises(CheckpointError, match=r"is \[3, 4\] of torch\.float32, but \.metadata makes it \[4, 3\]"):
        DistributedFolder(folder).read("whole")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_truncated_files_are_named(folder: Path, part: float) -> None:
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(path, int(part * path.stat().st_size))
    with pytest.raises(CheckpointError, match=path.name):
        DistributedFolder(folder).verify()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"text", b"\x80\x04]q\x00.", pickle.dumps({"a": 1})])
def test_other_metadata_is_named(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is refused"):
        DistributedFolder(folder)


def test_cut_metadata_is_named(folder: Path) -> None:
    content = (folder / ".metadata").read_bytes()
    for length in range(0, len(content), 101):
        (folder / ".metadata").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata is refused"):
            DistributedFolder(folder)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    path = next(iter(folder.glob("*.distcp")))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        DistributedFolder(folder)
