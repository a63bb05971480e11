"""The .bin/.idx format: its bytes, the checks of its reader, the atomicity of its builder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.index import checksums, indexed_builder
from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import DTYPES, DataError, IndexedDataset, best_dtype
from megatron.data.index.indexed_builder import BuilderState, IndexedDatasetBuilder
from megatron.data.index.work_folder import WorkFolder
from tests.data.datasets import open_dataset, write_dataset


def idx_bytes(lengths: list[int], item_bytes: int, code: int, documents: list[int]) -> bytes:
    pointers = [item_bytes * sum(lengths[:i]) for i in range(len(lengths))]
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def test_builder_writes_the_format_byte_for_byte(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([1, 2, 65535])
        builder.add_document([4, 5, 6, 7], lengths=[1, 3])
        builder.add_documents(np.array([8, 9, 10]), [2, 1])
        builder.finalize()
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<10H", 1, 2, 65535, 4, 5, 6, 7, 8, 9, 10)
    assert (tmp_path / "d.idx").read_bytes() == idx_bytes([3, 1, 3, 2, 1], 2, 8, [0, 1, 3, 4, 5])
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx", "d.sha256"]


@pytest.mark.parametrize(("code", "dtype"), DTYPES.items())
def test_reader_reads_hand_made_bytes_of_every_dtype(tmp_path: Path, code: int, dtype: np.dtype[np.generic]) -> None:
    (tmp_path / "d.bin").write_bytes(np.array([1, 2, 3, 4, 5, 6], dtype).tobytes())
    (tmp_path / "d.idx").write_bytes(idx_bytes([2, 0, 4], dtype.itemsize, code, [0, 1, 3]))
    data = IndexedDataset(tmp_path / "d")
    assert (len(data), data.num_documents, data.num_tokens, data.dtype) == (3, 2, 6, dtype)
    assert [data.read(i).tolist() for i in range(3)] == [[1, 2], [], [3, 4, 5, 6]]
    assert data.read(2, offset=1, length=2).tolist() == [4, 5]
    assert data.read(2, offset=3).tolist() == [6]
    assert data.lengths.tolist() == [2, 0, 4]
    assert data.document_index.tolist() == [0, 1, 3]
    assert data.pointers.tolist() == [0, 2 * dtype.itemsize, 2 * dtype.itemsize]
    assert data.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    data.release_memory()
    assert data.read(2).tolist() == [3, 4, 5, 6]


def test_modes_of_a_multimodal_index_are_ignored(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3])
    with (tmp_path / "d.idx").open("ab") as file:
        file.write(b"\x00\x01")
    assert IndexedDataset(tmp_path / "d").read(1).tolist() == [2, 3, 4]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32), (250880, np.int32)])
def test_best_dtype_is_megatrons(vocab_size: int, dtype: type) -> None:
    assert best_dtype(vocab_size) == dtype


def test_reads_outside_a_sequence_are_refused(tmp_path: Path) -> None:
    data = open_dataset(tmp_path / "d", [2, 3])
    for sequence, offset, length in [(2, 0, None), (-1, 0, None), (0, 0, 3), (0, 2, 1), (0, -1, 1), (1, 1, -1)]:
        with pytest.raises(IndexError):
            data.read(sequence, offset, length)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, at: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)


IDX_FAULTS = {
    "no magic": (lambda p: overwrite(p, 0, b"X"), "not a Megatron index"),
    "legacy": (lambda p: overwrite(p, 0, b"TNTIDX\x00\x00"), "TNTIDX"),
    "version": (lambda p: overwrite(p, 9, b"\x02"), "version 2"),
    "dtype code": (lambda p: overwrite(p, 17, b"\x09"), "dtype code 9"),
    "another dtype": (lambda p: overwrite(p, 17, b"\x04"), "describes"),
    "sequence count": (lambda p: overwrite(p, 18, b"\x07"), "sequences"),
    "document count": (lambda p: overwrite(p, 26, b"\x07"), "document entries"),
    "huge count": (lambda p: overwrite(p, 18, b"\xff" * 8), "cut off or damaged"),
    "header cut": (lambda p: cut(p, 20), "header"),
    "tables cut": (lambda p: cut(p, 50), "cut off"),
    "empty": (lambda p: cut(p, 0), "is empty"),
    "first pointer": (lambda p: overwrite(p, 34 + 12, struct.pack("<q", 2)), "not 0"),
    "last pointer": (lambda p: overwrite(p, 34 + 12 + 16, struct.pack("<q", 99)), "describes"),
    "last length": (lambda p: overwrite(p, 34 + 8, struct.pack("<i", 5)), "describes"),
    "first document": (lambda p: overwrite(p, 34 + 36, struct.pack("<q", 1)), "document index"),
    "last document": (lambda p: overwrite(p, 34 + 36 + 24, struct.pack("<q", 2)), "document index"),
    "missing": (lambda p: p.unlink(), "does not exist"),
}


@pytest.mark.parametrize("fault", IDX_FAULTS)
def test_a_damaged_idx_is_refused_at_open(tmp_path: Path, fault: str) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    damage, message = IDX_FAULTS[fault]
    damage(tmp_path / "d.idx")
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / "d.idx") in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 16, 17, 20])
def test_a_bin_of_the_wrong_size_is_refused_at_open(tmp_path: Path, size: int) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    (tmp_path / "d.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"d\.bin"):
        IndexedDataset(tmp_path / "d")


def test_end_of_document_tokens_left_out_of_the_lengths_are_recognised(tmp_path: Path) -> None:
    """Output of --append-eod of older tools: every pointer is off by the number of documents before it."""
    (tmp_path / "d.bin").write_bytes(bytes(2 * (2 + 3 + 2)))
    (tmp_path / "d.idx").write_bytes(idx_bytes([2, 3], 2, 8, [0, 1, 2]))
    with pytest.raises(DataError, match="end-of-document tokens without counting them"):
        IndexedDataset(tmp_path / "d")


def test_a_dataset_of_no_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"\x00\x00")
    (tmp_path / "d.idx").write_bytes(idx_bytes([], 2, 8, [0]))
    with pytest.raises(DataError, match="no documents"):
        IndexedDataset(tmp_path / "d")


def test_a_pointer_outside_the_bin_is_an_error_when_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    overwrite(tmp_path / "d.idx", 34 + 12 + 8, struct.pack("<q", 1 << 40))
    data = IndexedDataset(tmp_path / "d")
    assert data.read(0).tolist() == [0, 1]
    with pytest.raises(DataError, match="sequence 1 lies at byte"):
        data.read(1)
    with pytest.raises(DataError, match="their pointers"):
        data.count_tokens(range(2))


def test_a_damaged_length_is_an_error_when_counted(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    overwrite(tmp_path / "d.idx", 34 + 4, struct.pack("<i", 1))
    with pytest.raises(DataError, match=r"d\.idx: the lengths of sequences 0 to 3"):
        IndexedDataset(tmp_path / "d").count_tokens(range(3))


def test_a_prefix_with_its_suffix_is_explained(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2])
    with pytest.raises(DataError, match=r"without \.bin"):
        IndexedDataset(tmp_path / "d.bin")


def test_ids_that_do_not_fit_are_refused_not_wrapped(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        for wrong in (65536, -1):
            with pytest.raises(DataError, match=f"token id {wrong}"):
                builder.add_document([1, wrong])
        with pytest.raises(DataError, match="not integers"):
            builder.add_document(np.array([1.5]))
        with pytest.raises(DataError, match="add up to 2"):
            builder.add_document([1, 2, 3], lengths=[2])
        builder.add_document([7])
        builder.finalize()
    assert IndexedDataset(tmp_path / "d").read(0).tolist() == [7]


def test_a_builder_leaves_nothing_after_an_exception(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
            builder.add_document([1])
            builder.seal()
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert os.listdir(tmp_path) == []


def test_a_builder_without_tokens_keeps_the_old_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3])
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([])
        with pytest.raises(DataError, match="no tokens"):
            builder.finalize()
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx", "d.sha256"]
    assert len(IndexedDataset(tmp_path / "d")) == 2


def test_the_fingerprint_depends_on_content_not_on_the_path(tmp_path: Path) -> None:
    first = open_dataset(tmp_path / "a", [2, 3])
    (tmp_path / "elsewhere").mkdir()
    assert open_dataset(tmp_path / "elsewhere" / "b", [2, 3]).fingerprint == first.fingerprint
    assert open_dataset(tmp_path / "c", [3, 2]).fingerprint != first.fingerprint
    assert open_dataset(tmp_path / "e", [2, 3], np.int32).fingerprint != first.fingerprint
    overwrite(write_dataset(tmp_path / "f", [2, 3]).with_suffix(".bin"), 4, b"\x09")
    assert IndexedDataset(tmp_path / "f").fingerprint != first.fingerprint


# ---------------------------------------------------------------------------------------------------------------------
# The builder's work folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that tiny datasets have many."""
    monkeypatch.setattr(indexed_builder, "BLOCK_ENTRIES", 3)
    monkeypatch.setattr(checksums, "COPY_BYTES", 8)


