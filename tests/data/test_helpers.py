"""Every function of the C++ extension, compared with its NumPy oracle, and with adversarial arrays.

Needs nothing but the extension, so that test_sanitizers.py can run it against a build that finds undefined behaviour.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data import helpers
from tests.data.twins import numpy_blend, numpy_sample_index, numpy_samples, walked_sample_index

LARGEST = 2**63 - 1


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


def test_cpp_shuffle_refuses_other_arrays() -> None:
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
@given(weights=st.lists(st.floats(0.001, 10), min_size=1, max_size=8), size=st.integers(0, 300))
def test_cpp_blend_index_equals_numpy(weights: list[float], size: int) -> None:
    normalized = np.array(weights) / np.sum(weights)
    dataset_index, sample_index = helpers.build_blend_index(normalized, size)
    assert dataset_index.dtype == np.int16
    assert sample_index.dtype == np.int64
    assert list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == numpy_blend(normalized, size)


@pytest.mark.parametrize("weights", [[], [0.5, -0.5], [float("nan")], [float("inf")], [0.1] * 32768])
def test_cpp_blend_index_raises_on_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError):
        helpers.build_blend_index(np.array(weights), 3)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), data=st.data())
def test_cpp_exhaustive_blend_index_equals_numpy(sizes: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, sum(sizes)))
    dataset_index, sample_index = helpers.build_exhaustive_blend_index(np.array(sizes), size)
    assert dataset_index.dtype == np.int16
    assert sample_index.dtype == np.int64
    expected = numpy_blend(np.array(sizes) / sum(sizes), size, sizes)
    assert list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == expected


def test_cpp_exhaustive_blend_deals_every_sample_once() -> None:
    sizes = np.array([3, 1, 999, 50, 50])
    dataset_index, sample_index = helpers.build_exhaustive_blend_index(sizes, int(sizes.sum()))
    for d, size in enumerate(sizes.tolist()):
        assert sample_index[dataset_index == d].tolist() == list(range(size))


@pytest.mark.parametrize(
    ("sizes", "size"),
    [([], 0), ([0], 0), ([3, -1], 1), ([LARGEST, LARGEST], 1), ([1] * 32768, 1), ([2, 3], 6), ([2, 3], -1)],
)
def test_cpp_exhaustive_blend_index_raises_on_impossible_sizes(sizes: list[int], size: int) -> None:
    with pytest.raises(ValueError):
        helpers.build_exhaustive_blend_index(np.array(sizes, np.int64), size)


@pytest.mark.parametrize("size", [-1, 2**62])
def test_a_blend_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="negative, or beyond 64 bits"):
        helpers.build_blend_index(np.array([1.0]), size)


# ---------------------------------------------------------------------------------------------------------------------
# Reading samples

TOKEN_TYPES = [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64]


def unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers two bytes off their alignment, as the tables of an .idx are."""
    return np.frombuffer(b"??" + array.tobytes(), array.dtype, len(array), 2)


def arrays_of(lengths: list[int], seq_length: int, dtype: type[np.integer] = np.uint16) -> dict[str, Any]:
    """Return SampleReader's arrays for documents of these lengths; the tokens count up to 100."""
    sizes = np.array(lengths, np.int32)
    order = np.random.default_rng(len(lengths)).permutation(len(lengths)).astype(np.int32)
    num_samples = max(0, (sum(lengths) - 1) // seq_length)
    ends = np.cumsum(sizes, dtype=np.int64)
    return {
        "tokens": (np.arange(sum(lengths)) % 100).astype(dtype),
        "lengths": sizes,
        "pointers": (ends - sizes) * np.dtype(dtype).itemsize,
        "document_index": order,
        "sample_index": numpy_sample_index(sizes, order, seq_length, num_samples).astype(np.int32),
        "shuffle_index": np.random.default_rng(7).permutation(num_samples).astype(np.uint32),
        "seq_length": seq_length,
        "vocab_size": 100,
    }


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(lambda found: sum(found) > 0),
    seq_length=st.integers(1, 20),
    dtype=st.sampled_from(TOKEN_TYPES),
    wide=st.booleans(),
    data=st.data(),
)
def test_cpp_reader_equals_numpy(
    lengths: list[int], seq_length: int, dtype: type[np.integer], wide: bool, data: st.DataObject
) -> None:
    arrays = arrays_of(lengths, seq_length, dtype)
    arrays |= {name: unaligned(arrays[name]) for name in ("lengths", "pointers")}
    if wide:
        arrays |= {name: arrays[name].astype(np.int64) for name in ("sample_index", "shuffle_index")}
    num_samples = len(arrays["shuffle_index"])
    chosen = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=5)) if num_samples else []
    reader = helpers.SampleReader(**arrays)
    documents = np.split(arrays["tokens"], np.cumsum(lengths)[:-1])
    expected = numpy_samples(documents, arrays["document_index"], arrays["shuffle_index"], seq_length, chosen)
    found = reader.read(np.array(chosen, np.int64))
    assert found.dtype == np.int64
    assert found.shape == (len(chosen), seq_length + 1)
    assert np.array_equal(found, expected)
    for row, index in enumerate(chosen):
        assert np.array_equal(reader.read_one(index), expected[row])
    backwards = np.full((len(chosen) + 1, seq_length + 1), -5)
    reader.read_into(np.array(chosen, np.int64), backwards, np.arange(len(chosen), 0, -1))
    assert np.array_equal(backwards, np.concatenate(([[-5] * (seq_length + 1)], expected[::-1])))


