"""Checks of what a run starts from, as far as names and JSON files show it, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.foreign import MANIFEST, deepspeed_folder, foreign_format, needless_step, not_deepspeed
from megatron.config.options import Config
from megatron.interop.folder_files import is_model_folder, missing_base, own_file, read_json
from megatron.interop.huggingface_config import config_of, find_base, nothing_to_load, other_model

BASE = "base_model_name_or_path"
WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")


def missing_start(config: Config) -> Iterator[str]:
    """Yield a fault if the folder to load holds no weights, unless the run goes on in the folder that it saves to."""
    options, skip_train = config.checkpoint, config.training.skip_train
    load = options.load or (options.save if skip_train else None)
    if load is None or not (skip_train or options.needs_start):
        return
    if is_empty(Path(load)) and (skip_train or not _holds_run(options.save)):
        yield nothing_to_load(load, skip_train=skip_train)
    elif is_model_folder(Path(load)) and not _goes_on(config):
        try:
            yield from _lacking_weights(Path(load))
        except CheckpointError as error:
            yield str(error)


def check_start(config: Config) -> Iterator[str]:
    """Yield the faults of a folder to load that holds something."""
    options = config.checkpoint
    if options.load is None or is_empty(Path(options.load)):
        return
    if _goes_on(config):
        return
    try:
        yield from _faults_in(Path(options.load), config)
    except CheckpointError as error:
        yield str(error)
    except OSError as error:
        yield f"load={options.load} cannot be read: {error.strerror}; change its permissions, or give another"


def _faults_in(folder: Path, config: Config) -> Iterator[str]:
    options = config.checkpoint
    if not folder.is_dir():
        yield foreign_format(folder) or f"load={folder} is not a folder; give the folder of a run's checkpoints"
    elif options.universal_checkpoint:
        if deepspeed_folder(folder) is None:
            yield not_deepspeed(folder)
    elif is_model_folder(folder):
        yield from _check_model(folder, config)
        if options.ckpt_step is not None:
            yield needless_step(str(folder), options.ckpt_step, "a Hugging Face folder")
    elif (folder / "adapter_config.json").is_file():
        yield from _check_base(folder, config)
        if options.ckpt_step is not None:
            yield needless_step(str(folder), options.ckpt_step, "a folder of PEFT")
    elif (folder / MANIFEST).exists():
        yield f"load={folder} is a checkpoint; give the folder that contains it: {folder.parent}"
    elif not _holds_run(options.load):
        yield _strange(folder)


def _check_model(folder: Path, config: Config) -> Iterator[str]:
    """Yield the faults of a folder of transformers: its model, and which files it lacks."""
    path = own_file(folder, "config.json")
    theirs = config_of(read_json(path), str(path), architecture=config.model.architecture)
    if (fault := other_model(folder, config, theirs)) is not None:
        yield fault
    if _holds_run(str(folder)):
        yield f"{folder} holds config.json (Hugging Face) beside checkpoints of a run; keep one of them"


def _lacking_weights(folder: Path) -> Iterator[str]:
    """Yield which files of weights a folder of transformers lacks, by their names."""
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        yield foreign_format(folder) or f"{folder} holds config.json, but no weights; copy the whole folder"
    for index in sorted(folder.glob("*.index.json")):
        files = read_json(index).get("weight_map")
        names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
        if missing := [name for name in names if not (folder / name).is_file()]:
            yield f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} files that {index.name} names); copy it"


def _check_base(folder: Path, config: Config) -> Iterator[str]:
    """Yield the faults of the base model of adapters in PEFT's format."""
    theirs = read_json(own_file(folder, "adapter_config.json"))
    name, revision = (value if isinstance(value, str) else None for value in (theirs.get(BASE), theirs.get("revision")))
    base = find_base(folder, name or None, revision or None, config.lora.lora_base)
    if not base.is_dir():
        yield missing_base(folder, str(base))
    elif is_model_folder(base):
        yield from _check_model(base, config)


def _strange(folder: Path) -> str:
    """Return the fault of a folder in which no checkpoint is known."""
    inner = folder / "checkpoints"  # where the scripts save, in the folder of a run's results
    if (inner / "latest").is_file():
        return f"load={folder} holds no checkpoint itself; give {inner}"
    return foreign_format(folder) or f"load={folder} holds no checkpoint, yet is not empty; give another, or empty it"


def _goes_on(config: Config) -> bool:
    """Return True if the run has begun: it reads `load` no more."""
    return config.checkpoint.loads_elsewhere and _holds_run(config.checkpoint.save)


def _holds_run(folder: str | None) -> bool:
    return folder is not None and any(Path(folder).glob(f"*/{MANIFEST}"))


def is_empty(folder: Path) -> bool:
    """Return True if nothing is there; a run that was killed before its first checkpoint leaves its hidden lock."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())
