"""Encoding of blocks of rows, in this process and in others.

Jinja is Python, which runs in one thread of a process at a time, so more cores need more processes.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.data.chat.columns import looks_like_context
from megatron.data.index.indexed import DataError
from megatron.data.read.document_blocks import Block
from megatron.data.read.document_parser import check_unrepeated, object_of_line

if TYPE_CHECKING:
    import pyarrow

BYTES_WORTH_A_PROCESS = 16 << 20
"""Input for each process to start: starting one takes as long as encoding this much here."""
BLOCKS_PER_WORKER = 2
"""Blocks submitted to each worker process at a time."""
BLOCKS_AHEAD = 8
"""Further blocks that may be encoded before an earlier one is done. Bounds the memory."""

Encoded = TypeVar("Encoded")
Encode = Callable[[list[Block]], Encoded]


def rows_of(
    block: Block, example: str, keys: Sequence[str]
) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str, str]], int]:
    """Return the numbered rows of a block, the problems (number, kind, reason) of other lines, and the blank lines.

    `example` is shown for a line that is not an object; `keys` are those whose values must be usable.
    """
    if block.fault is not None:  # unlike a bad row, it hides what follows
        return [], [(0, "unreadable", block.fault.reason)], 0
    if block.end.documents == block.begin.documents:
        return [], [], 0
    if block.rows is not None:
        return list(enumerate(_rows_of_table(block.rows, keys))), [], 0
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[tuple[int, str, str]] = []
    num_blank = 0
    for number, line in enumerate(block.raw.split(block.delimiter)):
        if not line.strip():
            num_blank += 1
            continue
        try:
            row = object_of_line(line, example, keys)
            check_unrepeated(row, line)
            rows.append((number, row))
        except UnicodeDecodeError as error:
            problems.append((number, "not JSON", f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            problems.append((number, "not JSON", str(error)))
    return rows, problems, num_blank


def _rows_of_table(table: pyarrow.RecordBatch, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table, without its nulls. Of columns that are not read, True stands for a value."""
    columns = []
    for name, column in zip(table.schema.names, table.columns, strict=True):
        is_read = name in keys or looks_like_context(name)
        columns.append(column.to_pylist() if is_read else [value or None for value in column.is_valid().to_pylist()])
    rows = zip(*columns, strict=True)
    return [_without_nulls(dict(zip(table.schema.names, row, strict=True))) for row in rows]


def _without_nulls(value: Any) -> Any:
    """Return a row of a table without its nulls: all objects of a column have the keys of each other there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def encode_blocks(
    encode_here: Encode[Encoded],
    encode_there: Encode[Encoded],
    batches: Iterator[list[Block]],
    num_processes: int,
) -> Generator[tuple[int, Encoded]]:
    """Yield every encoded batch in order, with the number of input bytes read for it. Raises DataError.

    This process encodes a block itself, by `encode_here`, whenever all others have enough: also while they start.
    `encode_there` is sent to them, so it must be a function of a module, or a partial of one.
    """
    num_workers = num_processes - 1
    if num_workers < 1:
        for batch in batches:
            yield _input_bytes(batch), encode_here(batch)
        return
    pool = ProcessPoolExecutor(num_workers, _WorkerContext(), _start_worker)
    waiting: deque[tuple[int, str, Future[Encoded]]] = deque()
    place = ""
    try:
        for batch in batches:
            place = place or batch[0].place(0)
            if sum(not future.done() for _, _, future in waiting) < BLOCKS_PER_WORKER * num_workers:
                future = pool.submit(encode_there, batch)
            else:
                future = _finished(encode_here, batch)
            waiting.append((_input_bytes(batch), batch[0].place(0), future))
            most = BLOCKS_PER_WORKER * num_workers + BLOCKS_AHEAD
            while waiting and (waiting[0][2].done() or len(waiting) >= most):
                num_bytes, place, future = waiting.popleft()
                yield num_bytes, future.result()
        while waiting:
            num_bytes, place, future = waiting.popleft()
            yield num_bytes, future.result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker process died at {place} or after it; it may have run out of memory: use fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _input_bytes(batch: Sequence[Block]) -> int:
    return sum(block.num_input_bytes for block in batch)


def _finished(encode: Encode[Encoded], batch: list[Block]) -> Future[Encoded]:
    """Return a finished future: an error must wait until all blocks before this one are done."""
    future: Future[Encoded] = Future()
    try:
        future.set_result(encode(batch))
    except DataError as error:
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
