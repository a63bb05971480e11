"""Build a config from presets and the command line; report every fault at once."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.dependents import ADAPTERS
from megatron.options.flags import dashed, flag, sequence, unset
from megatron.options.types import STRICT
from megatron.runtime.files import show
from megatron.settings.parser import PRESETS_DIR, answer_to, build_parser, help_text, help_topic
from megatron.settings.plugins import PLACES, known_plugins, with_loaded_adapters, with_loaded_model
from megatron.settings.validation import check

# Options that say the same in other words: one that is given replaces the others of presets below it.
ALTERNATIVES = (
    ("train_samples", "train_iters", "num_epochs"),
    ("lr_decay_samples", "lr_decay_iters"),
    ("lr_warmup_samples", "lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_wsd_decay_samples", "lr_wsd_decay_iters"),
    ("bf16", "fp16"),
    ("eod_token", "eod_token_id"),
)
# Options that have no effect with any other position encoding; a preset's are left out there.
POSITIONS = {
    "rope": (
        "rotary_base",
        "rope_scaling_factor",
        "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_original_length",
    ),
    "learned": ("max_position_embeddings",),
}
UNSET = (None, False, 0, "none", "None", "null", "false", "False", "0", "")


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


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    known, faults, _ = _known_values(tree)
    if faults:
        raise ConfigError(faults)
    return _CONFIG.validate_python(known)


_CONFIG = TypeAdapter(Config)


def _known_values(tree: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str], set[str]]:
    """Return the values of known options by section, every fault, and the options whose values cannot be used."""
    known: dict[str, dict[str, Any]] = {}
    unread: set[str] = set()
    faults = [
        f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in tree if name not in sections()
    ]
    for section, cls in sections().items():
        values = tree.get(section) or {}
        hints = get_type_hints(cls)
        if not isinstance(values, dict):
            faults.append(f"section {section!r} is {values!r}; it must be a mapping of options")
            unread |= set(hints)
            values = {}
        for name in (str(name) for name in values if name not in hints):
            faults.append(_unknown_option(name, section))
            unread |= set(_nearest(name, options()))
        known[section] = {
            # a sequence may be written as one string: `rampup_batch_size: 16 16 5000000`
            name: value.split() if isinstance(value, str) and sequence(hints[name]) else value
            for name, value in values.items()
            if name in hints
        }
    try:
        _CONFIG.validate_python(known)
    except ValidationError as error:
        wrong = error.errors()
        # an option of several types has a fault for each of them
        rules: dict[tuple[int | str, ...], list[str]] = {}
        for fault in wrong:
            rules.setdefault(fault["loc"][:2], []).append(fault["msg"])
        joined = {where: " or ".join(dict.fromkeys(found)) for where, found in rules.items()}
        faults += dict.fromkeys(
            _wrong_value(known, fault["loc"], fault["type"], joined[fault["loc"][:2]]) for fault in wrong
        )
        unread |= {str(fault["loc"][1]) for fault in wrong}
    return known, faults, unread


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar one of `names`, if any is."""
    return difflib.get_close_matches(name, list(names), n=1)


def _wrong_value(known: dict[str, dict[str, Any]], where: tuple[int | str, ...], kind: str, rule: str) -> str:
    """Describe a value of the wrong type or out of range."""
    section, name = str(where[0]), str(where[1])
    value = known[section][name]
    wanted = get_args(sequence(get_type_hints(sections()[section])[name]))
    if kind in ("missing", "too_short", "too_long") and wanted:
        rule = f"expected {len(wanted)} values, not {len(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    return f"{section}.{name}={shown}: {rule[:1].lower()}{rule[1:]}"


def _unknown_option(name: str, section: str) -> str:
    """Describe an unknown option: its right section, or the most similar name."""
    if name in options():
        return f"option {name!r} in section {section!r} belongs in section {options()[name][0]!r}"
    near = _nearest(name, options())
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


def is_finetune_file(tree: Mapping[str, Any]) -> bool:
    """Return True for the values of a finetune_lora.yaml, which launch/finetune_file.py translates."""
    return not {"model_id", "LoRA"}.isdisjoint(tree)


