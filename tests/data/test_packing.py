"""Packs, steps and buckets, compared with slower methods, and with adversarial input.

Needs nothing but the extension, so that test_sanitizers.py can run it against a build that finds undefined behaviour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data import helpers
from megatron.data.index.indexed import DataError
from megatron.data.packing import Packs, StepPlan, bucket_edges, bucket_length, pack_dataset, pack_step, pad_to_edges

Lengths = NDArray[np.int64]


# ---------------------------------------------------------------------------------------------------------------------
# Twins


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Lengths in each pack of best-fit-decreasing, sample by sample."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        rooms = [(capacity - sum(pack), p) for p, pack in enumerate(packs) if capacity - sum(pack) >= length]
        if rooms:
            packs[min(rooms)[1]].append(length)
        else:
            packs.append([length])
    return packs


def fewest_cells(lengths: list[int], capacity: int) -> int:
    """Fewest cells of any partition."""
    best = len(lengths)

    def place(item: int, cells: list[int]) -> None:
        nonlocal best
        if item == len(lengths):
            best = min(best, len(cells))
            return
        for cell, total in enumerate(cells):
            if total + lengths[item] <= capacity:
                place(item + 1, [*cells[:cell], total + lengths[item], *cells[cell + 1 :]])
        if len(cells) + 1 < best:
            place(item + 1, [*cells, lengths[item]])

    place(0, [])
    return best


def longest_first_totals(lengths: Lengths, num_cells: int) -> list[int]:
    """Tokens of each cell if each sample, longest first, goes to the emptiest."""
    totals = [0] * num_cells
    for length in sorted(lengths.tolist(), reverse=True):
        totals[totals.index(min(totals))] += length
    return totals


def padded_tokens(lengths: list[int], edges: tuple[int, ...]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


def fewest_padded_tokens(lengths: list[int], num_buckets: int) -> int:
    """Fewest padded tokens of all sets of edges among the lengths, which include a best set."""
    distinct = sorted(set(lengths))
    count = min(num_buckets, len(distinct))
    sets = itertools.combinations(distinct[:-1], count - 1)
    return min(padded_tokens(lengths, (*edges, distinct[-1])) for edges in sets)


def documented_bucket(length: int, per_octave: int) -> int:
    """InstructLab's text: S = floor(log2 n), steps of 2**S / per_octave, rounded up."""
    step = max(1, 2 ** math.floor(math.log2(length)) // per_octave)
    return math.ceil(length / step) * step


# ---------------------------------------------------------------------------------------------------------------------
# pack_dataset

small_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def contents(packs: Packs, lengths: Lengths) -> list[list[int]]:
    return [lengths[packs[p]].tolist() for p in range(len(packs))]


def check_packs(packs: Packs, lengths: Lengths, capacity: int) -> None:
    assert packs.order.dtype == packs.starts.dtype == np.int64
    assert np.array_equal(np.sort(packs.order), np.arange(len(lengths)))
    assert packs.starts[0] == 0
    assert packs.starts[-1] == len(lengths)
    assert (np.diff(packs.starts) > 0).all()
    assert np.add.reduceat(lengths[packs.order], packs.starts[:-1]).max() <= capacity


@settings(max_examples=300, deadline=None)
@given(lengths=small_lengths, extra=st.integers(0, 60), seed=st.none() | st.integers(0, 2**32))
def test_packs_hold_every_sample_once_and_are_at_most_as_many_as_by_best_fit_decreasing(
    lengths: list[int], extra: int, seed: int | None
) -> None:
    given_lengths, capacity = np.array(lengths), max(lengths) + extra
    packs = pack_dataset(given_lengths, capacity, seed)
    check_packs(packs, given_lengths, capacity)
    twin = best_fit_decreasing(lengths, capacity)
    assert len(packs) <= len(twin)
    if len(packs) == len(twin):  # then it is best-fit-decreasing, and the rooms left over are the same
        assert sorted(map(sum, contents(packs, given_lengths))) == sorted(map(sum, twin))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 2**40), min_size=1, max_size=30), extra=st.integers(0, 2**41))
