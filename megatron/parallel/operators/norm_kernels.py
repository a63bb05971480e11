"""Triton kernels of RMSNorm in fused.py, alone and with the addition before it. Imported on CUDA only.

Shapes: R rows, H channels. Numbers are read once and computed in float32; what is written is rounded once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.parallel.operators.triton_launcher import Launcher

TILE = 2048
"""Numbers of short rows that a program holds at once."""
PROGRAMS = 4
"""Programs of the backward pass for each multiprocessor: each adds up a part of the weight's gradient."""
STAGES = 2
"""Tiles that a program of the backward pass reads ahead, the current one included."""


class _Tile(NamedTuple):
    """Rows that a program holds at once, and the warps that compute them."""

    rows: int
    columns: int
    warps: int


@functools.cache
def _tile(width: int) -> _Tile:
    columns = triton.next_power_of_2(width)
    rows = max(1, TILE // columns)
    # 16 numbers a thread: two of its longest reads of 16 bits
    return _Tile(rows, columns, max(1, min(16, rows * columns // 512)))


@functools.cache
def _num_programs(device: torch.device) -> int:
    """Return the most programs of a backward pass. The weight's gradient is added up in an order that it determines."""
    if device.type != "cuda":
        return PROGRAMS  # Triton's interpreter, in tests
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x,
    branch,
    weight,
    stream,
    normed,
    scales,
    num_rows,
    width,
    epsilon,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    read = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        total = read.to(tl.float32) + tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        # the norm reads what is kept, as where the two are apart
        read = total.to(stream.dtype.element_ty)
        tl.store(stream + at, read, mask=inside)
    exact = read.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / width + epsilon)
    tl.store(scales + row, scale, mask=row < num_rows)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    result = exact * scale[:, None] * factor[None, :]
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


_start_forward = Launcher(_forward_kernel)


def forward(x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + branch (without one x itself), its norm times the weight, and float32 1 / rms of each row, [R].

    x, branch: [..., H] of one dtype, whose rows are R. weight: [H].
    """
    width, given = x.shape[-1], x.contiguous()
    normed, tile, num_rows = torch.empty_like(given), _tile(width), given.numel() // width
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    added, stream = given, x  # a kernel takes pointers for all, and uses those of what it adds
    if branch is not None:
        added, stream = branch.contiguous(), torch.empty_like(given)
    _start_forward(
        (triton.cdiv(num_rows, tile.rows),),
        given,
        added,
        weight,
        stream,
        normed,
        scales,
        num_rows,
        width,
        epsilon,
        ADDS=branch is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return stream, normed, scales


# ---------------------------------------------------------------------------------------------------------------------
# Backward


# Each program takes every so many-th tile, and keeps one sum of the weight's gradient over all of them, so that x and
# the gradient are read once for both results.
@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    grad_normed,
    grad_stream,
    grad_x,
    sums,
    num_rows,
    width,
    ADDS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    in_row = column < width
    factor = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(program * ROWS, num_rows, num_programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & in_row[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        product = d * normed
        if SUMS:
            total += product
        along = tl.sum(product * factor[None, :], 1) / width
        result = ((d * factor[None, :] - normed * along[:, None]) * scale).to(grad_x.dtype.element_ty)
        if ADDS:
            # rounded before the addition too, as where autograd adds: what is recomputed changes no bit
            of_stream = tl.load(grad_stream + at, mask=inside, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) + of_stream).to(grad_x.dtype.element_ty)
        tl.store(grad_x + at, result, mask=inside)
    if SUMS:
        tl.store(sums + program * width + column, tl.sum(total, 0), mask=in_row)


_start_backward = Launcher(_backward_kernel)


def backward(
    grad_normed: Tensor, grad_stream: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor, *, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the norm's input x, to which that of the stream is added, and of the weight if wanted."""
    width, given, grad = x.shape[-1], x.contiguous(), grad_normed.contiguous()
    grad_x, tile, num_rows = torch.empty_like(given), _tile(width), scales.numel()
    added = grad  # as in `forward`
    if grad_stream is not None:
        added = grad_stream.contiguous()
    programs = min(_num_programs(x.device), triton.cdiv(num_rows, tile.rows))
    sums = scales
    if of_weight:
        sums = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    _start_backward(
        (programs,),
        given,
        weight,
        scales,
        grad,
        added,
        grad_x,
        sums,
        num_rows,
        width,
        ADDS=grad_stream is not None,
        SUMS=of_weight,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=STAGES,
        num_warps=tile.warps,
    )
    if not of_weight:
        return grad_x, None
    return grad_x, sums.sum(0).to(weight.dtype)
