"""Replicas of ZeRO's shards: DeepSpeed shards within one, and averages gradients there; what it lacks is added here.

Its own ways to shard over fewer ranks are gone (MiCS, with 0.19), or leave the optimizer's states cut over all ranks
(`zero_hpz_partition_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import WAIT


def shard_within_replica(grid: Any, ctx: ParallelContext) -> None:
    """Have DeepSpeed shard over the ranks of a replica: `grid` is its engine's `mpu`."""
    if ctx.num_replicas > 1:
        # its names for the ranks that shard, where these are not the data-parallel ones
        grid.get_sequence_data_parallel_group = lambda: ctx.shard_groups.within
        grid.get_sequence_data_parallel_world_size = lambda: ctx.shard_size
        grid.get_sequence_data_parallel_rank = lambda: ctx.grad_rank % ctx.shard_size


def average_over_replicas(optimizer: Any, ctx: ParallelContext) -> None:
    """Let ZeRO-2 and 3, and offload, average over the replicas what they have averaged within one: their own shard."""
    if ctx.num_replicas == 1:
        return
    if hasattr(optimizer, "partition_grads"):
        _average_partitions(optimizer, ctx)
    else:
        _average_buckets(optimizer, ctx)


def _average(tensor: Tensor, ctx: ParallelContext) -> None:
    with ctx.state.clock.phase(WAIT):
        # divided first: in 16 bits the sum may be too large
        dist.all_reduce(tensor.div_(ctx.num_replicas), group=ctx.shard_groups.across)


def _average_partitions(optimizer: Any, ctx: ParallelContext) -> None:
    """Average ZeRO-3's partitions of a bucket, before they are added to those of earlier microbatches."""
    add = optimizer.partition_grads

    def average_and_add(parameters: Sequence[Any], partitions: Sequence[Tensor]) -> Any:
        flat = torch.cat([partition.reshape(-1) for partition in partitions]).to(optimizer.communication_data_type)
        _average(flat, ctx)
        for partition, mean in zip(partitions, flat.split([each.numel() for each in partitions]), strict=True):
            partition.copy_(mean.view_as(partition))
        return add(parameters, partitions)

    optimizer.partition_grads = average_and_add


def _average_buckets(optimizer: Any, ctx: ParallelContext) -> None:
    """Average what a bucket of ZeRO-1 and 2 has of one rank's shard, on that rank."""
    reduce = optimizer.allreduce_bucket

    def reduce_and_average(*arguments: Any, rank: int | None = None, **options: Any) -> Tensor:
        summed: Tensor = reduce(*arguments, rank=rank, **options)
        if rank in (None, ctx.grad_rank % ctx.shard_size):
            _average(summed, ctx)
        return summed

    optimizer.allreduce_bucket = reduce_and_average
