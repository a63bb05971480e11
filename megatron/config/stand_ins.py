"""Stand-ins for values that cannot be read: a fault found with each of several does not depend on the value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron.config.options import options, sections
from megatron.config.plugins import PLACES, known_plugins
from megatron.config.types import STRICT

CANDIDATES = (False, True, 1, 2, 3, 0.25, 0.5, "one", "two", (1, 2, 3), (2, 4, 6), ("one",), ("two",))
MOST = 3
"""Stand-ins of an option: each is another round of all rules."""


def with_stand_ins(
    known: Mapping[str, Mapping[str, Any]], unread: Collection[str], perhaps_given: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the values of `known`, by section, with stand-ins for options; as they are if there are none.

    Every option has at least two values over the trees, and two options do not always have theirs together.

    Args:
        unread: options whose value cannot be read.
        perhaps_given: options that may have any value, the default included.
    """
    values = {name: stand_ins(name) for name in sorted(unread)}
    for name in sorted(perhaps_given):
        values[name] = [options()[name][1].default, *stand_ins(name)]
    shifts = range(2 if len(values) > 1 else 1)
    for number in range(max(map(len, values.values()), default=1)):
        for shift in shifts:
            tree = {section: dict(given) for section, given in known.items()}
            for place, (name, choices) in enumerate(values.items()):
                tree[options()[name][0]][name] = choices[(number + shift * place) % len(choices)]
            yield tree


def stand_ins(name: str) -> list[Any]:
    """Return two or more values, none of them None, that an option accepts."""
    for kind in PLACES:
        if kind == name:
            return known_plugins(kind)
    hint = get_type_hints(sections()[options()[name][0]], include_extras=True)[name]
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            return list(get_args(part))[:MOST]
    adapter, accepted = TypeAdapter(hint, config=STRICT), list[Any]()
    for candidate in CANDIDATES:
        try:
            value = adapter.validate_python(candidate)
        except ValidationError:
            continue
        if value not in accepted:
            accepted.append(value)
    return accepted[:MOST]
