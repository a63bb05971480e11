"""InstructLab's `callbacks=[...]`: objects of the caller's program, made again by each rank from the class's source."""

from __future__ import annotations

import difflib
import inspect
import logging
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_fault, endpoint_of
from megatron.launch.instructlab.arguments import (
    DistributedBackend,
    LoraOptions,
    QuantizeDataType,
    ShardingStrategies,
    TorchrunArgs,
    TrainingArgs,
)
from megatron.options.config import Config, ConfigError, options
from megatron.options.stored import from_dict
from megatron.runtime.files import replacing
from megatron.runtime.messages import MissingSecretError, run_secret
from megatron.settings.validation import check
from megatron.training.callbacks import TrainerCallback, load_callback

logger = logging.getLogger("megatron.api")

FOLDER = "callbacks"
HEAD = "from megatron.training.callbacks import TrainerCallback, TrainingContext\n\n\n"


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


# ---------------------------------------------------------------------------------------------------------------------
# Translation of InstructLab's arguments into a config; docs/reference/instructlab.md has the table.

NEVER = 1_000_000_000
"""Steps between two checkpoints where only the end of an epoch, or of the run, is to be saved."""
ZERO_STAGES = {
    ShardingStrategies.FULL_SHARD: 3,
    ShardingStrategies.HYBRID_SHARD: 3,
    ShardingStrategies.SHARD_GRAD_OP: 2,
    ShardingStrategies.NO_SHARD: 0,
}


@dataclass(frozen=True)
class Setting:
    """Inputs of a config beside the arguments."""

    device: str
    """hpu, cuda or cpu."""
    num_ranks: int
    """On all nodes."""
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


def refusals(torch_args: TorchrunArgs, args: TrainingArgs) -> Iterator[str]:
    """Yield what is unsupported or contradictory: the value, the rule and the remedy."""
    yield from _of_torchrun(torch_args)
    if torch_args.nnodes > 1 and "time}" in (args.wandb_run_name or ""):
        yield f"wandb_run_name={args.wandb_run_name}: each node would fill in its own clock; name the run yourself"
    block_size = args.pretraining_config.block_size if args.pretraining_config else None
    longest = "max_seq_len" if block_size is None else "pretraining_config.block_size"
    if args.max_batch_len < (block_size or args.max_seq_len):
        yield (
            f"max_batch_len={args.max_batch_len} is below {longest}={block_size or args.max_seq_len}: the longest "
            "sample would fit into no microbatch; raise it, or lower the other"
        )
    if args.trust_remote_code:
        yield "trust_remote_code=True: code that comes with a model is never run; leave it out"
    for name in ("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name"):
        if getattr(args, name) is not None:
            yield f"{name}={getattr(args, name)}: there is no MLflow here; use wandb_project or TensorBoard"
    for name in ("wandb_entity", "wandb_run_name"):
        if getattr(args, name) is not None and args.wandb_project is None:
            yield f"{name}={getattr(args, name)} has no effect without wandb_project; give it, or leave this out"
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
    yield from callback_faults(args.callbacks or ())
    yield from _of_backends(args)


def _of_torchrun(torch_args: TorchrunArgs) -> Iterator[str]:
    endpoint, address, port = torch_args.rdzv_endpoint, torch_args.master_addr, torch_args.master_port
    if endpoint is not None and address is not None:
        yield f"rdzv_endpoint={endpoint} and master_addr={address} mean the same; give one of them"
    if port is not None and address is None:
        yield f"master_port={port} belongs to master_addr; give that too, or rdzv_endpoint instead"
    if torch_args.nnodes > 1 and endpoint is None and address is None:
        yield f"nnodes={torch_args.nnodes} need a rendezvous; give rdzv_endpoint, HOST:PORT of the first node"
    if torch_args.node_rank >= torch_args.nnodes:
        yield f"node_rank={torch_args.node_rank} must be below nnodes={torch_args.nnodes}; count from 0"
    if torch_args.nnodes > 1:
        try:
            run_secret()
        except MissingSecretError as error:
            yield str(error)
    if endpoint is not None and (fault := endpoint_fault(endpoint)):
        yield f"rdzv_endpoint={endpoint}: {fault}"
    if address is not None and (fault := endpoint_fault(endpoint_of(address, port or RENDEZVOUS_PORT))):
        yield f"master_addr={address}: {fault}"


def _of_backends(args: TrainingArgs) -> Iterator[str]:
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


