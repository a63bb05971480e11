"""Batches hands out the samples in one global order, whatever the layout, the threads, or where it was resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.batches import STEPS_AHEAD, Batches
from megatron.data.indexed import DataError


class Counting:
    """Sample i is [i, i]; remembers what was read."""

    fingerprint = "counting"

    def __init__(self, size: int, broken: int | None = None, fault: Exception | None = None):
        self.size, self.broken, self.read = size, broken, set[int]()
        self.fault = fault or OSError("the disk is gone")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if index == self.broken:
            raise self.fault
        self.read.add(index)
        return np.array([index, index])


def ids(tokens: NDArray[np.int64]) -> list[int]:
    assert tokens.dtype == np.int64
    assert tokens.shape[1] == 2
    found: list[int] = tokens[:, 0].tolist()
    return found


def make(
    dataset: Counting,
    rank: int = 0,
    size: int = 1,
    *,
    micro: int = 2,
    batch: int | Callable[[int], int] = 8,
    consumed: int = 0,
    workers: int = 0,
) -> Batches[list[int]]:
    return Batches(
        dataset,
        collate=ids,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        global_batch_size=batch if callable(batch) else lambda _: batch,
        consumed_samples=consumed,
        num_workers=workers,
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_microbatches_are_dealt_in_megatrons_order(workers: int) -> None:
    with make(Counting(20), rank=1, size=2, workers=workers) as batches:
        assert next(batches) == [[2, 3], [6, 7]]
        assert batches.consumed_samples == 8
        assert next(batches) == [[10, 11], [14, 15]]
        with pytest.raises(StopIteration):  # 4 samples are left, fewer than a global batch
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.consumed_samples == 16


def samples_of_steps(
    dataset: Counting, size: int, steps: int, consumed: int, workers: int
) -> tuple[list[set[int]], int]:
    ranks = [make(dataset, rank, size, micro=1, batch=8, consumed=consumed, workers=workers) for rank in range(size)]
    found = []
    for _ in range(steps):
        dealt = [sample for batches in ranks for microbatch in next(batches) for sample in microbatch]
        assert len(dealt) == len(set(dealt)) == 8
        found.append(set(dealt))
    for batches in ranks:
        batches.close()
    return found, ranks[0].consumed_samples


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_another_data_parallel_size_keeps_the_global_order(workers: int) -> None:
    whole, _ = samples_of_steps(Counting(64), 1, 8, 0, workers)
    first, consumed = samples_of_steps(Counting(64), 4, 3, 0, workers)
    rest, end = samples_of_steps(Counting(64), 2, 5, consumed, workers)
    assert first + rest == whole
    assert whole == [set(range(8 * step, 8 * step + 8)) for step in range(8)]
    assert end == 64


@pytest.mark.parametrize("workers", [0, 2])
def test_a_growing_batch_size_is_followed(workers: int) -> None:
    with make(Counting(40), batch=lambda consumed: 4 if consumed < 8 else 8, workers=workers) as batches:
        assert [sum(map(len, step)) for step in batches] == [4, 4, 8, 8, 8, 8]
        assert batches.consumed_samples == 40


def test_reading_ahead_is_bounded_and_does_not_count_as_consumed() -> None:
    dataset = Counting(800)
    with make(dataset, workers=1) as batches:
        next(batches)
    # closing waits for what runs; nothing beyond the plan was begun
    assert max(dataset.read) < 8 * (1 + STEPS_AHEAD)
    assert batches.consumed_samples == 8


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("fault", [OSError("the disk is gone"), StopIteration(), KeyError("x")])
def test_a_fault_while_reading_is_raised_by_its_step(workers: int, fault: Exception) -> None:
    expected = RuntimeError if isinstance(fault, StopIteration) else type(fault)
    with make(Counting(40, broken=13, fault=fault), workers=workers) as batches:
        assert next(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        for _ in range(2):
            with pytest.raises(expected):
                next(batches)
        assert batches.consumed_samples == 8


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    batches = make(Counting(80), workers=3)
    next(batches)
    assert set(threading.enumerate()) > before
    batches.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_a_batch_size_that_does_not_divide_is_refused() -> None:
    with (
        make(Counting(80), size=3, batch=8) as batches,
        pytest.raises(DataError, match=r"global_batch_size=8 .* use a multiple of 6"),
    ):
        next(batches)
