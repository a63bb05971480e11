"""Writing DeepSpeed's universal folders, and the description from which its own converter makes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import WeightSource
from megatron.options.config import Config
from megatron.options.stored import from_dict
from megatron.parallel.shards import Shard, shard_of
from megatron.runtime.files import replacing, sync_file, sync_folder
from megatron.weights.deepspeed.deepspeed_checkpoint import DeepSpeedCheckpoint
from megatron.weights.deepspeed.files import FILE_OF_KIND
from megatron.weights.deepspeed.origins import VOCABULARY, PipelineNames
from megatron.weights.folder_files import new_folder
from megatron.weights.foreign_files import ForeignFiles

PARAMETER_GROUPS = 16
"""DeepSpeed restores as many parameter groups as the file lists, and stops at the model's own number."""


def write(checkpoint: WeightSource, folder: Path, write_tensors: Callable[[Path], object] | None = None) -> None:
    """Write DeepSpeed's universal folder, which its loader reads with `checkpoint: {load_universal: true}`.

    `write_tensors` writes the parameters into the folder it is given, by `write_parameters` in several processes. The
    folder appears when it is complete. One tensor is in memory at a time. Raises CheckpointError if it exists.

    Under ZeRO-3 that loader ignores shapes: it takes as many numbers of the vocabulary as the file has, and all later
    parameters shift. So the vocabulary is written with the padding that the run has at tensor-parallel size 1. Where it
    cannot be, the model states of ZeRO-3 are left out, without which the loader stops.
    """
    # names become folders
    for name in checkpoint.parameters:
        if not re.fullmatch(r"\w+(\.\w+)+", name):
            raise CheckpointError(f"{checkpoint.folder} holds a parameter {name!r}, whose name cannot be a folder's")
    # frozen parameters have weights alone
    if len({checkpoint.kinds_of(name) for name in checkpoint.parameters} - {("weight",)}) > 1:
        raise CheckpointError(
            f"{checkpoint.folder} holds the momentum of Muon beside the moments of AdamW, and DeepSpeed's universal "
            "loader restores the same kinds for all parameters; export its weights with megatron-convert"
        )
    written = _Written.of(checkpoint)
    with new_folder(folder) as partial:
        (partial / "zero").mkdir()
        if write_tensors is None:
            write_parameters(checkpoint, partial, list(checkpoint.parameters))
        else:
            write_tensors(partial)
        info = universal_info(checkpoint.parameters, 1, written.names)
        _write_states(partial, info, written.facts, for_zero_3=written.vocabulary_rows is not None)
        # the files are on the disk; so must their names be, before the folder gets its own
        for parent, _, _ in os.walk(partial):
            sync_folder(Path(parent))


@dataclass(frozen=True)
class _Written:
    """Form of a checkpoint in the folder."""

    facts: Mapping[str, Any]
    names: PipelineNames
    vocabulary_rows: int | None
    """Rows of the vocabulary with their padding; None: without."""

    @classmethod
    def of(cls, checkpoint: WeightSource) -> _Written:
        facts = checkpoint.facts if isinstance(checkpoint, DeepSpeedCheckpoint) else _native_facts(checkpoint)
        saved = (facts.get("metadata") or {}).get("config")
        config = from_dict(saved) if saved else None
        if config is None:
            names = PipelineNames.of_ours(checkpoint.parameters)
        else:
            names = PipelineNames.of_config(config)
        return cls(facts, names, _vocabulary_rows(config, checkpoint.parameters))


def write_parameters(checkpoint: WeightSource, folder: Path, parameters: Sequence[str]) -> None:
    """Write the folders of some parameters."""
    written = _Written.of(checkpoint)
    for name in parameters:
        parameter_folder = folder / "zero" / written.names.theirs(name)
        parameter_folder.mkdir()
        _write_parameter(parameter_folder, checkpoint, name, written.vocabulary_rows)
        # a frozen parameter has neither moments nor steps
        if len(_written_kinds(checkpoint, name)) > 1:
            _save(torch.tensor(_optimizer_step(written.facts)), parameter_folder / "step.pt")


def _write_parameter(folder: Path, checkpoint: WeightSource, name: str, vocabulary_rows: int | None) -> None:
    cut = _cut(name, folder.name, checkpoint.parameters[name])
    for kind in _written_kinds(checkpoint, name):
        tensor = checkpoint.read_full(name, kind).contiguous()
        if name in VOCABULARY and vocabulary_rows is not None:
            # from the last dimension on: no columns, then rows behind the others
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, vocabulary_rows - len(tensor)))
        _save({"param": tensor, **cut}, folder / f"{FILE_OF_KIND[kind]}.pt")