def remarks(args: TrainingArgs, setting: Setting, config: Config) -> Iterator[str]:
    """Yield what a user of InstructLab's library should know of the run."""
    stage, optimizer = config.effective_zero_stage, config.optimizer
    requested = (
        f"fsdp with {args.fsdp_options.sharding_strategy.value}"
        if args.distributed_backend is DistributedBackend.FSDP
        else "deepspeed"
    )
    offloaded = "parameters and optimizer" if optimizer.offload_param else "optimizer"
    yield (
        f"distributed_backend {requested} is DeepSpeed's ZeRO stage {stage} over {setting.num_ranks} ranks in "
        f"{config.training.precision}" + (f", {offloaded} in host memory" if optimizer.offload_optimizer else "")
    )
    if setting.device == "cpu" and not config.training.bf16:
        yield "on the CPU the training is in float32; on an accelerator it is in bfloat16"
    if args.fsdp_options.cpu_offload_params and not optimizer.offload_param:
        yield f"cpu_offload_params moves the optimizer alone: under ZeRO-{stage} each rank has all parameters"
    deepspeed = args.deepspeed_options
    if deepspeed.cpu_offload_optimizer_pin_memory:
        yield "cpu_offload_optimizer_pin_memory changes nothing: what is offloaded is page-locked on every accelerator"
    if deepspeed.cpu_offload_optimizer_ratio < 1 and not deepspeed.cpu_offload_optimizer:
        yield "cpu_offload_optimizer_ratio changes nothing without cpu_offload_optimizer"
    if (lora := adapters_of(args)) is not None:
        targets = " ".join(lora.target_modules or ("all linear layers",))
        base = ", over a base in 4 bits" if lora.quantize_data_type is QuantizeDataType.NF4 else ""
        yield f"adapters of rank {lora.rank} on {targets}{base}; exports are whole models, with the adapters merged"
    elif args.lora is not None and args.lora.quantize_data_type is not QuantizeDataType.NONE:
        yield "lora.quantize_data_type changes nothing: lora.rank is 0, and the whole model is trained"
    if args.use_liger:
        yield "use_liger changes nothing: output projection and cross-entropy are one operation in any case"
    for name in ("use_dolomite", "is_padding_free"):
        if getattr(args, name):
            yield f"{name} changes nothing, as in InstructLab's own library"
    checkpoint = config.checkpoint
    if checkpoint.save_hf is None and checkpoint.save is None:
        yield "nothing will be saved: checkpoint_at_epoch is off, and save_samples is 0"
    if checkpoint.save is not None and checkpoint.no_save_optim:
        yield "accelerate_full_state_at_epoch is off: a run that is called again starts with a new optimizer"


def adapters_of(args: TrainingArgs) -> LoraOptions | None:
    """Return the options of adapters; None where whole models are trained, as with rank 0."""
    return args.lora if args.lora is not None and args.lora.rank > 0 else None


