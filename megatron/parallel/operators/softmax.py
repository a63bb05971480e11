"""Softmax in place over rows of 16-bit logits, computed in float32, and its row sums.

C tokens of a chunk, V vocabulary rows of this rank.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.operators.block_sizes import BLOCK_LOGITS, BLOCK_LOGITS_OF_A_DEVICE


class RowSums(NamedTuple):
    """Largest logit of each row [C], and the sum of exp(logit - largest) [C]; float32, or float64 of float64 logits."""

    peak: Tensor
    total: Tensor

    def log_probs(self, logits_CK: Tensor) -> Tensor:
        """Return the logarithm of the probability of some logits of each row, [C, K]."""
        return (logits_CK - self.peak.unsqueeze(-1)) - self.total.log().unsqueeze(-1)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of such numbers are computed: float32, or float64 of float64."""
    return torch.promote_types(dtype, torch.float32)


def row_sums(logits_CV: Tensor) -> RowSums:
    """Return the sums of each row; without columns, the largest logit is -inf and the sum 0."""
    return _run(logits_CV, None, write=False)


def softmax_(logits_CV: Tensor) -> RowSums:
    """Replace each row by its softmax, in place, and return the sums that it had."""
    return _run(logits_CV, None, write=True)


def normalise_(logits_CV: Tensor, sums: RowSums) -> None:
    """Replace each row by its part of the softmax of a longer row, whose sums are given, in place."""
    _run(logits_CV, sums, write=True)


def _run(logits: Tensor, given: RowSums | None, *, write: bool) -> RowSums:
    """Return the rows' own sums, or those given."""
    if not logits.shape[1]:
        nothing = logits.new_zeros(logits.shape[0], dtype=sum_dtype(logits.dtype))
        return given or RowSums(nothing - torch.inf, nothing)
    # On CUDA a Triton kernel reads each row once from memory and writes it once; elsewhere torch's softmax runs over
    # blocks that stay in the cache. The kernel's sums are float32.
    if logits.is_cuda and has_triton() and logits.dtype != torch.float64:
        from megatron.parallel.operators import triton_kernels

        return RowSums(*triton_kernels.softmax(logits, given, write=write))
    return _run_blocks(logits, given, write=write)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; torch's CUDA builds for Linux come with it."""
    return importlib.util.find_spec("triton") is not None


def _run_blocks(logits: Tensor, given: RowSums | None, *, write: bool) -> RowSums:
    tokens, columns = logits.shape
    dtype = sum_dtype(logits.dtype)
    sums = given or RowSums(*(torch.empty(tokens, dtype=dtype, device=logits.device) for _ in range(2)))
    size = BLOCK_LOGITS
    if not logits.is_cpu:
        size = BLOCK_LOGITS_OF_A_DEVICE
    rows = max(1, min(tokens, size // columns))
    # allocated once: memory that is new to the process costs more than the arithmetic
    wide = None
    if logits.dtype != dtype:
        wide = torch.empty((rows, columns), dtype=dtype, device=logits.device)
    softmax = torch.empty((rows, columns), dtype=dtype, device=logits.device)
    for begin in range(0, tokens, rows):
        part = slice(begin, min(begin + rows, tokens))
        x = block = logits[part]
        if wide is not None:
            x = wide[: block.shape[0]].copy_(block)
        y = torch.softmax(x, -1, out=softmax[: block.shape[0]])
        peak, total = x.amax(-1), y.amax(-1).reciprocal_()  # the softmax of the largest logit is 1 / sum
        if given is None:
            sums.peak[part], sums.total[part] = peak, total
        else:
            y *= ((peak - given.peak[part]).exp_() * total / given.total[part]).unsqueeze(-1)
        if write:
            block.copy_(y)
    return sums
