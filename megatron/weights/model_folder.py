"""Location of a model's folder: given by its path, downloaded from the hub, or left by an earlier run.

Imports no torch, so that a launcher can read a model's config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron.checkpoint.folders import CheckpointError, checkpoint_folders
from megatron.checkpoint.model_options import saved_model_options
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


def find_model(model: str, option: str) -> Path:
    """Return the folder of a model, in huggingface_hub's cache if it was downloaded. Raises ConfigError."""
    folder = Path(model)
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
    if not _is_hub_name(model):
        raise ConfigError([f"{option}={model} does not exist; give the folder of a model that transformers wrote"])
    downloaded = find_hub_folder(model, "model")
    if downloaded is None:
        raise ConfigError(
            [
                f"{option}={model} is not a folder, and no model of this name has been downloaded; download it "
                f"with `hf download {model}`, or give the folder of a model"
            ]
        )
    return downloaded


def find_hub_folder(name: str, kind: Literal["model", "dataset"], revision: str | None = None) -> Path | None:
    """Return the folder in huggingface_hub's cache of what was downloaded under a name, if it was."""
    if not _is_hub_name(name):
        return None
    with contextlib.suppress(Exception):  # not installed, not downloaded, no such name: all end alike
        hub = importlib.import_module("huggingface_hub")
        # local_files_only: a launch reports what is missing, it downloads nothing
        return Path(hub.snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True))
    return None


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def hub_name_of(folder: Path) -> tuple[str, str] | tuple[None, None]:
    """Return name and revision of a model whose folder is in huggingface_hub's cache; None, None of another folder."""
    # models--OWNER--NAME/snapshots/COMMIT; a name with -- of its own is refused by the hub
    match = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", os.path.realpath(folder))
    if match is None:
        return None, None
    return match[1].replace("--", "/"), match[2]


def find_base(folder: Path, name: str | None, revision: str | None, given: str | None) -> Path:
    """Return the base's folder of the adapters in `folder`: the given one, or the one of that name, also of the hub's.

    Raises CheckpointError.
    """
    if given is not None:
        return Path(given)
    if name is None:
        raise CheckpointError(missing_base(folder, name))
    if Path(name).is_dir():
        return Path(name)
    downloaded = find_hub_folder(name, "model", revision)
    if downloaded is None:
        raise CheckpointError(missing_base(folder, name))
    return downloaded


def nothing_to_load(load: str | None, *, skip_train: bool) -> str:
    """Return the fault of a `load` that is missing or empty; None: it is not given."""
    if skip_train or load is None:
        return f"skip_train evaluates a checkpoint, and {load} holds none; give its folder as --load"
    exists = os.path.lexists(load)
    downloaded = None if exists else find_hub_folder(load, "model")
    if downloaded is not None:
        return f"load={load} is a name on the hub, not a folder; give the folder of its download, {downloaded}"
    state = "is empty" if exists else "does not exist"
    return (
        f"load={load} {state}: there are no weights to start from; correct it, or leave it out (with finetune, "
        "ckpt_step and universal_checkpoint) to train from random weights"
    )


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
            base = lora_base or read_json(own_file(folder, ADAPTER_CONFIG)).get("base_model_name_or_path")
            if isinstance(base, str):
                folder = Path(base)
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
