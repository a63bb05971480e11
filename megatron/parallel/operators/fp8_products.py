"""Products of matrices in fp8, with scales from the operands themselves, by torch's scaled product or emulated.

Every operand is [rows, k], k the channels or tokens over which a product sums: a product is a b^T. Tensor-wise scales
are one number, row-wise ones [rows, 1] and powers of two, by which no product is rounded.
Source: pytorch/ao, torchao/float8 (recipes tensorwise and rowwise); Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.operators.fp8_weights import MULTIPLE
from megatron.runtime.devices import device_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-60
"""Largest absolute values below it count as it, so that the scale of zeros is finite."""
EXPONENT = -(2**23)
"""The bits of sign and exponent of a float32, as an int32."""


class Operand(NamedTuple):
    """An operand in fp8: values [rows, k], which times `unit`, float32, [] or [rows, 1], are the numbers."""

    values: Tensor
    unit: Tensor


def scale_of(x: Tensor, dtype: torch.dtype, *, by_row: bool, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the factors with which x [rows, k] fills the range of `dtype`, float32, [] or [rows, 1].

    `group`: ranks that hold the other parts of x; collective then. A factor is 0 or NaN where a number
    is not finite, and makes that NaN.
    """
    if by_row:
        largest = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True).float()
    else:
        largest = torch.linalg.vector_norm(x, math.inf).float()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    factors = torch.finfo(dtype).max / largest.clamp_(min=SMALLEST)
    if by_row:
        factors = (factors.view(torch.int32) & EXPONENT).view(torch.float32)
    return factors


# No clamp: no finite number times its factor rounds beyond the largest of fp8, and the others are to stay visible.
def _cast(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * factors).to(dtype, memory_format=torch.contiguous_format)


@functools.cache
def _compiled_cast() -> Any:
    """Return `_cast` compiled to one kernel; `_cast` itself where there is no compiler, as choose_kernels warns."""
    from deepspeed.accelerator import get_accelerator

    from megatron.parallel.operators.fused import missing_compiler

    if missing_compiler(device_of("cuda")):
        return _cast
    return torch.compile(_cast, backend=get_accelerator().get_compile_backend(), dynamic=True)


def quantised(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Operand:
    """Return x [rows, k], or a view of it, times its factors in fp8; the values are contiguous."""
    cast = _cast
    if x.is_cuda:  # in float32 between operators it would take four times the memory
        cast = _compiled_cast()
    return Operand(cast(x, factors, dtype), factors.reciprocal())


def transposed(operand: Operand) -> Operand:
    """Return the transpose of an operand with one scale, contiguous."""
    return Operand(operand.values.t().clone(memory_format=torch.contiguous_format), operand.unit)


def padded(operand: Operand) -> Operand:
    """Return the operand with zeros up to a multiple of 16 in k, which no sum notices."""
    missing = -operand.values.shape[1] % MULTIPLE
    if not missing:
        return operand
    bits = F.pad(operand.values.view(torch.uint8), (0, missing))
    return Operand(bits.view(operand.values.dtype), operand.unit)


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
    if scales_after:  # powers of two: nothing is rounded a second time
        result.mul_(a.unit).mul_(b.unit.t())
    return result
