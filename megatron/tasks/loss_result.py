"""Result of a loss over one microbatch, its metrics and how they are joined, and its error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.runtime.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("mean", "sum", "max")
"""Ways in which a metric of several microbatches, ranks or steps becomes one number."""


class LossError(UserError, RuntimeError):
    """A loss, of a user's function or task, that breaks the rules; the message names it."""


class Metric(NamedTuple):
    """A metric over one microbatch, as sum and weight: both add up, and the log shows sum / weight.

    One whose reduction is `sum` shows the sum. Of `max`, `sum` is the largest value, and the weight counts values.
    """

    sum: Tensor
    weight: Tensor | float


@dataclasses.dataclass(frozen=True)
class LossResult:
    """Loss of one microbatch."""

    total: Tensor
    """Scalar to differentiate: the sum of the losses, scaled as the engine demands."""
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    """Unscaled, one for each name in `Objective.metrics`, alike on all tensor-parallel ranks."""


@dataclasses.dataclass(frozen=True)
class MetricTable:
    """The metrics of a task, and the arithmetic of their sums and weights, float32 [metrics, 2] in this order."""

    names: tuple[str, ...]
    reductions: tuple[str, ...]

    @property
    def _maxima(self) -> list[int]:
        return [row for row, reduction in enumerate(self.reductions) if reduction == "max"]

    def joined(self, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        """Return the sums of both; None: of nothing."""
        if one is None or other is None:
            return other if one is None else one
        total = one + other
        if rows := self._maxima:
            total[rows, 0] = one[rows, 0].maximum(other[rows, 0])
        return total

    def over_ranks(self, sums: Tensor | None, zeros: Tensor, reduce: Callable[[Tensor, bool], None]) -> list[float]:
        """Return the metrics over all ranks. `reduce` adds up over ranks in place, or with True takes the largest.

        `sums`: None on a rank that has none, or whose numbers another rank has too. `zeros` [metrics, 2] is written.
        """
        total, rows = zeros if sums is None else zeros + sums, self._maxima
        largest = total[rows, 0] if sums is not None else total[rows, 0] - math.inf
        if rows:
            reduce(largest, True)
            total[rows, 0] = 0.0
        reduce(total, False)
        total[rows, 0] = largest
        return [self._value(row, pair) for row, pair in enumerate(total.tolist())]

    def _value(self, row: int, pair: Sequence[float]) -> float:
        value, weight = pair
        if self.reductions[row] == "sum":
            return value
        if weight == 0 or math.isnan(weight):
            return math.nan
        return value if self.reductions[row] == "max" else value / weight