def files(folder: Path, name: str = "d") -> dict[str, bytes]:
    return {suffix: (folder / f"{name}.{suffix}").read_bytes() for suffix in ("bin", "idx", "sha256")}


ADDITIONS: list[Callable[[IndexedDatasetBuilder], None]] = [
    lambda b: b.add_documents(np.arange(9), [2, 0, 3, 4]),
    lambda b: b.add_document([1, 2, 3]),
    lambda b: b.add_document([7, 8, 9], lengths=[1, 2]),
    lambda b: b.add_document([], lengths=[]),
    lambda b: b.add_documents(np.arange(5, dtype=np.uint16), [5]),
    lambda b: b.add_document([6, 6], lengths=[0, 2]),
]
ADDED_LENGTHS = [2, 0, 3, 4, 3, 1, 2, 5, 0, 2]
ADDED_DOCUMENTS = [0, 1, 2, 3, 4, 5, 7, 7, 8, 10]


def test_datasets_of_many_blocks_are_whole(tmp_path: Path, small_blocks: None) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        for add in ADDITIONS:
            add(builder)
        builder.finalize()
    assert (tmp_path / "d.idx").read_bytes() == idx_bytes(ADDED_LENGTHS, 2, 8, ADDED_DOCUMENTS)
    assert (builder.num_documents, builder.num_sequences, builder.num_tokens) == (9, 10, 22)


