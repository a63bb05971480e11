"""Encoding of batches of blocks in order, by processes."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import TypeVar

from megatron.data.index.indexed import DataError
from megatron.data.read.document_blocks import Block

BYTES_WORTH_A_PROCESS = 16 << 20
"""Input for each process to start: starting one takes as long as encoding this much here."""
BATCHES_PER_WORKER = 2
"""Batches submitted to each worker process at a time."""
BATCHES_AHEAD = 8
"""Further batches that may be encoded before an earlier one is done. Bounds the memory."""

Encoded = TypeVar("Encoded")
Encode = Callable[[list[Block]], Encoded]


def in_processes(
    encode_here: Encode[Encoded],
    encode_there: Encode[Encoded],
    batches: Iterator[list[Block]],
    num_processes: int,
) -> Generator[Encoded]:
    """Yield every encoded batch in order. Raises DataError.

    For encoders in Python, as Jinja's templates are: it runs in one thread of a process at a time. This process encodes
    a batch itself, by `encode_here`, whenever all others have enough: also while they start. `encode_there` is sent to
    them, so it must be a function of a module, or a partial of one.
    """
    # this process encodes too
    num_workers = num_processes - 1
    if num_workers < 1:
        for batch in batches:
            yield encode_here(batch)
        return
    pool = ProcessPoolExecutor(num_workers, _WorkerContext(), _start_worker)
    enough = BATCHES_PER_WORKER * num_workers
    most = enough + BATCHES_AHEAD
    waiting: deque[tuple[str, Future[Encoded]]] = deque()
    place = ""
    try:
        for batch in batches:
            place = place or batch[0].place(0)
            num_unfinished = sum(not future.done() for _, future in waiting)
            if num_unfinished < enough:
                future = pool.submit(encode_there, batch)
            else:
                future = _finished(encode_here, batch)
            # the place names where a dead worker was
            waiting.append((batch[0].place(0), future))
            # in order, and no more in flight than the memory should hold
            while waiting and (waiting[0][1].done() or len(waiting) >= most):
                place, future = waiting.popleft()
                yield future.result()
        while waiting:
            place, future = waiting.popleft()
            yield future.result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker process died at {place} or after it; it may have run out of memory: use fewer --workers"
        ) from None
    finally:
        # also after an error or Ctrl-C, so that no worker outlives the command
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(encode: Encode[Encoded], batch: list[Block]) -> Future[Encoded]:
    """Return a finished future: an error must wait until all blocks before this one are done."""
    future: Future[Encoded] = Future()
    try:
        future.set_result(encode(batch))
    except DataError as error:
        # only a fault of the data: any other exception is a fault of the program, and ends it here
        future.set_exception(error)
    return future


class _WorkerProcess(SpawnProcess):
    """A process that does not run the caller's script, which may lack `if __name__ == "__main__"`."""

    def start(self) -> None:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # spawn imports in the child whatever file this names
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


# spawn, not fork: a lock that a thread of this process holds would stay locked in a forked one
class _WorkerContext(SpawnContext):
    Process = _WorkerProcess


def _start_worker() -> None:
    """Set up a worker process: it ends with its parent, even one that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent reacts
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    atexit.register(os._exit, 0)  # freeing the tokenizers' memory would take 0.2 s
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
