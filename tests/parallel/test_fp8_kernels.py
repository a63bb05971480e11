"""The Triton kernels of products in fp8 against their definition in torch on a CPU, bit for bit.

Triton's interpreter runs without a GPU, but converts numbers otherwise; there torch's conversions stand in for its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.parallel.operators import fp8_products
from megatron.parallel.operators.fp8_products import E4M3, E5M2, Operand
from tests.parallel.test_softmax import triton_fault

SMALL = [(21, 64), (144, 272), (3, 16)]
LARGE = [(8192, 2048), (21, 8192), (3, 16400), (1000, 16400), (8191, 3072)]
"""With rows that are no multiple of 16, and fewer and more columns than a program holds."""
FEW = {"PARTS": 4, "COLUMN_PARTS": 2, "BLOCK": 1024, "MAX_ROW": 128}
"""Sizes with which small operands need several programs, each of several blocks; a program is slow to interpret."""


def wide_numbers(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return numbers of very different sizes in rows and columns; some rows and columns are zeros or subnormal."""
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-3, 3, (1, shape[1]), generator=generator).float())
    x[0], x[:, 0], x[0, 1] = 0, 0, -0.0
    x[1] *= torch.finfo(dtype).smallest_normal / 2 / x[1].abs().max()
    x[2] = 1.75 * 2.0**-3  # of which 448 is a power of two
    return x.to(dtype)


def cases() -> Iterator[Tensor]:
    for shape, dtype in itertools.product(SMALL, (torch.bfloat16, torch.float16, torch.float32)):
        yield wide_numbers(shape, dtype)
    for wrong in (float("inf"), -float("inf"), float("nan"), -float("nan")):
        x = wide_numbers((40, 64), torch.bfloat16)
        x[5, 7] = wrong
        yield x
    yield torch.zeros(16, 32, dtype=torch.bfloat16)
    yield wide_numbers((64, 48), torch.bfloat16).t()
    yield wide_numbers((32, 96), torch.bfloat16)[:, 16:80]


def same(kernel: Any, definition: Operand) -> None:
    """Raise AssertionError unless all bits are equal, but for those of NaN, of which there are several."""
    values, unit = kernel
    assert values.is_contiguous()
    assert (values.shape, values.dtype) == (definition.values.shape, definition.values.dtype)
    assert unit.shape == definition.unit.shape
    torch.testing.assert_close(unit, definition.unit.to(unit.device), rtol=0, atol=0, equal_nan=True)
    found, wanted = values, definition.values.to(values.device)
    differs = found.view(torch.uint8) != wanted.view(torch.uint8)
    differs &= ~(found.float().isnan() & wanted.float().isnan())
    assert not differs.any(), f"{int(differs.sum())} of {differs.numel()} differ"


def compare(kernels: ModuleType, given: Tensor, x: Tensor) -> None:
    """Raise AssertionError if an operand of x is not what the definition makes of the same numbers."""
    compare_by_tensor(kernels, given, x)
    same(kernels.by_row(x, E4M3), fp8_products.by_row(given, E4M3))
    same(kernels.by_column(x, E4M3), fp8_products.by_column(given, E4M3))


def on_cuda(x: Tensor) -> Tensor:
    """Return x there, with its strides."""
    if x.is_contiguous():
        return x.cuda()
    return (
        torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="cuda")
        .as_strided(x.shape, x.stride(), x.storage_offset())
        .copy_(x)
    )


def compare_by_tensor(kernels: ModuleType, given: Tensor, x: Tensor) -> None:
    largest = fp8_products.largest_of(given)
    parts = kernels.largest(x)
    torch.testing.assert_close(parts.view(torch.int32).max().view(torch.float32), largest.to(x.device), equal_nan=True)
    for dtype in (E4M3, E5M2):
        direct, turned = fp8_products.both_by_tensor(given, largest, dtype)
        for is_direct, is_transposed in ((True, False), (False, True), (True, True)):
            values, transposed, unit = kernels.by_tensor(
                x, parts, dtype, is_direct=is_direct, is_transposed=is_transposed
            )
            assert [values is not None, transposed is not None] == [is_direct, is_transposed]
            if is_direct:
                same((values, unit), direct)
            if is_transposed:
                same((transposed, unit), turned)
        same((kernels.transposed(direct.values.to(x.device)), unit), turned)


def compare_units(kernels: ModuleType, device: str) -> None:
    """Raise AssertionError if a product's units are not multiplied."""
    for rows, columns in ((16, 32), (70, 272)):
        generator = torch.Generator().manual_seed(0)
        result = torch.randn(rows, columns, generator=generator).bfloat16()
        units = [torch.exp2(torch.randint(-9, 9, (n, 1), generator=generator).float()) for n in (rows, columns)]
        exact = result.double() * units[0].double() * units[1].t().double()
        found = result.to(device)
        kernels.multiply_(found, *(each.to(device) for each in units))
        assert torch.equal(found.cpu().double(), exact)


@pytest.mark.skipif(triton_fault() != "", reason=triton_fault())
def test_the_interpreted_kernels_are_their_definition() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    subprocess.run([sys.executable, "-m", "tests.parallel.test_fp8_kernels"], env=environment, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernels_are_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.parallel.operators import fp8_kernels

    for x in cases():
        compare(fp8_kernels, x, on_cuda(x))
    monkeypatch.setattr(fp8_products, "compiled_kernels", lambda: None)
    for shape in LARGE:
        x = wide_numbers(shape, torch.bfloat16).cuda()
        compare(fp8_kernels, x, x)
    compare_units(fp8_kernels, "cuda")


def convert_by_torch(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Return the bits of converted numbers; Triton's interpreter rounds halves up, and truncates to bfloat16."""
    names = {"fp8e4nv": E4M3, "fp8e5": E5M2, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    bits = [getattr(torch, f"uint{each.primitive_bitwidth}") for each in (source, target)]
    given = torch.from_numpy(np.ascontiguousarray(data)).view(bits[0]).view(names[source.name])
    return given.to(names[target.name]).view(bits[1]).numpy().reshape(data.shape)


if __name__ == "__main__":
    import triton.runtime.interpreter

    from megatron.parallel.operators import fp8_kernels

    for size, few in FEW.items():
        setattr(fp8_kernels, size, few)
    np.seterr(divide="ignore", invalid="ignore")
    triton.runtime.interpreter._convert_float = convert_by_torch
    for one in cases():
        compare(fp8_kernels, one, one)
    compare_units(fp8_kernels, "cpu")