def test_lengths_too_large_for_a_counting_sort_are_packed_the_same(lengths: list[int], extra: int) -> None:
    given_lengths, capacity = np.array(lengths), max(lengths) + extra
    packs = pack_dataset(given_lengths, capacity)
    check_packs(packs, given_lengths, capacity)
    assert len(packs) <= len(best_fit_decreasing(lengths, capacity))
    assert all(pack == sorted(pack, reverse=True) for pack in contents(packs, given_lengths))


@pytest.mark.parametrize("name", ["lognormal", "uniform", "short", "few lengths"])
def test_packs_are_nearly_as_few_as_the_tokens_allow(name: str) -> None:
    generator = np.random.default_rng(5)
    draws: dict[str, Callable[[], Any]] = {
        "lognormal": lambda: np.clip(generator.lognormal(6, 1, 300_000), 1, 4096),
        "uniform": lambda: generator.integers(1, 2049, 300_000),
        "short": lambda: generator.integers(1, 9, 100_000),
        # where best-fit-decreasing makes 1.0014 times the bound
        "few lengths": lambda: generator.choice(np.clip(generator.lognormal(6, 1, 300), 1, 4096).round(), 300_000),
    }
    lengths = draws[name]().astype(np.int64)
    packs = pack_dataset(lengths, 4096)
    check_packs(packs, lengths, 4096)
    assert len(packs) <= 1.0005 * math.ceil(lengths.sum() / 4096)


def test_packing_is_the_same_each_time_and_from_any_integer_type() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 5000)
    first = pack_dataset(lengths, 128, seed=3)
    for again in (lengths.tolist(), lengths.astype(np.int32), lengths.astype(np.uint8), np.repeat(lengths, 2)[::2]):
        packs = pack_dataset(again, 128, seed=3)
        assert np.array_equal(packs.order, first.order)
        assert np.array_equal(packs.starts, first.starts)


def test_without_a_seed_samples_of_equal_length_keep_their_order() -> None:
    packs = pack_dataset([3, 7, 3, 7, 3, 3], 10)
    assert [packs[p].tolist() for p in range(len(packs))] == [[1, 0], [3, 2], [4, 5]]


def test_a_seed_changes_neighbours_but_no_pack() -> None:
    lengths = np.random.default_rng(2).integers(1, 20, 4000)
    plain, first, second = (pack_dataset(lengths, 64, seed) for seed in (None, 1, 2))
    for packs in (first, second):
        check_packs(packs, lengths, 64)
        assert contents(packs, lengths) == contents(plain, lengths)
    assert 0 < (first.order == second.order).mean() < 0.1


