"""tools/inspect_dataset.py: statistics against NumPy's, printed documents, and verification.

Damaged files are in tests/data/test_damaged_datasets.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.data import inspect_dataset
from megatron.data.index import verification
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.tokenizers.build import build_tokenizer
from tests.data.datasets import write_dataset

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")


@pytest.fixture(params=[False, True], ids=["whole", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, once in blocks so small that a tiny dataset crosses many of their borders."""
    if request.param:
        monkeypatch.setattr(verification, "BLOCK_ENTRIES", 3)
        monkeypatch.setattr(verification, "COUNTED_BELOW", 8)
        monkeypatch.setattr(verification, "BLOCK_ENTRIES", 3)
        monkeypatch.setattr(verification, "TOKENS_AT_A_TIME", 5)


def inspect(*arguments: str | Path) -> int:
    return inspect_dataset.main([str(a) for a in arguments])


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert inspect(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def write_documents(prefix: Path, documents: list[list[list[int]]], **notes: Any) -> Path:
    """Documents as lists of sequences."""
    with IndexedDatasetBuilder(prefix, np.int32, notes=notes) as builder:
        for sequences in documents:
            builder.add_document([i for ids in sequences for i in ids], [len(ids) for ids in sequences])
        builder.finalize()
    return prefix


def lengths_by_numpy(lengths: list[int]) -> dict[str, Any]:
    return {
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": pytest.approx(np.mean(lengths)),
        "percentiles": {str(p): np.percentile(lengths, p, method="inverted_cdf") for p in (1, 10, 50, 90, 99)},
    }


def test_statistics_equal_numpys(tmp_path: Path, blocks: None, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 4, 300)
    per_sequence = [(generator.geometric(0.1, count) - 1).tolist() for count in counts]
    write_documents(tmp_path / "d", [[[7] * length for length in lengths] for lengths in per_sequence], source="books")
    found = inspect_json(capsys, tmp_path / "d")
    sequences = [length for lengths in per_sequence for length in lengths]
    documents = [sum(lengths) for lengths in per_sequence]
    assert (found["documents"], found["sequences"], found["tokens"]) == (300, len(sequences), sum(sequences))
    assert (found["dtype"], found["bin_bytes"]) == ("int32", 4 * sum(sequences))
    assert found["idx_bytes"] == (tmp_path / "d.idx").stat().st_size
    assert found["empty_documents"] == documents.count(0) > 0
    assert (found["checksum_file"], found["notes"]) == (True, {"source": "books"})
    assert found["document_lengths"] == lengths_by_numpy(documents)
    assert found["sequence_lengths"] == lengths_by_numpy(sequences)
    rows = found["document_length_histogram"]
    assert [row[:2] for row in rows[:4]] == [[0, 0], [1, 1], [2, 3], [4, 7]]
    assert [row[2] for row in rows] == [sum(a <= length <= b for length in documents) for a, b, _ in rows]
    assert sum(row[2] for row in rows) == 300


def test_statistics_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "d", [5] * 80 + [1] * 40 + [40])
    assert inspect(tmp_path / "d.idx") == 0
    said = capsys.readouterr().out
    for line in (
        str(tmp_path / "d"),
        r"  documents +121",
        r"  tokens +480 \(uint16\)",
        r"  size +960 bytes \.bin, 2\.46 kB \.idx",
        r"  checksums +.*d\.sha256",
        r"  doc\. lengths +1 to 40, mean 4\.0; p1 1, p10 1, p50 5, p90 5, p99 5",
        r" +1 +40 #{20}",
        r" +4-7 +80 #{40}",
        r" +8-15 +0",
        r" +32-63 +1 #",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)
    assert "seq. lengths" not in said


def test_a_dataset_without_checksums_is_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "d", [5, 6])
    (tmp_path / "d.sha256").unlink()
    assert inspect(tmp_path / "d", "--verify") == 0
    said = capsys.readouterr().out
    assert "checksums      none" in said
    assert "not checked, there is no .sha256" in said
    assert "nothing is wrong" in said


def test_documents_are_printed_as_ids_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "d", [[[1, 2], [], [3]], [], [[4, 5]], [[6]]])
    found = inspect_json(capsys, tmp_path / "d", "--head", "2", "--documents", "-1", "2", *NULL)
    assert found["shown"] == [
        {"document": 0, "sequences": [[1, 2], [], [3]], "text": "1 2 3"},
        {"document": 1, "sequences": [], "text": ""},
        {"document": 3, "sequences": [[6]], "text": "6"},
        {"document": 2, "sequences": [[4, 5]], "text": "4 5"},
    ]
    assert inspect(tmp_path / "d", "--documents", "0", *NULL) == 0
    assert "document 0: 3 tokens in 3 sequences\n  1 2\n  (empty)\n  3\n  | 1 2 3\n" in capsys.readouterr().out


def test_a_long_document_is_shortened_on_the_terminal_and_whole_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_documents(tmp_path / "d", [[list(range(5000, 9000))]])
    assert inspect(tmp_path / "d", "--head", "1") == 0
    said = capsys.readouterr().out
    assert " 5099\n" in said
    assert "5100" not in said
    assert "4,000 in all" in said
    assert inspect_json(capsys, tmp_path / "d", "--head", "1")["shown"][0]["sequences"] == [list(range(5000, 9000))]


def test_control_characters_of_a_document_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_dataset.print_document({"document": 0, "sequences": [[1]], "text": "naïve\x1b[2J\ttext\nline"})
    assert capsys.readouterr().out.endswith("  | naïve\\x1b[2J\\ttext\n  | line\n")


