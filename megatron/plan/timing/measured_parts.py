"""Parts of a predicted step as a run can measure them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.plan.timing.step import StepParts

WITHIN_PASSES = ("tensor", "context", "expert")
"""Exchanges within a pass."""
OTHERS = ("messages", "reduction")
"""Exchanges beside the passes."""
GATHER = "gather"
"""Exchange of weights by ZeRO-3, which DeepSpeed starts and waits for within a pass, and nothing measures apart."""
WAIT = "wait"
PASSES = "passes"
"""Name of the computation in a run's rows where exchanges within passes are not apart from it."""


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a step on a rank, by parts that a run can measure."""

    compute: float
    """Own passes and update."""
    exchange: float
    """Exchanges with other ranks, and waits for them, as far as the clock sees them within passes."""
    data: float
    """Wait for the data."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.data


def sums_of(parts: StepParts) -> dict[str, float]:
    """Return the seconds of computation, exchange, and waits for other stages."""
    by_name = {each.name: getattr(parts, each.name) for each in fields(parts)}
    exchange = sum(by_name.pop(name) for name in (*WITHIN_PASSES, *OTHERS, GATHER))
    wait = by_name.pop(WAIT)
    return {"compute": sum(by_name.values()), "exchange": exchange, "wait": wait}


def measurable(parts: StepParts, *, divides_passes: bool) -> PartSeconds:
    """Return the predicted parts as a run measures them: `divides_passes`, or with exchanges within a pass in it."""
    sums = sums_of(parts)
    moved = getattr(parts, GATHER)
    if not divides_passes:
        moved += sum(getattr(parts, name) for name in WITHIN_PASSES)
    # data that is read in time is not waited for
    return PartSeconds(sums["compute"] + moved, sums["exchange"] - moved + sums["wait"], 0.0)
