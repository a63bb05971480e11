"""A parameter knows its shard: which slice of the full tensor it holds, and how the full tensor starts.

Initialisation, checkpoints, resharding and conversion all derive from this description; nothing else in the
project says how a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.context import LayoutError
from megatron.parallel.rng import derive_seed


@dataclass(frozen=True)
class Shard:
    """Where a parameter's local tensor lies in the full one.

    `dim` is the dimension cut over the tensor-parallel ranks; None: every rank holds the full tensor.
    `pieces` are the lengths along `dim` of the tensors fused in it (q, k, v; gate, up); each piece is cut evenly, so a
    rank holds its part of every piece, one after the other.
    `padding` rows of zeros follow the last piece so that it divides evenly (the vocabulary); they are no part of the
    full tensor.
    `std` is the normal initialisation's standard deviation; None: filled with `value`.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[int, ...] = ()
    padding: int = 0
    std: float | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.dim is not None and sum(self.pieces) != self.shape[self.dim]:
            raise LayoutError(f"pieces {self.pieces} do not add up to dimension {self.dim} of {self.shape}")

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """[start, stop) along `dim` of the full (padded) tensor that `rank` of `size` holds, a pair a piece."""
        spans, begin = [], 0
        for index, piece in enumerate(self.pieces):
            length = piece + (self.padding if index == len(self.pieces) - 1 else 0)
            if length % size:
                raise LayoutError(f"{length} rows of {self.shape} cannot be split over {size} tensor-parallel ranks")
            part = length // size
            spans.append((begin + rank * part, begin + (rank + 1) * part))
            begin += length
        return spans

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's tensor."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.spans(0, size))
        return tuple(shape)

    def take(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The local tensor of `rank`: full -> local. Contiguous, its own storage."""
        if tuple(full.shape) != self.shape:
            raise LayoutError(f"full tensor has shape {tuple(full.shape)}, not {self.shape}")
        if self.dim is None:
            return full.clone()
        if self.padding:
            rest = list(self.shape)
            rest[self.dim] = self.padding
            full = torch.cat([full, full.new_zeros(rest)], dim=self.dim)
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.spans(rank, size)]
        return torch.cat(parts, dim=self.dim)

    def assemble(self, local: Sequence[Tensor]) -> Tensor:
        """The full tensor from every rank's local one, in order of rank; the inverse of `take`."""
        if self.dim is None:
            return local[0].clone()
        size = len(local)
        pieces: list[list[Tensor]] = [[] for _ in self.pieces]
        for rank, tensor in enumerate(local):
            begin = 0
            for index, (start, stop) in enumerate(self.spans(rank, size)):
                pieces[index].append(tensor.narrow(self.dim, begin, stop - start))
                begin += stop - start
        whole = torch.cat([part for parts in pieces for part in parts], dim=self.dim)
        return whole.narrow(self.dim, 0, self.shape[self.dim]).contiguous()

    def initial(self, name: str, seed: int, rank: int, size: int) -> Tensor:
        """The local tensor a run starts from, in float32: drawn over the full tensor by (seed, name), then cut.

        So that every layout starts from the same model. Drawn on the CPU, so that every device does too.
        """
        if self.std is None:
            return torch.full(self.local_shape(size), self.value, dtype=torch.float32)
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        full = torch.empty(self.shape, dtype=torch.float32).normal_(0.0, self.std, generator=generator)
        return self.take(full, rank, size)


def sharded_parameter(shard: Shard, size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter of one rank that carries its description as `.shard`."""
    parameter = nn.Parameter(torch.empty(shard.local_shape(size), dtype=dtype))
    parameter.shard = shard  # type: ignore[attr-defined]
    # DeepSpeed's name for it: counted on every tensor-parallel rank in the norm of the gradient
    parameter.tensor_model_parallel = shard.dim is not None  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    return parameter.shard  # type: ignore[attr-defined,no-any-return]


def alias(parameter: Tensor) -> Tensor:
    """The parameter as a tensor that a module may return.

    DeepSpeed starts its bookkeeping of a backward pass, clearing old gradients included, from hooks on the outputs of
    the model. A parameter that is itself an output gets its gradient before any hook has run, and loses it; this
    view's gradient passes a hook first.
    """
    view = parameter.view_as(parameter)
    view.shard = shard_of(parameter)  # type: ignore[attr-defined]
    return view


@torch.no_grad()
def initialise(named_parameters: Iterable[tuple[str, Tensor]], seed: int, rank: int, size: int) -> None:
    """Fill each parameter with its start, by name. Deterministic, and the same model on every layout."""
    for name, parameter in named_parameters:
        parameter.copy_(shard_of(parameter).initial(name, seed, rank, size))