def _written_kinds(checkpoint: WeightSource, name: str) -> list[str]:
    """Return the kinds that DeepSpeed has files for: not the moving average of the weights."""
    return [kind for kind in checkpoint.kinds_of(name) if kind in FILE_OF_KIND]


def _optimizer_step(facts: Mapping[str, Any]) -> float:
    return float(facts.get("step", facts.get("iteration", 0)))


def _vocabulary_rows(config: Config | None, shards: Mapping[str, Shard]) -> int | None:
    """Return the rows of the vocabulary in a folder that ZeRO-3 reads; None: it must not read this one."""
    rows = next((shards[name].shape[0] for name in VOCABULARY if name in shards), None)
    if config is None or rows is None:
        return None
    padded = config.model.padded_vocab_size(1)
    # a vocabulary of one multiple has the shape of each tensor-parallel rank's part, and the loader of ZeRO-1 and 2
    # gives a tensor of that shape to each rank whole
    is_one_multiple = padded == config.model.make_vocab_size_divisible_by
    return None if is_one_multiple and rows < padded else padded


def point_latest(folder: Path) -> None:
    """Write a universal folder's name into `latest_universal` beside it, atomically."""
    pointer = folder.parent / "latest_universal"
    with replacing(pointer) as file:
        file.write(folder.name.encode())


def compare_sizes(optimizer: Any, tensor_size: int) -> None:
    """Let DeepSpeed's universal loader refuse what it would read wrongly, without an error."""
    # by their methods, which DeepSpeed's optimizers of ZeRO-3, and of ZeRO-1 and 2, have alone
    if hasattr(optimizer, "load_hp_checkpoint_state"):
        _compare_sizes_of_zero_3(optimizer)
    elif hasattr(optimizer, "load_hp_checkpoint_state_from_checkpoint_dir") and tensor_size > 1:
        _compare_shapes_of_parts(optimizer)


def _compare_shapes_of_parts(optimizer: Any) -> None:
    """Refuse a whole tensor of the shape of a tensor-parallel rank's part, which the loader gives to each rank whole.

    A vocabulary has that shape where its padding to another multiple gives each rank as many rows as the file has.
    """
    # the method of this one optimizer is wrapped, not DeepSpeed's class: other engines of the process keep theirs
    load = optimizer.load_hp_checkpoint_state_from_checkpoint_dir
    cut = [
        (name, tuple(parameter.shape))
        for parameter, name in optimizer.param_names.items()
        if shard_of(parameter).dim is not None
    ]

    def load_compared(groups: str, folder: str) -> None:
        files = ForeignFiles()
        for name, shape in cut:
            path = Path(folder, "zero", name, "fp32.pt")
            content = files.load(path)
            tensor = content.get("param") if isinstance(content, dict) else content
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape:
                raise CheckpointError(
                    f"{path} has the shape {shape} of each tensor-parallel rank's part; use the "
                    "make_vocab_size_divisible_by of the run that saved, or --universal-checkpoint"
                )
        load(groups, folder)

    optimizer.load_hp_checkpoint_state_from_checkpoint_dir = load_compared


def _compare_sizes_of_zero_3(optimizer: Any) -> None:
    """Refuse a tensor of another size than the parameter's.

    The loader takes whatever number of elements the file has, and reads all later parameters at wrong places.
    """
    load = optimizer.load_hp_checkpoint_state

    def load_compared(folder: str, key: str, param: Any = None) -> torch.Tensor:
        part: torch.Tensor = load(folder, key, param=param)
        if part.numel() != param.ds_tensor.ds_numel:
            raise CheckpointError(
                f"{folder}/{key}.pt gives each rank {part.numel()} elements, but the model has "
                f"{param.ds_tensor.ds_numel}; under ZeRO-3, use tensor-parallel size 1 and the "
                "make_vocab_size_divisible_by of the run that saved, or --universal-checkpoint"
            )
        return part

    optimizer.load_hp_checkpoint_state = load_compared


