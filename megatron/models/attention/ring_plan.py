"""Plan of a ring: which rows of keys and values travel from rank to rank, and which blocks of scores they are for.

Rows are those of the residual stream: a rank has the places `Layout.places` of each sample, here by their indices among
them. Blocks hold what a query may see by causality, a window and documents, and nothing else. Plain integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

ALL = slice(None)


class Form(Enum):
    """Keys of a block that its queries see."""

    FULL = "full"
    CAUSAL = "causal"
    """Queries and keys are of the same places: each sees its own and those before it."""
    ITSELF = "itself"
    """Queries and keys are of the same places: each sees its own alone."""
    PARTIAL = "partial"
    """Those at its own place or before it, and within the window."""


@dataclass(frozen=True)
class ScoreBlock:
    """Queries, and the keys of which they see some."""

    samples: slice
    queries: slice
    """Among the rows of the rank that computes."""
    keys: slice
    """Among the rows of the rank that holds them, or of a message from it."""
    first_query: int
    first_key: int
    """Their places in the sample."""
    form: Form

    @property
    def is_diagonal(self) -> bool:
        """Its queries and keys are of the same places."""
        return self.first_query == self.first_key


@dataclass(frozen=True)
class RingStep:
    """Exchange of a rank with two others, and what it computes with what comes."""

    destination: int
    sent: tuple[slice, ...]
    """Rows of this rank for the context rank `destination`; none: no message."""
    source: int
    num_received: int
    """Rows that come from the context rank `source`; 0: no message."""
    blocks: tuple[ScoreBlock, ...]
    """Their keys are rows of the message."""


@dataclass(frozen=True)
class RingPlan:
    """Work of one rank."""

    own: tuple[ScoreBlock, ...]
    """Those of its own keys: first the diagonal ones, of which each query is in just one."""
    steps: tuple[RingStep, ...]


@dataclass(frozen=True)
class Visibility:
    """Reasons for which a key is hidden from a query, beside causality."""

    window: int | None = None
    begins: tuple[tuple[int, ...], ...] = ()
    """First places of the documents of each sample; empty: each sample is one document, or a mask hides them."""
    is_joined: bool = False
    """Blocks may be joined whose rows are not of neighbouring places: no score depends on the places."""


def plan_ring(rank: int, places: Sequence[Sequence[range]], sees: Visibility) -> RingPlan:
    """Return the work of a context rank. `places`: those of each."""
    size = len(places)
    own = tuple(_own_blocks(places[rank], sees))
    steps = []
    for distance in range(1, size):
        source, destination = (rank - distance) % size, (rank + distance) % size
        blocks = _earlier_blocks(places[rank], places[source], sees)
        rows = _rows(blocks)
        arrived = tuple(replace(block, keys=_moved(block.keys, rows)) for block in blocks)
        if sees.is_joined:
            arrived = _joined(arrived)
        sent = _rows(_earlier_blocks(places[destination], places[rank], sees))
        steps.append(RingStep(destination, sent, source, sum(row.stop - row.start for row in rows), arrived))
    return RingPlan(own, tuple(steps))


def _own_blocks(places: Sequence[range], sees: Visibility) -> Iterator[ScoreBlock]:
    """Yield those with each query's own key first."""
    if sees.is_joined:
        # its places are in order
        rows = slice(0, sum(map(len, places)))
        yield ScoreBlock(ALL, rows, rows, 0, 0, Form.CAUSAL)
        return
    for sample, begins in _samples(sees):
        for rows, chunk in _with_rows(places):
            for begin, end in _pieces(begins, chunk):
                own = slice(rows.start + begin - chunk.start, rows.start + end - chunk.start)
                yield ScoreBlock(sample, own, own, begin, begin, _own_form(begin, end, begins, sees.window))
    yield from _earlier_blocks(places, places, sees)


def _own_form(begin: int, end: int, begins: Sequence[int] | None, window: int | None) -> Form:
    if window == 1 or (begins is not None and _are_single(begins, begin, end)):
        return Form.ITSELF
    return Form.CAUSAL if window is None or end - begin <= window else Form.PARTIAL


def _are_single(begins: Sequence[int], begin: int, end: int) -> bool:
    """Return True if each of these places begins a document, after the first, which may continue one."""
    return bisect_left(begins, end) - bisect_right(begins, begin) == end - begin - 1


