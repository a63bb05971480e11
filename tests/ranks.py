"""Pools of gloo ranks that live as long as the test session: forks of a server that has imported torch and deepspeed.

`ranks(4)(function, *arguments)` runs an importable function on 4 ranks of one world and returns their results in
order of rank. A rank that raises fails the test with its traceback. Where the other ranks then hang in a collective,
the pool is killed, and started anew for the next test.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

from benchmarks.allocations import library
from benchmarks.alternating import free_port as free_port

START_METHOD = multiprocessing.get_context("forkserver")
GRACE_S = 5.0
HANG_S = 1200.0
"""Limit of what a test waits for. It ends a hang; no result depends on how busy the machine is."""


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def _serve(pipe: Connection, rank: int, world_size: int, prepare: Callable[[], None] | None) -> None:
    importlib.import_module("tests.rank_server").serve(pipe, rank, world_size, prepare)


def _start_server() -> None:
    """Start the process that ranks are forked from, unless it runs."""
    forkserver.set_forkserver_preload(["tests.rank_server"])
    # sys.path is where alone the server finds modules; the counter of allocations must be there when a process starts
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), LD_PRELOAD=str(library())):
        forkserver.ensure_running()


class RankPool:
    """`world_size` processes in one world, started at the first call. Each runs `prepare` first."""

    def __init__(self, world_size: int, prepare: Callable[[], None] | None = None) -> None:
        self.world_size, self._prepare = world_size, prepare
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S, **options: Any
    ) -> list[Any]:
        """function(*arguments, **options) on every rank -> results in order of rank. Raises RankFailure."""
        if not self._processes:
            self._start()
        answers = self._ask((free_port(), function, arguments, options), timeout_s)
        failed = [rank for rank, (succeeded, _) in answers.items() if not succeeded]
        if failed:
            self._recover(answers)
            # the first to fail: others may have met its absence
            raise RankFailure(f"rank {failed[0]} of {self.world_size}:\n{answers[failed[0]][1]}")
        return [answers[rank][1] for rank in range(self.world_size)]

    def _ask(self, task: Any, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """What ranks answered, in that order: all of them unless one failed. Raises RankFailure if one is silent."""
        for pipe in self._pipes:
            pipe.send(task)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready: list[Any] = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not all(succeeded for succeeded, _ in answers.values()):
                break
            if not ready:
                self.stop()
                raise RankFailure(
                    f"ranks {sorted(set(range(self.world_size)) - set(answers))} gave no answer in {timeout_s} s"
                )
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.stop()
                    raise RankFailure(f"rank {rank} died") from None
                if not answers[rank][0]:  # the others answer soon, or hang
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _recover(self, answers: dict[int, tuple[bool, Any]]) -> None:
        """Keep the pool for the next test, where every rank is free again."""
        if len(answers) == self.world_size:
            with contextlib.suppress(RankFailure):
                if all(succeeded for succeeded, _ in self._ask(None, GRACE_S).values()):
                    return
        self.stop()

    def _start(self) -> None:
        _start_server()
        for rank in range(self.world_size):
            ours, theirs = START_METHOD.Pipe()
            arguments = theirs, rank, self.world_size, self._prepare
            process = START_METHOD.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def stop(self) -> None:
        """End the processes: a rank that waits for work leaves by itself, one that hangs is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


class RankPools:
    """A pool for each world size asked for."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._pools: dict[int, RankPool] = {}
        self._prepare = prepare

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size, self._prepare))

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
