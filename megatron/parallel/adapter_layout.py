"""The adapters of one linear layer, as its declaration names them and its method computes them. Without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


class AdapterSwitch:
    """Switch of the low-rank adapters of a rank's layers; without them they are the base model."""

    def __init__(self) -> None:
        self.is_on = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute without adapters."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


@dataclass(frozen=True)
class Adapter:
    """The adapter of one module, as a part of the linear layer that holds it."""

    suffix: str
    first: int
    stop: int
    """[first, stop) are its pieces of the base weight's rows."""
    rank: int
    scale: float
    is_principal: bool = False
    """It starts from the principal singular vectors of its weight (PiSSA)."""
    svd_iterations: int | None = None
    """Iterations of an approximate decomposition for that; None: an exact one."""
