"""Identity of a base model: a sum over each tensor of its Hugging Face form, in which every number has its own weight.

Number w at (row, column) adds bits(w) * R(row) * C(column) modulo 2^64, where bits are those of float32 read as an
integer, and R and C are fixed pseudo-random numbers. So the parts that ranks read add up to the same sum on any layout,
and numbers in another order give another one. A tensor of three or more dimensions is a matrix of its first one.

A folder of adapters holds the identity of its base in base_model.json; a run's checkpoint holds it in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.checkpoint.source import Slice, WeightSource, bands, regions
from megatron.hub.names import snapshot_of
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.runtime.files import write_durably
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface import MappedTensor, name_map, parameters_of
from megatron.weights.huggingface_files import StoredTensor

FILE = "base_model.json"
ALGORITHM = "row-column-sum-1"
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
"""A sum is recorded of the numbers as they are, and where these have 32 bits, rounded to what a copy may be held in."""
NUMEL_AT_ONCE = 1 << 16
SHOWN = 4
"""Tensors that a message names."""
MASK = 2**64 - 1

Parts = Mapping[str, Sequence[MappedTensor]]
"""By our names of parameters: the tensors of the Hugging Face form, or of ours, and their places."""


def weights_of(numbers: Tensor, seed: int) -> Tensor:
    """Return the odd pseudo-random weight of each row or column number, int64 (splitmix64, Steele et al. 2014)."""
    # int64 arithmetic wraps modulo 2^64; a right shift copies the sign, so its upper bits are masked
    state = (numbers + 1) * -7046029254386353131 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * factor
    # odd: products of odd numbers have inverses modulo 2^64, so that no change of one number gives the same sum
    return (state ^ (state >> 31 & (1 << 33) - 1)) | 1


ROW_SEED, COLUMN_SEED = 1, 2  # different, so that a square matrix and its transposed have different sums


def matrix_sums(values: Tensor, rows: Tensor, columns: Tensor, *, rounded: bool = True) -> list[int]:
    """Return the sums of float32 [rows, columns], whose numbers of rows and columns in the whole tensor are given.

    One for each of PRECISIONS, or the first alone.
    """
    totals = [0] * (len(PRECISIONS) if rounded else 1)
    of_rows, of_columns = weights_of(rows, ROW_SEED), weights_of(columns, COLUMN_SEED)
    step = max(1, NUMEL_AT_ONCE // max(1, len(columns)))
    for first in range(0, len(rows), step):
        # contiguous, since float32 is read as int32 in place; a block may be transposed
        block, weights = values[first : first + step].contiguous(), of_rows[first : first + step]
        exact = _block_sum(block, weights, of_columns)
        totals[0] += exact
        for index, precision in enumerate(PRECISIONS[1 : len(totals)], 1):
            held = block.to(precision).float()
            # as bits: NaN equals itself, and minus zero differs from zero
            if torch.equal(held.view(torch.int32), block.view(torch.int32)):
                totals[index] += exact  # most models were trained in 16 bits: the same sum, half the time
            else:
                totals[index] += _block_sum(held, weights, of_columns)
    return [total & MASK for total in totals]


def _block_sum(block: Tensor, of_rows: Tensor, of_columns: Tensor) -> int:
    # sum_r R(r) sum_c bits(r, c) C(c): one product for each number, and one for each row
    return int((torch.mv(block.view(torch.int32).long(), of_columns) * of_rows).sum())


class BaseSums:
    """Sums of the parts of a model that this rank has read."""

    def __init__(self, parts: Parts, *, rounded: bool = True) -> None:
        self._parts, self._rounded = parts, rounded
        self.totals: dict[str, list[int]] = {}

    def add(self, at: Slice, values: Tensor) -> None:
        """Add float32 numbers. Padding is left out."""
        for rows, columns, block in _rectangles(at, values.view(-1)):
            for part in self._parts[at.name]:
                first, end = max(rows[0], part.begin), min(rows[1], part.begin + part.length)
                if first < end:
                    self._add_part(part, torch.arange(first, end), columns, block[first - rows[0] : end - rows[0]])

    def _add_part(self, part: MappedTensor, rows: Tensor, columns: tuple[int, int], block: Tensor) -> None:
        # in the numbers of theirs, whatever our order: a base has one identity in both formats
        rows, across = rows - part.begin, torch.arange(*columns)
        if part.heads is not None:
            rows = part.row_by_head(rows)
        if part.transposed:
            block, rows, across = block.t(), across, rows
        sums = matrix_sums(block, rows, across, rounded=self._rounded)
        self.totals[part.name] = _added(self.totals.get(part.name), sums)


def _added(total: Sequence[int] | None, sums: Sequence[int]) -> list[int]:
    if total is None:
        return list(sums)
    return [(one + other) & MASK for one, other in zip(total, sums, strict=True)]


def _rectangles(at: Slice, values: Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int], Tensor]]:
    """Yield (rows, columns, float32 block) of the full tensor, a matrix of its first dimension."""
    shard = at.shard
    assert shard.dim in (None, 0, 1), f"{shard.shape} is cut along dimension {shard.dim}, not by rows or columns"
    inner = math.prod(shard.shape[1:])
    for region in regions(shard, at.tensor_rank, at.tensor_size, at.start, at.numel):
        rows, columns = (region.row_start, region.row_stop), (region.column_start, region.column_stop)
        size = (rows[1] - rows[0], columns[1] - columns[0])
        # as_strided counts from the beginning of the storage
        block = values.as_strided(size, (region.row_stride, 1), values.storage_offset() + region.offset)
        if shard.dim == 1:
            yield rows, columns, block
            continue
        for top, bottom, left, right in bands(*columns, inner):  # of the tensor as one row
            begin, height, width = top * inner + left - columns[0], bottom - top, right - left
            yield (top, bottom), (left, right), block[0, begin : begin + height * width].view(height, width)


def joined(totals: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of whole tensors from those of the parts that ranks have read."""
    whole: dict[str, list[int]] = {}
    for of_rank in totals:
        for name, sums in of_rank.items():
            whole[name] = _added(whole.get(name), sums)
    return whole


