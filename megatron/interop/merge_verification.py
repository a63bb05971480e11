"""Verify a merged model against its base and its adapters, in float64 and without any merged weight in between.

A merged weight W' is compared with base and adapters by what they make of random vectors: W' x against W x + s B (A x).
A wrong row shows in its own output. Tensors that no adapter changes must be equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.interop.adapter_changes import BiasUpdate, LowRankUpdate, TensorChange
from megatron.interop.huggingface_files import StoredTensor
from megatron.interop.merged_files import PIECE_BYTES, cuts

NUM_VECTORS = 4
ROUNDINGS = 8
"""Allowed error of an output, in roundings of a row of the weight. Independent ones add up to less than 2 of them."""


def verify_merge(
    base: Mapping[str, StoredTensor],
    merged: Mapping[str, StoredTensor],
    changes: Mapping[str, TensorChange],
    progress: Callable[[int], object],
) -> str:
    """Compare all tensors, and return what was found as a text; `progress` receives elements.

    Raises CheckpointError, naming the first tensor that is not the base with its adapters.
    """
    worst = 0.0
    for name, tensor in base.items():
        found = merged.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(f"{name} is missing in the merged model, or of another shape; nothing was kept")
        error = (
            _error(tensor, found, changes[name]) if name in changes else 0.0 if _is_equal(tensor, found) else math.inf
        )
        if not error <= 1:  # NaN neither
            off = f"off by {error:.3g} times what rounding allows" if name in changes else "not the base's"
            raise CheckpointError(
                f"the merged {name} is {off}; nothing was kept. Merge again; if this repeats, test memory and disk"
            )
        worst = max(worst, error)
        progress(math.prod(tensor.shape))
    return (
        f"{len(changes)} merged tensors against base and adapters by {NUM_VECTORS} random vectors each, largest error "
        f"{worst:.2f} of what rounding allows; {len(base) - len(changes)} others equal bit for bit"
    )


def _pieces(tensor: StoredTensor, width: int) -> list[tuple[int, int]]:
    count = tensor.shape[0] if tensor.shape else 1
    return list(cuts(0, count, PIECE_BYTES // max(1, width * math.prod(tensor.shape[1:]))))


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    return all(
        torch.equal(one.rows(*piece).flatten().view(torch.uint8), other.rows(*piece).flatten().view(torch.uint8))
        for piece in _pieces(one, one.dtype.itemsize)
    )


def _error(base: StoredTensor, found: StoredTensor, change: TensorChange) -> float:
    """Return the largest error of an output, in parts of what is allowed.

    Shapes: weights [out, in], where the files hold [in, out] their transposed; vectors [in, 4], outputs [out, 4].
    """
    transposed = any(isinstance(step, LowRankUpdate) and step.transposed for step in change.added)
    num_inputs = 1 if len(base.shape) < 2 else base.shape[0] if transposed else math.prod(base.shape[1:])
    vectors = torch.randn(num_inputs, NUM_VECTORS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_base, squares = _outputs(base, vectors, transposed)
    expected, sizes = of_base, squares.sqrt()  # of the rows of all that is added up
    allowed = ROUNDINGS * torch.finfo(base.dtype).eps * max(1, len(change.whole) + len(change.added))
    for weight, saved in change.whole:
        outputs, saved_squares = _outputs(saved, vectors, transposed)
        expected = expected + weight * (outputs - of_base)
        sizes = sizes + abs(weight) * (saved_squares.sqrt() + squares.sqrt())
    for step in change.added:
        if isinstance(step, BiasUpdate):
            bias = step.scaling * step.bias.rows(0, base.shape[0]).double()[:, None]
            expected, sizes = expected + bias @ vectors, sizes + bias.abs()[:, 0]
        elif isinstance(step, LowRankUpdate):
            b, a, magnitude = step.in_float64(base)
            expected, sizes = expected + b @ (a @ vectors), sizes + b.norm(dim=1) * a.norm()
            if magnitude is not None:
                crossed = (_outputs(base, a.T, transposed)[0] * b).sum(dim=1)
                factor = magnitude / (squares + 2 * crossed + (b @ (a @ a.T) * b).sum(dim=1)).sqrt()
                expected, sizes = factor[:, None] * expected, factor.abs() * sizes
                allowed += ROUNDINGS * torch.finfo(torch.float32).eps * math.sqrt(num_inputs)  # of a float32 norm
    outputs, found_squares = _outputs(found, vectors, transposed)
    limit = allowed * (sizes + found_squares.sqrt()) + torch.finfo(base.dtype).tiny
    return float(((outputs - expected).abs() / limit[:, None]).max())


def _outputs(weight: StoredTensor, vectors: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return weight @ vectors, and the sum of squares of each row of the weight; read in pieces."""
    outputs, squares = [], []
    for first, end in _pieces(weight, 8):
        rows = weight.rows(first, end).double()
        rows = rows[:, None] if rows.dim() == 1 else rows.flatten(1)
        outputs.append(rows.T @ vectors[first:end] if transposed else rows @ vectors)
        squares.append(rows.square().sum(dim=0 if transposed else 1))
    if transposed:
        return torch.stack(outputs).sum(dim=0), torch.stack(squares).sum(dim=0)
    return torch.cat(outputs), torch.cat(squares)
