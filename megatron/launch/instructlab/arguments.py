"""Arguments of InstructLab's training library: its fields, names and defaults.

Sources: the README of instructlab/training, and its config.py (April 2026). Where the two differ, what the README shows
must work: TorchrunArgs() needs no arguments here. `mapping.py` translates each field.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron.options.dialect import nearest, suggestion

logger = logging.getLogger("megatron.api")

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(gt=0, lt=2**16)]


class DistributedBackend(Enum):
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class ShardingStrategies(Enum):
    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"


class QuantizeDataType(Enum):
    NF4 = "nf4"
    NONE = None


# no field has this type: programs import it from InstructLab's library, and so from megatron.api
class DeepSpeedOffloadStrategy(Enum):
    CPU = "cpu"
    NONE = None


class Arguments(BaseModel):
    """Group of arguments. An unknown name is an error that names the nearest one."""

    # `model_` is pydantic's own prefix, and model_path is theirs
    model_config = ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    # before pydantic's own check, which names no similar argument
    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    hint = suggestion(nearest(str(name), cls.model_fields), f"it has {', '.join(cls.model_fields)}")
                    cls._refuse(f"{cls.__name__} has no {name}; {hint}")
        return values

    @classmethod
    def _refuse(cls, fault: str) -> None:
        raise ValueError(fault)


class TorchrunArgs(Arguments):
    """Nodes and ranks. A run on several nodes is started on each of them, with its own node_rank.

    Unknown arguments are ignored with a warning; InstructLab's library ignores them.
    """

    model_config = ConfigDict(extra="ignore")

    nproc_per_node: Literal["gpu"] | Positive = 1
    """Ranks of a node. `gpu`: the number of devices of this machine, also HPUs; 1 on a machine without."""
    nnodes: Positive = 1
    """Nodes of the run."""
    node_rank: NonNegative = 0
    """Place of this node, from 0."""
    rdzv_id: str | int = 0
    """Equal on all nodes of a run."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the first node."""
    master_addr: str | None = None
    """The same as host and port, instead of rdzv_endpoint."""
    master_port: Port | None = None
    """Unset beside master_addr: 29500, torchrun's."""

    @classmethod
    def _refuse(cls, fault: str) -> None:
        # a program may pass what torchrun takes besides
        logger.warning("%s The argument is ignored", fault if fault.endswith("?") else f"{fault}.")


class DeepSpeedOptions(Arguments):
    """distributed_backend="deepspeed": ZeRO stage 2."""

    cpu_offload_optimizer: bool | None = False
    """Keep the optimizer states, and update them, in host memory."""
    cpu_offload_optimizer_ratio: Share = 1
    """Share of the parameters that is updated there."""
    cpu_offload_optimizer_pin_memory: bool | None = False
    """Take page-locked host memory for it."""
    save_samples: int | None = None
    """Samples between two checkpoints of the full state. Unset, or 0: none but at the end of an epoch."""


class FSDPOptions(Arguments):
    """distributed_backend="fsdp", which is ZeRO here."""

    cpu_offload_params: bool | None = False
    """Keep parameters and optimizer states in host memory."""
    sharding_strategy: ShardingStrategies = ShardingStrategies.HYBRID_SHARD
    """FULL_SHARD: ZeRO stage 3. HYBRID_SHARD: the same within a node, and replicas over nodes. SHARD_GRAD_OP: stage 2.
    NO_SHARD: stage 0."""


class LoraOptions(Arguments):
    """Low-rank adapters over a frozen model. The exports are whole models, with the adapters merged."""

    rank: NonNegative = 4
    """0: no adapters, the whole model is trained."""
    alpha: Annotated[int, Field(gt=0)] = 32
    """The adapters' output is multiplied by alpha / rank."""
    dropout: Beta = 0.1
    """Dropout of the adapters' input."""
    target_modules: list[str] | None = None
    """Names of modules, as `q_proj`. Unset: all linear layers but the output projection."""
    quantize_data_type: QuantizeDataType = QuantizeDataType.NONE
    """`nf4`: the frozen weights are held in 4 bits."""


class PretrainingConfig(Arguments):
    """Train on raw documents, cut into blocks, instead of chats."""

    block_size: Positive
    """Tokens of a block; it may begin and end inside a document."""
    document_column_name: str = "document"
    """Key of the text in a line of data_path."""


class DataProcessArgs(Arguments):
    """Arguments of data_process.main."""

    data_path: str | list[str | float]
    """Messages, a chat a line: a file, or a list of files, each with a weight before it or none."""
    data_output_path: str
    """Folder of the tokenized samples, and of the tokenizer with what the chat template added to it."""
    max_seq_len: Positive
    """Longer samples, in tokens, are left out, and counted."""
    model_path: str
    """Folder of the model, for its tokenizer."""
    chat_tmpl_path: str | None = None
    """Chat template: a .py file with CHAT_TEMPLATE and SPECIAL_TOKENS, a .jinja file, or a preset's name. Unset: the
    tokenizer's own."""
    num_cpu_procs: Positive = 16
    """Workers; at most as many as there are cores."""


