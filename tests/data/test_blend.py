"""Blends by weight and by size, paths for each split, and their samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.blend import BlendedDataset, content_of
from megatron.data.gpt import Datasets, GPTDataset, build_datasets
from megatron.data.index.indexed import DataError
from megatron.options.config import DataConfig
from tests.data.datasets import write_dataset
from tests.data.twins import numpy_blend


def config(*data_path: str | Path, split: str = "8,1,1", cache: Path | None = None) -> DataConfig:
    return DataConfig(
        data_path=tuple(map(str, data_path)), split=split, data_cache_path=None if cache is None else str(cache)
    )


def build(data: DataConfig, num_samples: tuple[int, int, int], seq_length: int = 4, seed: int = 1) -> Datasets:
    return build_datasets(data, seq_length=seq_length, seed=seed, num_samples=num_samples, vocab_size=60000)


def build_blend(data: DataConfig, num_samples: int, seq_length: int = 4) -> BlendedDataset:
    train, _, _ = build(data, (num_samples, 0, 0), seq_length)
    assert isinstance(train, BlendedDataset)
    return train


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Datasets of 100, 60 and 20 tokens; 24, 14 and 4 samples of 4."""
    return [write_dataset(tmp_path / name, [10] * count) for name, count in (("a", 10), ("b", 6), ("c", 2))]


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
    assert "no validation documents in" in caplog.text


