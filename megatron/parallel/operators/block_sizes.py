"""Blocks in which losses, products and attention are computed. Without torch, so that a plan needs none."""

from __future__ import annotations

from collections.abc import Iterator

MIN_CHUNK_TOKENS = 1024
"""Each chunk reads the output weight twice, and reads and writes the float32 sum of its gradient. With fewer tokens
that takes longer than the products."""
ENOUGH_TOKENS = 2048
"""With so many it takes a small part of their time, whatever the hidden size; more would only hold more logits."""
BLOCK_LOGITS = 1 << 20
"""Logits that torch's softmax converts to float32 at once on a CPU: two copies of 4 MiB."""
BLOCK_LOGITS_OF_A_DEVICE = 1 << 24
"""The same elsewhere, where each operator is a launch."""
BLOCK_NUMBERS = 1 << 22
"""Numbers of the weight's gradient that a product in 16 bits gives at once, where it cannot be added in float32: 8 MiB.
"""
ATTENTION_QUERIES = 64
"""Queries of a block of attention on a CPU: their scores stay in the cache from product to product."""

DEVICE_SCORES = 1 << 26
"""Scores that a device holds of a block of a ring at once in float32: 256 MiB."""


def least_tokens(hidden_size: int) -> int:
    """Return the fewest tokens of one of several chunks."""
    return min(max(MIN_CHUNK_TOKENS, hidden_size), ENOUGH_TOKENS)


def chunk_size(num_tokens: int, hidden_size: int) -> int:
    """Return the tokens of a chunk: all, or at least the hidden size, but 1,024 to 2,048, and less than twice that.

    The logits of a chunk then take less memory than the float32 sum of the weight's gradient, which several chunks
    need and a single one does not. No chunk is a short remainder.
    """
    num_chunks = max(1, num_tokens // least_tokens(hidden_size))
    return -(-num_tokens // num_chunks)


def chunks(num_tokens: int, hidden_size: int) -> Iterator[slice]:
    """Yield the tokens of each chunk; an empty one of no tokens."""
    size = max(1, chunk_size(num_tokens, hidden_size))
    for begin in range(0, max(1, num_tokens), size):
        yield slice(begin, min(begin + size, num_tokens))


ROWS, SUMMED, COLUMNS = 2048, 1024, 1024
"""Largest block of each dimension of a product that a CPU without 16-bit ones computes in float32 (products.py): two
copies of 8 MiB and one of 4 MiB at once."""
FEW_ROWS, FEW_COLUMNS = 64, 128
"""With so few rows a converted block of the weight is read as often as it is written, so it is to stay in the cache."""


def most_columns(num_rows: int) -> int:
    """Return the columns of the largest block of a product with so many rows."""
    if num_rows > FEW_ROWS:
        return COLUMNS
    return FEW_COLUMNS


def block_size(size: int, largest: int) -> int:
    """Return the size of the blocks of a dimension: nearly equal ones, as few as may be."""
    count = max(1, -(-size // largest))
    return -(-size // count)


def block_bytes(m: int, k: int, n: int, *, adds: bool = False) -> int:
    """Return the bytes of a block in float32 of [m, k] times [k, n], both factors and the sum.

    `adds`: the sum is that of a float32 tensor, in place.
    """
    rows, summed, columns = block_size(m, ROWS), block_size(k, SUMMED), block_size(n, most_columns(m))
    numbers = rows * summed + summed * columns
    if not adds:
        numbers += rows * columns
    return 4 * numbers
