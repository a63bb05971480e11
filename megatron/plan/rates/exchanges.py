"""Seconds of collectives from some that were measured, for groups of any size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.plan.rates.grids import Line
from megatron.plan.rates.rates import Collective, Span


def steps_of(size: int) -> int:
    """Return the messages that follow each other in a collective of few bytes: those of a tree."""
    return max(1, math.ceil(math.log2(size)))


def sent_share(kind: Collective, size: int) -> float:
    """Return the share of the whole tensor that a rank sends."""
    if kind == "send":
        return 1.0
    share = (size - 1) / size
    # a reduction scatters, then gathers
    return 2 * share if kind == "all_reduce" else share


@dataclass(frozen=True)
class MeasuredExchange:
    """Seconds of a collective in one group by the bytes of the whole tensor."""

    kind: Collective
    span: Span
    line: Line

    def at(self, size_bytes: float, span: Span) -> float:
        """Return the seconds in another group, whose steps and bytes follow from a ring's and a tree's."""
        seconds = self.line.at(size_bytes)
        if span == self.span:
            return seconds
        start = min(self.line.start, seconds)
        moving = (seconds - start) * sent_share(self.kind, span.size) / sent_share(self.kind, self.span.size)
        # within a node links are between pairs; those out of it are shared
        if span.crosses_nodes:
            moving *= span.sharing / self.span.sharing
        return start * steps_of(span.size) / steps_of(self.span.size) + moving

    def distance_to(self, span: Span) -> tuple[float, float, float]:
        """Return how unlike another group is, the more important difference first."""
        return (
            abs(math.log(span.size / self.span.size)),
            abs(math.log(span.per_node / self.span.per_node)),
            abs(math.log(span.sharing / self.span.sharing)),
        )