@pytest.mark.parametrize("number", ["4", "-5"])
def test_a_document_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    write_dataset(tmp_path / "d", [1, 2, 3, 4])
    assert inspect(tmp_path / "d", "--documents", number) == 1
    assert f"has documents 0 to 3; there is no document {number}" in capsys.readouterr().err


def test_every_end_of_document_is_counted(tmp_path: Path, blocks: None, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(1)
    documents: list[list[list[int]]] = []
    for number in range(60):
        sequences = [generator.integers(0, 999, generator.integers(0, 9)).tolist() for _ in range(number % 4)]
        if number % 3 and sequences:
            sequences[-1] = [*sequences[-1], 1000]
        documents.append(sequences)
    write_documents(tmp_path / "d", documents)
    flat = [[i for ids in sequences for i in ids] for sequences in documents]
    lacking = [n for n, ids in enumerate(flat) if ids and ids[-1] != 1000]
    found = inspect_json(capsys, tmp_path / "d", "--verify", *NULL)["verified"]
    assert found["findings"] == {}
    assert found["documents_with_tokens"] == sum(map(bool, flat))
    assert found["documents_ending_with_eod"] == sum(ids[-1:] == [1000] for ids in flat)

    assert inspect(tmp_path / "d", "--verify", "--append-eod", "--json", *NULL) == 1
    found = json.loads(capsys.readouterr().out)["verified"]["findings"]
    assert len(lacking) > 10
    assert found == {
        "end of document": {
            "count": len(lacking),
            "first": [f"document {n} ends with {flat[n][-1]}, not 1000" for n in lacking[:10]],
        }
    }


def test_every_id_outside_the_vocabulary_is_found(
    tmp_path: Path, blocks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.random.default_rng(2).integers(0, 100, 400)
    ids[::23] = -1 - ids[::23] % 2
    documents = [[part.tolist()] for part in np.split(ids, [3, 50, 50, 51, 200])]
    write_documents(tmp_path / "d", documents)
    assert inspect(tmp_path / "d", "--verify", "--vocab-size", "90", "--json") == 1
    findings = json.loads(capsys.readouterr().out)["verified"]["findings"]
    wrong = np.flatnonzero((ids < 0) | (ids >= 90))
    assert list(findings) == ["token id"]
    assert findings["token id"]["count"] == len(wrong)
    owners = np.searchsorted([3, 50, 50, 51, 200], wrong, side="right")
    assert findings["token id"]["first"] == [
        f"id {ids[i]} at byte {4 * i} of the .bin (document {n}, sequence {n}) is not below 90"
        if ids[i] >= 0
        else f"id {ids[i]} at byte {4 * i} of the .bin (document {n}, sequence {n}) is negative"
        for i, n in zip(wrong[:10], owners[:10], strict=True)
    ]


def test_the_notes_say_what_is_expected_unless_flags_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = {"type": "X", "vocab_size": 50, "eod": 49}
    write_documents(tmp_path / "d", [[[1, 49]], [[60]]], tokenizer=tokenizer, append_eod=True)
    assert inspect(tmp_path / "d", "--verify") == 1
    said = capsys.readouterr().out
    assert "id 60 at byte 8" in said
    assert "document 1 ends with 60, not 49" in said
    assert "1 of 2 documents with tokens end with id 49" in said
    assert inspect(tmp_path / "d", "--verify", "--vocab-size", "61") == 1
    assert "is not below" not in capsys.readouterr().out
    write_documents(tmp_path / "e", [[[1, 49]], [[3]]], tokenizer=tokenizer)
    assert inspect(tmp_path / "e", "--verify") == 0
    assert "1 of 2 documents" in capsys.readouterr().out


def test_another_tokenizer_than_the_datas_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for vocab_size, status in (("1000", 0), ("1001", 1)):
        identity = build_tokenizer("NullTokenizer", vocab_size=int(vocab_size)).identity
        write_documents(tmp_path / "d", [[[1]]], tokenizer=identity)
        assert inspect(tmp_path / "d", "--verify", *NULL) == status
    said = capsys.readouterr().out
    assert re.search(r'd\.sha256 says .*"vocab_size": 1002.*, but the tokenizer is .*"vocab_size": 1001', said)


def test_a_vocabulary_that_the_files_type_cannot_hold_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "d", [3])
    assert inspect(tmp_path / "d", "--verify", "--vocab-size", "65536") == 0
    assert inspect(tmp_path / "d", "--verify", "--vocab-size", "65537") == 1
    assert "uint16 holds no ids above 65535, but the vocabulary has 65,537" in capsys.readouterr().out


def test_one_bad_dataset_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "a", [1, 2])
    write_dataset(tmp_path / "c", [3, 4])
    assert inspect(tmp_path / "a", tmp_path / "b", tmp_path / "c") == 1
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith(str(tmp_path))] == [
        str(tmp_path / "a"),
        str(tmp_path / "c"),
    ]
    assert f"error: {tmp_path / 'b'}.idx does not exist" in said.err


def test_ends_expected_of_an_unknown_tokenizer_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "a", [1, 2])
    assert inspect(tmp_path / "a", "--verify", "--append-eod") == 1
    assert "--append-eod: the end-of-document id is unknown" in capsys.readouterr().err


def test_numbers_that_are_no_ids_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.float32) as builder:
        builder.add_document(np.array([1.5, 2.5], np.float32))
        builder.finalize()
    assert inspect(tmp_path / "d", "--verify") == 1
    assert "the .bin holds float32, not integers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--head -1", "must not be negative"),
        ("--vocab-size 0", "must be at least 1"),
        ("--append-eod", "give both"),
        ("--tokenizer-model x", "--tokenizer-model needs --tokenizer-type"),
        ("--tiktoken-pattern x", "--tiktoken-pattern needs --tokenizer-type"),
    ],
)
def test_contradictory_flags_are_refused(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        inspect("d", *flags.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
