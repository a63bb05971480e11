"""Pools of gloo ranks that live as long as the test session: importing torch and deepspeed costs seconds a process.

`ranks(4)(function, *arguments)` runs an importable function on 4 ranks of one world and returns their results in
order of rank. A rank that raises fails the test with its traceback. Where the other ranks then hang in a collective,
the pool is killed, and started anew for the next test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_METHOD = multiprocessing.get_context("spawn")


GRACE_S = 5.0
LRU_CACHE = type(functools.cache(len))


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settle() -> list[Any]:
    """Import what tasks need, and keep the collector off it, as each task ends with a search of all objects.

    Returns DeepSpeed's caches of functions, which that search then no longer finds.
    """
    import deepspeed  # noqa: F401
    import torch

    torch.set_num_threads(1)
    found = [cache for cache in gc.get_objects() if type(cache) is LRU_CACHE]
    gc.collect()
    gc.freeze()
    return [cache for cache in found if (cache.__module__ or "").startswith("deepspeed.")]


def _let_engines_go(caches: list[Any]) -> None:
    """Collect the engines of a finished task, and with them the threads of their process groups.

    They hang in cycles through C++, which the collector cannot see: by hooks on the parameters, which `destroy`
    removes, and by hooks on the outputs of a training step, which are taken apart. DeepSpeed itself holds on to the
    model of every ZeRO-3 engine, to the last pipeline's groups, and to whatever a cached method was called with.
    """
    import deepspeed
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.zero import parameter_offload

    has_world = deepspeed.comm.is_initialized()
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, deepspeed.DeepSpeedEngine) and has_world:
            candidate.destroy()
        elif kind.__name__ == "OutputBackwardHookManager":
            vars(candidate).clear()
    for cache in caches:
        cache.cache_clear()
    parameter_offload.FWD_MODULE_STACK.clear()
    importlib.reload(p2p)
    gc.collect()


def _serve(pipe: Connection, rank: int, world_size: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    caches = _settle()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            if task is None:
                _clean_up(caches)
                pipe.send((True, None))
                continue
            port, function, arguments, options = task
            os.environ["MASTER_PORT"] = str(port)
            result = function(*arguments, **options)
            _clean_up(caches)
            pipe.send((True, result))
        except BaseException:  # whatever it is, the test must see it
            pipe.send((False, traceback.format_exc()))


def _clean_up(caches: list[Any]) -> None:
    """Collective: the pool asks for it after a failure, once all ranks have answered."""
    _let_engines_go(caches)
    _leave_world()


def _leave_world() -> None:
    """Give back the process groups: each keeps a polling thread, and a session makes hundreds."""
    import deepspeed
    import torch

    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()  # none leaves while another still needs it
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)  # it remembers the groups that are gone


class RankPool:
    """`world_size` processes in one world, started at the first call."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0, **options: Any
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
        for rank in range(self.world_size):
            ours, theirs = START_METHOD.Pipe()
            process = START_METHOD.Process(target=_serve, args=(theirs, rank, self.world_size), daemon=True)
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

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
