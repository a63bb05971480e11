"""The model that a checkpoint of adapters and its base make together: scale * B A added to the base's weights.

The order of operations, and so every bit in float32, is that of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.config.options import Config
from megatron.interop.huggingface import parameters_of
from megatron.interop.native import count, source_of
from megatron.interop.peft_export import native_adapter
from megatron.models.adapters import LowRank, VocabularyLowRank
from megatron.models.family import family_of
from megatron.parallel.adapter_layout import Adapter
from megatron.parallel.shards import Shard
from megatron.weights.adapter_start import AdapterStart, base_config, bits_sum, joined_checksums, open_base

EMBEDDING, OUTPUT, OF_EMBEDDING = "embedding.word.", "output.", "lora_embedding_"


def merged_config(config: Config) -> Config:
    """Return the config of the merged model. Adapters of a tied embedding are of one of its uses, so it is untied."""
    plain = base_config(config)
    layers = {layer.name: layer for layer in family_of(config).layers(config)}
    if OUTPUT[:-1] in layers or not layers[EMBEDDING[:-1]].methods:
        return plain
    return dataclasses.replace(plain, model=dataclasses.replace(plain.model, untie_embeddings_and_output_weights=True))


class MergedModel:
    """Weights of a base with a checkpoint's adapters merged, one tensor at a time.

    A base that the run held in 4 bits is merged as its folder holds it. Raises CheckpointError if the base is not
    where the checkpoint says, or is another one.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._adapter = native_adapter(checkpoint)
        self._record = checkpoint.metadata["base"]
        config = self._adapter.config
        folder = self._record.get("folder")
        base = None if folder is None else open_base(Path(folder), self._record, config, checkpoint)
        self._start = AdapterStart(config, base, checkpoint, self._record)
        self._held = parameters_of(base_config(config))
        self._shards = parameters_of(merged_config(config))

    @property
    def num_parameters(self) -> int:
        return count(self._shards)

    @property
    def source(self) -> dict[str, Any] | None:
        """Hugging Face's config.json and generation_config.json, where the base came from there."""
        return source_of(self._start.metadata)

    @cached_property
    def _updates(self) -> dict[str, list[tuple[str, str, Adapter]]]:
        """Beginning and end of the names of its parameters, and the adapter itself, by the merged model's weight."""
        found: dict[str, list[tuple[str, str, Adapter]]] = {}
        for layer in family_of(self._adapter.config).layers(self._adapter.config):
            for prefix, method in layer.methods.items():
                place = f"{layer.name}.{prefix}." if prefix else f"{layer.name}."
                if isinstance(method, LowRank):
                    found[f"{place}weight"] = [(f"{place}lora_", each.suffix, each) for each in method.adapters]
                if isinstance(method, VocabularyLowRank) and method.embedding:
                    found[f"{EMBEDDING}weight"] = [(f"{place}{OF_EMBEDDING}", "", method.embedding)]
                if isinstance(method, VocabularyLowRank) and method.output:
                    found[f"{OUTPUT}weight"] = [(f"{place}lora_", "", method.output)]
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 tensor), each parameter of the merged model once."""
        expected = self._record.get("checksums", {})
        for name in self._shards:
            held = name if name in self._held else f"{EMBEDDING}weight"
            weight = self._read(held)
            if held in expected and joined_checksums([{held: bits_sum(weight)}])[held] != expected[held]:
                raise CheckpointError(
                    f"{self._start.base_place} has another {held} than when the adapters were trained; restore the "
                    "folder of their base"
                )
            for begin, end, adapter in self._updates.get(name, ()):
                self._merge(weight, self._held[held], begin, end, adapter)
            yield name, weight

    def _read(self, name: str) -> Tensor:
        shard = self._held[name]
        return self._start.read(name, "weight", shard, 0, 1, 0, count({name: shard})).view(shard.shape)

    def _merge(self, weight: Tensor, shard: Shard, begin: str, end: str, adapter: Adapter) -> None:
        """Add an adapter's update to its rows of the weight, and scale them to DoRA's magnitudes."""
        of_embedding = begin.endswith(OF_EMBEDDING)
        update = (self._adapter.read(f"{begin}B{end}") @ self._adapter.read(f"{begin}A{end}")).mul_(adapter.scale)
        update = update.t() if of_embedding else update
        first = sum(shard.pieces[: adapter.first]) if shard.dim == 0 else 0
        rows = weight[first : first + len(update)]
        rows += update
        if self._adapter.config.lora.use_dora:
            dim = 0 if of_embedding else 1  # a magnitude for each channel of an embedding, for each row of the others
            magnitudes = self._adapter.read(f"{begin}magnitude_vector{end}") / torch.linalg.norm(rows, dim=dim)
            rows *= magnitudes.unsqueeze(dim)
