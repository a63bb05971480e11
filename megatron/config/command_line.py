"""Build a config from presets and the command line; report every fault at once."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.command_names import train_name
from megatron.config.options import Config, ConfigError, flag, option_doc, options, sections
from megatron.config.validation import check
from megatron.files import IMPORT_ROOT

PRESETS_DIR = IMPORT_ROOT / "megatron" / "presets"


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    config, faults = _build(tree)
    if config is None or faults:
        raise ConfigError(faults)
    return config


def _build(tree: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """Return the config of the known options in `tree` (None if a value is invalid), and every fault."""
    known: dict[str, dict[str, Any]] = {}
    faults = [
        f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in tree if name not in sections()
    ]
    for section, cls in sections().items():
        values = tree.get(section) or {}
        if not isinstance(values, dict):
            faults.append(f"section {section!r} is {values!r}; it must be a mapping of options")
            continue
        hints = get_type_hints(cls)
        faults += [_unknown_option(str(name), section) for name in values if name not in hints]
        known[section] = {
            # a sequence may be written as one string: `rampup_batch_size: 16 16 5000000`
            name: value.split() if isinstance(value, str) and _sequence(hints[name]) else value
            for name, value in values.items()
            if name in hints
        }
    try:
        return TypeAdapter(Config).validate_python(known), faults
    except ValidationError as error:
        wrong = [_wrong_value(known, fault["loc"], fault["type"], fault["msg"]) for fault in error.errors()]
        return None, faults + list(dict.fromkeys(wrong))


def _wrong_value(known: dict[str, dict[str, Any]], where: tuple[int | str, ...], kind: str, rule: str) -> str:
    """Describe a value of the wrong type or out of range."""
    section, name = str(where[0]), str(where[1])
    value = known[section][name]
    wanted = get_args(_sequence(get_type_hints(sections()[section])[name]))
    if kind in ("missing", "too_short", "too_long") and wanted:
        rule = f"expected {len(wanted)} values, not {len(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    return f"{section}.{name}={shown}: {rule[:1].lower()}{rule[1:]}"


def _unknown_option(name: str, section: str) -> str:
    """Describe an unknown option: its right section, or the most similar name."""
    if name in options():
        return f"option {name!r} in section {section!r} belongs in section {options()[name][0]!r}"
    near = difflib.get_close_matches(name, options(), n=1)
    hint = f"; did you mean {near[0]!r} in section {options()[near[0]][0]!r}?" if near else "; see --help"
    return f"unknown option {name!r} in section {section!r}{hint}"


class _PresetLoader(yaml.SafeLoader):
    """YAML's safe loader, rejecting duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_preset(name: str) -> dict[str, Any]:
    """Return the nested values of a preset, given by path or by its name in megatron/presets/."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in PRESETS_DIR.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError([f"config {name!r} not found; {hint}the presets are {', '.join(known)}"])
    try:
        tree = _PresetLoader(path.read_text(encoding="utf-8")).get_single_data() or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config {path} is not valid YAML: {' '.join(str(error).split())}"]) from None
    except OSError as error:
        raise ConfigError([f"config {path} cannot be read: {error.strerror}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config {path} is a {type(tree).__name__}; it must be a mapping of sections"])
    return tree


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two presets: values of `above`, `null` included, override those of `below`."""
    both = dict(below)
    for section, values in above.items():
        under = both.get(section)
        if under is None:
            both[section] = values
        elif values is not None:
            # `_build` reports what is not a mapping
            both[section] = under | values if isinstance(under, dict) and isinstance(values, dict) else values
    return both


