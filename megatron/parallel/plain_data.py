"""Plain data as bytes, for messages between ranks: JSON, so that nothing that arrives is unpickled or executed.

torch's own collectives of objects unpickle what they receive, over connections that anybody in the network may open.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

TAG = "%"
"""Key of an object that JSON has no form of: a list of its kind and its content."""


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


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tagged(one) for one in value]
    if isinstance(value, dict):
        return {TAG: ["dict", [[_tagged(key), _tagged(one)] for key, one in value.items()]]}
    if isinstance(value, bytes):
        return {TAG: ["bytes", value.hex()]}
    if isinstance(value, Path):
        return {TAG: ["path", str(value)]}
    if isinstance(value, (set, frozenset)):
        return {TAG: ["set", [_tagged(one) for one in value]]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = [_tagged(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
        return {TAG: [_name(type(value)), content]}
    if isinstance(value, tuple):
        kind = "tuple" if type(value) is tuple else _name(type(value))
        return {TAG: [kind, [_tagged(one) for one in value]]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _tagged(value.tolist())
    raise TypeError(f"ranks exchange plain data, and {type(value).__qualname__} is not; convert it first")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind, content = value[TAG]
    if kind == "dict":
        return {_untagged(key): _untagged(one) for key, one in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "path":
        return Path(content)
    items = [_untagged(one) for one in content]
    if kind in ("tuple", "set"):
        return tuple(items) if kind == "tuple" else set(items)
    return _class(kind)(*items)


def _name(kind: type) -> str:
    if not kind.__module__.startswith("megatron."):
        raise TypeError(f"ranks exchange plain data, and {kind.__qualname__} of {kind.__module__} is not; convert it")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    kind = vars(sys.modules[module])[qualified] if module.startswith("megatron.") else None
    if not (isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))):
        raise TypeError(f"{name} is neither a dataclass nor a NamedTuple of this package")
    return kind
