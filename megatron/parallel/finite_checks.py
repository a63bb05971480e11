"""Checks of what a rank computes itself in a step, before it is summed over ranks or sent: which was not finite first?

Once summed, a value that is not finite is so on every rank. Each check is one sum, of a single number none, that stays
on the device and is only read after a bad step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

RECEIVED, COMPUTED, LOSS, SENT, TIED, GRADIENT = "received", "computed", "loss", "sent", "tied", "gradient"
"""Kinds of checks: messages between stages, a rank's part of a sum, losses, gradients before they are summed."""
LOSS_INPUT, LOSS_FUNCTION, LOSS_GRADIENT = "loss input", "loss function", "loss gradient"
"""Checks of a user's loss function: the log-probabilities that it is given, their loss, and their gradient."""
LAYER_TERM = "layer term"
"""Check of the loss terms that layers add, such as those of routers."""
WIDE = (torch.float32, torch.float64)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class PassPlace(NamedTuple):
    """Pass of one microbatch in one chunk of a stage, both counted on this rank."""

    direction: str
    microbatch: int = -1
    """-1: none, or not known."""
    chunk: int = 0


class FirstBad(NamedTuple):
    """The first check of a rank's step whose value was not finite."""

    order: int
    """Number of the check; tensor-parallel ranks make the same checks in the same order."""
    kind: str
    place: PassPlace


class FiniteChecks:
    """The checks of this rank's last step."""

    def __init__(self) -> None:
        self.place = PassPlace(FORWARD)
        """The pass that the rank computes now."""
        self._is_on = False
        self._sums: list[Tensor] = []
        self._kinds: list[tuple[str, PassPlace]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Check what is computed within, and forget the previous step."""
        self._sums, self._kinds, self._is_on = [], [], True
        try:
            yield
        finally:
            self._is_on = False

    def partial(self, x: Tensor) -> None:
        """Check a rank's part [..., channels] of a sum over tensor-parallel ranks."""
        if torch.compiler.is_compiling() or not self._is_on:
            return
        # one channel: a matrix product spreads what is not finite over the whole row
        if x.dim() > 1:
            x = x.select(-1, 0)
        self._add(x, COMPUTED, self.place)

    def gathered(self, x: Tensor) -> None:
        """A rank's rows, which its tensor-parallel ranks get: not checked, but traced by training/recheck.py."""

    def whole(self, x: Tensor | None, kind: str, place: PassPlace | None = None) -> None:
        """Check every number of a tensor; None, of a frozen stage, has none."""
        if self._is_on and x is not None and x.is_floating_point():
            self._add(x, kind, place or self.place)

    def number(self, x: Tensor, kind: str, place: PassPlace | None = None) -> None:
        """Check a scalar that nothing changes in place later: it is its own sum."""
        if self._is_on:
            self._sums.append(x.detach() if x.requires_grad else x)
            self._kinds.append((kind, place or self.place))

    def _add(self, x: Tensor, kind: str, place: PassPlace) -> None:
        # within autograd's own functions, as most checks are, there is nothing to detach from
        if x.requires_grad and torch.is_grad_enabled():
            x = x.detach()
        # in float32 at least: the sum of finite 16-bit numbers may leave their range
        dtype = x.dtype if x.dtype in WIDE else torch.float32
        self._sums.append(torch.sum(x, dtype=dtype))
        self._kinds.append((kind, place))

    def first_bad(self) -> FirstBad | None:
        """Return the first check of the last step that found a value not finite. Waits for the device."""
        if not self._sums:
            return None
        # a task of another's may return its loss in one dimension
        sums = torch.stack([each.to(torch.float32).view(()) for each in self._sums])
        bad = (~sums.isfinite()).nonzero()
        if not len(bad):
            return None
        order = int(bad[0])
        return FirstBad(order, *self._kinds[order])
