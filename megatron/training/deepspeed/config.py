"""The user's own DeepSpeed JSON: every key is one that DeepSpeed reads, and none contradicts the run's options.

DeepSpeed itself ignores unknown keys at the top level, and would follow a value that the options contradict. It is
checked without deepspeed, because a rejected launch must not wait for its import; tests/training/test_deepspeed_json.py
compares the keys with those that the installed release reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.options.config import Config, ConfigError
from megatron.options.deepspeed_file import read_settings, zero_settings
from megatron.options.dialect import nearest, suggestion
from megatron.options.training import TrainingConfig
from megatron.parallel.layout import Layout, LayoutError
from megatron.plan.zero import has_gradient_buffers, reduce_bucket_size
from megatron.runtime.accelerator import quiet
from megatron.runtime.devices import find_device
from megatron.settings.validation import check

KEYS = {
    "": "communication_data_type disable_allgather disable_python_gc dump_state gradient_accumulation_steps "
    "gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level managed_gradient_accumulation "
    "memory_breakdown prescale_gradients seq_parallel_communication_data_type sequence_parallel_size steps_per_print "
    "train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size "
    "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "aio": "block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds",
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update",
    "checkpoint": "checkpoint_serialization load_universal parallel_write tag_validation use_node_local_storage writer",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "data_parallel decoupled io_buffer_double io_buffer_size io_multiplier show_statistics type",
    "comet": "api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace",
    "comms_logger": "debug enabled prof_all prof_ops verbose",
    "csv_monitor": "enabled job_name output_path",
    "data_types": "buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype",
    "flops_profiler": "detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules",
    "fp16": "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power "
    "loss_scale loss_scale_window min_loss_scale",
    "optimizer": "legacy_fusion params type",
    "optimizer.params": "adam_lr adam_w_mode betas bias_correction eps lr max_grad_norm momentum muon_lr torch_adam "
    "weight_decay",
    "pipeline": "activation_checkpoint_interval grad_partitioned partition pipe_partitioned seed_layers stages",
    "tensorboard": "enabled job_name output_path",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
    "wandb": "enabled group project team",
    "zero_optimization": "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm "
    "contiguous_gradients cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint "
    "enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 "
    "load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear "
    "model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm "
    "override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint "
    "prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
    "stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold "
    "stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params "
    "use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients "
    "zero_quantized_nontrainable_weights zero_quantized_weights",
    "zero_optimization.leaf_module": "classes name_suffixes names",
    "zero_optimization.offload_optimizer": "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory "
    "pipeline_read pipeline_write ratio super_offload",
    "zero_optimization.offload_param": "buffer_count buffer_size device max_in_cpu nvme_path pin_memory",
}
"""Keys by section, '' the top level; a section is a key of the one above it."""

NUMBERS = ("gradient_predivide_factor", "steps_per_print", "vocabulary_size")
SWITCHES = (
    *("disable_allgather", "disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients"),
    "use_data_before_expert_parallelism",
)
"""Keys of the top level, whose values DeepSpeed does not check."""

REMOVED = "DeepSpeed has removed it"
UNUSED = {
    "activation_checkpointing": "--recompute-granularity and --offload-activations say what is kept, and where",
    "amp": "--bf16 and --fp16 set the precision",
    "autotuning": "it belongs to DeepSpeed's own launcher",
    "compile": "--torch-compile compiles the layers",
    "compression_training": REMOVED,
    "curriculum_learning": REMOVED,
    "data_efficiency": "the task orders the data",
    "data_parallel_size": "the number of ranks and the layout set it",
    "dataloader_drop_last": "the task makes the batches",
    "datastates_ckpt": "checkpoints are written by this project",
    "eigenvalue": REMOVED,
    "elasticity": "--min-nodes of the launcher lets a run continue with fewer nodes",
    "expert_parallel": "expert_model_parallel_size divides the experts",
    "graph_harvesting": REMOVED,
    "hybrid_engine": "this is an engine for training alone",
    "nebula": REMOVED,
    "progressive_layer_drop": REMOVED,
    "quantize_training": REMOVED,
    "scheduler": "--lr-decay-style and --lr-warmup-samples set the learning rate",
    "sparse_attention": REMOVED,
    "sparse_gradients": REMOVED,
    "tensor_parallel": "--tensor-model-parallel-size sets it",
    "torch_autocast": "--bf16 and --fp16 set the precision",
    "weight_quantization": "training is not quantized",
}
"""Keys of DeepSpeed without effect on these runs, and why; accepted where they request nothing."""

OURS = {"mics_shard_size": "--num-replicas, the data-parallel size divided by it"}
"""Keys that DeepSpeed has removed, and the options here that do the same."""

FREE = (
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
)
"""Keys that we set, and the file may set otherwise."""


@dataclass(frozen=True)
class Agreed:
    """Values of a key that agree with this run."""

    values: tuple[Any, ...]
    option: str = ""
    """Option of ours that sets it; '': none."""


def merge(made: dict[str, Any], config: Config, layout: Layout) -> dict[str, Any]:
    """Return the settings `made` for this config with the user's file merged in.

    Raises ConfigError with every fault of the file.
    """
    path = config.training.deepspeed_config
    if path is None:
        return made
    # comments and trailing commas are read too, as for the plan
    settings = read_settings(path)
    # what we set, then what the options say in other words
    agreed = {name: Agreed((value,)) for name, value in _leaves(made) if name not in FREE}
    agreed |= _options(config, layout)
    if config.training.fp16:
        agreed |= _loss_scaling(config.training)
    if layout.num_replicas > 1:
        # DeepSpeed's own groups for it are over all ranks
        agreed["zero_optimization.zero_hpz_partition_size"] = Agreed((1,), "num_replicas")
    faults = [*_unknown(settings, ""), *_contradictions(settings, agreed)]
    if faults:
        raise ConfigError([f"{path}: {fault}" for fault in faults])
    # a copy of all levels
    result: dict[str, Any] = json.loads(json.dumps(made))
    for name, value in _leaves(settings):
        sections = name.split(".")[:-1]
        # agreed values are set already, and the torch optimizer is ours
        if name in agreed or name in KEYS or name in UNUSED or "optimizer" in sections[:1]:
            continue
        section = result
        for place in sections:
            section = section.setdefault(place, {})
        section[name.rpartition(".")[2]] = value
    return result


def _options(config: Config, layout: Layout) -> dict[str, Agreed]:
    """Return what the options say in other words, or of what they leave no choice."""
    training, optimizer = config.training, config.optimizer
    accumulation = training.global_batch_size // (training.micro_batch_size * layout.num_batch_ranks)
    betas, off = [optimizer.adam_beta1, optimizer.adam_beta2], Agreed((False, None))
    zero, params = "zero_optimization.", "optimizer.params."
    momentum = "muon_momentum" if optimizer.optimizer == "muon" else "sgd_momentum"
    return {
        "train_batch_size": Agreed((training.global_batch_size,), "global_batch_size"),
        "train_micro_batch_size_per_gpu": Agreed((training.micro_batch_size,), "micro_batch_size"),
        "gradient_accumulation_steps": Agreed((accumulation,), "global_batch_size"),
        "gradient_clipping": Agreed((optimizer.clip_grad,), "clip_grad"),
        "gradient_allreduce_op": Agreed(("mean",)),
        "managed_gradient_accumulation": Agreed((True,)),
        "wall_clock_breakdown": Agreed((False,), "timing_log_level"),
        "timers.throughput.enabled": Agreed((False, True)),  # the log line has the throughput, by our own timers
        "bf16.enabled": Agreed((training.bf16,), "bf16"),
        "bf16.bf16_master_weights_and_grads": off,
        "bf16.bf16_optimizer_states": off,
        "fp16.enabled": Agreed((training.fp16,), "fp16"),
        "fp16.fp16_master_weights_and_grads": off,
        "data_types.grad_accum_dtype": Agreed((training.grad_accum_dtype,), "grad_accum_dtype"),
        "data_types.param_dtype": Agreed((training.precision,), "bf16"),
        "communication_data_type": Agreed(
            (training.grad_reduce_dtype or training.grad_accum_dtype,), "grad_reduce_dtype"
        ),
        # DeepSpeed's ranks that share a sequence (Ulysses); null requests none
        "sequence_parallel_size": Agreed((config.parallel.context_parallel_size, None), "context_parallel_size"),
        "pipeline.stages": Agreed((config.parallel.pipeline_model_parallel_size,), "pipeline_model_parallel_size"),
        "pipeline.partition": Agreed(("best",), "pipeline_partition_method"),
        "pipeline.seed_layers": off,
        zero + "stage": Agreed((optimizer.zero_stage, config.effective_zero_stage), "zero_stage"),
        zero + "zenflow": off,
        zero + "compute_grad_norm": Agreed((True,)),  # the update gate reads the norm
        # these two update outside of the optimizer that checks and clips
        zero + "offload_optimizer.ratio": Agreed((1.0,)),
        zero + "offload_optimizer.super_offload": off,
        zero + "cpu_offload": Agreed((optimizer.offload_optimizer,), "offload_optimizer"),
        zero + "cpu_offload_param": Agreed((optimizer.offload_param,), "offload_param"),
        zero + "offload_optimizer.device": Agreed((_device(optimizer.offload_optimizer),), "offload_optimizer"),
        zero + "offload_param.device": Agreed((_device(optimizer.offload_param),), "offload_param"),
        "optimizer.type": Agreed(optimizer.kind.deepspeed_types, "optimizer"),
        "optimizer.legacy_fusion": off,
        params + "lr": Agreed((optimizer.lr,), "lr"),
        params + "betas": Agreed((betas,), "adam_beta1"),
        params + "eps": Agreed((optimizer.adam_eps,), "adam_eps"),
        params + "weight_decay": Agreed((optimizer.weight_decay,), "weight_decay"),
        params + "momentum": Agreed((getattr(optimizer, momentum),), momentum),
        params + "muon_lr": Agreed((optimizer.muon_lr or optimizer.lr,), "muon_lr"),
        params + "adam_lr": Agreed((optimizer.lr,), "lr"),
        params + "adam_w_mode": Agreed((optimizer.decoupled_weight_decay,), "decoupled_weight_decay"),
        params + "bias_correction": Agreed((True,)),
        params + "max_grad_norm": Agreed((optimizer.clip_grad,), "clip_grad"),
    }


def _loss_scaling(training: TrainingConfig) -> dict[str, Agreed]:
    return {
        "fp16.loss_scale": Agreed((0,)),
        "fp16.initial_scale_power": Agreed((int(math.log2(training.initial_loss_scale)),), "initial_loss_scale"),
        "fp16.min_loss_scale": Agreed((training.min_loss_scale,), "min_loss_scale"),
        "fp16.loss_scale_window": Agreed((training.loss_scale_window,), "loss_scale_window"),
        "fp16.hysteresis": Agreed((training.hysteresis,), "hysteresis"),
    }


def _device(offloads: bool) -> str:
    return "cpu" if offloads else "none"


def _leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a section, with the names of its sections: zero_optimization.stage."""
    for name, value in settings.items():
        path = f"{section}.{name}" if section else name
        if path in KEYS and isinstance(value, dict):
            # sections are known by KEYS: an object elsewhere, such as a timer's, is a value
            yield from _leaves(value, path)
        else:
            yield path, value