def test_a_seed_gives_each_order_of_equals_equally_often() -> None:
    orders = [tuple(pack_dataset([5, 5, 5], 5, seed).order.tolist()) for seed in range(6000)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    # six orders: 1000 each expected, 29 the standard deviation
    assert max(abs(count - 1000) for count in counts) < 150


def test_packs_are_indexed_within_their_number() -> None:
    packs = pack_dataset([6, 5], 10)
    assert len(packs) == 2
    assert packs[1].tolist() == [1]
    for outside in (2, -1):
        with pytest.raises(IndexError, match=f"pack {outside} is outside the 2"):
            packs[outside]


# ---------------------------------------------------------------------------------------------------------------------
# pack_step


def totals_of(plan: StepPlan, lengths: Lengths) -> Lengths:
    """[microbatch, rank]"""
    return np.array(
        [
            [int(lengths[plan.cell(microbatch, rank)].sum()) for rank in range(plan.num_ranks)]
            for microbatch in range(plan.num_microbatches)
        ]
    )


def check_plan(plan: StepPlan, lengths: Lengths, max_tokens: int, num_ranks: int) -> Lengths:
    assert plan.order.dtype == plan.starts.dtype == np.int64
    assert np.array_equal(np.sort(plan.order), np.arange(len(lengths)))
    assert len(plan.starts) == plan.num_microbatches * num_ranks + 1
    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(lengths)
    assert (np.diff(plan.starts) >= 0).all()
    totals = totals_of(plan, lengths)
    assert totals.max() <= max_tokens
    assert (totals.sum(axis=1) > 0).all()
    return totals


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    extra=st.integers(0, 40),
    num_ranks=st.integers(1, 4),
)
@example([3, 3, 2, 2, 2], 3, 1)  # best-fit-decreasing and longest-first need three cells of 6, two are enough
def test_a_step_of_few_samples_has_the_fewest_possible_microbatches(
    lengths: list[int], extra: int, num_ranks: int
) -> None:
    given_lengths, max_tokens = np.array(lengths), max(lengths) + extra
    plan = pack_step(given_lengths, max_tokens, num_ranks)
    check_plan(plan, given_lengths, max_tokens, num_ranks)
    assert plan.num_microbatches == math.ceil(fewest_cells(lengths, max_tokens) / num_ranks)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=200),
    extra=st.integers(0, 3000),
    num_ranks=st.integers(1, 9),
)
def test_a_step_holds_every_sample_once_and_needs_no_more_than_best_fit_decreasing(
    lengths: list[int], extra: int, num_ranks: int
) -> None:
    given_lengths, max_tokens = np.array(lengths), max(lengths) + extra
    plan = pack_step(given_lengths, max_tokens, num_ranks)
    totals = check_plan(plan, given_lengths, max_tokens, num_ranks)
    assert plan.num_microbatches <= math.ceil(len(best_fit_decreasing(lengths, max_tokens)) / num_ranks)
    assert plan.num_microbatches >= math.ceil(sum(lengths) / (max_tokens * num_ranks))
    twin = longest_first_totals(given_lengths, plan.num_microbatches * num_ranks)
    if max(twin) <= max_tokens:
        assert np.square(totals).sum() <= np.square(twin).sum()
        assert totals.max() <= max(twin)
    again = pack_step(given_lengths, max_tokens, num_ranks)
    assert np.array_equal(again.order, plan.order)
    assert np.array_equal(again.starts, plan.starts)


def lognormal_batch(generator: np.random.Generator, count: int = 2048) -> Lengths:
    return np.clip(generator.lognormal(6.2, 1.0, count), 1, 8192).astype(np.int64)


def test_steps_of_many_samples_reach_the_lower_bound_and_are_balanced() -> None:
    generator = np.random.default_rng(0)
    at_bound = 0
    for _ in range(60):
        lengths = lognormal_batch(generator)
        plan = pack_step(lengths, 16384, 8)
        totals = check_plan(plan, lengths, 16384, 8)
        at_bound += plan.num_microbatches == math.ceil(lengths.sum() / (16384 * 8))
        assert totals.max() - math.ceil(totals.mean()) <= 4  # tokens
        assert (totals.max(axis=1) - totals.min(axis=1)).max() <= 64
        assert np.ptp(totals.sum(axis=0)) <= 64
    assert at_bound >= 0.95 * 60


def test_ranks_of_a_microbatch_with_equal_tokens_have_similar_attention() -> None:
    """Cells of one sample of 100 and cells of a hundred of 1: level in tokens, not in their squares."""
    lengths = np.array([100] * 8 + [1] * 800)
    plan = pack_step(lengths, 100, 8)
    assert totals_of(plan, lengths).tolist() == [[100] * 8] * 2
    squares = [[int(np.square(lengths[plan.cell(m, r)]).sum()) for r in range(8)] for m in range(2)]
    assert squares == [[10_000] * 8, [100] * 8]


