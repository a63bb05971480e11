"""Adapters merged into the weights of their base as these are read: scale * B A added to each.

The order of operations, and so every bit of a whole tensor in float32, is that of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.models.adapters import LowRank, VocabularyLowRank
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.block_sizes import Adapter
from megatron.parallel.low_rank import gain
from megatron.parallel.shards import Shard, declared_shards
from megatron.weights.adapter_start import base_config

EMBEDDING, OUTPUT, OF_EMBEDDING = "embedding.word.", "output.", "lora_embedding_"

ReadTensor = Callable[[str, Shard, int, int], Tensor]
"""(name, shard, tensor rank, tensor-parallel size): the local tensor, float32."""


def merged_config(config: Config) -> Config:
    """Return the config of the merged model. Adapters of a tied embedding are of one of its uses, so it is untied."""
    plain = base_config(config)
    layers = {layer.name: layer for layer in family_of(config).layers(config)}
    if OUTPUT[:-1] in layers or not layers[EMBEDDING[:-1]].methods:
        return plain
    return dataclasses.replace(plain, model=dataclasses.replace(plain.model, untie_embeddings_and_output_weights=True))


class _Update(NamedTuple):
    """An adapter, and the beginning and end of the names of its parameters."""

    begin: str
    end: str
    adapter: Adapter


class AdapterMerge:
    """Merge of the adapters of a config into the weights of one tensor-parallel rank."""

    def __init__(self, config: Config, read: ReadTensor, tensor_rank: int = 0, tensor_size: int = 1) -> None:
        """`read` returns a tensor of the base or of the adapters."""
        layers = family_of(config).layers(config)
        self.shards = declared_shards(layers)
        self._read, self._place, self._use_dora = read, (tensor_rank, tensor_size), config.lora.use_dora
        self._updates: dict[str, list[_Update]] = {}
        for layer in layers:
            for prefix, method in layer.methods.items():
                place = f"{layer.name}.{prefix}." if prefix else f"{layer.name}."
                if isinstance(method, LowRank):
                    found = [_Update(f"{place}lora_", each.suffix, each) for each in method.adapters]
                    self._updates[f"{place}weight"] = found
                if isinstance(method, VocabularyLowRank) and method.embedding:
                    self._updates[f"{EMBEDDING}weight"] = [_Update(f"{place}{OF_EMBEDDING}", "", method.embedding)]
                if isinstance(method, VocabularyLowRank) and method.output:
                    self._updates[f"{OUTPUT}weight"] = [_Update(f"{place}lora_", "", method.output)]

    def held(self, name: str) -> str:
        """Return the base's name of a parameter of the merged model, whose output may be untied."""
        return name if name in self.shards else f"{EMBEDDING}weight"

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a parameter of the merged model from the base's: local float32, changed in place if it can be."""
        updates, shard = self._updates.get(name, []), self.shards[self.held(name)]
        by_channel = [update.begin.endswith(OF_EMBEDDING) for update in updates]  # else norms are of rows
        is_cut = any(shard.dim == (0 if each else 1) for each in by_channel)
        if self._use_dora and is_cut and self._place[1] > 1:  # DoRA's norms need the whole tensor
            weight = self._read(self.held(name), dataclasses.replace(shard, padding=0), 0, 1)
            for update in updates:
                self._merge(weight, shard, update, 0, 1)
            return shard.take(weight, *self._place)
        for update in updates:
            self._merge(weight, shard, update, *self._place)
        return weight

    def _merge(self, weight: Tensor, shard: Shard, update: _Update, tensor_rank: int, tensor_size: int) -> None:
        """Add an adapter's update to its rows of the weight, and scale them to DoRA's magnitudes."""

        def read(kind: str) -> Tensor:
            name = f"{update.begin}{kind}{update.end}"
            # without the padding of a vocabulary that the weight is without
            own = self.shards[name] if tensor_size > 1 else dataclasses.replace(self.shards[name], padding=0)
            return self._read(name, own, tensor_rank, tensor_size)

        up, down = read("B"), read("A")
        if update.adapter.is_principal:
            up, down = torch.cat([up, -read("start_B")], dim=1), torch.cat([down, read("start_A")])
        change = (up @ down).mul_(update.adapter.scale)
        of_embedding = update.begin.endswith(OF_EMBEDDING)
        change = change.t() if of_embedding else change
        spans = shard.spans(tensor_rank, tensor_size) if shard.dim == 0 else []
        first = sum(stop - start for start, stop in spans[: update.adapter.first])
        rows = weight[first : first + len(change)]
        rows += change
        if self._use_dora:
            dim = 0 if of_embedding else 1  # a magnitude for each channel of an embedding, for each row of the others
            rows *= gain(read("magnitude_vector"), torch.linalg.norm(rows, dim=dim)).unsqueeze(dim)
