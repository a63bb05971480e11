"""Triton kernels of fp8_products.py: operands in fp8 in few passes over memory. Imported on CUDA only.

Shapes: x [rows, k] of 16 or 32 bits, contiguous. Results are those of fp8_products.py, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.parallel.operators import fp8_weights
from megatron.parallel.operators.triton_launcher import Launcher

PARTS = 512
"""Parts of a tensor, each with a largest value: the programs that a large device runs at once."""
COLUMN_PARTS = 16
"""Parts of a column likewise, of which there are many."""
BLOCK = 8192
"""Numbers that a program reads at once for their largest, or fewest that it casts as whole rows."""
MAX_ROW = 16384
"""Most numbers of a row that a program holds at once; of a longer one it reads the cached rest again."""
TILE = 128
"""Rows and columns that a program casts: as many bytes of fp8 are a line of the cache, also in the transpose."""
WARPS = 8
SMALLEST = tl.constexpr(fp8_weights.SMALLEST)
EXPONENT = tl.constexpr(fp8_weights.EXPONENT)


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of |x|, whose order as integers is that of the numbers, with NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _factor(bits, limit, POWER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return limit / the largest value, whose bits are given; with `POWER` the power of two below."""
    largest = tl.maximum(bits.to(tl.float32, bitcast=True), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.div_rn(limit, largest)
    if POWER:
        power = (factor.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        factor = tl.where(factor == factor, power, factor)
    return factor


# ---------------------------------------------------------------------------------------------------------------------
# One scale for a tensor, or one for each of its columns


@triton.jit
def _largest_kernel(  # type: ignore[no-untyped-def]
    x, numbers, blocks, largest, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    part = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    seen = tl.zeros((BLOCK,), tl.int32)
    for index in range(part, blocks, PARTS):
        # from the end, which the operator before left in the cache; the cast goes from the beginning, likewise
        begin = (blocks - 1 - index).to(tl.int64) * BLOCK
        seen = tl.maximum(seen, _bits(tl.load(x + begin + lanes, mask=begin + lanes < numbers, other=0.0)))
    tl.store(largest + part, tl.max(seen, 0).to(tl.float32, bitcast=True))


_start_largest = Launcher(_largest_kernel)


@triton.jit
def _column_kernel(  # type: ignore[no-untyped-def]
    x, rows, k, largest, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    seen = tl.zeros((ROWS, COLUMNS), tl.int32)
    for begin in range(part * ROWS, rows, PARTS * ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column[None, :] < k)
        seen = tl.maximum(seen, _bits(tl.load(x + row.to(tl.int64) * k + column[None, :], mask=inside, other=0.0)))
    tl.store(largest + part * k + column, tl.max(seen, 0).to(tl.float32, bitcast=True), mask=column < k)


_start_column = Launcher(_column_kernel)


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    k,
    largest,
    limit,
    unit,
    values,
    transposed,
    transposed_rows,
    BY_COLUMN: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    program, across = tl.program_id(0), tl.cdiv(k, TILE)
    down = program // across
    row = (down * TILE + tl.arange(0, TILE))[:, None]
    column = program % across * TILE + tl.arange(0, TILE)
    inside = (row < rows) & (column[None, :] < k)
    tile = tl.load(x + row.to(tl.int64) * k + column[None, :], mask=inside, other=0.0)

    if BY_COLUMN:
        parts = largest + tl.arange(0, PARTS)[:, None] * k + column[None, :]
        bits = tl.max(_bits(tl.load(parts, mask=column[None, :] < k, other=0.0)), 0)
        factor = _factor(bits, limit, POWER=True)
        if down == 0:
            tl.store(unit + column, tl.div_rn(1.0, factor), mask=column < k)
        scaled = tile.to(tl.float32) * factor[None, :]
    else:
        bits = tl.max(_bits(tl.load(largest + tl.arange(0, PARTS))), 0)
        factor = _factor(bits, limit, POWER=False)
        if program == 0:
            tl.store(unit, tl.div_rn(1.0, factor))
        scaled = tile.to(tl.float32) * factor

    if values is not None:
        cast = scaled.to(values.dtype.element_ty)
        tl.store(values + row.to(tl.int64) * k + column[None, :], cast, mask=inside)
    if transposed is not None:
        # beyond the rows of x are zeros, also where the factor is NaN
        cast = tl.where(row < rows, scaled, 0.0).to(transposed.dtype.element_ty)
        inside = (row < transposed_rows) & (column[None, :] < k)
        tl.store(transposed + column[None, :].to(tl.int64) * transposed_rows + row, cast, mask=inside)


_start_cast = Launcher(_cast_kernel)


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute values of parts of x, float32 [PARTS]; NaN where a part has one."""
    result = torch.empty(PARTS, dtype=torch.float32, device=x.device)
    x = x.contiguous()
    blocks = triton.cdiv(x.numel(), BLOCK)
    _start_largest((PARTS,), x, x.numel(), blocks, result, PARTS=PARTS, BLOCK=BLOCK, num_warps=WARPS)
    return result


def by_tensor(
    x: Tensor, largest: Tensor, dtype: torch.dtype, *, is_direct: bool, is_transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return x times its factor in fp8, its transpose [k, padded rows], and their unit, float32 []."""
    unit = torch.empty((), dtype=torch.float32, device=x.device)
    values = torch.empty(x.shape, dtype=dtype, device=x.device) if is_direct else None
    transposed = _empty_transpose(x, dtype) if is_transposed else None
    _cast(x, largest, dtype, unit, values, transposed, by_column=False)
    return values, transposed, unit


def by_column(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the transpose of x in fp8, [k, padded rows], and its unit, float32 [k, 1]."""
    x, k = x.contiguous(), x.shape[1]
    largest = torch.empty(COLUMN_PARTS, k, dtype=torch.float32, device=x.device)
    unit = torch.empty(k, 1, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(k, 64), COLUMN_PARTS)
    _start_column(grid, x, x.shape[0], k, largest, PARTS=COLUMN_PARTS, ROWS=64, COLUMNS=64)
    transposed = _empty_transpose(x, dtype)
    _cast(x, largest, dtype, unit, None, transposed, by_column=True)
    return transposed, unit


def _empty_transpose(x: Tensor, dtype: torch.dtype) -> Tensor:
    rows, k = x.shape
    return torch.empty(k, fp8_weights.padded_size(rows), dtype=dtype, device=x.device)


def _cast(
    x: Tensor,
    largest: Tensor,
    dtype: torch.dtype,
    unit: Tensor,
    values: Tensor | None,
    transposed: Tensor | None,
    *,
    by_column: bool,
) -> None:
    (rows, k), limit = x.shape, torch.finfo(dtype).max
    transposed_rows = fp8_weights.padded_size(rows)
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(k, TILE),)
    _start_cast(
        grid,
        x.contiguous(),
        rows,
        k,
        largest,
        limit,
        unit,
        values,
        transposed,
        transposed_rows,
        BY_COLUMN=by_column,
        PARTS=COLUMN_PARTS if by_column else PARTS,
        TILE=TILE,
        num_warps=WARPS,
    )


@triton.jit
def _transpose_kernel(x, rows, k, result, result_rows, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    program, across = tl.program_id(0), tl.cdiv(k, TILE)
    row = (program // across * TILE + tl.arange(0, TILE))[:, None]
    column = (program % across * TILE + tl.arange(0, TILE))[None, :]
    tile = tl.load(x + row.to(tl.int64) * k + column, mask=(row < rows) & (column < k), other=0)
    place = result + column.to(tl.int64) * result_rows + row
    tl.store(place, tile, mask=(row < result_rows) & (column < k))


_start_transpose = Launcher(_transpose_kernel)


def transposed(values: Tensor) -> Tensor:
    """Return the transpose of values of fp8 [rows, k], [k, padded rows]."""
    (rows, k), result = values.shape, _empty_transpose(values, values.dtype)
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(k, TILE),)
    bits, target = values.view(torch.uint8), result.view(torch.uint8)
    _start_transpose(grid, bits, rows, k, target, result.shape[1], TILE=TILE, num_warps=WARPS)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# A scale for each row


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    x, rows, k, limit, values, unit, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = row.to(tl.int64)[:, None] * k
    column = tl.arange(0, COLUMNS)[None, :]
    within = row[:, None] < rows
    if IS_WHOLE:
        held = tl.load(x + begin + column, mask=within & (column < k), other=0.0)
        bits = tl.max(_bits(held), 1)
    else:
        seen = tl.zeros((ROWS, COLUMNS), tl.int32)
        for first in range(0, k, COLUMNS):
            part = tl.load(x + begin + first + column, mask=within & (first + column < k), other=0.0)
            seen = tl.maximum(seen, _bits(part))
        bits = tl.max(seen, 1)
    factor = _factor(bits, limit, POWER=True)
    tl.store(unit + row, tl.div_rn(1.0, factor), mask=row < rows)
    factor = factor[:, None]
    if IS_WHOLE:
        cast = (held.to(tl.float32) * factor).to(values.dtype.element_ty)
        tl.store(values + begin + column, cast, mask=within & (column < k))
    else:
        for first in range(0, k, COLUMNS):
            inside = within & (first + column < k)
            part = tl.load(x + begin + first + column, mask=inside, other=0.0)
            cast = (part.to(tl.float32) * factor).to(values.dtype.element_ty)
            tl.store(values + begin + first + column, cast, mask=inside)


_start_row = Launcher(_row_kernel)


def by_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in fp8 and its unit, float32 [rows, 1]."""
    rows, k = x.shape
    values = torch.empty(rows, k, dtype=dtype, device=x.device)
    unit = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    columns = min(MAX_ROW, triton.next_power_of_2(k))
    at_once = max(1, BLOCK // columns)
    _start_row(
        (triton.cdiv(rows, at_once),),
        x.contiguous(),
        rows,
        k,
        torch.finfo(dtype).max,
        values,
        unit,
        IS_WHOLE=k <= columns,
        ROWS=at_once,
        COLUMNS=columns,
        num_warps=at_once * columns // 1024,
    )
    return values, unit


@triton.jit
def _multiply_kernel(  # type: ignore[no-untyped-def]
    result, row_unit, column_unit, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    by_row = tl.load(row_unit + row, mask=row < rows)[:, None]
    by_column = tl.load(column_unit + column, mask=column < columns)[None, :]
    place = result + row.to(tl.int64)[:, None] * columns + column[None, :]
    scaled = tl.load(place, mask=inside).to(tl.float32) * by_row * by_column
    tl.store(place, scaled.to(result.dtype.element_ty), mask=inside)


_start_multiply = Launcher(_multiply_kernel)


def multiply_(result: Tensor, row_unit: Tensor, column_unit: Tensor) -> Tensor:
    """Multiply result [rows, columns], contiguous, by units [rows, 1] and [columns, 1], in place."""
    rows, columns = result.shape
    grid = (triton.cdiv(rows, 32) * triton.cdiv(columns, 256),)
    _start_multiply(grid, result, row_unit, column_unit, rows, columns, ROWS=32, COLUMNS=256, num_warps=WARPS)
    return result
