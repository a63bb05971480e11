"""Tensors in DeepSpeed's files: universal folders, ZeRO shards, and the files of a model's layers.

Each reader gives the tensors as the tensor-parallel ranks held them, with their own names and order of rows;
`deepspeed_checkpoint.py` converts them to ours.

Every file passes the check of foreign_files.py first. Tensors stay mapped files until their bytes are needed.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.parallel.shards import Shard
from megatron.weights.foreign_files import ForeignFiles, Inert, dense

log = logging.getLogger(__name__)

FILE_OF_KIND = {
    "weight": "fp32",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
}
"""DeepSpeed's name of each kind of tensor."""

# under ZeRO-3 each data-parallel rank writes a model file; the first has all that is read here
MODEL_FILE = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def _mapping(content: Any, path: Path, what: str) -> dict[Any, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__} as {what}, not a dict; it is not of DeepSpeed")
    return content


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return the files whose names match, by the numbers in their names; the first by name where two are equal.

    Raises CheckpointError for two files of one optimizer's rank: they are of two checkpoints.
    """
    files: dict[tuple[int, ...], Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        numbers = tuple(map(int, match.groups()))
        # bf16_zero_pp_rank_0... and zero_pp_rank_0... have the same numbers: two precisions left theirs
        if numbers in files and pattern is OPTIMIZER_FILE:
            raise CheckpointError(
                f"{path} and {files[numbers].name} are of the same rank, so of two checkpoints; keep those of one"
            )
        # model files of one rank may have both names, as in our universal folders: they hold the same
        files.setdefault(numbers, path)
    return files


class RankTensors(Protocol):
    """Tensors of a foreign checkpoint, as its tensor-parallel ranks held them."""

    files: ForeignFiles
    tensor_size: int
    client: dict[str, Any]
    """Counters and client state saved beside the model."""
    names: list[str]

    def kinds(self, name: str) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the first rank's tensor."""
        ...

    def local(self, name: str, kind: str) -> list[Tensor]:
        """Tensor of every tensor-parallel rank, in order of rank."""
        ...

    def path(self, name: str, kind: str) -> Path:
        """File to name in an error."""
        ...

    def step(self) -> int | None:
        """Number of optimizer steps, where the optimizer counts them."""
        ...


