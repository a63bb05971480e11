"""Gradients of weights computed after the backward pass that needs them: by zero-bubble pipeline schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

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


# ---------------------------------------------------------------------------------------------------------------------
# Switch of fp8: on in the forward passes of training, off in those of evaluation and generation.


class Fp8Passes:
    """Passes of this rank in which linear layers compute in fp8."""

    def __init__(self) -> None:
        self.autocast: Callable[[], AbstractContextManager[Any]] | None = None
        """The engine's context of one pass; None: no fp8."""
        self.is_on = False
        self.is_first_microbatch = False
        """The weights have changed since the previous pass."""

    def begin_step(self) -> None:
        self.is_first_microbatch = True

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of a microbatch, in fp8 where it keeps what a backward pass needs."""
        if (autocast := self.autocast) is None:
            return forward

        @functools.wraps(forward)
        def call(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **options)
            self.is_on = True
            try:
                with autocast():
                    return forward(*arguments, **options)
            finally:
                self.is_on = self.is_first_microbatch = False

        return call