def test_the_fullest_microbatch_comes_first_and_ranks_differ_little_over_all() -> None:
    generator = np.random.default_rng(3)
    lengths = generator.integers(6000, 16385, 48)  # mostly one a cell
    plan = pack_step(lengths, 16384, 8)
    totals = check_plan(plan, lengths, 16384, 8)
    assert totals.max() == totals[0].max()
    means = totals.mean(axis=1)
    assert (np.diff(means) <= 0).all()
    assert np.ptp(totals.sum(axis=0)) <= np.ptp(totals, axis=1).sum()


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "totals"),
    [
        ([5, 9], 10, 4, [[9, 5, 0, 0]]),
        ([7], 7, 1, [[7]]),
        ([4] * 6, 4, 2, [[4, 4], [4, 4], [4, 4]]),
        ([4] * 6, 8, 1, [[8], [8], [8]]),
        ([6] * 5, 11, 2, [[6, 6], [6, 6], [6, 0]]),
        ([10, 1, 1, 1], 10, 2, [[10, 3]]),
    ],
    ids=["fewer than ranks", "one", "all at the limit", "equal", "none fits beside another", "one long"],
)
def test_a_step_of_an_extreme_batch(
    lengths: list[int], max_tokens: int, num_ranks: int, totals: list[list[int]]
) -> None:
    plan = pack_step(lengths, max_tokens, num_ranks)
    found = check_plan(plan, np.array(lengths), max_tokens, num_ranks)
    assert [sorted(row, reverse=True) for row in found.tolist()] == totals


def test_lengths_that_fit_only_as_exact_pairs_are_paired() -> None:
    """Each cell is full or none is: the bound by tokens leaves no room at all."""
    generator = np.random.default_rng(4)
    halves = generator.integers(1, 1000, 64)
    plan = pack_step(np.concatenate([halves, 1000 - halves]), 1000, 8)
    assert plan.num_microbatches == 8


def test_a_large_step_is_not_searched_for_long() -> None:
    plan = pack_step(np.full(5000, 5000), 16384, 8)
    assert plan.num_microbatches == math.ceil(math.ceil(5000 / 3) / 8)


def test_cells_are_indexed_within_their_number() -> None:
    plan = pack_step([4, 6, 5], 10, 2)
    assert plan.num_microbatches == 1
    for microbatch, rank in ((1, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match=f"microbatch {microbatch} of rank {rank} is outside the 1 of 2"):
            plan.cell(microbatch, rank)


# ---------------------------------------------------------------------------------------------------------------------
# Buckets


@pytest.mark.parametrize("per_octave", [1, 2, 8, 16, 64])
def test_a_bucket_is_the_documented_one(per_octave: int) -> None:
    lengths = np.arange(1, 20_000)
    buckets = bucket_length(lengths, per_octave)
    assert buckets.tolist() == [documented_bucket(length, per_octave) for length in lengths.tolist()]


@pytest.mark.parametrize("per_octave", [1, 3, 7, 16, 24, 1000])
def test_buckets_add_at_most_their_share_for_any_number_of_them(per_octave: int) -> None:
    lengths = np.arange(1, 2**15 + 1)
    buckets = bucket_length(lengths, per_octave)
    assert (buckets >= lengths).all()
    assert ((buckets - lengths) * per_octave < lengths).all()
    assert (np.diff(buckets) >= 0).all()
    assert np.array_equal(bucket_length(buckets, per_octave), buckets)
    assert len(np.unique(buckets[2**14 :])) == per_octave


def test_there_are_sixteen_buckets_in_each_power_of_two() -> None:
    for power in (4, 7, 12):
        inside = bucket_length(np.arange(2**power + 1, 2 ** (power + 1) + 1))
        assert len(np.unique(inside)) == 16
        assert inside[-1] == 2 ** (power + 1)
    assert [bucket_length(length) for length in (1, 17, 33, 4097, 4352, 4353)] == [1, 17, 34, 4352, 4352, 4608]


def test_buckets_keep_the_shape_and_take_the_largest_lengths() -> None:
    assert bucket_length(np.array([[33, 1], [35, 40]])).tolist() == [[34, 1], [36, 40]]
    largest = 2**42
    assert bucket_length(np.array([largest, largest - 1, 2**40 + 1])).tolist() == [largest, largest, 2**40 + 2**36]
    assert bucket_length(largest - 1, 2**20) == largest
    assert type(bucket_length(33)) is int


def test_a_bucket_of_too_long_a_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"lengths\[1\] = 4398046511105 is more than 2\*\*42"):
        bucket_length(np.array([1, 2**42 + 1]))
    with pytest.raises(DataError, match=r"lengths\[0\] = 0 must be at least 1"):
        bucket_length(0)
    for per_octave in (0, 2**20 + 1):
        with pytest.raises(DataError, match=f"per_octave={per_octave} must be 1 to 2"):
            bucket_length(7, per_octave)


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=14), num_buckets=st.integers(1, 6))
def test_no_other_edges_pad_to_fewer_tokens(lengths: list[int], num_buckets: int) -> None:
    edges = bucket_edges(lengths, num_buckets)
    assert edges.dtype == np.int64
    assert len(edges) == min(num_buckets, len(set(lengths)))
    assert (np.diff(edges) > 0).all()
    assert edges[-1] == max(lengths)
    assert padded_tokens(lengths, tuple(edges.tolist())) == fewest_padded_tokens(lengths, num_buckets)