class TrainingArgs(Arguments):
    """Arguments of a training run."""

    model_path: str
    """Folder of a model that transformers wrote, or its name on the hub."""
    data_path: str | list[str | float]
    """Messages, a chat a line: a file, or a list of files, each with a weight before it or none."""
    ckpt_output_dir: str
    """Folder of the exports (hf_format/), the checkpoints (full_state/) and the logs."""
    data_output_dir: str
    """Folder of the tokenized samples."""
    max_seq_len: Positive
    """Longer samples, in tokens, are left out, and counted."""
    max_batch_len: Positive
    """Tokens of one microbatch of one rank; no fewer than max_seq_len."""
    effective_batch_size: Positive
    """Samples in one optimizer step, over all ranks."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Peak of the learning rate; a cosine leads from there to 0."""
    num_epochs: Positive = 1
    """Passes over the data."""
    save_samples: int = 0
    """Samples between two exports. 0 or less: only as checkpoint_at_epoch says."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from 0."""
    random_seed: NonNegative = 42
    """Seed of the order of the samples, and of dropout."""
    adamw_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """On matrices; biases and normalisation weights are never decayed."""
    adamw_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    adamw_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""

    chat_tmpl_path: str | None = None
    """As in DataProcessArgs."""
    use_legacy_tmpl: bool = False
    """Take InstructLab's legacy template, instead of chat_tmpl_path."""
    process_data: bool | None = True
    """False: the samples are in data_output_dir already."""
    data_process_num_cpu_procs: Positive = 16
    """As num_cpu_procs in DataProcessArgs."""
    mock_data: bool | None = False
    """Train on random tokens instead of data_path, to try a setup."""
    mock_data_len: NonNegative = 0
    """Tokens of the longest random sample. 0: max_seq_len."""
    pretraining_config: PretrainingConfig | None = None
    """Train on raw documents instead of chats."""
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples, drawn from the whole file, that is kept for validation."""
    validation_frequency: Positive | None = None
    """Steps between two validations. Needed beside validation_split."""

    distributed_backend: DistributedBackend = DistributedBackend.FSDP
    """`fsdp` or `deepspeed`: whose options count. Both are DeepSpeed's ZeRO here."""
    deepspeed_options: DeepSpeedOptions = Field(default_factory=DeepSpeedOptions)
    fsdp_options: FSDPOptions = Field(default_factory=FSDPOptions)
    lora: LoraOptions | None = None
    """Train adapters instead of the model."""
    disable_flash_attn: bool | None = False
    """Take torch's scaled_dot_product_attention, which runs on older devices."""
    use_liger: bool = False
    """Changes nothing: output projection and cross-entropy are one operation here in any case."""
    use_dolomite: bool = False
    """Changes nothing, as in InstructLab's library."""
    is_padding_free: bool = False
    """Changes nothing: samples are always packed without padding."""
    trust_remote_code: bool = False
    """Refused: code that comes with a model is never run."""

    checkpoint_at_epoch: bool = True
    """Export the model at the end of each epoch."""
    accelerate_full_state_at_epoch: bool = True
    """Save the full state there too; the same call, made again, resumes from it."""
    keep_last_checkpoint_only: bool | None = False
    """One export, hf_format/last_epoch, each replacing the one before."""
    on_demand_checkpointing: bool = False
    """Save the full state when a signal ends the run; accelerate_full_state_at_epoch implies it."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Level of run_training's own log lines. The ranks log their steps in any case."""
    tensorboard_log_dir: str | None = None
    """Folder of the TensorBoard events. Unset: ckpt_output_dir."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases too."""
    wandb_entity: str | None = None
    """Owner of the project."""
    wandb_run_name: str | None = None
    """Name of the run; may hold {time}, {utc_time}, {rank} and {local_rank}."""
    mlflow_tracking_uri: str | None = None
    """Log to this server of MLflow too. Unset: the variable MLFLOW_TRACKING_URI, if it is set."""
    mlflow_experiment_name: str | None = None
    """Experiment there. Unset: the variable MLFLOW_EXPERIMENT_NAME, or `Default`."""
    mlflow_run_name: str | None = None
    """As wandb_run_name."""

    callbacks: list[Any] | None = Field(default=None, exclude=True)
    """Objects of subclasses of TrainerCallback, whose hooks are called during the training."""

    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Ours alone: options of docs/reference/configuration.md, which win over all of the above.
    {"tensor_model_parallel_size": 2} cuts each layer over two ranks."""
