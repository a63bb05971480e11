"""The origin of a step that is not finite: which rank was first, and if its device, a link or its data is to blame.

Each rank keeps a record of its own part of the step (parallel/finite_checks.py), from before anything was summed over
ranks. What is not finite spreads with the data: from stage to stage, in a tensor-parallel sum to all its ranks, with
tokens to the ranks of other experts, with keys and values to the ranks of the same rows, and through a sum of gradients
to all data-parallel ranks. So the origin is a rank none of whose sources was bad before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron.parallel import finite_checks as checks
from megatron.parallel.finite_checks import BACKWARD, FORWARD, FirstBad
from megatron.resilience.rank_record import RankRecord
from megatron.runtime.commands import first_of

DEVICE, LINK, DATA, WEIGHTS, UNKNOWN = "device", "link", "data", "weights", "not known"
"""Kinds of origins. `device`: of a rank's own computation or memory; `weights`: all copies of a weight are bad."""
FUNCTION = "loss function"
"""Kind of an origin: the user's own, of which the device, a link and the data are innocent."""
PRIORITY = (LINK, DEVICE, FUNCTION, DATA, UNKNOWN)
"""The first of several kinds at once is reported: a fault of hardware is rarer than bad data, and says more."""
SHOWN = 4

LOSS_FUNCTION_FAULTS = {
    checks.LOSS_FUNCTION: "{loss} is not finite, the log-probabilities that it was given are",
    checks.LOSS_GRADIENT: "the gradient of {loss} is not finite, its losses are",
}
"""Fault of a user's loss function, by the check that failed."""


@dataclasses.dataclass(frozen=True)
class FaultOrigin:
    """The ranks at which a step first was not finite, and the kind of fault."""

    kind: str
    ranks: tuple[int, ...]
    names: str
    """The ranks with their hosts, as text."""
    what: str

    def __str__(self) -> str:
        if not self.names:
            return self.what
        return f"{self.names}: {self.kind}: {self.what}"


def find_origin(records: Sequence[RankRecord], num_stages: int) -> FaultOrigin:
    """Return the origin of a step whose loss or gradient is not finite, from the records of all ranks."""
    damaged = [record for record in records if record.bad_weights]
    if damaged:
        return _bad_weights(damaged, records)
    bad = [(record, record.first) for record in records if record.first is not None]
    places = {(r.place.stage, r.place.replica, r.place.tensor_rank): r for r in records}
    origins = [(record, first) for record, first in bad if not follows(record, first, bad, places, num_stages)]
    if not origins:
        return FaultOrigin(LINK, (), "", "what each rank computed was finite; their sum is not: a link, or an overflow")
    kinds = {record.place.rank: _kind(record, first) for record, first in origins}
    kind, what = min(kinds.values(), key=lambda each: PRIORITY.index(each[0]))
    return _named(kind, [record for record, _ in origins if kinds[record.place.rank] == (kind, what)], what)


BadRecord = tuple[RankRecord, FirstBad]
"""Record of a rank with its first check that failed."""


def follows(
    record: RankRecord,
    first: FirstBad,
    bad: Sequence[BadRecord],
    places: Mapping[tuple[int, int, int], RankRecord],
    num_stages: int,
) -> bool:
    """Return True if another rank was bad before, and this one got it from there.

    `places`: the records of all ranks by stage, replica and tensor-parallel rank.
    """
    own = record.place
    # tensor-parallel ranks and those that exchange tokens or share rows make the same checks in the same order: numbers
    # of these can be compared
    orders_of_peers = [
        theirs.order for other, theirs in bad if (other.place.stage, other.place.team) == (own.stage, own.team)
    ]
    if min(orders_of_peers) < first.order:
        return True
    if first.kind == checks.GRADIENT:
        # before this check the gradients of tied weights were summed over their stages
        return any(theirs.kind == checks.TIED for _, theirs in bad)
    if first.kind != checks.RECEIVED:
        return False
    step, earlier = 1, [FORWARD, BACKWARD]
    if first.place.direction == FORWARD:
        # what was damaged in forward comes back to its sender in backward, but not the other way round
        step, earlier = -1, [FORWARD]
    sender = places.get(((own.stage + step) % num_stages, own.replica, own.tensor_rank))
    if sender is None:
        return True
    return sender.first is not None and sender.first.place.direction in earlier


def _kind(record: RankRecord, first: FirstBad) -> tuple[str, str]:
    """Return the kind of an origin, and what is said of it."""
    direction = first.place.direction
    if first.kind == checks.RECEIVED:
        came, stage = "gradients", "next"
        if direction == FORWARD:
            came, stage = "activations", "previous"
        return LINK, f"the {came} that came from the {stage} stage are not finite, those that it sent were"
    if first.kind in LOSS_FUNCTION_FAULTS:
        return FUNCTION, LOSS_FUNCTION_FAULTS[first.kind].format(loss=record.loss)
    if first.kind in (checks.GRADIENT, checks.TIED) or direction == BACKWARD:
        return DEVICE, "its own gradients are not finite, its losses are"
    if first.kind in (checks.LOSS, checks.LOSS_INPUT):
        return DATA, "its loss is not finite, what it received was"
    return UNKNOWN, "its forward pass was the first that was not finite: its device or its data"


def _bad_weights(damaged: Sequence[RankRecord], records: Sequence[RankRecord]) -> FaultOrigin:
    name = damaged[0].bad_weights[0]
    place = damaged[0].place
    copies = [r for r in records if (r.place.stage, r.place.tensor_rank) == (place.stage, place.tensor_rank)]
    holders = [record for record in damaged if name in record.bad_weights]
    # a device damages its own copy alone; one that every rank holds was summed, saved or loaded so
    if len(copies) > 1 and all(record in holders for record in copies):
        return _named(WEIGHTS, holders, f"{name} is not finite on all its ranks, since an earlier step or a load")
    return _named(DEVICE, holders, f"its weights are not finite ({', '.join(damaged[0].bad_weights)})")


def _named(kind: str, records: Sequence[RankRecord], what: str) -> FaultOrigin:
    names = first_of([record.place.name for record in records], SHOWN)
    return FaultOrigin(kind, tuple(record.place.rank for record in records), names, what)