class _HelpFormatter(argparse.HelpFormatter):
    """Print each metavar as written: argparse would put optional values in brackets."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


def build_parser() -> argparse.ArgumentParser:
    """Return a parser with one flag per option, grouped by section.

    Values stay strings and a missing one is an empty string, so that all are validated together.
    """
    parser = argparse.ArgumentParser(
        prog=train_name(),
        usage="%(prog)s --config PRESET [--flag VALUE ...]",
        description="Train a model with tensor, pipeline and data parallelism. The command line overrides the presets, "
        "which override the defaults. A BOOL flag alone means true, --no-FLAG means false; `none` unsets an option.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        nargs="?",
        const="",
        metavar="PRESET",
        help="preset name or YAML file; repeatable, later presets override earlier ones option by option",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and exit")
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for name, hint in get_type_hints(cls).items():
            text = _help_text(section, name, getattr(cls, name), hint).replace("%", "%%")
            if hint is bool:
                group.add_argument(flag(name), dest=name, nargs="?", const="true", help=text, metavar=_metavar(hint))
                if not name.startswith("no_"):
                    negative = flag("no_" + name)
                    group.add_argument(negative, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
            elif _sequence(hint):
                group.add_argument(flag(name), dest=name, nargs="*", help=text, metavar=_metavar(hint))
            else:
                group.add_argument(flag(name), dest=name, nargs="?", const="", help=text, metavar=_metavar(hint))
    return parser


def _help_text(section: str, name: str, default: Any, hint: Any) -> str:
    text = option_doc(section, name)
    if _metavar(hint) == "NAME":
        text += f" One of {', '.join(_choices(hint))}."
    says_unset = shown(default) == "unset" and "Unset:" in text
    return text if says_unset else f"{text} (default: {shown(default)})"


def shown(default: Any) -> str:
    """Format a default as a user would write it."""
    if default is None or default == ():
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _sequence(hint: Any) -> Any:
    """Return the tuple type in `tuple[...]` or `tuple[...] | None`; None for a single value."""
    return next((part for part in (hint, *get_args(hint)) if get_origin(part) is tuple), None)


def _choices(hint: Any) -> list[str]:
    """Return the values of `Literal[...]` or `Literal[...] | None`; empty for other types."""
    return [str(c) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]


def _metavar(hint: Any) -> str:
    """Return the placeholder of the value in --help: {a,b}, INT, INT INT INT, STR ..."""
    if hint is bool:
        return "[BOOL]"
    if choices := _choices(hint):
        braced = "{" + ",".join(choices) + "}"
        return braced if len(braced) <= 48 else "NAME"
    if sequence := _sequence(hint):
        return " ".join("..." if part is Ellipsis else part.__name__.upper() for part in get_args(sequence))
    return next(part.__name__.upper() for part in (hint, *get_args(hint)) if part in (int, float, str))


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """Return the config of a command line, and the parsed namespace.

    Raises ConfigError with every unknown flag and wrong value.
    """
    config, namespace, faults = _parse(arguments)
    if config is None or faults:
        raise ConfigError(faults)
    return config, namespace


def _parse(arguments: Sequence[str]) -> tuple[Config | None, argparse.Namespace, list[str]]:
    """Return config, namespace and faults; the config is None if the faults leave nothing to check."""
    words = _dashed(arguments)
    namespace, rest = build_parser().parse_known_args(words)
    faults = _stray_words(words, rest)
    tree: dict[str, Any] = {}
    unread = False
    for name in presets_of(namespace):
        if name == "":
            faults.append("--config needs a value: a preset name or a YAML file")
            continue
        try:
            tree = merged(tree, read_preset(name))
        except ConfigError as error:
            faults += error.faults
            unread = True
    for section, cls in sections().items():
        given = {name: getattr(namespace, name) for name in get_type_hints(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        faults += [f"{flag(name)} needs a value" for name, value in given.items() if value in ("", [])]
        if tree.get(section) is None:
            tree[section] = {}
        if isinstance(tree[section], dict):
            tree[section] |= {name: _unset(cls, name, value) for name, value in given.items() if value not in ("", [])}
    config, wrong = _build(tree)
    return None if unread else config, namespace, faults + wrong


def presets_of(namespace: argparse.Namespace) -> list[str]:
    """Return the presets of a command line, in order of increasing precedence."""
    names: list[str] = namespace.config or []
    return list(dict.fromkeys(reversed(names)))[::-1]


def _dashed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with each flag spelled in dashes; Megatron's users also write underscores."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def _unset(cls: type, name: str, value: Any) -> Any:
    """Return None for `none` if the option can be unset; otherwise `none` is an ordinary value."""
    is_none = value in ("none", "None", "null", ["none"], ["None"], ["null"])
    return None if is_none and type(None) in get_args(get_type_hints(cls)[name]) else value


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
    near = difflib.get_close_matches(name, [flag(option) for option in options()], n=1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Read the command line and validate it for `world_size` ranks (default: the launcher's WORLD_SIZE, else 1).

    Raises ConfigError with every fault. `--print-config` prints the config and exits with 0.
    """
    config, namespace, faults = _parse(arguments)
    if config is not None and not (namespace.print_config and not faults):
        faults += check(config, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    if config is None or faults:
        raise ConfigError(faults)
    if namespace.print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """Format the config as a preset that sets every option."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)
    return text
