"""The verdict on ranks that computed the same microbatch and do not agree: which of them is wrong?

Every data-parallel rank computes it three times, each time with a number for whatever it hands to other ranks, for its
loss and for each gradient (training/recheck.py). The ranks at one place of the model, of one stage and tensor-parallel
rank, must have the same numbers. A rank that does not repeat its own is wrong, if those of all other replicas do. Else
those are that differ from most. Of two that both repeat theirs nothing says which is wrong, and both are named.

A wrong number spreads within a replica with sums and messages, as what is not finite does (attribution.py): the origin
is a rank none of whose sources was wrong before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.parallel import finite_checks as checks
from megatron.parallel.finite_checks import FirstBad, PassPlace
from megatron.resilience.attribution import follows
from megatron.resilience.rank_record import RankPlace, RankRecord
from megatron.runtime.commands import first_of

SAMPLES, WEIGHTS = "samples", "weights"
"""Kinds of numbers from before the pass, beside those of finite_checks.py."""
SHOWN = 4

Number = int | float
"""Checksum of bits; on a device that does not repeat them, a norm."""


class Traced(NamedTuple):
    """Subject of one number of a pass."""

    kind: str
    place: PassPlace
    name: str = ""
    """Name of the parameter, for a gradient."""


@dataclass(frozen=True)
class Recomputed:
    """Numbers of one rank's passes over the microbatch."""

    place: RankPlace
    traced: tuple[Traced, ...]
    numbers: tuple[Number, ...]
    """One for each of `traced`."""
    again: tuple[tuple[Number, ...], ...]
    """The same of each further pass."""


@dataclass(frozen=True)
class WrongRanks:
    """The ranks that computed something else than others, or than they did before."""

    ranks: tuple[int, ...]
    text: str
    doubt: str = ""
    """Reason why it may be others that are wrong; empty: it is certain."""

    @property
    def is_certain(self) -> bool:
        return not self.doubt


ALL_REPEAT = "each repeats its own result, so that it is unknown which of them is wrong"
FEW_REPEAT = "not all others repeat their own results, so that it may be kernels rather than one device"
"""Doubts."""


def agree(some: Sequence[Number], others: Sequence[Number], noise: float) -> bool:
    """Return True if all numbers are equal; above 0 `noise` is the relative difference that they may have."""
    return len(some) == len(others) and _first_difference(some, others, noise) == len(some)


def find_wrong(ranks: Sequence[Recomputed], num_stages: int, noise: float = 0.0) -> WrongRanks | None:
    """Return the wrong ranks among all of a run, whose numbers do not agree; None: most do not repeat their own."""
    unsteady = {each.place.rank for each in ranks if not all(agree(each.numbers, x, noise) for x in each.again)}
    # so many devices do not fail at once: their kernels do not repeat
    if 2 * len(_replicas(ranks, unsteady)) > len({each.place.replica for each in ranks}):
        return None
    at_place: dict[tuple[int, int], list[Recomputed]] = defaultdict(list)
    for each in ranks:
        at_place[each.place.stage, each.place.tensor_rank].append(each)
    differences = _Differences({}, unsteady, set())
    for peers in at_place.values():
        _compare(peers, differences, noise)
    return _origins(ranks, differences, num_stages)


def _replicas(ranks: Sequence[Recomputed], chosen: Collection[int]) -> set[int]:
    """Return the replicas of the chosen ranks."""
    return {each.place.replica for each in ranks if each.place.rank in chosen}


@dataclass
class _Differences:
    """The differing ranks."""

    first: dict[int, int]
    """Index of a rank's first number that differs."""
    unsteady: set[int]
    """Ranks that do not repeat their own numbers."""
    doubtful: set[int]
    """Ranks that do, and from which as many others differ as agree with them."""


def _compare(peers: Sequence[Recomputed], differences: _Differences, noise: float) -> None:
    """Note where the ranks at one place of the model differ."""
    steady = [each for each in peers if each.place.rank not in differences.unsteady]
    common = _common(steady, noise)
    right = steady
    if common is not None:
        right = [common]
    for each in peers:
        others = [*each.again, *(other.numbers for other in right)]
        order = min(_first_difference(each.numbers, numbers, noise) for numbers in others)
        if order < len(each.traced):
            differences.first[each.place.rank] = order
    if common is None:
        differences.doubtful.update(each.place.rank for each in steady)


