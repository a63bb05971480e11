"""Comparison of a checkpoint's model with the options of a run: shapes alone do not show another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.folders import CheckpointError, read_metadata
from megatron.options.config import Config
from megatron.options.extension import forbidden_differences
from megatron.options.model import PARTICULAR, ModelConfig

SHAPED = {
    "architecture", "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "max_position_embeddings",
    "embed_layernorm", "untie_embeddings_and_output_weights",
}  # fmt: skip
"""Options that the names and shapes of the parameters settle."""
SHAPED_BY_HEADS = {"kv_channels", "num_query_groups"}
"""Options that the shapes settle where the number of heads is known."""


def saved_model_options(folder: Path) -> tuple[dict[str, Any], int | None] | None:
    """Return the model section of a run's checkpoint, and the seq_length of the run; None: its metadata has none."""
    config = (read_metadata(folder) or {}).get("config")
    if not isinstance(config, dict):
        return None
    model, training = config.get("model"), config.get("training")
    if not isinstance(model, dict) or not isinstance(training, dict):
        return None
    return model, training.get("seq_length")


def check_model_options(folder: Path, saved: Mapping[str, Any], seq_length: int | None, config: Config) -> None:
    """Raise CheckpointError with every difference unless `saved`, a whole model section, computes what `config` does.

    `seq_length`: that of the checkpoint's run. Options that are newer than the checkpoint have their defaults in it.
    """
    known = {name: value for name, value in saved.items() if name in _names()}
    _compare(folder, known, seq_length or config.training.seq_length, config, sorted(saved.keys() - known.keys()))


def check_known_options(folder: Path, known: Mapping[str, Any], config: Config) -> list[str]:
    """Compare the options that a foreign checkpoint states. Return those that nothing in it settles.

    Raises CheckpointError with every difference.
    """
    # an option that the files do not state counts as ours here, and is returned unless shapes settle it
    ours = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
    _compare(folder, ours | dict(known), config.training.seq_length, config)
    computed = config.model.computed(config.training.seq_length)
    settled = SHAPED | known.keys()
    if "num_attention_heads" in known:
        settled |= SHAPED_BY_HEADS
    # options that few models have are compared where this run uses them: hardly any foreign run states them
    settled |= set(PARTICULAR) - config.model.particular().keys()
    return [name for name in computed if name not in settled]


def _names() -> set[str]:
    return {field.name for field in dataclasses.fields(ModelConfig)}


def _compare(
    folder: Path, saved: Mapping[str, Any], seq_length: int, config: Config, unknown: list[str] | None = None
) -> None:
    try:
        # without `freeze`, which changes what is trained and not what is computed
        # its own seq_length: learned positions without a length of their own have that of their run
        there = ModelConfig(**{**saved, "freeze": ()}).computed(seq_length)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}={fault['input']!r}" for fault in error.errors())
        raise CheckpointError(f"{folder} describes no model ({faults}); load another checkpoint") from None
    here = config.model.computed(config.training.seq_length)
    differences, hint = forbidden_differences(here, there, extends=config.checkpoint.extend_context)
    # a newer release's option may change what is computed, so it is not passed over
    differences += [f"{name} there, which this release does not have" for name in unknown or ()]
    if differences:
        raise CheckpointError(
            f"{folder} is of another model than the options describe: {'; '.join(differences)}. Give the options of "
            f"its model, or another checkpoint{hint}"
        )
