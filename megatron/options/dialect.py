"""Translation of an interface of others into options of ours, by a table: a row for each of their names.

Translated are HL_* variables, flags of optimum-habana's scripts, a finetune_lora.yaml and InstructLab's arguments.
Help, pages of documentation and refusals follow from the same rows. What depends on several names is the dialect's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Setting = tuple[str, Any]
"""Name and value: of an option or flag, a variable, a field of a request, or of what a dialect joins with others."""
Outcome = Literal["sets", "honoured", "no effect", "refused"]
Form = Literal["value", "switch", "words", "texts"]
"""Form of a value on a command line. `texts`: words that may hold blanks, quoted as in a shell."""
TRUE, FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
"""Values of a switch on a command line, in any case."""


class WrongValueError(ValueError):
    """A value cannot be used; the message says which can."""


def _nothing(value: Any) -> Sequence[Setting]:
    return ()


@dataclass(frozen=True)
class Entry:
    """One of their names, and what becomes of it."""

    name: str
    """A trailing * matches every name that starts so."""
    outcome: Outcome
    """`honoured`: what it requests always holds here."""
    text: str = ""
    """Meaning, or reason of the outcome with the remedy, in Markdown."""
    convert: Callable[[Any], Sequence[Setting]] = _nothing
    """Returns what a value sets. Raises WrongValueError."""
    targets: tuple[str, ...] = ()
    """Names that it is for; it may set others too, which rows of their own override."""
    takes: Form = "value"
    default: str | None = None
    """Their value where the name is left out. None: what is the default here."""
    accepts: tuple[str, ...] = ()
    """The only values that are not refused, where a row is refused or has no effect."""
    scripts: tuple[str, ...] = ()
    """Scripts that have the name, where several share a table."""

    def covers(self, name: str) -> bool:
        return name == self.name or (self.name.endswith("*") and name.startswith(self.name[:-1]))

    def refuses(self, value: Any) -> bool:
        """Return whether a value is refused: one that `accepts` does not have."""
        has_values = self.outcome == "refused" or (self.outcome == "no effect" and bool(self.accepts))
        return has_values and str(value).lower() not in self.accepts

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of ours among the targets."""
        return tuple(target for target in self.targets if target.startswith("--"))

    @property
    def reason(self) -> str:
        """The text for a terminal."""
        return self.text.replace("`", "")


@dataclass(frozen=True)
class Dialect:
    """Rows of an interface, and the wording of its messages."""

    rows: tuple[Entry, ...]
    unknown: Callable[[str, Any, str | None], str]
    """Describes a name without a row, its value, and the most similar name that is not refused."""
    prefix: str = ""
    """Prefix of all names."""
    refused: str = "{name}={value} is not supported: {reason}"
    no_effect: str = "{name}={value} has no effect: {reason}"
    has_one_source: bool = False
    """Two names that set one thing differently are a fault. Otherwise the last one counts."""

    def row(self, name: str) -> Entry | None:
        return next((row for row in self.rows if row.covers(name)), None)

    def defaults(self) -> Iterator[tuple[Entry, Setting]]:
        """Yield what counts where names are left out."""
        for row in self.rows:
            if row.default is not None:
                for setting in row.convert(row.default):
                    yield row, setting

    def translate(self, given: Iterable[tuple[str, Any]]) -> Translation:
        """Return what the names and values set, with every fault."""
        result = Translation()
        for name, value in given:
            row = self.row(name)
            # the first row that covers a name counts
            if row is not None:
                self._read(row, name, value, result)
                continue
            # a refused name would be no remedy
            usable = {row.name: row for row in self.rows if row.outcome != "refused"}
            near = nearest(name, usable, self.prefix)
            result.faults.append(self.unknown(name, value, near))
            # what was meant is probably this: rules about it would only report consequences of the misspelt name
            if near is not None:
                result.unread.update(usable[near].targets)
        return result

    def _read(self, row: Entry, name: str, value: Any, result: Translation) -> None:
        try:
            # checked even where nothing is set: `honoured` rows have no conversion that would
            if row.takes == "switch":
                is_true(value)
            settings = row.convert(value)
        except WrongValueError as why:
            result.faults.append(f"{name}={value!r} {why}")
            result.unread.update(row.targets)
            return
        words = {"name": name, "value": value, "reason": row.reason}
        # a refused value is read all the same: it may contradict another name, which is a fault too
        if row.refuses(value):
            result.faults.append(self.refused.format(**words))
        # a switch that is off requests nothing, so a note about it would be noise
        elif row.outcome == "no effect" and str(value).lower() not in FALSE:
            result.notes.append(self.no_effect.format(**words))
        given = Translated(row, f"{name}={value}", dict(settings))
        if self.has_one_source:
            _check_agreement(given, result)
        result.given.append(given)
        for target, setting in settings:
            # the last one counts, as on any command line
            result.settings[target] = setting
            result.sources[target] = name


