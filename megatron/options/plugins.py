"""A user's own object, given to an option by its name, and the options that it declares."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from megatron.options.config import ConfigError


def filled_options(declared: Any, words: Sequence[str], option: str, owner: str) -> Any:
    """Return the dataclass `declared` filled from NAME=VALUE words of an option; None: there are no options to fill.

    `owner` is what has declared them, for messages. Raises ConfigError with every fault.
    """
    known: list[str] = []
    if declared is not None:
        known = [field.name for field in dataclasses.fields(declared)]
    if words and not known:
        raise ConfigError([f"{option}={' '.join(words)} is given, but {owner} has no options; leave it out"])
    if declared is None:
        return None
    faults = list(_word_faults(words, known, option, owner))
    pairs = [word.partition("=") for word in words]
    # text: pydantic reads numbers and booleans from it, by the declared types
    values = {name: value for name, _, value in pairs if name in known}
    try:
        options = TypeAdapter(declared).validate_python(values)
    except ValidationError as error:
        faults += [_value_fault(fault, option, owner) for fault in error.errors()]
    # raised when the types are read, whatever the values are: a fault of the declaration
    except PydanticUserError as error:
        faults.append(
            f"{owner} has an option of a type that no text is read as; use a plain type: {str(error).splitlines()[0]}"
        )
    if faults:
        raise ConfigError(faults)
    return options


def _word_faults(words: Sequence[str], known: Sequence[str], option: str, owner: str) -> Iterator[str]:
    names = [word.partition("=")[0] for word in words]
    for word in words:
        if "=" not in word:
            yield f"{option} {word!r} is not NAME=VALUE; write it so"
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name not in known:
            yield f"{option} {name}={value!r} is unknown to {owner}; use {', '.join(known)}"
    for name in known:
        # of two values one would be lost
        if names.count(name) > 1:
            yield f"{option} has {name} {names.count(name)} times; keep one"


def _value_fault(fault: Any, option: str, owner: str) -> str:
    """Describe a fault of pydantic's."""
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{option} lacks {name}, which {owner} needs; give it"
    return f"{option} {name}={fault['input']!r}: {fault['msg']}"


# ---------------------------------------------------------------------------------------------------------------------
# The object itself, given to an option as `package.module:ATTRIBUTE` or `FILE.py:ATTRIBUTE`.


def find_plugin(option: str, name: str, own: Mapping[str, Any]) -> Any:
    """Return `own[name]`, or the user's object that `name`, the value of the option, stands for. Raises ConfigError."""
    if name in own:
        return own[name]
    if ":" not in name:
        raise ConfigError(
            [f"{option}={name!r} is unknown; use {', '.join(own)}, or your own as package.module:ATTRIBUTE"]
        )
    return import_attribute(option, name)


def import_attribute(option: str, name: str) -> Any:
    """Return the user's object that `name`, the value of the option, stands for. Raises ConfigError."""
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(_import(module), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        forms = "package.module:ATTRIBUTE or FILE.py:ATTRIBUTE"
        raise ConfigError([f"{option}={name} cannot be loaded: {reason}; give {forms}"]) from error


def _import(module: str) -> ModuleType:
    # a module of the path, with relative imports; a file needs no package around it
    if not module.endswith(".py"):
        return importlib.import_module(module)
    # `file_` keeps it apart from an installed module of the same name
    spec = importlib.util.spec_from_file_location(f"file_{Path(module).stem}", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
