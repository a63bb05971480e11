"""Matrix products, of 16-bit numbers through float32 where the processor has no instruction for them.

Shapes: [m, k] times [k, n].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.operators import block_sizes
from megatron.runtime.accelerator import processor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by the names of precisions."""

# torch's own products take 5 to 100 times as long there as those of float32. A product of two 16-bit numbers is exact
# in float32, so the sum is that of a float32 product, and the result is rounded once.
WIDENED = frozenset(
    dtype for precision, dtype in DTYPES.items() if dtype.itemsize == 2 and precision not in processor().products
)
"""Dtypes whose products a CPU computes in float32. Known at the import: torch.compile could not trace the question."""


def widens(x: Tensor) -> bool:
    """Return True if products of such a tensor are computed in float32."""
    return x.dtype in WIDENED and x.is_cpu


# ---------------------------------------------------------------------------------------------------------------------
# Without autograd


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a [..., k] times b [k, n], written to `out` [m, n] if that is given."""
    if not widens(a):
        return torch.matmul(a, b, out=out)
    if out is not None:
        return _multiply(a, b, out, beta=0)
    result = a.new_empty((*a.shape[:-1], b.shape[1]))
    _multiply(a.flatten(0, -2), b, result.flatten(0, -2), beta=0)
    return result


def add_mm_(total: Tensor, a: Tensor, b: Tensor, *, beta: int = 1) -> Tensor:
    """Replace `total` [m, n] by beta x total + a b, in place; it may be float32 where products are computed in that."""
    if not widens(a):
        return total.addmm_(a, b, beta=beta)
    return _multiply(a, b, total, beta=beta)


# no whole matrix is held in float32, but blocks of it, each converted again for each product
def _multiply(a: Tensor, b: Tensor, total: Tensor, *, beta: int) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    if k == 0:
        if beta:
            return total.mul_(beta)
        return total.zero_()  # 0 times memory that was never written may be NaN
    for columns in _blocks(n, block_sizes.most_columns(m)):
        for rows in _blocks(m, block_sizes.ROWS):
            target = total[rows, columns]
            if beta or target.dtype == torch.float32:
                sums = target.float()  # the target itself, if it is float32
            else:
                sums = torch.empty(target.shape)
            share = beta  # of what is there; the blocks after the first are added to it
            for summed in _blocks(k, block_sizes.SUMMED):
                sums.addmm_(a[rows, summed].float(), b[summed, columns].float(), beta=share)
                share = 1
            if sums is not target:
                target.copy_(sums)
    return total


def _blocks(size: int, largest: int) -> Iterator[slice]:
    """Yield slices of nearly equal size, at most the largest."""
    if not size:
        return
    step = block_sizes.block_size(size, largest)
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == x.shape[-1]:  # one token: torch reads the weight once, and computes in float32 as it does
        return F.linear(x, weight, bias)
    if bias is None:
        return mm(x, weight.t())
    output = bias.expand(*x.shape[:-1], len(bias)).contiguous()
    _multiply(x.flatten(0, -2), weight.t(), output.flatten(0, -2), beta=1)
    return output


# ---------------------------------------------------------------------------------------------------------------------
# With autograd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias: [..., in] -> [..., out]."""
    if not widens(x):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # which fuses the conversions with what stands around the product
        if bias is not None:
            bias = bias.float()
        return F.linear(x.float(), weight.float(), bias).to(x.dtype)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def kept(x: Tensor, *, is_needed: bool) -> Tensor | None:
    """Return what an autograd function saves of a tensor: nothing, unless its backward pass needs it."""
    if is_needed:
        return x
    return None


# Autograd does not record what a forward pass computes for its backward: a second derivative would lack terms, and is
# refused, here as in all functions of this room.
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = function.needs_input_grad
        function.save_for_backward(kept(x, is_needed=needs_weight), kept(weight, is_needed=needs_x))
        return _forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (x, weight), (needs_x, needs_weight, needs_bias) = function.saved_tensors, function.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = mm(grad, weight)
        if needs_weight:
            grad_weight = mm(rows.t(), x.flatten(0, -2))
        if needs_bias:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a b, rounded once."""
    if not widens(a):
        return torch.addmm(total, a, b)
    return _AddMM.apply(total, a, b)  # type: ignore[no-any-return]


class _AddMM(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        function.save_for_backward(a, b)
        return _multiply(a, b, total.clone(), beta=1)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (a, b), (_, needs_a, needs_b) = function.saved_tensors, function.needs_input_grad
        grad_a = grad_b = None
        if needs_a:
            grad_a = mm(grad, b.t())
        if needs_b:
            grad_b = mm(a.t(), grad)
        return grad, grad_a, grad_b


# ---------------------------------------------------------------------------------------------------------------------
# Groups of tokens with a weight each, in one call of the device: n tokens in E groups, one after the other


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the product of each group with its own weight, transposed: [n, in] -> [n, out].

    `ends`: int32 [E], where each group ends; groups may be empty. Rows are multiples of 16 bytes. Nothing waits for the
    device.
    """
    return _GroupedLinear.apply(x, ends, *weights)  # type: ignore[no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        function.weights = weights
        function.save_for_backward(kept(x, is_needed=any(function.needs_input_grad[2:])), ends)
        return F.grouped_mm(x, stacked(weights).transpose(-2, -1), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        x, ends = function.saved_tensors
        needs_x, _, *needs_weights = function.needs_input_grad
        grad, grad_x = grad.contiguous(), None
        if needs_x:
            grad_x = F.grouped_mm(grad, stacked(function.weights), offs=ends)
        of_weights: Sequence[Tensor | None] = [None] * len(needs_weights)
        if x is not None:
            every = F.grouped_mm(grad.t(), x, offs=ends)
            of_weights = [each if needed else None for each, needed in zip(every, needs_weights, strict=True)]
        return grad_x, None, *of_weights


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights as one tensor, [E, out, in]: a view where they lie in one memory at equal distances.

    So they do in the flat weights of DeepSpeed's 16-bit optimizers, which hold them in the order of the model.
    """
    first = weights[0]
    offsets = {after.data_ptr() - before.data_ptr() for before, after in itertools.pairwise(weights)}
    memories = {weight.untyped_storage().data_ptr() for weight in weights}
    is_even = len(offsets) == len(memories) == 1 and min(offsets) > 0
    if not is_even or not all(weight.is_contiguous() for weight in weights):
        return torch.stack([weight.detach() for weight in weights])
    distance = min(offsets) // first.element_size()
    return first.detach().as_strided((len(weights), *first.shape), (distance, *first.stride()))
