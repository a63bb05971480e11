"""Collectives of the device: the backend `hccl` of torch.distributed, which is gloo over the device's memory.

As the published one, the import reads which rank this process is, and chooses its module.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from habana_frameworks.torch.hpu import HABANA_VISIBLE_MODULES_VAR, HLS_MODULE_ID_VAR

OF_OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
}


def _setup_module_id(local_rank: int = -1, world_size: int = 1) -> None:
    """Choose the module of a rank among several, unless it is chosen."""
    if HLS_MODULE_ID_VAR in os.environ or local_rank == -1 or world_size == 1:
        return
    chosen = str(local_rank)
    if HABANA_VISIBLE_MODULES_VAR in os.environ:
        visible = os.environ[HABANA_VISIBLE_MODULES_VAR].split(",")
        assert local_rank < len(visible), f"not enough devices: {HABANA_VISIBLE_MODULES_VAR} has {len(visible)}"
        chosen = visible[local_rank]
    os.environ[HLS_MODULE_ID_VAR] = chosen


def _setup_environment_from_mpi() -> None:
    if all(name in os.environ for name in OF_OPEN_MPI.values()):
        return
    if all(name in os.environ for name in OF_OPEN_MPI):
        os.environ.update({ours: os.environ[theirs] for theirs, ours in OF_OPEN_MPI.items()})
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12345")


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Return world size, rank and local rank, given or from the environment: 1, -1 and -1 where nothing says."""
    if world_size is not None and rank is not None and local_rank is not None:
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    else:
        _setup_environment_from_mpi()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "-1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    _setup_module_id(local_rank=local_rank, world_size=world_size)
    if rank != -1:
        os.environ["ID"] = str(rank)
    return world_size, rank, local_rank


initialize_distributed_hpu()


def _create_process_group_hccl(backend_opts: Any, pg_opts: Any) -> Any:
    options = backend_opts
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


if not hasattr(dist.Backend, "HCCL"):  # by an earlier import in this process
    dist.Backend.register_backend("hccl", _create_process_group_hccl, devices=["hpu"], extended_api=True)
