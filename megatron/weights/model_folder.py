"""Location of a model's folder: given by its path, named on the hub, or left by an earlier run.

Imports no torch, so that a launcher can read a model's config.json.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.folders import CheckpointError, checkpoint_folders, holds_checkpoints
from megatron.checkpoint.model_options import saved_model_options
from megatron.hub.download import find, local_folder, with_weights
from megatron.hub.names import SCHEME, HubError, parse_name, pinned
from megatron.options.config import ConfigError
from megatron.options.model import ModelConfig
from megatron.weights.folder_files import (
    ADAPTER_CONFIG,
    is_adapter_folder,
    is_model_folder,
    missing_base,
    own_file,
    read_json,
)
from megatron.weights.huggingface_config import described, described_in, preset_of
from megatron.weights.meta.params import is_meta_folder

BASE = "base_model_name_or_path"


def find_model(model: str, option: str) -> Path:
    """Return the folder of a model that is given by its path, or its name on the hub. Raises ConfigError.

    Of a name it is that in huggingface_hub's cache, with everything but the weights, downloaded if need be.
    """
    try:
        folder = local_folder(model, option)
    except HubError as error:
        raise ConfigError([str(error)]) from None
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        raise ConfigError(
            [
                f"{option}={model} holds adapters, not a model; give their base, and go on with the adapters by --load "
                f"{model}, or merge them into it with tools/merge_adapter.py"
            ]
        )
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError([f"{option}={model} is a file; give the folder that transformers wrote"])
    raise ConfigError([f"{option}={model} does not exist; give the folder of a model that transformers wrote"])


def find_base(folder: Path, name: str | None, revision: str | None, given: str | None, *, download: bool) -> Path:
    """Return the base's folder of the adapters in `folder`: the given one, or the one of that path or name.

    `download`: it may be downloaded, without its weights; no rank does so while others wait for it. Raises
    CheckpointError.
    """
    if given is not None:
        return Path(given)
    if name is None:
        raise CheckpointError(missing_base(folder, name))
    if Path(name).is_dir():
        return Path(name)
    on_hub = parse_name(name)
    if on_hub is None:
        raise CheckpointError(missing_base(folder, name))
    on_hub = replace(on_hub, revision=revision or on_hub.revision)
    if not download:
        base = find(on_hub)
        if base is None:
            raise CheckpointError(f"{missing_base(folder, name)}, or run `{on_hub.download_command}`")
        return base
    try:
        return local_folder(f"{SCHEME}{on_hub}", BASE)
    except HubError as error:
        raise CheckpointError(
            f"{folder} holds adapters of the base model {name}, which is not a folder on this machine ({error}); give "
            "the base's folder as --lora-base"
        ) from None


def nothing_to_load(load: str | None, *, skip_train: bool) -> str:
    """Return the fault of a `load` that is missing or empty; None: it is not given."""
    if skip_train or load is None:
        return f"skip_train evaluates a checkpoint, and {load} holds none; give its folder as --load"
    state = "is empty" if os.path.lexists(load) else "does not exist"
    return (
        f"load={load} {state}: there are no weights to start from; correct it, or leave it out (with finetune, "
        "ckpt_step and universal_checkpoint) to train from random weights"
    )


def base_of_adapters(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return name and revision of the base that an adapter_config.json names; None: it names none."""
    name, revision = config.get(BASE), config.get("revision")
    return name if isinstance(name, str) and name else None, revision if isinstance(revision, str) else None


def _base_in(folder: Path) -> Path:
    """Return the folder of the base that adapters name. Raises CheckpointError."""
    name, revision = base_of_adapters(read_json(own_file(folder, ADAPTER_CONFIG)))
    return find_base(folder, name, revision, None, download=True)


def loaded_folders(load: str | None, save: str | None, lora_base: str | None) -> dict[str, Path]:
    """Return the folders of the models that a start reads, by the option that names each, the base of adapters too.

    A run that goes on in `save` reads its base alone. Raises CheckpointError, HubError.
    """
    folders = {}
    goes_on = save is not None and load != save and holds_checkpoints(Path(save))
    if load is not None and not goes_on:
        folders["load"] = Path(load)
        if lora_base is None and is_adapter_folder(Path(load)):
            folders["the base of load"] = _base_in(Path(load))
    if lora_base is not None:
        folders["lora_base"] = Path(lora_base)
    return folders


def names_on_hub(load: str | None, save: str | None, lora_base: str | None) -> tuple[str, ...]:
    """Return the names with their commits of those models of `loaded_folders` that are the hub's."""
    names = map(pinned, loaded_folders(load, save, lora_base).values())
    return tuple(name for name in names if name is not None)


def fetch_weights(load: str | None, save: str | None = None, lora_base: str | None = None) -> None:
    """Download the weights that a start reads, where they are the hub's and not in its cache. Raises as above."""
    for option, folder in loaded_folders(load, save, lora_base).items():
        with_weights(folder, option)


@dataclass(frozen=True)
class LoadedModel:
    """The model that a run loads, as files describe it."""

    source: str = ""
    """The file or folder that describes it; empty: none does."""
    options: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    """Longest sequence of the model, or of the run that saved it."""


def model_options(load: str, save: Any, lora_base: Any) -> LoadedModel:
    """Return the model that a run loads.

    Args:
        load: folder to start from: a model of transformers or Meta, adapters in PEFT's format, or checkpoints of a run.
        save: folder of the run's own checkpoints, which describe the model once `load` has gone.
        lora_base: folder of the adapters' base; None: the one that they name.

    Raises ConfigError.
    """
    folder = Path(load)
    try:
        if is_adapter_folder(folder):
            theirs = read_json(own_file(folder, ADAPTER_CONFIG))
            base, revision = base_of_adapters(theirs)
            if lora_base or base:
                folder = find_base(folder, base, revision, lora_base, download=True)
        if is_model_folder(folder) or is_meta_folder(folder):
            options = preset_of(folder)["model"]
            return LoadedModel(str(folder / described_in(folder)), options, options.get("max_position_embeddings"))
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    # a run's command, typed again, continues the run, also after `load` has gone
    if isinstance(save, str) and not os.path.lexists(load):
        folder = Path(save)
    return _saved_model(folder)


def _saved_model(save: Path) -> LoadedModel:
    """Return the model of the newest checkpoint in a folder that states it. Raises ConfigError."""
    try:
        folders = checkpoint_folders(save) if save.is_dir() else []
    except OSError:  # the checks of the start say so
        return LoadedModel()
    for folder in folders:
        if (saved := saved_model_options(folder)) is None:
            continue
        options, seq_length = saved
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        try:
            # without options that this release does not have, which the loading compares; freeze is the run's own
            model = ModelConfig(**{name: value for name, value in options.items() if name in names} | {"freeze": ()})
        except ValidationError as error:
            raise ConfigError([f"{folder} describes no model: {error.errors()[0]['msg']}; load another"]) from None
        # unset it would be this run's seq_length, which may be another than that of the table
        if model.position_embedding_type == "learned" and model.max_position_embeddings is None:
            model = replace(model, max_position_embeddings=seq_length)
        return LoadedModel(str(folder), described(model), model.max_position_embeddings or seq_length)
    return LoadedModel()
