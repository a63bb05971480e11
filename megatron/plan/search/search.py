"""The fastest layouts of a run on some devices that the rules accept and that fit, by their predicted step. No torch.

Best first: layouts are grouped by what they have alike, each group waits at a lower bound of its members' time, and
only the group with the least bound is divided further. So most layouts are neither timed nor planned, and none of them
is more than TOLERANCE faster than those that are found.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.fit import Capacity, needed_bytes
from megatron.plan.flops import declared_layers
from megatron.plan.memory import memory_by_stage
from megatron.plan.pipeline import stage_bounds
from megatron.plan.rates.rates import Rates, RatesError
from megatron.plan.search.bounds import Bounds
from megatron.plan.search.found import Found, SearchResult, limit_of
from megatron.plan.search.space import Changes, Rules, Space, Values, changed
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import step_time
from megatron.runtime.devices import planned_device

DIVISION = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_schedule",
)
"""Options by which the layouts of a result differ: of those that share them, the fastest is shown."""


class _Node(NamedTuple):
    """Layouts that share their choices on the first levels; the last level is one layout."""

    seconds: float
    """No layout of the group is faster."""
    changes: int
    """Number of its changes: of equally fast layouts, that with fewer comes first."""
    number: int
    level: int
    pool: int
    values: dict[str, Any]


ALL_OF = 16
"""Numbers of nodes below the largest that are all tried; of smaller ones those that divide well."""
MOST_ODD = 15
"""The largest odd divisor of smaller numbers that are tried."""
TOLERANCE = 0.02
"""Part by which a layout that is not found may be faster than one that is."""
# Levels of a node: what is known of its layouts
IDEAL, LARGEST, PASSES, STATES, KEPT, CUTS, TIMED = range(7)


def search(
    config: Config,
    clusters: Sequence[Cluster],
    rates: Rates,
    room: Capacity,
    check: Rules,
    *,
    count: int = 10,
    fixed: Collection[str] = (),
) -> SearchResult:
    """Return the fastest layouts that fit, at most `count`, on any of these clusters of nodes of one size each.

    `fixed`: options that keep the run's own value. Raises ConfigError for what no layout changes.
    """
    started = time.process_time()
    rates.check_device(planned_device(config.parallel.device).name)
    fastest = _Search(config, clusters, rates, room, check, frozenset(fixed))
    result = fastest.result
    result.found = sorted(itertools.islice(fastest.layouts(), count), key=lambda each: each.time.seconds)
    for space in fastest.spaces:
        result.refused += space.refused
    result.seconds = time.process_time() - started
    return result


class _Search:
    def __init__(
        self,
        config: Config,
        clusters: Sequence[Cluster],
        rates: Rates,
        room: Capacity,
        check: Rules,
        fixed: frozenset[str],
    ) -> None:
        self.config, self.clusters, self.rates, self.room, self.check = config, clusters, rates, room, check
        self.result = SearchResult()
        self.spaces = [Space(config, cluster.num_devices, cluster.node_sizes[0], check, fixed) for cluster in clusters]
        self.bounds = [Bounds(config, cluster, rates) for cluster in clusters]
        self._numbers = itertools.count()
        self._heap: list[_Node] = []
        self._done: set[tuple[Any, ...]] = set()
        """Groups whose fastest layout is known."""

    def layouts(self) -> Iterator[Found]:
        """Yield the fastest layout of each division of the devices, the fastest first."""
        # all divisions at once: of each little is known yet, and its bound costs microseconds
        for pool, space in enumerate(self.spaces):
            if faults := space.always_broken():
                raise ConfigError(faults)
            for division in space.divisions():
                for order in space.orders(division):
                    for passes in space.passes(division):
                        values = {**division, **order, **passes}
                        self._push(self.bounds[pool].ideal(values), IDEAL, pool, values)
        # whatever waits in the heap takes as long as its first node, or longer
        while self._heap:
            node = heapq.heappop(self._heap)
            group = (node.pool, *(node.values[name] for name in DIVISION))
            # a layout of the same division was found, and is faster than what is left of it
            if group in self._done:
                continue
            if node.level < TIMED:
                self._divide(node)
                continue
            found = self._planned(node)
            # else the next one of the group may fit: it recomputes more, or is in smaller microbatches
            if found is not None:
                self._done.add(group)
                yield found

    def _push(self, seconds: float, level: int, pool: int, values: dict[str, Any], changes: int = 0) -> None:
        heapq.heappush(self._heap, _Node(seconds, changes, next(self._numbers), level, pool, values))

    def _divide(self, node: _Node) -> None:
        """Push what a group consists of, with its bounds."""
        space, bounds = self.spaces[node.pool], self.bounds[node.pool]
        choices: Sequence[Values] = [{}]
        if node.level == PASSES:
            choices = space.states(node.values)
        elif node.level == STATES:
            choices = space.kept()
        elif node.level == CUTS:
            # the others when this one is found: they cut much alike
            choices = space.cuts(node.values)[:1]
        for choice in choices:
            values = {**node.values, **choice}
            if self._may_fit(node.level, values, bounds):
                seconds, changes = self._bound(node, values, bounds)
                if seconds < math.inf:
                    self._push(seconds, node.level + 1, node.pool, values, changes)

    def _bound(self, node: _Node, values: Values, bounds: Bounds) -> tuple[float, int]:
        """Return the least seconds of a part of a group, and the number of its changes where it is one layout."""
        try:
            if node.level == IDEAL:
                return max(node.seconds, bounds.passes_of_largest(values)), 0
            if node.level in (LARGEST, PASSES, KEPT):
                return max(node.seconds, bounds.passes(values)), 0
            if node.level == STATES:
                return node.seconds, 0
            config, differing = changed(self.config, values)
            # so that no group is divided further for what would hardly be faster
            return self._seconds_of(config, node.pool) / (1 + TOLERANCE), len(differing)
        # such as an update on the host: other layouts do without
        except RatesError as error:
            self.result.unknown[error.faults[0]] += 1
            return math.inf, 0

    def _may_fit(self, level: int, values: Values, bounds: Bounds) -> bool:
        least_bytes = 0.0
        # before the microbatch is known to be worth a look: weights alone rule out most layouts of a large model
        if level == PASSES:
            least_bytes = bounds.least_states(values)
        # before the time, which takes longer to predict
        elif level == STATES:
            least_bytes = bounds.least_memory(values)
        return self._fits(least_bytes)

    def _fits(self, size_bytes: float) -> bool:
        fits = self.room.is_enough_for(size_bytes)
        self.result.too_large += not fits
        return fits

    def _seconds_of(self, config: Config, pool: int) -> float:
        self.result.timed += 1
        return step_time(config, self.clusters[pool], self.rates).seconds

    def _planned(self, node: _Node) -> Found | None:
        """Return the layout if it fits, with the cuts into stages that make it fastest."""
        pool, space = node.pool, self.spaces[node.pool]
        by_bounds: dict[tuple[int, ...], tuple[Config, Changes]] = {}
        for choice in space.cuts(node.values):
            config, changes = changed(self.config, {**node.values, **choice})
            # methods often cut alike
            by_bounds.setdefault(tuple(stage_bounds(config, declared_layers(config))), (config, changes))
        cuts = [(self._seconds_of(config, pool), config, changes) for config, changes in by_bounds.values()]
        # the fastest cuts may need more memory than others do
        for _, config, changes in sorted(cuts, key=lambda cut: cut[0]):
            found = self._planned_as(config, changes, self.clusters[pool])
            if found is not None:
                return found
        return None

    def _planned_as(self, config: Config, changes: Changes, cluster: Cluster) -> Found | None:
        """Return the layout if the rules accept it and it fits."""
        # with all rules, and last: of thousands of layouts only these few come so far
        faults = self.check(config, cluster.num_devices)
        if faults:
            self.result.refused[faults[0]] += 1
            return None
        layout = Layout.of(config.parallel, cluster.num_devices)
        stages = memory_by_stage(config, layout)
        if not self._fits(max(needed_bytes(config, stage) for stage in stages)):
            return None
        taken = step_time(config, cluster, self.rates)
        return Found(config, cluster, changes, taken, stages, limit_of(layout, cluster, taken))


def clusters_of(node_sizes: Sequence[int], *, may_leave: bool) -> list[Cluster]:
    """Return the clusters of nodes of one size, as a launch has them, that these nodes hold, the largest first.

    A launch starts as many ranks on each node, so a larger node may have idle devices. `may_leave`: whole nodes too.
    """
    clusters = set()
    # a node of 8 serves a run of 4 a node too, with half of its devices
    for size in set(node_sizes):
        most = sum(1 for each in node_sizes if each >= size)
        numbers = [most]
        if may_leave or len(set(node_sizes)) > 1:
            numbers = [nodes for nodes in range(1, most + 1) if nodes > most - ALL_OF or _odd_part(nodes) <= MOST_ODD]
        clusters |= {Cluster.of(nodes, size) for nodes in numbers if 2 * nodes > most}
    return sorted(clusters, key=lambda cluster: -cluster.num_devices)


def _odd_part(number: int) -> int:
    """Return the largest odd divisor."""
    return number // (number & -number)
