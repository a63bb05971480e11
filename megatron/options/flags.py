"""Flags from dataclasses of options: their declaration for argparse, their --help, and their values."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron.options.dialect import nearest, one_of, suggestion

Options = TypeVar("Options")
FLAG, KEYWORD = "{flag} {value}", "{name}={value}"
"""Forms in which a message writes an option that is given: on a command line, and in Python."""


class HelpFormatter(argparse.HelpFormatter):
    """Print each metavar as written: argparse would put optional values in brackets."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


@functools.cache
def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the types of the options of a dataclass by name, once evaluated: most of the time of reading a line."""
    return get_type_hints(cls)


def flag(name: str) -> str:
    """Convert a name to its flag: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def option_of(word: str) -> str:
    """Return the name in a flag, with a value or without: `--num-layers=4` -> `num_layers`."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def dashed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with each flag spelled in dashes; Megatron's users also write underscores."""
    words = []
    for word in arguments:
        if word.startswith("--"):
            # the name alone: a value, such as a path, keeps its underscores
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words


def cut(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--`, which are a command's own, and those behind it, which it passes on."""
    # the first one: a further -- belongs to the command that gets the rest
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def doc_of_option(cls: type, name: str) -> str:
    """Return the documentation of an option, on one line."""
    # pydantic reads the docstrings of a class alone, not of those that it inherits from
    of_bases = [vars(base).get("__pydantic_fields__", {}).get(name) for base in cls.__mro__]
    texts = [info.description for info in of_bases if info is not None]
    return " ".join(next(filter(None, texts), "").split())


def grouped_parser(groups: Iterable[tuple[str, type]], **texts: Any) -> argparse.ArgumentParser:
    """Return a parser of the flags of dataclasses, a group each by its title; values stay strings.

    `texts`: prog, usage, description and epilog of argparse.
    """
    # an abbreviation would change its meaning with the next flag that is added
    parser = argparse.ArgumentParser(**texts, allow_abbrev=False, formatter_class=HelpFormatter)
    for title, cls in groups:
        # the docstring of a class is its help too, so that the two cannot differ
        add_flags(parser.add_argument_group(title, (cls.__doc__ or "").strip()), cls)
    return parser


def add_flags(group: argparse._ActionsContainer, cls: type) -> None:
    """Add a flag for each option of a dataclass.

    Values stay strings and a missing one is an empty string, so that all are validated together.
    """
    for name, hint in hints_of(cls).items():
        # argparse formats its help by %
        text = help_of_option(cls, name, getattr(cls, name, None), hint).replace("%", "%%")
        if is_bool(hint):
            group.add_argument(flag(name), dest=name, nargs="?", const="true", help=text, metavar=metavar(hint))
            # --no-X is the flag of no_x itself
            if not name.startswith("no_"):
                negative = flag("no_" + name)
                group.add_argument(negative, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
        # "*", not "+": argparse would end with its own message at the first flag without values
        elif sequence(hint):
            group.add_argument(flag(name), dest=name, nargs="*", help=text, metavar=metavar(hint))
        else:
            group.add_argument(flag(name), dest=name, nargs="?", const="", help=text, metavar=metavar(hint))


def help_of_option(cls: type, name: str, default: Any, hint: Any) -> str:
    """Return the help of an option, with its choices and its default."""
    text = doc_of_option(cls, name)
    if metavar(hint) == "NAME":
        text += f" One of {', '.join(_choices(hint))}."
    if cls.__pydantic_fields__[name].is_required():  # type: ignore[attr-defined]
        return text
    # the text says what that means
    if shown(default) == "unset" and "Unset:" in text:
        return text
    return f"{text} (default: {shown(default)})"


def shown(default: Any) -> str:
    """Format a default as a user would write it."""
    if default is None or default == ():
        return "unset"
    # before str(), which writes True
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def is_bool(hint: Any) -> bool:
    return bool in (hint, *get_args(hint))


def sequence(hint: Any) -> Any:
    """Return the tuple type in `tuple[...]` or `tuple[...] | None`; None for a single value."""
    # the type itself, or a member of its union with None
    return next((part for part in (hint, *get_args(hint)) if get_origin(part) is tuple), None)


def _choices(hint: Any) -> list[str]:
    """Return the values of `Literal[...]` or `Literal[...] | None`; empty for other types."""
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return [str(choice) for literal in literals for choice in get_args(literal)]


def _numbers(hint: Any) -> list[str]:
    """Return INT or FLOAT where a type of choices takes any number too; empty for other types."""
    parts = [getattr(part, "__origin__", part) for part in get_args(hint)]  # Annotated has bounds
    return [part.__name__.upper() for part in (int, float) if part in parts]


def _is_pairs(hint: Any) -> bool:
    """Return True for a tuple of pairs, which are written KEY=VALUE."""
    return any(get_origin(part) is tuple for part in get_args(sequence(hint)))


def metavar(hint: Any) -> str:
    """Return the placeholder of the value in --help: {a,b}, INT, INT INT INT, STR ..."""
    if is_bool(hint):
        return "[BOOL]"
    choices = _choices(hint)
    if choices:
        braced = "{" + ",".join([*_numbers(hint), *choices]) + "}"
        # longer choices would push the help out of a terminal's line; it then lists them in its text
        return braced if len(braced) <= 48 else "NAME"
    if _is_pairs(hint):
        return "KEY=VALUE ..."
    parts = get_args(sequence(hint))
    if parts:
        return " ".join("..." if part is Ellipsis else part.__name__.upper() for part in parts)
    return next(part.__name__.upper() for part in (hint, *get_args(hint)) if part in (int, float, str))


def unset(hint: Any, value: Any) -> Any:
    """Return None for `none` if the option can be unset; otherwise `none` is an ordinary value."""
    is_none = value in ("none", "None", "null", ["none"], ["None"], ["null"])
    if is_none and type(None) in get_args(hint):
        return None
    return value


def read_flags(cls: type[Options], namespace: argparse.Namespace, faults: list[str]) -> Options | None:
    """Return the options of a dataclass from parsed flags; None where one cannot be read, with each fault added."""
    values, without_value = flag_values(cls, namespace)
    faults += [f"{flag(name)} needs a value" for name in without_value]
    return read_values(cls, values, faults)


def read_known_flags(cls: type[Options], namespace: argparse.Namespace, faults: list[str]) -> tuple[Options, set[str]]:
    """Return the options of a dataclass that needs none, and the names of those that cannot be read.

    These have their defaults, and a fault each is added.
    """
    # a flag without a value has its default too: rules on it would report what the user did not say
    values, without_value = flag_values(cls, namespace)
    faults += [f"{flag(name)} needs a value" for name in without_value]
    unread = set(without_value)
    try:
        return TypeAdapter(cls).validate_python(values), unread
    except ValidationError as error:
        faults += _faults_of(error, cls, values)
        unread |= {str(wrong["loc"][0]) for wrong in error.errors()}
    # a second time without them: the others are still needed, for the rules between them
    known = {name: value for name, value in values.items() if name not in unread}
    return TypeAdapter(cls).validate_python(known), unread


def flag_values(cls: type, namespace: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what the flags of a dataclass give, as plain values, and the names of those without a value."""
    values: dict[str, Any] = {}
    without_value: list[str] = []
    for name, hint in hints_of(cls).items():
        value = getattr(namespace, name)
        # as the parser gives a flag without its value; a flag that is not given is None
        if value in ("", []):
            without_value.append(name)
        elif value is not None:
            # a word without = is a list of one, which pydantic reports as missing the second
            if _is_pairs(hint):
                value = [word.split("=", 1) for word in value]
            values[name] = unset(hint, value)
    return values, without_value


def read_values(
    cls: type[Options], values: Mapping[str, Any], faults: list[str], given_as: str = FLAG
) -> Options | None:
    """Return the options of a dataclass from plain values; None where one is wrong, with each fault added.

    `given_as`: FLAG or KEYWORD.
    """
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        faults += _faults_of(error, cls, values, given_as)
        return None


def _faults_of(error: ValidationError, cls: type, values: Mapping[str, Any], given_as: str = FLAG) -> Iterator[str]:
    for wrong in error.errors():
        name, rule = str(wrong["loc"][0]), wrong["msg"]
        # a required option: its name is in no value that could be shown
        if name not in values:
            yield f"{flag(name)} is missing; {_lowered(doc_of_option(cls, name).split('.')[0])}"
            continue
        given = values[name]
        text = " ".join(map(_written, given)) if isinstance(given, list) else str(given)
        if _is_pairs(hints_of(cls)[name]) and wrong["type"] == "missing":
            rule = "write KEY=VALUE"
        yield f"{given_as.format(flag=flag(name), name=name, value=text)}: {_lowered(rule)}"


def _written(value: Any) -> str:
    return "=".join(map(str, value)) if isinstance(value, list) else str(value)


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def unknown_flags(rest: Sequence[str], known: Iterable[str], refused: Mapping[str, str]) -> list[str]:
    """Describe the words that argparse did not recognise. `known`: flags; `refused`: flags, and why."""
    flags, faults = list(known), []
    for word in rest:
        name = word.split("=", 1)[0]
        if name in refused:
            faults.append(f"{name} is not supported: {refused[name]}")
        elif word.startswith("-"):
            faults.append(f"unknown flag {name}; {suggestion(nearest(name, flags), 'see --help')}")
        # behind an unknown flag, words are its values: that fault is enough
        elif not any(other.startswith("-") for other in rest[: rest.index(word)]):
            faults.append(f"{word!r} does not follow a flag; see --help")
    return faults


def unescaped(text: str) -> str:
    """Return a text with \\n, \\t, \\r and \\\\ replaced by the characters that they stand for."""
    # the doubled backslash first, as a character that no text has: else \\n would become a backslash and a line break
    for escape, character in (("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\0", "\\")):
        text = text.replace(escape, character)
    return text


def divisors(number: int, up_to: int) -> str:
    """Format the divisors of `number` for a message: '1, 2, 4 or 8'."""
    return one_of(str(divisor) for divisor in range(1, min(number, up_to) + 1) if number % divisor == 0)