def _contradictions(settings: Mapping[str, Any], agreed: Mapping[str, Agreed]) -> Iterator[str]:
    for name, value in _leaves(settings):
        allowed = agreed.get(name)
        if allowed is None or value in allowed.values:
            continue
        fault = f"{name}={value!r} contradicts this run, which has {allowed.values[0]!r}; remove it"
        if allowed.option:
            fault += f", or change --{allowed.option.replace('_', '-')}"
        yield fault


def _unknown(settings: Mapping[str, Any], section: str) -> Iterator[str]:
    """Yield keys that DeepSpeed does not read, sections that are none, and requests that have no effect."""
    prefix = f"{section}." if section else ""
    known = dict.fromkeys(KEYS[section].split())
    if not section:
        known |= dict.fromkeys(UNUSED)
    known |= {path.removeprefix(prefix): None for path in KEYS if path and path.rpartition(".")[0] == section}
    for name, value in settings.items():
        path = prefix + name
        # at the top level DeepSpeed takes a misspelt key without a word
        if name not in known:
            yield f"{path} is not a key that DeepSpeed reads{_remedy(name, list(known), section)}"
        elif path not in KEYS:
            yield from _wrong_value(path, value)
        elif isinstance(value, dict):
            yield from _unknown(value, path)
        # null and {} request nothing
        elif value:
            yield f'{path}={value!r} must be an object, "{name}": {{...}}'


