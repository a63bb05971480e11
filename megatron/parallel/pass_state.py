"""State of the pass that a rank computes now: random streams, switches, checks and clocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.finite_checks import BACKWARD, FiniteChecks
from megatron.parallel.phase_clock import StepClock
from megatron.parallel.rng import RandomStreams

Job = tuple[list[Tensor], Callable[[], list[Tensor]]]
"""Parameters, and what computes their gradients."""
Sums = tuple[Tensor, Tensor | float]
"""Sum and weight of a number over the tokens of a microbatch."""


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
        self.step = 0
        """Number of the step in this process; the weights change between steps alone."""
        self.is_first_microbatch = False
        """The weights have changed since the previous pass."""

    def begin_step(self) -> None:
        self.step += 1
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

    def around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward pass of a microbatch, in which layers that are recomputed compute in fp8 again."""
        if self.autocast is None:
            return backward

        @functools.wraps(backward)
        def call(*arguments: Any, **options: Any) -> Any:
            self.is_on = True
            try:
                return backward(*arguments, **options)
            finally:
                self.is_on = False

        return call


class _Joined(torch.autograd.Function):
    """A hidden state, whose backward pass begins that of a loss term too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, term: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.gradient, None


class LayerTerms:
    """Loss terms and metrics of layers, as they declare them (`LayerDeclaration.loss_terms`, `metrics`).

    Their values go to the engine, which adds them up over the step.
    """

    def __init__(self) -> None:
        self._record: Callable[[Mapping[str, Sums]], None] | None = None
        self._coefficients: Mapping[str, float] = {}
        self._gradient: Tensor | None = None

    @property
    def is_recorded(self) -> bool:
        return self._record is not None

    @contextlib.contextmanager
    def recorded(
        self, record: Callable[[Mapping[str, Sums]], None], coefficients: Mapping[str, float], gradient: Tensor
    ) -> Iterator[None]:
        """Within it have the layers' values recorded, and `gradient`, a scalar, as that of the terms' weighed sum.

        Outside of it, as in generation, `add` does nothing.
        """
        self._record, self._coefficients, self._gradient = record, coefficients, gradient
        try:
            yield
        finally:
            self._record = self._gradient = None

    # values are recorded in a list of the host's, of which a compiled graph would know nothing
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def add(
        self,
        hidden: Tensor,
        losses: Mapping[str, Tensor],
        metrics: Mapping[str, Sums] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return `hidden`, whose gradient is joined by that of a layer's loss terms.

        `losses`: float32 loss of each token [rows, B] of the residual stream that this rank holds, alike on
        tensor-parallel ranks that hold the same; `weights` [rows, B]: 0 for padding (`Packing.weights_SB`), None: no
        padding. The term is their mean over the tokens of the global batch, times its coefficient; those of several
        layers are added. `metrics`: sum and weight of each, as in tasks/loss_result.py.
        """
        if self._record is None:
            return hidden
        count: Tensor | float = float(hidden.shape[0] * hidden.shape[1])
        if weights is not None:
            count = weights.sum()
            losses = {name: loss * weights for name, loss in losses.items()}
        totals = {name: loss.sum() for name, loss in losses.items()}
        with torch.no_grad():
            self._record({**{name: (total, count) for name, total in totals.items()}, **(metrics or {})})
        if not (torch.is_grad_enabled() and totals):
            return hidden
        # the gradient joins the main loss's where the layer stands, so no stage sends a term to another
        term = torch.stack([self._coefficients[name] * total for name, total in totals.items()]).sum()
        if not term.requires_grad:  # a frozen router, over frozen layers
            return hidden
        joined: Tensor = _Joined.apply(hidden, term, self._gradient)
        return joined


class _ByLayer:
    """Numbers of one training step by layer. They stay on the device."""

    def __init__(self) -> None:
        self._checks: FiniteChecks | None = None
        self.by_layer: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def step(self, checks: FiniteChecks) -> Iterator[None]:
        """Keep what is computed within, and forget the previous step."""
        self.by_layer, self._checks = {}, checks
        try:
            yield
        finally:
            self._checks = None

    @property
    def is_on(self) -> bool:
        """The pass is of a training step."""
        return self._checks is not None

    @property
    def is_wanted(self) -> bool:
        """The pass is of a training step, and not computed again in a backward pass."""
        return self._checks is not None and self._checks.place.direction != BACKWARD


class ExpertLoads(_ByLayer):
    """Choices of experts by the tokens of this rank in one training step, int32 [E + 1] by number of the layer.

    They are the choices of each expert, and how many were dropped. Alike on tensor-parallel ranks that hold the same
    tokens.
    """

    # as in LayerTerms: a compiled graph would know nothing of what the host adds to
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def add(self, layer: int, counts_E: Tensor, num_kept: Tensor | None) -> None:
        """Add the choices of one pass. `num_kept`: how many are not dropped; None: all."""
        if not self.is_wanted:
            return
        dropped = counts_E.new_zeros(1) if num_kept is None else (counts_E.sum() - num_kept).view(1)
        # whole numbers: sums over microbatches are exact in any order
        counts = torch.cat([counts_E, dropped]).round().to(torch.int32)
        before = self.by_layer.get(layer)
        self.by_layer[layer] = counts if before is None else before + counts


class LargestLogits(_ByLayer):
    """Largest attention logits of this rank's heads in one training step, float32 [n] by number of the layer.

    They are of all microbatches of this rank's own queries.
    """

    def add(self, layer: int, largest_n: Tensor) -> None:
        """Keep the larger ones of these and those of earlier microbatches."""
        before = self.by_layer.get(layer)
        self.by_layer[layer] = largest_n if before is None else torch.maximum(before, largest_n)

    def largest(self) -> Tensor | None:
        """Return the largest of all layers, a scalar; None: none was computed."""
        if not self.by_layer:
            return None
        return torch.cat(list(self.by_layer.values())).amax()


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
    terms: LayerTerms = field(default_factory=LayerTerms)
    """Loss terms and metrics that layers add."""
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    """Choices of experts in the last training step."""
    logits: LargestLogits = field(default_factory=LargestLogits)
    """Largest attention logits of the last training step, where an option wants them."""
    is_recheck: bool = False
    """All data-parallel ranks compute the same microbatch (training/recheck.py): they sum nothing with each other."""
    deferred: DeferredGradients | None = None
    """Gradients that linear layers leave for later; None unless the pipeline schedule defers them."""
