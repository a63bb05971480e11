"""A config as nested plain values by section, as presets and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.dependents import ADAPTERS
from megatron.options.dialect import nearest, suggestion
from megatron.options.flags import hints_of, sequence
from megatron.options.model import ROPE_SCALING_OPTIONS
from megatron.runtime.files import IMPORT_ROOT


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    known, faults, _ = known_values(tree)
    if faults:
        raise ConfigError(faults)
    return CONFIG.validate_python(known)


CONFIG = TypeAdapter(Config)


def known_values(tree: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str], set[str]]:
    """Return the values of known options by section, every fault, and the options whose values cannot be used."""
    known: dict[str, dict[str, Any]] = {}
    unread: set[str] = set()
    # all faults are collected: a user corrects a file once
    strange = [name for name in tree if name not in sections()]
    faults = [f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in strange]
    for section, cls in sections().items():
        values = tree.get(section) or {}
        hints = hints_of(cls)
        if not isinstance(values, dict):
            faults.append(f"section {section!r} is {values!r}; it must be a mapping of options")
            unread |= set(hints)
            values = {}
        for name in [str(name) for name in values if name not in hints]:  # YAML's keys may be numbers
            faults.append(_unknown_option(name, section))
            # the option that was probably meant: rules about it would report its default
            unread |= set(filter(None, [nearest(name, options())]))
        known[section] = {name: _words(value, hints[name]) for name, value in values.items() if name in hints}
    try:
        # validated although the result is not needed: the types are pydantic's alone
        CONFIG.validate_python(known)
    except ValidationError as error:
        faults += _wrong_values(known, error)
        unread |= {str(fault["loc"][1]) for fault in error.errors()}
    return known, faults, unread


def _wrong_values(known: dict[str, dict[str, Any]], error: ValidationError) -> list[str]:
    # an option of several types has a fault for each of them
    rules: dict[tuple[int | str, ...], list[str]] = {}
    # loc is (section, option, place in a tuple or member of a union, ...)
    for fault in error.errors():
        rules.setdefault(fault["loc"][:2], []).append(fault["msg"])
    joined = {option: " or ".join(dict.fromkeys(messages)) for option, messages in rules.items()}
    texts = (_wrong_value(known, fault["loc"], fault["type"], joined[fault["loc"][:2]]) for fault in error.errors())
    return list(dict.fromkeys(texts))


def _words(value: Any, hint: Any) -> Any:
    """Return the words of a sequence that is written as one string: `rampup_batch_size: 16 16 5000000`."""
    if isinstance(value, str) and sequence(hint):
        return value.split()
    return value


def _wrong_value(known: dict[str, dict[str, Any]], location: tuple[int | str, ...], kind: str, rule: str) -> str:
    """Describe a value of the wrong type or out of range."""
    section, name = str(location[0]), str(location[1])
    value = known[section][name]
    # pydantic names the element that is missing, a user counts values
    wanted = get_args(sequence(hints_of(sections()[section])[name]))
    if kind in ("missing", "too_short", "too_long") and wanted:
        rule = f"expected {len(wanted)} values, not {len(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    return f"{section}.{name}={shown}: {rule[:1].lower()}{rule[1:]}"


def _unknown_option(name: str, section: str) -> str:
    """Describe an unknown option: its right section, or the most similar name."""
    if name in options():
        return f"option {name!r} in section {section!r} belongs in section {options()[name][0]!r}"
    near = nearest(name, options())
    near = near and f"{near!r} in section {options()[near][0]!r}"
    return f"unknown option {name!r} in section {section!r}; {suggestion(near, 'see --help')}"


def to_yaml(config: Config) -> str:
    """Format the config as a preset that sets every option."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Presets: YAML files of options by section, and what a later one replaces of an earlier one.

PRESETS_DIR = IMPORT_ROOT / "megatron" / "presets"

