"""The model that a checkpoint of adapters and its base make together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.interop.base_identity import BaseIdentity, differing
from megatron.interop.huggingface import parameters_of
from megatron.interop.native import count, source_of
from megatron.interop.peft_export import native_adapter
from megatron.parallel.shards import Shard
from megatron.weights.adapter_start import AdapterStart, open_base
from megatron.weights.merging import AdapterMerge, merged_config


class MergedModel:
    """Weights of a base with a checkpoint's adapters merged, one tensor at a time.

    A base that the run held in 4 bits is merged as its folder holds it. Raises CheckpointError if the base is not
    where the checkpoint says, or is another one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = native_adapter(checkpoint).config
        self._record = checkpoint.metadata["base"]
        folder = self._record.get("folder")
        base = None if folder is None else open_base(Path(folder), self._record, config, checkpoint)
        self._start = AdapterStart(config, base, checkpoint, self._record)
        self._expected = BaseIdentity.from_json(self._record.get("identity"), checkpoint.folder)
        self._merge = AdapterMerge(config, self._read)
        self._shards = parameters_of(merged_config(config))

    @property
    def num_parameters(self) -> int:
        return count(self._shards)

    @property
    def source(self) -> dict[str, Any] | None:
        """Hugging Face's config.json and generation_config.json, where the base came from there."""
        return source_of(self._start.metadata)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 tensor), each parameter of the merged model once."""
        for name in self._shards:
            held = self._merge.held(name)
            shard = dataclasses.replace(self._merge.shards[held], padding=0)
            weight = self._read(held, shard)
            if self._expected is not None:
                self._check(held, shard, weight, self._expected)
            yield name, self._merge.merged(name, weight)

    def _check(self, held: str, shard: Shard, weight: Tensor, expected: BaseIdentity) -> None:
        """Raise CheckpointError unless a tensor of the base is what it was when the adapters were trained."""
        sums = self._start.new_sums()
        sums.add(held, shard, 0, 1, 0, weight)
        if wrong := differing(expected, BaseIdentity(sums.totals))[0]:
            raise CheckpointError(
                f"{self._start.base_place} has another {wrong[0]} than when the adapters were trained; restore the "
                "folder of their base"
            )

    def _read(self, name: str, shard: Shard, tensor_rank: int = 0, tensor_size: int = 1) -> Tensor:
        """Return a whole tensor: the only rank is the first."""
        values = self._start.read(name, "weight", shard, tensor_rank, tensor_size, 0, math.prod(shard.shape))
        return values.view(shard.shape)
