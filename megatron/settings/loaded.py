"""Options that a folder in `load` settles: the model of Hugging Face's or a run's, the adapters of a folder of PEFT."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.options.config import Config
from megatron.weights.model_folder import model_options

DESCRIBING = ("architecture", "num_layers", "hidden_size", "num_attention_heads")
"""Options of which one at least is given wherever a model is described."""


def with_loaded_model(tree: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the values of a command line with the model of the folder in `load`, if they describe none.

    Where the folder has gone, it is that of the run in `save`. Raises ConfigError for a folder that cannot be computed.
    """
    sections = [tree.get(name) or {} for name in ("model", "checkpoint", "lora")]
    if not all(isinstance(section, dict) for section in sections):  # a fault of its own
        return tree
    model, checkpoint, lora = sections
    if not model.keys().isdisjoint(DESCRIBING) or not isinstance(checkpoint.get("load"), str):
        return tree
    source, described = model_options(checkpoint["load"], checkpoint.get("save"), lora.get("lora_base"))
    if described:
        notes.append(f"the options describe no model; it is that of {source}")
    return {**tree, "model": {**described, **model}}


def with_loaded_adapters(config: Config, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters in `load`, where that is a folder of PEFT.

    Where it has gone, they are those of the run in `save` that began with it. `given`: names of the options that the
    user has given. Raises ConfigError for those that contradict the folder.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None:
        return config
    may_resume = save is not None and os.path.isdir(save) and not os.path.lexists(load)
    if not may_resume and not os.path.lexists(Path(load, "adapter_config.json")):
        return config
    from megatron.weights.peft.options import with_options_of  # imports torch

    return with_options_of(config, Path(load), given)
