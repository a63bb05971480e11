"""Gradients of weights computed after the backward pass that needs them: by zero-bubble pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Job = tuple[list[Tensor], Callable[[], list[Tensor]]]
"""Parameters, and what computes their gradients."""


class DeferredGradients:
    """Gradients that linear layers leave for later while `collect` runs a backward pass."""

    def __init__(self) -> None:
        self._jobs: list[Job] | None = None

    @property
    def is_open(self) -> bool:
        """Gradients are deferred now."""
        return self._jobs is not None

    def defer(self, parameters: list[Tensor], compute: Callable[[], list[Tensor]]) -> None:
        """Leave the gradients of these parameters, those that `compute` returns, for later."""
        assert self._jobs is not None
        self._jobs.append((parameters, compute))

    def collect(self, backward: Callable[[], None]) -> list[Job]:
        """Run a backward pass, and return what it deferred."""
        self._jobs = []
        try:
            backward()
            return self._jobs
        finally:
            self._jobs = None


def compute_deferred(jobs: Sequence[Job]) -> None:
    """Compute deferred gradients, and accumulate them by autograd, with all hooks of the parameters."""
    for parameters, compute in jobs:
        with torch.no_grad():
            gradients = compute()
        torch.autograd.backward(parameters, gradients)
