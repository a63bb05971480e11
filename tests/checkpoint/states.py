"""A toy model in every way of being sharded, its fragments on any layout, and saves of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format import Fragment
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.saver import Saver
from megatron.checkpoint.writer import write_checkpoint
from megatron.parallel.shards import Shard

KINDS = ("weight", "exp_avg", "exp_avg_sq")

# each way of being cut: replicated, rows in pieces, columns, padded vocabulary, a vector in pieces
MODEL = {
    "0.norm.weight": Shard((12,)),
    "1.qkv.weight": Shard((48, 12), dim=0, pieces=(24, 12, 12)),
    "1.qkv.bias": Shard((48,), dim=0, pieces=(24, 12, 12)),
    "1.out.weight": Shard((12, 24), dim=1, pieces=(24,)),
    "10.rows.weight": Shard((3, 12, 2), dim=1, pieces=(12,)),
    "tied_modules.word_embedding.weight": Shard((50, 12), dim=0, pieces=(50,)),
}


def padded(name: str, size: int) -> Shard:
    """Shard of a run on `size` tensor-parallel ranks, its vocabulary padded to a multiple of 4 * size."""
    shard = MODEL[name]
    return replace(shard, padding=-50 % (4 * size)) if "embedding" in name else shard


def full(name: str, kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + KINDS.index(kind) * 100 + list(MODEL).index(name))
    return torch.randn(MODEL[name].shape, generator=generator)


def local(name: str, kind: str, rank: int, size: int, seed: int = 0) -> torch.Tensor:
    return padded(name, size).take(full(name, kind, seed), rank, size).flatten()


def fragments_of(rank: int, tensor_size: int, data_size: int, seed: int = 0) -> Iterator[Fragment]:
    """Fragments of a rank where ZeRO cuts the concatenated parameters over the data-parallel ranks."""
    tensor_rank, data_rank = rank % tensor_size, rank // tensor_size
    numels = {name: math.prod(padded(name, tensor_size).local_shape(tensor_size)) for name in MODEL}
    share = -(-sum(numels.values()) // data_size)
    position = 0
    for name, numel in numels.items():
        start, stop = (min(max(edge * share - position, 0), numel) for edge in (data_rank, data_rank + 1))
        position += numel
        if start == stop:
            continue
        for kind in KINDS:
            if MODEL[name].dim is None:
                if tensor_rank == 0:
                    yield Fragment(name, kind, MODEL[name], 0, 1, start, local(name, kind, 0, 1, seed)[start:stop])
            else:
                tensor = local(name, kind, tensor_rank, tensor_size, seed)[start:stop]
                shard = padded(name, tensor_size)
                yield Fragment(name, kind, shard, tensor_rank, tensor_size, start, tensor, "bfloat16")


def saver(folder: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Saver:
    defaults = {"asynchronous": False, "keep_last": None, "retain_interval": None, "timeout_s": 20.0}
    return Saver(folder, rank=rank, world_size=world_size, **(defaults | options))


def save_by_threads(
    folder: Path, tag: str, tensor_size: int, data_size: int, *, seed: int = 0, token: str = "token", **options: Any
) -> list[Saver]:
    """Each rank a thread, as they agree by nothing but files."""
    savers = [saver(folder, rank, tensor_size * data_size, **options) for rank in range(tensor_size * data_size)]

    def run(rank: int) -> None:
        owned = fragments_of(rank, tensor_size, data_size, seed)
        savers[rank].save(tag, token, owned, {"progress": {"iteration": seed}})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(savers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in savers:
        each.wait()
    return savers


def write(folder: Path, tag: str, seed: int = 0) -> Path:
    return write_checkpoint(folder, tag, fragments_of(0, 1, 1, seed), {"progress": {"iteration": seed}})


def assert_holds(checkpoint: Checkpoint, seed: int = 0) -> None:
    checkpoint.verify()
    assert checkpoint.metadata["progress"] == {"iteration": seed}
    for name in MODEL:
        for kind in KINDS:
            assert torch.equal(checkpoint.read_full(name, kind), full(name, kind, seed)), (name, kind)


def newest(folder: Path, **options: Any) -> Checkpoint:
    found = newest_checkpoint(folder, **options)
    assert found is not None
    return found
