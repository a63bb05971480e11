"""Shares of an input for several machines, whose datasets merged in order equal the dataset of the whole."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.index.indexed import DataError
from megatron.data.read.json_array import holds_array
from megatron.data.read.sources import SPLIT_NAMES, InputListing, PassedOver, SourceFile


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
        # [0-9], since \d takes digits of other scripts too
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"{text!r} is not a shard; give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
        return cls(int(match[1]), int(match[2]))


def shard_of(listing: InputListing, shard: InputShard) -> InputListing:
    """Return the files and parts of files of a shard: consecutive ones, of about as many bytes as any other's.

    Plain JSONL is cut between lines; any other file belongs to the shard of its middle byte. Raises DataError for a
    size that is unknown, and if one of the shards, of whatever number, would have no file.
    """
    # machines must agree on the cuts, so none may guess
    unknown = [source.name for source in listing.sources if source.num_bytes is None]
    if unknown:
        raise DataError(
            f"--shard {shard}: the size of {unknown[0]} is unknown, so it cannot be divided; download it, or leave out "
            "--shard"
        )
    pieces = _pieces(listing.sources, shard.count)
    # a large file that cannot be cut may span several shards: then whole files are dealt out
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
    sizes = [source.num_bytes or 0 for source in sources]
    # equal shares of the bytes: to count documents, every machine would have to read all of them
    bounds = [sum(sizes) * number // count for number in range(count + 1)]
    pieces = []
    start = 0
    for source, size in zip(sources, sizes, strict=True):
        end = start + size
        first = bisect_right(bounds, start) - 1
        last = bisect_right(bounds, end - 1) - 1
        # a file of 0 bytes at the end lies behind the last byte of the last shard
        middle = min(count, bisect_right(bounds, start + size // 2)) - 1
        if not _can_be_cut(source):
            pieces.append((source, middle))
        elif first == last:
            pieces.append((source, first))
        else:
            for number in range(first, last + 1):
                # any byte: the reader begins at the next line
                part = max(start, bounds[number]) - start, min(end, bounds[number + 1]) - start
                pieces.append((source._replace(part=part), number))
        start = end
    return pieces


def _whole_files(sources: Sequence[SourceFile], count: int) -> list[tuple[SourceFile, int]]:
    """Return the files, each with the number of its shard, so that every shard has one; [] if they are too few."""
    left = sum(1 for source in sources if source.num_bytes)
    if left < count:
        return []
    uncut = _pieces([source._replace(kind="text") for source in sources], count)
    pieces = []
    last = -1
    for source, (_, wanted) in zip(sources, uncut, strict=True):
        if source.num_bytes:
            # in order, no shard left out, and none without a file at the end
            last = max(min(wanted, last + 1), last, count - left)
            left -= 1
        pieces.append((source, max(0, last)))
    return pieces


def _can_be_cut(source: SourceFile) -> bool:
    if source.kind != "jsonl" or source.compression or source.transport == "pipe" or not source.num_bytes:
        return False
    is_json = source.name.split("?")[0].lower().endswith(".json")
    return not (is_json and holds_array(source))


def of_split(listing: InputListing, split: str | None, inputs: Sequence[str]) -> InputListing:
    """Return the files of a split; without one, all files.

    Raises DataError if there are none, and without a split if a folder of `inputs` holds several.
    """
    if split is None:
        _check_one_split(listing, inputs)
        return listing
    wanted = SPLIT_NAMES.get(split, split)
    chosen: list[SourceFile] = []
    passed_over = list(listing.passed_over)
    known: set[str] = set()
    for source in listing.sources:
        splits = splits_in(source.relative_name, split)
        known |= splits
        if wanted in splits:
            chosen.append(source)
        else:
            passed_over.append(PassedOver(source.name, "another split"))
    if not chosen:
        names = ", ".join(sorted(known)) or "no name of a split"
        raise DataError(f"--split {split}: no file of --input has it in its name; they have {names}")
    return InputListing(chosen, passed_over)


def _check_one_split(listing: InputListing, inputs: Sequence[str]) -> None:
    """Raise DataError if a folder holds several splits; files that are named are meant."""
    known: set[str] = set()
    for source in listing.sources:
        if source.name not in inputs:
            known |= splits_in(source.relative_name, None)
    if "train" in known and len(known) > 1:
        raise DataError(
            f"--input holds the splits {', '.join(sorted(known))}, which would be read as one; choose one with "
            "--split, or name the files"
        )


def splits_in(relative_name: str, split: str | None) -> set[str]:
    """Return the splits that a file is of: those in its name, else those in the innermost folder with one."""
    for part in reversed(relative_name.split("/")):
        words = re.split(r"[^a-z0-9]+", part.lower())
        names = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
        if split is not None and re.search(rf"(?:^|[-._ ]){re.escape(split)}(?:[-._ ]|$)", part):
            names.add(SPLIT_NAMES.get(split, split))
        if names:
            return names
    return set()
