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

from megatron.parallel import softmax
from megatron.parallel.softmax import RowSums

SHAPES = [(3, 1), (5, 37), (2, 9000)]


def compare(dtype: torch.dtype) -> None:
    """Raise AssertionError if a sum or a softmax is not that of float64."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        logits = (torch.randn(shape, generator=generator) * 5).to(dtype)
        exact = logits.double()
        peak = exact.amax(-1)
        total = (exact - peak.unsqueeze(-1)).exp().sum(-1)
        # Triton's interpreter truncates to bfloat16, where a GPU rounds
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}[dtype]

        for function, changes in ((softmax.row_sums, False), (softmax.softmax_, True)):
            given = logits.clone()
            sums = function(given)
            torch.testing.assert_close(sums.peak.double(), peak)
            torch.testing.assert_close(sums.total.double(), total, rtol=5e-6, atol=0)
            expected = exact.softmax(-1) if changes else exact
            torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=1e-7)

        # a row three times as long, whose largest logit is elsewhere
        softmax.normalise_(given := logits.clone(), RowSums(peak.float() + 1, 3 * total.float()))
        expected = (exact - peak.unsqueeze(-1) - 1).exp() / (3 * total.unsqueeze(-1))
        torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=1e-7)


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
    from megatron.parallel.softmax_triton import run

    softmax._run = lambda logits, given, *, write: RowSums(*run(logits, given, write=write))
    for one in (torch.float32, torch.bfloat16, torch.float16):
        compare(one)
