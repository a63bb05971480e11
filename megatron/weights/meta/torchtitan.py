"""Checkpoints of torchtitan's Llama 3: torch.distributed.checkpoint folders of weights, AdamW's moments and the step.

Source: torchtitan 0.1 to 0.3, components/checkpoint* and models/llama3
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_known_options
from megatron.options.config import Config
from megatron.weights.distributed.folder import DistributedFolder
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface import NameMap, name_map
from megatron.weights.huggingface_config import OUTPUT, config_of, other_model
from megatron.weights.huggingface_files import StoredTensor, some
from megatron.weights.huggingface_source import MappedSource, are_equal
from megatron.weights.meta.names import EMBEDDING, in_halves, known_names, split_qkv, wrong_names
from megatron.weights.meta.torchtitan_folder import titan_folder

_STATE = re.compile(r"optimizer\.state\.(.+)\.(\w+)")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_BESIDE = ("optimizer.param_groups.", "lr_scheduler.", "dataloader.", "train_state.")
"""Beginnings of the names of what belongs to no parameter."""
_ITERATION = "train_state.step"


class TitanSource(MappedSource):
    """A step of torchtitan, its names and shapes compared with the model as it is opened.

    No file of torchtitan's says which model it is: a config.json of transformers in the folder does, or the options.
    """

    format, title = "torchtitan", "torchtitan"
    config: Config

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        """Raises CheckpointError naming file, tensor or option at fault. `config`: the run's; None: config.json's."""
        step_folder = titan_folder(folder)
        if step_folder is None:
            raise CheckpointError(f"{folder} holds no whole step of torchtitan: .metadata and .distcp files")
        described = _described(folder, step_folder)
        model = described or config
        if model is None:
            raise CheckpointError(
                f"{step_folder} does not say which model it holds; copy the model's config.json of transformers there, "
                "or give its options: those of a run, or --config PRESET of a conversion"
            )
        if described is not None and config is not None and (fault := other_model(folder, config, described)):
            raise CheckpointError(fault)
        self._distributed = DistributedFolder(step_folder)
        mapped = _llama_map(step_folder, model)
        stored = _tensors_by_kind(self._distributed, mapped, model)
        # what is left are moments, of which MappedSource knows the kinds
        weights = stored.pop("weight")
        iteration = _iteration(self._distributed)
        super().__init__(
            step_folder,
            mapped,
            weights,
            None,
            moments={kind: stored[kind] for kind in _MOMENTS if kind in stored},
            metadata=_metadata(self._distributed, model, config, iteration),
            config=model,
        )
        # a last save of the weights alone has no step to go on from
        self.holds_run = iteration is not None
        if described is None:
            self.uncompared = check_known_options(step_folder, {}, model)

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        if kinds is None or set(kinds) >= set(self.kinds):
            return self._distributed.verify(share)
        names = [name for name in self._distributed.tensors if not name.startswith("optimizer.")]
        return self._distributed.verify(share, names)


def _described(*folders: Path) -> Config | None:
    """Return the model of a config.json in one of the folders; None: there is none."""
    for folder in folders:
        if os.path.lexists(folder / "config.json"):
            path = own_file(folder, "config.json")
            return config_of(read_json(path), path)
    return None


def _llama_map(folder: Path, config: Config) -> NameMap:
    mapped = name_map(config)
    if mapped.form.model_type != "llama":
        raise CheckpointError(
            f"{folder} is a checkpoint of torchtitan, of which Llama is read; the options describe "
            f"architecture={config.model.architecture}"
        )
    return mapped


def _tensors_by_kind(files: DistributedFolder, mapped: NameMap, config: Config) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors by kind and transformers' names.

    Raises CheckpointError for a name, a shape or a dtype that is not the model's, and moments that a weight lacks.
    """
    # no shape says how many heads a projection has
    heads = config.model.num_attention_heads, config.model.num_kv_heads
    shapes = {part.name: part.shape for parts in mapped.parts.values() for part in parts}
    kinds: dict[str, dict[str, StoredTensor]] = {}
    for kind, names in _names_by_kind(files).items():
        tensors = split_qkv({name: files.stored(theirs) for name, theirs in names.items()}, heads)
        named, strange = known_names(tensors)
        found = {ours: tensors[theirs] for ours, theirs in named.items()}
        if config.model.untie_embeddings_and_output_weights or OUTPUT not in found:
            pass
        elif not are_equal(found.pop(OUTPUT), found[EMBEDDING]):
            raise CheckpointError(
                f"{files.folder} has another output than its embeddings, which the options tie; give "
                "--untie-embeddings-and-output-weights"
            )
        faults = list(wrong_names(shapes.keys(), [*found, *strange]))
        faults += _wrong_tensors({name: found[name] for name in shapes if name in found}, shapes)
        if faults:
            raise CheckpointError(
                f"{files.folder} does not hold {kind} of the Llama that the options describe: {'; '.join(faults)}; "
                "give its own options, or copy the folder again"
            )
        kinds[kind] = in_halves(found, *heads)
    if "weight" not in kinds:
        raise CheckpointError(
            f"{files.folder} holds no weights of a model of torchtitan; give the folder of its step-N"
        )
    return kinds


