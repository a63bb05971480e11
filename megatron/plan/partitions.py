"""Parameters that ZeRO has whole on a rank for a time, in numbers.

Of the flat partitions into which it cuts the groups of an optimizer (training/optimizers/groups.py), and of a forward
pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.flops import held_numel, held_shards

Group = tuple[int, bool]
"""Ranks that sum the gradients of a group's parameters; and whether these decay."""


def whole_parameters(layers: Sequence[LayerDeclaration], layout: Layout) -> int:
    """Return the numbers of all trained parameters of which some lie in the partition of a rank, at most.

    Neighbours have parts of the same parameter, and each keeps its whole gradient.
    """
    kept: Counter[int] = Counter()
    for (ranks, _), numels in _groups(layers, layout).items():
        length = -(-sum(numels) // (ranks // layout.num_replicas))
        start = 0
        for numel in numels:
            first, last = start // length, (start + numel - 1) // length
            for partition in range(first, last + 1):
                kept[partition] += numel
            start += numel
    return max(kept.values(), default=0)


def read_by_forward_alone(config: Config, layers: Sequence[LayerDeclaration], layout: Layout) -> list[int]:
    """Return the sizes of the parameters before the first trained layer, which no backward pass reads.

    ZeRO-3 gives them back after their own forward pass.
    """
    if not config.model.untie_embeddings_and_output_weights:
        layers = layers[1:]  # the table is read again at the end
    sizes: list[int] = []
    for layer in layers:
        shards = held_shards(layer, layout)
        if any(shard.trained for shard in shards):
            break
        sizes += [held_numel(shard, layout) for shard in shards if not shard.quantized]
    return sizes


def _groups(layers: Sequence[LayerDeclaration], layout: Layout) -> dict[Group, list[int]]:
    """Return the sizes of trained parameters, in the order of the model: matrices, and biases and norms."""
    groups: dict[Group, list[int]] = {}
    for layer in layers:
        for shard in held_shards(layer, layout):
            if not shard.trained:
                continue
            _, ranks = layout.grad_place(shard)
            decays = len(shard.shape) > 1 or shard.added
            groups.setdefault((ranks, decays), []).append(held_numel(shard, layout))
    return groups
