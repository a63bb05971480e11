"""Order of samples in epochs: the weights of a mix at every place, passes that are complete before a sample repeats."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.samples import EpochOrder, shuffled
from tests.data.twins import numpy_blend


def lengths_of(sizes: list[int]) -> list[np.ndarray]:
    return [np.random.default_rng(size).integers(1, 50, size) for size in sizes]


@given(
    sets=st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 9)), min_size=1, max_size=5),
    epochs=st.integers(1, 4),
    rest=st.integers(0, 200),
)
@settings(max_examples=60, deadline=None)
def test_a_mix_has_its_weights_at_every_place_and_repeats_no_sample_before_all_others(
    sets: list[tuple[int, float]], epochs: int, rest: int
) -> None:
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    lengths = lengths_of(sizes)
    order = EpochOrder(sizes, weights, 7, lambda number, _: lengths[number])
    firsts = [0, *accumulate(sizes)]
    every = np.concatenate([order.epoch(epoch)[0] for epoch in range(epochs + 1)])
    of_set = np.searchsorted(firsts, every, side="right") - 1
    whole = sum(sizes)
    assert len(every) == whole * (epochs + 1)
    shares = np.array(weights) / sum(weights)
    assert of_set[:whole].tolist() == [number for number, _ in numpy_blend(shares, whole)]
    assert np.abs(order.counts - shares * whole).max() < len(sizes)
    for number, size in enumerate(sizes):
        read = (every[of_set == number] - firsts[number]).tolist()
        for begin in range(0, len(read) - size + 1, size):
            assert sorted(read[begin : begin + size]) == list(range(size))
        assert max(Counter(read).values(), default=0) == -(-len(read) // size)
    consumed = min(len(every), epochs * whole + rest % whole)
    found = [int((of_set[:consumed] == number).sum()) for number in range(len(sizes))]
    assert order.drawn(consumed).tolist() == found
    tokens = np.concatenate(lengths)[every[:consumed]]
    expected = np.bincount(of_set[:consumed], weights=tokens, minlength=len(sizes))
    assert order.tokens(consumed).tolist() == expected.tolist()


def test_without_weights_each_epoch_shuffles_all_samples() -> None:
    lengths = np.arange(1, 31)
    order = EpochOrder([10, 20], None, 3, lambda number, _: lengths)
    for epoch in range(3):
        assert np.array_equal(order.epoch(epoch)[0], shuffled(30, 3, epoch))
    assert order.tokens(35).tolist() == [lengths.sum() + lengths[shuffled(30, 3, 1)[:5]].sum()]


def test_sets_of_one_size_are_not_read_side_by_side() -> None:
    order = EpochOrder([50, 50], [1, 1], 3, lambda number, _: np.ones(50, np.int64))
    numbers = order.epoch(0)[0]
    assert (numbers[::2] % 50 != numbers[1::2] % 50).mean() > 0.8


@pytest.mark.parametrize("weights", [[7.0, 2.0, 1.0], [0.25, 0.25, 0.5]])
def test_the_weights_of_an_epoch_are_met_within_a_percent(weights: list[float]) -> None:
    sizes = [900, 90, 2010]
    order = EpochOrder(sizes, weights, 1, lambda number, _: np.ones(sizes[number], np.int64))
    for consumed in (300, 3000, 9000):
        shares = order.drawn(consumed) / consumed
        assert np.abs(shares - np.array(weights) / sum(weights)).max() < 0.01
