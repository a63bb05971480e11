"""Plain data as bytes, for messages between ranks: JSON, so that nothing that arrives is unpickled or executed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

TAG = "%"
"""Key of an object that JSON has no form of: a list of its kind and its content."""
TUPLE = "tuple"


# torch's own collectives of objects unpickle what they receive, over connections that anybody in the network may open
def encode(value: Any) -> bytes:
    """Return the bytes of a value, for `decode`.

    It may be made of None, bool, int, float, str, bytes, Path, list, tuple, set, dict, and dataclasses and NamedTuples
    of this package. Raises TypeError for anything else.
    """
    return json.dumps(_tagged(value)).encode()


def decode(content: bytes) -> Any:
    """Return the value of `encode`. Raises ValueError for anything else."""
    try:
        return _untagged(json.loads(content))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a message of another rank is not plain data: {error!r}") from None


class _Form(NamedTuple):
    """A type that JSON lacks: its kind, its content in JSON, and the value of that content."""

    kind: str
    types: type | tuple[type, ...]
    content: Callable[[Any], Any]
    value: Callable[[Any], Any]


def _tagged_all(values: Iterable[Any]) -> list[Any]:
    return [_tagged(value) for value in values]


def _untagged_all(content: Iterable[Any]) -> list[Any]:
    return [_untagged(value) for value in content]


_FORMS = (
    # a dict as pairs: the keys of JSON are strings alone
    _Form(
        "dict",
        dict,
        lambda value: [_tagged_all(pair) for pair in value.items()],
        lambda content: dict(_untagged_all(content)),
    ),
    _Form("bytes", bytes, bytes.hex, bytes.fromhex),
    _Form("path", Path, str, Path),
    _Form("set", (set, frozenset), _tagged_all, lambda content: set(_untagged_all(content))),
)


def _tagged(value: Any) -> Any:
    if isinstance(value, (NoneType, bool, int, float, str)):
        return value
    if isinstance(value, list):
        return _tagged_all(value)
    for form in _FORMS:
        if isinstance(value, form.types):
            return {TAG: [form.kind, form.content(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {TAG: [_name(type(value)), _tagged_all(getattr(value, name) for name in fields)]}
    if isinstance(value, tuple):  # or a NamedTuple
        return {TAG: [_name(type(value)), _tagged_all(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _tagged(value.tolist())
    raise TypeError(f"ranks exchange plain data, and {type(value).__qualname__} is not; convert it first")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return _untagged_all(value)
    if not isinstance(value, dict):
        return value
    kind, content = value[TAG]
    for form in _FORMS:
        if form.kind == kind:
            return form.value(content)
    items = _untagged_all(content)
    if kind == TUPLE:
        return tuple(items)
    return _class(kind)(*items)


def _name(kind: type) -> str:
    if kind is tuple:
        return TUPLE
    if not kind.__module__.startswith("megatron."):
        raise TypeError(f"ranks exchange plain data, and {kind.__qualname__} of {kind.__module__} is not; convert it")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    kind = None
    # of a module that is imported already: a message runs no code, not even that of an import
    if module.startswith("megatron."):
        kind = vars(sys.modules[module])[qualified]
    if not (isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))):
        raise TypeError(f"{name} is neither a dataclass nor a NamedTuple of this package")
    return kind
