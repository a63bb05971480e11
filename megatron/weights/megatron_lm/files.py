"""Files of Megatron-LM's legacy format: one of each model-parallel rank, with model, optimizer and arguments.

    latest_checkpointed_iteration.txt                 the newest iteration, or `release`
    iter_0000100/mp_rank_TT/model_optim_rng.pt        of tensor-parallel rank TT
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt    of pipeline rank PPP too

Every file passes the check of foreign_files.py. Tensors stay mapped files until their bytes are needed.
Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.foreign import MODEL_OPTIM_RNG
from megatron.checkpoint.format import CheckpointError
from megatron.weights.foreign_files import ForeignFiles, dense
from megatron.weights.megatron_args import plain_arguments

log = logging.getLogger(__name__)

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
MODEL = re.compile(r"model(\d*)")
READ = ("args", "checkpoint_version", "iteration", "optimizer")
"""Keys of a file that are read, beside the model's."""
LEFT = {
    "opt_param_scheduler", "lr_scheduler", "rng_state", "random_rng_state", "np_rng_state", "torch_rng_state",
    "cuda_rng_state", "rng_tracker_states", "rerun_state_machine", "tokens", "content_metadata",
    "num_floating_point_operations_so_far", "total_loss_dict", "batch_size",
}  # fmt: skip
"""Keys that mean nothing here: the schedule is a function of the samples, and random streams are seeded by step."""
DEEPEST = 8
"""Levels of names in a model's nesting."""


@dataclass(frozen=True)
class RankContent:
    """File of one model-parallel rank."""

    path: Path
    content: Mapping[str, Any]
    chunks: tuple[dict[str, Tensor], ...]
    """Tensors of the rank's model by dotted names, in the order of the file; of each virtual stage."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The run's arguments that are plain values; empty where the file has none."""
        return plain_arguments(self.content.get("args"))

    @property
    def version(self) -> float:
        # as Megatron reads a file from before there were versions
        version = self.content.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version not in (0, 1, 2, 3):
            raise CheckpointError(f"{self.path} has checkpoint_version {version!r}; versions 0 to 3 are known")
        return float(version)

    @property
    def iteration(self) -> int:
        iteration = self.content.get("iteration", 0)
        # `release`: weights that were converted
        if iteration == "release":
            return 0
        if not isinstance(iteration, int) or iteration < 0:
            raise CheckpointError(f"{self.path} has iteration {iteration!r}, not a number of steps; copy it again")
        return iteration


