"""InstructLab's arguments as a config of ours, and its callbacks; docs/reference/instructlab.md has the table.

Each argument has a row in ARGUMENTS; what follows from several of them is in the functions below.
"""

from __future__ import annotations

import inspect
import logging
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_fault, endpoint_of
from megatron.launch.instructlab.arguments import (
    Arguments,
    DistributedBackend,
    LoraOptions,
    QuantizeDataType,
    ShardingStrategies,
    TorchrunArgs,
    TrainingArgs,
)
from megatron.options.config import Config, ConfigError, options
from megatron.options.dialect import Dialect, Entry, nearest, no_effect, refused, sets
from megatron.options.outputs import NEVER
from megatron.options.stored import from_dict
from megatron.runtime.devices import find_device
from megatron.runtime.files import replacing
from megatron.runtime.messages import MissingSecretError, run_secret
from megatron.settings.validation import check
from megatron.training.callbacks import TrainerCallback, load_callback

logger = logging.getLogger("megatron.api")

FOLDER = "callbacks"
HEAD = "from megatron.training.callbacks import TrainerCallback, TrainingContext\n\n\n"
ZERO_STAGES = {
    ShardingStrategies.FULL_SHARD: 3,
    # within a node: `_sharding` makes each a replica
    ShardingStrategies.HYBRID_SHARD: 3,
    ShardingStrategies.SHARD_GRAD_OP: 2,
    ShardingStrategies.NO_SHARD: 0,
}


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a config beside the arguments."""

    device: str
    """hpu, cuda or cpu."""
    num_ranks: int
    """On all nodes."""
    num_nodes: int
    model: Mapping[str, Any]
    """The model section, as `huggingface_config.preset_of` gives it."""
    model_folder: str
    data_path: tuple[str, ...]
    num_samples: int | None
    """In the processed data; None before it has been processed."""
    tokenizer: str | None
    """Folder of the tokenizer that the model goes with from now on. None: the model's own."""
    callbacks: tuple[str, ...] = ()
    """Names of the callbacks' classes, for `--callbacks`."""


_READ_ELSEWHERE = (
    "model_path data_path data_output_dir chat_tmpl_path use_legacy_tmpl process_data data_process_num_cpu_procs "
    "mock_data mock_data_len pretraining_config.document_column_name validation_split distributed_backend "
    "deepspeed_options.* fsdp_options.* lora.* save_samples checkpoint_at_epoch accelerate_full_state_at_epoch "
    "keep_last_checkpoint_only on_demand_checkpointing log_level wandb_* mlflow_* callbacks engine_options"
)
"""Arguments that run_training reads, or that only count with others: the functions of this module."""
# a list of every field: one without a row ends the translation (`_unknown`)
ARGUMENTS: tuple[Entry, ...] = (
    # samples and steps
    sets("max_seq_len", "seq_length"),
    sets("max_batch_len", "max_batch_len"),
    sets("effective_batch_size", "global_batch_size"),
    sets("num_epochs", "num_epochs"),
    sets("random_seed", "seed"),
    # optimizer
    sets("learning_rate", "lr"),
    sets("warmup_steps", "lr_warmup_iters"),
    sets("adamw_weight_decay", "weight_decay"),
    Entry("adamw_betas", "sets", convert=lambda betas: [("adam_beta1", betas[0]), ("adam_beta2", betas[1])]),
    sets("adamw_eps", "adam_eps"),
    # model and results; of two fields that set one thing (block_size, tensorboard_log_dir) the later one counts
    Entry("disable_flash_attn", "sets", convert=lambda is_off: [("attention_backend", "sdpa")] if is_off else []),
    sets("pretraining_config.block_size", "seq_length"),
    sets("validation_frequency", "eval_interval"),
    Entry("ckpt_output_dir", "sets", convert=lambda folder: [("results_dir", folder), ("tensorboard_dir", folder)]),
    sets("tensorboard_log_dir", "tensorboard_dir"),
    # without a counterpart
    refused("trust_remote_code", "code that comes with a model is never run; leave it out", accepts="false"),
    no_effect("use_liger", "output projection and cross-entropy are one operation in any case"),
    no_effect("use_dolomite", "InstructLab's own library ignores it too"),
    no_effect("is_padding_free", "InstructLab's own library ignores it too"),
    *(Entry(name, "sets") for name in _READ_ELSEWHERE.split()),
)