def _names_by_kind(files: DistributedFolder) -> dict[str, dict[str, str]]:
    """Return {kind: {name of the parameter: name of the tensor}}; a parameter's step is left out."""
    kinds: dict[str, dict[str, str]] = {}
    for name in files.tensors:
        state = _STATE.fullmatch(name)
        if (state is not None and state[2] == _STEP) or name.startswith(_BESIDE):
            continue
        if state is not None and state[2] not in _MOMENTS:
            raise CheckpointError(
                f"{files.folder} holds {name}: it was not trained with AdamW, whose {' and '.join(_MOMENTS)} are read; "
                "take the weights alone with a config.json there and convert_checkpoint"
            )
        kind, parameter = ("weight", name) if state is None else (state[2], state[1])
        # torchtitan before 0.1 kept the model under a name of its own
        kinds.setdefault(kind, {})[parameter.removeprefix("model.")] = name
    return kinds


def _wrong_tensors(found: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    wrong = [
        f"{name} is {list(tensor.shape)} of {tensor.dtype}, not {list(shapes[name])}"
        for name, tensor in found.items()
        if tensor.shape != shapes[name] or not tensor.dtype.is_floating_point
    ]
    if wrong:
        yield some(wrong)


def _iteration(files: DistributedFolder) -> int | None:
    """Return the number of steps of the run; None: the folder holds weights alone."""
    if _ITERATION in files.tensors:
        return _count(files.read(_ITERATION), files.folder, _ITERATION)
    if _ITERATION in files.objects:
        return _count(files.object(_ITERATION), files.folder, _ITERATION)
    return None


def _optimizer_step(files: DistributedFolder) -> int | None:
    """Return AdamW's count of steps, of which each parameter has one; None: there is none."""
    # DeepSpeed's optimizers count once for all parameters
    counts = {}
    for name in files.tensors:
        state = _STATE.fullmatch(name)
        if state is not None and state[2] == _STEP:
            counts[name] = _count(files.read(name), files.folder, name)
    if len(set(counts.values())) > 1:
        lowest, highest = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise CheckpointError(
            f"{files.folder} has {lowest}={counts[lowest]} and {highest}={counts[highest]}: parameters that trained "
            "for other numbers of steps do not go on together; take the weights alone with --finetune"
        )
    return next(iter(counts.values()), None)


def _count(value: Any, folder: Path, name: str) -> int:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or value != int(value) or value < 0:
        raise CheckpointError(f"{folder} has {name}={value!r:.60}, not a number of steps; copy the folder again")
    return int(value)


def _metadata(files: DistributedFolder, model: Config, run: Config | None, iteration: int | None) -> dict[str, Any]:
    """Return the metadata of a resuming run, as far as the folder has it: see training/checkpoints.py."""
    metadata: dict[str, Any] = {"config": model.to_dict()}
    if iteration is None:
        return metadata
    # torchtitan counts the tokens of each rank for itself, so the samples are those of as many of the run's own steps
    samples = 0 if run is None else iteration * run.training.global_batch_size
    metadata["progress"] = {"iteration": iteration, "consumed_samples": samples}
    step = _optimizer_step(files)
    if step is not None:
        metadata["optimizer"] = {"step": step}
    return metadata
