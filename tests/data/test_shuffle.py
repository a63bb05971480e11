"""tools/merge_datasets.py --shuffle: the order against NumPy's sorting, its uniformity, and the bounds it promises.

Kills and full disks are in test_damaged_datasets.py.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.data import inspect_dataset, merge_datasets
from megatron.data.index import shuffle
from megatron.data.index.checksums import Checksums, read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset, Tokens
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.index.merge import check_space
from megatron.runtime.files import locked_output
from tests.data.datasets import open_dataset, write_dataset

REPOSITORY = Path(__file__).resolve().parent.parent.parent
Document = tuple[tuple[int, ...], ...]
"""The tokens of each of its sequences."""


def merge(*arguments: object) -> int:
    return merge_datasets.main([str(argument) for argument in arguments])


def documents_of(prefix: Path) -> list[Document]:
    data = IndexedDataset(prefix)
    bounds = data.document_index.tolist()
    return [
        tuple(tuple(data.read(sequence).tolist()) for sequence in range(begin, end))
        for begin, end in itertools.pairwise(bounds)
    ]


def write_documents(prefix: Path, documents: Sequence[Document]) -> Path:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in documents:
            builder.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
        builder.finalize()
    return prefix


def random_documents(generator: np.random.Generator, count: int) -> list[Document]:
    """Documents of up to three sequences; some have none, some sequences are empty."""
    return [
        tuple(tuple(generator.integers(0, 60000, generator.integers(0, 9)).tolist()) for _ in range(sequences))
        for sequences in generator.integers(0, 4, count).tolist()
    ]


@pytest.mark.parametrize("memory_gb", [2, 0.001])
def test_documents_are_sorted_by_the_numbers_of_pcg64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gb: float
) -> None:
    """In one part and in several, whatever the blocks, all documents of all datasets; damage would show in --verify."""
    generator = np.random.default_rng(0)
    monkeypatch.setattr(shuffle, "BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(shuffle, "BLOCK_BYTES", 50)
    if memory_gb < 1:
        monkeypatch.setattr(shuffle, "DOCUMENT_BYTES", 4000)
    given = [random_documents(generator, count) for count in (400, 1, 299)]
    inputs = [write_documents(tmp_path / str(number), documents) for number, documents in enumerate(given)]
    plan = shuffle.Shuffle([IndexedDataset(prefix) for prefix in inputs], 5, int(memory_gb * 1e9))
    assert plan.num_parts == (1 if memory_gb == 2 else 3)
    options = ["--shuffle", 5, "--shuffle-memory-gb", memory_gb]
    assert merge("--input", *inputs, *options, "--output-prefix", tmp_path / "out" / "d") == 0
    whole = [document for documents in given for document in documents]
    order = np.argsort(np.random.PCG64(5).random_raw(len(whole)))
    assert documents_of(tmp_path / "out" / "d") == [whole[number] for number in order]
    assert inspect_dataset.main([str(tmp_path / "out" / "d"), "--verify"]) == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["d.bin", "d.idx", "d.sha256"]


class Recorder:
    """Stand-in of a builder that keeps the first token of each document."""

    def __init__(self, folder: Path):
        self.work_dir, self.dtype = folder, np.dtype("<u2")
        self.firsts: list[int] = []

    def check_input(self, dataset: IndexedDataset) -> Checksums | None:
        return None

    def add_cut_documents(self, tokens: Tokens, lengths: Tokens, sequences: Tokens) -> None:
        self.firsts += tokens[np.cumsum(lengths) - lengths].tolist()


def order_of(data: IndexedDataset, seed: int, memory_bytes: int, folder: Path) -> list[int]:
    plan, recorder = shuffle.Shuffle([data], seed, memory_bytes), Recorder(folder)
    parts = plan.divide(recorder, abs)  # type: ignore[arg-type]
    plan.add_sorted(recorder, parts, abs)  # type: ignore[arg-type]
    return recorder.firsts


# in one part, and in four: then each document is in one of its own unless two numbers are close
@pytest.mark.parametrize("memory_bytes", [10**6, 2 + shuffle.SEQUENCE_BYTES + shuffle.DOCUMENT_BYTES])
def test_all_orders_are_equally_frequent(tmp_path: Path, memory_bytes: int) -> None:
    data = open_dataset(tmp_path / "d", [1, 1, 1, 1])
    times = 12
    found = Counter(tuple(order_of(data, seed, memory_bytes, tmp_path)) for seed in range(24 * times))
    assert {tuple(sorted(order)) for order in found} == {(0, 1, 2, 3)}
    assert len(found) == 24
    # chi-square of 23 degrees of freedom: beyond 62 once in 20,000 sets of seeds
    assert sum((count - times) ** 2 / times for count in found.values()) < 62


def test_neighbours_part_and_places_do_not_depend_on_each_other(tmp_path: Path) -> None:
    count = 20_000
    data = open_dataset(tmp_path / "d", [1] * count)
    order = np.array(order_of(data, 1, 100_000, tmp_path))
    assert np.array_equal(np.sort(order), np.arange(count))
    # one in expectation; nine or more once in a million
    assert (np.diff(order) == 1).sum() < 9
    # the standard deviation is 1 / sqrt(count)
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 5 / count**0.5
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / count**0.5


def test_datasets_of_the_same_documents_keep_belonging_together(tmp_path: Path) -> None:
    """Such as texts and titles, or chats and their loss masks; and the order is that of the shards' whole."""
    generator = np.random.default_rng(3)
    texts, titles = (
        [((number, *generator.integers(0, 9, generator.integers(0, 50)).tolist()),) for number in range(300)]
        for _ in range(2)
    )
    whole = write_documents(tmp_path / "whole", texts)
    first, second = write_documents(tmp_path / "1", texts[:90]), write_documents(tmp_path / "2", texts[90:])
    of_titles = write_documents(tmp_path / "titles", titles)
    for name, inputs in (("a", [whole]), ("b", [first, second]), ("c", [of_titles]), ("d", [whole])):
        assert merge("--input", *inputs, "--shuffle", 8 + (name == "d"), "--output-prefix", tmp_path / name) == 0
    a, b, c, d = (documents_of(tmp_path / name) for name in "abcd")
    assert a == b
    assert [document[0][0] for document in a] == [document[0][0] for document in c]
    assert a != d
    assert sorted(a) == sorted(d) == texts


