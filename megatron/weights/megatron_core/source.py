"""A distributed checkpoint of megatron-core (torch_dist) as a source of weights: each rank reads the boxes it needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.foreign import megatron_core_folder
from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.parallel.shards import Shard
from megatron.weights.distributed.folder import DistributedFolder
from megatron.weights.folder_files import own_file
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import NameMap, parameters_of
from megatron.weights.huggingface_config import form_of
from megatron.weights.huggingface_files import StoredTensor, some
from megatron.weights.huggingface_source import MappedSource
from megatron.weights.megatron_args import described_config, plain_arguments
from megatron.weights.megatron_core.flat import unflattened
from megatron.weights.megatron_core.names import VOCABULARY, Place, parts, places, stack_lengths

log = logging.getLogger(__name__)

COMMON = "common.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTERS = ("fp32_param", "param")
"""Names of the optimizer's float32 weights: of an optimizer of 16 bits, and of a distributed one."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUCKETS = "optimizer.distributed."
"""Beginning of what a distributed optimizer keeps by its buffers, as no other layout has them."""


class CoreSource(MappedSource):
    """A checkpoint of megatron-core, its names and shapes compared with the model as it is opened.

    Weights are the optimizer's in float32 where the files have them, as Megatron resumes from them.
    """

    format, title = "megatron-core", "megatron-core"
    config: Config

    def __init__(self, folder: Path, config: Config | None = None) -> None:
        """Raises CheckpointError naming the file, argument or tensor at fault, or each option that differs.

        Args:
            config: That of the run. None: the one that the arguments in common.pt describe.
        """
        # small: what is the same on all ranks
        common = _common(folder)
        arguments = plain_arguments(common.get("args"))
        files = DistributedFolder(folder)
        config, uncompared = described_config(
            arguments, config, folder, folder / COMMON, lambda: _vocabulary_rows(files)
        )
        shards = parameters_of(config)
        # names and shapes of every tensor are compared before a number is read
        by_kind = _tensors_by_kind(files)
        where = _places(folder, by_kind["weight"], shards, config)
        _check_vocabulary(folder, files, arguments, config, where)
        mapped = NameMap(
            form_of(config.model), shards, {name: parts(name, shards[name], where[name], config) for name in shards}
        )
        kinds, fault = _kinds(folder, by_kind, where)
        # raised by a run that would go on from it, not by one that takes the weights
        if fault is None and any(_BUCKETS in name for name in files.tensors):
            fault = (
                f"{folder} holds the optimizer by its buffers (dp_reshardable), which fit its own layout alone; save "
                "it with --dist-ckpt-optim-fully-reshardable, or start from the weights with --finetune"
            )
        stored = {kind: _stored(files, mapped, config, keys, by_kind["weight"], where) for kind, keys in kinds.items()}
        weights = stored.pop("weight")
        super().__init__(
            folder, mapped, weights, None, moments=stored, metadata=_metadata(common, arguments, config, stored),
            config=config,
        )  # fmt: skip
        self._distributed = files
        self._read = {key for keys in kinds.values() for key in keys.values()}
        # weights that were converted for a release have none
        self.holds_run = "iteration" in common
        self.uncompared, self.optimizer_fault = uncompared, fault

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._distributed.verify(share, sorted(self._read))


def open_megatron_core(path: Path, config: Config | None = None) -> CoreSource:
    """Open the folder of an iteration, or the one that latest_checkpointed_iteration.txt names."""
    folder = megatron_core_folder(path)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint of megatron-core; give the folder that it saved to")
    return CoreSource(folder, config)


def _common(folder: Path) -> dict[str, Any]:
    # a pickle: nothing in it is executed
    path = own_file(folder, COMMON)
    content = ForeignFiles().load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold values by name")
    return content


def _vocabulary_rows(files: DistributedFolder) -> int:
    """Return the rows of the word embedding, its padding included: nothing shows which of them are padding."""
    key = "embedding.word_embeddings.weight"
    if key not in files.tensors:
        raise CheckpointError(f"{files.folder} holds no {key}; it is not of a language model")
    return files.tensors[key].shape[0]


def _tensors_by_kind(files: DistributedFolder) -> dict[str, dict[str, str]]:
    """Return {kind: {name of the parameter: name of the tensor}}."""
    kinds: dict[str, dict[str, str]] = {"weight": {}}
    # the optimizer's keys end with those of the weights
    for name in files.tensors:
        state = _STATE.fullmatch(name)
        if state is not None:
            kinds.setdefault(state[1], {})[state[2]] = name
        elif _BUCKETS not in name and not name.startswith(("chained_", "rng_state", "rerun_state")):
            # saved as the state of a wrapped model, some programs name it
            kinds["weight"][name.removeprefix("model.")] = name
    return kinds


def _places(
    folder: Path, held: Mapping[str, str], shards: Mapping[str, Shard], config: Config
) -> dict[str, tuple[Place, ...]]:
    """Return where the files hold each parameter. Raises CheckpointError where they are of another model."""
    where: dict[str, tuple[Place, ...]] = {}
    missing = []
    # all faults in one message: a folder of another model has many of each kind
    for name in shards:
        at = places(name, held)
        if at is None:
            missing.append(name)
        else:
            where[name] = at
    # a tensor that no parameter takes would be left out in silence
    used = {place.key for at in where.values() for place in at}
    faults = []
    if missing:
        faults.append(f"it lacks {some(missing)}")
    if surplus := sorted(set(held) - used):
        faults.append(f"it holds {some(surplus)}, which they do not have")
    if faults:
        raise CheckpointError(
            f"{folder} does not hold the {config.model.architecture} model that the options describe: "
            f"{'; '.join(faults)}. Give the options of its model, or copy the folder again"
        )
    return where


