"""The corpus of the preprocessing benchmark: made anew alike, and never twice the same text."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from benchmarks.preprocess import check_corpus, documents, write_beginning, write_corpus

SENTENCE = "The quick brown fox jumps over the lazy dog near a quiet river bank. "
UNSPACED = "私はその人を常に先生と呼んでいた。だからここでもただ先生と書くだけで本名は打ち明けない。"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, text in (("corpus_en.jsonl", SENTENCE), ("corpus_multi.jsonl", UNSPACED)):
        (tmp_path / name).write_text(json.dumps({"text": text * 20}) + "\n", encoding="utf-8")
    return tmp_path


def test_the_corpus_depends_on_its_size_alone(data: Path) -> None:
    for name in ("once", "again"):
        write_corpus(data / name, data, 100_000)
    assert (data / "once").read_bytes() == (data / "again").read_bytes()
    assert 95_000 < (data / "once").stat().st_size <= 100_000
    check_corpus(data / "once", 100_000)
    with pytest.raises(SystemExit, match="delete it, or name another"):
        check_corpus(data / "once", 200_000)


def test_no_two_documents_are_equal_and_new_words_keep_coming(data: Path) -> None:
    texts = list(islice(documents(data, Random(0)), 200))
    assert len(set(texts)) == len(texts)
    early, all_words = ({word for text in part for word in text.split(" ")} for part in (texts[:100], texts))
    assert len(all_words) > 1.5 * len(early)


def test_a_beginning_holds_whole_lines(data: Path) -> None:
    write_corpus(data / "corpus", data, 50_000)
    write_beginning(data / "beginning", data / "corpus", 20_000)
    whole, beginning = (data / "corpus").read_bytes(), (data / "beginning").read_bytes()
    assert whole.startswith(beginning)
    assert beginning.endswith(b"\n")
    assert 15_000 < len(beginning) <= 20_000
    write_beginning(data / "line", data / "corpus", 0)
    assert (data / "line").read_bytes() == whole.splitlines(keepends=True)[0]
