"""docs/reference/preprocess_flags.md: each flag of Megatron's preprocess_data.py is taken, or refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.cli.data import preprocess_data
from megatron.cli.data.flags import REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "preprocess_flags.md"
MEGATRONS = {
    # tools/preprocess_data.py of Megatron-LM and Megatron-DeepSpeed
    *("input", "json-keys", "split-sentences", "keep-newlines", "append-eod", "lang", "output-prefix", "workers"),
    *("find-optimal-num-workers", "workers-to-check", "max-documents", "performance-dir", "partitions"),
    *("log-interval", "keep-sequential-samples", "dataset-impl", "seq-length"),
    # their tokenizers
    *("vocab-size", "padded-vocab-size", "pad-vocab-size", "vocab-file", "merge-file", "vocab-extra-ids"),
    *("tokenizer-type", "tokenizer-model", "tokenizer-metadata", "tokenizer-special-tokens", "tiktoken-pattern"),
    *("tiktoken-num-special-tokens", "tiktoken-special-tokens", "tokenizer-sentencepiece-legacy"),
    *("tokenizer-sentencepiece-ignore-extra-whitespaces", "tokenizer-hf-no-use-fast", "trust-remote-code"),
    *("tokenizer-hf-no-include-special-tokens", "null-tokenizer-eod-id", "null-tokenizer-pad-id", "use-gigatoken"),
    "make-vocab-size-divisible-by",
}


def rows(section: str) -> list[list[str]]:
    body = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = [line[2:-2].split(" | ") for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table[1:]]


def flags(text: str) -> list[str]:
    return re.findall(r"`(--[\w-]+)`", text)


@pytest.fixture
def accepted(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        preprocess_data.parse_arguments(["--help"])
    return set(re.findall(r"--[a-z][\w-]*", re.sub(r"\([^)]*\)", "", capsys.readouterr().out)))


def test_the_page_answers_each_flag_once(accepted: set[str]) -> None:
    same, only = [name for row in rows("Same name") for name in flags(row[0])], flags(str(rows("Only in this project")))
    refused = [name for row in rows("Not supported") for name in flags(row[0])]
    assert sorted(same + refused) == sorted(f"--{name}" for name in MEGATRONS)
    assert not set(refused) & accepted
    assert set(same) | set(only) <= accepted
    ours = {name.replace("--no-", "--") for name in accepted} - {"--help"}
    assert ours == set(same) | set(only)


def test_a_refused_flag_has_the_pages_reason(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {name: row[1].replace("\\|", "|") for row in rows("Not supported") for name in flags(row[0])}
    assert reasons == REFUSED
    required = ["--input", "x.jsonl", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"]
    with pytest.raises(SystemExit) as exit_info:
        preprocess_data.parse_arguments([*required, "--split-sentences", "--seq-length=8", "--lang", "english", "--zz"])
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    for name in ("--split-sentences", "--seq-length", "--lang"):
        assert f"{name} is not supported: {REFUSED[name]}" in said
    with pytest.raises(SystemExit):
        preprocess_data.parse_arguments([*required, "--zz", "1"])
    assert "unrecognized arguments: --zz 1" in capsys.readouterr().err


def test_newlines_are_kept() -> None:
    given = ["--input", "x.jsonl", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer", "--keep-newlines"]
    assert preprocess_data.parse_arguments(given).keep_newlines
