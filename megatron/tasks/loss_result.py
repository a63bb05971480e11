"""Result of a loss over one microbatch, its metrics and how they are joined, and its error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.runtime.commands import UserError

if TYPE_CHECKING:
    import torch
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
    """Metrics, and the arithmetic of their sums and weights, float32 [metrics, 2] in this order."""

    names: tuple[str, ...]
    reductions: tuple[str, ...]

    def __add__(self, other: MetricTable) -> MetricTable:
        """Return the table of the rows of both. Raises LossError for a name in both."""
        if twice := set(self.names) & set(other.names):
            raise LossError(f"metric {min(twice)!r} is declared by the loss and by a layer; rename one")
        return MetricTable(self.names + other.names, self.reductions + other.reductions)

    @property
    def _maxima(self) -> list[int]:
        return [row for row, reduction in enumerate(self.reductions) if reduction == "max"]

    def nothing(self, device: torch.device) -> Tensor:
        """Return the rows of no values, which change no others that they are joined to."""
        import torch

        rows = torch.zeros((len(self.names), 2), dtype=torch.float32, device=device)
        rows[self._maxima, 0] = -math.inf
        return rows

    def rows(self, values: Mapping[str, tuple[Tensor | float, Tensor | float]], device: torch.device) -> Tensor:
        """Return these values, some or all of the metrics, as rows."""
        import torch

        # numbers of the host without a wait for the device, which `as_tensor` has if it is given one
        given = {
            name: [torch.as_tensor(n, dtype=torch.float32).to(device, non_blocking=True) for n in pair]
            for name, pair in values.items()
        }
        if len(given) == len(self.names):
            return torch.stack([number for name in self.names for number in given[name]]).view(-1, 2)
        rows = self.nothing(device)
        for name, pair in given.items():
            rows[self.names.index(name)] = torch.stack(pair)
        return rows

    def joined(self, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        """Return the sums of both; None: of nothing."""
        if one is None or other is None:
            return other if one is None else one
        # sums and weights add up; of maxima the weights alone
        total = one + other
        if rows := self._maxima:
            total[rows, 0] = one[rows, 0].maximum(other[rows, 0])
        return total

    def over_ranks(self, sums: Tensor, reduce: Callable[[Tensor, bool], None]) -> list[float]:
        """Return the metrics over all ranks from each rank's sums; `nothing` of a rank that has none.

        `reduce` adds up over ranks in place, or with True takes the largest.
        """
        total, rows = sums.clone(), self._maxima
        # what the sum makes of the maxima is replaced
        largest = total[rows, 0]
        reduce(total, False)
        if rows:
            reduce(largest, True)
            total[rows, 0] = largest
        return [self._value(row, pair) for row, pair in enumerate(total.tolist())]

    def _value(self, row: int, pair: Sequence[float]) -> float:
        value, weight = pair
        if self.reductions[row] == "sum":
            return value
        # nothing was counted; a NaN among the values of a maximum is kept by its weight
        if weight == 0 or math.isnan(weight):
            return math.nan
        return value if self.reductions[row] == "max" else value / weight
