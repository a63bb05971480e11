"""The model that a run loads, where its options describe none: that of a folder of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.config.options import ConfigError
from megatron.interop.folder_files import ADAPTER_CONFIG, is_adapter_folder, is_model_folder, own_file, read_json
from megatron.interop.huggingface_config import preset_of


def model_options(load: str, save: Any, lora_base: Any) -> tuple[str, dict[str, Any]]:
    """Return the place of the model and the options that describe it; none where nothing does.

    Args:
        load: folder to start from: a model of transformers, or adapters in PEFT's format.
        save: folder of the run's own checkpoints, which describe the model once `load` has gone.
        lora_base: folder of the adapters' base; None: the one that they name.

    Raises ConfigError.
    """
    folder = Path(load)
    try:
        if is_adapter_folder(folder):
            named = lora_base or read_json(own_file(folder, ADAPTER_CONFIG)).get("base_model_name_or_path")
            folder = Path(named) if isinstance(named, str) else folder
        if is_model_folder(folder):
            return str(folder / "config.json"), preset_of(folder)["model"]
    except CheckpointError as error:
        raise ConfigError([str(error)]) from None
    if isinstance(save, str) and os.path.isdir(save) and not os.path.lexists(load):
        return _saved_model(Path(save))
    return "", {}


def _saved_model(save: Path) -> tuple[str, dict[str, Any]]:
    """Return the model of the newest checkpoint in a folder."""
    from megatron.checkpoint.format import read_metadata  # late: they import torch
    from megatron.checkpoint.reader import checkpoint_folders

    for newest in checkpoint_folders(save)[:1]:
        config = (read_metadata(newest) or {}).get("config") or {}
        return str(newest), dict(config.get("model") or {})
    return "", {}
