"""Extension of a model's context: the options of rotary positions in which a start may differ from the model it loads.

All others must be the model's: a change of them would be another model, whose weights these are not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron.options.config import Config, ConfigError
from megatron.options.model import ROPE_SCALING, ROPE_SCALING_OPTIONS, ModelConfig, differing

POSITIONS = ("rotary_base", "rope_scaling_factor", *ROPE_SCALING_OPTIONS)
"""Options that --extend-context lets differ, beside lengths, which change no number of a rotary model."""
ORIGINAL = "rope_scaling_original_length"
EXTENDED = "extended"
"""Key in the record of an adapters' base: they are of other positions than its files say."""


def forbidden_differences(here: Mapping[str, Any], there: Mapping[str, Any], *, extends: bool) -> tuple[list[str], str]:
    """Return each difference of two models, as `ModelConfig.computed` gives them, that is not allowed, and a hint.

    The hint, to stand at the end of a message, says what --extend-context allows; empty where that would not help.
    """
    others = differing({name: value for name, value in here.items() if name not in POSITIONS}, there)
    if extends:
        return others, "; --extend-context lets rotary positions differ, and nothing else"
    found = differing(here, there)
    if found and not others:
        return found, ", or --extend-context to go on from these weights with the positions of the options"
    return found, ""


def position_changes(model: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return each position option in which a model does not compute what `theirs` does, with both values.

    An option that does nothing in a model has no value there.
    """
    here, there = (_positions(each) for each in (model, theirs))
    changes = []
    for name, value in here.items():
        if value != there[name]:
            changes.append(f"{name}={value}" if there[name] is None else f"{name}={value} here, {there[name]} there")
    return changes


def _positions(model: ModelConfig) -> dict[str, Any]:
    # any length: that of a run changes no rotary position
    computed = model.computed(1)
    return {name: computed.get(name) for name in POSITIONS}


def without_replaced_scaling(described: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a loaded model without those of a scaling that the given ones replace or turn off.

    Both are plain values, as yet not validated. The original length stays for another form of scaling.
    """
    kind, factor = (given.get(name, described.get(name)) for name in ("rope_scaling_type", "rope_scaling_factor"))
    kept: set[str] = set(ROPE_SCALING_OPTIONS)
    if "rope_scaling_type" in given and kind != described.get("rope_scaling_type"):
        kept = {ORIGINAL} & set(ROPE_SCALING.get(str(kind), ()))
    if factor is None:
        kept = set()
    return {name: value for name, value in described.items() if name not in ROPE_SCALING_OPTIONS or name in kept}


def with_lengths(config: Config, given: Collection[str], length: int | None, original: int | None) -> Config:
    """Return the config of an extension with the lengths that are not `given`, from those of the model it loads.

    Args:
        length: longest sequence of that model; None: its files do not state it.
        original: original length of its own scaling, if it has one.

    Raises ConfigError where a scaling needs an original length, and there is none.
    """
    model, changes = config.model, dict[str, Any]()
    if model.position_embedding_type != "rope":  # a rule refuses it
        return config
    if model.scales_rotary and ORIGINAL not in model.idle_rope_scaling and ORIGINAL not in given:
        if (original or length) is None:
            raise ConfigError(
                [
                    f"rope_scaling_type={model.rope_scaling_type} needs {ORIGINAL}, and load={config.checkpoint.load} "
                    "states no length; give it"
                ]
            )
        changes[ORIGINAL] = original or length
    # what the model states of itself grows with what it is trained on
    if length is not None and model.max_position_embeddings in (None, length):
        changes["max_position_embeddings"] = max(length, config.training.seq_length)
    return replace(config, model=replace(model, **changes))
