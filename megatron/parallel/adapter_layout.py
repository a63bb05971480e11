"""The adapters of one linear layer, as its declaration names them and its method computes them. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """The adapter of one module, as a part of the linear layer that holds it."""

    suffix: str
    first: int
    stop: int
    """[first, stop) are its pieces of the base weight's rows."""
    rank: int
    scale: float