def test_memory_does_not_grow_with_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_builder, "BLOCK_ENTRIES", 1 << 10)
    monkeypatch.setattr(checksums, "COPY_BYTES", 1 << 12)
    tokens, lengths = np.zeros(1000, np.uint16), np.ones(1000, np.int64)
    tracemalloc.start()
    try:
        with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
            for _ in range(500):
                builder.add_documents(tokens, lengths)
            builder.add_document([1, 2], lengths=[1, 1])  # from here on the ends are listed, too
            builder.finalize()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert builder.num_documents == 500_001
    assert peak_bytes < 2 * 500_001  # less than 2 bytes a document, where a length alone takes 4


@pytest.mark.parametrize("saved_after", range(len(ADDITIONS) + 1))
def test_a_killed_builder_resumed_writes_the_same_files(tmp_path: Path, small_blocks: None, saved_after: int) -> None:
    notes = {"tokenizer": {"type": "X"}}
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16, notes=notes) as builder:
        for add in ADDITIONS:
            add(builder)
        builder.finalize()
    whole = files(tmp_path)

    (tmp_path / "again").mkdir()
    prefix, work = tmp_path / "again" / "d", tmp_path / "again" / "work"
    killed = IndexedDatasetBuilder(prefix, np.uint16, notes=notes, work_dir=work)
    for add in ADDITIONS[:saved_after]:
        add(killed)
    state = BuilderState.from_json(json.loads(json.dumps(killed.save_state().to_json())))
    for add in ADDITIONS[saved_after:]:
        add(killed)
    killed.save_state()
    killed.close()
    with (work / "dataset.bin").open("ab") as file:
        file.write(b"torn")

    with IndexedDatasetBuilder.resume(prefix, np.uint16, state, notes=notes, work_dir=work) as resumed:
        assert resumed.save_state() == state
        for add in ADDITIONS[saved_after:]:
            add(resumed)
        resumed.finalize()
    assert files(tmp_path / "again") == whole
    assert sorted(os.listdir(tmp_path / "again")) == ["d.bin", "d.idx", "d.sha256"]


def test_an_incomplete_work_folder_is_not_resumed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=work) as builder:
        builder.add_document([1, 2, 3], lengths=[1, 2])
        state = builder.save_state()
    for name in ("dataset.bin", "lengths.int32", "document_ends.int64"):
        path = work / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(DataError, match=f"{name} has {len(content) - 1} bytes, less than the {len(content)}"):
            IndexedDatasetBuilder.resume(tmp_path / "d", np.uint16, state, work_dir=work)
        path.write_bytes(content)
    with IndexedDatasetBuilder.resume(tmp_path / "d", np.uint16, state, work_dir=work) as builder:
        builder.seal()
    assert WorkFolder(work).is_sealed
    with pytest.raises(DataError, match="sealed"):
        IndexedDatasetBuilder.resume(tmp_path / "d", np.uint16, state, work_dir=work)


