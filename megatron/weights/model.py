"""The model that a source of weights holds: its config, and whether the options of a run describe it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_model_options
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import WeightSource
from megatron.models.registry import family_of
from megatron.options.config import Config, ConfigError
from megatron.options.model import LoraConfig, differing
from megatron.options.stored import from_dict
from megatron.parallel.shards import Shard, declared_shards
from megatron.runtime.commands import command_name
from megatron.runtime.devices import device_fault
from megatron.weights.huggingface import parameters_of
from megatron.weights.huggingface_files import some

ReportNumel = Callable[[int], object]
"""Callback for progress: receives the number of elements processed since its previous call."""


@dataclass(frozen=True)
class WholeModel:
    """A source that holds every parameter of a model, and the config that its files describe."""

    source: WeightSource
    config: Config

    @property
    def num_parameters(self) -> int:
        return count(self.source.parameters)

    @property
    def huggingface(self) -> dict[str, Any] | None:
        """Hugging Face's config.json and generation_config.json, where the model came from there."""
        return source_of(self.source.metadata)

    def tensors(
        self, progress: ReportNumel = lambda numel: None, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 tensor), each parameter once; `progress` hears of each when the next is wanted.

        `names`: some parameters alone.
        """
        tensors = self.source.tensors()
        if names is not None:
            tensors = ((name, self.source.read_full(name)) for name in names)
        for name, tensor in tensors:
            numel = tensor.numel()
            yield name, tensor
            del tensor  # before the next one is made
            progress(numel)


def whole_model(source: WeightSource) -> WholeModel:
    """Raises CheckpointError unless the source holds the model that its own config describes."""
    base = source.metadata.get("base")
    # a merged source has this record too, and is whole
    if base is not None and isinstance(source, Checkpoint):
        origin = f"the base model in {base['folder']}" if "folder" in base else "a base model drawn from a seed"
        raise CheckpointError(
            f"{source.folder} holds adapters of {origin}, not a whole model; give a whole model, or write adapters "
            f"with {command_name('convert_checkpoint')} --to peft"
        )
    config = config_of_source(source)
    check_parameters(source.folder, config, source.parameters)
    return WholeModel(source, config)


def config_of_source(source: WeightSource) -> Config:
    """Return the config of the model, or of the run that saved it. Raises CheckpointError if there is none."""
    if source.config is not None:
        return source.config
    try:
        tree = source.metadata["config"]
        parallel = dict(tree.get("parallel") or {})
        # a user's record of the device that trained need not be importable where the weights are read
        if device_fault(parallel.get("device", "auto")):
            del parallel["device"]
        return from_dict({**tree, "parallel": parallel})
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{source.folder}/checkpoint.json holds no valid config of a run ({error}); load another checkpoint"
        ) from None


def source_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Hugging Face's files as the metadata of a checkpoint keeps them; None: the model is of elsewhere."""
    source = metadata.get("source")
    if not isinstance(source, dict) or source.get("format") != "huggingface":
        return None
    return source if isinstance(source.get("config"), dict) else None


def check_parameters(folder: Path, config: Config, held: Mapping[str, Shard]) -> None:
    """Raise CheckpointError unless these are the parameters of the config's model."""
    fault = different(held, parameters_of(config))
    if fault is not None:
        raise CheckpointError(
            f"{folder} does not hold the model that its config describes: {fault}; give its own model's config"
        )


def different(held: Mapping[str, Shard], expected: Mapping[str, Shard]) -> str | None:
    """Return the first parameter that only one side has, or that differs in shape; None: there is none."""
    # sorted, so that every rank names the same parameter
    for name in sorted({*held, *expected}):
        here, there = (side[name].shape if name in side else "not there" for side in (held, expected))
        if here != there:
            return f"{name} is {here}, but {there} in the config's model"
    return None


def count(shards: Mapping[str, Shard]) -> int:
    """Number of parameters of the model."""
    return sum(math.prod(shard.shape) for shard in shards.values())


def base_config(config: Config) -> Config:
    """Return the config of the base model alone."""
    return dataclasses.replace(config, lora=LoraConfig())


def holds_adapters(source: WeightSource | None) -> bool:
    """Return True for a run's checkpoint of adapters."""
    return isinstance(source, Checkpoint) and source.metadata.get("base") is not None


def check_model(checkpoint: Checkpoint, config: Config) -> None:
    """Raise CheckpointError if a run's checkpoint is of another model than the options describe."""
    saved = _saved_section(checkpoint, "model")
    seq_length = _saved_section(checkpoint, "training").get("seq_length")
    if holds_adapters(checkpoint):
        _check_lora_options(checkpoint, config)
    check_model_options(checkpoint.folder, saved, seq_length, config)


def _saved_section(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    saved = checkpoint.metadata.get("config")
    section = saved.get(name) if isinstance(saved, dict) else None
    if not isinstance(section, dict):
        raise CheckpointError(f"{checkpoint.folder} does not describe its {name}; load a checkpoint of a run")
    return section


def _check_lora_options(checkpoint: Checkpoint, config: Config) -> None:
    """Raise CheckpointError unless the checkpoint's adapters are of the config's options."""
    saved, lora = (checkpoint.metadata.get("config") or {}).get("lora") or {}, config.lora
    if lora.lora_rank is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds adapters (lora_rank={saved.get('lora_rank')}), not a whole model; give the "
            "lora options of their run"
        )
    # options that are newer than the checkpoint have their defaults in it; older ones may have gone
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    there = LoraConfig(**{name: value for name, value in saved.items() if name in known})
    if differing(lora.computed(), there.computed()):  # a rank alone differs in shapes, or nowhere
        different_options = differing(
            {"lora_rank": lora.lora_rank, **lora.computed()}, {"lora_rank": there.lora_rank, **there.computed()}
        )
        raise CheckpointError(
            f"{checkpoint.folder} holds adapters with other options: {'; '.join(different_options)}. Give the options "
            "of their run"
        )
    # fewer adapters than declared are missing when they are read; more would be left out in silence
    declared = declared_shards(family_of(config).layers(config))
    surplus = [name for name in checkpoint.parameters if name not in declared]
    if surplus:
        raise CheckpointError(
            f"{checkpoint.folder} holds {some(surplus)}, which these options do not adapt. Give the lora options of "
            "their run"
        )


def check_quantization(trained: Checkpoint, config: Config, *, resumes: bool) -> list[str]:
    """Return a warning if the base is quantised otherwise than when the adapters were trained.

    Raises CheckpointError if the run `resumes`: it would go on with another function.
    """
    there = ((trained.metadata.get("config") or {}).get("model") or {}).get("quantize_base", "none")
    here = config.model.quantize_base
    if there == here:
        return []
    held = f"{trained.folder} holds adapters trained with quantize_base={there}"
    if resumes:
        raise CheckpointError(
            f"{held}; with quantize_base={here} the base computes something else. Give --quantize-base {there}, or "
            "--finetune to start a new run from these adapters"
        )
    return [f"WARNING: {held}; with quantize_base={here} the base computes something else"]
