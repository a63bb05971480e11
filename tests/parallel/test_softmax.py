"""The softmax in place, by torch and by the Triton kernel, against float64. Triton's interpreter runs without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
import torch

from megatron.parallel.operators import softmax
from megatron.parallel.operators.softmax import RowSums

SHAPES = [(3, 1), (5, 37), (2, 9000)]


def bounds(exact: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the relative errors of a row's sum [C] and of its softmax [C, V] that follow from float32.

    A logit's distance to the largest is rounded once, which changes its exponential by that part; exp and each product
    add a few units of 2^-24. The roundings of a sum are random: 5 times the root of the terms that each lane of a
    vector adds (Higham and Mary 2019, theorem 3.1: exceeded once in 10^5), and no processor has fewer than 4 lanes.
    """
    unit, distance = 2**-24, exact.amax(-1, keepdim=True) - exact
    of_terms = (exact.softmax(-1) * distance).sum(-1)
    of_sum = unit * (of_terms + 4 + 5 * (exact.shape[-1] / 4) ** 0.5)
    # Triton's interpreter truncates to bfloat16, where a GPU rounds
    of_result = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-11}[dtype]
    return of_sum, unit * (distance + 8) + of_sum.unsqueeze(-1) + of_result


def check(result: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """`bound`: relative; below its smallest normal number a dtype has an absolute one."""
    smallest = torch.finfo(result.dtype).tiny * torch.finfo(result.dtype).eps
    excess = (result.double() - expected).abs() - bound * expected.abs() - smallest
    assert excess.max() <= 0, f"{excess.max():.3g} above the bound"


def compare(dtype: torch.dtype) -> None:
    """Raise AssertionError if a sum or a softmax is not that of float64."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        logits = (torch.randn(shape, generator=generator) * 5).to(dtype)
        exact = logits.double()
        peak = exact.amax(-1)
        total = (exact - peak.unsqueeze(-1)).exp().sum(-1)
        of_sum, of_result = bounds(exact, dtype)

        for function, changes in ((softmax.row_sums, False), (softmax.softmax_, True)):
            given = logits.clone()
            sums = function(given)
            assert torch.equal(sums.peak.double(), peak)
            check(sums.total, total, of_sum)
            if changes:
                check(given, exact.softmax(-1), of_result)
            else:
                assert torch.equal(given, logits)

        # a row three times as long, whose largest logit is elsewhere
        longer = RowSums(peak.float() + 1, 3 * total.float())
        softmax.normalise_(given := logits.clone(), longer)
        expected = (exact - longer.peak.unsqueeze(-1)).exp() / longer.total.unsqueeze(-1)
        check(given, expected, of_result)


@pytest.mark.parametrize("block", [softmax.BLOCK_LOGITS, 80], ids=["one_block", "blocks_of_two_rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_equals_float64(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "BLOCK_LOGITS", block)
    compare(dtype)


def triton_fault() -> str:
    """Return why Triton's interpreter cannot run here; '' if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # before 3.7 it calls int() on an array of one number, which NumPy refuses since 2.4; on a GPU it does not
    version, numpy = metadata.version("triton"), np.__version__
    old = [int(n) for n in version.split(".")[:2]] < [3, 7] and [int(n) for n in numpy.split(".")[:2]] >= [2, 4]
    return f"the interpreter of Triton {version} does not run with NumPy {numpy}" if old else ""


@pytest.mark.skipif(triton_fault() != "", reason=triton_fault())
def test_triton_equals_float64() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    subprocess.run([sys.executable, "-m", "tests.parallel.test_softmax"], env=environment, check=True)


if __name__ == "__main__":
    from megatron.parallel.operators import triton_kernels

    softmax._run = lambda logits, given, *, write: RowSums(*triton_kernels.softmax(logits, given, write=write))
    for one in (torch.float32, torch.bfloat16, torch.float16):
        compare(one)
