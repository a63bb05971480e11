"""Shares of an input for several machines, whose datasets merged in order equal the dataset of the whole."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.indexed import DataError
from megatron.data.json_array import holds_array
from megatron.data.sources import InputListing, SourceFile


@dataclass(frozen=True)
class InputShard:
    """Share `number`, from 1, of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> InputShard:
        """Return the shard that `2/8` names. Raises ValueError."""
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is not a shard; give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
        return cls(int(found[1]), int(found[2]))


def shard_of(listing: InputListing, shard: InputShard) -> InputListing:
    """Return the files and parts of files of a shard: consecutive ones, of about as many bytes as any other's.

    Plain JSONL is cut between lines; any other file belongs to the shard of its middle byte. Raises DataError for a
    size that is unknown, and if one of the shards, of whatever number, would have no file.
    """
    unknown = [source.name for source in listing.sources if source.num_bytes is None]
    if unknown:
        raise DataError(
            f"--shard {shard}: the size of {unknown[0]} is unknown, so it cannot be divided; download it, or leave out "
            "--shard"
        )
    pieces = _pieces(listing.sources, shard.count)
    num_filled = len({number for _, number in pieces})
    if num_filled < shard.count:
        pieces = _whole_files(listing.sources, shard.count)
    if not pieces:
        raise DataError(
            f"--shard {shard}: {len(listing.sources)} files give work for {num_filled} of {shard.count} "
            "shards, since only plain JSONL is cut within a file; use fewer shards, or more files"
        )
    return InputListing([source for source, number in pieces if number == shard.number - 1], listing.passed_over)


def _pieces(sources: Sequence[SourceFile], count: int) -> list[tuple[SourceFile, int]]:
    """Return the files, cut where that can be, each with the number of its shard, from 0."""
    total = sum(source.num_bytes or 0 for source in sources)
    bounds = [total * number // count for number in range(count + 1)]
    pieces = []
    start = 0
    for source in sources:
        end = start + (source.num_bytes or 0)
        if _can_be_cut(source):
            numbers = range(bisect_right(bounds, start) - 1, bisect_right(bounds, end - 1))
        else:
            number = min(count, bisect_right(bounds, start + (end - start) // 2)) - 1
            numbers = range(number, number + 1)
        for number in numbers:
            part = max(start, bounds[number]) - start, min(end, bounds[number + 1]) - start
            pieces.append((source if len(numbers) == 1 else source._replace(part=part), number))
        start = end
    return pieces


def _whole_files(sources: Sequence[SourceFile], count: int) -> list[tuple[SourceFile, int]]:
    """Return the files, each with the number of its shard, so that every shard has one; [] if they are too few."""
    left = sum(1 for source in sources if source.num_bytes)
    if left < count:
        return []
    wanted = {source.name: number for source, number in _pieces([s._replace(kind="text") for s in sources], count)}
    pieces = []
    last = -1
    for source in sources:
        if source.num_bytes:
            last = max(min(wanted[source.name], last + 1), last, count - left)
            left -= 1
        pieces.append((source, max(0, last)))
    return pieces


def _can_be_cut(source: SourceFile) -> bool:
    if source.kind != "jsonl" or source.compression or source.transport == "pipe" or not source.num_bytes:
        return False
    return not source.name.split("?")[0].lower().endswith(".json") or not holds_array(source)
