"""Processes that encode blocks of chats: Jinja is Python, and one process has one thread of it.

They are programs of their own, so a caller's script needs no `if __name__ == "__main__"`, and they inherit no threads.
Parent and worker speak over pipes in messages of a few byte strings.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

import orjson

from megatron.data.chat.conversation import ChatEncoder
from megatron.data.chat.job import ChatJob, EncodedBlock, encode_block, prepare_chats
from megatron.data.document_blocks import Block, Fault, Position
from megatron.data.indexed import DataError
from megatron.data.sources import SourceFile
from megatron.files import IMPORT_ROOT

BLOCKS_AHEAD = 2
"""Blocks read beyond those being encoded."""


def _send(pipe: IO[bytes], parts: Sequence[bytes]) -> None:
    pipe.write(struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> list[bytes] | None:
    """None: the other side is done, or dead."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    (count,) = struct.unpack("<I", head)
    sizes = struct.unpack(f"<{count}Q", pipe.read(8 * count))
    parts = [pipe.read(size) for size in sizes]
    return parts if [len(part) for part in parts] == list(sizes) else None


class _Worker:
    """A process, seen from the parent."""

    def __init__(self, job: ChatJob):
        path = os.pathsep.join(filter(None, (str(IMPORT_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron.data.chat.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        _send(self._requests, [orjson.dumps(asdict(job))])

    def encode(self, block: Block) -> EncodedBlock:
        """Raises DataError."""
        where = {
            "path": str(block.source.path),
            "first": block.begin.documents_of_source,
            "fault": None if block.fault is None else block.fault.reason,
        }
        try:
            _send(self._requests, [orjson.dumps(where), block.raw])
            reply = _receive(self._replies)
        except BrokenPipeError:
            reply = None
        if reply is None:
            raise DataError(
                f"a worker died with status {self._process.wait()} at {block.place(0)}; it may have run out of memory: "
                "use fewer --workers"
            )
        if len(reply) == 1:
            raise DataError(reply[0].decode())
        return EncodedBlock.from_bytes(reply)

    def stop(self) -> None:
        self._process.kill()
        for pipe in (self._requests, self._replies):
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        self._process.wait()


class WorkerPool:
    """This process and others, each with a thread that feeds it."""

    def __init__(self, job: ChatJob, encoder: ChatEncoder, num_processes: int):
        self._job = job
        self._here: ChatEncoder | None = encoder  # until a thread takes it
        self._num_processes = num_processes
        self._workers: list[_Worker] = []
        self._own = threading.local()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="chats")

    def encode(self, blocks: Iterator[Block]) -> Generator[tuple[int, EncodedBlock]]:
        """Every block in order, with the bytes of input it came of. Raises DataError."""
        waiting: deque[tuple[int, Future[EncodedBlock]]] = deque()
        for block in blocks:
            waiting.append((block.num_input_bytes, self._threads.submit(self._encode, block)))
            if len(waiting) >= self._num_processes + BLOCKS_AHEAD:
                num_bytes, future = waiting.popleft()
                yield num_bytes, future.result()
        for num_bytes, future in waiting:
            yield num_bytes, future.result()

    def _encode(self, block: Block) -> EncodedBlock:
        encode: Callable[[Block], EncodedBlock] | None = getattr(self._own, "encode", None)
        if encode is None:
            encode = self._own.encode = self._new_worker()
        return encode(block)

    def _new_worker(self) -> Callable[[Block], EncodedBlock]:
        """For the thread that asks. The first has work done here, at once, while the others' processes start."""
        with self._lock:
            encoder, self._here = self._here, None
        if encoder is not None:
            return partial(self._encode_here, encoder)
        worker = _Worker(self._job)
        with self._lock:
            self._workers.append(worker)
        return worker.encode

    def _encode_here(self, encoder: ChatEncoder, block: Block) -> EncodedBlock:
        return encode_block(encoder, block, self._job.bad_rows)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stop()
        self._threads.shutdown(wait=True)
        self._stop()  # a thread may have been about to start one

    def _stop(self) -> None:
        with self._lock:
            while self._workers:
                self._workers.pop().stop()


def main() -> None:
    """The worker: a job, then blocks, until the parent closes the pipe."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(requests)
    if first is None:
        return
    given = orjson.loads(first[0])
    job = ChatJob(**{**given, "inputs": tuple(given["inputs"])})
    setup = prepare_chats(job)
    setup.tokenizer.expected_bytes = sys.maxsize  # a process is started for nothing less
    encoder = setup.encoder
    while (request := _receive(requests)) is not None:
        where = orjson.loads(request[0])
        begin = Position(documents_of_source=where["first"])
        fault = None if where["fault"] is None else Fault("", where["fault"])
        block = Block(SourceFile(Path(where["path"]), "jsonl"), begin, begin, 0, request[1], fault=fault)
        try:
            _send(replies, encode_block(encoder, block, job.bad_rows).to_bytes())
        except DataError as error:
            _send(replies, [str(error).encode()])


if __name__ == "__main__":
    main()
