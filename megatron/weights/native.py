"""Weights of a run's checkpoint as full tensors by name, with the config of their model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.options.config import Config, ConfigError
from megatron.options.stored import from_dict
from megatron.parallel.shards import Shard
from megatron.runtime.commands import command_name
from megatron.weights.huggingface import parameters_of


@dataclass(frozen=True)
class NativeModel:
    """Weights of a checkpoint, one tensor at a time."""

    checkpoint: Checkpoint
    config: Config
    shards: Mapping[str, Shard]
    """In the order of the layers."""
    source: dict[str, Any] | None
    """Hugging Face's config.json and generation_config.json, where the model came from there."""

    @property
    def num_parameters(self) -> int:
        return count(self.shards)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 tensor), each parameter once."""
        for name in self.shards:
            yield name, self.checkpoint.read_full(name)

    def read_range(self, name: str, start: int, numel: int) -> Tensor:
        """Return a stretch of a flattened tensor."""
        return self.checkpoint.read(name, "weight", self.shards[name], 0, 1, start, numel)


def native_model(checkpoint: Checkpoint) -> NativeModel:
    """Open the weights. Raises CheckpointError if the checkpoint does not hold the model that its config describes."""
    base = checkpoint.metadata.get("base")
    if base is not None:
        where = f"the base model in {base['folder']}" if "folder" in base else "a base model drawn from a seed"
        raise CheckpointError(
            f"{checkpoint.folder} holds adapters of {where}, not a whole model; give a whole model, or write adapters "
            f"with {command_name('convert_checkpoint')} --to peft"
        )
    config = config_of_run(checkpoint)
    shards = matched(checkpoint.folder, config, checkpoint.parameters)
    return NativeModel(checkpoint, config, shards, source_of(checkpoint.metadata))


def config_of_run(checkpoint: Checkpoint) -> Config:
    """Return the config of the run that saved the checkpoint. Raises CheckpointError if there is none."""
    try:
        return from_dict(checkpoint.metadata["config"])
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}/checkpoint.json holds no valid config of a run ({error}); load another checkpoint"
        ) from None


def source_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Hugging Face's files as the metadata of a checkpoint keeps them; None: the model is of elsewhere."""
    source = metadata.get("source")
    if not isinstance(source, dict) or source.get("format") != "huggingface":
        return None
    return source if isinstance(source.get("config"), dict) else None


def matched(folder: Path, config: Config, found: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return the parameters of the config's model. Raises CheckpointError if those that were found differ."""
    expected = parameters_of(config)
    if fault := different(found, expected):
        raise CheckpointError(
            f"{folder} does not hold the model that its config describes: {fault}; give its own model's config"
        )
    return expected


def different(found: Mapping[str, Shard], expected: Mapping[str, Shard]) -> str | None:
    """Return the first parameter that only one side has, or that differs in shape; None: there is none."""
    shapes, wanted = ({name: tuple(shard.shape) for name, shard in side.items()} for side in (found, expected))
    if shapes == wanted:
        return None
    name = min(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
    return f"{name} is {shapes.get(name, 'not there')}, but {wanted.get(name, 'not there')} in the config's model"


def count(shards: Mapping[str, Shard]) -> int:
    """Number of parameters of the model."""
    return sum(math.prod(shard.shape) for shard in shards.values())
