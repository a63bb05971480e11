"""Choice of the weights that are multiplied in fp8, their sizes and the memory of their operands. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron.options.config import Config
from megatron.parallel.costs import Activation, MatrixProduct
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration

MULTIPLE = 16
"""Both sizes of a scaled product's second operand, and the number of its sums' terms, have to be multiples of it.

Source: meta_scaled_mm in torch.
"""
SMALLEST = 2.0**-60
"""Largest absolute values below it count as it, so that the scale of zeros is finite."""
EXPONENT = -(2**23)
"""The bits of sign and exponent of a float32, as an int32."""


def padded_size(terms: int) -> int:
    """Return the number of a sum's terms with the zeros that make it a multiple."""
    return -(-terms // MULTIPLE) * MULTIPLE


def fp8_weights(layer: LayerDeclaration, config: Config) -> Iterator[tuple[str, MatrixProduct]]:
    """Yield the local names of the layer's weights whose products run in fp8 in training, with their costs.

    Output projection and routers are none.
    """
    if not computes_in_fp8(layer, config):
        return
    yield from _weights_by_part(layer, config)


def computes_in_fp8(layer: LayerDeclaration, config: Config) -> bool:
    """Return True for a transformer layer whose products run in fp8."""
    edge = config.fp8.fp8_first_last_layers_bf16
    if layer.number is None or not config.fp8.uses_fp8:
        return False
    return edge <= layer.number < config.model.num_layers - edge


def _weights_by_part(layer: LayerDeclaration, config: Config) -> Iterator[tuple[str, MatrixProduct]]:
    """Yield the same of a layer wherever it is in the model."""
    for name, shard in layer.shards.items():
        if not isinstance(shard.cost, MatrixProduct):
            continue
        is_mlps_second = isinstance(shard.cost.reads, Activation)
        if is_mlps_second and not config.fp8.fp8_mlp_row_parallel:
            continue
        yield name, shard.cost


def kept_bytes(layer: LayerDeclaration, config: Config, layout: Layout) -> int:
    """Return the bytes of the operands that a rank keeps of a layer's weights: of the forward and the backward pass."""
    fp8 = config.fp8
    if not fp8.cache_fp8_weight_fwd:
        return 0
    numbers = 0
    for name, _ in fp8_weights(layer, config):
        shard = layer.shards[name]
        if layout.holds(shard):
            numbers += math.prod(shard.local_shape(layout.cut_of(shard)[1]))
    return numbers * (2 if fp8.cache_fp8_weight else 1)


def operand_bytes(layer: LayerDeclaration, config: Config, layout: Layout, tokens: int) -> int:
    """Return the most bytes of operands at a time in a layer's backward pass, but for those of experts.

    They are the gradient of the outputs, its transpose and that of the inputs. A layer in 16 bits counts as the others:
    those that are declared alike are planned once.
    """
    most = 0
    if layer.number is None or not config.fp8.uses_fp8:
        return most
    for name, _ in _weights_by_part(layer, config):
        shard = layer.shards[name]
        if shard.expert is None:
            outputs, inputs = shard.local_shape(layout.cut_of(shard)[1])
            most = max(most, tokens * (2 * outputs + inputs))
    return most


def size_faults(layers: Iterable[LayerDeclaration], config: Config, layout: Layout) -> Iterator[str]:
    """Yield a message for the first weight whose sizes on a rank no scaled product takes."""
    for layer in layers:
        for name, _ in fp8_weights(layer, config):
            shard = layer.shards[name]
            _, cut = layout.cut_of(shard)
            sizes = shard.local_shape(cut)
            if all(size % MULTIPLE == 0 for size in sizes):
                continue
            yield (
                f"fp8_format={config.fp8.fp8_format} multiplies weights whose sizes are multiples of {MULTIPLE}, but "
                f"{layer.full_name(name)} is {' x '.join(map(str, sizes))} on each rank; choose other sizes or "
                "fewer tensor-parallel ranks, or leave fp8_format out"
            )
            return
