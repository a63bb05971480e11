"""Interpolation between measured seconds: on a grid of sizes in their logarithms, and along one size linearly."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.options.config import broken


@dataclass(frozen=True)
class Grid:
    """Seconds at every combination of sizes, the last axis fastest."""

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    powers: tuple[float, ...] = ()
    """Power of each size with which the seconds grow beyond the grid. Default: 1."""

    def at(self, *sizes: float) -> float:
        """Return the seconds at these sizes.

        Between points their logarithm is linear in those of the sizes, so that FLOP/s are too. Beyond the largest size
        the rate stays that of the edge; below the smallest the seconds do, which are mostly the start of a kernel.
        """
        beyond = 1.0
        corners = [(0, 1.0)]
        for axis, size, power in zip(self.axes, sizes, self.powers or (1.0,) * len(sizes), strict=True):
            if size > axis[-1]:
                beyond *= (size / axis[-1]) ** power
            neighbours = list(_neighbours(axis, size))
            corners = [
                (index * len(axis) + place, weight * share)
                for (index, weight), (place, share) in itertools.product(corners, neighbours)
            ]
        return beyond * math.exp(sum(weight * math.log(self.seconds[index]) for index, weight in corners))


def _neighbours(axis: Sequence[float], size: float) -> Iterator[tuple[int, float]]:
    """Yield the places on an axis between which a size lies, with their weights."""
    size = min(max(size, axis[0]), axis[-1])
    above = bisect.bisect_left(axis, size)
    # exactly at a point, so that a look-up there returns what was measured
    if axis[above] == size:
        yield above, 1.0
        return
    share = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    yield above - 1, 1 - share
    yield above, share


@dataclass(frozen=True)
class Line:
    """Seconds at sizes, with straight lines between them: a start and a time for each number or byte."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Return the seconds at a size; beyond the largest the rate stays, below the smallest the seconds do."""
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        if size <= self.sizes[0]:
            return self.seconds[0]
        above = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[above - 1], self.sizes[above]
        share = (size - low) / (high - low)
        return self.seconds[above - 1] * (1 - share) + self.seconds[above] * share

    @property
    def start(self) -> float:
        """Seconds at the smallest size."""
        return self.seconds[0]


def axis_faults(name: str, sizes: Sequence[float]) -> list[str]:
    """Return what is wrong with the sizes of an axis."""
    rises = all(before < after for before, after in itertools.pairwise(sizes))
    return broken((not sizes, f"{name} is empty; give a size"), (not rises, f"{name} must rise from size to size"))
