"""Values of HL_* variables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)


class WrongValueError(ValueError):
    """A variable's value cannot be used; the message says which can."""


def whole_number(text: str, at_least: int = 0) -> int:
    """Convert a variable's text. Raises WrongValueError."""
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise WrongValueError(f"must be a whole number, {at_least} or more")
    return number


def is_on(text: str) -> bool:
    """Convert a switch. Raises WrongValueError."""
    if text.lower() not in ("0", "1", "false", "true"):
        raise WrongValueError("must be 0 or 1")
    return text.lower() in ("1", "true")


def chosen(text: str, choices: tuple[Choice, ...]) -> Choice:
    """Return the choice that a text is. Raises WrongValueError."""
    for choice in choices:
        if text == choice:
            return choice
    raise WrongValueError(f"must be {one_of(choices)}")


def words(text: str) -> tuple[str, ...]:
    """Return names between spaces or commas, those with spaces in quotes. Raises WrongValueError."""
    try:
        return tuple(shlex.split(text.replace(",", " ")))
    except ValueError as error:
        raise WrongValueError(f"cannot be read ({error}); put a name with spaces in quotes") from None


def one_of(values: Mapping[str, object] | tuple[str, ...]) -> str:
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last
