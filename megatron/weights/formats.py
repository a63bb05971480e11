"""Formats of weights that a folder may hold, and how each is opened; folder_formats.py recognises them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.source import WeightSource
from megatron.options.config import Config
from megatron.weights import folder_formats
from megatron.weights.deepspeed import deepspeed_checkpoint
from megatron.weights.folder_formats import FolderFormat
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.megatron_core.source import open_megatron_core
from megatron.weights.megatron_lm.source import open_megatron_lm
from megatron.weights.meta.source import MetaSource
from megatron.weights.meta.torchtitan import TitanSource
from megatron.weights.model import base_config, check_model, config_of_source, holds_adapters
from megatron.weights.model_folder import find_base
from megatron.weights.peft.folder import open_adapter
from megatron.weights.peft.options import with_options_of
from megatron.weights.peft.source import PeftSource


@dataclass(frozen=True)
class Given:
    """Facts of a model that are known before its folder is opened."""

    config: Config | None = None
    """Options that the model must be of, with those of its adapters. None: the folder describes the model."""
    architecture: str | None = None
    """Without `config`: a family outside this package that a folder of transformers may be of."""
    lora_base: str | None = None
    """Without `config`: folder of the base of adapters, instead of the one that they name."""
    max_drift: float | None = None
    """See deepspeed_checkpoint.MAX_DRIFT."""

    @property
    def base_config(self) -> Config | None:
        return None if self.config is None else base_config(self.config)


@dataclass(frozen=True)
class Format(FolderFormat):
    """A format of weights, which a rank can open."""

    open: Callable[[Path, Given], WeightSource]
    """Checks all but checksums. Raises CheckpointError."""


def _open_checkpoint(folder: Path, given: Given) -> WeightSource:
    checkpoint = open_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give the folder of one, or of a run's")
    return checkpoint


def _open_deepspeed(folder: Path, given: Given) -> WeightSource:
    drift = deepspeed_checkpoint.MAX_DRIFT if given.max_drift is None else given.max_drift
    return deepspeed_checkpoint.read(folder, given.base_config, drift)


def _open_peft(folder: Path, given: Given) -> WeightSource:
    # a generation has no options of a model: they are those of the base and of the folder
    if given.config is None:
        return PeftSource(folder, _adapted_config(folder, given))
    return PeftSource(folder, given.config)


def _adapted_config(folder: Path, given: Given) -> Config:
    """Return the options of PEFT's adapters on the base that their config or the user names.

    A generation has no options of the model: those of the base are its folder's.
    """
    named = open_adapter(folder, ForeignFiles()).base
    base = open_base(find_base(folder, named.name, named.revision, given.lora_base, download=False), given)
    return with_options_of(config_of_source(base), folder, ())


def _opened(known: FolderFormat, by: Callable[[Path, Given], WeightSource]) -> Format:
    return Format(known.name, known.title, known.holds, by)


NATIVE = _opened(folder_formats.NATIVE, _open_checkpoint)
HUGGINGFACE = _opened(
    folder_formats.HUGGINGFACE,
    lambda folder, given: HuggingFaceSource(folder, given.base_config, given.architecture),
)
PEFT = _opened(folder_formats.PEFT, _open_peft)
TORCHTITAN = _opened(folder_formats.TORCHTITAN, lambda folder, given: TitanSource(folder, given.base_config))
META = _opened(folder_formats.META, lambda folder, given: MetaSource(folder, given.base_config))
DEEPSPEED = _opened(folder_formats.DEEPSPEED, _open_deepspeed)
MEGATRON_LM = _opened(
    folder_formats.MEGATRON_LM,
    lambda folder, given: open_megatron_lm(folder, given.base_config, given.max_drift),
)
MEGATRON_CORE = _opened(
    folder_formats.MEGATRON_CORE, lambda folder, given: open_megatron_core(folder, given.base_config)
)
FORMATS = {
    known.name: known for known in (HUGGINGFACE, PEFT, META, TORCHTITAN, NATIVE, DEEPSPEED, MEGATRON_LM, MEGATRON_CORE)
}


def recognise(folder: Path) -> Format:
    """Return the format of what a run, a generation or an evaluation loads. Raises CheckpointError."""
    return FORMATS[folder_formats.recognise(folder).name]


def open_base(folder: Path, given: Given, recorded: str | None = None) -> WeightSource:
    """Open the base of adapters. Raises CheckpointError.

    `recorded`: the format that a checkpoint of the adapters names.
    """
    if not folder.exists():
        raise CheckpointError(f"lora_base={folder} is not there; give the folder of the base model")
    known = recognise(folder)
    if recorded == DEEPSPEED.name:  # not recognised by itself
        known = DEEPSPEED
    base = None if known is PEFT else known.open(folder, given)
    if base is None or holds_adapters(base):
        raise CheckpointError(f"lora_base={folder} holds adapters; give the folder of a whole model")
    # the other formats were compared as they were opened
    if isinstance(base, Checkpoint) and given.base_config is not None:
        check_model(base, given.base_config)
    return base
