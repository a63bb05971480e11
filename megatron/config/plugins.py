"""Model families and tasks by name: those of this package, and a user's own as `package.module:ATTRIBUTE`.

A family or task is imported by the name that the config gives, so that this floor needs no import of a higher one. The
reader of adapters is imported in the same way, where `load` is a folder of them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.config.options import Config, ConfigError
from megatron.files import IMPORT_ROOT

Kind = Literal["architecture", "task"]


class _Place(NamedTuple):
    """The package whose files each define one plugin, the attribute that holds it, and what every plugin has."""

    package: str
    attribute: str
    needs: tuple[str, ...] = ()


PLACES: dict[Kind, _Place] = {
    "architecture": _Place("megatron.models.families", "FAMILY", ("layers", "faults")),
    "task": _Place("megatron.tasks", "TASK"),
}


def known_plugins(kind: Kind) -> list[str]:
    """Return the names of this package's own plugins, sorted; nothing is imported."""
    package, attribute, _ = PLACES[kind]
    files = (IMPORT_ROOT / package.replace(".", "/")).glob("*.py")
    return sorted(path.stem for path in files if f"\n{attribute} = " in path.read_text(encoding="utf-8"))


@cache
def load_plugin(kind: Kind, name: str) -> Any:
    """Return the object that `name` stands for: `bloom`, or `package.module:ATTRIBUTE`.

    `kind` is the option's name. Raises ConfigError if there is no such plugin or its module cannot be imported.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        known = known_plugins(kind)
        if name not in known:
            raise ConfigError(
                [f"{kind}={name!r} is unknown; use {', '.join(known)}, or your own as package.module:ATTRIBUTE"]
            )
        package, attribute, _ = PLACES[kind]
        module = f"{package}.{name}"
    try:
        plugin = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError([f"{kind}={name!r} cannot be loaded: {reason}; give package.module:ATTRIBUTE"]) from error
    if lacking := [need for need in PLACES[kind].needs if not hasattr(plugin, need)]:
        raise ConfigError(
            [f"{kind}={name!r} is a {type(plugin).__name__} without `{lacking[0]}`; give a record with it"]
        )
    return plugin


def load_task(config: Config) -> Any:
    """Return the task that the config selects (megatron/tasks/task.py: Task).

    Raises ConfigError if it is unknown or its options are wrong.
    """
    name = config.training.task
    cls = load_plugin("task", name)
    if not hasattr(cls, "faults"):
        raise ConfigError([f"task={name!r} is not a task; give a subclass of megatron.tasks.task.Task"])
    return cls(config)


def with_loaded_adapters(config: Config, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters in `load`, where that is a folder of PEFT.

    `given`: names of the options that the user has given. Raises ConfigError for those that contradict the folder.
    """
    load = config.checkpoint.load
    if load is None or not os.path.lexists(Path(load, "adapter_config.json")):
        return config
    reader = importlib.import_module("megatron.interop.peft_start")  # imports torch
    found: Config = reader.with_options_of(config, Path(load), given)
    return found
