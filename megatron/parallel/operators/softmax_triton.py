"""Triton kernel of megatron/parallel/operators/softmax.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192


@triton.jit
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    columns,
    own_peak,
    own_total,
    given_peak,
    given_total,
    GIVEN: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    offsets = tl.arange(0, BLOCK)
    if GIVEN:
        peak = tl.load(given_peak + row)
        total = tl.load(given_total + row)
    else:
        # one running largest logit and sum for each lane, joined after the loop
        peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, columns, BLOCK):
            x = tl.load(base + begin + offsets, mask=begin + offsets < columns, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(peaks, x)
            # a lane beyond the last column has seen nothing but -inf, and -inf - -inf is NaN
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            totals = totals * tl.exp(peaks - shift) + tl.exp(x - shift)
            peaks = larger
        peak = tl.max(peaks, 0)
        total = tl.sum(totals * tl.exp(peaks - peak), 0)
        tl.store(own_peak + row, peak)
        tl.store(own_total + row, total)
    if WRITE:
        scale = 1.0 / total
        for begin in range(0, columns, BLOCK):
            inside = begin + offsets < columns
            x = tl.load(base + begin + offsets, mask=inside, other=float("-inf")).to(tl.float32)
            tl.store(base + begin + offsets, (tl.exp(x - peak) * scale).to(logits.dtype.element_ty), mask=inside)


def run(logits: Tensor, sums: tuple[Tensor, Tensor] | None, *, write: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows of logits [C, V]; with `write`, replace the rows by their softmax.

    With `sums` given, those are used and returned.
    """
    tokens, columns = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the columns of a row of logits must lie side by side")
    own = sums if sums is not None else tuple(logits.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    if sums is None or write:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        _softmax_kernel[(tokens,)](
            logits,
            logits.stride(0),
            columns,
            *own,
            *own,
            GIVEN=sums is not None,
            WRITE=write,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )
    return own[0], own[1]
