"""Build a config from presets and the command line; report every fault at once."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import holds_checkpoints
from megatron.hub.download import Needs, hidden_name, local_folder
from megatron.hub.names import HubError, name_of, pinned
from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.dialect import nearest, suggestion
from megatron.options.extension import with_lengths, without_replaced_scaling
from megatron.options.flags import dashed, flag, flag_values, option_of
from megatron.options.stored import CONFIG, known_values, merged, read_preset, to_yaml
from megatron.runtime.files import show
from megatron.settings.parser import answer_to, build_parser, help_text, help_topic
from megatron.settings.stand_ins import faults_in_all, with_stand_ins
from megatron.settings.validation import check
from megatron.weights.folder_files import ADAPTER_CONFIG
from megatron.weights.model_folder import model_options

DESCRIBING = ("architecture", "num_layers", "hidden_size", "num_attention_heads")
"""Options of which one at least is given wherever a model is described."""


OF_HUB: Mapping[str, tuple[str, Needs]] = {
    "load": ("checkpoint", "model"),
    "lora_base": ("lora", "model"),
    "tokenizer_model": ("data", "tokenizer"),
}
"""Options that take a name on the hub: their section, and the files that are needed of it."""


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
    # argparse's own error of an unknown flag would end the process before the other faults are found
    namespace, rest = build_parser().parse_known_args(words)
    reading, notes = _Reading(_stray_words(words, rest), set(unread)), list[str]()
    # the option that a misspelt flag is most like may be meant: rules that need it are not reported
    for word in rest:
        if word.startswith("-"):
            reading.unread |= set(filter(None, [nearest(option_of(word), options())]))
    tree = _preset_values(presets_of(namespace), notes, reading)
    flags = _flag_values(namespace, reading)
    # last: a flag counts more than any preset
    tree = merged(tree, flags, notes)
    tree = _with_local_folders(tree, notes, reading)
    # a folder that cannot be read might describe any option, so it counts as an unread preset does
    with reading.faults_kept():
        tree = with_loaded_model(tree, notes)
    known, wrong, unusable = known_values(tree)
    reading.unread |= unusable
    perhaps_given: set[str] = set()
    if "config" in reading.unread:  # a preset that cannot be read might give every option that no flag does
        perhaps_given = options().keys() - set(chain.from_iterable(flags.values())) - reading.unread
    trees = with_stand_ins(known, reading.unread - {"config"}, perhaps_given)
    # valid by now: what was wrong has a stand-in
    configs = [CONFIG.validate_python(values) for values in trees]
    given = set(chain.from_iterable(known.values()))
    with reading.faults_kept():
        configs = [with_loaded_adapters(config, given) for config in configs]
    configs = _extended(configs, given, reading)
    return CommandLine(configs, reading.faults + wrong, notes, given, namespace)


def _with_local_folders(tree: dict[str, Any], notes: list[str], reading: _Reading) -> dict[str, Any]:
    """Return the values with the folders in the cache in place of names on the hub, which are downloaded if need be."""
    sections = {name: dict(values) if isinstance(values, dict) else values for name, values in tree.items()}
    for option, (section, needs) in OF_HUB.items():
        values = sections.get(section)
        given = values.get(option) if isinstance(values, dict) else None
        if not isinstance(given, str) or (option == "load" and _is_not_read(tree["checkpoint"])):
            continue
        if name_of(given) is None:
            notes += hidden_name(given, option)
            continue
        try:
            folder = local_folder(given, option, needs)
        except HubError as error:
            reading.faults.append(str(error))
            # a model that cannot be read might describe any option
            reading.unread |= {option} if needs == "tokenizer" else {option, "config"}
            continue
        sections[section][option] = str(folder)
        notes.append(f"{option}={given} is {pinned(folder)}, in {folder}")
    return sections


def _is_not_read(checkpoint: Any) -> bool:
    """Return whether a run goes on in `save`: it reads `load` no more, and needs no network for it."""
    load, save = checkpoint.get("load"), checkpoint.get("save")
    if not isinstance(save, str):
        return False
    # a run's own folder is empty at its first start, and no name
    return load == save or (Path(save).is_dir() and holds_checkpoints(Path(save)))


def with_loaded_model(tree: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the values of a command line with the model of the folder in `load`, if they describe none.

    Where the folder has gone, it is that of the run in `save`. Raises ConfigError for a folder that cannot be computed.
    """
    # as plain values, before they are validated: presets may hold anything
    sections = [tree.get(name) or {} for name in ("model", "checkpoint", "lora")]
    if not all(isinstance(section, dict) for section in sections):  # a fault of its own
        return tree
    model, checkpoint, lora = sections
    if not model.keys().isdisjoint(DESCRIBING) or not isinstance(checkpoint.get("load"), str):
        return tree
    loaded = model_options(checkpoint["load"], checkpoint.get("save"), lora.get("lora_base"))
    if loaded.options:
        notes.append(f"the options describe no model; it is that of {loaded.source}")
    return {**tree, "model": {**without_replaced_scaling(loaded.options, model), **model}}


