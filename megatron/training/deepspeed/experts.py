"""Experts as DeepSpeed's optimizers know them: parameter groups whose gradients have ranks of their own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of

NAME = "experts"
EXPERT_GROUP = {"moe": True, "name": NAME}
"""Marks by which DeepSpeed knows an optimizer's group of experts."""


class ExpertGroups(MoE):  # type: ignore[misc]
    """The module by whose class DeepSpeed recognises a model with experts. It computes nothing.

    Without it, DeepSpeed would cut the experts into shards over the data-parallel ranks, which hold different ones.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        nn.Module.__init__(self)  # without the layer that DeepSpeed's own would allocate
        self._ctx = ctx
        self.num_experts = 1  # DeepSpeed's engine reads it, and nothing else does

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Give DeepSpeed the groups of our layout, where it would form its own."""
        for ours, table, ranks in (
            (self._ctx.expert_group, groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
            (
                self._ctx.expert_shard_groups.within,
                groups._EXPERT_DATA_PARALLEL_GROUP,
                groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
            ),
        ):
            table[NAME], ranks[NAME] = ours, dist.get_process_group_ranks(ours)


def announce_experts(model: nn.Module, ctx: ParallelContext) -> None:
    """Mark the experts of a rank's layers for DeepSpeed, where they lie over the ranks otherwise than the rest."""
    if not ctx.divides_experts:
        return
    model.add_module("expert_groups", ExpertGroups(ctx))
    experts: list[Any] = [p for p in model.parameters() if shard_of(p).expert is not None]
    for parameter in experts:
        parameter.allreduce, parameter.group_name = False, NAME
