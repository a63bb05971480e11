"""A Llama as Meta publishes it, as a source of weights.

params.json describes it; consolidated.00.pth, 01 and so on each hold what one model-parallel rank has of every tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import NameMap, name_map
from megatron.weights.huggingface_config import OUTPUT, config_of, other_model
from megatron.weights.huggingface_files import DTYPES, Precision, StoredTensor, open_bin, some
from megatron.weights.huggingface_source import MappedSource, are_equal
from megatron.weights.meta.names import EMBEDDING, in_halves, known_names, wrong_names
from megatron.weights.meta.params import Params, rank_files


class RankFiles:
    """The tensors of all ranks, by Meta's names; every rank has all of them."""

    def __init__(self, folder: Path, files: ForeignFiles) -> None:
        """Raises CheckpointError for a missing or damaged file, and ranks that hold tensors of different names."""
        self.folder, self.files = folder, files
        self.paths = rank_files(folder)
        self._ranks = [open_bin(path, files) for path in self.paths]
        self.names = list(self._ranks[0])
        for path, rank in zip(self.paths, self._ranks, strict=True):
            apart = sorted(rank.keys() ^ self._ranks[0].keys())
            if apart:
                raise CheckpointError(
                    f"{path} and {self.paths[0].name} do not hold the same tensors ({some(apart)}): files of two "
                    "models; copy the folder again"
                )

    def whole(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        """Return a tensor of all ranks; None: their parts do not make one of this shape."""
        parts = [rank[name] for rank in self._ranks]
        first, count = parts[0], len(parts)
        # ranks of equal parts alone: where one differs, no file is of the others' model
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


class MetaSource(MappedSource):
    """A folder of Meta's, checked whole as it is opened: params.json, every file, name and shape of each tensor."""

    format, title = "meta", "Meta"
    config: Config
    """The model, its longest sequence, and the precision that holds each weight exactly; all else at its default."""

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        """Raises CheckpointError naming the file, field or tensor at fault, or options in which `config` differs."""
        params, shards = Params(folder), RankFiles(folder, ForeignFiles())
        # a number in JSON may be any: before a map of as many layers as params.json pretends is built
        if params.num_layers > len(shards.names):
            raise CheckpointError(f"{params.path} has {params.num_layers} layers, but {folder} lacks most of them")
        theirs = params.config_json()
        mapped = name_map(config_of(theirs, params.path))
        stored = _checked_tensors(shards, params, mapped, theirs)
        # Meta's files are of one dtype; others that write this format may mix them
        dtypes = {tensor.dtype for tensor in stored.values()}
        precision: Precision = next((name for name, dtype in DTYPES.items() if dtypes == {dtype}), "fp32")
        described = config_of(theirs, params.path, precision)
        if config is not None and (fault := other_model(folder, config, described)) is not None:
            raise CheckpointError(fault)
        # as of a folder of transformers: an export keeps it, with the ids of Meta's special tokens
        source = {"format": "huggingface", "config": theirs, "generation_config": None}
        super().__init__(folder, mapped, stored, None, config=described, metadata={"source": source})
        self._shards = shards

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._shards.files.verify(self._shards.paths, share)


def _checked_tensors(
    shards: RankFiles, params: Params, mapped: NameMap, theirs: dict[str, Any]
) -> dict[str, StoredTensor]:
    """Return the tensors by transformers' names. Raises CheckpointError with all that are not as they must be."""
    shapes = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
    names, strange = known_names(shards.names)
    is_tied = theirs["tie_word_embeddings"]
    # the files of a model that ties them hold a copy all the same
    if is_tied and OUTPUT in names:
        shapes[OUTPUT] = shapes[EMBEDDING]
    faults = list(wrong_names(shapes.keys(), {**names, **dict.fromkeys(strange, "")}))
    if faults:
        raise CheckpointError(
            f"{shards.folder} is not the whole Llama of its {params.path.name}: {'; '.join(faults)}; copy the whole "
            "folder"
        )
    stored = in_halves(_whole_tensors(shards, names, shapes, params.path), params.num_heads, params.num_groups)
    if is_tied and OUTPUT in stored and not are_equal(stored.pop(OUTPUT), stored[EMBEDDING]):
        raise CheckpointError(
            f"{shards.folder} has another output.weight than tok_embeddings.weight, but {params.path.name} has the "
            "sizes of a Llama 3.2, which ties the two; give that model in transformers' format, with its config.json"
        )
    return stored


def _of_copies(name: str, parts: Sequence[StoredTensor], first: int, end: int) -> Tensor:
    # norms are on every rank: the one tensor by which files of two models of the same sizes show
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


def _whole_tensors(
    shards: RankFiles, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], where: Path
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