def read_preset(name: str, *, translated: bool = False) -> dict[str, Any]:
    """Return the nested values of a preset, given by path or by its name in megatron/presets/.

    `translated`: also those of a finetune_lora.yaml. Raises ConfigError.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in PRESETS_DIR.glob("*.yaml"))
        near = _nearest(Path(name).stem, known)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError([f"config {name!r} not found; {hint}the presets are {', '.join(known)}"])
    try:
        tree = _PresetLoader(path.read_text(encoding="utf-8")).get_single_data() or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config {path} is not valid YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"config {path} is nested too deeply; it holds sections, and options in them"]) from None
    except OSError as error:
        raise ConfigError([f"config {path} cannot be read: {error.strerror}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config {path} is a {type(tree).__name__}; it must be a mapping of sections"])
    if is_finetune_file(tree) and not translated:
        raise ConfigError([f"config {path} sets model_id or LoRA; only scripts/run_sft.sh --config reads such a file"])
    return tree


def merged(below: dict[str, Any], above: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Merge two presets: values of `above`, `null` included, override those of `below`.

    Values of `below` that `above` says in other words, or deprives of effect, are left out, with a line in `notes`.
    """
    both = dict(below)
    for section, values in above.items():
        under = both.get(section)
        if under is None or (values is not None and isinstance(under, dict) and not isinstance(values, dict)):
            both[section] = values  # `_known_values` reports what is not a mapping
        elif values is not None and isinstance(under, dict):
            both[section] = under | values
            for by, names in _replaced(under, values).items():
                notes.append(f"{by} replaces the preset's {', '.join(f'{name}={under[name]}' for name in names)}")
                for name in names:
                    del both[section][name]
    return both


def _replaced(below: dict[str, Any], above: dict[str, Any]) -> dict[str, list[str]]:
    """Return the options of `below` that are replaced, by option=value of `above`, within a section."""
    found: dict[str, list[str]] = {}
    for group in ALTERNATIVES:
        # of several the one that is not zero; a zero alone replaces too, since it requests none
        set_ones = [name for name in group if name in above and above[name] not in UNSET]
        zeros = [name for name in group if name in above and _is_zero(above[name])]
        for chosen in (set_ones or zeros)[:1]:
            found[f"{chosen}={above[chosen]}"] = [name for name in group if name not in above]
    encoding = above.get("position_embedding_type")
    for needed, names in POSITIONS.items():
        if encoding not in (None, needed):
            found.setdefault(f"position_embedding_type={encoding}", []).extend(set(names) - above.keys())
    if _is_zero(above.get("eval_iters")):
        found["eval_iters=0"] = [name for name in ("eval_interval",) if name not in above]
    if above.get("lora_rank", 1) is None:
        found["lora_rank=none"] = [name for name in ADAPTERS if name not in above]
    names_by = {
        by: [name for name in below if name in names and below[name] not in UNSET] for by, names in found.items()
    }
    return {by: names for by, names in names_by.items() if names}


def _is_zero(value: object) -> bool:
    return not isinstance(value, bool) and str(value) in ("0", "0.0")


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
    faults, notes, missing = _stray_words(words, rest), list[str](), set(unread)
    missing |= {name for word in rest if word.startswith("-") for name in _nearest(_option_name(word), options())}
    tree: dict[str, Any] = {}
    for name in presets_of(namespace):
        try:
            if name == "":
                raise ConfigError(["--config needs a value: a preset name or a YAML file"])
            tree = merged(tree, read_preset(name), notes)
        except ConfigError as error:
            faults += error.faults
            missing.add("config")
    flags: dict[str, Any] = {}
    for section, cls in sections().items():
        hints = get_type_hints(cls)
        given = {name: getattr(namespace, name) for name in hints}
        given = {name: value for name, value in given.items() if value is not None}
        empty = [name for name, value in given.items() if value in ("", [])]
        faults += [f"{flag(name)} needs a value" for name in empty]
        missing |= set(empty)
        flags[section] = {name: unset(hints[name], value) for name, value in given.items() if name not in empty}
    tree = merged(tree, flags, notes)
    try:
        tree = with_loaded_model(tree, notes)
    except ConfigError as error:
        faults += error.faults
        missing.add("config")
    known, wrong, unusable = _known_values(tree)
    named = {name for values in known.values() for name in values}
    missing |= unusable
    # a preset that cannot be read might give every option that no flag does
    of_flags = {name for values in flags.values() for name in values}
    perhaps_given = options().keys() - of_flags - missing if "config" in missing else set()
    trees = with_stand_ins(known, missing - {"config"}, perhaps_given)
    configs = [_CONFIG.validate_python(values) for values in trees]
    try:
        configs = [with_loaded_adapters(config, named) for config in configs]
    except ConfigError as error:
        faults += error.faults
    return CommandLine(configs, faults + wrong, notes, named, namespace)


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
    near = _nearest(_option_name(word), options())
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


def to_yaml(config: Config) -> str:
    """Format the config as a preset that sets every option."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for values that cannot be read: a fault found with each of several does not depend on the value.

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
