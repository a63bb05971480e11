"""Functions of torch that the published package replaces when it is imported; other keywords raise TypeError."""

from __future__ import annotations

import datetime
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

_new_group, _init_process_group = dist.new_group, dist.init_process_group


@wraps(_new_group)
def wrap_new_group(
    ranks: Any = None, timeout: Any = default_pg_timeout, backend: Any = None, pg_options: Any = None
) -> Any:
    return _new_group(ranks, timeout, backend, pg_options)


@wraps(_init_process_group)
def wrap_init_process_group(
    backend: Any,
    init_method: Any = None,
    timeout: Any = datetime.timedelta(seconds=1800),
    world_size: Any = -1,
    rank: Any = -1,
    store: Any = None,
    group_name: Any = "",
    pg_options: Any = None,
) -> Any:
    return _init_process_group(backend, init_method, timeout, world_size, rank, store, group_name, pg_options)


def overwrite_torch_functions() -> None:
    for name, wrapper in (("new_group", wrap_new_group), ("init_process_group", wrap_init_process_group)):
        setattr(dist, name, wrapper)


def restore_torch_functions() -> None:
    """Undo it, for a process that unloads the package."""
    dist.new_group, dist.init_process_group = _new_group, _init_process_group