def quadratic_program(lengths: Lengths, num_buckets: int) -> int:
    """Fewest padded tokens, by trying every edge before each edge."""
    distinct, counts = np.unique(lengths, return_counts=True)
    up_to = np.cumsum(counts)
    costs = distinct * up_to
    for _ in range(num_buckets - 1):
        # after[i, t]: the edge before distinct[i] is distinct[t]
        after = costs[None, :] + distinct[:, None] * (up_to[:, None] - up_to[None, :])
        after[np.triu_indices(len(distinct))] = np.iinfo(np.int64).max
        costs = np.minimum(costs, after.min(axis=1))
    return int(costs[-1])


@pytest.mark.parametrize("spread", [1, 10**9])
def test_edges_of_many_lengths_are_those_of_the_quadratic_program(spread: int) -> None:
    generator = np.random.default_rng(6)
    lengths = np.clip(generator.lognormal(6, 1, 800), 1, 4096).astype(np.int64) * spread
    lengths += generator.integers(0, spread, len(lengths))
    for num_buckets in (1, 2, 7, 40):
        edges = bucket_edges(lengths, num_buckets)
        assert len(edges) == num_buckets
        assert pad_to_edges(lengths, edges).sum() == quadratic_program(lengths, num_buckets)


def test_lengths_are_padded_to_the_first_edge_at_or_above() -> None:
    assert pad_to_edges([1, 4, 5], [4, 8]).tolist() == [4, 4, 8]


def test_optimal_edges_waste_less_than_the_documented_rule() -> None:
    lengths = np.clip(np.random.default_rng(7).lognormal(6, 1, 100_000), 1, 4096).astype(np.int64)
    rule = np.unique(bucket_length(lengths))
    padded = bucket_length(lengths)
    assert np.array_equal(pad_to_edges(lengths, rule), padded)
    edges = bucket_edges(lengths, len(rule))
    assert (pad_to_edges(lengths, edges) - lengths).sum() <= 0.65 * (padded - lengths).sum()