@pytest.mark.parametrize("change", [{"num_tokens": -1}, {"num_tokens": 1.0}, {"num_tokens": None}, {"more": 1}])
def test_an_invalid_saved_state_is_refused(change: dict[str, Any]) -> None:
    for content in ({}, BuilderState(1, 1, 1).to_json() | change):
        with pytest.raises(DataError, match="not a saved state"):
            BuilderState.from_json(content)


def test_a_given_work_folder_survives_an_exception_until_abandoned(tmp_path: Path) -> None:
    work = tmp_path / "work"

    def fail_halfway() -> None:
        with IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=work) as builder:
            builder.add_document([1])
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert os.listdir(tmp_path) == ["work"]
    with pytest.raises(DataError, match="already holds an unfinished dataset"):
        IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=work)
    IndexedDatasetBuilder.resume(tmp_path / "d", np.uint16, BuilderState(), work_dir=work).abandon()
    assert os.listdir(tmp_path) == []


def test_a_work_folder_on_another_file_system_is_refused(tmp_path: Path) -> None:
    here = tmp_path.stat().st_dev
    folders = [Path(name) for name in ("/dev/shm", "/var/tmp") if os.access(name, os.W_OK)]
    others = [folder for folder in folders if folder.stat().st_dev != here]
    if not others:
        pytest.skip("needs a second file system, at /dev/shm or /var/tmp")
    work = others[0] / f"indexed-test-{os.getpid()}"
    try:
        with pytest.raises(DataError, match="different file systems"):
            IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=work)
    finally:
        shutil.rmtree(work)


def test_absorbing_builders_equals_adding_their_documents(tmp_path: Path, small_blocks: None) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as whole:
        for add in [*ADDITIONS, *ADDITIONS[:2], *ADDITIONS[:2]]:
            add(whole)
        whole.finalize()
    (tmp_path / "parts").mkdir()
    with (
        IndexedDatasetBuilder(tmp_path / "parts" / "d", np.uint16) as joined,
        IndexedDatasetBuilder(tmp_path / "parts" / "a", np.uint16) as irregular,
        IndexedDatasetBuilder(tmp_path / "parts" / "b", np.uint16) as regular,
        IndexedDatasetBuilder(tmp_path / "parts" / "c", np.int32) as wide,
    ):
        for add in ADDITIONS:
            add(irregular)
        for add in ADDITIONS[:2]:
            add(regular)
        for part in (irregular, regular, regular):
            joined.absorb(part)
        with pytest.raises(DataError, match="cannot be joined"):
            joined.absorb(wide)
        regular.add_document([5])  # the absorbed one goes on as if nothing had happened
        regular.finalize()
        joined.finalize()
    assert files(tmp_path / "parts") == files(tmp_path)
    assert IndexedDataset(tmp_path / "parts" / "b").lengths.tolist() == [2, 0, 3, 4, 3, 1]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", range(13))
def test_publishing_killed_at_any_step_leaves_no_mismatched_pair_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    old = files(tmp_path)
    work = tmp_path / "work"
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=work) as builder:
        builder.add_document([9] * 9)  # as many bytes: an old .idx would fit it
        builder.seal()
    left = iter(range(steps))

    def killing(real: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: Any, **options: Any) -> None:
            if next(left, None) is None:
                raise Killed
            real(*arguments, **options)

        return step

    with monkeypatch.context() as patched:
        for owner, name in ((os, "replace"), (Path, "unlink"), (Path, "rmdir")):
            patched.setattr(owner, name, killing(getattr(owner, name)))
        try:
            WorkFolder(work).publish(tmp_path / "d")
        except Killed:
            pass
        else:
            assert steps == 12
    if (tmp_path / "d.idx").exists():
        assert (tmp_path / "d.bin").read_bytes() == (old["bin"] if WorkFolder(work).is_sealed else b"\x09\x00" * 9)
    elif (tmp_path / "d.sha256").exists():
        checksums = read_checksums(tmp_path / "d")
        assert checksums is not None
        assert checksums.sha256[".bin"] == hashlib.sha256((tmp_path / "d.bin").read_bytes()).hexdigest()
    WorkFolder(work).publish(tmp_path / "d")
    WorkFolder(work).publish(tmp_path / "d")
    assert IndexedDataset(tmp_path / "d").read(0).tolist() == [9] * 9
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx", "d.sha256"]


