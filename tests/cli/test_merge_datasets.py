"""tools/merge_datasets.py: the result against concatenation in NumPy, the order, and refused inputs.

Damaged inputs and full disks are in tests/data/test_damaged_datasets.py.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from megatron.cli.data import merge_datasets
from megatron.data.index import indexed_builder
from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from tests.data.datasets import write_dataset


def merge(*arguments: str | Path) -> int:
    return merge_datasets.main([str(a) for a in arguments])


def write(prefix: Path, value: int, dtype: DTypeLike = np.uint16, **notes: Any) -> Path:
    """One document of that token, so that the result shows the order."""
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetBuilder(prefix, dtype, notes=notes) as builder:
        builder.add_document([value])
        builder.finalize()
    return prefix


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("block", [2, 1 << 20])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_the_result_is_numpys_concatenation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, dtype: str
) -> None:
    monkeypatch.setattr(indexed_builder, "BLOCK_ENTRIES", block)
    generator = np.random.default_rng(0)
    tokens: list[NDArray[Any]] = []
    lengths: list[NDArray[Any]] = []
    sequences_of: list[NDArray[Any]] = []
    for number in range(4):
        # the first has a sequence for each document, as preprocess_data.py writes; the others are cut into sentences
        sequences = generator.integers(0, 4, 7) if number else np.ones(7, np.int64)
        lengths.append(generator.integers(0, 5, sequences.sum()).astype("<i4"))
        tokens.append(generator.integers(0, 60000, lengths[-1].sum()).astype(dtype))
        sequences_of.append(sequences)
        pointers = (np.cumsum(lengths[-1]) - lengths[-1]) * np.dtype(dtype).itemsize
        write_by_hand(tmp_path / str(number), tokens[-1], lengths[-1], pointers, sequences)
    inputs = [tmp_path / str(number) for number in range(4)]
    assert merge("--input", *inputs, "--output-prefix", tmp_path / "new" / "d") == 0

    all_lengths = np.concatenate(lengths)
    pointers = (np.cumsum(all_lengths) - all_lengths) * np.dtype(dtype).itemsize
    write_by_hand(tmp_path / "expected", np.concatenate(tokens), all_lengths, pointers, np.concatenate(sequences_of))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "new" / f"d{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()
    assert names(tmp_path / "new") == ["d.bin", "d.idx", "d.sha256"]
    checksums = read_checksums(tmp_path / "new" / "d")
    assert checksums is not None
    for suffix, digest in checksums.sha256.items():
        assert digest == hashlib.sha256((tmp_path / "new" / f"d{suffix}").read_bytes()).hexdigest()


def write_by_hand(
    prefix: Path, tokens: NDArray[Any], lengths: NDArray[Any], pointers: NDArray[Any], sequences: NDArray[Any]
) -> None:
    """The format of docs/reference/formats.md; `sequences` is how many each document has."""
    documents = np.concatenate([[0], np.cumsum(sequences)])
    code = {2: 8, 4: 4}[tokens.dtype.itemsize]
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + lengths.astype("<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + documents.astype("<i8").tobytes()
    )


def test_a_folder_is_merged_in_natural_order_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (10, 2, 1, 33):
        write(tmp_path / "in" / f"shard_{number}_text_document", number)
    assert merge("--input", tmp_path / "in", "--output-prefix", tmp_path / "d") == 0
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [1, 2, 10, 33]
    said = capsys.readouterr().out
    places = [said.index(f"shard_{number}_text_document: 1 documents, 1 tokens") for number in (1, 2, 10, 33)]
    assert places == sorted(places)
    assert "4 documents, 4 tokens, read back and equal" in said


def test_datasets_named_one_by_one_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a", 4)
    inputs: list[str | Path] = [write(tmp_path / "c", 3), tmp_path / "in", f"{write(tmp_path / 'a', 1)}.idx"]
    assert merge("--input", *inputs, "--output-prefix", tmp_path / "d", "--overwrite") == 0
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [3, 4, 1]


def test_different_dtypes_are_refused_naming_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a", 1)
    write(tmp_path / "in" / "b", 1, np.int32)
    assert merge("--input", tmp_path / "in", "--output-prefix", tmp_path / "d") == 1
    assert f"{tmp_path}/in/a holds uint16, {tmp_path}/in/b int32" in capsys.readouterr().err
    assert names(tmp_path) == ["in"]


def test_different_tokenizers_are_refused_naming_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a", 1)  # it does not say
    write(tmp_path / "in" / "b", 1, tokenizer={"type": "X"})
    write(tmp_path / "in" / "c", 1, tokenizer={"type": "Y"})
    assert merge("--input", tmp_path / "in", "--output-prefix", tmp_path / "d") == 1
    said = capsys.readouterr().err
    assert f'{tmp_path}/in/b was made with the tokenizer {{"type": "X"}}' in said
    assert f'{tmp_path}/in/c with {{"type": "Y"}}' in said
    assert names(tmp_path) == ["in"]


def test_notes_that_all_inputs_share_are_kept(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 1, tokenizer={"type": "X"}, append_eod=True, input="1")
    b = write(tmp_path / "b", 1, tokenizer={"type": "X"}, append_eod=True, input="2")
    c = write(tmp_path / "c", 1)
    for inputs, notes in (([a, b], {"tokenizer": {"type": "X"}, "append_eod": True}), ([a, c], {}), ([c, a], {})):
        assert merge("--input", *inputs, "--output-prefix", tmp_path / "d", "--overwrite") == 0
        checksums = read_checksums(tmp_path / "d")
        assert checksums is not None
        assert checksums.notes == notes


def test_an_input_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    (tmp_path / "linked.bin").symlink_to(tmp_path / "b.bin")
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    for output in ("a", "linked"):
        assert merge("--input", tmp_path / "a", tmp_path / "b", "--output-prefix", tmp_path / output) == 1
        assert "is one of the inputs" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_a_dataset_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a", 1)
    command: list[str | Path] = ["--input", tmp_path / "in", tmp_path / "in" / "a", "--output-prefix", tmp_path / "d"]
    assert merge(*command) == 1
    assert f"{tmp_path}/in/a is named twice" in capsys.readouterr().err


def test_an_index_with_modes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "a", [2, 3])
    (tmp_path / "a.sha256").unlink()
    with (tmp_path / "a.idx").open("ab") as file:
        file.write(b"\x00\x01")
    assert merge("--input", tmp_path / "a", "--output-prefix", tmp_path / "d") == 1
    assert "multimodal" in capsys.readouterr().err
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_a_difference_on_reading_back_prevents_publication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in" / "a", 1)
    write(tmp_path / "d", 7)
    before = {name: (tmp_path / name).read_bytes() for name in ("d.bin", "d.idx", "d.sha256")}

    def failing_disk(path: str, progress: object) -> str:
        return hashlib.sha256(b"something else").hexdigest()

    monkeypatch.setattr("megatron.data.index.merge.file_sha256", failing_disk)
    assert merge("--input", tmp_path / "in", "--output-prefix", tmp_path / "d", "--overwrite") == 1
    assert "has the SHA-256" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_bytes() for name in ("d.bin", "d.idx", "d.sha256")} == before
    assert names(tmp_path) == ["d.bin", "d.idx", "d.sha256", "in"]


def test_a_folder_as_output_prefix_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a", 1)
    assert merge("--input", tmp_path / "in", "--output-prefix", f"{tmp_path}/out/") == 1
    assert "is a folder; give" in capsys.readouterr().err
    assert names(tmp_path) == ["in"]
