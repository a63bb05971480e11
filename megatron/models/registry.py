"""The model families of this package by name, and the family of a config. Importable without torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from megatron.models import families
from megatron.models.family import Family
from megatron.options.config import Config, ConfigError
from megatron.options.plugins import find_plugin

FAMILIES: Mapping[str, Family] = {
    name: importlib.import_module(f"{families.__name__}.{name}").FAMILY
    for name in sorted(module.name for module in pkgutil.iter_modules(families.__path__))
}
"""The record of each file in families/."""

NEEDED = ("layers", "faults")
"""Members that the rest of the package reads first."""


def family_of(config: Config) -> Family:
    """Return the family that the config selects. Raises ConfigError if there is none."""
    return family_named(config.model.architecture)


@cache
def family_named(name: str) -> Family:
    """Return the family of this name, or a user's own as `package.module:RECORD`. Raises ConfigError."""
    family: Family = find_plugin("architecture", name, FAMILIES)
    for need in NEEDED:
        if not hasattr(family, need):
            raise ConfigError(
                [f"architecture={name!r} is a {type(family).__name__} without `{need}`; give a record with it"]
            )
    return family