@pytest.mark.parametrize(
    ("lengths", "edges", "message"),
    [
        ([5], [4], "a sample of 5 tokens is longer than the last edge, 4"),
        ([1], [4, 4], r"edges=\[4, 4\] must be ascending"),
        ([1], [], r"edges=\[\] must be ascending, and at least one"),
    ],
)
def test_edges_that_do_not_fit_are_refused(lengths: list[int], edges: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pad_to_edges(lengths, edges)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input, and threads

FACES: dict[str, Callable[[Any], object]] = {
    "pack_dataset": lambda lengths: pack_dataset(lengths, 100),
    "pack_step": lambda lengths: pack_step(lengths, 100, 2),
    "bucket_length": lambda lengths: bucket_length(np.asarray(lengths)),
    "bucket_edges": lambda lengths: bucket_edges(lengths, 3),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty; give at least one sample"),
        ([5, 0], r"lengths\[1\] = 0 must be"),
        ([-(2**63), 5], r"lengths\[0\] = -9223372036854775808 must be"),
        ([1.0, 2.0], "lengths has the type float64; give integers"),
        ([True], "lengths has the type bool; give integers"),
        (np.array([1, 2**63], np.uint64), "lengths has 9223372036854775808 in it"),
    ],
)
def test_impossible_lengths_are_refused(face: str, lengths: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FACES[face](lengths)


@pytest.mark.parametrize("face", ["pack_dataset", "pack_step"])
def test_a_sample_above_the_limit_is_named_with_the_remedy(face: str) -> None:
    limit = "capacity" if face == "pack_dataset" else "max_tokens"
    with pytest.raises(DataError, match=rf"lengths\[2\] = 101 is more than {limit}=100; raise it, or drop, truncate"):
        FACES[face]([1, 100, 101])


@pytest.mark.parametrize("face", ["pack_dataset", "pack_step", "bucket_edges"])
def test_lengths_of_several_dimensions_are_refused(face: str) -> None:
    with pytest.raises(DataError, match=r"lengths has the shape \(2, 1\); give a flat array"):
        FACES[face]([[1], [2]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_dataset([1], 2048.0), r"capacity=2048\.0 is not an integer"),  # type: ignore[arg-type]
        (lambda: pack_dataset([1], "8"), "capacity='8' is not an integer"),  # type: ignore[arg-type]
        (lambda: pack_step([1], 5, True), "num_ranks=True is not an integer"),
        (lambda: pack_step([1], 2**64, 1), "max_tokens=18446744073709551616 is beyond 64 bits"),
        (lambda: pack_dataset([1], 8, seed=0.5), r"seed=0\.5 is not an integer"),  # type: ignore[arg-type]
        (lambda: bucket_length(3, 2.0), r"per_octave=2\.0 is not an integer"),  # type: ignore[call-overload]
        (lambda: bucket_edges([[1], [2, 3]], 1), "lengths are not numbers; give a flat array"),  # type: ignore[list-item]
        (lambda: pack_dataset([1], 0), "capacity=0 must be at least 1"),
        (lambda: pack_step([1], 0, 1), "max_tokens=0 must be at least 1"),
        (lambda: pack_step([1], 5, 0), "num_ranks=0 must be at least 1"),
        (lambda: pack_step([1], 5, 2**21), "num_ranks=2097152 is more than 1048576"),
        (lambda: bucket_edges([1], 0), "num_buckets=0 must be at least 1"),
        (lambda: pack_dataset([2**62, 2**62], 2**62), "the lengths' sum is beyond 64 bits"),
        (lambda: bucket_edges([1, 2**62], 1), r"padded to the longest have more than 2\*\*62 tokens"),
        (lambda: bucket_edges(np.arange(1, 100_001), 50_000), "need too much memory; use fewer"),
    ],
)
def test_impossible_limits_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_the_extension_takes_no_silent_copies() -> None:
    raw = b"?" + np.array([3, 4, 5]).tobytes()
    unaligned = np.frombuffer(raw, np.int64, 3, 1)
    for wrong in (unaligned, np.ones((2, 2), np.int64)):
        with pytest.raises(ValueError, match="flat, contiguous, aligned"):
            helpers.pack_dataset(wrong, 10, None)
    others: list[Any] = [np.array([3, 4], np.int32), np.array([3, 0, 4, 0])[::2]]
    for other in others:
        with pytest.raises(TypeError):
            helpers.pack_step(other, 10, 1)
    assert contents(pack_dataset(unaligned, 9), unaligned) == [[5, 4], [3]]


def test_threads_pack_at_the_same_time_as_alone() -> None:
    batches = [lognormal_batch(np.random.default_rng(seed), 500) for seed in range(16)]
    alone = [pack_step(lengths, 16384, 4).order.tolist() for lengths in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda lengths: pack_step(lengths, 16384, 4).order.tolist(), batches))
    assert together == alone
