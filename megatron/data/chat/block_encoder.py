"""Encoding of blocks of chat rows, in this process and in others.

Jinja is Python, which runs in one thread of a process at a time, so more cores need more processes.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.conversation import ROW_KEYS, BadRow, Chat, parse_row
from megatron.data.chat.encoder import ChatCounts, ChatEncoder, Sample
from megatron.data.chat.job import BadRows, ChatJob, prepare_chats
from megatron.data.document_blocks import Block, Fault
from megatron.data.document_parser import object_of_line
from megatron.data.indexed import DataError
from megatron.data.manifest import BlockCounts

SHOWN_FAULTS = 10
BLOCKS_PER_WORKER = 2
"""Blocks submitted to each worker process at a time."""
BLOCKS_AHEAD = 8
"""Further blocks that may be encoded before an earlier one is done. Bounds the memory."""


@dataclass
class EncodedBlock:
    """The samples of a block of rows, concatenated."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    counts: ChatCounts
    faults: list[str]
    num_blank: int = 0
    of_blocks: list[BlockCounts] = field(default_factory=list)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield Sample(self.ids[start:end], self.mask[start:end])


def encode_batch(encoder: ChatEncoder, blocks: Sequence[Block], bad_rows: BadRows) -> EncodedBlock:
    """Encode consecutive blocks. Raises DataError for the first bad row unless bad rows are skipped."""
    encoded = [encode_block(encoder, block, bad_rows) for block in blocks]
    if len(encoded) == 1:
        return encoded[0]
    counts = ChatCounts()
    for one in encoded:
        counts.add(one.counts)
    return EncodedBlock(
        np.concatenate([one.ids for one in encoded]),
        np.concatenate([one.mask for one in encoded]),
        np.concatenate([one.lengths for one in encoded]),
        counts,
        [fault for one in encoded for fault in one.faults][:SHOWN_FAULTS],
        sum(one.num_blank for one in encoded),
        [of_block for one in encoded for of_block in one.of_blocks],
    )


def encode_block(encoder: ChatEncoder, block: Block, bad_rows: BadRows) -> EncodedBlock:
    """Encode the rows of a block. Raises DataError for the first bad row unless bad rows are skipped."""
    rows, problems, num_blank = _rows(block)
    counts = ChatCounts(num_rows=len(rows) + len(problems))
    chats: list[Chat] = []
    numbers: list[int] = []
    for number, row in rows:
        try:
            chats.append(parse_row(row))
            numbers.append(number)
        except BadRow as error:
            problems.append((number, error.kind, str(error)))
    samples: list[Sample] = []
    for number, result in zip(numbers, encoder.encode(chats, counts), strict=True):
        if isinstance(result, BadRow):
            problems.append((number, result.kind, str(result)))
        else:
            samples += result
    problems.sort()
    counts.bad.update(kind for _, kind, _ in problems)
    faults = [str(Fault(block.place(number), reason)) for number, _, reason in problems[:SHOWN_FAULTS]]
    if faults and bad_rows == "error":
        raise DataError(f"{faults[0]} (or pass --bad-rows skip to leave such rows out)")
    return EncodedBlock(
        np.concatenate([sample.ids for sample in samples] or [np.empty(0, np.int32)]),
        np.concatenate([sample.mask for sample in samples] or [np.empty(0, np.uint8)]),
        np.array([sample.length for sample in samples], np.int64),
        counts,
        faults,
        num_blank,
        [BlockCounts(block.without_content(), len(samples), num_blank, 0, len(problems))],
    )


def _rows(block: Block) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str, str]], int]:
    """Return the numbered rows of a block, the problems (number, kind, reason) of other lines, and the blank lines."""
    if block.fault is not None:  # unlike a bad row, it hides what follows
        return [], [(0, "unreadable", block.fault.reason)], 0
    if block.end.documents == block.begin.documents:
        return [], [], 0
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[tuple[int, str, str]] = []
    num_blank = 0
    for number, line in enumerate(block.raw.split(block.delimiter)):
        if not line.strip():
            num_blank += 1
            continue
        try:
            rows.append((number, object_of_line(line, '{"messages": [...]}', ROW_KEYS)))
        except UnicodeDecodeError as error:
            problems.append((number, "not JSON", f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            problems.append((number, "not JSON", str(error)))
    return rows, problems, num_blank


def encode_blocks(
    job: ChatJob, encoder: ChatEncoder, batches: Iterator[list[Block]], num_processes: int
) -> Generator[tuple[int, EncodedBlock]]:
    """Yield every encoded batch in order, with the number of input bytes read for it. Raises DataError.

    This process encodes a block itself whenever all others have enough: also while they start.
    """
    num_workers = num_processes - 1
    if num_workers < 1:
        for batch in batches:
            yield _input_bytes(batch), encode_batch(encoder, batch, job.bad_rows)
        return
    pool = ProcessPoolExecutor(num_workers, _WorkerContext(), _start_worker)
    waiting: deque[tuple[int, str, Future[EncodedBlock]]] = deque()
    place = ""
    try:
        for batch in batches:
            place = place or batch[0].place(0)
            if sum(not future.done() for _, _, future in waiting) < BLOCKS_PER_WORKER * num_workers:
                future = pool.submit(_encode_in_worker, job, batch)
            else:
                future = _encode_here(encoder, batch, job.bad_rows)
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


def _encode_here(encoder: ChatEncoder, batch: Sequence[Block], bad_rows: BadRows) -> Future[EncodedBlock]:
    """Return a finished future: an error must wait until all blocks before this one are done."""
    future: Future[EncodedBlock] = Future()
    try:
        future.set_result(encode_batch(encoder, batch, bad_rows))
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


@lru_cache(maxsize=1)
def _encoder_of(job: ChatJob) -> ChatEncoder:
    setup = prepare_chats(job)
    setup.tokenizer.expected_bytes = sys.maxsize  # workers are started for large inputs only
    return setup.encoder


def _encode_in_worker(job: ChatJob, batch: list[Block]) -> EncodedBlock:
    return encode_batch(_encoder_of(job), batch, job.bad_rows)
