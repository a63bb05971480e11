"""Formats of weights that a folder may hold, each recognised by the names of its files; formats.py opens them.

Imports no torch, so that a launcher recognises what its ranks will.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.folders import MANIFEST, CheckpointError, holds_checkpoints
from megatron.checkpoint.foreign import deepspeed_folder, megatron_core_folder, megatron_lm_folder
from megatron.weights.folder_files import is_adapter_folder, is_model_folder
from megatron.weights.meta.params import is_meta_folder
from megatron.weights.meta.torchtitan_folder import is_titan_folder


@dataclass(frozen=True)
class FolderFormat:
    """A format of weights."""

    name: str
    """`WeightSource.format` of what is opened."""
    title: str
    """A folder of this format, for messages."""
    holds: Callable[[Path], bool]
    """(folder) -> whether it is of this format, by the names of its files. May raise CheckpointError."""


def _is_huggingface(folder: Path) -> bool:
    # torchtitan's may have a config.json, which says which model they hold
    if not is_model_folder(folder) or is_titan_folder(folder):
        return False
    # which of the two is meant cannot be seen
    if holds_checkpoints(folder):
        raise CheckpointError(
            f"{folder} holds config.json (Hugging Face) beside checkpoints of a run; keep one of them"
        )
    return True


NATIVE = FolderFormat(
    "native",
    "checkpoints of a run",
    # one checkpoint, or a folder of them
    lambda folder: (folder / MANIFEST).exists() or holds_checkpoints(folder),
)
HUGGINGFACE = FolderFormat("huggingface", "a Hugging Face folder", _is_huggingface)
PEFT = FolderFormat("peft", "a folder of PEFT", is_adapter_folder)
TORCHTITAN = FolderFormat("torchtitan", "a checkpoint of torchtitan", is_titan_folder)
META = FolderFormat("meta", "a Llama as Meta publishes it", is_meta_folder)
DEEPSPEED = FolderFormat("deepspeed", "a checkpoint of DeepSpeed", lambda folder: deepspeed_folder(folder) is not None)
MEGATRON_LM = FolderFormat(
    "megatron-lm",
    "a checkpoint of Megatron-LM",
    # a run that began there may save there, and resumes what it saved itself
    lambda folder: not holds_checkpoints(folder) and megatron_lm_folder(folder) is not None,
)
MEGATRON_CORE = FolderFormat(
    "megatron-core",
    "a checkpoint of megatron-core",
    # a run that began there may save there, and resumes what it saved itself
    lambda folder: not holds_checkpoints(folder) and megatron_core_folder(folder) is not None,
)
LOADED_AS_THEY_ARE = (MEGATRON_CORE, HUGGINGFACE, PEFT, META, TORCHTITAN, MEGATRON_LM)
"""Formats that need no option; whatever is of none of them is opened as checkpoints of a run, which says what it is."""


def recognise(folder: Path) -> FolderFormat:
    """Return the format of what a run, a generation or an evaluation loads. Raises CheckpointError."""
    return next((known for known in LOADED_AS_THEY_ARE if known.holds(folder)), NATIVE)
