"""Start of a low-rank adapter from the principal singular vectors of its weight (PiSSA).

Source: Meng et al. 2024 (arXiv:2404.02948). There, and in PEFT, what the adapter holds at its start is subtracted from
the base. Here the base stays as it is: the adapter's start is kept beside it, frozen, and subtracted from its output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.context import ParallelContext
from megatron.parallel.rng import derive_seed
from megatron.parallel.shards import Shard, shard_of

START = "lora_start_"
"""Begins the names of the frozen copies: `lora_start_A`, `lora_start_B`."""


@torch.no_grad()
def start_of(layer: Any, adapter: Adapter, local: Tensor, whole: Shard, ctx: ParallelContext) -> dict[str, Tensor]:
    """Return this rank's part of the start of A and B and of their frozen copies, by local name, float32. Collective.

    `local` is this rank's part of the adapted rows, cut as `whole` says. One rank computes for all of its stage.
    """
    parts = [local.contiguous()]
    if ctx.tensor_size > 1:
        parts = [torch.empty_like(parts[0]) for _ in range(ctx.tensor_size)]
        dist.all_gather(parts, local.contiguous(), group=ctx.tensor_group)
    parameters = [layer.get_parameter(f"lora_{name}{adapter.suffix}") for name in "AB"]
    wide = torch.promote_types(local.dtype, torch.float32)
    found = [torch.empty(shard_of(p).shape, dtype=wide, device=local.device) for p in parameters]
    if ctx.tensor_rank == 0 and ctx.grad_rank == 0:
        seed = derive_seed(parameters[0].full_name)
        computed = _factors(whole.assemble(parts).to(wide), adapter, seed)
        for tensor, values in zip(found, computed, strict=True):
            tensor.copy_(values)
    for group, size in ((ctx.tensor_group, ctx.tensor_size), (ctx.grad_group, ctx.grad_size)):
        for tensor in found if size > 1 else ():
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
    start: dict[str, Tensor] = {}
    for name, parameter, full in zip("AB", parameters, found, strict=True):
        own = shard_of(parameter).take(full, ctx.tensor_rank, ctx.tensor_size)
        start |= {f"lora_{name}{adapter.suffix}": own, f"{START}{name}{adapter.suffix}": own}
    return start


def _factors(weight: Tensor, adapter: Adapter, seed: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r]: scale * B A is the best approximation of rank r of weight [out, in]."""
    if weight.device.type not in ("cpu", "cuda"):
        weight = weight.cpu()
    rank = adapter.rank
    if adapter.svd_iterations is None:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            left, values, right = torch.svd_lowrank(weight, rank, niter=adapter.svd_iterations)
        right = right.t()
    roots = (values[:rank] / adapter.scale).sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots
