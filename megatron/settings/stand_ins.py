"""Stand-ins for values that cannot be read, so that they hide no other fault.

A fault that is found with each of several values does not depend on the value: it is reported at once, beside the value
that cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron.models.registry import FAMILIES
from megatron.options.config import options, sections
from megatron.options.types import STRICT
from megatron.runtime.devices import device_names
from megatron.tasks.registry import TASKS

# for any type that an option has: a switch, a count, a fraction, a text, three numbers, words
CANDIDATES = (False, True, 1, 2, 3, 0.25, 0.125, 0.5, "one", "two", (1, 2, 3), (2, 4, 6), ("one",), ("two",))
MOST = 3
"""Stand-ins of an option: each is another round of all rules."""
NAMED: Mapping[str, Collection[str]] = {"architecture": FAMILIES, "task": TASKS, "device": device_names()}
"""Options whose values are names in a registry."""


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
    # shifted by its position: a fault of two values together must not pass for one of either
    shifts = range(min(2, max(1, len(values))))
    for number in range(max(map(len, values.values()), default=1)):
        for shift in shifts:
            tree = {section: dict(given) for section, given in known.items()}
            for position, (name, choices) in enumerate(values.items()):
                tree[options()[name][0]][name] = choices[(number + shift * position) % len(choices)]
            yield tree


def faults_in_all(faults_of_each: Iterable[Iterable[str]]) -> list[str]:
    """Return the faults that are found with all values, in the order of the first."""
    first, *others = (list(dict.fromkeys(faults)) for faults in faults_of_each)
    return [fault for fault in first if all(fault in other for other in others)]


def stand_ins(name: str) -> list[Any]:
    """Return two or more values, none of them None, that an option accepts."""
    if name in NAMED:
        return list(NAMED[name])
    hint = get_type_hints(sections()[options()[name][0]], include_extras=True)[name]
    accepted: list[Any] = []
    # the choices of an option that may be unset are one level down, in Literal[...] | None
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            accepted += get_args(part)
    # with one choice alone, nothing would show that a fault depends on the value
    if len(accepted) > 1:
        return accepted[:MOST]
    adapter = TypeAdapter(hint, config=STRICT)
    for candidate in CANDIDATES:
        try:
            value = adapter.validate_python(candidate)
        except ValidationError:
            continue
        if value not in accepted:
            accepted.append(value)
    return accepted[:MOST]
