"""--max-documents: a dataset of the first documents of an input, which says that it is one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron.cli.data import inspect_dataset, merge_datasets, preprocess_chat, preprocess_data
from megatron.data.index.indexed import IndexedDataset
from megatron.data.prepare.manifest import read_manifest
from megatron.data.read import document_blocks
from tests.cli.test_input_manifest import NULL, data_of, lines, run, stdin, tar
from tests.data.chat.test_preprocessing import chat, rows_of
from tests.data.chat.test_preprocessing import tokenizer as tokenizer  # the fixture

COUNT = 60


def files(folder: Path) -> Path:
    """Documents 0 to 59, each `{i} {i % 7}`, in files of every kind, in order of name."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(0, 5))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(5, 15)))
    (folder / "c.tar").write_bytes(tar({"1.jsonl": lines(20, 6), "no.md": b"-", "2.jsonl": lines(26, 4)}))
    texts = [json.loads(line)["text"] for line in lines(30, 10).splitlines()]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "d.parquet", row_group_size=3)
    for i in range(40, 55):
        (folder / f"e{i}.jsonl").write_bytes(lines(i, 1))
    (folder / "f.jsonl").write_bytes(lines(55, 5).rstrip(b"\n"))
    return folder


def preprocess(source: str | Path, prefix: Path, *more: str | Path) -> int:
    return run(preprocess_data, "--input", source, "--output-prefix", prefix, *NULL, *more)


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.read(i).tolist() for i in range(len(data))]


