"""A config as nested plain values by section, as presets and checkpoints hold it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.flags import sequence


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    known, faults, _ = known_values(tree)
    if faults:
        raise ConfigError(faults)
    return CONFIG.validate_python(known)


CONFIG = TypeAdapter(Config)


def known_values(tree: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str], set[str]]:
    """Return the values of known options by section, every fault, and the options whose values cannot be used."""
    known: dict[str, dict[str, Any]] = {}
    unread: set[str] = set()
    # all faults are collected: a user corrects a file once
    strange = [name for name in tree if name not in sections()]
    faults = [f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in strange]
    for section, cls in sections().items():
        values = tree.get(section) or {}
        hints = get_type_hints(cls)
        if not isinstance(values, dict):
            faults.append(f"section {section!r} is {values!r}; it must be a mapping of options")
            unread |= set(hints)
            values = {}
        for name in [str(name) for name in values if name not in hints]:  # YAML's keys may be numbers
            faults.append(_unknown_option(name, section))
            # the option that was probably meant: rules about it would report its default
            unread |= set(nearest(name, options()))
        known[section] = {name: _words(value, hints[name]) for name, value in values.items() if name in hints}
    try:
        # validated although the result is not needed: the types are pydantic's alone
        CONFIG.validate_python(known)
    except ValidationError as error:
        faults += _wrong_values(known, error)
        unread |= {str(fault["loc"][1]) for fault in error.errors()}
    return known, faults, unread


def _wrong_values(known: dict[str, dict[str, Any]], error: ValidationError) -> list[str]:
    # an option of several types has a fault for each of them
    rules: dict[tuple[int | str, ...], list[str]] = {}
    # loc is (section, option, place in a tuple or member of a union, ...)
    for fault in error.errors():
        rules.setdefault(fault["loc"][:2], []).append(fault["msg"])
    joined = {option: " or ".join(dict.fromkeys(messages)) for option, messages in rules.items()}
    texts = (_wrong_value(known, fault["loc"], fault["type"], joined[fault["loc"][:2]]) for fault in error.errors())
    return list(dict.fromkeys(texts))


def _words(value: Any, hint: Any) -> Any:
    """Return the words of a sequence that is written as one string: `rampup_batch_size: 16 16 5000000`."""
    if isinstance(value, str) and sequence(hint):
        return value.split()
    return value


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar one of `names`, if any is."""
    return difflib.get_close_matches(name, list(names), n=1)


def _wrong_value(known: dict[str, dict[str, Any]], location: tuple[int | str, ...], kind: str, rule: str) -> str:
    """Describe a value of the wrong type or out of range."""
    section, name = str(location[0]), str(location[1])
    value = known[section][name]
    # pydantic names the element that is missing, a user counts values
    wanted = get_args(sequence(get_type_hints(sections()[section])[name]))
    if kind in ("missing", "too_short", "too_long") and wanted:
        rule = f"expected {len(wanted)} values, not {len(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    return f"{section}.{name}={shown}: {rule[:1].lower()}{rule[1:]}"


def _unknown_option(name: str, section: str) -> str:
    """Describe an unknown option: its right section, or the most similar name."""
    if name in options():
        return f"option {name!r} in section {section!r} belongs in section {options()[name][0]!r}"
    near = nearest(name, options())
    hint = f"did you mean {near[0]!r} in section {options()[near[0]][0]!r}?" if near else "see --help"
    return f"unknown option {name!r} in section {section!r}; {hint}"


def to_yaml(config: Config) -> str:
    """Format the config as a preset that sets every option."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)
    return text