ALTERNATIVES = (
    ("train_samples", "train_iters", "num_epochs"),
    ("lr_decay_samples", "lr_decay_iters"),
    ("lr_warmup_samples", "lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_wsd_decay_samples", "lr_wsd_decay_iters"),
    ("bf16", "fp16"),
    ("eod_token", "eod_token_id"),
)
"""Options that say the same in other words: one that is given replaces the others of presets below it."""
POSITIONS = {
    "rope": (
        "rotary_base",
        "rotary_base_local",
        "rotary_percent",
        "rope_scaling_factor",
        *ROPE_SCALING_OPTIONS,
    ),
    "learned": ("max_position_embeddings",),
}
"""Options that have no effect with any other position encoding; a preset's are left out there."""
UNSET = (None, False, 0, "none", "None", "null", "false", "False", "0", "")


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, rejecting duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # from the nodes: in the mapping itself the repeated key is gone
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def is_finetune_file(tree: Mapping[str, Any]) -> bool:
    """Return True for the values of a finetune_lora.yaml, which launch/dialects/finetune_file.py translates."""
    return not {"model_id", "LoRA"}.isdisjoint(tree)


def read_preset(name: str, *, translated: bool = False) -> dict[str, Any]:
    """Return the nested values of a preset, given by path or by its name in megatron/presets/.

    `translated`: also those of a finetune_lora.yaml. Raises ConfigError.
    """
    # by the ending alone: a folder of the name of a preset must not hide it
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in PRESETS_DIR.glob("*.yaml"))
        near = nearest(Path(name).stem, known)
        hint = suggestion(near and repr(near), "use your own file, or a preset;")
        raise ConfigError([f"config {name!r} not found; {hint} the presets are {', '.join(known)}"])
    try:
        # single: a second document in the file is an error, not data that is left out
        tree = UniqueKeyLoader(path.read_text(encoding="utf-8")).get_single_data() or {}
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
        if isinstance(under, dict) and isinstance(values, dict):
            replaced = _replaced(under, values)
            for by, names in replaced.items():
                notes.append(f"{by} replaces the preset's {', '.join(f'{name}={under[name]}' for name in names)}")
            left_out = set(chain.from_iterable(replaced.values()))
            both[section] = {name: value for name, value in (under | values).items() if name not in left_out}
        elif under is None or (isinstance(under, dict) and values is not None):
            both[section] = values  # `known_values` reports what is not a mapping
    return both


def _replaced(below: dict[str, Any], above: dict[str, Any]) -> dict[str, list[str]]:
    """Return the options of `below` that are replaced, by option=value of `above`, within a section."""
    # an option that is off below needs no note that it was replaced
    given = [name for name, value in below.items() if value not in UNSET]
    names_by = {by: [name for name in given if name in names] for by, names in _replacing(above)}
    return {by: names for by, names in names_by.items() if names}


def _replacing(above: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield each option=value of `above` that replaces others, with the names of these."""
    # without this, two ways to give a length would be a fault in every command that changes a preset's
    for group in ALTERNATIVES:
        for chosen in _chosen(group, above):
            yield f"{chosen}={above[chosen]}", set(group) - above.keys()
    encoding = above.get("position_embedding_type")
    if encoding is not None:
        others = chain.from_iterable(names for needed, names in POSITIONS.items() if needed != encoding)
        yield f"position_embedding_type={encoding}", set(others) - above.keys()
    if _is_zero(above.get("eval_iters")):
        yield "eval_iters=0", {"eval_interval"} - above.keys()
    # 1: a preset that does not mention lora_rank changes nothing
    if above.get("lora_rank", 1) is None:
        yield "lora_rank=none", set(ADAPTERS) - above.keys()


def _chosen(group: Sequence[str], above: dict[str, Any]) -> list[str]:
    """Return the option of a group that `above` gives, if any: of several one that is not zero.

    A zero alone replaces the others too, since it requests none.
    """
    given = [name for name in group if name in above]
    requested = [name for name in given if above[name] not in UNSET]
    zeros = [name for name in given if _is_zero(above[name])]
    return (requested or zeros)[:1]


def _is_zero(value: object) -> bool:
    # False is an option that is off, not a number; by text, since flags are not yet read
    return not isinstance(value, bool) and str(value) in ("0", "0.0")
