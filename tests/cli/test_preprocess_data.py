"""tools/preprocess_data.py and train_tokenizer.py end to end: output, refused input, and no partial results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.data import merge_datasets, preprocess_data, train_tokenizer
from megatron.data.index.indexed import IndexedDataset
from megatron.data.read.document_blocks import BLOCK_BYTES
from megatron.data.tokenizers.library import GPT2BPETokenizer, HFTokenizer
from tests.ranks import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preprocess(*arguments: str | Path) -> int:
    return preprocess_data.main([str(a) for a in arguments])


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.read(i).tolist() for i in range(len(data))]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_jsonl_becomes_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "1 2 3"}, {"text": ""}, {"text": "4"}])
    assert preprocess("--input", source, "--output-prefix", tmp_path / "new" / "out", *NULL) == 0
    assert documents(tmp_path / "new" / "out_text_document") == [[1, 2, 3], [4]]
    suffixes = (".bin", ".idx", ".manifest.json", ".sha256")
    assert names(tmp_path / "new") == [f"out_text_document{suffix}" for suffix in suffixes]
    said = capsys.readouterr().out
    assert "2 documents, 4 tokens" in said
    assert "1 empty documents left out" in said


def test_end_of_document_ids_are_counted_in_the_lengths(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "1 2 3"}, {"text": ""}, {"text": "4"}])
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", "--append-eod", *NULL) == 0
    data = IndexedDataset(tmp_path / "out_text_document")
    assert data.lengths.tolist() == [4, 2]
    assert documents(tmp_path / "out_text_document") == [[1, 2, 3, 1000], [4, 1000]]
    assert data.num_tokens == 6


def test_the_begin_of_text_id_is_part_of_what_identifies_a_dataset(
    tmp_path: Path, test_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "one two"}, {"text": ""}, {"text": "three"}])
    model = test_data / "tokenizers" / "mistral" / "tokenizer.model.v1"
    llama = ("--input", source, "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", model, "--append-eod")
    assert preprocess(*llama, "--output-prefix", tmp_path / "bos") == 0
    assert preprocess(*llama, "--output-prefix", tmp_path / "none", "--no-prepend-bos") == 0
    plain = documents(tmp_path / "none_text_document")
    assert documents(tmp_path / "bos_text_document") == [[1, *ids] for ids in plain]
    assert len(plain) == 2
    capsys.readouterr()
    inputs = ("--input", str(tmp_path / "bos_text_document"), str(tmp_path / "none_text_document"))
    assert merge_datasets.main([*inputs, "--output-prefix", str(tmp_path / "both")]) == 1
    assert "was made with the tokenizer" in capsys.readouterr().err


def test_an_end_that_the_tokenizer_adds_is_not_appended_twice(
    tmp_path: Path, test_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tokenizers
    from tokenizers import processors

    inner = tokenizers.Tokenizer.from_file(str(test_data / "tokenizers" / "gpt2" / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 50256)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    arguments = ("--input", source, "--tokenizer-type", "HFTokenizer", "--tokenizer-model", tmp_path)
    assert preprocess(*arguments, "--output-prefix", tmp_path / "own") == 0
    assert documents(tmp_path / "own_text_document") == [[505, 50256]]
    assert preprocess(*arguments, "--output-prefix", tmp_path / "twice", "--append-eod") == 1
    assert "--append-eod would end each document twice" in capsys.readouterr().err


def test_every_key_gets_a_finished_dataset(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"a": "1", "b": "2 3"}, {"a": "4", "b": "5", "c": 6}])
    assert preprocess("--input", source, "--json-keys", "a", "b", "--output-prefix", tmp_path / "out", *NULL) == 0
    assert documents(tmp_path / "out_a_document") == [[1], [4]]
    assert documents(tmp_path / "out_b_document") == [[2, 3], [5]]


@pytest.mark.parametrize("workers", ["1", "4"])
def test_order_is_the_inputs_for_any_number_of_workers(tmp_path: Path, workers: str) -> None:
    rows = [{"text": f"{i % 1000} 7", "padding": "x" * 3000} for i in range(2000)]
    source = jsonl(tmp_path / "in.jsonl", rows)
    assert source.stat().st_size > 3 * BLOCK_BYTES
    arguments = ("--workers", workers, "--log-interval", "100")
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *arguments, *NULL) == 0
    assert documents(tmp_path / "out_text_document") == [[i % 1000, 7] for i in range(2000)]


def test_folders_globs_and_files_are_read_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    jsonl(tmp_path / "in" / "b.jsonl", [{"text": "2"}])
    (tmp_path / "in" / "a.txt").write_text("1\n1\n")
    (tmp_path / "in" / "notes.md").write_text("not ids")
    (tmp_path / "in" / "sub" / "c.json").write_bytes(b'\xef\xbb\xbf{"text": "3"}\r\n\r\n{"text": "4"}')
    expected = [[1, 1], [2], [3], [4]]
    assert preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "o1", *NULL) == 0
    assert documents(tmp_path / "o1_text_document") == expected
    listed = (tmp_path / "in" / "a.txt", tmp_path / "in" / "b.jsonl", tmp_path / "in" / "sub" / "c.json")
    assert preprocess("--input", *listed, "--output-prefix", tmp_path / "o2", *NULL) == 0
    assert documents(tmp_path / "o2_text_document") == expected
    globs = (tmp_path / "in" / "*.[jt][sx]*", tmp_path / "in" / "sub" / "*.json")
    assert preprocess("--input", *globs, "--output-prefix", tmp_path / "o3", *NULL) == 0
    assert documents(tmp_path / "o3_text_document") == expected


def test_text_files_are_taken_by_pattern_alone(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "b.py").write_text("2")
    (tmp_path / "in" / "a.py").write_text("1")
    (tmp_path / "in" / "settings.json").write_text("not a JSON line")
    arguments = ("--text-files", "*.py", *NULL)
    assert preprocess("--input", tmp_path / "in", "--output-prefix", tmp_path / "out", *arguments) == 0
    assert documents(tmp_path / "out_text_document") == [[1], [2]]


BAD_LINES = {
    "broken": (b'{"text": "1"', "not JSON"),
    "no object": (b'["1"]', "JSON array"),
    "another key": (b'{"body": "1"}', "no key 'text'; the line has 'body'"),
    "null": (b'{"text": null}', "JSON null"),
    "number": (b'{"text": 1}', "JSON number"),
    "bad UTF-8": (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
    "unpaired surrogate": (b'{"text": "\\ud800"}', "the unpaired surrogate U+D800"),
    "deep": (b'{"text": ' + b"[" * 5000, "not JSON"),
    "refused by the tokenizer": (b'{"text": "1001"}', "id 1001 is outside"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_fails_with_its_number_and_leaves_nothing(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, reason = BAD_LINES[bad]
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    assert preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", *NULL) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(f"error: {tmp_path / 'in.jsonl'}:3: ")
    assert reason in said
    assert "Traceback" not in said
    assert names(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_skipped_and_counted_on_request(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n' + BAD_LINES[bad][0] + b'\n{"text": "2"}\n')
    arguments = ("--on-bad-line", "skip", *NULL)
    assert preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", *arguments) == 0
    said = capsys.readouterr()
    assert documents(tmp_path / "out_text_document") == [[1], [2]]
    assert f"skipped {tmp_path / 'in.jsonl'}:3: " in said.err
    assert "skipped 1 bad documents and 1 blank ones" in said.out


def test_a_text_file_that_is_not_utf8_is_a_bad_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_bytes(b"12 \xe9")
    assert preprocess("--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out", *NULL) == 1
    assert "in.txt: byte 3 is not UTF-8" in capsys.readouterr().err


def test_a_line_of_a_gigabyte_costs_neither_memory_nor_the_rest(tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("wb") as file:
        file.write(b'{"text": "1"}\n')
        file.truncate(1 << 30)  # a hole: zeros that take no disk
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"text": "2"}\n')
    # VmHWM, and not what getrusage says: that counts the process this one was forked from too
    program = (
        "import sys; from megatron.cli.data import preprocess_data; status = preprocess_data.main(sys.argv[1:]);"
        "print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0]); sys.exit(status)"
    )
    command = [sys.executable, "-c", program, "--input", "in.jsonl", "--output-prefix", "out", *NULL]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for policy, status in (("fail", 1), ("skip", 0)):
        done = subprocess.run(
            [*command, "--on-bad-line", policy],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == status
        assert f"in.jsonl:2: longer than {64 << 20} bytes" in done.stderr
        assert int(done.stdout.split()[-2]) < 300_000  # KiB
    assert documents(tmp_path / "out_text_document") == [[1], [2]]


def test_a_file_that_the_disk_does_not_give_up_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").symlink_to("/proc/self/mem")  # opens, and answers reads with EIO
    assert preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", *NULL) == 1
    assert "in.jsonl:1: the file cannot be read on: Input/output error" in capsys.readouterr().err


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "65535 65536 69999"}])
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--append-eod")
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *null) == 0
    assert documents(tmp_path / "out_text_document") == [[65535, 65536, 69999, 70000]]
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int32


@pytest.mark.parametrize("partitions", [2, 3, 7])
def test_partitions_order_documents_as_megatrons_do(tmp_path: Path, partitions: int) -> None:
    """Line i goes to partition i mod N, and the partitions are merged in order."""
    source = jsonl(tmp_path / "in.jsonl", [{"text": str(i), "padding": "x" * 1000} for i in range(100)])
    more = ["--partitions", str(partitions)]
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *more, *NULL) == 0
    expected = [[i] for first in range(partitions) for i in range(first, 100, partitions)]
    assert documents(tmp_path / "out_text_document") == expected
    more += ["--keep-sequential-samples", "--overwrite"]
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *more, *NULL) == 0
    assert documents(tmp_path / "out_text_document") == [[i] for i in range(100)]


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_every_form_of_text_gives_the_same_dataset(tmp_path: Path, form: str) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard

    values = [f"{i} {i % 7}" for i in range(500)]
    lines = "".join(json.dumps({"text": value}) + "\n" for value in values).encode()
    place = tmp_path / f"in.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), place)
    else:
        contents = {
            "jsonl.gz": gzip.compress(lines),
            "jsonl.zst": zstandard.compress(lines),
            "txt": "<|endoftext|>\n".join(values).encode(),
        }
        place.write_bytes(contents[form])
    more = ("--document-separator", "<|endoftext|>\\n")
    assert preprocess("--input", place, "--output-prefix", tmp_path / "out", *more, *NULL) == 0
    assert documents(tmp_path / "out_text_document") == [[i, i % 7] for i in range(500)]


Setup = Callable[[Path], list[str]]
USER_FAULTS: dict[str, tuple[Setup, str]] = {
    "missing file": (lambda t: ["--input", str(t / "none.jsonl"), *NULL], "does not exist"),
    "unmatched glob": (lambda t: ["--input", str(t / "*.jsonl.none"), *NULL], "matches no file"),
    "folder without text": (lambda t: ["--input", str(t / "void"), *NULL], "holds no"),
    "unknown suffix": (lambda t: ["--input", str(t / "x.md"), *NULL], "--text-files '*.md'"),
    "empty file": (lambda t: ["--input", str(t / "empty.jsonl"), *NULL], "no text under key 'text'"),
    "only empty text": (lambda t: ["--input", str(t / "blank.jsonl"), *NULL], "no text under key 'text'"),
    "named twice": (lambda t: ["--input", str(t / "x.txt"), str(t), *NULL], "named twice"),
    "unknown tokenizer": (lambda t: ["--input", str(t / "x.txt"), "--tokenizer-type", "No"], "use one of"),
    "tokenizer file": (
        lambda t: [
            "--input",
            str(t / "x.txt"),
            "--tokenizer-type",
            "HFTokenizer",
            "--tokenizer-model",
            str(t / "x.txt"),
        ],
        "not a tokenizer.json",
    ),
    "keys of text": (
        lambda t: ["--input", str(t / "x.txt"), "--json-keys", "a", "b", *NULL],
        "text files have no keys",
    ),
    "output under a file": (
        lambda t: ["--input", str(t / "x.txt"), *NULL, "--output-prefix", str(t / "x.txt" / "out")],
        "x.txt",
    ),
}


@pytest.mark.parametrize("fault", USER_FAULTS)
def test_a_users_fault_is_one_line_and_leaves_nothing(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "x.md").write_text("1")
    (tmp_path / "x.txt").write_text("1")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n{"text": " "}\n')
    before = names(tmp_path)
    setup, message = USER_FAULTS[fault]
    assert preprocess("--output-prefix", tmp_path / "out", *setup(tmp_path)) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: ")
    assert message in said[-1]
    assert names(tmp_path) == before


def test_append_eod_needs_a_tokenizer_that_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": inner}))
    (tmp_path / "in.txt").write_text("a")
    arguments = ("--tokenizer-type", "HFTokenizer", "--tokenizer-model", tmp_path, "--append-eod")
    assert preprocess("--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out", *arguments) == 1
    assert "no end-of-document token" in capsys.readouterr().err


def test_a_fault_in_one_key_finishes_no_dataset(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"a": "1", "b": ""}])
    assert preprocess("--input", source, "--json-keys", "a", "b", "--output-prefix", tmp_path / "out", *NULL) == 1
    assert names(tmp_path) == ["in.jsonl"]


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"text": "1"}])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *NULL) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert names(tmp_path) == ["in.jsonl"]


def test_help_answers_without_importing_the_libraries() -> None:
    program = (
        "import sys, runpy\n"
        "sys.argv = [sys.argv[1], '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'torch', 'tokenizers', 'orjson', 'pydantic'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    for name in ("preprocess_data.py", "train_tokenizer.py"):
        command = [sys.executable, "-c", program, str(REPOSITORY / "tools" / name)]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert "--input" in done.stdout


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgé "), 5)) for _ in range(300)]
    return jsonl(tmp_path / "corpus.jsonl", [{"text": " ".join(random.choice(words, 50))} for _ in range(100)])


def train(*arguments: str | Path) -> int:
    return train_tokenizer.main([str(a) for a in arguments])


def test_a_trained_tokenizer_has_the_requested_size_and_loads_in_both_forms(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "tokenizer"
    assert train("--input", corpus, "--vocab-size", "400", "--output-dir", folder) == 0
    assert names(folder) == ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    bpe, hf = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt"), HFTokenizer(folder)
    assert sorted(json.loads((folder / "vocab.json").read_text()).values()) == list(range(400))
    assert bpe.vocab_size == hf.vocab_size == 400
    assert bpe.eod == hf.eod == 399
    for line in corpus.read_text().splitlines():
        text = json.loads(line)["text"] + " 日本\n<|endoftext|>"
        ids = bpe.encode(text)
        assert ids == hf.encode(text)
        assert bpe.decode(ids) == hf.decode(ids) == text
    assert len(ids) < 0.8 * len(text.encode())


def test_training_a_tokenizer_is_deterministic(tmp_path: Path, corpus: Path) -> None:
    for threads in ("1", "2"):
        command = [sys.executable, str(REPOSITORY / "tools" / "train_tokenizer.py"), "--input", str(corpus)]
        command += ["--vocab-size", "350", "--output-dir", str(tmp_path / threads)]
        subprocess.run(command, check=True, env={**os.environ, "RAYON_NUM_THREADS": threads}, timeout=HANG_S)
    for name in names(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_another_tokenizer_is_replaced_on_request_alone(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    first = ("--input", corpus, "--vocab-size", "300", "--output-dir", folder)
    assert train(*first) == 0
    assert train(*first) == 0  # the same once more
    content = (folder / "tokenizer.json").read_bytes()
    other = ("--input", corpus, "--vocab-size", "310", "--output-dir", folder)
    assert train(*other) == 1
    assert "vocab.json exists already and is of another tokenizer; pass --overwrite" in capsys.readouterr().err
    assert (folder / "tokenizer.json").read_bytes() == content
    assert train(*other, "--overwrite") == 0
    assert (folder / "tokenizer.json").read_bytes() != content


def test_too_little_text_for_a_vocabulary_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("hello hello")
    assert train("--input", tmp_path / "in.txt", "--vocab-size", "1000", "--output-dir", tmp_path / "tok") == 0
    assert "supports 261 entries only" in capsys.readouterr().err
    (tmp_path / "in.txt").write_text("\n")
    assert train("--input", tmp_path / "in.txt", "--vocab-size", "1000", "--output-dir", tmp_path / "tok2") == 1
    assert not (tmp_path / "tok2").exists()


def test_the_trained_tokenizer_preprocesses_real_text(tmp_path: Path, test_data: Path) -> None:
    source = test_data / "quickstart.jsonl"
    assert train("--input", source, "--vocab-size", "1000", "--output-dir", tmp_path / "tok") == 0
    vocab, merges = tmp_path / "tok" / "vocab.json", tmp_path / "tok" / "merges.txt"
    arguments = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges, "--append-eod")
    assert preprocess("--input", source, "--output-prefix", tmp_path / "out", *arguments) == 0
    tokenizer = HFTokenizer(tmp_path / "tok")
    for ids, line in zip(documents(tmp_path / "out_text_document"), source.read_bytes().splitlines(), strict=True):
        assert ids[-1] == tokenizer.eod == 999
        assert tokenizer.decode(ids[:-1]) == json.loads(line)["text"]


def test_a_bad_line_stops_the_training_of_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "hello hello"}\n{"text": 3}\n')
    arguments = ("--input", tmp_path / "in.jsonl", "--vocab-size", "300", "--output-dir", tmp_path / "tok")
    assert train(*arguments) == 1
    assert "in.jsonl:2: the value of 'text' is a JSON number" in capsys.readouterr().err
    assert not (tmp_path / "tok").exists()
    assert train(*arguments, "--on-bad-line", "skip") == 0


def test_a_nested_key_gives_a_dataset_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"meta": {"text": "1 2"}}\n{"meta": {"text": "3", "score": NaN}}\n')
    arguments = ("--input", tmp_path / "in.jsonl", "--json-keys", "meta.text", "--output-prefix", tmp_path / "out")
    assert preprocess(*arguments, *NULL) == 0
    assert documents(tmp_path / "out_meta.text_document") == [[1, 2], [3]]


def test_a_key_that_would_name_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        preprocess("--input", tmp_path, "--json-keys", "a/b", "--output-prefix", tmp_path / "out", *NULL)
    assert exit_info.value.code == 2
    assert "--json-keys a/b: the files are named PREFIX_KEY_document" in capsys.readouterr().err
