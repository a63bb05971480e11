"""The DeepSpeed JSON of a run. Nothing else in the project writes one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron.config.options import Config, ConfigError
from megatron.config.validation import check, parallel_batch_size
from megatron.parallel.shards import LayoutError
from megatron.planning.zero import has_gradient_buffers, reduce_bucket_size, zero_settings
from megatron.training.deepspeed_json import merge

GATED_BF16 = {"immediate_grad_update": True, "check_grad_overflow": False}
"""Gradients leave their 16-bit form as soon as they exist, and the update gate alone examines the norm."""


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
    if stage >= 1 and "reduce_bucket_size" not in zero_settings(config):
        zero["reduce_bucket_size"] = reduce_bucket_size(config)
    if stage >= 1 and has_gradient_buffers(config):
        zero["overlap_comm"] = False  # for DeepSpeed's own reduction; lean_optimizers.py has the user's choice
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
        "bf16": {"enabled": training.bf16 and stage > 0} | GATED_BF16,
        "fp16": {"enabled": training.fp16 and stage > 0},
        "data_types": {"grad_accum_dtype": training.grad_accum_dtype},
        "communication_data_type": training.grad_reduce_dtype or training.grad_accum_dtype,
        "wall_clock_breakdown": False,
        # would wait for the device twice a microbatch, for a report that is never printed
        "timers": {"throughput": {"enabled": False}},
        # activations are recomputed inside the layers; partitioning them over ranks would break sequence parallelism
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
    }
    if training.fp16:
        made["fp16"] |= {
            "initial_scale_power": int(math.log2(training.initial_loss_scale)),
            "min_loss_scale": training.min_loss_scale,
            "loss_scale_window": training.loss_scale_window,
            "hysteresis": training.hysteresis,
        }
    return merge(made, config, data_parallel_size)


def check_deepspeed(config: Config, world_size: int) -> Sequence[str]:
    """Return the faults of the user's DeepSpeed JSON, and what it contradicts."""
    if config.training.deepspeed_config is None:
        return []
    data_parallel_size, _ = parallel_batch_size(config, world_size)
    try:
        try:
            deepspeed_config(config, data_parallel_size)
        except (LayoutError, ArithmeticError):
            if not check(config, world_size):
                raise
            # sizes that break a rule, which is reported, have no buckets to compare
            merge({}, config, data_parallel_size)
    except ConfigError as error:
        return error.faults
    return []
