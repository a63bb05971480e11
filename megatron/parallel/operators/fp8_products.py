"""Products of matrices in fp8, with scales from the operands themselves, by torch's scaled product or emulated.

Every operand is [rows, k], k the channels or tokens over which a product sums: a product is a b^T. Tensor-wise scales
are one number, row-wise ones [rows, 1] and powers of two, by which no product is rounded. On CUDA operands are computed
by the kernels of fp8_kernels.py; what stands here for other devices is their definition.
Source: pytorch/ao, torchao/float8 (recipes tensorwise and rowwise); Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.operators.fp8_weights import EXPONENT, SMALLEST, padded_size
from megatron.runtime.devices import device_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Operand(NamedTuple):
    """An operand in fp8: values [rows, k], contiguous, that times `unit`, float32, [] or [rows, 1], are the numbers."""

    values: Tensor
    unit: Tensor


@functools.cache
def compiled_kernels() -> ModuleType | None:
    """Return fp8_kernels.py; None where Triton cannot compile it: torch's operators compute the same there."""
    from megatron.parallel.operators.fused import missing_compiler

    cuda = device_of("cuda")
    # for a GPU without fp8, on which it may be emulated, Triton has no such types
    if missing_compiler(cuda) or cuda.missing_fp8():
        return None
    from megatron.parallel.operators import fp8_kernels

    return fp8_kernels


def _kernels_for(x: Tensor) -> ModuleType | None:
    return compiled_kernels() if x.is_cuda else None


# ---------------------------------------------------------------------------------------------------------------------
# Operands of x [rows, k], or of its transpose, whose terms are padded with zeros, which no sum notices


def largest_of(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the largest absolute values of parts of x, float32, of any shape; the largest of them scales x.

    `group`: ranks that hold the other parts of x; collective then. NaN is above all numbers.
    """
    if kernels := _kernels_for(x):
        largest: Tensor = kernels.largest(x)
    else:
        largest = torch.linalg.vector_norm(x, math.inf).float().abs_()
    if group is not None:
        # of all parts: a host without a compiler has one part. The order of bits is that of the numbers, and keeps NaN
        largest_of_all = largest.max()
        dist.all_reduce(largest_of_all.view(torch.int32), dist.ReduceOp.MAX, group=group)
        largest = largest_of_all.expand_as(largest).contiguous()
    return largest


def by_tensor(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Operand:
    """Return x with one scale, with which its largest value fills the range of `dtype`."""
    if kernels := _kernels_for(x):
        values, _, unit = kernels.by_tensor(x, largest, dtype, is_direct=True, is_transposed=False)
        return Operand(values, unit)
    return _rounded(x, _factors(largest.max(), dtype), dtype)


def transposed_by_tensor(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Operand:
    """Return the transpose of x with one scale."""
    if kernels := _kernels_for(x):
        _, values, unit = kernels.by_tensor(x, largest, dtype, is_direct=False, is_transposed=True)
        return Operand(values, unit)
    return _padded(_rounded(x.t(), _factors(largest.max(), dtype), dtype))


def both_by_tensor(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Operand, Operand]:
    """Return x and its transpose with one scale."""
    if kernels := _kernels_for(x):
        values, turned, unit = kernels.by_tensor(x, largest, dtype, is_direct=True, is_transposed=True)
        return Operand(values, unit), Operand(turned, unit)
    operand = by_tensor(x, largest, dtype)
    return operand, transposed(operand)


def transposed(operand: Operand) -> Operand:
    """Return the transpose of an operand with one scale."""
    values, unit = operand
    if kernels := _kernels_for(values):
        return Operand(kernels.transposed(values), unit)
    return _padded(Operand(values.t().clone(memory_format=torch.contiguous_format), unit))


def by_row(x: Tensor, dtype: torch.dtype) -> Operand:
    """Return x with a scale for each row."""
    if kernels := _kernels_for(x):
        return Operand(*kernels.by_row(x, dtype))
    largest = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True).float()
    factors = _factors(largest, dtype)
    powers = (factors.view(torch.int32) & EXPONENT).view(torch.float32)
    # without its other bits NaN would be infinity
    return _rounded(x, torch.where(factors.isnan(), factors, powers), dtype)


def by_column(x: Tensor, dtype: torch.dtype) -> Operand:
    """Return the transpose of x with a scale for each of its rows, a column of x."""
    if kernels := _kernels_for(x):
        return Operand(*kernels.by_column(x, dtype))
    return _padded(by_row(x.t(), dtype))


def _factors(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors with which these values fill the range of `dtype`.

    They are 0 or NaN where a number is not finite, and make that NaN.
    """
    return torch.full_like(largest, torch.finfo(dtype).max).div_(largest.clamp(min=SMALLEST))


# No clamp: no finite number times its factor rounds beyond the largest of fp8, and the others are to stay visible.
def _rounded(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Operand:
    values = (x.float() * factors).to(dtype, memory_format=torch.contiguous_format)
    return Operand(values, factors.reciprocal())


def _padded(operand: Operand) -> Operand:
    terms = operand.values.shape[1]
    if terms == padded_size(terms):
        return operand
    bits = F.pad(operand.values.view(torch.uint8), (0, padded_size(terms) - terms))
    return Operand(bits.view(operand.values.dtype), operand.unit)


# ---------------------------------------------------------------------------------------------------------------------


def product(a: Operand, b: Operand, dtype: torch.dtype, *, is_fast: bool, emulates: bool) -> Tensor:
    """Return a b^T, [rows of a, rows of b] in `dtype`. `is_fast`: sums may be kept in fewer bits, on Hopper.

    `emulates`: multiply in float32, which is exact but for the order of the sums.
    """
    if emulates:
        exact = a.values.float() @ b.values.float().t()
        return exact.mul_(a.unit).mul_(b.unit.t()).to(dtype)
    unit_a, unit_b = a.unit, b.unit.t()
    # the row-wise kernel is slow with exact sums (torchao's float8_ops.py has the same way around)
    scales_after = a.unit.dim() == 2 and not is_fast
    if scales_after:
        unit_a = unit_b = a.unit.new_ones(())
    result = torch._scaled_mm(
        a.values, b.values.t(), scale_a=unit_a, scale_b=unit_b, out_dtype=dtype, use_fast_accum=is_fast
    )
    if not scales_after:
        return result
    # powers of two: nothing is rounded a second time
    if kernels := _kernels_for(result):
        return kernels.multiply_(result, a.unit, b.unit)  # type: ignore[no-any-return]
    return result.mul_(a.unit).mul_(b.unit.t())
