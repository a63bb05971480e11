"""Nodes of a cluster, and how the ranks of each group of a layout lie over them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron.parallel.layout import Layout
from megatron.plan.rates.rates import Span

Axis = Literal[
    "tensor",
    "context",
    "expert",
    "grad",
    "shard",
    "replica",
    "expert_shard",
    "expert_replica",
    "pipeline",
    "stage",
    "world",
]
"""Groups of ranks that exchange: those that share layers, rows, and experts; that sum gradients (`grad`), within and
across replicas of ZeRO's shards, of experts apart; neighbours in the pipeline, all of a stage, and all."""


@dataclass(frozen=True)
class Cluster:
    """Devices of each node, in the order of the ranks."""

    node_sizes: tuple[int, ...]

    @classmethod
    def of(cls, num_nodes: int, devices_per_node: int) -> Cluster:
        """Return nodes of one size."""
        return cls((devices_per_node,) * num_nodes)

    # read at every turn of a search, and there may be thousands of nodes
    @cached_property
    def num_devices(self) -> int:
        return sum(self.node_sizes)

    @cached_property
    def smallest_node(self) -> int:
        return min(self.node_sizes)

    @cached_property
    def largest_node(self) -> int:
        return max(self.node_sizes)

    def span_of(self, layout: Layout, axis: Axis) -> Span:
        """Return how a group of this axis lies over the nodes, of unequal nodes over the smallest ones."""
        stride, size = _stride_and_size(layout, axis)
        node_size = self.smallest_node
        if size * stride <= node_size and node_size % (size * stride) == 0:
            per_node = size
        elif axis == "pipeline" and len(self.node_sizes) > 1:
            # of the neighbours some are on two nodes, and the others wait for these
            per_node = 1
        else:
            per_node = max(1, min(size, math.ceil(node_size / stride)))
        return Span(size, per_node, max(1, node_size // per_node))

    def ranks_by_node(self, first: int, stop: int) -> dict[int, int]:
        """Return how many of these ranks each node has."""
        counts, begin = {}, 0
        for node, size in enumerate(self.node_sizes):
            inside = min(stop, begin + size) - max(first, begin)
            if inside > 0:
                counts[node] = inside
            begin += size
        return counts


def _stride_and_size(layout: Layout, axis: Axis) -> tuple[int, int]:
    """Return the distance between the ranks of a group, and their number: see AXES of parallel/layout.py."""
    tensor, stage_ranks = layout.tensor_size, layout.world_size // layout.num_stages
    replicas = layout.num_replicas
    expert_stride = layout.expert_tensor_size * layout.expert_size
    expert_shard = layout.expert_grad_size // replicas
    by_axis = {
        "tensor": (1, tensor),
        "context": (tensor, layout.context_size),
        "expert": (layout.expert_tensor_size, layout.expert_size),
        "grad": (tensor, layout.grad_size),
        "shard": (tensor, layout.shard_size),
        "replica": (tensor * layout.shard_size, replicas),
        "expert_shard": (expert_stride, expert_shard),
        "expert_replica": (expert_stride * expert_shard, replicas),
        "pipeline": (stage_ranks, min(2, layout.num_stages)),
        "stage": (1, stage_ranks),
        "world": (1, layout.world_size),
    }
    return by_axis[axis]