class ModelParallelFiles:
    """Files of all ranks of one checkpoint, compared with each other. Raises CheckpointError that names the file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, ForeignFiles()
        paths = _rank_paths(folder)
        self.tensor_size = 1 + max(tensor for tensor, _ in paths)
        self.pipeline_size = 1 + max(stage for _, stage in paths)
        # the first alone, which says how many there must be
        place = min(paths)
        first = self._opened(paths[place])
        self._check_sizes(paths, first)
        self.ranks = {place: first} | {other: self._opened(paths[other]) for other in sorted(paths) if other != place}
        self._check_agreement(self.first)

    @property
    def first(self) -> RankContent:
        return self.ranks[0, 0]

    @property
    def virtual_size(self) -> int:
        return len(self.first.chunks)

    def stages(self) -> Iterator[tuple[int, int]]:
        """Yield (pipeline rank, virtual stage) in the order of the model's layers."""
        for chunk, stage in itertools.product(range(self.virtual_size), range(self.pipeline_size)):
            yield stage, chunk

    def _opened(self, path: Path) -> RankContent:
        content = self.files.load(path)
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{path} holds {type(content).__name__}, not the dict of a rank; it is not Megatron's"
            )
        models = _models(content, path)
        unread = sorted(str(key) for key in content if key not in models and key not in READ and key not in LEFT)
        if unread:
            log.warning("%s holds %s, which is not read", path, ", ".join(unread))
        chunks = tuple(dict(_flat(content[key], key, path)) for key in models)
        return RankContent(path, content, chunks)

    def _check_sizes(self, paths: Mapping[tuple[int, int], Path], first: RankContent) -> None:
        """Raise CheckpointError unless there is a file of every rank that the arguments count."""
        arguments = first.arguments
        if (arguments.get("expert_model_parallel_size") or 1) > 1:
            raise CheckpointError(
                f"{self.folder} cuts experts over ranks, which its file names do not say apart from pipeline ranks; "
                "save it in the format torch_dist"
            )
        # version 2 and older have the older name
        tensor = arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")
        sizes = (tensor, arguments.get("pipeline_model_parallel_size"))
        for index, (what, size) in enumerate(zip(("tensor", "pipeline"), sizes, strict=True)):
            found = (self.tensor_size, self.pipeline_size)[index]
            if size is not None and size != found:
                raise CheckpointError(
                    f"{self.folder} has the folders of {found} {what}-parallel ranks, but {first.path} was saved by "
                    f"{size!r}; copy the whole checkpoint"
                )
        for tensor, stage in itertools.product(range(self.tensor_size), range(self.pipeline_size)):
            if (tensor, stage) not in paths:
                name = f"mp_rank_{tensor:02d}_{stage:03d}" if self.pipeline_size > 1 else f"mp_rank_{tensor:02d}"
                raise CheckpointError(f"{self.folder} lacks {name}/{MODEL_OPTIM_RNG}; copy the whole checkpoint")

    def _check_agreement(self, first: RankContent) -> None:
        """Raise CheckpointError unless all files are of one save."""
        named = re.fullmatch(r"iter_(\d+)", self.folder.name)
        if named is not None and int(named[1]) != first.iteration:
            raise CheckpointError(
                f"{first.path} is of iteration {first.iteration}, which is not that of its folder; copy the whole "
                "checkpoint"
            )
        for rank in self.ranks.values():
            for what, here, there in [
                ("iteration", rank.iteration, first.iteration),
                ("checkpoint_version", rank.version, first.version),
                ("the number of model chunks", len(rank.chunks), len(first.chunks)),
                *self._sizes_of(rank, first),
            ]:
                if here != there:
                    raise CheckpointError(
                        f"{rank.path} has {what} {here}, but {first.path} {there}: they are of two checkpoints; copy "
                        "the whole one"
                    )

    def _sizes_of(self, rank: RankContent, first: RankContent) -> Iterator[tuple[str, Any, Any]]:
        here, there = rank.arguments, first.arguments
        for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "consumed_train_samples"):
            yield name, here.get(name), there.get(name)


def _rank_paths(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files by tensor-parallel and pipeline rank."""
    paths: dict[tuple[int, int], Path] = {}
    forms = set()
    for path in sorted(folder.iterdir()):
        match = RANK_FOLDER.fullmatch(path.name)
        if match is None:
            if path.name.startswith("mp_rank_"):
                raise CheckpointError(f"{path} is not named as Megatron names the folder of a rank of a dense model")
            continue
        forms.add(match[2] is None)
        paths[int(match[1]), int(match[2] or 0)] = path / MODEL_OPTIM_RNG
    if len(forms) > 1:
        raise CheckpointError(f"{folder} holds folders of ranks with and without a pipeline; keep those of one save")
    if missing := [path for path in paths.values() if not path.is_file()]:
        raise CheckpointError(f"{missing[0]} is not there; copy the whole checkpoint")
    return paths


def _models(content: Mapping[Any, Any], path: Path) -> list[str]:
    """Return the keys of the models of a rank, in the order of its virtual stages."""
    found = {int(match[1] or 0): match[0] for key in content if (match := MODEL.fullmatch(str(key)))}
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{path} holds the models {sorted(found.values()) or 'none'}; it needs model, or model0, model1, ..."
        )
    return [found[number] for number in sorted(found)]


def _flat(content: Any, prefix: str, path: Path, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's nested dicts by dotted names."""
    if not isinstance(content, dict) or depth > DEEPEST:
        raise CheckpointError(f"{path} holds {type(content).__name__} as {prefix!r}; it must be a dict of tensors")
    for key, value in content.items():
        name = f"{prefix}.{key}" if depth else str(key)
        if isinstance(value, Tensor):
            # rotary tables are computed; Transformer Engine's state is of its 8-bit products
            if not name.endswith(("inv_freq", "_extra_state")):
                yield name, dense(value, path, name)
        elif isinstance(value, dict):
            yield from _flat(value, name, path, depth + 1)
        elif value is not None and not name.endswith("_extra_state"):
            raise CheckpointError(f"{path} holds {type(value).__name__} as {name}; it must be a tensor")
