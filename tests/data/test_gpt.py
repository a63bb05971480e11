"""The GPT dataset's index arrays, against a slow reading of the same rules, and the samples they give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.config import DataConfig
from megatron.data import helpers
from megatron.data.blend import BlendedDataset
from megatron.data.gpt import GPTDataset, build_datasets, plan_epochs, split_documents
from megatron.data.indexed import DataError
from tests.data.datasets import open_dataset, write_dataset


def numpy_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int, num_samples: int
) -> NDArray[np.int64]:
    """Twin of helpers.build_sample_index: sample k begins in the document that holds token k * seq_length."""
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, boundaries, side="right")
    positions[0] = 0  # an empty first document is where the stream begins all the same
    begins = np.concatenate(([0], ends))[positions]
    offsets = boundaries - begins
    offsets[0] = 0
    return np.stack((positions, offsets), axis=1)


def walked_sample_index(
    lengths: list[int], document_index: list[int], seq_length: int, num_samples: int
) -> list[list[int]]:
    """The same, token by token, as the format describes it."""
    stream = [(p, o) for p, document in enumerate(document_index) for o in range(lengths[document])]
    return [[0, 0]] + [list(stream[k * seq_length]) for k in range(1, num_samples + 1)]


def numpy_index(
    lengths: NDArray[np.int32], documents: range, num_samples: int, seq_length: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint32], int, bool]:
    """Twin of GPTDataset's arrays, on numpy's own generator; also the number of epochs, and if the last is separate."""
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


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    seq_length=st.integers(1, 25),
    epochs=st.integers(1, 5),
    data=st.data(),
)
def test_cpp_sample_index_equals_numpy(lengths: list[int], seq_length: int, epochs: int, data: st.DataObject) -> None:
    document_index = data.draw(st.permutations(list(range(len(lengths))) * epochs))
    num_samples = max(0, (sum(lengths) * epochs - 1) // seq_length)
    sizes, order = np.array(lengths, np.int32), np.array(document_index, np.int32)
    built = helpers.build_sample_index(sizes, order, seq_length, num_samples)
    assert built.dtype == np.int32
    assert built.tolist() == walked_sample_index(lengths, document_index, seq_length, num_samples)
    assert built.tolist() == numpy_sample_index(sizes, order, seq_length, num_samples).tolist()


def test_cpp_sample_index_reads_unaligned_lengths() -> None:
    raw = b"??" + np.array([3, 4, 5], np.int32).tobytes()
    lengths = np.frombuffer(raw, np.int32, 3, 2)
    built = helpers.build_sample_index(lengths, np.array([2, 0, 1], np.int32), 4, 2)
    assert built.tolist() == [[0, 0], [0, 4], [2, 0]]


def test_cpp_sample_index_counts_beyond_32_bits() -> None:
    """Six documents of the largest length: 12.9e9 tokens."""
    largest = 2**31 - 1
    lengths, order = np.array([largest], np.int32), np.zeros(6, np.int32)
    built = helpers.build_sample_index(lengths, order, 2**32, 2)
    assert built.tolist() == [[0, 0], [2, 2], [4, 4]]


@pytest.mark.parametrize(
    ("lengths", "document_index", "seq_length", "num_samples", "message"),
    [
        ([3, 4], [0, 2], 2, 3, "outside the 2 documents"),
        ([3, 4], [0, -1], 2, 3, "outside the 2 documents"),
        ([3, -4], [0, 1], 2, 3, "impossible length -4"),
        ([3, 4], [0, 1], 2, 4, "too few"),
        ([3, 4], [0, 1], 0, 1, "seq_length=0"),
        ([3, 4], [0, 1], 1, -1, "num_samples=-1"),
        ([3, 4], [0, 1], 2**40, 2**40, "beyond 64 bits"),
        ([3, 4], [], 1, 1, "empty"),
    ],
)
def test_cpp_sample_index_raises_on_impossible_input(
    lengths: list[int], document_index: list[int], seq_length: int, num_samples: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        helpers.build_sample_index(
            np.array(lengths, np.int32), np.array(document_index, np.int32), seq_length, num_samples
        )


def test_cpp_sample_index_takes_no_silent_copies() -> None:
    good = np.array([3, 4], np.int32)
    wrong_arrays: list[Any] = [good.astype(np.int64), np.array([3, 0, 4, 0], np.int32)[::2]]
    for wrong in wrong_arrays:
        with pytest.raises(TypeError):
            helpers.build_sample_index(wrong, good, 2, 1)


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 65, 66, 1000, 70000])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_cpp_shuffle_equals_numpy(seed: int, size: int, dtype: type[np.integer]) -> None:
    ours, theirs = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    shuffler, random = helpers.Shuffler(seed), np.random.RandomState(seed)
    for _ in range(2):  # the second goes on from the first's state
        shuffler.shuffle(ours)
        random.shuffle(theirs)
        assert np.array_equal(ours, theirs)


def test_cpp_shuffle_refuses_what_it_cannot_shuffle_in_place() -> None:
    read_only = np.arange(4)
    read_only.flags.writeable = False
    shuffler = helpers.Shuffler(1)
    wrong_arrays: list[Any] = [
        np.arange(8)[::2],
        np.zeros((2, 2), np.int64),
        np.zeros(3),
        np.zeros(3, np.int16),
        read_only,
    ]
    for wrong in wrong_arrays:
        with pytest.raises(ValueError):
            shuffler.shuffle(wrong)
    with pytest.raises(ValueError, match="seed=-1"):
        helpers.Shuffler(-1)


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


def test_samples_are_the_documents_laid_end_to_end(tmp_path: Path) -> None:
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
    assert valid is not None
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


def test_an_id_outside_the_vocabulary_is_named_with_its_document(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [10] * 10)
    train = build_train(config(tmp_path / "d", split="1"), vocab_size=73)
    everything = range(len(train))
    with pytest.raises(DataError, match=r"d: token 3 of document 7 is 73, outside vocab_size=73"):
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


def test_a_damaged_cache_file_is_built_anew(tmp_path: Path) -> None:
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


def test_a_cache_folder_that_cannot_be_written_is_said_and_done_without(
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
        "import sys; from megatron.config import DataConfig; from megatron.data.gpt import build_datasets\n"
        "train, _, _ = build_datasets(DataConfig(data_path=(sys.argv[1],)), seq_length=4, seed=1,"
        " num_samples=(5000, 0, 0), vocab_size=60000)\n"
        "print(train.fingerprint, train[0].tolist(), train[4999].tolist())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(said) == 1
    assert sum(name.endswith(".npy") for name in os.listdir(tmp_path / "cache")) == 3
    assert not [name for name in os.listdir(tmp_path / "cache") if "partial" in name]


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0.001, 10), min_size=1, max_size=8), size=st.integers(0, 300))
def test_cpp_blend_index_equals_numpy(weights: list[float], size: int) -> None:
    normalized = np.array(weights) / np.sum(weights)
    drawn = np.zeros(len(weights))
    expected = []
    for i in range(size):
        neediest = int(np.argmax(normalized * max(i, 1) - drawn))  # argmax: the first of equals
        expected.append((neediest, int(drawn[neediest])))
        drawn[neediest] += 1
    dataset_index, sample_index = helpers.build_blend_index(normalized, size)
    assert dataset_index.dtype == np.int16
    assert sample_index.dtype == np.int64
    assert list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == expected


@pytest.mark.parametrize("weights", [[], [0.5, -0.5], [float("nan")], [float("inf")], [0.1] * 32768])
def test_cpp_blend_index_raises_on_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError):
        helpers.build_blend_index(np.array(weights), 3)


def test_a_blend_mixes_by_weight_and_in_each_datasets_order(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", [10] * 50)
    write_dataset(tmp_path / "b", [10] * 50, np.int32)
    path = ("3", str(tmp_path / "a"), "1", str(tmp_path / "b"))
    train, valid, _ = build_datasets(config(*path), seq_length=4, seed=1, num_samples=(101, 10, 0), vocab_size=60000)
    assert isinstance(train, BlendedDataset)
    assert valid is not None
    assert len(train) == 76 + 26  # each share rounded up
    assert np.bincount(train.dataset_index[:100]).tolist() == [75, 25]
    for d in (0, 1):
        picked = train.dataset_sample_index[train.dataset_index == d]
        assert picked.tolist() == list(range(len(picked)))
    i = int(np.flatnonzero(train.dataset_index == 1)[5])
    assert np.array_equal(train[i], train.datasets[1][5])
    with pytest.raises(IndexError):
        train[len(train)]


def test_every_sample_of_a_blend_of_many_small_weights_exists(tmp_path: Path) -> None:
    """Rounding can draw more from a dataset than its surplus: megatron-core then fails at that sample."""
    path: list[str] = []
    weights = np.random.default_rng(0).dirichlet(np.full(40, 0.3))
    for d, weight in enumerate(weights):
        write_dataset(tmp_path / str(d), [5, 4])
        path += [str(weight + 1e-6), str(tmp_path / str(d))]
    train, _, _ = build_datasets(
        config(*path, split="1", cache=tmp_path / "c"), seq_length=3, seed=1, num_samples=(333, 0, 0), vocab_size=999
    )
    assert isinstance(train, BlendedDataset)
    assert len(train) >= 333
    for i in range(len(train)):
        assert len(train[i]) == 4


def test_a_blend_leaves_out_members_without_validation_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(tmp_path / "large", [10] * 100)
    write_dataset(tmp_path / "small", [10] * 2)
    path = ("1", str(tmp_path / "large"), "1", str(tmp_path / "small"))
    _, valid, _ = build_datasets(
        config(*path, split="9,1"), seq_length=4, seed=1, num_samples=(9, 9, 0), vocab_size=9999
    )
    assert isinstance(valid, BlendedDataset)
    assert set(valid.dataset_index.tolist()) == {0}
    assert "no valid documents in" in caplog.text


@pytest.mark.parametrize("path", [(), ("a", "b"), ("1", "a", "2"), ("0", "a"), ("-1", "a", "1", "b"), ("nan", "a")])
def test_a_data_path_that_is_no_blend_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="WEIGHT PREFIX"):
        build_datasets(config(*path), seq_length=4, seed=1, num_samples=(1, 0, 0), vocab_size=9)
