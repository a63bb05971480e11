"""Sizes of a weight held in nf4: 4-bit codes in blocks of 64 along the input channels, and one scale a block.

The scales are quantised too (Dettmers et al. 2023, arXiv:2305.14314, "double quantization"): 8-bit codes in groups of
256 scales, one float32 a group, and one float32 offset a tensor. Importable without torch, for the plan and the rules.
"""

from __future__ import annotations

import math

from megatron.parallel.shards import Shard

BLOCK = 64
"""Numbers that share a scale."""
GROUP = 256
"""Scales that share a float32."""
DEQUANTIZED_AT_ONCE = 2**18
"""Numbers that the CPU dequantises at once: the temporary ones then stay in its caches."""


def units(shard: Shard) -> list[tuple[int, int]]:
    """Return [start, stop) rows of each tensor whose scales are quantised together: those fused in the weight."""
    # a group of scales never reaches from q into k: the same codes as of three weights that are quantised apart
    if shard.dim != 0:
        return [(0, shard.shape[0])]
    stops = [sum(shard.pieces[: index + 1]) for index in range(len(shard.pieces))]
    return [(stop - rows, stop) for stop, rows in zip(stops, shard.pieces, strict=True)]


def groups_of_units(shard: Shard) -> list[int]:
    """Return the number of groups of each unit of the full tensor."""
    blocks = shard.shape[1] // BLOCK
    return [math.ceil((stop - start) * blocks / GROUP) for start, stop in units(shard)]


def sections(shard: Shard, tensor_size: int) -> list[int]:
    """Return the bytes of a rank's groups' scales, offsets, blocks' scales and codes, in the order in memory."""
    # every rank holds the float32 numbers of the whole tensor, 4 bytes for 16,384 weights, because a group's blocks may
    # lie on several ranks
    numel = math.prod(shard.local_shape(tensor_size))
    return [4 * sum(groups_of_units(shard)), 4 * len(units(shard)), numel // BLOCK, numel // 2]


def num_bytes(shard: Shard, tensor_size: int) -> int:
    """Bytes that one tensor-parallel rank holds of a quantised weight."""
    return sum(sections(shard, tensor_size))


def dequantized_bytes(shard: Shard, tensor_size: int, number_size: int) -> int:
    """Bytes that one product with a rank's weight allocates for a moment: the dense weight, and what is made for it."""
    numel = math.prod(shard.local_shape(tensor_size))
    temporary = 6  # a number: its float32 value, and a 32-bit code of two
    if number_size < 4:
        temporary = 8  # its value, and the product in float32 that is then rounded
    # scales, codes and groups of the blocks
    of_blocks = 12 * numel // BLOCK
    return numel * number_size + of_blocks + temporary * min(numel, DEQUANTIZED_AT_ONCE)


def cut_fault(name: str, shard: Shard, tensor_size: int) -> str | None:
    """Return why this weight has no whole blocks on each rank; None: it has."""
    columns = shard.local_shape(tensor_size)[1]
    if columns % BLOCK == 0:
        return None
    if tensor_size > 1 and shard.dim == 1 and shard.shape[1] % BLOCK == 0:
        fitting = [str(size) for size in range(1, tensor_size) if shard.shape[1] % (BLOCK * size) == 0]
        return (
            f"quantize_base=nf4 needs whole blocks of {BLOCK} input channels on each rank, but {name} has "
            f"{shard.shape[1]} / tensor_model_parallel_size={tensor_size} = {columns}; use {', '.join(fitting)}"
        )
    return (
        f"quantize_base=nf4 needs a multiple of {BLOCK} input channels, but {name} has {shard.shape[1]}; leave "
        "quantize_base out"
    )