def _wrong_value(path: str, value: Any) -> Iterator[str]:
    if path in NUMBERS and (type(value) not in (int, float) or value <= 0):
        yield f"{path}={value!r} must be a number above 0"
    elif path in SWITCHES and not isinstance(value, bool):
        yield f"{path}={value!r} must be true or false"
    elif path in UNUSED and not _is_off(value):
        yield f"{path} has no effect here: {UNUSED[path]}; remove it"


def _remedy(name: str, known: list[str], section: str) -> str:
    if name in OURS:
        return f"; use {OURS[name]}"
    homes = [path for path, names in KEYS.items() if name in names.split() and path != section]
    # `enabled` is a key of most sections, so it belongs to none in particular
    if homes and name != "enabled":
        return f" there; put it into {homes[0] or 'the top level'}"
    return f"; {suggestion(nearest(name, known), 'remove it')}"


def _is_off(value: Any) -> bool:
    """Return True for a value that requests nothing."""
    if not isinstance(value, dict):
        return not value or (value == 1 and value is not True)  # as a size of 1 does
    if "enabled" in value:
        return not value["enabled"]
    return all(map(_is_off, value.values()))


def check_values(settings: Mapping[str, Any], where: str) -> None:
    """Have DeepSpeed read the merged settings, before any rank joins. Imports deepspeed. Raises ConfigError."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    try:
        with quiet():
            # alone, a process counts as the only rank
            # it asserts train_batch_size = micro batch x accumulation steps x ranks
            DeepSpeedConfig({**settings, "train_batch_size": settings["train_micro_batch_size_per_gpu"]})
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["input"], fault["msg"]) for fault in error.errors()]
        raise ConfigError([f"{where}: {name}={value!r}: {text}" for name, value, text in faults]) from None
    except (DeepSpeedConfigError, AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError([f"{where}: DeepSpeed refuses it: {error}"]) from None


GATED_BF16 = {"immediate_grad_update": True, "check_grad_overflow": False}
"""Gradients leave their 16-bit form as soon as they exist, and the update gate alone examines the norm."""


def deepspeed_config(config: Config, layout: Layout) -> dict[str, Any]:
    """Return the argument of `deepspeed.initialize`, with the user's own JSON merged in.

    The engine sets the number of microbatches for each step. Raises ConfigError if that file is missing, is not a JSON
    object, or contradicts this config.
    """
    training, optimizer = config.training, config.optimizer
    micro, zero = training.micro_batch_size, _zero_section(config)
    stage = zero["stage"]
    made: dict[str, Any] = {
        # of a step of one microbatch; each step sets its own number
        "train_batch_size": micro * layout.grad_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        # clipped by our optimizer where DeepSpeed wraps none around it
        "gradient_clipping": optimizer.clip_grad if stage else 0.0,
        "zero_optimization": zero,
        # DeepSpeed would refuse a wrapper that it does not know, and beside offload any optimizer but its own CPU Adam
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
    return merge(made, config, layout)


def _zero_section(config: Config) -> dict[str, Any]:
    """Return `zero_optimization`."""
    optimizer, evaluates = config.optimizer, config.training.skip_train
    stage = config.effective_zero_stage
    if evaluates and stage < 3:
        stage = 0  # without an optimizer there is nothing else to shard
    zero: dict[str, Any] = {"stage": stage}
    # no more than a rank has: DeepSpeed allocates the whole bucket, for a model of any size
    if stage >= 1 and "reduce_bucket_size" not in zero_settings(config):
        zero["reduce_bucket_size"] = reduce_bucket_size(config)
    if stage >= 1 and has_gradient_buffers(config):
        zero["overlap_comm"] = False  # for DeepSpeed's own reduction; lean_optimizers.py has the user's choice
    if stage in (1, 2) and config.parallel.num_replicas > 1 and not has_gradient_buffers(config):
        # each gradient to its owner alone, which sums it over the replicas
        zero |= {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": False}
    # pinned memory is for a device's own copies; of device=auto it is not known yet which it will be
    pins = config.parallel.device != "auto" and not find_device(config.parallel.device).is_host
    if optimizer.offload_optimizer and not evaluates:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pins}
    if optimizer.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pins}
    return zero


def check_deepspeed(config: Config, world_size: int) -> Sequence[str]:
    """Return the faults of the user's DeepSpeed JSON, and what it contradicts."""
    if config.training.deepspeed_config is None:
        return []
    layout = Layout.of(config.parallel, world_size)
    try:
        try:
            deepspeed_config(config, layout)
        except (LayoutError, ArithmeticError):
            if not check(config, world_size):
                raise
            # sizes that break a rule, which is reported, have no buckets to compare
            merge({}, config, layout)
    except ConfigError as error:
        return error.faults
    return []
