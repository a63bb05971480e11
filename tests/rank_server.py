"""Side of the ranks in tests/ranks.py: the server that they are forked from imports this module once.

The imports start no thread, open no device and join no process group, so that a rank can be a fork.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
del os.environ["LD_PRELOAD"]  # it counts in ranks, not in the programs that they start

from megatron.runtime.first_steps import importing

with importing():
    import deepspeed
    import torch
    import torch._dynamo  # the first recomputed layer does; one second
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.zero import parameter_offload

    import megatron.train

    megatron.train.preload()

LINEAR = torch.nn.functional.linear
LRU_CACHE = type(functools.cache(len))
# before the collector no longer shows them
DEEPSPEED_CACHES = [
    cache
    for cache in gc.get_objects()
    if type(cache) is LRU_CACHE and (cache.__module__ or "").startswith("deepspeed.")
]
# each task of a rank ends with a search of all objects, which passes over frozen ones
gc.collect()
gc.freeze()


def serve(pipe: Connection, rank: int, world_size: int, prepare: Callable[[], None] | None = None) -> None:
    """Run the tasks that come through the pipe, until it closes; `prepare` before them."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
    }
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    num_modules = len(sys.modules)
    while True:
        if len(sys.modules) > num_modules + 100:
            num_modules = len(sys.modules)
            gc.freeze()  # a task has imported a library, such as transformers
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            if task is None:
                _clean_up()
                pipe.send((True, None))
                continue
            port, function, arguments, options = task
            os.environ["MASTER_PORT"] = str(port)
            result = function(*arguments, **options)
            _clean_up()
            pipe.send((True, result))
        except BaseException:  # whatever it is, the test must see it
            pipe.send((False, traceback.format_exc()))


def _clean_up() -> None:
    """Collective: the pool asks for it after a failure, once all ranks have answered."""
    _let_engines_go()
    _leave_world()


def _let_engines_go() -> None:
    """Collect the engines of a finished task, and with them the threads of their process groups.

    They hang in cycles through C++, which the collector cannot see: by hooks on the parameters, which `destroy`
    removes, and by hooks on the outputs of a training step, which are taken apart. DeepSpeed itself holds on to the
    model of every ZeRO-3 engine, to the last pipeline's groups, and to whatever a cached method was called with.
    """
    has_world = deepspeed.comm.is_initialized()
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, deepspeed.DeepSpeedEngine) and has_world:
            candidate.destroy()
        elif kind.__name__ == "OutputBackwardHookManager":
            vars(candidate).clear()
    for cache in DEEPSPEED_CACHES:
        cache.cache_clear()
    parameter_offload.FWD_MODULE_STACK.clear()
    # ZeRO-3 replaces it for good, by a product that keeps its input for a frozen weight too
    torch.nn.functional.linear = LINEAR
    importlib.reload(p2p)
    gc.collect()


def _leave_world() -> None:
    """Give back the process groups: each keeps a polling thread, and a session makes hundreds."""
    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()  # none leaves while another still needs it
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)  # it remembers the groups that are gone
