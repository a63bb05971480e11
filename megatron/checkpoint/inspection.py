"""Description, norms and comparison of checkpoints, as JSON values. Reads tensors in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import ITEM_BYTES
from megatron.checkpoint.reader import Checkpoint, ReportBytes
from megatron.checkpoint.source import Slice

CHUNK_NUMEL = 1 << 22
"""Elements of a tensor read at a time: memory does not grow with the model."""


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return sizes, metadata and parameters of a checkpoint."""
    parameters = {
        name: {
            "shape": list(shard.shape),
            "dtype": checkpoint.dtypes[name],
            "cut": None if shard.dim is None else {"dim": shard.dim, "pieces": list(shard.pieces)},
            "kinds": list(checkpoint.kinds_of(name)),
        }
        for name, shard in checkpoint.parameters.items()
    }
    return {
        "folder": str(checkpoint.folder),
        "tag": checkpoint.tag,
        "bytes": checkpoint.num_bytes,
        "files": len(checkpoint.file_bytes),
        "num_parameters": sum(math.prod(shard.shape) for shard in checkpoint.parameters.values()),
        "kinds": list(checkpoint.kinds),
        "metadata": checkpoint.metadata,
        "parameters": parameters,
    }


def unused_experts(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the experts of each layer that no token chose, by `expert_loads` of a checkpoint's metadata."""
    unused = {
        layer: [expert for expert, tokens in enumerate(counts) if tokens == 0]
        for layer, counts in record["tokens"].items()
    }
    return {layer: experts for layer, experts in unused.items() if experts}


def norms(checkpoint: Checkpoint, progress: ReportBytes) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by name and kind, the L2 norm (summed in float64) and the largest magnitude of every tensor."""
    of_tensors: dict[str, dict[str, dict[str, float]]] = {}
    for name, kind in _tensors(checkpoint):
        squares, largest = 0.0, 0.0
        for chunk in _chunks(checkpoint, name, kind):
            squares += chunk.double().square().sum().item()
            largest = torch.tensor([largest, chunk.abs().max().item()]).max().item()  # NaN stays NaN
            progress(ITEM_BYTES * len(chunk))
        of_tensors.setdefault(name, {})[kind] = {"l2": math.sqrt(squares), "max": largest}
    return of_tensors


@dataclass
class Difference:
    """Difference of two tensors, or of all tensors of a kind."""

    largest: float = 0.0
    """Largest absolute difference of two elements; infinite where one of them is NaN."""
    squares: float = 0.0
    """Sum of the squared differences."""
    reference_squares: float = 0.0
    """Sum of the squared elements of the first tensor."""

    @property
    def relative_norm(self) -> float:
        """||a - b|| / ||a||."""
        # first: two tensors of zeros are equal, not infinitely far apart
        if self.squares == 0:
            return 0.0
        if self.reference_squares == 0:
            return math.inf
        return math.sqrt(self.squares / self.reference_squares)

    def add(self, first: Tensor, second: Tensor) -> None:
        reference = first.double()
        # infinities and NaN in both are no difference, though their difference is NaN
        same = (first == second) | (first.isnan() & second.isnan())
        delta = (reference - second.double()).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
        self.largest = max(self.largest, delta.max().item())
        self.squares += delta.square().sum().item()
        # an infinite element would make the relative norm 0, and hide differences of the finite ones
        self.reference_squares += reference[reference.isfinite()].square().sum().item()

    def merge(self, other: Difference) -> None:
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.reference_squares += other.reference_squares

    def to_json(self) -> dict[str, Any]:
        return {"largest": self.largest, "relative_norm": self.relative_norm}


def comparable(first: Checkpoint, second: Checkpoint) -> list[tuple[str, str]]:
    """Return (name, kind) of the tensors that both hold, in the same shape."""
    both = set(_tensors(second))
    common = [(name, kind) for name, kind in _tensors(first) if (name, kind) in both]
    return [at for at in common if first.parameters[at[0]].shape == second.parameters[at[0]].shape]


def compare(first: Checkpoint, second: Checkpoint, progress: ReportBytes) -> dict[str, Any]:
    """Return the differences in the tensors of two checkpoints; `different` says if there is any."""
    shapes = {}
    for name in (name for name in first.parameters if name in second.parameters):
        pair = [list(each.parameters[name].shape) for each in (first, second)]
        if pair[0] != pair[1]:
            shapes[name] = pair
    kinds: dict[str, Difference] = {}
    worst: dict[str, str] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, kind in comparable(first, second):
        difference = Difference()
        for chunk, other in zip(_chunks(first, name, kind), _chunks(second, name, kind), strict=True):
            difference.add(chunk, other)
            progress(ITEM_BYTES * len(chunk))
        of_kind = kinds.setdefault(kind, Difference())
        # before `merge`, which raises the largest of the kind
        if difference.largest > of_kind.largest:
            worst[kind] = name
        of_kind.merge(difference)
        if difference.largest:
            tensors[f"{kind} of {name}"] = difference.to_json()
    only_in_first, only_in_second = _only_in(first, second), _only_in(second, first)
    return {
        "first": str(first.folder),
        "second": str(second.folder),
        "only_in_first": only_in_first,
        "only_in_second": only_in_second,
        "shapes": shapes,
        "kinds": {kind: of_kind.to_json() | {"worst": worst.get(kind)} for kind, of_kind in kinds.items()},
        "tensors": tensors,
        "different": bool(shapes or tensors or only_in_first or only_in_second),
    }


def _only_in(one: Checkpoint, other: Checkpoint) -> list[str]:
    there = set(_tensors(other))
    return [f"{kind} of {name}" for name, kind in _tensors(one) if (name, kind) not in there]


def _tensors(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    return [(name, kind) for name in checkpoint.parameters for kind in checkpoint.kinds_of(name)]


def _chunks(checkpoint: Checkpoint, name: str, kind: str) -> Iterator[Tensor]:
    """Yield a whole tensor, flattened, piece by piece."""
    shard = checkpoint.parameters[name]
    numel = math.prod(shard.shape)
    # cut by elements, not by fragments, so that two checkpoints of different layouts give the same pieces
    for start in range(0, numel, CHUNK_NUMEL):
        yield checkpoint.read(Slice(name, shard, start, min(CHUNK_NUMEL, numel - start)), kind)