def test_cpp_reader_keeps_its_arrays_alive() -> None:
    reader = helpers.SampleReader(**{k: v.copy() if hasattr(v, "copy") else v for k, v in arrays_of([50], 4).items()})
    np.zeros(10_000)  # would take the place of what was freed
    assert sorted(reader.read(np.arange(12))[:, 0].tolist()) == list(range(0, 48, 4))


def test_cpp_reader_is_thread_safe() -> None:
    reader = helpers.SampleReader(**arrays_of([300, 200, 400], 8))
    everything = np.arange(112)
    expected = reader.read(everything)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: reader.read(everything), range(40)):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", TOKEN_TYPES)
def test_cpp_reader_names_the_id_outside_the_vocabulary(dtype: type[np.integer]) -> None:
    arrays = arrays_of([10, 10], 19, dtype)
    for wrong in {100, int(np.iinfo(dtype).max), int(np.iinfo(dtype).min)} - set(range(100)):
        arrays["tokens"] = (np.arange(20) % 100).astype(dtype)
        arrays["tokens"][13] = wrong
        with pytest.raises(ValueError, match=f"token 3 of document 1 is {wrong}, outside vocab_size=100"):
            helpers.SampleReader(**arrays).read_one(0)
        assert helpers.SampleReader(**arrays | {"vocab_size": None}).read_one(0).tolist().count(wrong) == 1
    with pytest.raises(ValueError, match="outside vocab_size=19"):
        helpers.SampleReader(**arrays | {"tokens": np.arange(20).astype(dtype), "vocab_size": 19}).read_one(0)


@pytest.mark.parametrize("index", [-1, 4, LARGEST, -LARGEST - 1])
def test_cpp_reader_raises_outside_its_samples(index: int) -> None:
    reader = helpers.SampleReader(**arrays_of([20], 4))
    with pytest.raises(IndexError, match="outside the 4 samples"):
        reader.read_one(index)
    with pytest.raises(IndexError, match="outside the 4 samples"):
        reader.read(np.array([0, index]))


