"""Layouts that a search has found, and the largest parts of their steps. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.plan.fit import needed_bytes
from megatron.plan.memory import Stage
from megatron.plan.search.space import Changes
from megatron.plan.timing.cluster import Axis, Cluster
from megatron.plan.timing.step import StepTime

COMPUTES = "computes"
DOING = {
    "compute": COMPUTES,
    "recompute": "recomputes activations",
    "tensor": "waits for TP's exchanges",
    "context": "waits for CP's exchanges",
    "expert": "waits for tokens that travel to experts",
    "gather": "waits for weights that ZeRO-3 gathers",
    "offload": "waits for activations that come back from the host",
    "messages": "waits for messages between stages",
    "wait": "waits in the pipeline's bubble",
    "sharing": "waits for cores that ranks share",
    "reduction": "waits for the sums of gradients",
    "update": "updates the weights",
    "before": "passes forward before the step",
    "start": "starts operations",
}
"""Work or wait of the devices in each part of a step."""
AXES: dict[str, Axis] = {
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
    "gather": "shard",
    "messages": "pipeline",
    "reduction": "grad",
}
"""Axis over which they exchange in it."""
LEAST = 0.05
"""Share of a step from which a part is named."""
MOST_NAMED = 3


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its predicted step."""

    config: Config
    cluster: Cluster
    changes: Changes
    """Options that differ from the run's."""
    time: StepTime
    stages: list[Stage]
    limit: str
    """The largest parts of its step, in a sentence."""

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config.parallel, self.cluster.num_devices)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return max(needed_bytes(self.config, stage) for stage in self.stages)


@dataclass
class SearchResult:
    """Layouts, the fastest first, and what was tried."""

    found: list[Found] = field(default_factory=list)
    timed: int = 0
    """Layouts whose step was predicted."""
    too_large: int = 0
    """Groups of layouts and layouts that do not fit."""
    refused: Counter[str] = field(default_factory=Counter)
    """Faults of layouts, and how many divisions of the devices have them."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Faults of the rates, and how many layouts need what is missing."""
    seconds: float = 0.0
    """Processor time of the search."""


def limit_of(layout: Layout, cluster: Cluster, time: StepTime) -> str:
    """Return '71 % computes, 16 % waits for TP's exchanges across nodes': the largest parts of the step."""
    named: list[str] = []
    for name, seconds in time.parts.largest():
        share = seconds / time.seconds
        if share < LEAST or len(named) == MOST_NAMED:
            break
        named.append(f"{share:.0%} {DOING[name]}{_where(name, layout, cluster)}")
    return ", ".join(named)


def _where(part: str, layout: Layout, cluster: Cluster) -> str:
    axis = AXES.get(part)
    if axis is None:
        return ""
    return " across nodes" if cluster.span_of(layout, axis).crosses_nodes else " within a node"
