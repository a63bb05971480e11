"""State of the pass that a rank computes now: random streams, switches, checks and clocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.finite_checks import FiniteChecks
from megatron.parallel.phase_clock import StepClock
from megatron.parallel.rng import RandomStreams

Job = tuple[list[Tensor], Callable[[], list[Tensor]]]
"""Parameters, and what computes their gradients."""


class DeferredGradients:
    """Gradients that linear layers leave for later while `collect` runs a backward pass, for zero-bubble schedules."""

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


class Fp8Passes:
    """Switch of fp8 in linear layers: on in the forward passes of training, off in evaluation and generation."""

    def __init__(self) -> None:
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
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


@dataclass(eq=False)
class PassState:
    """State of the pass that a rank computes now; one object a context, mutable."""

    streams: RandomStreams = field(default_factory=RandomStreams)
    adapters: AdapterSwitch = field(default_factory=AdapterSwitch)
    checks: FiniteChecks = field(default_factory=FiniteChecks)
    """Checks of what this rank computed in its last step."""
    fp8: Fp8Passes = field(default_factory=Fp8Passes)
    clock: StepClock = field(default_factory=StepClock)
    """Times of what this rank computed itself in its last steps."""
    deferred: DeferredGradients | None = None
    """Gradients that linear layers leave for later; None unless the pipeline schedule defers them."""
