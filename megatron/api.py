"""Interface of programs, notebooks and services: what it names is promised (docs/reference/python.md).

    from megatron.api import convert, load, plan, prepare, train, train_tokenizer

    tokenizer = train_tokenizer("corpus.txt", "out/tokenizer", vocab_size=1024)
    data = prepare("corpus.txt", "out/corpus", tokenizer=tokenizer, append_eod=True)
    print(plan(config="tiny_llama", device="cpu", num_devices=2))
    run = train("out/run", config="tiny_llama", device="cpu", vocab_size=1024, data_path=data, train_iters=40)
    load(run.checkpoints, tokenizer_model=tokenizer).generate("The capital of France is", max_new_tokens=20)

Code written for instructlab.training needs a changed import, and nothing else:

    from megatron.api import TorchrunArgs, TrainingArgs, run_training

    run_training(torch_args=TorchrunArgs(nproc_per_node=8), train_args=TrainingArgs(model_path=..., ...))

docs/reference/instructlab.md describes each field, and which are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.folders import CheckpointError
from megatron.cli.calls.commands import CommandError, convert, prepare, train_tokenizer
from megatron.cli.calls.runs import RunPlan, TrainedRun, plan, train
from megatron.data.index.indexed import DataError
from megatron.launch.instructlab import data_process
from megatron.launch.instructlab.arguments import (
    DataProcessArgs,
    DeepSpeedOffloadStrategy,
    DeepSpeedOptions,
    DistributedBackend,
    FSDPOptions,
    LoraOptions,
    PretrainingConfig,
    QuantizeDataType,
    ShardingStrategies,
    TorchrunArgs,
    TrainingArgs,
)
from megatron.launch.instructlab.run import run_training
from megatron.options.config import ConfigError
from megatron.training.callbacks import TrainerCallback, TrainingContext

if TYPE_CHECKING:
    from megatron.generation.text_model import TextModel

__all__ = [
    "CheckpointError",
    "CommandError",
    "ConfigError",
    "DataError",
    "DataProcessArgs",
    "DeepSpeedOffloadStrategy",
    "DeepSpeedOptions",
    "DistributedBackend",
    "FSDPOptions",
    "LoraOptions",
    "PretrainingConfig",
    "QuantizeDataType",
    "RunPlan",
    "ShardingStrategies",
    "TorchrunArgs",
    "TrainedRun",
    "TrainerCallback",
    "TrainingArgs",
    "TrainingContext",
    "convert",
    "data_process",
    "load",
    "plan",
    "prepare",
    "run_training",
    "train",
    "train_tokenizer",
]


def load(folder: str | Path, **options: Any) -> TextModel:
    """Return the model in a folder: a run's checkpoints, a Hugging Face model, or adapters.

    `options` are the flags of megatron-generate under "model and layout", such as precision, device, ckpt_step and
    tokenizer_model. Raises ConfigError, CheckpointError or DataError.
    """
    from megatron.generation.text_model import load_text_model  # it imports torch

    # a path is a text among the options of a command
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return load_text_model(folder, given)
