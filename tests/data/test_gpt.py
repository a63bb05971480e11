"""Index arrays of the GPT dataset, compared with a slow implementation of the rules, and their samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.blend import SeparateSets, content_of
from megatron.data.gpt import GPTDataset, build_datasets, plan_epochs, split_documents
from megatron.data.index import indexed
from megatron.data.index.indexed import DataError
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.config import DataConfig
from tests.data.datasets import open_dataset, write_dataset
from tests.data.twins import numpy_sample_index
from tests.ranks import HANG_S


def numpy_index(
    lengths: NDArray[np.int32], documents: range, num_samples: int, seq_length: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint32], int, bool]:
    """Oracle of GPTDataset's arrays with NumPy's generator, of the number of epochs, and of a separate last epoch."""
    tokens = int(lengths[documents.start : documents.stop].sum())
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.8 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    pieces = [(epochs - 1), 1] if separate else [epochs]
    document_parts = []
    for repeats in pieces:
        part = np.array(list(documents) * repeats, dtype=np.int32)
        random.shuffle(part)
        document_parts.append(part)
    document_index = np.concatenate(document_parts)
    shuffle_parts = []
    for begin, end in [(0, before_last), (before_last, total)] if separate else [(0, total)]:
        part_ids = np.arange(begin, end, dtype=np.uint32)
        random.shuffle(part_ids)
        shuffle_parts.append(part_ids)
    sample_index = numpy_sample_index(lengths, document_index, seq_length, total)
    return document_index, sample_index, np.concatenate(shuffle_parts), epochs, separate


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=30).filter(lambda found: sum(found[1:]) > 0),
    seq_length=st.integers(1, 40),
    num_samples=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_index_arrays_equal_the_numpy_twin(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, num_samples: int, seed: int
) -> None:
    data = open_dataset(tmp_path_factory.mktemp("d") / "d", lengths)
    documents = range(1, len(lengths))
    dataset = GPTDataset(data, documents, num_samples=num_samples, seq_length=seq_length, seed=seed)
    document_index, sample_index, shuffle_index, _, _ = numpy_index(
        np.array(lengths, np.int32), documents, num_samples, seq_length, seed
    )
    assert dataset.document_index.dtype == np.int32
    assert dataset.sample_index.dtype == np.int32
    assert dataset.shuffle_index.dtype == np.uint32
    assert np.array_equal(dataset.document_index, document_index)
    assert np.array_equal(dataset.sample_index, sample_index)
    assert np.array_equal(dataset.shuffle_index, shuffle_index)


@pytest.mark.parametrize(
    ("num_samples", "epochs", "separate"),
    [(10, 1, False), (99, 1, False), (100, 2, True), (177, 2, True), (178, 2, False), (199, 2, False), (210, 3, True)],
)
def test_a_last_epoch_below_80_percent_is_separate(num_samples: int, epochs: int, separate: bool) -> None:
    plan = plan_epochs(tokens_per_epoch=1000, num_samples=num_samples, seq_length=10)
    assert (plan.num_epochs, plan.separate_last_epoch) == (epochs, separate)
    assert plan.num_samples == (epochs * 1000 - 1) // 10


def test_a_separate_last_epoch_comes_last(tmp_path: Path) -> None:
    data = open_dataset(tmp_path / "d", [10] * 20)
    dataset = GPTDataset(data, range(20), num_samples=45, seq_length=10, seed=3)
    assert len(dataset) == 59
    assert set(dataset.shuffle_index[:39].tolist()) == set(range(39))
    assert set(dataset.document_index[40:].tolist()) == set(range(20))


def test_samples_are_cut_from_the_concatenated_documents(tmp_path: Path) -> None:
    lengths = [1, 7, 0, 1, 1, 12, 30, 2, 1, 5]
    data = open_dataset(tmp_path / "d", lengths)
    dataset = GPTDataset(data, range(10), num_samples=30, seq_length=7, seed=5)
    stream = np.concatenate([data.read(d) for d in dataset.document_index.tolist()])
    seen = np.zeros(len(stream), int)
    for i in range(len(dataset)):
        begin = 7 * int(dataset.shuffle_index[i])
        sample = dataset[i]
        assert sample.dtype == np.int64
        assert np.array_equal(sample, stream[begin : begin + 8])
        seen[begin : begin + 7] += 1
    # every token is the input of exactly one sample, but for those too few for a last one
    assert seen[: 7 * len(dataset)].tolist() == [1] * (7 * len(dataset))
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[outside]


def test_splits_are_contiguous_rounded_and_whole() -> None:
    assert split_documents(1000, "949,50,1") == (range(949), range(949, 999), range(999, 1000))
    assert split_documents(10, "1") == (range(10), range(10, 10), range(10, 10))
    assert split_documents(3, "969,30,1") == (range(3), range(3, 3), range(3, 3))
    assert split_documents(7, "1,1,1") == (range(2), range(2, 5), range(5, 7))


def config(*data_path: str | Path, split: str = "8,1,1", cache: Path | None = None) -> DataConfig:
    return DataConfig(
        data_path=tuple(map(str, data_path)), split=split, data_cache_path=None if cache is None else str(cache)
    )


def test_build_datasets_splits_by_documents(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 20)
    datasets = build_datasets(config(tmp_path / "d"), seq_length=4, seed=1, num_samples=(50, 3, 0), vocab_size=60000)
    train, valid, test = datasets
    assert train is not None
    assert isinstance(valid, GPTDataset)
    assert test is None
    assert {int(t) for i in range(len(train)) for t in train[i]} == set(range(160))
    assert {int(t) for i in range(len(valid)) for t in valid[i]} <= set(range(160, 180))


def test_a_split_without_documents_is_none(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 3)
    _, valid, test = build_datasets(
        config(tmp_path / "d", split="969,30,1"), seq_length=4, seed=1, num_samples=(5, 5, 5), vocab_size=9999
    )
    assert valid is None
    assert test is None


def build_train(data: DataConfig, seq_length: int = 4, vocab_size: int = 60000) -> GPTDataset:
    train, _, _ = build_datasets(data, seq_length=seq_length, seed=1, num_samples=(5, 0, 0), vocab_size=vocab_size)
    assert isinstance(train, GPTDataset)
    return train


def test_too_little_training_text_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    assert len(build_train(config(tmp_path / "d"), seq_length=79)) >= 5
    with pytest.raises(DataError, match=r"hold 80 tokens, less than one sample of seq_length \+ 1 = 81"):
        build_train(config(tmp_path / "d"), seq_length=80)


def test_a_vocabulary_beyond_the_dtype_is_refused_when_built(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    with pytest.raises(DataError, match="uint16, up to 65535, but vocab_size=250880"):
        build_train(config(tmp_path / "d"), vocab_size=250880)


def test_an_id_outside_the_vocabulary_is_refused_when_built(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    with pytest.raises(DataError, match=r"d: token \d+ is \d+, outside vocab_size=73"):
        build_train(config(tmp_path / "d", split="1"), vocab_size=73)


def test_an_id_outside_the_vocabulary_is_named_with_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "VOCABULARY_PARTS", 0)  # as of an id in a part that opening leaves out
    write_dataset(tmp_path / "d", [10] * 10)
    train = build_train(config(tmp_path / "d", split="1"), vocab_size=73)
    everything = range(len(train))
    with pytest.raises(DataError, match=r"d: token (\d) of document (\d) is \2\1, outside vocab_size=73"):
        [train[i] for i in everything]


def test_index_arrays_are_cached_beside_the_data_and_mapped(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    first = build_train(config(tmp_path / "d"))
    cached = sorted(path.name for path in (tmp_path / "cache").glob("*.npy"))
    assert len(cached) == 3
    stamps = [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").glob("*.npy"))]
    second = build_train(config(tmp_path / "d"))
    assert not second.shuffle_index.flags.writeable
    assert np.array_equal(first.shuffle_index, second.shuffle_index)
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").glob("*.npy"))] == stamps
    assert first.fingerprint == second.fingerprint


def test_changed_data_gets_other_cache_files(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    before = build_train(config(tmp_path / "d"))
    write_dataset(tmp_path / "d", [9, 11] * 5)
    after = build_train(config(tmp_path / "d"))
    assert before.fingerprint != after.fingerprint
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 6
    assert len(after[0]) == 5


def test_a_damaged_cache_file_is_rebuilt(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    expected = build_train(config(tmp_path / "d")).sample_index.copy()
    for damage in (b"", b"garbage", None):
        (path,) = (tmp_path / "cache").glob("*sample_index.npy")
        path.write_bytes(path.read_bytes()[:-8] if damage is None else damage)
        assert np.array_equal(build_train(config(tmp_path / "d")).sample_index, expected)
        assert np.array_equal(np.load(path, allow_pickle=False), expected)


def test_a_pickle_in_the_cache_is_not_executed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    expected = build_train(config(tmp_path / "d")).shuffle_index.copy()
    (path,) = (tmp_path / "cache").glob("*shuffle_index.npy")
    with path.open("wb") as file:
        np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    assert np.array_equal(build_train(config(tmp_path / "d")).shuffle_index, expected)


def test_a_cache_folder_that_cannot_be_written_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    (tmp_path / "file").write_text("in the way")
    train = build_train(config(tmp_path / "d", cache=tmp_path / "file"))
    assert len(train[0]) == 5
    assert "cannot write the index cache" in caplog.text


def test_racing_processes_share_one_whole_cache(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 1000)
    program = (
        "import sys; from megatron.options.config import DataConfig; from megatron.data.gpt import build_datasets\n"
        "train, _, _ = build_datasets(DataConfig(data_path=(sys.argv[1],)), seq_length=4, seed=1,"
        " num_samples=(5000, 0, 0), vocab_size=60000)\n"
        "print(train.fingerprint, train[0].tolist(), train[4999].tolist())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {run.communicate(timeout=HANG_S)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(said) == 1
    assert sum(name.endswith(".npy") for name in os.listdir(tmp_path / "cache")) == 3
    assert not [name for name in os.listdir(tmp_path / "cache") if "partial" in name]


def test_the_fingerprint_depends_on_the_order_not_on_the_requested_number(tmp_path: Path) -> None:
    """24 samples an epoch; the last of several is shuffled separately if fewer than 19 of it are needed."""
    data = open_dataset(tmp_path / "d", [10] * 10)

    def dataset(count: int | None, seq_length: int = 4, seed: int = 1, stop: int = 10) -> GPTDataset:
        return GPTDataset(data, range(stop), num_samples=count, seq_length=seq_length, seed=seed)

    assert len({dataset(count).fingerprint for count in (None, 1, 24)}) == 1
    assert len({dataset(count).fingerprint for count in (25, 30, 42)}) == 1  # two epochs, the second apart
    assert len({dataset(count).fingerprint for count in (44, 49)}) == 1  # two epochs together
    others = [dataset(24), dataset(30), dataset(49), dataset(24, 5), dataset(24, seed=2), dataset(24, stop=9)]
    assert len({other.fingerprint for other in others}) == len(others)
    assert len({content_of(other.fingerprint) for other in others}) == 4  # the first three differ in epochs alone


def test_without_a_number_of_samples_there_is_one_epoch(tmp_path: Path) -> None:
    data = open_dataset(tmp_path / "d", [10] * 10)
    assert len(GPTDataset(data, range(10), num_samples=None, seq_length=4, seed=1)) == 24
    with pytest.raises(DataError, match="hold no tokens"):
        GPTDataset(data, range(3, 3), num_samples=None, seq_length=4, seed=1)


def test_a_file_of_floats_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10, np.float32)
    with pytest.raises(DataError, match="holds float32, not token ids"):
        build_train(config(tmp_path / "d"))


@pytest.mark.parametrize(("place", "value"), [(1, 7), (2, -20), (1, 2**40)])
def test_a_wrong_pointer_within_the_index_is_an_error_when_read(tmp_path: Path, place: int, value: int) -> None:
    """Opening checks the first and the last pointer only; the split's sum does not see this one."""
    write_dataset(tmp_path / "d", [10] * 10)
    idx = tmp_path / "d.idx"
    raw = bytearray(idx.read_bytes())
    begin = 34 + 4 * 10 + 8 * place
    raw[begin : begin + 8] = value.to_bytes(8, "little", signed=True)
    idx.write_bytes(raw)
    train = build_train(config(tmp_path / "d", split="1"))
    with pytest.raises(DataError, match=f"document {place} lies at byte {value} .*damaged"):
        train.get_batch(range(len(train)))


