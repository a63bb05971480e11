"""Microbatches of each optimizer step, read ahead by threads.

The only state is `consumed_samples`, counted over all data-parallel ranks: a run resumes with the next sample on any
number of ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from megatron.data.index.indexed import DataError

K = TypeVar("K")
T = TypeVar("T")

BatchPlan = Callable[[int], tuple[int, Sequence[K]]]
"""Samples in the global batch that starts at consumed_samples, 0 at the end, and keys of this rank's microbatches.

All data-parallel ranks have equally many microbatches in a step, and together read each sample once. Reading ahead may
call a plan several times for one step, so it must be a pure function.
"""

STEPS_AHEAD = 2
"""Steps read ahead of the current one. Bounds the memory."""
LOOK_S = 1.0
"""Interval at which a step that waits for samples checks that the reading threads are alive."""


def dealt_evenly(
    num_samples: int,
    *,
    global_batch_size: Callable[[int], int],
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> BatchPlan[range]:
    """Return the plan of a stream of samples, whose last samples that fill no global batch are left out.

    Microbatch m of rank r starts at sample consumed_samples + (m * data_parallel_size + r) * micro_batch_size.
    `global_batch_size(consumed_samples)` is the size of the step that starts there. The plan raises DataError for a
    batch that cannot be dealt evenly.
    """

    def plan(consumed_samples: int) -> tuple[int, Sequence[range]]:
        size = global_batch_size(consumed_samples)
        per_microbatch = micro_batch_size * data_parallel_size
        if size <= 0 or size % per_microbatch:
            raise DataError(
                f"global_batch_size={size} after {consumed_samples} samples is not a multiple of micro_batch_size x "
                f"data-parallel size = {micro_batch_size} x {data_parallel_size}; use a multiple of {per_microbatch}"
            )
        if consumed_samples + size > num_samples:
            return 0, []
        begin = consumed_samples + data_parallel_rank * micro_batch_size
        # consecutive samples over all ranks: on any number of them a step reads the same
        starts = range(begin, consumed_samples + size, per_microbatch)
        return size, [range(start, start + micro_batch_size) for start in starts]

    return plan


class Batches(Generic[K, T]):
    """Iterator over optimizer steps: `next` returns the result of `read` for each of this rank's microbatches.

    num_workers threads read ahead; with 0, `next` reads. An error while reading, or the death of a thread, is raised by
    the `next` of its step and every later one. Close it, or use it as a context manager, to end the threads.
    """

    def __init__(self, plan: BatchPlan[K], read: Callable[[K], T], *, consumed_samples: int = 0, num_workers: int = 1):
        self._plan, self._read_one = plan, read
        self.consumed_samples = consumed_samples
        """Samples returned so far on all data-parallel ranks together."""
        self._planned_samples = consumed_samples  # end of the steps being read ahead
        self._ahead: deque[tuple[int, list[Future[T]]]] = deque()
        self._fault: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._pool = None
        if num_workers:
            self._pool = ThreadPoolExecutor(
                # the executor does not say whether its threads are alive
                num_workers,
                "batches",
                initializer=lambda: self._threads.append(threading.current_thread()),
            )

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        if self._closed:
            raise RuntimeError("these batches are closed; create new ones from consumed_samples")
        if self._fault is not None:
            raise self._fault
        try:
            step = self._read() if self._pool is None else self._take(self._pool)
        except StopIteration as fault:  # from the plan or `read`: it would look like the end of the data
            self._fault = RuntimeError("StopIteration was raised while reading a sample")
            raise self._fault from fault
        except BaseException as fault:
            # a caller that goes on after an error would train on the samples behind it
            self._fault = fault
            raise
        if step is None:
            raise StopIteration
        size, microbatches = step
        self.consumed_samples += size
        return microbatches

    def _read(self) -> tuple[int, list[T]] | None:
        size, keys = self._plan(self.consumed_samples)
        if size == 0:
            return None
        return size, [self._read_one(key) for key in keys]

    def _take(self, pool: ThreadPoolExecutor) -> tuple[int, list[T]] | None:
        self._read_ahead(pool)
        if not self._ahead:
            return None
        size, futures = self._ahead.popleft()
        # before waiting, so that threads have work while this step is computed
        self._read_ahead(pool)
        return size, [self._wait_for(future) for future in futures]

    def _wait_for(self, future: Future[T]) -> T:
        """Return the microbatch once it is read. Raises the error of reading it."""
        while not wait([future], LOOK_S).done:
            # a thread dies when the executor runs out of memory; all are missing in a forked process
            if not all(thread.is_alive() for thread in self._threads):
                raise RuntimeError("a thread that reads batches has died; create new ones from consumed_samples")
        return future.result()

    def _read_ahead(self, pool: ThreadPoolExecutor) -> None:
        while len(self._ahead) < STEPS_AHEAD:
            size, keys = self._plan(self._planned_samples)
            if size == 0:
                return
            self._ahead.append((size, [pool.submit(self._read_one, key) for key in keys]))
            self._planned_samples += size

    def seek(self, consumed_samples: int) -> None:
        """Continue with the sample at consumed_samples, and discard the steps read ahead."""
        for _, futures in self._ahead:
            # those that run end by themselves, and their results are dropped
            for future in futures:
                future.cancel()
        self._ahead.clear()
        self.consumed_samples = self._planned_samples = consumed_samples

    def close(self) -> None:
        """Discard the steps read ahead and wait for the threads to end."""
        self._closed = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches[K, T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
