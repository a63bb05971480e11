"""The DeepSpeed JSON of a command of Megatron's: keys that options of ours set, and those that stay in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.launch.dialects.megatron_joins import Reading
from megatron.options.config import ConfigError
from megatron.options.deepspeed_file import read_settings

SAID_BY_OPTIONS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_clipping": "--clip-grad",
    "bf16.enabled": "--bf16",
    "fp16.enabled": "--fp16",
}
"""Keys of a DeepSpeed JSON that options of ours set."""
OFFLOADS = {
    "zero_optimization.offload_optimizer.device": "--offload-optimizer",
    "zero_optimization.offload_param.device": "--offload-param",
}
IDLE_KEYS = {
    "steps_per_print": "--log-interval is that of all logs",
    "wall_clock_breakdown": "--timing-log-level times the parts of a step",
    "pipeline.pipe_partitioned": "stages exchange whole activations or shards as the layout has them",
    "pipeline.grad_partitioned": "stages exchange whole activations or shards as the layout has them",
    "bf16.accumulate_grads_via_hooks": "of Habana's DeepSpeed; gradients are added as they are computed",
    "bf16.immediate_grad_update": "gradients are added as they are computed",
}


def join_deepspeed(reading: Reading, files: Mapping[str, str]) -> None:
    """Read the DeepSpeed JSON: what our options say too becomes theirs, the rest stays in the file."""
    path = reading.settings.get("--deepspeed-config")
    if path is None:
        return
    given = reading.given("--deepspeed-config")
    is_written = path in files
    try:
        settings = _settings_in(files[path], path) if is_written else read_settings(path)
    except ConfigError as error:
        reading.settings.pop("--deepspeed-config")
        reading.refuse(given, "; ".join(error.faults))
        return
    left: list[str] = []
    for key, value in _leaves(settings):
        # each key has one outcome, as each flag
        if key in IDLE_KEYS:
            reading.leave(f"{path}: {key}", IDLE_KEYS[key])
        elif key == "zero_optimization.stage":
            reading.settings["--zero-stage"] = str(value)
        elif key in OFFLOADS:
            # "none" and "cpu" are the devices; any other stays in the file, and is refused there
            _set_offload(reading, OFFLOADS[key], key, value, left)
        elif key in SAID_BY_OPTIONS:
            _compare(reading, f"{path}: {key}", SAID_BY_OPTIONS[key], value)
        else:
            left.append(key)
    # a file that the script only would write is not there
    if not is_written and left and Path(path).is_file():
        return
    reading.settings.pop("--deepspeed-config")
    if left:
        reading.refuse(f"{path}: {', '.join(left)}", "write them into a JSON file, and give it as --deepspeed-config")


def _set_offload(reading: Reading, ours: str, key: str, value: Any, left: list[str]) -> None:
    if value == "cpu":
        reading.settings[ours] = "true"
    elif value != "none":
        left.append(key)


def _compare(reading: Reading, given: str, ours: str, value: Any) -> None:
    """Refuse a value of the JSON that an option contradicts; the option counts in both."""
    # a switch that is not given is off
    if ours in ("--bf16", "--fp16"):
        is_equal = (str(reading.settings.get(ours, "false")).lower() == "true") == bool(value)
    else:
        said = reading.settings.get(ours, "1.0" if ours == "--clip-grad" else value)
        is_equal = float(said) == float(value)
    if not is_equal:
        reading.refuse(given, f"{value} there, {reading.settings.get(ours, 'none')} by {ours}; give one of them")


def _settings_in(text: str, path: str) -> dict[str, Any]:
    """Return the JSON that a script writes to a file."""
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError([f"{path}, as the script writes it, is not JSON: {error}"]) from None
    if not isinstance(settings, dict):
        raise ConfigError([f"{path}, as the script writes it, holds {type(settings).__name__}; write an object"])
    return settings


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
