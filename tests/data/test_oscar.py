"""The commands of examples/oscar/README.md as they stand, on a slice of text in the forms of OSCAR's releases."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megatron.data.index.indexed import IndexedDataset
from megatron.data.tokenizers.build import build_tokenizer
from tests.test_readme import ROOT, run

PAGE = ROOT / "examples" / "oscar" / "README.md"
NUM_DOCUMENTS = 40
"""Of each language and release."""


def row(number: int, text: str) -> dict[str, Any]:
    """A row of 22.01 and 23.01."""
    return {
        "content": text,
        "warc_headers": {"warc-record-id": f"<urn:uuid:{number}>", "content-length": str(len(text))},
        "metadata": {"identification": {"label": "en", "prob": 0.9}, "quality_warnings": None},
    }


def write_shards(
    folder: Path, ending: str, compress: Callable[[bytes], bytes], documents: list[bytes], gap: bytes
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = len(documents) // 2
    for part, of_part in enumerate((documents[:half], documents[half:]), start=1):
        (folder / f"en_{ending.format(part)}").write_bytes(compress(gap.join(of_part) + b"\n"))


@pytest.fixture(scope="module")
def texts(test_data: Path) -> dict[str, list[str]]:
    """Documents by language and release."""
    english, french = (
        [json.loads(line)["text"] for line in (test_data / name).read_text(encoding="utf-8").splitlines()]
        for name in ("corpus_en.jsonl", "corpus_multi.jsonl")
    )
    # of 21.09 each line is one of the document
    old = [re.sub(r"\n\n+", "\n", text).strip() for text in english[NUM_DOCUMENTS : 2 * NUM_DOCUMENTS]]
    return {"en": english[:NUM_DOCUMENTS], "fr": french[:NUM_DOCUMENTS], "en-2109": old}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, list[str]]) -> Path:
    """Return a checkout with shards beside it, each in the form of its release, with what is downloaded with them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "scripts", "megatron"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    rows = {
        language: [json.dumps(row(*each)).encode() for each in enumerate(texts[language])] for language in ("en", "fr")
    }
    zst = zstandard.ZstdCompressor().compress
    write_shards(folder / "oscar" / "en", "meta_part_{}.jsonl.zst", zst, rows["en"], b"\n")
    write_shards(folder / "oscar" / "fr", "meta_part_{}.jsonl.gz", gzip.compress, rows["fr"], b"\n")
    old = [text.encode() for text in texts["en-2109"]]
    write_shards(folder / "oscar-2109" / "en", "part_{}.txt.gz", gzip.compress, old, b"\n\n")
    metadata = [b'{"headers": {}, "offset": 0, "nb_sentences": 3}'] * NUM_DOCUMENTS
    write_shards(folder / "oscar-2109" / "en", "meta_part_{}.jsonl.gz", gzip.compress, metadata, b"\n")
    (folder / "oscar-2109" / "en" / "en_sha256.txt").write_text("0" * 64 + "  en_part_1.txt.gz\n")
    return folder


def blocks() -> list[str]:
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def shuffled(downloaded: Path) -> Path:
    tokenize, shuffle, _ = blocks()
    run(tokenize, downloaded)
    run(shuffle, downloaded)
    return downloaded


def test_the_shards_become_shuffled_datasets_of_the_same_texts(shuffled: Path, texts: dict[str, list[str]]) -> None:
    tokenizer = build_tokenizer("HFTokenizer", str(shuffled / "out" / "tokenizer"))
    for language, expected in (("en", texts["en"] + texts["en-2109"]), ("fr", texts["fr"])):
        data = IndexedDataset(shuffled / "out" / "data" / language)
        found = []
        for number in range(data.num_documents):
            ids = data.read(number).tolist()
            assert ids[-1] == tokenizer.eod
            found.append(tokenizer.decode(ids[:-1]).strip())
        expected = [text.strip() for text in expected]
        assert sorted(found) == sorted(expected)
        assert found != expected
        # the releases are mixed: half of either is in each half
        if language == "en":
            of_old = sum(text in expected[NUM_DOCUMENTS:] for text in found[:NUM_DOCUMENTS])
            assert 10 <= of_old <= 30


def test_the_run_is_planned_with_weights_of_documents(shuffled: Path) -> None:
    printed = run(blocks()[2], shuffled, HL_DRY_RUN="1")
    assert f"documents      {2 * NUM_DOCUMENTS}" in printed
    assert "shuffle_seed   1234" in printed
    assert "--data-path 3 out/data/en 1 out/data/fr" in printed


@pytest.mark.slow
def test_the_run_trains_on_the_mix(shuffled: Path) -> None:
    printed = run(blocks()[2], shuffled)
    assert "iteration       40/      40" in printed
    english, french = (IndexedDataset(shuffled / "out" / "data" / language) for language in ("en", "fr"))
    shares = [3 * english.num_tokens / english.num_documents, french.num_tokens / french.num_documents]
    found = re.search(r"out/data/en: [\d,]+ samples \(([\d.]+)%\)", printed)
    assert found is not None, printed
    # the documents of the training split, not of all
    assert abs(float(found[1]) / 100 - shares[0] / sum(shares)) < 0.05
