"""A Hugging Face folder as what a run starts from: each rank reads the rows it needs, on any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import holds_checkpoints
from megatron.checkpoint.slices import Region, copy_overlap, regions
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.weights.folder_files import is_model_folder
from megatron.weights.huggingface import CHUNK_BYTES, ImportedModel, MappedTensor, NameMap, import_huggingface
from megatron.weights.huggingface_config import other_model
from megatron.weights.huggingface_files import StoredTensor


def is_huggingface(folder: Path) -> bool:
    """Return True if the folder holds a model of transformers. Raises CheckpointError where our checkpoints do too."""
    if not is_model_folder(folder):
        return False
    if holds_checkpoints(folder):
        raise CheckpointError(
            f"{folder} holds config.json (Hugging Face) beside checkpoints of a run; keep one of them"
        )
    return True


class MappedWeights:
    """Weights in a foreign folder, read as `reader.Checkpoint` is (`state.Readable`), by the map of their names."""

    kinds: tuple[str, ...] = ("weight",)

    def __init__(self, folder: Path, mapped: NameMap, stored: Mapping[str, StoredTensor]) -> None:
        self.folder, self._map, self._stored = folder, mapped, stored

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor:
        """Flat float32 [numel] of a local tensor, as `reader.Checkpoint.read` gives it. Padding is zero.

        Reads the rows of theirs that it takes numbers from, and of these whole rows: of a matrix that tensor-parallel
        ranks cut by columns, all.
        """
        if name not in self._map.parts or kind not in self.kinds:
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}: it is of another model")
        target = torch.zeros(numel)
        rows_first = shard.dim != 1  # else the matrix of `regions` is the tensor itself
        inner = math.prod(shard.shape[1:])
        for wanted in regions(shard, tensor_rank, tensor_size, start, numel):
            rows, columns = (wanted.row_start, wanted.row_stop), (wanted.column_start, wanted.column_stop)
            if rows_first:
                rows, columns = (columns[0] // inner, -(-columns[1] // inner)), (0, inner)
            for begin, window in self._windows(name, rows, columns):
                count, width = window.shape
                held = Region(begin, begin + count, *columns, 0, width)
                if rows_first:
                    held = Region(0, 1, begin * inner, (begin + count) * inner, 0, count * inner)
                copy_overlap(window.flatten(), [held], target, [wanted])
        return target

    def _windows(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """(first row, float32 [rows, columns]): that rectangle of our full tensor as a matrix, some rows at a time."""
        end = 0
        for part in self._map.parts[name]:
            end = part.begin + part.length
            first, last = max(rows[0], part.begin) - part.begin, min(rows[1], end) - part.begin
            for begin, window in self._of_part(part, first, last, columns) if first < last else ():
                yield part.begin + begin, window
        step = max(1, CHUNK_BYTES // (4 * (columns[1] - columns[0])))
        for begin in range(max(rows[0], end), rows[1], step):  # tokens that the folder does not have
            count = min(begin + step, rows[1]) - begin
            yield begin, self._mean(name)[columns[0] : columns[1]].expand(count, -1)

    def _of_part(
        self, part: MappedTensor, first: int, last: int, columns: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows [first, last) of what one tensor of theirs is in ours."""
        stored = self._stored[part.name]
        if part.transposed:
            step = max(1, CHUNK_BYTES // (4 * part.shape[1]))
            window = torch.empty(last - first, columns[1] - columns[0])
            for begin in range(*columns, step):
                end = min(begin + step, columns[1])
                window[:, begin - columns[0] : end - columns[0]] = stored.rows(begin, end)[:, first:last].t()
            yield first, window
            return
        step = max(1, CHUNK_BYTES // (4 * math.prod(part.shape[1:])))
        head_size = 0 if part.num_heads is None else part.length // (3 * part.num_heads)
        begin = first
        while begin < last:
            end, theirs = min(begin + step, last), begin
            if part.num_heads is not None:
                piece, row = divmod(begin, part.length // 3)
                head, row = divmod(row, head_size)
                end, theirs = min(end, begin + head_size - row), (3 * head + piece) * head_size + row
            found = stored.rows(theirs, theirs + end - begin).float().view(end - begin, -1)
            yield begin, found[:, columns[0] : columns[1]]
            begin = end

    def _mean(self, name: str) -> Tensor:
        """Return the row of a token that the folder does not have."""
        raise AssertionError(f"{self.folder} has every row of {name}")


class HuggingFaceStart(MappedWeights):
    """The weights of a folder of transformers.

    Where the run has a larger vocabulary, the rows that the folder lacks start as the mean of those it has: of the word
    embedding, and of an output projection of its own. Computed in float64, in the order of the rows, so that it is the
    same on every layout. Raises CheckpointError, naming each option in which the run's model is another.
    """

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        """`config`: that of the run. None: the folder's own."""
        self._model: ImportedModel = import_huggingface(folder, None if config is None else config.model.architecture)
        if config is not None and (fault := other_model(folder, config, self._model.config)) is not None:
            raise CheckpointError(fault)
        super().__init__(folder, self._model.map, self._model.stored)
        self._means: dict[str, Tensor] = {}

    @property
    def parts(self) -> Mapping[str, Sequence[MappedTensor]]:
        """Its tensors by our names."""
        return self._map.parts

    @property
    def config(self) -> Config:
        """The model that the folder describes, and the precision that holds each of its weights exactly."""
        return self._model.config

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata as in a run's checkpoint, without progress and optimizer."""
        return {"source": self._model.source}

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Compare the checksums of this share of the .bin files; safetensors carry none. Raises CheckpointError."""
        self._model.verify(share)

    def _mean(self, name: str) -> Tensor:
        """Return the mean of all rows that the folder has of a tensor: float32 [columns]."""
        if name not in self._means:
            (part,) = self._model.map.parts[name]
            step, total = max(1, CHUNK_BYTES // (8 * part.shape[1])), torch.zeros(part.shape[1], dtype=torch.float64)
            for begin in range(0, part.length, step):
                end = min(begin + step, part.length)
                total += self._model.stored[part.name].rows(begin, end).double().sum(dim=0)
            self._means[name] = (total / part.length).float()
        return self._means[name]