def _unknown(name: str, value: object, near: str | None) -> str:
    # an error of this file: names that InstructLab does not have were refused by pydantic
    raise LookupError(f"{name} has no row in ARGUMENTS")


DIALECT = Dialect(ARGUMENTS, _unknown, refused="{name}={value}: {reason}", no_effect="{name} changes nothing: {reason}")


def refusals(torch_args: TorchrunArgs, args: TrainingArgs) -> Iterator[str]:
    """Yield what is unsupported or contradictory: the value, the rule and the remedy."""
    yield from _torchrun_faults(torch_args)
    for name in ("wandb_run_name", "mlflow_run_name"):
        # {time} and {utc_time}
        if torch_args.nnodes > 1 and "time}" in (getattr(args, name) or ""):
            yield f"{name}={getattr(args, name)}: each node would fill in its own clock; name the run yourself"
    yield from DIALECT.translate(_given(args)).faults
    for name in ("wandb_entity", "wandb_run_name"):
        if getattr(args, name) is not None and args.wandb_project is None:
            yield f"{name}={getattr(args, name)} has no effect without wandb_project; give it, or leave this out"
    yield from _data_faults(args)
    yield from callback_faults(args.callbacks or ())
    yield from _backend_faults(args)


def _given(args: Arguments, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every argument that is set, those of groups as lora.rank."""
    for name in type(args).model_fields:
        value = getattr(args, name)
        if isinstance(value, Arguments):
            yield from _given(value, f"{name}.")
        elif value is not None:
            yield group + name, value


def _torchrun_faults(torch_args: TorchrunArgs) -> Iterator[str]:
    endpoint, address, port = torch_args.rdzv_endpoint, torch_args.master_addr, torch_args.master_port
    if torch_args.node_rank >= torch_args.nnodes:
        yield f"node_rank={torch_args.node_rank} must be below nnodes={torch_args.nnodes}; count from 0"
    if torch_args.nnodes > 1:
        if endpoint is None and address is None:
            yield f"nnodes={torch_args.nnodes} need a rendezvous; give rdzv_endpoint, HOST:PORT of the first node"
        yield from _secret_faults()
    if endpoint is not None and address is not None:
        yield f"rdzv_endpoint={endpoint} and master_addr={address} mean the same; give one of them"
    if port is not None and address is None:
        yield f"master_port={port} belongs to master_addr; give that too, or rdzv_endpoint instead"
    faults = {}
    if endpoint is not None:
        faults[f"rdzv_endpoint={endpoint}"] = endpoint_fault(endpoint)
    if address is not None:
        faults[f"master_addr={address}"] = endpoint_fault(endpoint_of(address, port or RENDEZVOUS_PORT))
    yield from (f"{given}: {fault}" for given, fault in faults.items() if fault)


def _secret_faults() -> Iterator[str]:
    try:
        run_secret()
    except MissingSecretError as error:
        yield str(error)


def _data_faults(args: TrainingArgs) -> Iterator[str]:
    longest, length = "max_seq_len", args.max_seq_len
    if args.pretraining_config is not None:
        longest, length = "pretraining_config.block_size", args.pretraining_config.block_size
    if args.max_batch_len < length:
        yield (
            f"max_batch_len={args.max_batch_len} is below {longest}={length}: the longest sample would fit into no "
            "microbatch; raise it, or lower the other"
        )
    if args.validation_split > 0 and args.validation_frequency is None:
        yield f"validation_split={args.validation_split} needs validation_frequency, the steps between two validations"
    if args.validation_frequency is not None and args.validation_split == 0:
        yield f"validation_frequency={args.validation_frequency} has no effect without validation_split; leave it out"
    if args.use_legacy_tmpl and args.chat_tmpl_path is not None:
        yield f"use_legacy_tmpl and chat_tmpl_path={args.chat_tmpl_path} are both given; keep one"
    if args.mock_data_len and not args.mock_data:
        yield f"mock_data_len={args.mock_data_len} has no effect without mock_data; turn it on, or leave this out"
    if args.mock_data_len > args.max_seq_len:
        yield f"mock_data_len={args.mock_data_len} is above max_seq_len={args.max_seq_len}; lower it"


def _backend_faults(args: TrainingArgs) -> Iterator[str]:
    """Yield options of the backend that is not used; a missing offload would show only when memory runs out."""
    deepspeed, fsdp = args.deepspeed_options, args.fsdp_options
    if args.distributed_backend is DistributedBackend.FSDP and deepspeed.cpu_offload_optimizer:
        yield (
            "deepspeed_options.cpu_offload_optimizer has no effect with distributed_backend=fsdp; set "
            "distributed_backend='deepspeed', or fsdp_options.cpu_offload_params"
        )
    if args.distributed_backend is DistributedBackend.DEEPSPEED and fsdp.cpu_offload_params:
        yield (
            "fsdp_options.cpu_offload_params has no effect with distributed_backend=deepspeed; set "
            "deepspeed_options.cpu_offload_optimizer, or distributed_backend='fsdp'"
        )
    if deepspeed.cpu_offload_optimizer and deepspeed.cpu_offload_optimizer_ratio < 1:
        yield (
            f"deepspeed_options.cpu_offload_optimizer_ratio={deepspeed.cpu_offload_optimizer_ratio}: DeepSpeed updates "
            "a part on the host under ZeRO-3 alone, and distributed_backend=deepspeed is ZeRO-2; set 1"
        )


def remarks(args: TrainingArgs, inputs: RunInputs, config: Config) -> Iterator[str]:
    """Yield what a user of InstructLab's library should know of the run."""
    yield _sharding_remark(args, inputs, config)
    if find_device(inputs.device).is_host and not config.training.bf16:
        yield "on the CPU the training is in float32; on an accelerator it is in bfloat16"
    yield from _offload_remarks(args, config)
    yield from _adapter_remarks(args)
    yield from DIALECT.translate(_given(args)).notes
    checkpoint = config.checkpoint
    if checkpoint.save_hf is None and checkpoint.save is None:
        yield "nothing will be saved: checkpoint_at_epoch is off, and save_samples is 0"
    if checkpoint.save is not None and checkpoint.no_save_optim:
        yield "accelerate_full_state_at_epoch is off: a run that is called again starts with a new optimizer"


def _sharding_remark(args: TrainingArgs, inputs: RunInputs, config: Config) -> str:
    requested = "deepspeed"
    if args.distributed_backend is DistributedBackend.FSDP:
        requested = f"fsdp with {args.fsdp_options.sharding_strategy.value}"
    where, replicas = f"over {inputs.num_ranks} ranks", config.parallel.num_replicas
    if replicas > 1:
        where = f"within each of {replicas} replicas of {inputs.num_ranks // replicas} ranks"
    offloaded = ""
    if config.optimizer.offload_optimizer:
        what = "parameters and optimizer" if config.optimizer.offload_param else "optimizer"
        offloaded = f", {what} in host memory"
    return (
        f"distributed_backend {requested} is DeepSpeed's ZeRO stage {config.effective_zero_stage} {where} in "
        f"{config.training.precision}{offloaded}"
    )


def _offload_remarks(args: TrainingArgs, config: Config) -> Iterator[str]:
    if args.fsdp_options.cpu_offload_params and not config.optimizer.offload_param:
        yield (
            f"cpu_offload_params moves the optimizer alone: under ZeRO-{config.effective_zero_stage} each rank has "
            "all parameters"
        )
    deepspeed = args.deepspeed_options
    if deepspeed.cpu_offload_optimizer_pin_memory:
        yield "cpu_offload_optimizer_pin_memory changes nothing: what is offloaded is page-locked on every accelerator"
    if deepspeed.cpu_offload_optimizer_ratio < 1 and not deepspeed.cpu_offload_optimizer:
        yield "cpu_offload_optimizer_ratio changes nothing without cpu_offload_optimizer"


def _adapter_remarks(args: TrainingArgs) -> Iterator[str]:
    lora = adapters_of(args)
    if lora is not None:
        targets = " ".join(lora.target_modules or ("all linear layers",))
        base = ", over a base in 4 bits" if lora.quantize_data_type is QuantizeDataType.NF4 else ""
        yield f"adapters of rank {lora.rank} on {targets}{base}; exports are whole models, with the adapters merged"
    elif args.lora is not None and args.lora.quantize_data_type is not QuantizeDataType.NONE:
        yield "lora.quantize_data_type changes nothing: lora.rank is 0, and the whole model is trained"


def adapters_of(args: TrainingArgs) -> LoraOptions | None:
    """Return the options of adapters; None where whole models are trained, as with rank 0."""
    return args.lora if args.lora is not None and args.lora.rank > 0 else None


def build_config(args: TrainingArgs, inputs: RunInputs) -> Config:
    """Return the config of the run. Raises ConfigError with every violated rule."""
    values: dict[str, Any] = {
        "device": inputs.device,
        "task": "sft",
        "bf16": not find_device(inputs.device).is_host,
        # a microbatch is one row of max_batch_len tokens, into which samples are packed
        "micro_batch_size": 1,
        "packing": "step",
        "log_interval": 1,
    }
    values |= DIALECT.translate(_given(args)).settings
    values |= _optimizer(args, inputs) | _data(args, inputs) | _lora(args) | _checkpoint(args, inputs)
    values |= _wandb(args) | _mlflow(args) | _callbacks(inputs)
    for name in args.engine_options:
        if name not in options():
            near = nearest(name, options())
            hint = f"did you mean {near!r}?" if near else "docs/reference/configuration.md lists them"
            raise ConfigError([f"engine_options has no {name!r}; {hint}"])
    # last: what the user names as ours wins over what follows from InstructLab's arguments
    tree: dict[str, dict[str, Any]] = {"model": dict(inputs.model)}
    for name, value in (values | args.engine_options).items():
        tree.setdefault(options()[name][0], {})[name] = value
    config = from_dict(tree)
    if faults := check(config, inputs.num_ranks):
        raise ConfigError(faults)
    return config


def _lora(args: TrainingArgs) -> dict[str, Any]:
    lora = adapters_of(args)
    if lora is None:
        return {}
    section = {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        # InstructLab's choice where none are named
        "lora_target_modules": lora.target_modules or ["all-linear"],
    }
    if lora.quantize_data_type is QuantizeDataType.NF4:
        section["quantize_base"] = "nf4"
    return section


def steps_of(args: TrainingArgs, num_samples: int) -> int:
    """Number of optimizer steps; the last one of an epoch may have fewer samples."""
    of_training = num_samples - _num_held_out(args, num_samples)
    return args.num_epochs * -(-of_training // args.effective_batch_size)


def _num_held_out(args: TrainingArgs, num_samples: int) -> int:
    # as data/splits.py cuts them: the bound between the parts is rounded, not each part
    return num_samples - round(num_samples * (1 - args.validation_split))


def _optimizer(args: TrainingArgs, inputs: RunInputs) -> dict[str, Any]:
    # InstructLab's cosine has nothing left of it either where the warm-up takes the whole run
    # without num_samples the config is only checked, and its schedule is never followed
    only_warms_up = inputs.num_samples is None or args.warmup_steps >= steps_of(args, inputs.num_samples)
    return {
        "optimizer": "adamw",
        "min_lr": 0.0,
        "lr_decay_style": "constant" if only_warms_up else "cosine",
        # InstructLab derives the schedule from the arguments of each call
        "override_opt_param_scheduler": True,
        # no argument of InstructLab's sets it
        "clip_grad": 1.0,
    } | _sharding(args, inputs)


def _sharding(args: TrainingArgs, inputs: RunInputs) -> dict[str, Any]:
    """Return ZeRO stage, replicas and offload. A single rank shards nothing."""
    num_replicas = 1
    if args.distributed_backend is DistributedBackend.DEEPSPEED:
        offload, offload_param = bool(args.deepspeed_options.cpu_offload_optimizer), False
        stage = 2
    else:
        stage = ZERO_STAGES[args.fsdp_options.sharding_strategy]
        offload = bool(args.fsdp_options.cpu_offload_params)
        # in the other stages each rank has all parameters, and DeepSpeed offloads none
        offload_param = offload and stage == 3
        stage = max(stage, 1) if offload else stage  # a stage that can offload
        if args.fsdp_options.sharding_strategy is ShardingStrategies.HYBRID_SHARD:
            # of a pipeline, which engine_options may set, each stage lies on a part of the nodes
            num_stages = args.engine_options.get("pipeline_model_parallel_size", 1)
            num_replicas = max(1, inputs.num_nodes // num_stages)
    if inputs.num_ranks == 1 and not offload:
        stage = 0
    return {
        "zero_stage": stage,
        "num_replicas": num_replicas,
        "offload_optimizer": offload,
        "offload_param": offload_param,
    }


def _data(args: TrainingArgs, inputs: RunInputs) -> dict[str, Any]:
    share = args.validation_split
    section: dict[str, Any] = {
        "data_path": [*inputs.data_path],
        # nine digits, without the noise of 1 - 0.7 in binary
        "split": f"{1 - share:.9g},{share:.9g},0",
        "eval_iters": 0,
        "tokenizer_type": "HFTokenizer",
        "tokenizer_model": inputs.tokenizer or inputs.model_folder,
    }
    if share > 0:
        held_out = _num_held_out(args, inputs.num_samples or 0)
        section["eval_iters"] = max(1, -(-held_out // args.effective_batch_size))  # all of them, as InstructLab does
    return section


def _checkpoint(args: TrainingArgs, inputs: RunInputs) -> dict[str, Any]:
    folder = Path(args.ckpt_output_dir)
    interval = args.deepspeed_options.save_samples or 0
    asks_for_state = interval > 0 or args.on_demand_checkpointing
    wants_exports = args.checkpoint_at_epoch or args.save_samples > 0
    # the start alone: once `save` holds a checkpoint, the run goes on from there
    section: dict[str, Any] = {"load": inputs.model_folder}
    if not asks_for_state and not wants_exports:
        return section
    section |= {
        "save": str(folder / "full_state"),
        # rounded down, so that no more samples than requested lie between two checkpoints; but a step at least
        "save_interval": max(1, interval // args.effective_batch_size) if interval > 0 else NEVER,
        "save_at_epoch": args.checkpoint_at_epoch,
        "keep_last": 1,
        # exports need the weights alone, but a run that is called again resumes from what they are made of
        "no_save_optim": not (asks_for_state or args.accelerate_full_state_at_epoch),
    }
    if wants_exports:
        section["save_hf"] = str(folder / "hf_format")
        section["save_hf_last_only"] = bool(args.keep_last_checkpoint_only)
        # InstructLab exports whole models
        section["save_hf_merged"] = adapters_of(args) is not None
    if args.save_samples > 0:
        section["save_samples"] = args.save_samples
    return section


def _wandb(args: TrainingArgs) -> dict[str, Any]:
    if args.wandb_project is None:
        return {}
    return {
        "wandb_project": args.wandb_project,
        "wandb_entity": args.wandb_entity,
        "wandb_exp_name": _filled_in(args.wandb_run_name),
    }


def _mlflow(args: TrainingArgs) -> dict[str, Any]:
    # as InstructLab's library, which begins a run of MLflow where any of these says something
    uri = args.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    experiment = args.mlflow_experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if not (uri or experiment or args.mlflow_run_name):
        return {}
    return {
        # MLflow's own where none is named
        "mlflow_experiment": experiment or "Default",
        "mlflow_tracking_uri": uri,
        "mlflow_run_name": _filled_in(args.mlflow_run_name),
    }


def _callbacks(inputs: RunInputs) -> dict[str, Any]:
    return {"callbacks": inputs.callbacks, "callback_errors": "log"} if inputs.callbacks else {}


def _filled_in(template: str | None) -> str | None:
    """Return a run's name with its placeholders filled in for rank 0, which logs."""
    if template is None:
        return None
    now = datetime.now(timezone.utc)
    # the local time with its offset, and UTC
    values = {"time": now.astimezone().isoformat(), "utc_time": now.isoformat(), "rank": "0", "local_rank": "0"}
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


# InstructLab's `callbacks=[...]`: objects of the caller's program, which each rank makes again from the class's source.


def callback_faults(callbacks: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with the objects."""
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            yield f"callbacks has {what} in it; give objects of subclasses of TrainerCallback: callbacks=[MyCallback()]"


def write_callbacks(callbacks: Sequence[TrainerCallback], folder: Path) -> tuple[str, ...]:
    """Write the source of each class to a file of its own in `folder`, and return their names for `--callbacks`.

    Raises ConfigError for a class that cannot be made from its source alone.
    """
    names = []
    for number, callback in enumerate(callbacks):
        cls = type(callback)
        try:
            # a class within a function is indented
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):
            raise ConfigError(
                [f"callbacks: the source of {cls.__name__} is not in a file; define it in a module or a script"]
            ) from None
        file = folder / FOLDER / f"{cls.__name__.lower()}_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write((HEAD + source).encode())
        name = f"{file.resolve()}:{cls.__name__}"
        try:
            # here too, since a class that cannot be made from its source would fail in the ranks alone
            again = load_callback(name)
        except ConfigError as error:
            raise ConfigError(
                [
                    f"{fault}. Ranks make a callback from the source of its class, without arguments: import what it "
                    "needs inside its methods"
                    for fault in error.faults
                ]
            ) from error
        if vars(again).keys() != vars(callback).keys():
            logger.warning(
                "callbacks: %s was changed after it was made; each rank makes its own, without these changes",
                cls.__name__,
            )
        names.append(name)
    return tuple(names)