def test_an_unfinished_or_missing_work_folder_is_not_published(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3])
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16, work_dir=tmp_path / "work") as builder:
        builder.add_document([1])
    for work, prefix in ((tmp_path / "work", "d"), (tmp_path / "none", "never")):
        with pytest.raises(DataError, match="no finished dataset to publish"):
            WorkFolder(work).publish(tmp_path / prefix)
    assert len(IndexedDataset(tmp_path / "d")) == 2
    assert (tmp_path / "work" / "dataset.bin").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Checksums


def test_the_checksum_file_is_read_by_sha256sum_and_holds_notes(tmp_path: Path) -> None:
    notes = {"tokenizer": {"type": "Ünï\n# code", "vocab_size": 7}, "append_eod": True}
    name = "odd\\na\nme"
    with IndexedDatasetBuilder(tmp_path / name, np.uint16, notes=notes) as builder:
        builder.add_documents(np.arange(1000), [400, 600])
        builder.finalize()
    found = read_checksums(tmp_path / name)
    assert found is not None
    assert found.notes == notes
    assert found.sha256 == {
        suffix: hashlib.sha256((tmp_path / (name + suffix)).read_bytes()).hexdigest() for suffix in (".bin", ".idx")
    }
    if shutil.which("sha256sum"):
        check = ["sha256sum", "--check", "--strict", f"{name}.sha256"]
        assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
        (tmp_path / f"{name}.bin").write_bytes(b"other")
        assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_a_renamed_dataset_keeps_its_checksums_and_one_without_them_is_fine(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3])
    for suffix in (".bin", ".idx", ".sha256"):
        (tmp_path / f"d{suffix}").rename(tmp_path / f"e{suffix}")
    found = read_checksums(tmp_path / "e")
    assert found is not None
    found.compare("e", ".bin", hashlib.sha256((tmp_path / "e.bin").read_bytes()).hexdigest())
    (tmp_path / "e.sha256").unlink()
    assert read_checksums(tmp_path / "e") is None
    assert len(IndexedDataset(tmp_path / "e")) == 2


DIGEST = "0" * 64
MALFORMED_CHECKSUMS = {
    "empty": ("", ":1: ''"),
    "no digest": (f"{DIGEST}  d.bin\nhello\n", ":2: 'hello' is not a line of sha256sum"),
    "short digest": (f"{DIGEST[1:]}  d.bin\n", ":1: .* is not a line"),
    "another file": (f"{DIGEST}  d.txt\n", ":1: .* is not a line"),
    "twice": (f"{DIGEST}  d.bin\n{DIGEST}  d.idx\n{DIGEST}  e.bin\n", r":3: .* is a second one for \.bin"),
    "half": (f"{DIGEST}  d.bin\n", r"no line for the \.idx"),
    "note": (f"# tokenizer: {{\n{DIGEST}  d.bin\n{DIGEST}  d.idx\n", ":1: the note 'tokenizer' is not JSON"),
    "binary": ("\x00\x01\udcff", ":1: "),
}


@pytest.mark.parametrize("fault", MALFORMED_CHECKSUMS)
def test_a_malformed_checksum_file_is_refused_with_its_line(tmp_path: Path, fault: str) -> None:
    content, message = MALFORMED_CHECKSUMS[fault]
    (tmp_path / "d.sha256").write_bytes(os.fsencode(content))
    with pytest.raises(DataError, match=r"d\.sha256.*" + message):
        read_checksums(tmp_path / "d")


def test_appending_a_dataset_follows_its_documents(tmp_path: Path, small_blocks: None) -> None:
    draw = random.Random(0)
    parts: list[list[list[int]]] = []
    for number in range(3):  # documents as lists of the lengths of their sequences
        most = 1 if number == 1 else 3
        parts.append([[draw.randrange(5) for _ in range(draw.randrange(1, most + 1))] for _ in range(11)])
        with IndexedDatasetBuilder(tmp_path / str(number), np.int32) as builder:
            for lengths in parts[-1]:
                builder.add_document(list(range(number, number + sum(lengths))), lengths)
            builder.finalize()
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        for number in range(3):
            builder.append_dataset(IndexedDataset(tmp_path / str(number)))
        builder.finalize()
    documents = [lengths for part in parts for lengths in part]
    lengths = [length for document in documents for length in document]
    bounds = np.cumsum([0, *map(len, documents)]).tolist()
    assert (tmp_path / "d.idx").read_bytes() == idx_bytes(lengths, 4, 4, bounds)
    assert (tmp_path / "d.bin").read_bytes() == b"".join((tmp_path / f"{n}.bin").read_bytes() for n in range(3))
