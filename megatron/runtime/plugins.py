"""A user's own object, given to an option as `package.module:ATTRIBUTE` or `FILE.py:ATTRIBUTE`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.options.config import ConfigError


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