def build_config(args: TrainingArgs, setting: Setting) -> Config:
    """Return the config of the run. Raises ConfigError with every violated rule."""
    tree = {
        "model": _model(args, setting),
        "parallel": {"device": setting.device},
        "training": _training(args, setting),
        "optimizer": _optimizer(args, setting),
        "data": _data(args, setting),
        "sft": {"packing": "step", "max_batch_len": args.max_batch_len},
        "lora": _lora(args),
        "checkpoint": _checkpoint(args, setting),
        "logging": _logging(args) | _callbacks(setting),
    }
    for name, value in args.engine_options.items():
        if name not in options():
            near = difflib.get_close_matches(name, options(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; docs/reference/configuration.md lists them"
            raise ConfigError([f"engine_options has no {name!r}{hint}"])
        tree.setdefault(options()[name][0], {})[name] = value
    config = from_dict(tree)
    if faults := check(config, setting.num_ranks):
        raise ConfigError(faults)
    return config


def _model(args: TrainingArgs, setting: Setting) -> dict[str, Any]:
    section = dict(setting.model)
    if args.disable_flash_attn:
        section["attention_backend"] = "sdpa"
    if (lora := adapters_of(args)) is not None and lora.quantize_data_type is QuantizeDataType.NF4:
        section["quantize_base"] = "nf4"
    return section


def _lora(args: TrainingArgs) -> dict[str, Any]:
    lora = adapters_of(args)
    if lora is None:
        return {}
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_target_modules": lora.target_modules or ["all-linear"],
    }


def _training(args: TrainingArgs, setting: Setting) -> dict[str, Any]:
    return {
        "task": "sft",
        "num_epochs": args.num_epochs,
        "global_batch_size": args.effective_batch_size,
        "micro_batch_size": 1,
        "seq_length": args.pretraining_config.block_size if args.pretraining_config else args.max_seq_len,
        "seed": args.random_seed,
        "bf16": setting.device != "cpu",
    }


def steps_of(args: TrainingArgs, num_samples: int) -> int:
    """Number of optimizer steps; the last one of an epoch may have fewer samples."""
    of_training = num_samples - int(num_samples * args.validation_split)
    return args.num_epochs * -(-of_training // args.effective_batch_size)


def _optimizer(args: TrainingArgs, setting: Setting) -> dict[str, Any]:
    # InstructLab's cosine has nothing left of it either where the warm-up takes the whole run
    only_warms_up = setting.num_samples is None or args.warmup_steps >= steps_of(args, setting.num_samples)
    return {
        "optimizer": "adamw",
        "lr": args.learning_rate,
        "min_lr": 0.0,
        "lr_decay_style": "constant" if only_warms_up else "cosine",
        "lr_warmup_iters": args.warmup_steps,
        # InstructLab derives the schedule from the arguments of each call
        "override_opt_param_scheduler": True,
        "weight_decay": args.adamw_weight_decay,
        "adam_beta1": args.adamw_betas[0],
        "adam_beta2": args.adamw_betas[1],
        "adam_eps": args.adamw_eps,
        "clip_grad": 1.0,
    } | _sharding(args, setting.num_ranks)


def _sharding(args: TrainingArgs, num_ranks: int) -> dict[str, Any]:
    """Return ZeRO stage and offload. A single rank shards nothing."""
    if args.distributed_backend is DistributedBackend.DEEPSPEED:
        offload, offload_param = bool(args.deepspeed_options.cpu_offload_optimizer), False
        stage = 2
    else:
        stage = ZERO_STAGES[args.fsdp_options.sharding_strategy]
        offload = bool(args.fsdp_options.cpu_offload_params)
        offload_param = offload and stage == 3
        stage = max(stage, 1) if offload else stage  # a stage that can offload
    if num_ranks == 1 and not offload:
        stage = 0
    return {"zero_stage": stage, "offload_optimizer": offload, "offload_param": offload_param}


def _data(args: TrainingArgs, setting: Setting) -> dict[str, Any]:
    share = args.validation_split
    section: dict[str, Any] = {
        "data_path": [*setting.data_path],
        "split": f"{1 - share:.9g},{share:.9g},0",
        "eval_iters": 0,
        "tokenizer_type": "HFTokenizer",
        "tokenizer_model": setting.tokenizer or setting.model_folder,
    }
    if share > 0:
        held_out = int((setting.num_samples or 0) * share)
        section["eval_iters"] = max(1, -(-held_out // args.effective_batch_size))  # all of them, as InstructLab does
    if args.validation_frequency is not None:
        section["eval_interval"] = args.validation_frequency
    return section


def _checkpoint(args: TrainingArgs, setting: Setting) -> dict[str, Any]:
    folder = Path(args.ckpt_output_dir)
    interval = args.deepspeed_options.save_samples or 0
    asks_for_state = interval > 0 or args.on_demand_checkpointing
    wants_exports = args.checkpoint_at_epoch or args.save_samples > 0
    section: dict[str, Any] = {"load": setting.model_folder}
    if not asks_for_state and not wants_exports:
        return section
    section |= {
        "save": str(folder / "full_state"),
        "save_interval": max(1, interval // args.effective_batch_size) if interval > 0 else NEVER,
        "save_at_epoch": args.checkpoint_at_epoch,
        "keep_last": 1,
        # exports need the weights alone, but a run that is called again resumes from what they are made of
        "no_save_optim": not (asks_for_state or args.accelerate_full_state_at_epoch),
    }
    if wants_exports:
        section["save_hf"] = str(folder / "hf_format")
        section["save_hf_last_only"] = bool(args.keep_last_checkpoint_only)
        section["save_hf_merged"] = adapters_of(args) is not None
    if args.save_samples > 0:
        section["save_samples"] = args.save_samples
    return section


def _logging(args: TrainingArgs) -> dict[str, Any]:
    section: dict[str, Any] = {
        "results_dir": args.ckpt_output_dir,
        "tensorboard_dir": args.tensorboard_log_dir or args.ckpt_output_dir,
        "log_interval": 1,
    }
    if args.wandb_project is not None:
        section |= {"wandb_project": args.wandb_project, "wandb_entity": args.wandb_entity}
        section["wandb_exp_name"] = _named(args.wandb_run_name)
    return section


def _callbacks(setting: Setting) -> dict[str, Any]:
    return {"callbacks": setting.callbacks, "callback_errors": "log"} if setting.callbacks else {}


def _named(template: str | None) -> str | None:
    """Return a run's name with its placeholders filled in for rank 0, which logs."""
    if template is None:
        return None
    now = datetime.now(timezone.utc)
    values = {"time": now.astimezone().isoformat(), "utc_time": now.isoformat(), "rank": "0", "local_rank": "0"}
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template