SMALLEST = -LARGEST - 1
HOSTILE: list[tuple[str, Any, int]] = [
    *[("pointers", 1, value) for value in (-2, 1, 21, 40, 42, 2**40, LARGEST, LARGEST - 1, SMALLEST)],
    *[("lengths", 1, value) for value in (-1, 12, 2**31 - 1, -(2**31))],
    *[("document_index", 0, value) for value in (-1, 2, 2**31 - 1, -(2**31))],
    *[("shuffle_index", 0, value) for value in (2, 2**32 - 1)],
    *[("sample_index", (1, 0), value) for value in (-1, 2, 2**31 - 1, -(2**31))],
    *[("sample_index", (1, 1), value) for value in (-1, 9, 10, 2**31 - 1, -(2**31))],
    *[("sample_index", (0, 1), value) for value in (1, -1, 11, 2**31 - 1, -(2**31))],
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "place", "value"), HOSTILE)
def test_cpp_reader_checks_every_array(name: str, place: Any, value: int, wide: bool) -> None:
    """Documents 0 and 1 of 10 tokens, samples of 8: any wrong number is an error, not an invalid read."""
    arrays = arrays_of([10, 10], 8)
    arrays["document_index"] = np.array([0, 1], np.int32)
    arrays["shuffle_index"] = np.array([0, 1], np.uint32)
    arrays["sample_index"] = np.array([[0, 0], [0, 8], [1, 6]], np.int32)
    if wide:
        arrays |= {key: arrays[key].astype(np.int64) for key in ("sample_index", "shuffle_index")}
    assert helpers.SampleReader(**arrays).read(np.arange(2)).tolist() == [list(range(9)), list(range(8, 17))]
    arrays[name][place] = value
    with pytest.raises(ValueError):
        helpers.SampleReader(**arrays).read(np.arange(2))
    with pytest.raises(ValueError):
        [helpers.SampleReader(**arrays).read_one(index) for index in range(2)]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_cpp_reader_checks_any_numbers(data: st.DataObject) -> None:
    small, any64 = st.integers(-3, 12), st.integers(SMALLEST, LARGEST)

    def draw(count: int, dtype: type[np.integer]) -> NDArray[Any]:
        limits = np.iinfo(dtype)
        number = (small | any64).map(lambda value: min(max(value, int(limits.min)), int(limits.max)))
        return np.array(data.draw(st.lists(number, min_size=count, max_size=count)), dtype)

    num_samples, num_documents = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    reader = helpers.SampleReader(
        np.arange(10, dtype=data.draw(st.sampled_from(TOKEN_TYPES))),
        draw(num_documents, np.int32),
        draw(num_documents, np.int64),
        draw(data.draw(st.integers(0, 4)), np.int32),
        draw(2 * num_samples + 2, np.int64 if data.draw(st.booleans()) else np.int32).reshape(-1, 2),
        draw(num_samples, np.int64 if data.draw(st.booleans()) else np.uint32),
        data.draw(st.integers(1, 6)),
        data.draw(st.none() | st.integers(1, 12)),
    )
    try:
        found = reader.read(draw(3, np.int64))
    except (ValueError, IndexError):
        return
    assert 0 <= found.min() <= found.max() < 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": np.zeros(20)}, "tokens must be int8"),
        ({"tokens": np.zeros(20, ">u2")}, "native byte order"),
        ({"tokens": np.zeros(40, np.uint16)[::2]}, "flat, contiguous"),
        ({"tokens": np.zeros((4, 5), np.uint16)}, "flat, contiguous"),
        ({"tokens": unaligned(np.zeros(20, np.int64))}, "aligned"),
        ({"pointers": np.zeros(1, np.int64)}, "1 pointers, but 2 lengths"),
        ({"sample_index": np.zeros((2, 2), np.int32)}, "1 row more"),
        ({"sample_index": np.zeros((3, 3), np.int32)}, "2 columns"),
        ({"sample_index": np.zeros(6, np.int32)}, "2 columns"),
        ({"sample_index": np.zeros((3, 2), np.int16)}, "int32, uint32 or int64"),
        ({"shuffle_index": np.zeros(2)}, "int32, uint32 or int64"),
        ({"seq_length": 0}, "seq_length=0"),
        ({"seq_length": LARGEST}, "seq_length"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_cpp_reader_refuses_other_types(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        helpers.SampleReader(**arrays_of([10, 10], 8) | wrong)


def test_cpp_reader_takes_no_silent_copies() -> None:
    for name, wrong in {"lengths": np.int64, "pointers": np.int32, "document_index": np.int64}.items():
        arrays = arrays_of([10, 10], 8)
        with pytest.raises(TypeError):
            helpers.SampleReader(**arrays | {name: arrays[name].astype(wrong)})


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "rows"),
    [
        (np.zeros((2, 9), np.int64), [0, 2]),
        (np.zeros((2, 9), np.int64), [-1, 0]),
        (np.zeros((2, 9), np.int64), [LARGEST, 0]),
        (np.zeros((2, 9), np.int64), [0]),
        (np.zeros((2, 8), np.int64), [0, 1]),
        (np.zeros(18, np.int64), [0, 1]),
        (np.zeros((2, 18), np.int64)[:, ::2], [0, 1]),
        (np.zeros((2, 9), np.int32), [0, 1]),
        (read_only(np.zeros((2, 9), np.int64)), [0, 1]),
        (np.frombuffer(bytearray(2 + 144), np.int64, 18, 2).reshape(2, 9), [0, 1]),
    ],
)
def test_cpp_reader_refuses_invalid_outputs(out: NDArray[Any], rows: list[int]) -> None:
    reader = helpers.SampleReader(**arrays_of([10, 10], 8))
    with pytest.raises((ValueError, TypeError)):
        reader.read_into(np.arange(2), out, np.array(rows))


def test_cpp_reader_refuses_more_than_memory_can_address() -> None:
    reader = helpers.SampleReader(**arrays_of([10, 10], 8) | {"seq_length": 2**58})
    with pytest.raises((ValueError, MemoryError)):
        reader.read_one(0)
    with pytest.raises(ValueError, match="beyond 64 bits"):
        reader.read(np.zeros(8, np.int64))
