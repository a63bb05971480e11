"""The gate between a gradient and its update: it decides once a step, on all ranks alike, from one reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import GRADIENT, UPDATE, PassPlace
from megatron.parallel.phase_clock import OPTIMIZER, WAIT
from megatron.training.losses import SpikeDetector, StepLosses
from megatron.training.state import EngineState


@dataclass(frozen=True)
class Observation:
    """Loss and gradient of a step before its update, equal bit for bit on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """No rank saw a loss or gradient that is not finite."""
    spikes: tuple[str, ...] = ()
    """A reason for each spike."""
    is_applied: bool = True
    """The optimizer updates."""
    is_stop_seen: bool = False
    """Some rank saw a reason to stop the run."""
    layer_loss: float = 0.0
    """Sum of the layers' own loss terms, weighed: optimised with `loss`, and not in it."""


class UpdateGate:
    """Decides once a training step, on all ranks alike, if the optimizer updates.

    Refuses steps that are not finite, and spikes where the detector refuses them. The optimizer queries it when
    DeepSpeed lets it step: after the reduction, before anything is changed; under ZeRO-2 and 3 once a parameter group.
    One reduction over all ranks gives the norm and what the decision needs. ZeRO-2 and 3 find the norm themselves, and
    except in bf16 refuse one that is not finite, and then do not step. What the norm does not show is examined here
    too: the loss, and the gradients of which another tensor-parallel rank's copies count.
    """

    def __init__(
        self, ctx: ParallelContext, state: EngineState, losses: StepLosses, detector: SpikeDetector | None
    ) -> None:
        self._ctx, self._state, self._losses, self._detector = ctx, state, losses, detector
        self._facts: _Facts | None = None
        self.clock = ctx.state.clock
        # on the device, so that no step copies a number there
        self._zero = torch.zeros((), dtype=torch.float32, device=ctx.device)
        self._one = torch.ones_like(self._zero)
        self.observation: Observation | None = None
        """The one of this step; None until the optimizer steps."""
        self.sees_stop: Callable[[], bool] = lambda: False
        """Returns True if this rank sees a reason to stop the run, which is reduced with the rest."""
        self.before_update: Callable[[Observation], None] | None = None
        """Called once a step, before the optimizer updates."""
        self.refuses_all = False
        """Refuse every step, and keep it from the detector."""

    def begin_step(self) -> None:
        self.observation = self._facts = None

    @torch.no_grad()
    def find_norm(self, counted: list[Tensor], uncounted: list[Tensor], scale: float = 1.0) -> Tensor:
        """Return the L2 norm of the whole model's gradient, a float32 scalar on the device, equal on every rank.

        `counted`: this rank's gradients, `scale` times too large, each number of the model's on one rank alone;
        `uncounted`: copies of what other ranks count. Collective over all ranks; waits for nothing.
        """
        with self.clock.phase(OPTIMIZER):
            squares = self._zero
            if counted:
                # |g|^2 = sum of the tensors' |g_i|^2, each rank's share; `scale` is fp16's loss scale
                norms = torch._foreach_norm(counted, dtype=torch.float32)
                squares = torch.stack(norms).square().sum()
                if scale != 1.0:
                    squares = squares / scale**2
            if self._ctx.grad_size == 1:  # this rank's own gradient: otherwise it was checked before the sum
                self._ctx.state.checks.number(squares, GRADIENT, PassPlace(UPDATE))
            self._facts = self._reduce(squares, uncounted)
        # in place: what the host reads later is the norm, not its square
        return self._facts.sums[1].sqrt_()

    def is_norm_finite(self) -> bool:
        """Return False if this step's norm is not. Waits for the device, as the decision would."""
        assert self._facts is not None, "find_norm comes first"
        return math.isfinite(self._facts.read()[1])

    def is_open(self) -> bool:
        """Return the decision. Collective over all ranks at the first call of a step without `find_norm`."""
        if self.observation is None:  # ZeRO-2 and 3 step once a parameter group
            self.observation = self._observe()
            if self.before_update is not None and self.observation.is_applied:
                self.before_update(self.observation)
        return self.observation.is_applied

    @torch.no_grad()
    def _observe(self) -> Observation:
        """Decide. The wait for the sum is the only one of a step, but for those of DeepSpeed's ZeRO optimizers."""
        facts = self._facts
        if facts is None:  # DeepSpeed has found the norm: the first rank's is everyone's
            norm = torch.as_tensor(self._state.gradient_norm(), dtype=torch.float32, device=self._ctx.device)
            facts = self._reduce(norm.view(()), self._state.uncounted_gradients(), is_everyones=True)
        sums = facts.read()
        mean_loss, grad_norm, _, num_stops, *of_layers = sums
        is_finite = all(map(math.isfinite, sums))
        seen = Observation(mean_loss, grad_norm, is_finite, is_stop_seen=num_stops > 0, layer_loss=sum(of_layers))
        # before the detector, whose running estimates what is not finite would spoil
        if not is_finite or self.refuses_all:
            return replace(seen, is_applied=False)
        if self._detector is None:
            return seen
        spikes = self._detector.find(mean_loss, grad_norm)
        return replace(seen, spikes=spikes, is_applied=not (spikes and self._detector.refuses_spikes))

    def _reduce(self, size: Tensor, uncounted: list[Tensor], *, is_everyones: bool = False) -> _Facts:
        """Sum mean loss, `size` of the gradient, what else this rank sees, the number of ranks that see a reason to
        stop, and the layers' terms where there are some: none is finite unless all ranks' are.

        All ranks read the same sum, so their numbers are equal bit for bit. `is_everyones`: each rank has the sum of
        the sizes already.
        """
        # in one all-reduce: at hundreds of ranks each further one would cost as much as this
        ctx, losses = self._ctx, self._losses
        # the host's time between backward and update: every operator counts, so few of them, and one that joins.
        # Here is what no other sum has: its value says nothing, but a sum keeps what is not finite, of whichever rank
        beside: list[Tensor] = []
        loss, of_layers = self._own_losses(beside)
        if uncounted:
            # of magnitudes, since no square can overflow; on a CPU the largest of them took twice as long
            total = torch.stack(torch._foreach_norm(uncounted, 1.0, dtype=torch.float32)).sum()
            if ctx.grad_size == 1:
                ctx.state.checks.number(total, GRADIENT, PassPlace(UPDATE))
            beside.append(total.to(ctx.device))  # offloaded gradients are on the host
        # the sum of a single entry is that entry, bit for bit
        if is_everyones and ctx.rank != 0:
            beside.append(size)
            size = self._zero
        rest = reduce(torch.add, beside) if beside else self._zero
        # always four: of another number gloo may add up in another order
        parts = [loss, size, rest, self._one if self.sees_stop() else self._zero]
        if losses.coefficients:
            parts.append(of_layers)
        sums = torch.stack(parts)
        if ctx.world_size > 1:
            with ctx.state.clock.phase(WAIT):
                dist.all_reduce(sums)
        return _Facts(sums)

    def _own_losses(self, beside: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the mean loss and of the layers' terms; what other ranks count goes `beside`."""
        ctx, losses = self._ctx, self._losses
        loss = of_layers = self._zero
        if losses.values:
            mean = _mean(losses.values)
            # stages without the loss add nothing, so that the sum over all ranks is the mean over data-parallel ones
            if ctx.tensor_rank == 0:  # the others have the same loss
                loss = mean if ctx.grad_size == 1 else mean / ctx.grad_size
            else:
                beside.append(mean)
        if (terms := losses.layer_loss()) is not None:
            if ctx.tensor_rank == 0 or ctx.sequence_parallel:
                of_layers = terms.float()
            else:
                beside.append(terms.float())
        return loss, of_layers


def _mean(losses: list[Tensor]) -> Tensor:
    """Return the mean of the losses of microbatches, a float32 scalar; of a single one without an operator."""
    mean = losses[0]
    if len(losses) > 1:
        mean = torch.stack(losses)
    mean = mean.float()
    if mean.dim():
        mean = mean.mean()
    return mean


class _Facts:
    """Sums over all ranks of what they see of a step."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums
        self._read: list[float] | None = None

    def read(self) -> list[float]:
        """Return the sums on the host; waits for the device the first time."""
        if self._read is None:
            self._read = self.sums.tolist()
        return self._read