class UniversalFolder:
    """zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt: every tensor is whole."""

    tensor_size = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = ForeignFiles()
        self.client = _client(folder, self.files)
        # by their weights, since other files in zero/ (optimizer_state.pt) are of no parameter
        self.names = sorted(path.parent.name for path in (folder / "zero").glob("*/fp32.pt"))
        self._shapes = _parameter_shapes(self.client)

    def kinds(self, name: str) -> tuple[str, ...]:
        return tuple(kind for kind in FILE_OF_KIND if self.path(name, kind).is_file())

    def path(self, name: str, kind: str) -> Path:
        return self.folder / "zero" / name / f"{FILE_OF_KIND[kind]}.pt"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name, "weight").shape)

    def local(self, name: str, kind: str) -> list[Tensor]:
        self.files.ensure(self.path(name, kind))
        return [self._tensor(name, kind)]

    def _tensor(self, name: str, kind: str) -> Tensor:
        content = self._content(name, kind)
        tensor = dense(content.get("param"), self.path(name, kind), "'param'")
        shape = self._shapes.get(name)
        if tensor.dim() == 1 and shape is not None and tensor.numel() == math.prod(shape):
            tensor = tensor.view(shape)  # ZeRO-3's are flat
        return tensor

    def _content(self, name: str, kind: str) -> dict[Any, Any]:
        content = self.files.load(self.path(name, kind))
        if isinstance(content, Tensor):
            return {"param": content}  # ZeRO-3's are bare
        return _mapping(content, self.path(name, kind), "the tensor")

    def step(self) -> int | None:
        for name in self.names:
            path = self.folder / "zero" / name / "step.pt"
            if path.is_file():
                return _as_int(self.files.load(path))
        return None

    def shard(self, name: str) -> Shard:
        """Return the shard that the file describes."""
        # DeepSpeed's own converter writes what its loader needs to cut the tensor again
        content = self._content(name, "weight")
        shape = self.shape(name)
        parts = content.get("sub_param_shape")
        if isinstance(parts, Inert):
            return self._shard_of_pieces(name, shape, parts.get("partition_dim"), parts.get("shape"))
        dim = content.get("cat_dim")
        if not isinstance(dim, int) or not 0 <= dim < len(shape):
            return Shard(shape)
        # so many equal pieces, as gate and up of SwiGLU
        count = content.get("param_n_sub_params", 1)
        return Shard(shape, dim=dim, pieces=(shape[dim] // count,) * count)

    def _shard_of_pieces(self, name: str, shape: tuple[int, ...], dim: Any, sizes: Any) -> Shard:
        """Return the shard of a SubparamShape, which has the pieces in the place of the cut dimension's length."""
        pieces = None
        if isinstance(sizes, tuple) and isinstance(dim, int) and dim < len(sizes):
            pieces = sizes[dim]
        if isinstance(pieces, int) and pieces > 0:  # so many of equal length
            pieces = (shape[dim] // pieces,) * pieces
        if not isinstance(pieces, tuple) or dim >= len(shape) or sum(pieces) != shape[dim]:
            raise CheckpointError(
                f"{self.path(name, 'weight')} describes pieces {sizes} of a tensor of shape {shape}; create the "
                "universal checkpoint again"
            )
        return Shard(shape, dim=dim, pieces=pieces)


@dataclass(frozen=True)
class _FlatSlice:
    """Part of a flattened local tensor: `numel` elements of each of `flat`, by kind, from `start` on."""

    flat: Mapping[str, Tensor]
    start: int
    numel: int
    path: Path


@dataclass(frozen=True)
class _FlatGroups:
    """Groups of parameters in one rank's optimizer file, each a flat tensor; nothing in them is checked yet."""

    weights: Any
    """A list of float32 tensors, one a group."""
    optimizer: Any
    """The inner optimizer's state, which has the moments of each group under its number."""
    spans: list[list[tuple[str, Any, Any]]] | None
    """(name, start, number of elements) of the parameters in each group; None: unknown."""


def _recorded_spans(groups: Any) -> list[list[tuple[str, Any, Any]]] | None:
    if not groups:
        return None
    return [[(name, span.get("start"), span.get("numel")) for name, span in group.items()] for group in groups]


class ZeroShards:
    """Optimizer files of ZeRO 1, 2 and 3 and of BF16_Optimizer: float32 weights and moments, cut over data ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = ForeignFiles()
        self.client = _client(folder, self.files)
        files = numbered(folder, OPTIMIZER_FILE)
        models = numbered(folder, MODEL_FILE)
        data_size = 1 + max(data for data, _ in files)
        model_size = 1 + max(model for _, model in files)
        # every rank must have its file: a gap would shift what the ranks behind it hold
        ranks = itertools.product(range(model_size), range(data_size))
        missing = [
            f"zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"
            for model, data in ranks
            if (data, model) not in files
        ]
        missing += [f"mp_rank_{model:02d}_model_states.pt" for model in range(model_size) if (model,) not in models]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {missing[0]} ({len(missing)} of the files of {data_size} x {model_size} ranks in "
                "all); copy the whole checkpoint"
            )
        self.tensor_size = _tensor_size(folder, self.client, model_size)
        self._pieces: dict[str, dict[int, list[_FlatSlice]]] = {}
        self._copies: dict[str, list[tuple[int, list[_FlatSlice]]]] = {}
        """Later stages' copies of tied weights, each with its tensor-parallel rank."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._step: int | None = None
        for model in range(model_size):
            self._add(model, [files[data, model] for data in range(data_size)], models[model,])
        self.names = sorted(self._pieces)

    def _add(self, model: int, files: Sequence[Path], model_file: Path) -> None:
        """Add the slices of one tensor-parallel rank and stage; ranks are numbered stage by stage."""
        rank = model % self.tensor_size
        groups = _parameter_groups(_mapping(self.files.load(model_file), model_file, "a model's state"))
        shapes = {name: shape for group in groups for name, shape in group.items()}
        pieces_of: dict[str, list[_FlatSlice]] = {}
        for data, path in enumerate(files):
            content = _mapping(self.files.load(path), path, "a rank's state")
            state = _mapping(content.get("optimizer_state_dict"), path, "optimizer")
            if "fp32_flat_groups" in state:  # ZeRO-3 cuts every parameter evenly over the data ranks
                spans = [list(_partitions(group, data, len(files))) for group in groups]
                flat_groups = _FlatGroups(state.get("fp32_flat_groups"), state.get("optimizer_state_dict"), spans)
            else:
                flat_groups = _FlatGroups(
                    state.get("single_partition_of_fp32_groups"),
                    state.get("base_optimizer_state"),
                    _recorded_spans(state.get("param_slice_mappings")),
                )
            for name, piece in self._slices(flat_groups, path):
                pieces_of.setdefault(name, []).append(piece)
        for name, pieces in pieces_of.items():
            numel = sum(piece.numel for piece in pieces)
            if name not in shapes or numel != math.prod(shapes[name]):
                raise CheckpointError(
                    f"{files[0].parent}: the files of rank {model} hold {numel} elements of {name}, but "
                    f"{model_file.name} gives it the shape {shapes.get(name)}; they belong to different checkpoints"
                )
            # a tied weight is in the files of its first stage and of its last
            if rank in self._pieces.get(name, {}):
                self._copies.setdefault(name, []).append((rank, pieces))
                continue
            self._pieces.setdefault(name, {})[rank] = pieces
            self._shapes.setdefault(name, shapes[name])

    def _slices(self, groups: _FlatGroups, path: Path) -> Iterator[tuple[str, _FlatSlice]]:
        weights, inner = groups.weights, groups.optimizer
        if not isinstance(inner, dict) or not isinstance(weights, list) or groups.spans is None:
            raise CheckpointError(
                f"{path} does not contain the position of each parameter, which DeepSpeed writes since 0.7; load the "
                "checkpoint with the version that wrote it, and save it with a newer one"
            )
        for index, weight in enumerate(weights):
            flat = self._flat_tensors(weight, inner.get("state", {}).get(index, {}), path)
            # a span must lie within the moments too, which have the same offsets
            length = min(tensor.numel() for tensor in flat.values())
            for name, start, numel in groups.spans[index]:
                if not (isinstance(start, int) and isinstance(numel, int) and 0 <= start <= start + numel <= length):
                    raise CheckpointError(
                        f"{path} places {name} at [{start}, {start} + {numel}) of {length} elements; it is damaged"
                    )
                yield name, _FlatSlice(flat, start, numel, path)

    def _flat_tensors(self, weight: object, moments: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
        """Return the flat tensors of a group by kind, and note the optimizer's step."""
        flat = {"weight": dense(weight, path, "float32 weights")}
        for kind in FILE_OF_KIND:
            if isinstance(moments.get(kind), Tensor):
                flat[kind] = dense(moments[kind], path, kind)
        # all groups of an optimizer step together, so the first that counts is enough
        if self._step is None and "step" in moments:
            self._step = _as_int(moments["step"])
        return flat

    def kinds(self, name: str) -> tuple[str, ...]:
        # an empty part says nothing of the kinds
        pieces = [piece for parts in self._pieces[name].values() for piece in parts if piece.numel]
        return tuple(kind for kind in FILE_OF_KIND if all(kind in piece.flat for piece in pieces))

    def path(self, name: str, kind: str) -> Path:
        return self._pieces[name][0][0].path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def local(self, name: str, kind: str) -> list[Tensor]:
        if len(self._pieces[name]) != self.tensor_size:
            raise CheckpointError(
                f"{self.folder} holds {name} for tensor-parallel ranks {sorted(self._pieces[name])} of "
                f"{self.tensor_size}; copy the whole checkpoint"
            )
        tensors = [self._joined(self._pieces[name][rank], kind) for rank in range(self.tensor_size)]
        for rank, pieces in self._copies.get(name, []):
            if not torch.equal(self._joined(pieces, kind), tensors[rank]):
                raise CheckpointError(
                    f"{pieces[0].path}: {kind} of {name} differs from the first stage's copy of the same tied weight; "
                    "its copies had drifted apart, so load an earlier checkpoint"
                )
        return [tensor.view(self._shapes[name]) for tensor in tensors]

    def _joined(self, pieces: Sequence[_FlatSlice], kind: str) -> Tensor:
        # the checksums of large entries are compared now, before their bytes are used
        for piece in pieces:
            self.files.ensure(piece.path)
        # in the order of the data ranks, which is that of the tensor's elements
        return torch.cat([piece.flat[kind].narrow(0, piece.start, piece.numel) for piece in pieces])

    def step(self) -> int | None:
        return self._step


class ModelFiles:
    """Weights without moments, from the files of a pipeline's layers or of an unpipelined model's ranks."""

    def __init__(self, folder: Path) -> None:
        self.files = ForeignFiles()
        self.client = _client(folder, self.files)
        self._state: dict[str, dict[int, tuple[Path, Tensor]]] = {}
        # a pipeline's weights are in the files of its layers; its model files hold none
        layers = numbered(folder, LAYER_FILE)
        for (layer, rank), path in layers.items():
            self._add(rank, path, _mapping(self.files.load(path), path, "a layer's state"), f"{layer}.")
        if not layers:
            for (rank,), path in numbered(folder, MODEL_FILE).items():
                module = _mapping(self.files.load(path), path, "a model's state").get("module")
                self._add(rank, path, _mapping(module, path, "'module'"), "")
        # by the tensors that were found: a rank that lacks one is reported below
        self.tensor_size = 1 + max((rank for ranks in self._state.values() for rank in ranks), default=0)
        for name, ranks in self._state.items():
            missing = [rank for rank in range(self.tensor_size) if rank not in ranks]
            if missing:
                holder, _ = next(iter(ranks.values()))
                raise CheckpointError(
                    f"{holder} holds {name}, but tensor-parallel rank {missing[0]} of {self.tensor_size} has no file "
                    "of it; copy the whole checkpoint"
                )
        self.names = list(self._state)
        if self.client.get("optimizer") is not None:
            log.warning("%s: only weights are read, since float32 without ZeRO saves moments without names", folder)

    def _add(self, rank: int, path: Path, state: dict[Any, Any], prefix: str) -> None:
        for name, tensor in state.items():
            if isinstance(tensor, dict):
                raise CheckpointError(
                    f"{path} nests its weights under {name!r}, as an unpipelined Megatron model does; convert it with "
                    "DeepSpeed's ds_to_universal, and read the universal checkpoint"
                )
            if not isinstance(name, str):
                raise CheckpointError(f"{path} names a tensor {name!r}; it is not a DeepSpeed file")
            if isinstance(tensor, Tensor):  # modules may keep other values beside
                self._state.setdefault(prefix + name, {})[rank] = path, dense(tensor, path, name)

    def kinds(self, name: str) -> tuple[str, ...]:
        return ("weight",)

    def path(self, name: str, kind: str) -> Path:
        return self._state[name][0][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name][0][1].shape)

    def local(self, name: str, kind: str) -> list[Tensor]:
        for path, _ in self._state[name].values():
            self.files.ensure(path)
        return [self._state[name][rank][1] for rank in range(self.tensor_size)]

    def step(self) -> int | None:
        return None


def _client(folder: Path, files: ForeignFiles) -> dict[str, Any]:
    """State that DeepSpeed saved beside the model on the first rank; empty where there is no such file."""
    files_of_ranks = numbered(folder, MODEL_FILE)
    if not files_of_ranks:
        return {}
    # the first rank's: counters and arguments are alike in all
    path = files_of_ranks[min(files_of_ranks)]
    return _mapping(files.load(path), path, "a model's state")


def _tensor_size(folder: Path, client: Mapping[str, Any], model_size: int) -> int:
    """Number of tensor-parallel ranks: as recorded, or the files of a layer, or all files (no pipeline)."""
    recorded = client.get("checkpoint_parallel_dimensions")
    layers = numbered(folder, LAYER_FILE)
    size = recorded.get("tp_degree") if isinstance(recorded, dict) else None
    if not isinstance(size, int):
        # where nothing is recorded: a pipeline shows it by the files of its layers
        size = model_size
        if layers:
            size = 1 + max(rank for _, rank in layers)
    if size < 1 or model_size % size:
        raise CheckpointError(
            f"{folder} has the files of {model_size} model-parallel ranks, not a multiple of {size} (tensor-parallel); "
            "copy the whole checkpoint"
        )
    return size


def _parameter_groups(client: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Shape of each parameter on this rank, one dict per optimizer group."""
    groups = client.get("param_shapes")
    if not isinstance(groups, list):
        return []
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups if isinstance(group, dict)]


def _parameter_shapes(client: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape for group in _parameter_groups(client) for name, shape in group.items()}


def _partitions(group: Mapping[str, tuple[int, ...]], rank: int, size: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, numel) in ZeRO-3's flat group of data rank `rank`: parameters are cut evenly and padded."""
    start = 0
    for name, shape in group.items():
        part = -(-math.prod(shape) // size)  # the last ranks' parts are padded
        yield name, start, max(0, min(part, math.prod(shape) - rank * part))
        start += part


def _as_int(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value) if value.numel() == 1 else None
    return int(value) if isinstance(value, int | float) else None
