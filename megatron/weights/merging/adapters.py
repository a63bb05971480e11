"""Adapters merged into the weights of their base as these are read, on any layout.

The arithmetic is that of adapters merged into files (peft/merged_files.py), and so PEFT's, bit for bit in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import Slice, WeightSource
from megatron.models.adapters import LowRank, VocabularyLowRank
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Adapter, LayerDeclaration, declared_shards
from megatron.weights.adapted import AdaptedSource, base_of
from megatron.weights.huggingface import parameters_of
from megatron.weights.model import WholeModel, base_config
from megatron.weights.peft.export import native_adapter
from megatron.weights.peft.merged_files import Addition, Product

EMBEDDING, OUTPUT, OF_EMBEDDING = "embedding.word.", "output.", "lora_embedding_"


def merged_config(config: Config) -> Config:
    """Return the config of the merged model. Adapters of a tied embedding are of one of its uses, so it is untied."""
    plain = base_config(config)
    # a model with an output layer of its own is untied already; without an adapter of the embedding it may stay tied
    layers = {layer.name: layer for layer in family_of(config).layers(config)}
    if OUTPUT[:-1] in layers or not layers[EMBEDDING[:-1]].methods:
        return plain
    return dataclasses.replace(plain, model=dataclasses.replace(plain.model, untie_embeddings_and_output_weights=True))


def merged_model(checkpoint: Checkpoint) -> WholeModel:
    """Return the model that a checkpoint of adapters and its base make together.

    A base that the run held in 4 bits is merged as its folder holds it. Raises CheckpointError if the base is not
    where the checkpoint says, or is another one.
    """
    config = native_adapter(checkpoint).config
    record = checkpoint.metadata["base"]
    base = base_of(checkpoint, config) if "folder" in record else None
    source = MergedSource(AdaptedSource(config, base, checkpoint, record), config)
    return WholeModel(source, merged_config(config))


class _Update(NamedTuple):
    """An adapter of a weight, and the beginning and end of the names of its parameters."""

    begin: str
    end: str
    adapter: Adapter

    @property
    def of_embedding(self) -> bool:
        """It holds a column for each token, and DoRA a magnitude for each channel: of the others each is of a row."""
        return self.begin.endswith(OF_EMBEDDING)

    @property
    def normed_dim(self) -> int:
        """Dimension of the weight over which DoRA's norms sum."""
        return 0 if self.of_embedding else 1


def _updates(layer: LayerDeclaration) -> Iterator[tuple[str, list[_Update]]]:
    """Yield the names of weights and the adapters in a layer that are added to each."""
    for prefix, method in layer.methods.items():
        module = f"{layer.name}.{prefix}." if prefix else f"{layer.name}."
        if isinstance(method, LowRank):
            yield f"{module}weight", [_Update(f"{module}lora_", each.suffix, each) for each in method.adapters]
        elif isinstance(method, VocabularyLowRank):
            if method.embedding is not None:
                yield f"{EMBEDDING}weight", [_Update(f"{module}{OF_EMBEDDING}", "", method.embedding)]
            if method.output is not None:
                yield f"{OUTPUT}weight", [_Update(f"{module}lora_", "", method.output)]


class MergedSource(WeightSource):
    """A base with adapters added to its weights: a whole model."""

    format, title = "merged", "merged"
    holds_run = False
    # each slice would merge its whole tensor again
    reads_slices = False

    def __init__(self, adapted: AdaptedSource, config: Config) -> None:
        """`config`: with the adapters."""
        merged = merged_config(config)
        super().__init__(adapted.folder, parameters_of(merged), metadata=adapted.metadata, config=merged)
        self._adapted, self._use_dora = adapted, config.lora.use_dora
        layers = family_of(config).layers(config)
        self._shards = declared_shards(layers)
        self._updates: dict[str, list[_Update]] = {}
        for layer in layers:  # a tied embedding is in two layers, with the same method
            self._updates |= dict(_updates(layer))

    @property
    def parts(self) -> Sequence[WeightSource]:
        return self._adapted.parts

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._adapted.verify(share, kinds)

    def identify(self, ctx: ParallelContext) -> list[str]:
        return self._adapted.identify(ctx)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raises CheckpointError before a tensor whose base is not what it was when the adapters were trained."""
        for name, shard in self.parameters.items():
            # counted tensor by tensor: a wrong base must not be written first and refused at the end
            merged = self._merged(dataclasses.replace(Slice.whole(name, shard), is_counted=True))
            self._adapted.check_counted()
            yield name, merged

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Reads the whole local tensor for it."""
        return self._merged(at.tensor).flatten()[at.start : at.start + at.numel]

    def _merged(self, at: Slice) -> Tensor:
        """Return a whole local tensor in its shape."""
        name, updates = at.name, self._updates.get(at.name, [])
        if name not in self._shards:  # the output, untied: its base is the embedding, and counts there
            at = dataclasses.replace(at, name=f"{EMBEDDING}weight", is_counted=False)
        weight = self._adapted.read(at).view(at.local_shape)
        merged = at
        # DoRA's norms need the whole tensor, of whose rows or columns a rank may hold parts
        is_cut = at.tensor_size > 1 and any(update.normed_dim == at.shard.dim for update in updates)
        if self._use_dora and is_cut:
            # beside this rank's part, which alone counts for the base's identity
            merged = Slice.whole(at.name, at.shard)
            weight = self._adapted.read(merged).view(merged.local_shape)
        for update in updates:
            self._add(weight, merged, update)
        if merged is at:
            return weight
        return at.shard.take(weight, at.tensor_rank, at.tensor_size)

    def _add(self, weight: Tensor, at: Slice, update: _Update) -> None:
        """Add an adapter to its rows of the weight, and scale them to DoRA's magnitudes."""

        def read(kind: str) -> Tensor:
            name = f"{update.begin}{kind}{update.end}"
            shard = self._shards[name]
            if at.tensor_size == 1:  # without the padding of a vocabulary that the weight is without
                shard = dataclasses.replace(shard, padding=0)
            own = Slice.of_rank(name, shard, at.tensor_rank, at.tensor_size)
            return self._adapted.read(own).view(own.local_shape)

        up, down = read("B"), read("A")
        if update.adapter.is_principal:  # what PiSSA took out of the base is in it: its start is subtracted
            # B A - start B start A = [B, -start B] [A; start A]
            up, down = torch.cat([up, -read("start_B")], dim=1), torch.cat([down, read("start_A")])
        product = Product(up, down, transposed=update.of_embedding)
        first = 0
        if at.shard.dim == 0:  # behind this rank's rows of the pieces before
            spans = at.shard.spans(at.tensor_rank, at.tensor_size)
            first = sum(stop - start for start, stop in spans[: update.adapter.first])
        rows = weight[first : first + product.num_rows]
        addition = Addition(product, update.adapter.scale)
        if self._use_dora:
            addition = addition.scaled(read("magnitude_vector"), rows if update.of_embedding else None)
        addition(rows, rows, 0, len(rows))