def test_an_index_cache_of_other_samples_is_an_error_when_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    build_train(config(tmp_path / "d", split="1"))
    (path,) = (tmp_path / "cache").glob("*sample_index.npy")
    wrong = np.load(path)
    wrong[:, 0] = 0
    np.save(path, wrong)
    train = build_train(config(tmp_path / "d", split="1"))
    with pytest.raises(DataError, match=r"sample_index\[\d+\] .*delete the cache"):
        train.get_batch(range(len(train)))


@pytest.mark.parametrize(
    "path", [(), ("1", "a", "b", "c"), ("1", "a", "2"), ("0", "a"), ("-1", "a", "1", "b"), ("nan", "a")]
)
def test_an_invalid_data_path_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="WEIGHT PREFIX"):
        build_datasets(config(*path), seq_length=4, seed=1, num_samples=(1, 0, 0), vocab_size=9)


def test_sentences_are_not_trained_as_documents_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document(range(9), [4, 3, 2])
        builder.add_document(range(9), [9])
        builder.finalize()
    whole = write_dataset(tmp_path / "whole", [9, 9])
    for prefix, said in ((tmp_path / "d", 1), (whole, 0)):
        caplog.clear()
        config = DataConfig(data_path=(str(prefix),), split="1,0,0")
        build_datasets(config, seq_length=2, seed=1, num_samples=(4, 0, 0), vocab_size=100)
        assert caplog.text.count("has 4 sequences in 2 documents, as of --split-sentences") == said


