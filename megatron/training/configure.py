"""The config of a rank, checked before the process group is joined: the command line without torch, then the device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from megatron.observability.trackers.tracker_log import tracker_faults
from megatron.options.config import Config, ConfigError, on_device
from megatron.options.dependents import slow_mode
from megatron.parallel.layout import Layout
from megatron.resilience.job import has_restarts, is_launched
from megatron.resilience.process import print_error
from megatron.runtime.descriptors import limit_fault
from megatron.runtime.devices import find_device, set_graph_variables
from megatron.runtime.network import is_first_rank
from megatron.settings.command_line import load_command_line
from megatron.settings.rules import check_device
from megatron.settings.validation import idle
from megatron.training.deepspeed import config as deepspeed


def load_settings(arguments: list[str]) -> Config:
    """Return the config of a command line, without torch. Raises ConfigError with every fault."""
    command = load_command_line(arguments, None, deepspeed.check_deepspeed)
    if "RANK" not in os.environ:  # the launcher has printed them
        for line in command.notes:
            print_error(line)
    # a launcher has printed these warnings already
    if is_first_rank() and not is_launched():
        _warn(idle(command.config))
    check_deepspeed(command.config)
    check_trackers(command.config)
    check_restarts(command.config)
    return command.config


def check_deepspeed(config: Config) -> dict[str, Any]:
    """Return DeepSpeed's settings. Raises ConfigError for a JSON that is missing or contradicts the config."""
    return deepspeed.deepspeed_config(config, Layout.of(config.parallel, int(os.environ.get("WORLD_SIZE", "1"))))


def check_restarts(config: Config) -> None:
    """Raise ConfigError if this rank is to stay where another one ends, but no agent replaces that one."""
    if config.checkpoint.keep_healthy_ranks and not has_restarts():
        raise ConfigError(
            [
                "keep_healthy_ranks: ranks stay for a restart by the agent that has started them, but none restarts "
                "these; start them by megatron-launch with --max-restarts (HL_MAX_RESTARTS), or leave it out"
            ]
        )


def check_trackers(config: Config) -> None:
    """Raise ConfigError if a tracker is requested that cannot start."""
    if faults := list(tracker_faults(config)):
        raise ConfigError(faults)


def prepare_device(config: Config) -> tuple[Config, str]:
    """Return the config on this rank's device, and the device, once it is known to do what the config says.

    Raises ConfigError or OSError. Call it before anything imports deepspeed.
    """
    from megatron.runtime import accelerator  # imports torch

    parallel = config.parallel
    # before the software of the device is loaded, which reads its variables then and never again
    accelerator.keep_compiled_graphs(parallel.device, config.logging.results_dir)
    if config.data.eval_graphs:
        set_graph_variables(parallel.device, parallel.tensor_model_parallel_size)
    device = accelerator.choose_device(parallel.device)
    record = find_device(device)
    # known only once that software is loaded: its default differs between releases
    is_lazy = record.is_lazy()
    config = on_device(config, device, lazy=is_lazy)
    # of device=auto the launcher did not know which it is
    if is_first_rank() and (parallel.device == "auto" or not is_launched()):
        _warn(slow_mode(config, lazy=is_lazy))
    # a driver belongs to a host, so one rank of each reports on it
    if os.environ.get("LOCAL_RANK", "0") == "0" and (warning := record.health_warning()):
        _warn([warning])
    if faults := list(check_device(config)):
        raise ConfigError(faults)
    accelerator.check_precision(record, config.training.precision)
    if config.fp8.uses_fp8 and not config.fp8.fp8_emulate and (missing := record.missing_fp8()):
        raise ConfigError([f"fp8_format={config.fp8.fp8_format} cannot run: {missing}"])
    # DeepSpeed's own check of the values needs the chosen device, since it imports deepspeed
    if config.training.deepspeed_config is not None:
        deepspeed.check_values(check_deepspeed(config), config.training.deepspeed_config)
    if config.training.deterministic:
        accelerator.set_deterministic(record)
    # before the process group is joined, which opens a socket to each other rank
    if fault := limit_fault(record, int(os.environ.get("WORLD_SIZE", "1")), len(config.data.prefixes)):
        raise OSError(fault)
    return config, device


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        print_error(f"WARNING: {line}")
