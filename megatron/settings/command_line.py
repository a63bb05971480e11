"""Build a config from presets and the command line; report every fault at once."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron.models.registry import FAMILIES
from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.flags import dashed, flag, unset
from megatron.options.presets import merged, read_preset
from megatron.options.stored import CONFIG, known_values, nearest, to_yaml
from megatron.options.types import STRICT
from megatron.runtime.devices import device_names
from megatron.runtime.files import show
from megatron.settings.loaded import with_loaded_adapters, with_loaded_model
from megatron.settings.parser import answer_to, build_parser, help_text, help_topic
from megatron.settings.validation import check
from megatron.tasks.registry import TASKS


@dataclass(frozen=True)
class CommandLine:
    """A command line as far as it can be read."""

    configs: Sequence[Config]
    """The config; if values cannot be read, several that differ in these values only."""
    faults: Sequence[str]
    """Unknown words and values that cannot be read."""
    notes: Sequence[str]
    """Options of presets that others replaced."""
    given: Collection[str]
    """Names of the options that presets and flags give, `none` included."""
    namespace: argparse.Namespace

    def faults_of(self, rules: Callable[[Config], Iterable[str]]) -> list[str]:
        """Return the faults that `rules` yields for every config: those that need no value that cannot be read."""
        return faults_in_all(rules(config) for config in self.configs)

    @property
    def config(self) -> Config:
        """The config, if all could be read."""
        return self.configs[0]


def faults_in_all(found: Iterable[Iterable[str]]) -> list[str]:
    """Return the faults that are in each of `found`, in the order of the first."""
    first, *others = (list(dict.fromkeys(faults)) for faults in found)
    return [fault for fault in first if all(fault in other for other in others)]


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """Return the config of a command line, and the parsed namespace.

    Raises ConfigError with every unknown flag and wrong value.
    """
    command = read_command_line(arguments)
    if command.faults:
        raise ConfigError(command.faults)
    return command.config, command.namespace


def read_command_line(arguments: Sequence[str], unread: Collection[str] = ()) -> CommandLine:
    """Read presets and flags.

    `unread`: options whose values the caller could not read, and reports itself; `config` is all of them.
    """
    words = dashed(arguments)
    namespace, rest = build_parser().parse_known_args(words)
    reading, notes = _Reading(_stray_words(words, rest), set(unread)), list[str]()
    for word in rest:
        if word.startswith("-"):
            reading.unread |= set(nearest(_option_name(word), options()))
    tree = _preset_values(presets_of(namespace), notes, reading)
    flags = _flag_values(namespace, reading)
    tree = merged(tree, flags, notes)
    with reading.faults_kept():
        tree = with_loaded_model(tree, notes)
    known, wrong, unusable = known_values(tree)
    reading.unread |= unusable
    perhaps_given: set[str] = set()
    if "config" in reading.unread:  # a preset that cannot be read might give every option that no flag does
        perhaps_given = options().keys() - set(chain.from_iterable(flags.values())) - reading.unread
    trees = with_stand_ins(known, reading.unread - {"config"}, perhaps_given)
    configs = [CONFIG.validate_python(values) for values in trees]
    given = set(chain.from_iterable(known.values()))
    with reading.faults_kept():
        configs = [with_loaded_adapters(config, given) for config in configs]
    return CommandLine(configs, reading.faults + wrong, notes, given, namespace)


@dataclass
class _Reading:
    """Faults of a command line as far as it is read."""

    faults: list[str]
    unread: set[str]
    """Options whose values cannot be used; `config`: a preset, which may give any."""

    @contextlib.contextmanager
    def faults_kept(self) -> Iterator[None]:
        """Go on after a preset, or a folder that takes the place of one, that cannot be read."""
        try:
            yield
        except ConfigError as error:
            self.faults += error.faults
            self.unread.add("config")


def _preset_values(names: Iterable[str], notes: list[str], reading: _Reading) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in names:
        with reading.faults_kept():
            if name == "":
                raise ConfigError(["--config needs a value: a preset name or a YAML file"])
            tree = merged(tree, read_preset(name), notes)
    return tree


def _flag_values(namespace: argparse.Namespace, reading: _Reading) -> dict[str, dict[str, Any]]:
    """Return the values of the given flags, by section."""
    tree: dict[str, dict[str, Any]] = {}
    for section, cls in sections().items():
        tree[section] = {}
        for name, hint in get_type_hints(cls).items():
            value = getattr(namespace, name)
            if value in ("", []):
                reading.faults.append(f"{flag(name)} needs a value")
                reading.unread.add(name)
            elif value is not None:
                tree[section][name] = unset(hint, value)
    return tree


def _option_name(word: str) -> str:
    """Return the option's name in a flag: `--num-layers=4` -> `num_layers`."""
    return word.split("=", 1)[0].removeprefix("--").replace("-", "_")