@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_the_first_documents_of_the_input_are_read_and_no_more(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", block_bytes)
    folder = files(tmp_path / "in")
    for most in (1, 5, 6, 20, 23, 28, 34, 47, 60, 99):
        prefix = tmp_path / f"out{most}"
        assert preprocess(folder, prefix, "--max-documents", str(most), "--workers", str(1 + most % 4)) == 0
        assert documents(Path(f"{prefix}_text_document")) == [[i, i % 7] for i in range(min(most, COUNT))]
        manifest = read_manifest(f"{prefix}_text_document")
        assert manifest is not None
        assert manifest.header["options"]["--max-documents"] == most
        read = {line["name"].partition("!")[0] for line in manifest.files if "documents" in line}
        beyond = {line["name"] for line in manifest.files if line.get("passed_over") == "beyond --max-documents"}
        assert read | beyond == {str(path) for path in folder.iterdir()}
        stopped = [line for line in manifest.files if "stopped_after" in line]
        assert len(stopped) == (most <= COUNT)
        assert all(line["documents"] for line in stopped)
        said = f"reading stopped after {most} document" in capsys.readouterr().out
        assert said == (most <= COUNT)
        assert run(inspect_dataset, f"{prefix}_text_document", "--verify") == 0
        assert ("reading stopped after" in capsys.readouterr().out) == (most <= COUNT)
    assert len(beyond) == 0


def test_what_lies_behind_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n" + lines(0, 3) + b"not JSON\n")
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(b"not gzip")
    assert preprocess(tmp_path / "in", tmp_path / "out", "--max-documents", "4") == 0
    assert len(documents(tmp_path / "out_text_document")) == 3  # the blank line is the first
    assert preprocess(tmp_path / "in", tmp_path / "more", "--max-documents", "5") == 1


def test_documents_of_every_key_and_of_standard_input_are_the_same(tmp_path: Path) -> None:
    rows = [{"a": str(i), "b": str(i) * (i % 3 > 0)} for i in range(9)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    flags = ("--json-keys", "a", "b", "--max-documents", "7", "--partitions", "2")
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "seven.jsonl").write_text("".join(content.splitlines(keepends=True)[:7]))
    assert preprocess(tmp_path / "seven.jsonl", tmp_path / "expected", *flags[:3], *flags[5:]) == 0
    assert preprocess(tmp_path / "in.jsonl", tmp_path / "file", *flags) == 0
    with stdin(content.encode()):
        assert preprocess("-", tmp_path / "pipe", *flags) == 0
    for key in "ab":
        for suffix in (".bin", ".idx"):
            expected = (tmp_path / f"expected_{key}_document{suffix}").read_bytes()
            assert (tmp_path / f"file_{key}_document{suffix}").read_bytes() == expected
            assert (tmp_path / f"pipe_{key}_document{suffix}").read_bytes() == expected


def test_a_resumed_run_stops_at_the_same_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", 64)
    (tmp_path / "in").mkdir()
    for name, first in (("a", 0), ("b", 30), ("c", 60)):
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(lines(first, 30))
    flags = ("--max-documents", "47", "--resume-interval", "0")
    assert preprocess(tmp_path / "in", tmp_path / "whole", *flags) == 0
    bad = lines(30, 30).replace(b'{"text": "40 5"}', b'{"text":_"40 5"}')
    (tmp_path / "in" / "b.jsonl").write_bytes(bad)
    assert preprocess(tmp_path / "in", tmp_path / "out", *flags) == 1
    (tmp_path / "in" / "b.jsonl").write_bytes(lines(30, 30))
    capsys.readouterr()
    assert preprocess(tmp_path / "in", tmp_path / "out", "--max-documents", "48", "--resume") == 1
    assert "--resume: --max-documents was 47 in the run" in capsys.readouterr().err
    assert preprocess(tmp_path / "in", tmp_path / "out", *flags, "--resume") == 0
    assert "resuming after" in capsys.readouterr().err
    assert data_of(tmp_path / "out") == data_of(tmp_path / "whole")
    found, expected = (read_manifest(tmp_path / f"{name}_text_document") for name in ("out", "whole"))
    assert found is not None
    assert expected is not None
    assert found.files == expected.files
    # finished, but another dataset than the one that is asked for now
    assert preprocess(tmp_path / "in", tmp_path / "out", *flags, "--resume") == 0
    assert "nothing to resume" in capsys.readouterr().out
    assert preprocess(tmp_path / "in", tmp_path / "out", "--resume") == 1
    assert "exists already; pass --overwrite" in capsys.readouterr().err


def test_datasets_of_first_documents_say_so_after_a_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = files(tmp_path / "in")
    for most in (7, 70):
        assert preprocess(folder, tmp_path / f"out{most}", "--max-documents", str(most)) == 0
    inputs = [tmp_path / f"out{most}_text_document" for most in (7, 70)]
    assert run(merge_datasets, "--input", *inputs, "--output-prefix", tmp_path / "merged") == 0
    assert run(inspect_dataset, tmp_path / "merged", "--verify") == 0
    assert "reading stopped after 7 documents of the input (--max-documents)" in capsys.readouterr().out


def test_the_first_chats_are_those_of_a_shorter_file(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [chat(f"question {i}", "answer " * i) for i in range(1, 9)]
    rows_of(tmp_path / "all.jsonl", *chats)
    rows_of(tmp_path / "five.jsonl", *chats[:5])
    flags: list[Any] = ["--tokenizer-model", tokenizer, "--chat-template", "chatml", "--output-prefix"]
    assert run(preprocess_chat, "--input", tmp_path / "five.jsonl", *flags, tmp_path / "expected") == 0
    limited = [*flags, tmp_path / "out", "--max-documents", "5"]
    assert run(preprocess_chat, "--input", tmp_path / "all.jsonl", *limited) == 0
    assert "reading stopped after 5 documents" in capsys.readouterr().out
    for suffix in (".bin", ".idx", "_loss_mask.bin"):
        assert Path(f"{tmp_path / 'out'}{suffix}").read_bytes() == Path(f"{tmp_path / 'expected'}{suffix}").read_bytes()
    assert run(inspect_dataset, tmp_path / "out", "--verify") == 0
    one = [*flags[:4], "--show", "9", "--max-documents", "2"]
    capsys.readouterr()
    assert run(preprocess_chat, "--input", tmp_path / "all.jsonl", *one) == 0
    assert capsys.readouterr().out.count("--- sample ") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-documents", "0"), "--max-documents must be at least 1"),
        (("--max-documents", "5", "--shard", "1/2"), "--shard with --max-documents: a shard does not know"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    tmp_path: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool, more in ((preprocess_data, NULL), (preprocess_chat, ("--tokenizer-model", "x"))):
        with pytest.raises(SystemExit) as exit_info:
            run(tool, "--input", tmp_path, "--output-prefix", tmp_path / "out", *more, *flags)
        assert exit_info.value.code == 2
        assert said in capsys.readouterr().err