PEAK_BYTES = """
import resource, sys
from megatron.cli.data import merge_datasets
assert merge_datasets.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(*arguments: object) -> int:
    command = [sys.executable, "-c", PEAK_BYTES, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("longest", [60, 400_000])
def test_the_memory_stays_below_its_bound(tmp_path: Path, longest: int) -> None:
    """Of a dataset nine times the bound, whose documents are short, or each up to a third of it."""
    bound, num_bytes = 5_000_000, 15_000_000
    if longest > 1000:
        bound, num_bytes = 3_000_000, 27_000_000
    lengths = np.random.default_rng(0).integers(1, longest, num_bytes // longest)
    large, small = write_dataset(tmp_path / "large", lengths.tolist()), write_dataset(tmp_path / "small", [1])
    of_program = peak_bytes("--input", small, "--output-prefix", tmp_path / "out")
    options = ["--shuffle", 1, "--shuffle-memory-gb", bound / 1e9]
    assert peak_bytes("--input", large, *options, "--output-prefix", tmp_path / "shuffled") < of_program + bound
    assert IndexedDataset(tmp_path / "shuffled").num_tokens == lengths.sum()


def test_the_disk_never_holds_more_than_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 10_000)
    prefix = write_dataset(tmp_path / "large", lengths.tolist())
    largest = 0

    class Watched(IndexedDatasetBuilder):
        def add_cut_documents(self, tokens: Tokens, lengths: Tokens, sequences: Tokens) -> None:
            super().add_cut_documents(tokens, lengths, sequences)
            self._flush()
            nonlocal largest
            largest = max(largest, sum(path.stat().st_size for path in self.work_dir.iterdir()))

    needed: list[int] = []
    monkeypatch.setattr("megatron.data.index.merge.IndexedDatasetBuilder", Watched)
    monkeypatch.setattr("megatron.data.index.merge.disk_shortage", lambda _, num_bytes: needed.append(num_bytes))
    assert merge("--input", prefix, "--shuffle", 1, "--shuffle-memory-gb", 1e-3, "--output-prefix", tmp_path / "d") == 0
    assert 2 * lengths.sum() < largest <= needed[0]
    check_space([IndexedDataset(prefix)], tmp_path)
    assert needed[1] == needed[0], "a merge in order needs as much"


def test_a_document_longer_than_the_memory_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_dataset(tmp_path / "d", [10, 3_000_000, 10])
    command = ["--input", prefix, "--output-prefix", tmp_path / "out", "--shuffle", "1", "--shuffle-memory-gb"]
    assert merge(*command, 0.003) == 1
    said = capsys.readouterr().err
    assert "--shuffle-memory-gb 0.003 is too little" in said
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx", "d.sha256"]
    # what it says is enough
    assert merge(*command, said.split("give at least ")[1].strip()) == 0
    assert sorted(IndexedDataset(tmp_path / "out").lengths.tolist()) == [10, 10, 3_000_000]


@pytest.mark.parametrize("damage", ["lengths", "documents", "pointers", "tokens"])
def test_damaged_inputs_are_named_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (tmp_path / "in").mkdir()
    prefix = write_dataset(tmp_path / "in" / "d", [5] * 100)
    # 34 bytes of header, 4 for each length, 8 for each pointer and document
    at = {"lengths": 34 + 4 * 50, "pointers": 434 + 8 * 50, "documents": 1234 + 8 * 50, "tokens": 500}[damage]
    path = prefix.with_suffix(".bin" if damage == "tokens" else ".idx")
    content = bytearray(path.read_bytes())
    content[at] ^= 200
    path.write_bytes(content)
    if damage != "tokens":
        (tmp_path / "in" / "d.sha256").unlink()
    command = ["--input", prefix, "--shuffle", 1, "--output-prefix", tmp_path / "out" / "d"]
    assert merge(*command) == 1
    said = capsys.readouterr().err
    assert ("d.bin has the SHA-256" if damage == "tokens" else "disagree within its documents 0 to 100") in said
    assert os.listdir(tmp_path / "out") == []


def test_the_seed_is_noted_and_only_for_the_whole(tmp_path: Path) -> None:
    a, b = write_dataset(tmp_path / "a", [2, 3]), write_dataset(tmp_path / "b", [4, 1])
    for name in "ab":
        assert merge("--input", tmp_path / name, "--shuffle", 4, "--output-prefix", tmp_path / "s" / name) == 0
    assert merge("--input", tmp_path / "s", "--output-prefix", tmp_path / "both") == 0
    notes = []
    for prefix in (a, tmp_path / "s" / "a", tmp_path / "both"):
        checksums = read_checksums(prefix)
        assert checksums is not None
        notes.append(checksums.notes)
    assert notes == [{}, {"shuffle_seed": 4}, {}]
    # a manifest says so too
    lost = ("blank", "empty", "bad")
    manifest = {
        "format": "manifest of an indexed dataset", "version": 1, "tokenizer": None, "options": {}, "shard": None,
        "dataset": {"sha256": {}}, "files": [{"name": "x", "bytes": 5, "documents": 2}],
        "counts": {"files_read": 1, "files_passed_over": 0, "bytes": 5, "documents": 2} | dict.fromkeys(lost, 0),
    }  # fmt: skip
    Path(f"{b}.manifest.json").write_text(json.dumps(manifest))
    assert merge("--input", b, "--shuffle", 4, "--output-prefix", tmp_path / "c") == 0
    assert json.loads((tmp_path / "c.manifest.json").read_text())["options"] == {"--shuffle": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shuffle-memory-gb", "1"], "has no effect without --shuffle SEED"),
        (["--shuffle", "-1"], "--shuffle must not be negative"),
        (["--shuffle", "1", "--shuffle-memory-gb", "nan"], "--shuffle-memory-gb must be at least 0.001"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        merge("--input", "a", "--output-prefix", "b", *options)
    assert message in capsys.readouterr().err


def test_two_processes_do_not_write_the_same_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "a", [2, 3])
    with locked_output(tmp_path / "out.merging"):
        assert merge("--input", prefix, "--output-prefix", tmp_path / "out") == 1
    assert f"another process is writing {tmp_path}/out" in capsys.readouterr().err
    assert merge("--input", prefix, "--output-prefix", tmp_path / "out") == 0


def test_a_truncation_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    data = open_dataset(tmp_path / "d", [5] * 100)
    plan = shuffle.Shuffle([data], 1, 10**6)
    os.truncate(tmp_path / "d.bin", 10)
    with pytest.raises(DataError, match="it was truncated while it was read"):
        plan.divide(Recorder(tmp_path), abs)  # type: ignore[arg-type]
