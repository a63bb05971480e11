"""Chunks of tokens in which the loss is computed. Importable without torch, so that a plan needs none."""

from __future__ import annotations

from collections.abc import Iterator

MIN_CHUNK_TOKENS = 1024
"""Each chunk reads the output weight twice, and reads and writes the float32 sum of its gradient. With fewer tokens
that takes longer than the products."""


def least_tokens(hidden_size: int) -> int:
    """Return the fewest tokens of one of several chunks."""
    return max(MIN_CHUNK_TOKENS, hidden_size)


def chunk_size(num_tokens: int, hidden_size: int) -> int:
    """Return the tokens of a chunk: all, or at least the larger of 1,024 and the hidden size, and less than twice that.

    The logits of a chunk then take less memory than the float32 sum of the weight's gradient, which several chunks
    need and a single one does not. No chunk is a short remainder.
    """
    num_chunks = max(1, num_tokens // least_tokens(hidden_size))
    return -(-num_tokens // num_chunks)


def chunks(num_tokens: int, hidden_size: int) -> Iterator[slice]:
    """Yield the tokens of each chunk."""
    size = max(1, chunk_size(num_tokens, hidden_size))
    for begin in range(0, num_tokens, size):
        yield slice(begin, min(begin + size, num_tokens))
