"""Blocks of the products that a CPU without 16-bit ones computes in float32 (parallel/products.py); without torch."""

from __future__ import annotations

ROWS, SUMMED, COLUMNS = 2048, 1024, 1024
"""Largest block of each dimension: two copies of 8 MiB and one of 4 MiB at once."""
FEW_ROWS, FEW_COLUMNS = 64, 128
"""With so few rows a converted block of the weight is read as often as it is written, so it is to stay in the cache."""


def block_bytes(m: int, k: int, n: int, *, adds: bool = False) -> int:
    """Return the bytes of a block in float32 of [m, k] times [k, n], both factors and the sum.

    `adds`: the sum is that of a float32 tensor, in place.
    """
    rows, summed, columns = min(m, ROWS), min(k, SUMMED), min(n, COLUMNS if m > FEW_ROWS else FEW_COLUMNS)
    return 4 * (rows * summed + summed * columns + (0 if adds else rows * columns))