def universal_info(shards: Mapping[str, Shard], tensor_size: int, names: PipelineNames | None = None) -> dict[str, Any]:
    """Return DeepSpeed's `universal_checkpoint_info`: how its converter merges the shards of `tensor_size` ranks.

    Saved as client state under that name, it lets DeepSpeed's own ds_to_universal convert our models. The patterns are
    derived from names and shards. Without `names`, the model is a decoder.
    """
    from deepspeed.checkpoint import constants

    if names is None:
        names = PipelineNames.of_ours(shards)
    vocabulary_names = {names.theirs(name): shards[name].shape[0] for name in VOCABULARY if name in shards}
    rows, vocabulary, replicated = [], [], []
    parts: list[dict[str, Any]] = []
    widths: dict[str, list[list[int]]] = {}
    for pattern, (name, shard) in _patterns({names.theirs(name): shard for name, shard in shards.items()}).items():
        # one that is cut by rows, in one piece, and not of the vocabulary needs no pattern: the converter joins it so
        if shard.dim is None:
            replicated.append(pattern)
        elif len(shard.pieces) > 1:
            parts.append({"patterns": [pattern], "shape": _pieces_shape(shard), "partition_dim": shard.dim})
            widths[pattern] = [[piece // tensor_size] * tensor_size for piece in shard.pieces]
        elif shard.dim == 1:
            rows.append(pattern)
        elif name in vocabulary_names:
            vocabulary.append(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.ORIGINAL_VOCAB_SIZE: next(iter(vocabulary_names.values()), 0),
        constants.VOCABULARY_PARAMETER_PATTERNS: vocabulary,
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [r"tied_modules\."] if names.is_tied else [],
        constants.TP_REPLICATED_PARAMETER_PATTERNS: replicated,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        constants.PARAMETER_WITH_SUB_PARAMS: parts,
        constants.SUB_PARAM_SHARD_WIDTHS: widths,
    }


def _patterns(shards: Mapping[str, Shard]) -> dict[str, tuple[str, Shard]]:
    """Patterns with an example each: one for a parameter of all layers where all are sharded alike, else one each."""
    by_name: dict[str, list[str]] = {}
    for full_name in shards:
        layer, _, name = full_name.partition(".")
        key = name if layer.isdigit() else full_name
        by_name.setdefault(key, []).append(full_name)
    patterns = {}
    for name, members in by_name.items():
        first = members[0]
        are_alike = all(shards[member] == shards[first] for member in members)
        if are_alike and first != name:  # numbered
            patterns[rf"\d+\.{re.escape(name)}$"] = first, shards[first]
            continue
        for member in members:
            patterns[f"{re.escape(member)}$"] = member, shards[member]
    return patterns


def _cut(name: str, theirs: str, shard: Shard) -> dict[str, Any]:
    """Return the description with which DeepSpeed's loader cuts a tensor for its own ranks."""
    if shard.dim is None:
        return {}
    if len(shard.pieces) > 1:
        from deepspeed.checkpoint import SubparamShape

        shape = SubparamShape(patterns=[f"{re.escape(theirs)}$"], shape=_pieces_shape(shard), partition_dim=shard.dim)
        return {"sub_param_shape": shape}
    if name in VOCABULARY:  # padded by the loader to its own ranks' multiple
        return {"cat_dim": shard.dim, "vocab_tensor": True}
    return {"cat_dim": shard.dim}


def _pieces_shape(shard: Shard) -> tuple[Any, ...]:
    return tuple(shard.pieces if dim == shard.dim else length for dim, length in enumerate(shard.shape))


def _native_facts(checkpoint: WeightSource) -> dict[str, Any]:
    metadata = checkpoint.metadata
    progress, optimizer = metadata.get("progress") or {}, metadata.get("optimizer") or {}
    facts = {name: progress[name] for name in ("iteration", "consumed_samples") if name in progress}
    if optimizer.get("step") is not None:
        facts["step"] = int(optimizer["step"])
    return {**facts, "metadata": metadata}


def _write_states(folder: Path, info: dict[str, Any], facts: Mapping[str, Any], *, for_zero_3: bool) -> None:
    """Write the files that DeepSpeed's loader reads beside the tensors: its counters, and the optimizer's groups.

    The groups hold no hyperparameters: the resuming run keeps its own.
    """
    import deepspeed

    groups: list[dict[str, Any]] = [{"params": []} for _ in range(PARAMETER_GROUPS)]
    inner = {"state": {0: {"step": torch.tensor(_optimizer_step(facts))}}, "param_groups": groups}
    _save(
        {"ds_version": deepspeed.__version__, "param_groups": groups, "optimizer_state_dict": inner},
        folder / "zero" / "optimizer_state.pt",
    )
    client = {
        "module": None,
        "optimizer": None,
        "lr_scheduler": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": facts.get("iteration", 0),
        "global_samples": facts.get("consumed_samples", 0),
        "skipped_steps": 0,
        "ds_version": deepspeed.__version__,
        "iteration": facts.get("iteration", 0),
        "consumed_samples": facts.get("consumed_samples", 0),
        "universal_checkpoint_info": info,
    }
    if "metadata" in facts:
        client["metadata"] = json.dumps(facts["metadata"])
    _save(client, folder / "mp_rank_00_model_states.pt")
    # the loader of ZeRO-3 looks for this name, that of other stages for the one above
    if for_zero_3:
        _save(client, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        sync_file(file)
