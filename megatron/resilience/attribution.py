"""The origin of a step that is not finite: which rank was first, and if its device, a link or its data is to blame.

Each rank keeps a record of its own part of the step (parallel/finite_checks.py), from before anything was summed over
ranks. What is not finite spreads with the data: from stage to stage, in a tensor-parallel sum to all its ranks, and
through a sum of gradients to all data-parallel ranks. So the origin is a rank none of whose sources was bad before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron.parallel.finite_checks import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LOSS,
    LOSS_FUNCTION,
    LOSS_GRADIENT,
    LOSS_INPUT,
    RECEIVED,
    TIED,
)
from megatron.resilience.rank_record import RankRecord

DEVICE, LINK, DATA, WEIGHTS, UNKNOWN = "device", "link", "data", "weights", "not known"
"""Kinds of origins. `device`: of a rank's own computation or memory; `weights`: all copies of a weight are bad."""
FUNCTION = "loss function"
"""Kind of an origin: the user's own, of which the device, a link and the data are innocent."""
SHOWN = 4


@dataclasses.dataclass(frozen=True)
class FaultOrigin:
    """The ranks at which a step first was not finite, and the kind of fault."""

    kind: str
    ranks: tuple[int, ...]
    names: str
    """The ranks with their hosts, as text."""
    what: str

    def __str__(self) -> str:
        return f"{self.names}: {self.kind}: {self.what}" if self.names else self.what


def find_origin(records: Sequence[RankRecord], num_stages: int) -> FaultOrigin:
    """Return the origin of a step whose loss or gradient is not finite, from the records of all ranks."""
    damaged = [record for record in records if record.bad_weights]
    if damaged:
        return _bad_weights(damaged, records)
    places = {(r.place.stage, r.place.replica, r.place.tensor_rank): r for r in records}
    bad = [record for record in records if record.first is not None]
    origins = [record for record in bad if not _follows(record, records, places, num_stages)]
    if not origins:
        return FaultOrigin(LINK, (), "", "what each rank computed was finite; their sum is not: a link, or an overflow")
    kinds = {record.place.rank: _kind(record) for record in origins}
    # a device's fault is rarer than bad data, and says more
    order = (LINK, DEVICE, FUNCTION, DATA, UNKNOWN)
    kind, what = min(kinds.values(), key=lambda found: order.index(found[0]))
    return _named(kind, [record for record in origins if kinds[record.place.rank] == (kind, what)], what)


def _follows(
    record: RankRecord,
    records: Sequence[RankRecord],
    places: Mapping[tuple[int, int, int], RankRecord],
    num_stages: int,
) -> bool:
    """Return True if another rank was bad before, and this one got it from there."""
    first = record.first
    assert first is not None
    own = record.place
    peers = [other for other in records if (other.place.stage, other.place.replica) == (own.stage, own.replica)]
    if any(other.first is not None and other.first.order < first.order for other in peers):
        return True
    if first.kind == GRADIENT:
        return any(other.first is not None and other.first.kind == TIED for other in records)
    if first.kind == RECEIVED:
        step = -1 if first.place.direction == FORWARD else 1
        sender = places.get(((own.stage + step) % num_stages, own.replica, own.tensor_rank))
        if sender is None:
            return True
        # what was damaged in forward comes back to its sender in backward
        earlier = (FORWARD,) if first.place.direction == FORWARD else (FORWARD, BACKWARD)
        return sender.first is not None and sender.first.place.direction in earlier
    return False


def _kind(record: RankRecord) -> tuple[str, str]:
    first = record.first
    assert first is not None
    direction = first.place.direction
    if first.kind == RECEIVED:
        came, stage = ("activations", "previous") if direction == FORWARD else ("gradients", "next")
        return LINK, f"the {came} that came from the {stage} stage are not finite, those that it sent were"
    if first.kind == LOSS_FUNCTION:
        return FUNCTION, f"{record.loss} is not finite, the log-probabilities that it was given are"
    if first.kind == LOSS_GRADIENT:
        return FUNCTION, f"the gradient of {record.loss} is not finite, its losses are"
    if first.kind in (GRADIENT, TIED) or direction == BACKWARD:
        return DEVICE, "its own gradients are not finite, its losses are"
    if first.kind in (LOSS, LOSS_INPUT):
        return DATA, "its loss is not finite, what it received was"
    return UNKNOWN, "its forward pass was the first that was not finite: its device or its data"


def _bad_weights(damaged: Sequence[RankRecord], records: Sequence[RankRecord]) -> FaultOrigin:
    name = damaged[0].bad_weights[0]
    place = damaged[0].place
    copies = [r for r in records if (r.place.stage, r.place.tensor_rank) == (place.stage, place.tensor_rank)]
    holders = [record for record in damaged if name in record.bad_weights]
    if len(copies) > 1 and all(record in holders for record in copies):
        return _named(WEIGHTS, holders, f"{name} is not finite on all its ranks, since an earlier step or a load")
    return _named(DEVICE, holders, f"its weights are not finite ({', '.join(damaged[0].bad_weights)})")


def _named(kind: str, records: Sequence[RankRecord], what: str) -> FaultOrigin:
    names = [record.place.name for record in records[:SHOWN]]
    more = f" and {len(records) - SHOWN} more" if len(records) > SHOWN else ""
    return FaultOrigin(kind, tuple(record.place.rank for record in records), ", ".join(names) + more, what)
