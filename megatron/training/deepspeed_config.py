"""The DeepSpeed JSON of a run. Nothing else in the project writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config.options import Config, ConfigError

OURS = ("optimizer", "scheduler", "gradient_accumulation_steps", "train_batch_size")
"""Sections that this project sets by its own options."""


def deepspeed_config(config: Config, data_parallel_size: int) -> dict[str, Any]:
    """Return the argument of `deepspeed.initialize`, with the user's own JSON merged in.

    The engine sets the number of microbatches for each step. Raises ConfigError if that file is missing, is not a JSON
    object, or contradicts this config.
    """
    training, optimizer = config.training, config.optimizer
    micro = training.micro_batch_size
    stage = config.effective_zero_stage
    if training.skip_train and stage < 3:
        stage = 0  # without an optimizer there is nothing else to shard
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 1 and config.uses_pipeline:
        zero["overlap_comm"] = False  # the pipeline schedules the reduction itself
    if optimizer.offload_optimizer and not training.skip_train:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.parallel.device not in ("cpu", "auto")}
    if optimizer.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": config.parallel.device not in ("cpu", "auto")}
    made: dict[str, Any] = {
        "train_batch_size": micro * data_parallel_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        # clipped by our optimizer where DeepSpeed wraps none around it
        "gradient_clipping": optimizer.clip_grad if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # without an optimizer or shards the layers have their precision already
        "bf16": {"enabled": training.bf16 and stage > 0},
        "fp16": {"enabled": training.fp16 and stage > 0},
        "data_types": {"grad_accum_dtype": training.grad_accum_dtype},
        "communication_data_type": training.grad_reduce_dtype or training.grad_accum_dtype,
        "wall_clock_breakdown": False,
        # activations are recomputed inside the layers; partitioning them over ranks would break sequence parallelism
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
    }
    if training.fp16:
        made["fp16"] |= {
            "initial_scale_power": _power_of_two(training.initial_loss_scale),
            "min_loss_scale": training.min_loss_scale,
            "loss_scale_window": training.loss_scale_window,
            "hysteresis": training.hysteresis,
        }
    if training.deepspeed_config is None:
        return made
    extra = _read_json(training.deepspeed_config)
    faults = [
        f"{training.deepspeed_config}: {name!r} is set by this config's own options; remove it"
        for name in OURS
        if name in extra
    ]
    faults += _contradictions(made, {k: v for k, v in extra.items() if k not in OURS}, training.deepspeed_config)
    if faults:
        raise ConfigError(faults)
    return _merged(made, extra)


def _power_of_two(scale: float) -> int:
    power = int(scale).bit_length() - 1
    if 2.0**power != scale:
        raise ConfigError([f"initial_loss_scale={scale} must be a power of two, such as 65536"])
    return power


def _read_json(path: str) -> dict[str, Any]:
    try:
        extra = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"deepspeed_config={path!r} cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"deepspeed_config={path!r} is not JSON: {error}"]) from None
    if not isinstance(extra, dict):
        raise ConfigError([f"deepspeed_config={path!r} holds {type(extra).__name__}; it must be an object"])
    return extra


def _contradictions(made: dict[str, Any], extra: dict[str, Any], where: str) -> list[str]:
    faults = []
    for name, value in extra.items():
        if name not in made:
            continue
        if isinstance(made[name], dict) and isinstance(value, dict):
            faults += _contradictions(made[name], value, f"{where}: {name}")
        elif made[name] != value:
            faults.append(f"{where}: {name}={value!r} contradicts this config, which sets {made[name]!r}; remove it")
    return faults


def _merged(made: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(made)
    for name, value in extra.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        result[name] = _merged(made[name], value) if both else value
    return result