def parts_of_model(config: Config) -> Parts:
    """Return the tensors of a base's Hugging Face form by our names; of a model without one, our own."""
    try:
        return name_map(config).parts
    except CheckpointError:
        return own_parts(parameters_of(config))


def own_parts(shards: Mapping[str, Shard]) -> Parts:
    """Return our parameters as tensors of their own names."""
    return {name: (MappedTensor(name, shard.shape, 0, shard.shape[0]),) for name, shard in shards.items()}


def stored_sums(tensors: Mapping[str, StoredTensor]) -> dict[str, list[int]]:
    """Return the sums of whole tensors in files, in float32 alone, read by as many threads as torch has."""

    def of_rows(tensor: StoredTensor, first: int, end: int) -> int:
        values = tensor.rows(first, end).float().reshape(end - first, -1)
        return matrix_sums(values, torch.arange(first, end), torch.arange(values.shape[1]), rounded=False)[0]

    def pieces(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        step = max(1, 16 * NUMEL_AT_ONCE // max(1, math.prod(tensor.shape[1:])))
        return ((first, min(first + step, tensor.num_rows)) for first in range(0, tensor.num_rows, step))

    # a thread of torch's own for each piece: reading one overlaps with summing another
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=partial(torch.set_num_threads, 1)) as pool:
        waiting = {
            name: [pool.submit(of_rows, tensor, *piece) for piece in pieces(tensor)] for name, tensor in tensors.items()
        }
        return {name: [sum(part.result() for part in parts) & MASK] for name, parts in waiting.items()}


@dataclass(frozen=True)
class BaseIdentity:
    """Sums of those tensors of a base that were read, and its name on the hub."""

    tensors: Mapping[str, Sequence[int]]
    """Sums by name; see PRECISIONS."""
    name: str | None = None
    revision: str | None = None

    @staticmethod
    def of_base(folder: Path | None, totals: Iterable[Mapping[str, Sequence[int]]]) -> BaseIdentity:
        """Return the identity of a base by the sums of all ranks. Its folder may be a snapshot of the hub's."""
        if folder is None:
            return BaseIdentity(joined(totals))
        snapshot = snapshot_of(folder)
        if snapshot is None:
            return BaseIdentity(joined(totals))
        return BaseIdentity(joined(totals), snapshot.name.repo, snapshot.name.revision)

    def label(self, names: Iterable[str]) -> str:
        """Return the name and a digest of these tensors, for messages."""
        # of the exact sums alone: the label of a base does not depend on what copies may be rounded to
        content = json.dumps([(name, self.tensors.get(name, [0])[0]) for name in sorted(names)])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        return digest if self.name is None else f"{self.name} ({digest})"

    def to_json(self) -> dict[str, Any]:
        texts = {name: " ".join(f"{value:016x}" for value in sums) for name, sums in sorted(self.tensors.items())}
        return {"algorithm": ALGORITHM, "name": self.name, "revision": self.revision, "tensors": texts}

    @staticmethod
    def from_json(content: object, place: Path) -> BaseIdentity | None:
        """Return what `to_json` gave; None: nothing, or of another algorithm. Raises CheckpointError if damaged."""
        # of another release, perhaps: that the base was not verified is said, but it is not refused
        if not isinstance(content, dict) or content.get("algorithm") != ALGORITHM:
            return None
        try:
            tensors = {name: [int(value, 16) for value in text.split()] for name, text in content["tensors"].items()}
            if not all(len(sums) in (1, len(PRECISIONS)) for sums in tensors.values()):
                raise ValueError("a sum is missing")
            return BaseIdentity(tensors, content["name"], content["revision"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{place} has a damaged identity of its base ({error}); copy it again") from None

    def changed_in(self, sums: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the tensors of which these sums are others."""
        return differing(self, BaseIdentity(sums))[0]

    def named_as(self, other: BaseIdentity | None) -> BaseIdentity:
        """Return this identity, with the other's name where it has none and all tensors of both are equal."""
        if other is None or self.name is not None or differing(other, self)[0]:
            return self
        return replace(self, name=other.name, revision=other.revision)


def differing(expected: BaseIdentity, found: BaseIdentity, *, is_whole: bool = False) -> tuple[list[str], set[str]]:
    """Return the tensors that are others, and the precisions to which those are rounded that are not the very numbers.

    `is_whole`: what `found` lacks is another too; otherwise tensors are compared that both have.
    """
    wrong, rounded = [], set()
    for name, sums in expected.tensors.items():
        if name not in found.tensors:
            if is_whole:
                wrong.append(name)
            continue
        exact = found.tensors[name][0]
        # against each recorded precision: the base may be held in 16 bits here, where the adapters saw 32
        if exact not in sums:
            wrong.append(name)
        elif exact != sums[0]:
            rounded.add(str(PRECISIONS[sums.index(exact)]).removeprefix("torch."))
    return wrong, rounded


def check_identity(
    adapters: Path,
    expected: BaseIdentity | None,
    base: str,
    found: BaseIdentity,
    *,
    option: str,
    allowed: bool,
    named: str | None = None,
    is_whole: bool = False,
) -> list[str]:
    """Return lines about the base of adapters: nothing, if it is the one that they belong to.

    Args:
        base: The base's folder, for messages.
        option: What gives the base.
        named: What the adapters call their base.
        allowed: Return a warning for another base. Otherwise it raises CheckpointError, naming both and the tensors.
    """
    if expected is None:
        its_base = "its base" if named is None else f"its base {named}"
        return [f"{adapters} does not hold the identity of {its_base}: whether {base} is that was not verified"]
    wrong, rounded = differing(expected, found, is_whole=is_whole)
    if not wrong:
        if not rounded:
            return []
        return [f"{base} is the base of {adapters}, rounded to {' and '.join(sorted(rounded))}"]
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    names = set(expected.tensors)
    if not is_whole:
        names &= found.tensors.keys()
    fault = (
        f"{adapters} holds adapters of another base model, {expected.label(names)}, than {base}, {found.label(names)}: "
        f"{len(wrong)} of {len(names)} tensors differ: {', '.join(wrong[:SHOWN])}{more}"
    )
    if allowed:
        return [f"WARNING: {fault}; applied all the same (allow_other_base)"]
    raise CheckpointError(f"{fault}. Give the folder of their base as {option}, or pass --allow-other-base")


def write_identity(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a base's identity, as `to_json` gives it, into a folder of adapters."""
    write_durably(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def recorded_identity(adapters: WeightSource) -> BaseIdentity | None:
    """Return the identity of their base that adapters record, if they do. Raises CheckpointError."""
    base = adapters.metadata.get("base")
    if base is not None:
        return BaseIdentity.from_json(base.get("identity"), adapters.folder)
    return read_identity(adapters.folder)


def read_identity(folder: Path) -> BaseIdentity | None:
    """Return the identity of the base that is in a folder of PEFT, if it is. Raises CheckpointError."""
    if not os.path.lexists(folder / FILE):
        return None
    return BaseIdentity.from_json(read_json(own_file(folder, FILE)), folder / FILE)
