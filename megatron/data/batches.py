"""The microbatches of each optimizer step, read ahead by threads.

The whole state is `consumed_samples`, counted over all data-parallel ranks: a run continues with the very next sample
on any number of ranks.

A plan says what a step reads: plan(consumed_samples) gives the samples of the global batch that starts there, 0 at the
end, and for each of this rank's microbatches what to read for it. Every data-parallel rank has as many microbatches in
a step, and all plans of a step together read each of its samples once. Reading ahead asks a plan of steps to come,
maybe more than once, so it must be pure.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

from megatron.data.indexed import DataError

K = TypeVar("K")
T = TypeVar("T")

BatchPlan = Callable[[int], tuple[int, Sequence[K]]]

STEPS_AHEAD = 2
"""Steps read ahead of the one in use. Bounds the memory."""
LOOK_S = 1.0
"""How often a step that waits for its samples looks whether the threads that read them are still there."""


def dealt_evenly(
    num_samples: int,
    *,
    global_batch_size: Callable[[int], int],
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> BatchPlan[range]:
    """The plan of a stream of samples: microbatch m of rank r holds those from
    consumed_samples + (m * data_parallel_size + r) * micro_batch_size on.

    `global_batch_size(consumed_samples)` is the size of the step that starts there. The end is where fewer samples than
    a global batch are left. The plan raises DataError for a batch that cannot be dealt evenly.
    """

    def plan(consumed_samples: int) -> tuple[int, Sequence[range]]:
        size = global_batch_size(consumed_samples)
        per_microbatch = micro_batch_size * data_parallel_size
        if size <= 0 or size % per_microbatch:
            raise DataError(
                f"global_batch_size={size} after {consumed_samples} samples is no multiple of micro_batch_size x "
                f"data-parallel size = {micro_batch_size} x {data_parallel_size}; use a multiple of {per_microbatch}"
            )
        if consumed_samples + size > num_samples:
            return 0, []
        begin = consumed_samples + data_parallel_rank * micro_batch_size
        starts = range(begin, consumed_samples + size, per_microbatch)
        return size, [range(start, start + micro_batch_size) for start in starts]

    return plan


class Batches(Generic[K, T]):
    """Iterator over optimizer steps: each `next` gives what `read` made of each of this rank's microbatches.

    num_workers threads read ahead; 0: read when asked. A fault while reading is raised by the `next` it belongs to,
    and by every later one; so is the death of a thread. Close it, or use it as a context manager, to end the threads.
    """

    def __init__(self, plan: BatchPlan[K], read: Callable[[K], T], *, consumed_samples: int = 0, num_workers: int = 1):
        self._plan, self._read_one = plan, read
        self.consumed_samples = consumed_samples
        """Samples handed out so far to all data-parallel ranks together."""
        self._planned_samples = consumed_samples  # the end of what is being read ahead
        self._ahead: deque[tuple[int, list[Future[T]]]] = deque()
        self._fault: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._pool = None
        if num_workers:
            self._pool = ThreadPoolExecutor(
                num_workers, "batches", initializer=lambda: self._threads.append(threading.current_thread())
            )

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        if self._closed:
            raise RuntimeError("these batches are closed; make new ones from consumed_samples")
        if self._fault is not None:
            raise self._fault
        try:
            step = self._read() if self._pool is None else self._take(self._pool)
        except StopIteration as fault:  # from the plan or `read`: it must not pass for the end of the data
            self._fault = RuntimeError("StopIteration was raised while reading a sample")
            raise self._fault from fault
        except BaseException as fault:
            self._fault = fault
            raise
        if step is None:
            raise StopIteration
        size, microbatches = step
        self.consumed_samples += size
        return microbatches

    def _read(self) -> tuple[int, list[T]] | None:
        size, keys = self._plan(self.consumed_samples)
        return (size, [self._read_one(key) for key in keys]) if size else None

    def _take(self, pool: ThreadPoolExecutor) -> tuple[int, list[T]] | None:
        self._read_ahead(pool)
        if not self._ahead:
            return None
        size, futures = self._ahead.popleft()
        self._read_ahead(pool)
        return size, [self._wait_for(future) for future in futures]

    def _wait_for(self, future: Future[T]) -> T:
        """The microbatch, once it is read. Raises what reading it raised."""
        while not wait([future], LOOK_S).done:
            # a thread ends where the executor itself is out of memory; all of them, where this process was forked
            if not all(thread.is_alive() for thread in self._threads):
                raise RuntimeError("a thread that reads batches has died; make new ones from consumed_samples")
        return future.result()

    def _read_ahead(self, pool: ThreadPoolExecutor) -> None:
        while len(self._ahead) < STEPS_AHEAD:
            size, keys = self._plan(self._planned_samples)
            if size == 0:
                return
            self._ahead.append((size, [pool.submit(self._read_one, key) for key in keys]))
            self._planned_samples += size

    def seek(self, consumed_samples: int) -> None:
        """Go on with the sample there; what was read ahead is dropped."""
        for _, futures in self._ahead:
            for future in futures:
                future.cancel()
        self._ahead.clear()
        self.consumed_samples = self._planned_samples = consumed_samples

    def close(self) -> None:
        """Drop what was read ahead and wait for the threads to end."""
        self._closed = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
