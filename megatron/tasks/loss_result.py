"""Result of a loss over one microbatch, and its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class LossError(RuntimeError):
    """A loss, of a user's function or task, that breaks the rules; the message names it."""


class Metric(NamedTuple):
    """Sum and weight of a quantity over one microbatch; sums and weights add up, and the log shows sum / weight."""

    sum: Tensor
    weight: Tensor | float


@dataclasses.dataclass(frozen=True)
class LossResult:
    """Loss of one microbatch."""

    total: Tensor
    """Scalar to differentiate: the sum of the losses, scaled as the engine demands."""
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    """Unscaled, one for each name in `Task.metrics`, alike on all tensor-parallel ranks."""