def _common(peers: Sequence[Recomputed], noise: float) -> Recomputed | None:
    """Return one of the ranks whose numbers are those of most; None: there are as many of others."""
    counts: list[tuple[Recomputed, int]] = []
    for each in peers:
        alike = sum(agree(each.numbers, other.numbers, noise) for other in peers)
        counts.append((each, alike))
    most, count = max(counts, key=lambda pair: pair[1])
    for each, alike in counts:
        if alike == count and not agree(each.numbers, most.numbers, noise):
            return None
    return most


def _first_difference(some: Sequence[Number], others: Sequence[Number], noise: float) -> int:
    """Return the index of the first number that differs; the length if all are equal."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if noise == 0:
            is_equal = one == other
        else:  # isclose takes no NaN for another
            is_equal = math.isclose(one, other, rel_tol=noise) or (math.isnan(one) and math.isnan(other))
        if not is_equal:
            return index
    return min(len(some), len(others))


def _origins(ranks: Sequence[Recomputed], differences: _Differences, num_stages: int) -> WrongRanks:
    """Return the ranks at which the differences began, in words."""
    first = differences.first
    records: dict[int, RankRecord] = {}
    for each in ranks:
        bad = None
        if each.place.rank in first:
            seen = each.traced[first[each.place.rank]]
            bad = FirstBad(first[each.place.rank], seen.kind, seen.place)
        records[each.place.rank] = RankRecord(each.place, first=bad)
    places = {(r.place.stage, r.place.replica, r.place.tensor_rank): r for r in records.values()}
    all_bad = [(record, record.first) for record in records.values() if record.first is not None]
    origins = [record.place.rank for record, bad in all_bad if not follows(record, bad, all_bad, places, num_stages)]
    faults = []
    for each in ranks:
        if each.place.rank in origins:
            what = _described(each, first[each.place.rank])
            if each.place.rank in differences.unsteady:
                what += ", and it did not repeat its own result"
            faults.append(f"{each.place}: {what}")
    doubt = ""
    if not differences.doubtful.isdisjoint(origins):
        doubt = ALL_REPEAT
    elif differences.unsteady and len(_replicas(ranks, differences.unsteady.union(origins))) > 1:
        doubt = FEW_REPEAT
    return WrongRanks(tuple(origins), first_of(faults, SHOWN, separator="; "), doubt)


_WHAT = {
    (checks.SENT, checks.FORWARD): "the activations that it sends differ",
    (checks.SENT, checks.BACKWARD): "the gradients that it sends differ",
    (checks.RECEIVED, checks.FORWARD): "the activations that came differ, and those that were sent do not: a link",
    (checks.RECEIVED, checks.BACKWARD): "the gradients that came differ, and those that were sent do not: a link",
    (checks.LOSS, checks.FORWARD): "its loss differs",
    (checks.LOSS_INPUT, checks.FORWARD): "the log-probabilities that its loss function is given differ",
    (checks.LOSS_FUNCTION, checks.FORWARD): "the result of its loss function differs",
    (checks.LOSS_GRADIENT, checks.BACKWARD): "the gradient of its loss function differs",
    (checks.LAYER_TERM, checks.FORWARD): "a loss term of its layers differs",
    (SAMPLES, checks.FORWARD): "the samples that it read differ",
    (WEIGHTS, checks.FORWARD): "its weights differ, since an earlier step",
}
"""By kind and direction of a number, what is said of a rank whose first difference it is."""


def _described(rank: Recomputed, order: int) -> str:
    seen = rank.traced[order]
    if seen.kind == checks.GRADIENT:
        return f"its gradient of {seen.name} differs"
    direction = seen.place.direction
    if (seen.kind, direction) in _WHAT:
        return _WHAT[seen.kind, direction]
    if seen.kind != checks.COMPUTED:
        return f"its {seen.kind} in the {direction} pass differs"
    # counted within the pass, so that one may see whether it is the same product each time
    orders = [
        index
        for index, other in enumerate(rank.traced)
        if (other.kind, other.place.direction) == (seen.kind, direction)
    ]
    return f"its part of sum {orders.index(order) + 1} of {len(orders)} in the {direction} pass differs"
