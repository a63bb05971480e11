"""The config of a model to generate with or to evaluate, from its folder and the options. Imports no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import CheckpointError
from megatron.generation.options import LoadOptions
from megatron.models.rules import check_experts_of_copies, check_layout
from megatron.options.config import CheckpointConfig, Config, ConfigError, TrainingConfig, on_device
from megatron.options.data import DataConfig
from megatron.options.model import NOT_COMPUTED, ModelConfig
from megatron.options.training import ParallelConfig
from megatron.weights.folder_files import is_model_folder
from megatron.weights.huggingface_config import config_of, read_config
from megatron.weights.meta.params import is_meta_folder


def layout_faults(options: LoadOptions, world_size: int, device: str) -> list[str]:
    """Return what is wrong with the layout of a model of transformers or Meta, by its config.json or params.json alone.

    None for the checkpoints of a run, for adapters, and for a folder that cannot be read: the ranks report those.
    """
    folder = Path(options.load)
    if not (is_model_folder(folder) or is_meta_folder(folder)):
        return []
    try:
        theirs, path = read_config(folder)
        saved = config_of(theirs, str(path), architecture=options.architecture)  # warned of by the ranks
        # lazy mode, which only the ranks can know, decides how layers are compiled, not what fits
        return check_copies(inference_config(options, saved, device, lazy=False), world_size)
    except (CheckpointError, ConfigError, OSError):
        return []


def check_copies(config: Config, world_size: int) -> list[str]:
    """Return a message for every broken rule of a model and its copies over ranks."""
    return [*check_layout(config, world_size), *check_experts_of_copies(config, f"load={config.checkpoint.load}")]


def parallel_options(options: LoadOptions) -> ParallelConfig:
    """Return the layout that the options describe, for ParallelContext.build."""
    # the context of the groups needs no model, so it is built before the folder is read
    return ParallelConfig(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        device=options.device,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )


def inference_config(options: LoadOptions, saved: Config, device: str, *, lazy: bool) -> Config:
    """Return the config to compute with: the saved model, and the layout, precision and kernels of now.

    `lazy`: as for `on_device`. Raises CheckpointError or ConfigError for options that do not fit what the folder holds.
    """
    if options.lora_base is not None and saved.lora.lora_rank is None:
        raise CheckpointError(f"load={options.load} is a whole model; lora_base={options.lora_base} is for adapters")
    if options.merge_adapter and saved.lora.lora_rank is None:
        raise CheckpointError(f"load={options.load} is a whole model; merge_adapter is for adapters: leave it out")
    # kernels and the like are chosen for this device, not for that of the training
    of_machine = {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name in _OF_MACHINE}
    # adapters were trained on the rounded base; a model whose weights are its own is stored in full
    quantize_base: Any = options.quantize_base
    if quantize_base == "auto":
        quantize_base = "none" if saved.lora.lora_rank is None else saved.model.quantize_base
    if options.merge_adapter and quantize_base != "none":
        raise ConfigError(
            [
                f"merge_adapter adds adapters to weights of 16 bits or more, but quantize_base={quantize_base} holds "
                "those of the base in 4, whose rounding is larger than what most adapters add; leave merge_adapter "
                "out, or give --quantize-base none to merge into the base as its folder holds it"
            ]
        )
    precision = options.precision
    if precision == "auto":
        precision = saved.training.precision
    config = Config(
        model=dataclasses.replace(
            saved.model,
            **{**of_machine, "quantize_base": quantize_base, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        ),
        parallel=parallel_options(options),
        training=TrainingConfig(
            seq_length=saved.training.seq_length,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            skip_train=saved.lora.lora_rank is None,  # with adapters, what they train whole stays as it is
        ),
        data=_tokenizer_options(options, saved.data),
        checkpoint=CheckpointConfig(load=options.load),
        lora=dataclasses.replace(
            saved.lora,
            lora_dropout=0.0,
            lora_base=options.lora_base,
            allow_other_base=options.allow_other_base,
        ),
    )
    return on_device(config, device, lazy=lazy)


_OF_MACHINE = NOT_COMPUTED - {"make_vocab_size_divisible_by", "init_method_std"}
"""Options of a run's model that another machine may set otherwise: they leave its function as it is."""


_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern", "eod_token")


def _tokenizer_options(options: LoadOptions, saved: DataConfig) -> DataConfig:
    """Return the options of the tokenizer: the given ones, or else those of the run."""
    given = {name: value for name in _TOKENIZER if (value := getattr(options, name)) is not None}
    if "tokenizer_model" in given and "tokenizer_type" not in given:
        given["tokenizer_type"] = "HFTokenizer"
    if "tokenizer_type" in given:
        return DataConfig(**given)
    # each may be given alone beside those of the run; another kind of tokenizer has files of its own
    own = {name: getattr(saved, name) for name in (*_TOKENIZER, "tiktoken_num_special_tokens")}
    return DataConfig(**(own | given))
