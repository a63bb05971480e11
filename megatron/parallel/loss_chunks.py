"""Chunks of tokens in which the loss is computed, and blocks within them. Without torch, so that a plan needs none."""

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