def _samples(sees: Visibility) -> Iterator[tuple[slice, tuple[int, ...] | None]]:
    if not sees.begins:
        yield ALL, None
    for sample, begins in enumerate(sees.begins):
        yield slice(sample, sample + 1), begins


def _with_rows(places: Sequence[range]) -> Iterator[tuple[slice, range]]:
    first = 0
    for chunk in places:
        yield slice(first, first + len(chunk)), chunk
        first += len(chunk)


def _pieces(begins: Sequence[int] | None, chunk: range) -> Iterator[tuple[int, int]]:
    """Yield the part in a chunk of each document, or of several of one token each, as padding is."""
    if begins is None:
        yield chunk.start, chunk.stop
        return
    borders = [chunk.start, *begins[bisect_right(begins, chunk.start) : bisect_left(begins, chunk.stop)], chunk.stop]
    single = borders[0]
    for begin, end in pairwise(borders):
        if end - begin > 1:
            if single < begin:
                yield single, begin
            yield begin, end
            single = end
    if single < chunk.stop:
        yield single, chunk.stop


def _earlier_blocks(queries: Sequence[range], keys: Sequence[range], sees: Visibility) -> tuple[ScoreBlock, ...]:
    """Return the blocks of queries and earlier keys, which are of different chunks; of each sample if it is packed."""
    found = []
    for sample, begins in _samples(sees):
        for query_rows, query_chunk in _with_rows(queries):
            for key_rows, key_chunk in _with_rows(keys):
                if key_chunk.start >= query_chunk.start:
                    continue
                seeing, seen = _of_one_document(query_chunk, key_chunk, begins)
                if sees.window is not None:
                    seen = range(max(seen.start, seeing.start + 1 - sees.window), seen.stop)
                    seeing = range(seeing.start, min(seeing.stop, seen.stop - 1 + sees.window))
                if not seeing or not seen:
                    continue
                is_cut = sees.window is not None and seeing.stop - seen.start > sees.window
                block = ScoreBlock(
                    sample,
                    _shifted(seeing, query_rows.start - query_chunk.start),
                    _shifted(seen, key_rows.start - key_chunk.start),
                    seeing.start,
                    seen.start,
                    Form.PARTIAL if is_cut else Form.FULL,
                )
                found.append(block)
    return tuple(found)


def _of_one_document(queries: range, keys: range, begins: Sequence[int] | None) -> tuple[range, range]:
    """Return those of the document that reaches from earlier keys into the queries, which then see all of the keys."""
    if begins is None:
        return queries, keys
    following = bisect_right(begins, queries.start)
    end = begins[following] if following < len(begins) else queries.stop
    return range(queries.start, min(end, queries.stop)), range(max(keys.start, begins[following - 1]), keys.stop)


def _shifted(places: range, distance: int) -> slice:
    return slice(places.start + distance, places.stop + distance)


def _rows(blocks: Sequence[ScoreBlock]) -> tuple[slice, ...]:
    """Return the rows that any block reads, in order."""
    merged: list[slice] = []
    for begin, end in sorted({(block.keys.start, block.keys.stop) for block in blocks}):
        if merged and begin <= merged[-1].stop:
            merged[-1] = slice(merged[-1].start, max(end, merged[-1].stop))
        else:
            merged.append(slice(begin, end))
    return tuple(merged)


def _moved(keys: slice, rows: Sequence[slice]) -> slice:
    """Return the place in a message of these rows of keys, which lie in one of its parts."""
    first = 0
    for part in rows:
        if part.start <= keys.start < part.stop:
            return slice(keys.start - part.start + first, keys.stop - part.start + first)
        first += part.stop - part.start
    raise AssertionError(f"rows {keys} are in no part of the message: {rows}")


def _joined(blocks: tuple[ScoreBlock, ...]) -> tuple[ScoreBlock, ...]:
    """Return the same as few blocks: queries that see the same keys, and keys that the same queries see."""
    for one, another in pairwise(blocks):
        rest = tuple(block for block in blocks if block not in (one, another))
        if one.keys == another.keys and one.queries.stop == another.queries.start:
            return _joined((replace(one, queries=slice(one.queries.start, another.queries.stop)), *rest))
        if one.queries == another.queries and one.keys.stop == another.keys.start:
            return _joined((replace(one, keys=slice(one.keys.start, another.keys.stop)), *rest))
    return blocks