def _extended(configs: Sequence[Config], given: Collection[str], reading: _Reading) -> list[Config]:
    """Return the configs of `with_extended_context`; what no value of an unread option allows is a fault."""
    extended, faults = [], list[list[str]]()
    for config in configs:
        try:
            extended.append(with_extended_context(config, given))
            faults.append([])
        except ConfigError as error:
            extended.append(config)
            faults.append(error.faults)
    # a folder that cannot be read may have been reported already
    reading.faults += [fault for fault in faults_in_all(faults) if fault not in reading.faults]
    return extended


def with_extended_context(config: Config, given: Collection[str]) -> Config:
    """Return the config with the lengths of a context that --extend-context extends, where they are not `given`.

    Raises ConfigError.
    """
    load = config.checkpoint.load
    if not config.checkpoint.extend_context or load is None:
        return config
    loaded = model_options(load, config.checkpoint.save, config.lora.lora_base)
    return with_lengths(config, given, loaded.length, loaded.options.get("rope_scaling_original_length"))


def with_loaded_adapters(config: Config, given: Collection[str]) -> Config:
    """Return the config with the options of the adapters in `load`, where that is a folder of PEFT.

    Where it has gone, they are those of the run in `save` that began with it. `given`: names of the options that the
    user has given. Raises ConfigError for those that contradict the folder.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None:
        return config
    # a run's command, typed again after `load` has gone, continues the run in `save`
    may_resume = save is not None and os.path.isdir(save) and not os.path.lexists(load)
    if not may_resume and not os.path.lexists(Path(load, ADAPTER_CONFIG)):
        return config
    from megatron.weights.peft.options import with_options_of  # imports torch

    return with_options_of(config, Path(load), given)


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
        tree[section], without_value = flag_values(cls, namespace)
        reading.faults += [f"{flag(name)} needs a value" for name in without_value]
        reading.unread |= set(without_value)
    return tree


def presets_of(namespace: argparse.Namespace) -> list[str]:
    """Return the presets of a command line, in order of increasing precedence."""
    names: list[str] = namespace.config or []
    # named twice, a preset counts where it is named last
    return list(dict.fromkeys(reversed(names)))[::-1]


def without_preset(arguments: Sequence[str], name: str) -> list[str]:
    """Return the words of a command line without a preset."""
    rest, words = list[str](), iter(arguments)
    for word in words:
        # argparse takes both forms: two words, or one with =
        given = [word, next(words, "")] if word == "--config" else [word]
        if given not in (["--config", name], [f"--config={name}"]):
            rest += given
    return rest


def _stray_words(arguments: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Describe `rest`, the words that argparse did not recognise: unknown flags, and values without a flag."""
    unknown = [word for word in rest if word.startswith("-")]
    # the values of an unknown flag are part of that fault
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
            # removed one by one: the same word elsewhere is a fault of its own
            values_of_unknown.remove(word)
        elif word not in unknown:
            faults.append(
                f"{word!r} does not follow a flag; write --FLAG {word}, with one value for a flag that takes one"
            )
    return faults


def _unknown_flag(word: str) -> str:
    name = word.split("=", 1)[0]
    # before a guess at what was meant: a flag of Megatron's is spelled rightly, but not an option here
    answer = answer_to(name)
    if answer is not None:
        return f"{name} of Megatron {answer}"
    near = nearest(option_of(word), options())
    return f"unknown flag {name}; {suggestion(near and flag(near), 'see --help')}"


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
    # first: help comes whatever else is wrong with the line
    topic = help_topic(arguments)
    if topic is not None:
        show(help_text(topic))
        raise SystemExit(0)
    command = read_command_line(arguments)
    faults, prints = list(command.faults), command.namespace.print_config
    # a config is printed for other ranks than this command has: rules of layouts are not its
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
    # not by int() alone, which also takes " 8 " and "1_6"
    if given.isdecimal() and int(given) > 0:
        return int(given)
    faults.append(f"WORLD_SIZE={given!r} must be a whole number, 1 or more; the launcher sets it, else unset it")
    return 1