@dataclass(frozen=True)
class Translated:
    """A name as it was given, and what it sets."""

    row: Entry
    text: str
    settings: dict[str, Any]


@dataclass
class Translation:
    """Names and values in our words."""

    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Their name by what it sets, for messages."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Names that values among the faults would set."""
    given: list[Translated] = field(default_factory=list)


def _check_agreement(given: Translated, result: Translation) -> None:
    """Add a fault for each earlier name that sets the same differently."""
    for earlier in result.given:
        target = _disputed(given, earlier)
        if target is None:
            continue
        both = f"{earlier.text} and {given.text}"
        what = f"set {target} differently" if target.startswith("--") else "mean the same thing"
        result.faults.append(f"{both} {what}; set one of them")
        result.unread.update(given.row.targets, earlier.row.targets)


def _disputed(one: Translated, other: Translated) -> str | None:
    """Return the first name that both are for, and set differently."""
    shared = [name for name in one.row.targets if name in other.row.targets]
    shared = [name for name in shared if name in one.settings and name in other.settings]
    if shared and one.row.targets == other.row.targets:  # two names of one variable agree in all that they set
        return shared[0] if one.settings != other.settings else None
    return next((name for name in shared if one.settings[name] != other.settings[name]), None)


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags among the settings, with their values."""
    words = []
    for name, value in settings.items():
        if name.startswith("--"):
            words += [name, *_words(value)]
    return words


def _words(value: Any) -> list[str]:
    # before str: Python would write True, argparse and YAML take true
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, (list, tuple)):
        return [str(word) for word in value]
    return [str(value)]


# Rows by outcome.


def as_is(value: Any) -> Any:
    return value


def sets(
    name: str,
    target: str,
    text: str = "",
    read: Callable[[Any], Any] = as_is,
    scripts: tuple[str, ...] = (),
    default: str | None = None,
    takes: Form = "value",
) -> Entry:
    """Return a row whose value, as `read` converts it, is that of a name of ours."""
    return Entry(name, "sets", text, lambda value: [(target, read(value))], (target,), takes, default, scripts=scripts)


def honoured(name: str, text: str, takes: Form = "switch") -> Entry:
    return Entry(name, "honoured", text, takes=takes)


def no_effect(name: str, text: str, takes: Form = "value") -> Entry:
    return Entry(name, "no effect", text, takes=takes)


def refused(name: str, text: str, takes: Form = "value", accepts: str = "") -> Entry:
    """Return a row that is refused, but for the values, between spaces, that request nothing."""
    # a refused switch may be off, as scripts write out all of theirs
    off = FALSE if takes == "switch" else tuple(accepts.split())
    return Entry(name, "refused", text, takes=takes, accepts=off)


# Conversions of values.


def number(fits: Callable[[float], bool], rule: str) -> Callable[[Any], str]:
    """Return the conversion of a number that a rule holds for; YAML reads 1e-4 as a string."""

    def read(value: Any) -> str:
        try:
            # OverflowError: YAML reads a whole number of any length
            is_right = fits(float(value))
        except (TypeError, ValueError, OverflowError):
            is_right = False
        if not is_right:
            raise WrongValueError(rule)
        # as it was written: the option's own type reads it, and describes it in messages
        return str(value)

    return read


def whole(at_least: int = 0) -> Callable[[Any], int]:
    """Return the conversion of a whole number."""

    def read(text: Any) -> int:
        try:
            # text with a fraction is refused, as int() does not read it
            number = int(text)
        except (TypeError, ValueError):  # several words are a list
            number = at_least - 1
        if number < at_least:
            raise WrongValueError(f"must be a whole number, {at_least} or more")
        return number

    return read


def one_in(choices: Iterable[str], hint: str = "") -> Callable[[str], str]:
    """Return the conversion of one of several words. `hint` follows the rule in the message."""
    allowed = tuple(choices)

    def read(text: str) -> str:
        if text not in allowed:
            raise WrongValueError(f"must be {one_of(allowed)}{hint}")
        return text

    return read


def is_true(text: str) -> bool:
    """Convert a switch of a command line. Raises WrongValueError."""
    if text.lower() not in (*TRUE, *FALSE):
        raise WrongValueError("must be True or False")
    return text.lower() in TRUE


def one_of(values: Iterable[str]) -> str:
    """List alternatives: `a, b or c`."""
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last


def suggestion(near: str | None, otherwise: str) -> str:
    """Return the remedy for an unknown name: the most similar one, if there is one."""
    return f"did you mean {near}?" if near else otherwise


def nearest(name: str, names: Iterable[str], prefix: str = "", *, least: float = 0.6) -> str | None:
    """Return the most similar name; the prefix that all share would make any short name near to any other.

    `least`: similarity from which a name counts, of 1.
    """
    rest = [known.removeprefix(prefix) for known in names]
    near = difflib.get_close_matches(name.removeprefix(prefix), rest, n=1, cutoff=least)
    return prefix + near[0] if near else None
