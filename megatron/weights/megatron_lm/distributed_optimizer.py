"""State of Megatron-LM's distributed optimizer: distrib_optim.pt, which the first data-parallel rank writes.

It has a flat tensor of each kind for each buffer of gradients, without the names of what lies in it. A buffer holds the
parameters of one chunk and dtype from the last to the first, each at a multiple of 64 numbers within its bucket; the
padding between buckets is left out. That a parameter lies where it is looked for is shown by its float32 weights, which
must round to the model's own.
Source: NVIDIA/Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.weights.foreign_files import ForeignFiles, dense
from megatron.weights.megatron_lm.files import RankContent
from megatron.weights.megatron_lm.names import OptimizerError, TensorPlace

FILE = "distrib_optim.pt"
KINDS = {"weight": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ALIGNMENT = 64
LEAST_BUCKET = 40_000_000
"""Numbers of a bucket where the arguments give no other."""


@dataclass(frozen=True)
class Buffers:
    """Layout of a rank's parameters in flat tensors."""

    bucket_size: int | None
    """Numbers after which a bucket of the first chunk ends; None: it is one bucket."""
    shared: Collection[TensorPlace]
    """Copies of a tied weight on other stages, each a bucket of its own."""

    @staticmethod
    def of(rank: RankContent, stage: int, shared: Collection[TensorPlace]) -> Buffers:
        """Return the layout that the arguments of the run give."""
        arguments = rank.arguments
        # only the first stage has buckets, whose sums are exchanged while others still go backward
        if stage or not arguments.get("overlap_grad_reduce"):
            return Buffers(None, shared)
        if count := arguments.get("ddp_num_buckets"):
            return Buffers(sum(tensor.numel() for tensor in rank.chunks[0].values()) // count, shared)
        copies = (arguments.get("data_parallel_size") or 1) * (arguments.get("context_parallel_size") or 1)
        return Buffers(arguments.get("ddp_bucket_size") or max(LEAST_BUCKET, 1_000_000 * copies), shared)

    def offsets(self, places: Mapping[TensorPlace, Tensor]) -> Iterator[tuple[TensorPlace, int, int]]:
        """Yield (parameter, first, end) in the flat tensor of these parameters of one chunk."""
        position = begin = 0  # begin: of the bucket
        for place, tensor in reversed(list(places.items())):
            first = begin + -(-(position - begin) // ALIGNMENT) * ALIGNMENT
            is_shared = place in self.shared
            if is_shared:
                begin = first
            position = first + tensor.numel()
            yield place, first, position
            is_full = place.chunk == 0 and self.bucket_size is not None and position - begin >= self.bucket_size
            if is_full or is_shared:
                begin = position


def flat_states(rank: RankContent, files: ForeignFiles, buffers: Buffers) -> dict[TensorPlace, dict[str, Tensor]]:
    """Return the state of each parameter of a rank, by kind. Raises OptimizerError, CheckpointError."""
    path = rank.path.parent / FILE
    if not path.is_file():
        raise OptimizerError(f"{path} is not there, which has the state of the distributed optimizer")
    content = files.load(path)
    if not isinstance(content, dict) or not content.get("buckets_coalesced"):
        raise OptimizerError(f"{path} is of a release before 2024, or of a model with experts")
    states: dict[TensorPlace, dict[str, Tensor]] = {}
    for index, places in enumerate(_buffers(rank)):
        flat = _flat(content.get(index), index, rank, path.name)
        size = min(tensor.numel() for tensor in flat.values())
        end = 0
        for place, first, end in buffers.offsets(places):
            shape = places[place].shape
            if end > size:
                break
            states[place] = {kind: tensor[first:end].view(shape) for kind, tensor in flat.items()}
        if end != size:
            raise OptimizerError(f"{path}: buffer {index} has {size} numbers, where its parameters take {end}")
    return states


def _buffers(rank: RankContent) -> Iterator[dict[TensorPlace, Tensor]]:
    """Yield the parameters of each buffer, those of one chunk and dtype."""
    for number, chunk in enumerate(rank.chunks):
        by_dtype: dict[Any, dict[TensorPlace, Tensor]] = {}
        for name, tensor in chunk.items():
            by_dtype.setdefault(tensor.dtype, {})[TensorPlace(number, name)] = tensor
        yield from by_dtype.values()


def _flat(buffer: Any, index: int, rank: RankContent, file: str) -> dict[str, Tensor]:
    """Return the flat tensors of a buffer, by our kinds."""
    path = rank.path.parent / file
    # by dtypes of weights and gradients, of which there is one pair
    if not isinstance(buffer, dict) or len(buffer) != 1:
        raise OptimizerError(f"{path} has no buffer {index} of one dtype")
    (held,) = buffer.values()
    if not isinstance(held, dict) or not set(KINDS.values()) <= set(held):
        raise OptimizerError(f"{path}: buffer {index} lacks one of {', '.join(KINDS.values())}")
    return {kind: dense(held[theirs], path, theirs).flatten() for kind, theirs in KINDS.items()}
