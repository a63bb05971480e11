"""Exchanges between ranks, and how much longer a rank computes while others of its host do."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.measuring.options import TINY, Sizes
from megatron.measuring.stopwatch import LEAST_S, Run, synchronise
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import AXES, Layout
from megatron.parallel.mappings import all_gather_into, all_to_all_rows, reduce_scatter_into

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MOST_RUNS = 20
BUSY_S = 0.25


@dataclass
class RankGroup:
    """Groups of ranks that exchange at once, this rank's among them or not."""

    size: int
    per_node: int
    sharing: int
    """Groups that use the links of a node at once."""
    own: Any
    """Process group of this rank; None: it waits."""
    ranks: tuple[int, ...]
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def groups_of(ctx: ParallelContext, per_node: int) -> list[RankGroup]:
    """Make the groups to measure: 2, 4, ... ranks of a node, one of them or all at once; then such over nodes.

    Collective.
    """
    world, wanted = ctx.world_size, []
    for size in _powers(min(per_node, world)):
        of_node = [tuple(range(begin, begin + size)) for begin in range(0, world - size + 1, size)]
        first = [ranks for ranks in of_node if ranks[0] % per_node == 0]
        wanted.append((size, size, 1, first))
        if per_node // size > 1:
            wanted.append((size, size, per_node // size, of_node))
    nodes = world // per_node
    for count in _powers(nodes):
        across = [tuple(local + node * per_node for node in range(count)) for local in range(per_node)]
        wanted.append((count, 1, 1, across[:1]))
        if per_node > 1:
            wanted.append((count, 1, per_node, across))
            wanted.append((count * per_node, per_node, 1, [tuple(range(count * per_node))]))
    return [make_group(ctx, *each) for each in wanted]


def _powers(most: int) -> Iterator[int]:
    """Yield 2, 4, ... and the most."""
    size = 2
    while size < most:
        yield size
        size *= 2
    if most > 1:
        yield most


def make_group(
    ctx: ParallelContext, size: int, per_node: int, sharing: int, members: Sequence[tuple[int, ...]]
) -> RankGroup:
    """Make the process groups of these members. Collective."""
    own, ranks = None, members[0]
    for each in members:
        # every rank makes all groups
        made = dist.new_group(list(each))
        if ctx.rank in each:
            own, ranks = made, each
    return RankGroup(size, per_node, sharing, own, ranks)


class ExchangeRates:
    """Measures exchanges over all ranks."""

    def __init__(self, ctx: ParallelContext, sizes: Sizes, groups: Sequence[RankGroup]) -> None:
        self._ctx, self._sizes = ctx, sizes
        self.groups = groups

    def measure(self, say: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
        """Return `collectives` of a file. Collective."""
        for number in range(self._sizes.rounds):
            for group, kind, size in itertools.product(self.groups, KINDS, self._sizes.bytes):
                self.repeat(group, kind, size)
            say(f"  {(number + 1) / self._sizes.rounds:.0%}")
        return {kind: [self._table(group, kind) for group in self.groups] for kind in KINDS}

    def _table(self, group: RankGroup, kind: str) -> dict[str, Any]:
        sizes = self._sizes.bytes
        own = [statistics.median(group.seconds.get((kind, size), [0.0])) for size in sizes]
        # rank 0 is in every first group; of several at once the slowest counts
        seconds = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self._ctx.control_group)
        rest = {"size": group.size, "per_node": group.per_node, "sharing": group.sharing}
        return {**rest, "bytes": sizes, "seconds": seconds.tolist()}

    def repeat(self, group: RankGroup, kind: str, size: int) -> None:
        """Time an exchange once more, and keep what this rank takes. Collective."""
        self._barrier()
        if group.own is None:
            return
        run = self._exchange(group, kind, size)
        run()
        # as many on all ranks of the group
        begin = time.perf_counter()
        run()
        synchronise(self._ctx.device)
        once = torch.tensor([time.perf_counter() - begin], device=self._ctx.device, dtype=torch.float32)
        dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group.own)
        runs = max(2, min(MOST_RUNS, int(4 * LEAST_S / max(float(once), 1e-6))))
        begin = time.perf_counter()
        for _ in range(runs):
            run()
        synchronise(self._ctx.device)
        group.seconds.setdefault((kind, size), []).append((time.perf_counter() - begin) / runs)

    def _exchange(self, group: RankGroup, kind: str, size: int) -> Run:
        count = max(group.size, size // 4 // group.size * group.size)
        whole, part = self._numbers(count), self._numbers(count // group.size)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group.own)
        if kind == "all_gather":
            return lambda: all_gather_into(whole, part, group=group.own)
        if kind == "reduce_scatter":
            return lambda: reduce_scatter_into(part, whole, group=group.own)
        if kind == "all_to_all":
            return lambda: all_to_all_rows(whole, group.own, self._ctx)
        return self._message(group, self._numbers(max(1, size // 4)))

    def _numbers(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._ctx.device)

    def _message(self, group: RankGroup, message: Tensor) -> Run:
        """Return a message from the first rank of a group to the second; the others have nothing to do."""
        sender, receiver = group.ranks[:2]
        if self._ctx.rank == sender:
            return lambda: dist.send(message, receiver, group=group.own)
        if self._ctx.rank == receiver:
            return lambda: dist.recv(message, sender, group=group.own)
        return lambda: None

    def _barrier(self) -> None:
        dist.barrier(group=self._ctx.control_group)

    def slowdown(self, per_node: int) -> dict[int, float]:
        """Return how much longer products and passes over memory take while 2, 4, ... ranks of a host compute.

        Collective.
        """
        counts = [1, *_powers(per_node)]
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for _, count in itertools.product(range(self._sizes.rounds), counts):
            seconds[count].append(self._busy(count, per_node))
        medians = {count: statistics.median(each) for count, each in seconds.items()}
        return {count: max(1.0, medians[count] / medians[1]) for count in counts[1:]}

    def _busy(self, count: int, per_node: int) -> float:
        """Return the seconds of a piece of work on the first node while so many of its ranks do it. Collective."""
        x, weight, memory = torch.randn(128, 256), torch.randn(512, 256), torch.randn(2**16)
        self._barrier()
        own = 0.0
        if self._ctx.rank % per_node < count:
            begin, runs = time.perf_counter(), 0
            while time.perf_counter() - begin < BUSY_S / 4:
                for _ in range(4):
                    torch.nn.functional.linear(x, weight)
                memory.mul(2.0).add_(1.0)
                runs += 1
            own = (time.perf_counter() - begin) / runs
        total = torch.tensor([own, float(own > 0)], dtype=torch.float64)
        dist.all_reduce(total, group=self._ctx.control_group)
        return float(total[0] / total[1])


# ---------------------------------------------------------------------------------------------------------------------
# Groups of a layout, all of a kind at once, as a training has them

OPERATIONS = {"tensor": "all_reduce", "context": "all_to_all", "data": "reduce_scatter", "stage": "send"}
"""Exchange of each kind of group."""
GROUP_BYTES_ON_HOST, GROUP_BYTES = 2**22, 2**27
GROUP_ROUNDS = 3


def members_of(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of the groups of each kind that has more than one rank."""
    ranks = [dataclasses.replace(layout, rank=rank) for rank in range(layout.world_size)]
    found = {
        "tensor": [each.peers(AXES, "tensor_rank") for each in ranks],
        "context": [each.peers(AXES, "context_rank") for each in ranks],
        "data": [each.grad_peers() for each in ranks],
        "stage": [each.peers(AXES, "stage") for each in ranks],
    }
    return {kind: sorted({tuple(group) for group in groups}) for kind, groups in found.items() if len(groups[0]) > 1}


def group_times(ctx: ParallelContext, *, is_host: bool) -> list[dict[str, Any]]:
    """Return the median seconds of each group's exchange. Collective; every rank has them all."""
    size = GROUP_BYTES_ON_HOST if is_host else GROUP_BYTES
    members = members_of(ctx)
    groups = {kind: make_group(ctx, len(each[0]), 1, len(each), each) for kind, each in members.items()}
    exchanges = ExchangeRates(ctx, dataclasses.replace(TINY, bytes=(size,)), list(groups.values()))
    for _ in range(GROUP_ROUNDS):
        for kind, group in groups.items():
            exchanges.repeat(group, OPERATIONS[kind], size)
    own = {kind: statistics.median(group.seconds[OPERATIONS[kind], size]) for kind, group in groups.items()}
    gathered = ctx.gather_objects(own)
    return [_record(kind, ranks, size, gathered) for kind, each in members.items() for ranks in each]


def _record(kind: str, ranks: tuple[int, ...], size: int, gathered: list[dict[str, float]]) -> dict[str, Any]:
    # a message is between the first two alone; the others have nothing to do
    timed = ranks[:2] if OPERATIONS[kind] == "send" else ranks
    seconds = max(gathered[rank][kind] for rank in timed)
    return {"kind": kind, "operation": OPERATIONS[kind], "ranks": list(ranks), "size": size, "seconds": seconds}