def presets_of(namespace: argparse.Namespace) -> list[str]:
    """Return the presets of a command line, in order of increasing precedence."""
    names: list[str] = namespace.config or []
    return list(dict.fromkeys(reversed(names)))[::-1]


def _stray_words(arguments: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Describe `rest`, the words that argparse did not recognise: unknown flags, and values without a flag."""
    unknown = [word for word in rest if word.startswith("-")]
    values_of_unknown: list[str] = []
    follows_unknown = False
    for word in arguments:
        if word.startswith("-"):
            follows_unknown = word in unknown
        elif follows_unknown:
            values_of_unknown.append(word)
    faults = [_unknown_flag(word) for word in unknown]
    for word in rest:
        if word in values_of_unknown:
            values_of_unknown.remove(word)
        elif word not in unknown:
            faults.append(
                f"{word!r} does not follow a flag; write --FLAG {word}, with one value for a flag that takes one"
            )
    return faults


def _unknown_flag(word: str) -> str:
    name = word.split("=", 1)[0]
    if (answer := answer_to(name)) is not None:
        return f"{name} of Megatron {answer}"
    near = nearest(_option_name(word), options())
    return f"unknown flag {name}" + (f"; did you mean {flag(near[0])}?" if near else "; see --help")


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Return the config of `load_command_line`."""
    return load_command_line(arguments, world_size).config


def load_command_line(
    arguments: Sequence[str], world_size: int | None = None, *more: Callable[[Config, int], Iterable[str]]
) -> CommandLine:
    """Read the command line and validate it for `world_size` ranks (default: the launcher's WORLD_SIZE, else 1).

    `more`: rules beside those of the options, for a config and a number of ranks.

    Raises ConfigError with every fault. `--help` and `--print-config` print and exit with 0.
    """
    if (topic := help_topic(arguments)) is not None:
        show(help_text(topic))
        raise SystemExit(0)
    command = read_command_line(arguments)
    faults, prints = list(command.faults), command.namespace.print_config
    if faults or not prints:
        ranks = world_size or _launched_ranks(faults)
        faults += command.faults_of(lambda config: chain(*(rules(config, ranks) for rules in (check, *more))))
    if faults:
        raise ConfigError(faults)
    if prints:
        show(to_yaml(command.config))
        raise SystemExit(0)
    return command


def _launched_ranks(faults: list[str]) -> int:
    """Return the launcher's WORLD_SIZE, 1 without a launcher; any other value is a fault, added to `faults`."""
    given = os.environ.get("WORLD_SIZE", "1")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    faults.append(f"WORLD_SIZE={given!r} must be a whole number, 1 or more; the launcher sets it, else unset it")
    return 1


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for values that cannot be read: a fault found with each of several does not depend on the value.

CANDIDATES = (False, True, 1, 2, 3, 0.25, 0.5, "one", "two", (1, 2, 3), (2, 4, 6), ("one",), ("two",))
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
    shifts = range(2 if len(values) > 1 else 1)
    for number in range(max(map(len, values.values()), default=1)):
        for shift in shifts:
            tree = {section: dict(given) for section, given in known.items()}
            for place, (name, choices) in enumerate(values.items()):
                tree[options()[name][0]][name] = choices[(number + shift * place) % len(choices)]
            yield tree


def stand_ins(name: str) -> list[Any]:
    """Return two or more values, none of them None, that an option accepts."""
    if name in NAMED:
        return list(NAMED[name])
    hint = get_type_hints(sections()[options()[name][0]], include_extras=True)[name]
    accepted: list[Any] = []
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            accepted += get_args(part)
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
