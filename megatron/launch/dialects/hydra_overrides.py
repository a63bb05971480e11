"""Hydra's overrides of a YAML file on a command line: key=value, +key=value, ++key=value, ~key; and its references.

Source: "Basic Override syntax" of Hydra 1.3, and "Variable interpolation" of OmegaConf 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.options.dialect import WrongValueError, nearest, suggestion

WORD = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@-]*)(?P<equals>=?)(?P<value>.*)", re.S)
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
PAIRS = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Override:
    """One word of a command line."""

    text: str
    sign: str
    """Empty: the key is in the file. `+`: it is not. `++`: either. `~`: it is taken out."""
    key: str
    value: Any = None
    has_value: bool = False


def read_override(word: str) -> Override | None:
    """Return the override that a word is; None if it is none. Raises WrongValueError for one that is not read here."""
    match = WORD.fullmatch(word)
    if match is None or (not match["equals"] and match["sign"] != "~"):
        return None
    key = match["key"]
    if "/" in key or "@" in key:
        raise WrongValueError("chooses another file of a group; write its keys into the file")
    value = _read(match["value"].strip()) if match["equals"] else None
    return Override(word, match["sign"], key, value, bool(match["equals"]))


def overridden(tree: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a file with overrides, and every fault of these, as Hydra has them."""
    result, faults = _copy(tree), list[str]()
    for word in words:
        try:
            override = read_override(word)
            if override is None:
                raise WrongValueError("is not an override; write KEY=VALUE, +KEY=VALUE or ~KEY")
            _apply(result, override)
        except WrongValueError as why:
            faults.append(f"{word!r} {why}")
    return result, faults


def resolved(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a file with its references ${key} replaced, and every fault of these."""
    result, faults = _copy(tree), list[str]()

    def value_of(value: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: value_of(each, seen) for key, each in value.items()}
        if isinstance(value, list):
            return [value_of(each, seen) for each in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value)
        if whole is not None:
            return referred(whole[1], seen)
        text = REFERENCE.sub(lambda match: str(referred(match[1], seen)), value)
        if "${" in text:
            raise WrongValueError(f"{value!r} is not read here; write the value itself")
        return text

    def referred(name: str, seen: tuple[str, ...]) -> Any:
        parent, last = _parent(result, name)
        if name in seen or parent is None or last not in parent:
            raise WrongValueError(f"${{{name}}} refers to no key of the file; write the value itself")
        return value_of(parent[last], (*seen, name))

    found = dict[str, Any]()
    for key, value in result.items():
        try:
            found[key] = value_of(value, (key,))
        except WrongValueError as why:
            faults.append(f"{key}: {why}")
    return found, faults


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    return value


def _parent(tree: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the mapping that has a dotted key, None if there is none, and the last part of the key."""
    *groups, last = key.split(".")
    found: Any = tree
    for group in groups:
        found = found.get(group) if isinstance(found, dict) else None
    return (found if isinstance(found, dict) else None), last


def _apply(tree: dict[str, Any], override: Override) -> None:
    # Hydra's own keys are in no file of the user's
    is_added = override.sign in ("+", "++") or override.key.startswith("hydra.")
    if is_added:
        _add_groups(tree, override.key)
    parent, last = _parent(tree, override.key)
    is_there = parent is not None and last in parent
    if override.sign == "+" and is_there:
        raise WrongValueError(f"adds a key that the file has; write {override.text[1:]}")
    if not is_added and not is_there:
        near = nearest(override.key, _keys(tree))
        remedy = "leave it out" if override.sign else f"write +{override.text} to add it"
        raise WrongValueError(f"is not a key of the file; {suggestion(near, remedy)}")
    if parent is None:
        raise WrongValueError(f"names a key within {override.key.rpartition('.')[0]}, which holds a single value")
    if override.sign == "~":
        _take_out(parent, last, override)
    else:
        parent[last] = override.value


def _add_groups(tree: dict[str, Any], key: str) -> None:
    """Make the mappings that a dotted key stands in, where they are missing."""
    parts = key.split(".")
    for number in range(1, len(parts)):
        above, name = _parent(tree, ".".join(parts[:number]))
        if above is not None and above.get(name) is None:
            above[name] = {}


def _take_out(parent: dict[str, Any], last: str, override: Override) -> None:
    if override.has_value and parent[last] != override.value:
        raise WrongValueError(f"takes out {override.key}={override.value}, and the file has {parent[last]}")
    del parent[last]


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _read(text: str) -> Any:
    """Return the value that Hydra reads: a list, a mapping, a quoted text, or what YAML reads of a word."""
    if text[:1] in PAIRS and text.endswith(PAIRS[text[0]]):
        return _read_group(text)
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if len(_parts(text)) > 1:
        raise WrongValueError("gives several values, a sweep; start a command for each, or write a list as [a,b]")
    if re.match(r"\w+\(", text):
        raise WrongValueError("calls a function of Hydra's; write the value itself")
    return _read_word(text)


def _read_group(text: str) -> Any:
    parts = [part.strip() for part in _parts(text[1:-1])]
    if text[0] == "[":
        return [_read(part) for part in parts]
    pairs = [part.partition(":") for part in parts]
    return {key.strip(): _read(value.strip()) for key, _, value in pairs}


def _read_word(text: str) -> Any:
    # a reference is resolved with those of the file
    if not text or "${" in text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    is_scalar = isinstance(value, str | int | float | bool) or text in ("null", "~")
    # `a: b` and `# c` are words here
    return value if is_scalar else text


def _parts(text: str) -> list[str]:
    """Return what stands between the commas that are in no brackets and quotes; nothing of an empty text."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if text else []