@pytest.mark.parametrize("split", ["1,0,0", "1,1,0"])
def test_weights_that_count_documents_mix_so_many_of_each(tmp_path: Path, split: str) -> None:
    """Counted in the samples by the first token of each document, which no other token equals."""
    lengths = {"long": [90, 110] * 100, "short": [5] * 300, "middle": [30] * 400}
    for number, (name, of_each) in enumerate(lengths.items()):
        tokens = np.full(sum(of_each), 9)
        tokens[np.cumsum(of_each) - of_each] = number
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            builder.add_documents(tokens, of_each)
            builder.finalize()
    path = [word for pair in zip(("3", "2", "1"), lengths, strict=True) for word in (pair[0], str(tmp_path / pair[1]))]
    shares: dict[tuple[str, int], NDArray[np.float64]] = {}
    kinds: tuple[Literal["documents", "samples"], ...] = ("documents", "samples")
    for kind in kinds:
        data = DataConfig(data_path=tuple(path), split=split, blend_weights=kind)
        for dataset in build_datasets(data, seq_length=20, seed=1, num_samples=(4000, 4000, 0), vocab_size=10)[:2]:
            if dataset is None:
                continue
            assert not isinstance(dataset, SeparateSets)
            # [:-1]: the last token of a sample is the first of another
            samples = dataset.get_batch(np.arange(4000))[:, :-1]
            counts = np.bincount(samples.ravel(), minlength=10)[:3]
            shares[kind, len(shares)] = counts / counts.sum()
    for (unit, _), found in shares.items():
        expected = np.array([3, 2, 1])
        # by samples, a dataset of short documents gives more of them
        if unit == "samples":
            expected = expected / [100, 5, 30]
        np.testing.assert_allclose(found, expected / expected.sum(), atol=0.01)
    assert len(shares) == (4 if split == "1,1,0" else 2)


def test_held_out_losses_are_weighted_by_documents_too(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [100] * 20)
    write_dataset(tmp_path / "b", [10] * 50)
    path = ("1", str(tmp_path / "a"), "1", str(tmp_path / "b"))
    data = DataConfig(data_path=path, split="1,1,0", blend_weights="documents", multiple_validation_sets=True)
    held_out = build_datasets(data, seq_length=10, seed=1, num_samples=(10, 10, 0), vocab_size=60000)[1]
    assert isinstance(held_out, SeparateSets)
    assert held_out.weights is not None
    np.testing.assert_allclose(held_out.weights, [10 / 11, 1 / 11])
