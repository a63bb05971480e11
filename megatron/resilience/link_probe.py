"""Rates of the links that a layout uses: pairs of ranks send each other messages between two steps.

A step shows which ranks waited, not for which link: in a sum over a group all wait for all. So the neighbours of each
group send to each other alone, through the groups of the training itself, and each pair is timed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.parallel.layout import AXES, EXPERT_AXES, Layout
from megatron.parallel.messages import post_exchange
from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext
    from megatron.resilience.rank_record import RankPlace

HOST_BYTES, DEVICE_BYTES = 2**20, 2**24
"""Bytes of a message: far more than what a link has under way, and some milliseconds."""
REPEATS, REPEATS_OF_SECOND = 4, 16
"""Messages of a link each way in a probe, and in a second one after slow links in a first. The fastest counts: a busy
machine delays some of them, a slow link all."""
MOST_ROUNDS = 64
"""Rounds of a probe at most; links beyond are left out."""


@dataclass(frozen=True)
class Link:
    """Two ranks that exchange in the layout, the lower one first."""

    one: int
    other: int
    kind: str
    """Kind of the group in which they do."""
    like: str
    """Name of a class of links that are equally fast when they are sound."""

    @property
    def is_across_hosts(self) -> bool:
        return self.like == ACROSS


ACROSS = "across hosts"


def links_of(layout: Layout, places: Sequence[RankPlace]) -> list[Link]:
    """Return the links between the neighbours of each group, each pair of ranks once. `places`: of all ranks, in order.

    A group is a ring, in the order of its ranks: so gloo sums over it, so stages and rings of attention send. The
    library of a device may choose another order; but each rank, and so each interface, is in two of them.
    """
    local_ranks = _local_ranks(places)
    found: dict[tuple[int, int], Link] = {}
    for rank in range(layout.world_size):
        for kind, peers in _groups_of(dataclasses.replace(layout, rank=rank)):
            for one, other in pairwise([*peers, peers[0]]):
                pair = min(one, other), max(one, other)
                if one == other or pair in found:
                    continue
                like = ACROSS
                if places[one].host == places[other].host:
                    # within a host some devices are nearer to each other than others, on each host the same ones
                    like = f"between local ranks {local_ranks[pair[0]]} and {local_ranks[pair[1]]}"
                found[pair] = Link(*pair, kind, like)
    return list(found.values())


def _local_ranks(places: Sequence[RankPlace]) -> list[int]:
    """Return the index of each rank among those of its host."""
    counts: dict[str, int] = {}
    local_ranks = []
    for place in places:
        local_ranks.append(counts.get(place.host, 0))
        counts[place.host] = local_ranks[-1] + 1
    return local_ranks


def _groups_of(layout: Layout) -> Iterator[tuple[str, list[int]]]:
    """Yield the kind and the ranks of each group of a rank."""
    yield "stage", layout.peers(AXES, "stage")
    yield "data", layout.shard_peers(layout.grad_peers())
    yield "data", layout.replica_peers(layout.grad_peers())
    yield "context", layout.peers(AXES, "context_rank")
    yield "tensor", layout.peers(AXES, "tensor_rank")
    if layout.divides_experts:
        yield "expert", layout.peers(EXPERT_AXES, "expert_rank")


def rounds_of(links: Sequence[Link], places: Sequence[RankPlace]) -> list[list[Link]]:
    """Return rounds of links that share nothing: no rank, and across hosts no host, which may have one interface."""
    rounds: list[tuple[bool, set[object], list[Link]]] = []
    for link in links:
        ends: set[object] = {link.one, link.other}
        if link.is_across_hosts:
            ends |= {places[link.one].host, places[link.other].host}
        for is_across, busy, members in rounds:
            if is_across == link.is_across_hosts and not busy & ends:
                busy |= ends
                members.append(link)
                break
        else:
            rounds.append((link.is_across_hosts, ends, [link]))
    return [members for _, _, members in rounds[:MOST_ROUNDS]]


class LinkProbe:
    """Times the links of a layout. Collective in construction and use."""

    def __init__(self, ctx: ParallelContext, places: Sequence[RankPlace]) -> None:
        self._ctx = ctx
        self.rounds = rounds_of(links_of(ctx, places), places)
        is_host = device_of(ctx.device.type).is_host
        self.num_bytes = HOST_BYTES if is_host else DEVICE_BYTES
        self._waits_for_device = not is_host

    def measure(self, repeats: int) -> list[float]:
        """Return the seconds of a message to this rank in each round; NaN where it rests. Collective."""
        # freed again: a run may use all memory of its device
        message = torch.zeros(self.num_bytes // 4, device=self._ctx.device)
        seconds = []
        for members in self.rounds:
            # what is still under way in the round before would share an interface
            dist.barrier(group=self._ctx.control_group)
            own = [link for link in members if self._ctx.rank in (link.one, link.other)]
            times = [self._exchange(link, message) for link in own for _ in range(repeats)]
            seconds.append(min(times, default=math.nan))
        return seconds

    def _exchange(self, link: Link, message: torch.Tensor) -> float:
        """Send one way, then the other; return the seconds of what this rank received."""
        own_s = math.nan
        # not at once: gloo sends either way at the same time or one after the other, as it happens
        for receiver in (link.one, link.other):
            seconds = self._send(link, receiver, message)
            if receiver == self._ctx.rank:
                own_s = seconds
        return own_s

    def _send(self, link: Link, receiver: int, message: torch.Tensor) -> float:
        ctx = self._ctx
        # stages send over all ranks' group
        groups = {
            "data": ctx.grad_group,
            "context": ctx.context_group,
            "tensor": ctx.tensor_group,
            "expert": ctx.expert_group,
        }
        peer, group = link.one + link.other - ctx.rank, groups.get(link.kind)
        # both ends begin together
        post_exchange(message[:1], peer, torch.empty_like(message[:1]), peer, group).wait()
        self._synchronise()
        begin_s = time.perf_counter()
        if ctx.rank == receiver:
            post_exchange(None, peer, message, peer, group).wait()
        else:
            post_exchange(message, peer, None, peer, group).wait()
        self._synchronise()
        return time.perf_counter() - begin_s

    def _synchronise(self) -> None:
        if self._waits_for_device:
            from deepspeed.accelerator import get_accelerator  # late: a host alone does without its import

            get_accelerator().synchronize()