def test_a_split_that_leaves_no_validation_documents_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a text file, which is one document: the run would have no validation without a word."""
    text = write_dataset(tmp_path / "text", [100])
    for split, said in (("949,50,1", f"no validation documents in {text} (split=949,50,1); the run has no"), ("1", "")):
        caplog.clear()
        train, valid, _ = build(config(text, split=split), (9, 9, 0))
        assert train is not None
        assert (len(train) >= 9, valid) == (True, None)
        assert [record.getMessage() for record in caplog.records] == ([f"{said} validation loss"] if said else [])


def test_prefixes_without_weights_give_every_sample_once_spread_by_size(three: list[Path]) -> None:
    train = build_blend(config(*three, split="1"), 42)
    sizes = [24, 14, 4]
    found = list(zip(train.dataset_index.tolist(), train.dataset_sample_index.tolist(), strict=True))
    assert found == numpy_blend(np.array(sizes) / 42, 42, sizes)
    assert sorted(found) == [(d, i) for d, size in enumerate(sizes) for i in range(size)]
    assert [member.num_epochs for member in train.datasets if isinstance(member, GPTDataset)] == [1, 1, 1]


@pytest.mark.parametrize(("asked", "length"), [(7, 7), (42, 42), (1000, 42)])
def test_a_blend_by_size_has_the_requested_length_but_reads_nothing_twice(
    three: list[Path], asked: int, length: int
) -> None:
    train = build_blend(config(*three, split="1"), asked)
    assert len(train) == length
    assert np.array_equal(train.dataset_index, build_blend(config(*three, split="1"), 42).dataset_index[:length])


def test_a_dataset_may_occur_twice_in_a_blend(three: list[Path]) -> None:
    a, b, _ = map(str, three)
    weighted = build_blend(config("1", a, "1", b, "2", a, split="1"), 40)
    assert np.bincount(weighted.dataset_index).tolist() == [10, 10, 20]
    assert np.array_equal(weighted.datasets[0][3], weighted.datasets[2][3])
    assert len(build_blend(config(a, a, split="1"), 1000)) == 48


@pytest.mark.parametrize("words", ["{a}", "1 {a} 2 {b}", "{a} {b} {c}"])
def test_a_batch_is_its_samples(three: list[Path], words: str) -> None:
    a, b, c = three
    train, _, _ = build(config(*words.format(a=a, b=b, c=c).split(), split="1"), (24, 0, 0))
    assert train is not None
    indices = [5, 0, 0, len(train) - 1, 7]
    batch = train.get_batch(indices)
    assert batch.dtype == np.int64
    assert np.array_equal(batch, np.stack([train[i] for i in indices]))
    assert train.get_batch([]).shape == (0, 5)
    for outside in (-1, len(train)):
        with pytest.raises(IndexError, match=f"sample {outside} is outside"):
            train.get_batch([0, outside])


def test_each_split_has_its_own_documents_whole(three: list[Path], tmp_path: Path) -> None:
    a, b, c = map(str, three)
    data = DataConfig(train_data_path=("2", a, "1", b), valid_data_path=(c,), test_data_path=(b, c), split="949,50,1")
    train, valid, test = build(data, (30, 100, 100))
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, GPTDataset)
    assert isinstance(test, BlendedDataset)
    assert np.bincount(train.dataset_index).tolist() == [20, 10]
    assert {int(t) for i in range(100) for t in valid[i]} == set(range(20))  # repeated until there are 100
    assert len(test) == 18
    assert build(DataConfig(train_data_path=(a,)), (30, 10, 10))[1:] == (None, None)


def test_one_weighted_prefix_for_a_single_split_is_not_a_blend(three: list[Path]) -> None:
    a = str(three[0])
    train, _, _ = build(DataConfig(train_data_path=("0.5", a)), (30, 0, 0))
    assert isinstance(train, GPTDataset)
    assert isinstance(build_blend(config("0.5", a), 30), BlendedDataset)


def test_a_validation_set_shorter_than_a_sample_is_left_out_of_a_blend_by_size(
    three: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = write_dataset(tmp_path / "short", [2, 2])
    data = DataConfig(train_data_path=(str(three[0]),), valid_data_path=(str(three[1]), str(short)))
    _, valid, _ = build(data, (5, 5, 0))
    assert isinstance(valid, BlendedDataset)
    assert len(valid.get_batch(range(5))) == 5
    assert "no validation samples in" in caplog.text
    assert "short" in caplog.text
    with pytest.raises(DataError, match="less than one sample"):
        build(DataConfig(train_data_path=(str(three[0]), str(short))), (5, 0, 0))


def test_a_longer_blend_keeps_its_fingerprint_until_it_needs_another_epoch(three: list[Path]) -> None:
    path = ("1", str(three[0]), "1", str(three[1]))
    first, longer, long = (build_blend(config(*path, split="1"), count) for count in (15, 22, 60))
    assert first.fingerprint == longer.fingerprint
    assert np.array_equal(first.get_batch(range(15)), longer.get_batch(range(15)))
    assert content_of(long.fingerprint) == content_of(first.fingerprint)
    assert long.fingerprint != first.fingerprint
    other_weights = build_blend(config("2", path[1], "1", path[3], split="1"), 15)
    other_kind = build_blend(config(path[1], path[3], split="1"), 15)
    assert len({content_of(blend.fingerprint) for blend in (first, other_weights, other_kind)}) == 3


def test_a_cached_blend_of_unknown_datasets_is_refused(three: list[Path], tmp_path: Path) -> None:
    data = config("1", str(three[0]), "1", str(three[1]), split="1", cache=tmp_path / "c")
    build_blend(data, 15)
    (path,) = (tmp_path / "c").glob("blend-*-dataset_index.npy")
    np.save(path, np.full_like(np.load(path), 2))
    with pytest.raises(DataError, match="outside the 2 of the blend; it is damaged, delete it"):
        build_blend(data, 15)


@pytest.mark.parametrize("words", ["-1 {a} 1 {b}", "nan {a} 1 {b}", "inf {a} 1 {b}", "1 {a} {b}", "{a} 1 {b} 2 {c}"])
def test_invalid_weights_are_refused(three: list[Path], words: str) -> None:
    a, b, c = three
    with pytest.raises(DataError, match="WEIGHT PREFIX pairs with weights above 0"):
        build(config(*words.format(a=a, b=b, c=c).split()), (5, 0, 0))


def test_more_datasets_than_16_bits_can_number_are_refused() -> None:
    with pytest.raises(DataError, match="names 32768 datasets; a blend has at most 32767"):
        build(config(*(f"p{d}" for d in range(2**15))), (5, 0, 0))


def test_a_missing_member_is_named(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.idx does not exist"):
        build(config(three[0], tmp_path / "absent"), (5, 0, 0))
