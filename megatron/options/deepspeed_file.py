"""The user's own DeepSpeed JSON, read as DeepSpeed reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.options.config import Config, ConfigError


def read_settings(path: str) -> dict[str, Any]:
    """Return the object in a JSON file, which may hold comments, without the values left open by "auto".

    Raises ConfigError.
    """
    try:
        settings = _parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"deepspeed_config={path!r} cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"deepspeed_config={path!r} is not JSON: {error}"]) from None
    if not isinstance(settings, dict):
        raise ConfigError([f"deepspeed_config={path!r} holds {type(settings).__name__}; it must be an object"])
    # "auto" is transformers' word for a value that the Trainer fills in
    settings = _without_auto(settings)
    if "bfloat16" in settings:  # DeepSpeed's former name of it
        if "bf16" in settings:
            raise ConfigError([f"{path}: bfloat16 is the former name of bf16, which stands there too; remove it"])
        settings["bf16"] = settings.pop("bfloat16")
    return settings


def zero_settings(config: Config) -> dict[str, Any]:
    """Return the values of the user's own `zero_optimization`; {} without one, or if the file cannot be read."""
    if config.training.deepspeed_config is None:
        return {}
    try:
        section = read_settings(config.training.deepspeed_config).get("zero_optimization")
    except ConfigError:  # reported where the file is checked
        return {}
    return section if isinstance(section, dict) else {}


def _parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json keeps the last of repeated keys in silence; DeepSpeed refuses them
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} stands there twice; keep one")
        return dict(pairs)

    try:
        # plain JSON first: its messages name the place of a fault, hjson's are about its own wider syntax
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        import hjson  # late: DeepSpeed's own parser, for comments and trailing commas

        try:
            return hjson.loads(text, object_pairs_hook=unique)
        except (hjson.HjsonDecodeError, RecursionError):
            raise error from None


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if value != "auto"}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in given.items()}
