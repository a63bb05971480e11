"""Bit-by-bit comparison of the ranks' copies of each parameter.

Data-parallel ranks hold copies of every parameter (except under ZeRO-3, which cuts it over those of a replica),
tensor-parallel ranks of those that are not sharded, pipeline stages of tied ones, replicas of what their optimizers
update. Ranks whose copies differ continue to train, each its own model, and no other check notices.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.resilience.errors import TrainingAborted
from megatron.runtime.commands import first_of
from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext

SHOWN = 4
"""Number of copies that a message describes."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLUMNS = 1 << 12
ABSENT = torch.iinfo(torch.int64).min


class Copy(NamedTuple):
    """Identity of a tensor that several ranks may hold."""

    name: str
    tensor_rank: int
    """0 for a parameter that every tensor-parallel rank holds whole."""
    stretch: int
    """Rank that ZeRO gives this stretch, among those of a replica; 0 of a tensor that each of them holds whole."""


class ReplicaCheck:
    """Compares the copies. Created and used by all ranks together."""

    def __init__(self, ctx: ParallelContext, held: Mapping[Copy, Tensor]) -> None:
        """`held`: the tensors of this rank, whole or stretches. Collective."""
        self._ctx, self._held = ctx, held
        holders = Counter(copy for held in ctx.gather_objects(list(held)) for copy in held)
        self._copies = sorted(copy for copy, count in holders.items() if count > 1)

    def check(self, iteration: int) -> None:
        """Raise TrainingAborted on every rank if copies differ. Collective."""
        if not self._copies:
            return
        # largest and smallest checksum of every copy, in one reduction over all ranks, whichever of them each holds
        mine = torch.full((2, len(self._copies)), ABSENT)
        places = [index for index, copy in enumerate(self._copies) if copy in self._held]
        if places:
            sums = torch.stack([checksum(self._held[self._copies[index]]) for index in places]).cpu()
            # the largest complement is the complement of the smallest: one reduction gives both ends
            mine[0, places], mine[1, places] = sums, ~sums
        own = mine[0].clone()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._ctx.control_group)
        differing = (mine[0] != ~mine[1]).nonzero().flatten().tolist()
        if not differing:
            return
        everyones = self._ctx.gather_objects((socket.gethostname(), own[differing].tolist()))
        faults: list[str] = []
        for place, index in enumerate(differing):
            theirs = {rank: sums[place] for rank, (_, sums) in enumerate(everyones) if sums[place] != ABSENT}
            for odd, holder, verdict in odd_ones(theirs):
                difference = ""
                if len(faults) < SHOWN:  # whole tensors travel for it
                    difference = self._difference(self._copies[index], odd, holder)
                faults.append(f"{self._copies[index].name} on rank {odd} ({everyones[odd][0]}) {verdict}{difference}")
        raise TrainingAborted(
            f"the ranks' copies are not equal after iteration {iteration}: {first_of(faults, SHOWN, separator='; ')}. "
            "Nothing was saved since they were last equal. The cause is a device that computes wrongly, or code that "
            "does not sum a gradient over the ranks; resume from the last checkpoint, without that host if it happens "
            "again"
        )

    def _difference(self, copy: Copy, odd: int, holder: int) -> str:
        """Return the difference between the copies of two ranks, as text. Collective."""
        ctx, text = self._ctx, None
        tensor = self._held.get(copy)
        if tensor is not None and ctx.rank in (odd, holder):
            flat = tensor.detach().reshape(-1).to("cpu", copy=True)
            if ctx.rank == holder:
                dist.send(flat.view(torch.uint8), odd, group=ctx.control_group)
            else:
                theirs = torch.empty_like(flat)
                dist.recv(theirs.view(torch.uint8), holder, group=ctx.control_group)
                count = int(
                    (flat.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, flat.element_size()).any(1).sum()
                )
                largest = float((flat.double() - theirs.double()).abs().max())
                text = f": {count} of {flat.numel()} numbers, by up to {largest:.3g}"
        return next((each for each in ctx.gather_objects(text) if each is not None), "")


# Sums of bits on the device, where it has such numbers: 8 bytes a parameter travel, over the host's network, since a
# device's collectives may lack int64.
def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 scalar on the tensor's device, or on the CPU, equal for equal bits.

    Sums of the bits over rows and over columns, each with a weight of its own, modulo 2^64: changes that cancel each
    other in one of the two do not in the other.
    """
    if not device_of(tensor.device.type).has_64_bits:
        tensor = tensor.cpu()
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    rows = bits.numel() // COLUMNS
    body = bits[: rows * COLUMNS].view(rows, COLUMNS)
    parts = [bits[rows * COLUMNS :].long(), body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64)]
    sums = torch.cat(parts)
    # odd, so that no change is multiplied away; 64-bit golden ratio, so that neighbours' weights are far apart
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device) * -7046029254386353131
    return (sums * weights).sum()


def odd_ones(sums: dict[int, int]) -> list[tuple[int, int, str]]:
    """Return (rank, rank to compare with, description) for each rank whose checksum differs from that of most."""
    (common, count), *_ = Counter(sums.values()).most_common()
    holder = next(rank for rank, value in sums.items() if value == common)
    others = [rank for rank, value in sums.items() if value != common]
    if count * 2 > len(sums):
        return [(odd, holder, f"differs from its copies on {count} other ranks, such as {holder}") for odd in others]
    # as many for either: which one is right is unknown
    return [(odd, holder, f"differs from its copy on rank {holder}") for odd in others]
