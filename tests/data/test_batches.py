"""Batches return samples in one global order, for any layout, threads and place of resumption."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from megatron.data import batches as batches_module
from megatron.data.batches import STEPS_AHEAD, Batches, dealt_evenly
from megatron.data.index.indexed import DataError
from tests.ranks import HANG_S


class Counting:
    """Dataset whose sample i is [i, i], with a record of reads."""

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

    def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        return np.stack([self[index] for index in np.asarray(indices).tolist()])


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
) -> Batches[range, list[int]]:
    plan = dealt_evenly(
        len(dataset),
        global_batch_size=batch if callable(batch) else lambda _: batch,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )
    return Batches(
        plan, lambda samples: ids(dataset.get_batch(samples)), consumed_samples=consumed, num_workers=workers
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
def test_the_batch_size_may_grow(workers: int) -> None:
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
@pytest.mark.parametrize("fault", [OSError("the disk is gone"), StopIteration(), KeyError("x"), MemoryError()])
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


def test_a_microbatch_is_read_in_one_call() -> None:
    asked: list[list[int]] = []

    class Asked(Counting):
        def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
            asked.append(np.asarray(indices).tolist())
            return super().get_batch(indices)

    with make(Asked(8), micro=4, batch=8) as batches:
        next(batches)
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_death_of_a_thread_is_an_error_of_the_waiting_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's thread runs out of memory while it reports that, so its future never ends."""
    monkeypatch.setattr(batches_module, "LOOK_S", 0.05)
    with make(Counting(40, broken=13), workers=2) as batches:
        with monkeypatch.context() as patch:

            def no_memory(self: Future[object], exception: BaseException | None) -> None:
                raise MemoryError

            patch.setattr(Future, "set_exception", no_memory)
            assert next(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
            for _ in range(2):
                with pytest.raises(RuntimeError, match="a thread that reads batches has died"):
                    next(batches)
        assert batches.consumed_samples == 8


@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_waits_for_slow_reading(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "LOOK_S", 0.01)
    wait = threading.Event()

    class Slow(Counting):
        def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
            wait.wait(0.05)
            return super().get_batch(indices)

    with make(Slow(8), workers=workers) as batches:
        assert next(batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_timeout_of_the_reader_is_an_error() -> None:
    dataset = Counting(40, broken=3, fault=TimeoutError("the server does not answer"))
    with make(dataset, workers=1) as batches, pytest.raises(TimeoutError, match="does not answer"):
        next(batches)


PROGRAM = """
import os
from megatron.data import batches as module
module.LOOK_S = 0.05

plan = module.dealt_evenly(800, global_batch_size=lambda _: 8, micro_batch_size=2, data_parallel_rank=0,
                           data_parallel_size=1)
batches = module.Batches(plan, len, num_workers=2)
print(next(batches), flush=True)
"""

FORK = """
if os.fork() == 0:
    try:
        for _ in range(5): next(batches)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("", "[2, 2, 2, 2]\n"),  # never closed: the interpreter ends all the same
        (FORK, "[2, 2, 2, 2]\na thread that reads batches has died; create new ones from consumed_samples\n"),
        ("raise SystemExit", "[2, 2, 2, 2]\n"),
    ],
    ids=["end", "fork", "exit"],
)
def test_no_way_to_end_a_process_hangs(then: str, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + then],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert (run.stdout, run.returncode) == (said, 0), run.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_step_and_size_continues_with_the_next_sample(workers: int) -> None:
    """Samples dealt, step by step, on 1, 2, 4 and 8 ranks in turn, with a batch size that grows."""

    def size_at(consumed: int) -> int:
        return 8 if consumed < 24 else 16

    consumed, dealt = 0, list[set[int]]()
    for ranks in (1, 2, 4, 8, 4, 1):
        step = set[int]()
        for rank in range(ranks):
            with make(Counting(88), rank, ranks, micro=1, batch=size_at, consumed=consumed, workers=workers) as batches:
                step |= {sample for microbatch in next(batches) for sample in microbatch}
                end = batches.consumed_samples
        dealt.append(step)
        consumed = end
    ends = [0, 8, 16, 24, 40, 56, 72]
    assert dealt == [set(range(begin, end)) for begin, end in pairwise(ends)]
