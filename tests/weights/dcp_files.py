"""Tensors in chunks as several ranks hold them, written by torch.distributed.checkpoint in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunked(torch.Tensor):
    """A tensor, cut at these rows, columns and so on; torch calls the methods, as DTensor's."""

    plain: torch.Tensor
    boxes: list[tuple[tuple[int, int], ...]]
    # operations give plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(tensor: torch.Tensor, *cuts: Sequence[int]) -> Chunked:
        made = tensor.as_subclass(Chunked)
        made.plain = tensor
        shape = itertools.zip_longest(cuts, tensor.shape, fillvalue=())
        made.boxes = list(itertools.product(*(itertools.pairwise([0, *cut, size]) for cut, size in shape)))
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(begin for begin, _ in box), torch.Size(end - begin for begin, end in box))
            for box in self.boxes
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.plain)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.plain.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        box = next(box for box in self.boxes if torch.Size(begin for begin, _ in box) == index.offset)
        return self.plain[tuple(slice(*each) for each in box)]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "rows": drawn(7, 5).bfloat16(),
        "columns": drawn(6, 9),
        "grid": drawn(8, 6).half(),
        "vector": drawn(11),
        "whole": drawn(3, 4),
        "stack": drawn(4, 3, 5),
        "transposed": drawn(5, 4).t(),
        "number": torch.tensor(3.5),
        "steps": torch.tensor([3, 4]),
    }


CUTS: dict[str, tuple[Sequence[int], ...]] = {
    "rows": ([4],),
    "columns": ([], [3, 6]),
    "grid": ([4], [3]),
    "vector": ([3, 6, 9],),
    # one layer a chunk, as ranks of a pipeline have them, and each in columns
    "stack": ([1, 2, 3], [], [3]),
    "transposed": ([2],),
}


def save(folder: Path) -> None:
    """Save `tensors`, in four files, and an object."""
    state: dict[str, Any] = {"progress": {"step": 7, "seen": [1.5, "text"], "mean": torch.ones(2)}}
    for name, tensor in tensors().items():
        state[name] = Chunked.of(tensor, *CUTS[name]) if name in CUTS else tensor
    writer = checkpoint.FileSystemWriter(folder, thread_count=4)
    checkpoint.save(state, storage_writer=writer, no_dist=True)
