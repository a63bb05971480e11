"""The .bin/.idx format: its bytes, its reader's distrust, its builder's atomicity."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import DTYPES, DataError, IndexedDataset, IndexedDatasetBuilder, best_dtype
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
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


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


def test_modes_of_a_multimodal_index_are_passed_over(tmp_path: Path) -> None:
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
    "no magic": (lambda p: overwrite(p, 0, b"X"), "no Megatron index"),
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
    """What --append-eod of older preprocess tools wrote: every pointer slips by the documents before it."""
    (tmp_path / "d.bin").write_bytes(bytes(2 * (2 + 3 + 2)))
    (tmp_path / "d.idx").write_bytes(idx_bytes([2, 3], 2, 8, [0, 1, 2]))
    with pytest.raises(DataError, match="end-of-document tokens without counting them"):
        IndexedDataset(tmp_path / "d")


def test_a_dataset_of_no_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"\x00\x00")
    (tmp_path / "d.idx").write_bytes(idx_bytes([], 2, 8, [0]))
    with pytest.raises(DataError, match="no documents"):
        IndexedDataset(tmp_path / "d")


def test_a_pointer_outside_the_bin_is_met_when_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3, 4])
    overwrite(tmp_path / "d.idx", 34 + 12 + 8, struct.pack("<q", 1 << 40))
    data = IndexedDataset(tmp_path / "d")
    assert data.read(0).tolist() == [0, 1]
    with pytest.raises(DataError, match="sequence 1 lies at byte"):
        data.read(1)
    with pytest.raises(DataError, match="their pointers"):
        data.count_tokens(range(2))


def test_a_damaged_length_is_met_when_counted(tmp_path: Path) -> None:
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


def test_a_builder_left_by_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
            builder.add_document([1])
            builder.seal()
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert os.listdir(tmp_path) == []


def test_a_builder_without_tokens_leaves_the_old_dataset_alone(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [2, 3])
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([])
        with pytest.raises(DataError, match="no tokens"):
            builder.finalize()
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    assert len(IndexedDataset(tmp_path / "d")) == 2


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    first = open_dataset(tmp_path / "a", [2, 3])
    (tmp_path / "elsewhere").mkdir()
    assert open_dataset(tmp_path / "elsewhere" / "b", [2, 3]).fingerprint == first.fingerprint
    assert open_dataset(tmp_path / "c", [3, 2]).fingerprint != first.fingerprint
    assert open_dataset(tmp_path / "e", [2, 3], np.int32).fingerprint != first.fingerprint
    overwrite(write_dataset(tmp_path / "f", [2, 3]).with_suffix(".bin"), 4, b"\x09")
    assert IndexedDataset(tmp_path / "f").fingerprint != first.fingerprint
