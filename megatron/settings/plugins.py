"""Model families and tasks by name: those of this package, and a user's own as `package.module:ATTRIBUTE`.

A family or task is imported by the name that the config gives, so that this floor needs no import of a higher one. The
reader of adapters is imported in the same way, where `load` is a folder of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from megatron.options.config import Config, ConfigError
from megatron.runtime.files import IMPORT_ROOT

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
    plugin = import_attribute(kind, name, f"{module}:{attribute}")
    if lacking := [need for need in PLACES[kind].needs if not hasattr(plugin, need)]:
        raise ConfigError(
            [f"{kind}={name!r} is a {type(plugin).__name__} without `{lacking[0]}`; give a record with it"]
        )
    return plugin


def import_attribute(option: str, name: str, place: str | None = None) -> Any:
    """Return what `name`, the value of the option, stands for: `package.module:ATTRIBUTE` or `FILE.py:ATTRIBUTE`.

    `place`: where it is, if not there. Raises ConfigError.
    """
    module, _, attribute = (place or name).rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"file_{Path(module).stem}", module)
            assert spec is not None
            assert spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        return getattr(loaded, attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        forms = "package.module:ATTRIBUTE or FILE.py:ATTRIBUTE"
        raise ConfigError([f"{option}={name} cannot be loaded: {reason}; give {forms}"]) from error


def load_task(config: Config) -> Any:
    """Return the task that the config selects (megatron/tasks/task.py: Task).

    Raises ConfigError if it is unknown or its options are wrong.
    """
    name = config.training.task
    cls = load_plugin("task", name)
    if not hasattr(cls, "faults"):
        raise ConfigError([f"task={name!r} is not a task; give a subclass of megatron.tasks.task.Task"])
    return cls(config)


def filled_options(declared: Any, words: Sequence[str], option: str, owner: str) -> Any:
    """Return the dataclass `declared` filled from NAME=VALUE words of an option; None: there are no options to fill.

    `owner` is what has declared them, for messages. Raises ConfigError with every fault.
    """
    known = [] if declared is None else [field.name for field in dataclasses.fields(declared)]
    if words and not known:
        raise ConfigError([f"{option}={' '.join(words)} is given, but {owner} has no options; leave it out"])
    if declared is None:
        return None
    pairs = [word.partition("=") for word in words]
    faults = [f"{option} {word!r} is not NAME=VALUE; write it so" for word in words if "=" not in word]
    faults += [
        f"{option} {name}={value!r} is unknown to {owner}; use {', '.join(known)}"
        for name, equals, value in pairs
        if equals and name not in known
    ]
    names = [name for name, _, _ in pairs]
    faults += [f"{option} has {name} {names.count(name)} times; keep one" for name in known if names.count(name) > 1]
    values = {name: value for name, _, value in pairs if name in known}
    try:
        options = TypeAdapter(declared).validate_python(values)
    except ValidationError as error:
        for fault in error.errors():
            name = ".".join(map(str, fault["loc"]))
            if fault["type"] == "missing":
                faults.append(f"{option} lacks {name}, which {owner} needs; give it")
            else:
                faults.append(f"{option} {name}={fault['input']!r}: {fault['msg']}")
    except PydanticUserError as error:
        faults.append(
            f"{owner} has an option of a type that no text is read as; use a plain type: {str(error).splitlines()[0]}"
        )
    if faults:
        raise ConfigError(faults)
    return options


DESCRIBING = ("architecture", "num_layers", "hidden_size", "num_attention_heads")
"""Options of which one at least is given wherever a model is described."""


def with_loaded_model(tree: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the values of a command line with the model of the Hugging Face folder in `load`, if they describe none.

    Where the folder has gone, it is that of the run in `save`. Raises ConfigError for a folder that cannot be computed.
    """
    sections = [tree.get(name) or {} for name in ("model", "checkpoint", "lora")]
    if not all(isinstance(section, dict) for section in sections):  # a fault of its own
        return tree
    model, checkpoint, lora = sections
    if not model.keys().isdisjoint(DESCRIBING) or not isinstance(checkpoint.get("load"), str):
        return tree
    reader = importlib.import_module("megatron.weights.huggingface_config")
    place, found = reader.model_options(checkpoint["load"], checkpoint.get("save"), lora.get("lora_base"))
    if found:
        notes.append(f"the options describe no model; it is that of {place}")
    return {**tree, "model": {**found, **model}}


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
    reader = importlib.import_module("megatron.weights.peft.start")  # imports torch
    found: Config = reader.with_options_of(config, Path(load), given)
    return found
