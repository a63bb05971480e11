"""Pieces of which passes and updates consist, and their seconds by the rates of a machine. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron.parallel.layout import Layout
from megatron.plan.rates.exchanges import sent_share
from megatron.plan.rates.rates import Collective, Direction, Rates, Role, Span
from megatron.plan.timing.cluster import Axis, Cluster


class LinearProduct(NamedTuple):
    """Product of a linear layer, or of the output projection, with sizes of one rank."""

    precision: str
    role: Role
    tokens: float
    outputs: int
    inputs: int


class CoreAttention(NamedTuple):
    """Core of an attention, softmax(q k^T) v, with sizes of one rank."""

    precision: str
    direction: Direction
    rows: float
    row_tokens: int
    heads: float
    kv_heads: float
    head_size: int
    kind: str
    seen_share: float


class Pointwise(NamedTuple):
    """Operation on each number of a tensor, of a kind of plan/rates."""

    kind: str
    direction: Direction
    precision: str
    numbers: float


class Move(NamedTuple):
    """Copy within the memory of the device, or between it and the host."""

    size_bytes: float
    to_host: bool = False


class AxisExchange(NamedTuple):
    """Collective over an axis; bytes of the whole tensor."""

    kind: Collective
    size_bytes: float
    axis: Axis


class Update(NamedTuple):
    """Step of the optimizer over a rank's numbers."""

    optimizer: str
    precision: str
    numbers: float


class Hidden(NamedTuple):
    """Exchanges or copies that run while the operations `behind`, which count elsewhere, are computed."""

    moving: tuple[AxisExchange | Move, ...]
    behind: tuple[Operation, ...]


Operation = LinearProduct | CoreAttention | Pointwise | Move | AxisExchange | Update
Item = tuple[Operation | Hidden, float]
"""An operation, and how often it is done."""
Part = Literal["compute", "tensor", "context", "expert", "offload", "gather"]
PARTS: tuple[Part, ...] = ("compute", "tensor", "context", "expert", "offload", "gather")
PART_OF_AXIS: dict[Axis, Part] = {
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
    "shard": "gather",
    "expert_shard": "gather",
    # of the shares of experts
    "grad": "expert",
}
"""Part of a pass in which an exchange counts; `gather`: weights that ZeRO-3 gathers."""


@dataclass
class Work:
    """Operations of a pass on one rank."""

    items: list[Item] = field(default_factory=list)

    def add(self, operation: Operation | Hidden, count: float = 1.0) -> None:
        if count:
            self.items.append((operation, count))

    def extend(self, other: Work) -> None:
        self.items += other.items

    def scale(self, kind: str, share: float) -> None:
        """Count this share of the operations on each number of a kind."""
        for index, (operation, count) in enumerate(self.items):
            if isinstance(operation, Pointwise) and operation.kind == kind:
                self.items[index] = operation, count * share

    def computed(self) -> tuple[Operation, ...]:
        """Return the operations that compute: behind them something may move."""
        return tuple(each for each, _ in self.items if isinstance(each, LinearProduct | CoreAttention | Pointwise))


class Machine:
    """Rates of the devices of a layout: seconds of operations, alone on their host."""

    def __init__(self, rates: Rates, cluster: Cluster, layout: Layout, *, is_host: bool) -> None:
        self.cluster, self.layout, self.is_host = cluster, layout, is_host
        self.ranks_per_node = min(cluster.largest_node, layout.world_size)
        self.rates = rates.for_ranks(self.ranks_per_node) if is_host else rates
        self._spans: dict[Axis, Span] = {}

    def span(self, axis: Axis) -> Span:
        if axis not in self._spans:
            self._spans[axis] = self.cluster.span_of(self.layout, axis)
        return self._spans[axis]

    def seconds(self, operation: Operation | Hidden) -> float:
        if isinstance(operation, Hidden):
            return self._shown(operation)
        if isinstance(operation, AxisExchange):
            return self._of_exchange(operation)
        return _seconds(self.rates, operation)

    def _of_exchange(self, exchange: AxisExchange) -> float:
        span = self.span(exchange.axis)
        if span.size == 1:
            return 0.0
        taken = _exchange_seconds(self.rates, exchange.kind, exchange.size_bytes, span)
        # it was measured while all these ranks of a node were busy, which count again where they share cores
        return taken / self.rates.slowdown(min(span.per_node * span.sharing, self.ranks_per_node))

    def _shown(self, hidden: Hidden) -> float:
        """Return what hidden exchanges add to the time of what is behind them."""
        moving = sum(self.seconds(each) for each in hidden.moving)
        behind = sum(self.seconds(each) for each in hidden.behind)
        exchanges = [each for each in hidden.moving if isinstance(each, AxisExchange)]
        taken = sum(self.seconds(each) * self.share_of_exchanges(each.axis) for each in exchanges)
        longer, shorter = max(moving, behind + taken), min(moving, behind)
        return longer + shorter * (self.share_of_cores - 1) - behind

    def share_of_exchanges(self, axis: Axis) -> float:
        """Return the share of a device's cores that an exchange over an axis takes from what is computed meanwhile."""
        return self.rates.share_of_exchanges(self.span(axis))

    @functools.cached_property
    def share_of_cores(self) -> float:
        """Factor by which two activities of all ranks take longer at once: 2 on a host with a core a rank."""
        ranks = self.ranks_per_node
        return self.rates.slowdown(2 * ranks) / self.rates.slowdown(ranks)

    def by_part(self, work: Work) -> dict[Part, float]:
        """Return the seconds of a pass by part."""
        parts = dict.fromkeys(PARTS, 0.0)
        for operation, count in work.items:
            parts[_part_of(operation)] += count * self.seconds(operation)
        return parts

    def sent_bytes(self, works: Iterable[Item]) -> Iterator[tuple[Axis, float]]:
        """Yield what a rank sends in each exchange."""
        for operation, count in works:
            moving = operation.moving if isinstance(operation, Hidden) else (operation,)
            for each in moving:
                if isinstance(each, AxisExchange):
                    size = self.span(each.axis).size
                    yield each.axis, count * each.size_bytes * sent_share(each.kind, size)


def _part_of(operation: Operation | Hidden) -> Part:
    if isinstance(operation, Hidden):
        operation = operation.moving[0]
    if isinstance(operation, AxisExchange):
        return PART_OF_AXIS[operation.axis]
    if isinstance(operation, Move) and operation.to_host:
        return "offload"
    return "compute"


# of a search's layouts most have the same operations
@functools.lru_cache(maxsize=2**17, typed=True)
def _seconds(rates: Rates, operation: Operation) -> float:
    if isinstance(operation, LinearProduct):
        return rates.product(*operation)
    if isinstance(operation, CoreAttention):
        precision, direction, *_ = operation
        sizes = operation._asdict()
        del sizes["precision"], sizes["direction"]
        return rates.attention(precision, direction, **sizes)
    if isinstance(operation, Pointwise):
        return rates.pointwise(*operation)
    if isinstance(operation, Update):
        return rates.update(*operation)
    if isinstance(operation, Move):
        return rates.host_copy(operation.size_bytes) if operation.to_host else rates.copy(operation.size_bytes)
    raise TypeError(f"{type(operation).__name__} has no rate of its own")


@functools.lru_cache(maxsize=2**15)
def _exchange_seconds(rates: Rates, kind: Collective, size_bytes: float, span: Span) -> float:
    return rates.collective(kind, size_bytes, span)
