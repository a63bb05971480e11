"""Files consolidated.00.pth, 01 and so on: each holds what one of Meta's model-parallel ranks has of every tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_files import StoredTensor, open_bin, some
from megatron.weights.meta.params import WEIGHTS

_FILE = re.compile(r"consolidated\.(\d+)\.pth")


class Shards:
    """The tensors of all ranks, by Meta's names; every rank has all of them."""

    def __init__(self, folder: Path, files: ForeignFiles) -> None:
        """Raises CheckpointError for a missing or damaged file, and ranks that hold tensors of different names."""
        self.folder, self.files = folder, files
        self.paths = _numbered(folder)
        self._ranks = [open_bin(path, files) for path in self.paths]
        self.names = list(self._ranks[0])
        for path, rank in zip(self.paths, self._ranks, strict=True):
            apart = sorted(rank.keys() ^ self._ranks[0].keys())
            if apart:
                raise CheckpointError(
                    f"{path} and {self.paths[0].name} do not hold the same tensors ({some(apart)}): files of two "
                    "models; copy the folder again"
                )

    def vocab_size(self, width: int) -> int:
        """Return the rows of the word embedding, which Llama 1 and 2 cut by columns, Llama 3 by rows."""
        for rank in self._ranks:
            shape = rank["tok_embeddings.weight"].shape if "tok_embeddings.weight" in rank else ()
            if len(shape) == 2:
                return shape[0] * len(self._ranks) if shape[1] == width else shape[0]
        raise CheckpointError(f"{self.paths[0]} lacks tok_embeddings.weight; copy it again from its source")

    def whole(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        """Return a tensor of all ranks; None: their parts do not make one of this shape."""
        parts = [rank[name] for rank in self._ranks]
        first, count = parts[0], len(parts)
        if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
            return None
        # by the shapes alone, which leave no choice: releases differ in how they cut the vocabulary
        if first.shape == shape:
            rows = partial(_of_copies, name, parts)
        elif (first.shape[0] * count, *first.shape[1:]) == shape:
            rows = partial(_of_rows, parts)
        elif len(shape) == 2 and (first.shape[0], first.shape[1] * count) == shape:
            rows = partial(_of_columns, parts)
        else:
            return None
        return StoredTensor(first.file, shape, first.dtype, rows)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shape of each rank's part."""
        return [rank[name].shape for rank in self._ranks]


def open_shards(folder: Path) -> Shards:
    """Raises CheckpointError."""
    return Shards(folder, ForeignFiles())


def _numbered(folder: Path) -> list[Path]:
    """Return the files in the order of their ranks. Raises CheckpointError where one is missing."""
    by_number: dict[int, Path] = {}
    for path in folder.glob(WEIGHTS):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path} is no file of a rank (consolidated.00.pth); keep those of one model")
        other = by_number.setdefault(int(match[1]), path)
        if other != path:
            raise CheckpointError(f"{path} and {other.name} are of one rank; keep those of one model")
    for expected, number in enumerate(sorted(by_number)):
        if number != expected:
            raise CheckpointError(f"{folder} lacks consolidated.{expected:02}.pth; copy the whole folder")
    return [by_number[number] for number in sorted(by_number)]


def _of_copies(name: str, parts: Sequence[StoredTensor], first: int, end: int) -> Tensor:
    rows = parts[0].rows(first, end)
    for part in parts[1:]:
        if not torch.equal(part.rows(first, end), rows):
            raise CheckpointError(
                f"{name} in {part.file} is not that of {parts[0].file.name}, of which it is a copy: files of two "
                "models; copy the folder again"
            )
    return rows


def _of_rows(parts: Sequence[StoredTensor], first: int, end: int) -> Tensor:
    height = parts[0].shape[0]
    stretches = []
    for number in range(first // height, -(-end // height)):
        begin = number * height
        stretches.append(parts[number].rows(max(first - begin, 0), min(end - begin, height)))
    if not stretches:  # no row is wanted
        return parts[0].rows(0, 0)
    return stretches[0] if len(stretches) == 1 else torch.cat(stretches)


def _of_columns(parts: Sequence[StoredTensor], first: int, end: int) -> Tensor:
    return torch.cat([part.rows(first, end) for part in parts], dim=1)


def whole_tensors(
    shards: Shards, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], where: Path
) -> dict[str, StoredTensor]:
    """Return the tensors of all ranks by transformers' names. Raises CheckpointError with all that are of other shapes.

    `names`: Meta's by transformers'. `shapes`: those that `where` makes of the model.
    """
    tensors, wrong = {}, []
    for name, shape in shapes.items():
        tensor = shards.whole(names[name], shape)
        if tensor is None or not tensor.dtype.is_floating_point:
            parts = " and ".join(sorted({str(list(part)) for part in shards.shapes(names[name])}))
            wrong.append(f"{names[name]} {parts} in {len(shards.paths)} files, not {list(shape)} in all")
            continue
        tensors[name] = tensor
    if wrong:
        raise CheckpointError(f"{shards.folder} does not hold the model of {where.name}: {some(wrong)}; copy it again")
    return tensors