def _kinds(
    folder: Path, by_kind: Mapping[str, Mapping[str, str]], where: Mapping[str, tuple[Place, ...]]
) -> tuple[dict[str, dict[str, str]], str | None]:
    """Return the keys of each kind that is read, by the keys of the weights, and why there is no optimizer, if so."""
    wanted = {place.key for at in where.values() for place in at}
    weights = dict(by_kind["weight"])
    # a float32 weight in place of the one of 16 bits that was rounded from it
    for name in _MASTERS:
        weights |= {key: theirs for key, theirs in by_kind.get(name, {}).items() if key in wanted}
    kinds = {"weight": {key: weights[key] for key in wanted}}
    moments = {kind: by_kind[kind] for kind in _MOMENTS if kind in by_kind}
    # each parameter has both moments, or the optimizer is not taken
    for kind, keys in moments.items():
        if lacking := sorted(wanted - set(keys)):
            fault = (
                f"{folder} lacks {kind} of {some(lacking)}, which was frozen, or its optimizer was saved by its "
                "buffers; start from the weights with --finetune"
            )
            return kinds, fault
        kinds[kind] = {key: keys[key] for key in wanted}
    return kinds, None


def _stored(
    files: DistributedFolder,
    mapped: NameMap,
    config: Config,
    keys: Mapping[str, str],
    weights: Mapping[str, str],
    where: Mapping[str, tuple[Place, ...]],
) -> dict[str, StoredTensor]:
    """Return the tensors of a kind by the names of the map. Raises CheckpointError with each of another shape.

    `keys`: the files' name of each tensor, by that of the weight; `weights`: those of the weights themselves.
    """
    found: dict[str, StoredTensor] = {}
    wrong = []
    for name, at in where.items():
        for place, part in zip(at, mapped.parts[name], strict=True):
            key = keys[place.key]
            # the optimizer's may be flat, of which the weight's shape is the whole
            shape = files.tensors[weights[place.key]].shape
            # layers that the model does not have would be left out in silence
            lengths = stack_lengths(place, config)
            if shape[: len(lengths)] != lengths:
                held = " x ".join(map(str, shape[: len(lengths)]))
                wrong.append(f"it holds {held} of {key}, not the {' x '.join(map(str, lengths))} of its layers")
                continue
            # rows of padding follow those of the tokens
            rows = (0, part.length) if name in VOCABULARY else None
            tensor = unflattened(files, key, shape, place.index, rows)
            if tensor is None or tensor.shape != part.shape or not tensor.dtype.is_floating_point:
                wrong.append(f"{key} is {list(files.tensors[key].shape)}, not {list(part.shape)} for {name}")
            else:
                found[part.name] = tensor
    if wrong:
        raise CheckpointError(
            f"{files.folder} is not of the model that the options describe: {some(wrong)}; give the options of its "
            "model"
        )
    return found


def _check_vocabulary(
    folder: Path,
    files: DistributedFolder,
    arguments: Mapping[str, Any],
    config: Config,
    where: Mapping[str, tuple[Place, ...]],
) -> None:
    """Raise CheckpointError unless the rows of the vocabulary are those of the model, with the run's padding."""
    size = config.model.vocab_size
    multiple = arguments.get("make_vocab_size_divisible_by")
    ranks = arguments.get("tensor_model_parallel_size")
    for name in VOCABULARY:
        for place in where.get(name, ()):
            # without these arguments nothing shows the padding, and the run's own vocabulary must be that of the rows
            rows = padded = files.tensors[place.key].shape[0]
            if isinstance(multiple, int) and isinstance(ranks, int) and multiple * ranks > 0:
                unit = multiple * ranks
                padded = -(-size // unit) * unit
            if rows < size or rows not in (size, padded):
                raise CheckpointError(
                    f"{folder} holds {rows} rows of {place.key} with its padding, which are not those of "
                    f"vocab_size={size}; it is a checkpoint of another vocabulary"
                )


def _metadata(
    common: Mapping[str, Any], arguments: Mapping[str, Any], config: Config, moments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a resuming run, as far as the files have it: see training/checkpoints.py."""
    # as a checkpoint of a run has it, whose reader this goes to
    metadata: dict[str, Any] = {"config": config.to_dict()}
    iteration = common.get("iteration")
    if not isinstance(iteration, int):
        return metadata
    # the schedule counts samples too, and goes on from the same number
    samples = arguments.get("consumed_train_samples")
    metadata["progress"] = {
        "iteration": iteration,
        "consumed_samples": samples if isinstance(samples, int) else 0,
    }
    # one count for all parameters; optimizers of experts and of the rest have their own, which are equal
    if moments:
        steps = [step for step in _steps(common.get("optimizer")) if step is not None]
        metadata["optimizer"] = {"step": max(steps, default=iteration)}
    return metadata


def _steps(state: Any) -> Iterator[int]:
    """Yield the steps that an optimizer, or each of several, has counted."""
    if isinstance(state, list | tuple):
        for each in state:
            yield from _steps(each)
    if not isinstance(state, dict):
        return
    # a count is a number, or a tensor of one, at any depth: releases nest the optimizer's groups differently
    for key, value in state.items():
        if key not in ("step", "common_step"):
            yield from _steps(value)
        elif (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float):
            yield int(value)
