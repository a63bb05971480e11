"""Interface of programs and notebooks: a model to generate with, and InstructLab's interface on this engine.

    import megatron.api

    model = megatron.api.load("models/llama")
    model.generate("The capital of France is", max_new_tokens=20)

docs/guides/generation.md describes it.

    from megatron.api import TorchrunArgs, TrainingArgs, run_training

    run_training(torch_args=TorchrunArgs(nproc_per_node=8), train_args=TrainingArgs(model_path=..., ...))

Code written for instructlab.training needs a changed import, and nothing else. docs/reference/instructlab.md
describes each field, and which are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from megatron.training.callbacks import TrainerCallback, TrainingContext

if TYPE_CHECKING:
    from megatron.generation.text_model import TextModel

__all__ = [
    "DataProcessArgs",
    "DeepSpeedOffloadStrategy",
    "DeepSpeedOptions",
    "DistributedBackend",
    "FSDPOptions",
    "LoraOptions",
    "PretrainingConfig",
    "QuantizeDataType",
    "ShardingStrategies",
    "TorchrunArgs",
    "TrainerCallback",
    "TrainingArgs",
    "TrainingContext",
    "data_process",
    "load",
    "run_training",
]


def load(folder: str | Path, **options: Any) -> TextModel:
    """Return the model in a folder: a run's checkpoints, a Hugging Face model, or adapters.

    `options` are the flags of tools/generate.py under "model and layout", such as precision, device and ckpt_step.
    """
    from megatron.generation.text_model import load_text_model  # it imports torch

    return load_text_model(folder, options)
