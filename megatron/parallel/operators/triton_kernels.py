"""Triton kernels of softmax.py, and of SwiGLU's backward pass in fused.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192
"""Most logits of a row that a program of the softmax holds at once."""
BLOCK = 2048
"""Channels of a row of which a program of SwiGLU's backward pass computes the gradient."""


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


def softmax(logits: Tensor, given: tuple[Tensor, Tensor] | None, *, write: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows of logits [C, V]; with `write`, replace the rows by their softmax.

    With sums `given`, those are used and returned.
    """
    tokens, columns = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the columns of a row of logits must lie side by side")
    sums = given
    if sums is None:
        sums = logits.new_empty(tokens, dtype=torch.float32), logits.new_empty(tokens, dtype=torch.float32)
    if given is None or write:
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        _softmax_kernel[(tokens,)](
            logits,
            logits.stride(0),
            columns,
            *sums,  # a kernel takes pointers for both, and uses one pair
            *sums,
            GIVEN=given is not None,
            WRITE=write,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )
    return sums[0], sums[1]


# The compiler writes the gradient of [gate; up] as one tensor, and reads the output's gradient and the gate once for
# each half of it. Here both halves come from one reading of each.
@triton.jit
def _swiglu_backward_kernel(grad, gate_up, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    left = row * 2 * width + column
    d = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_up + left, mask=inside).to(tl.float32)
    up = tl.load(gate_up + left + width, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(result + left, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + left + width, (d * gate * sigmoid).to(result.dtype.element_ty), mask=inside)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up [..., 2 F] from that of silu(gate) * up, [..., F]; computed in float32."""
    grad, gate_up, width = grad.contiguous(), gate_up.contiguous(), grad.shape[-1]
    result = torch.empty_like(gate_up)
    grid = (grad.numel() // width, triton.cdiv(width, BLOCK))
    _swiglu_backward_kernel[grid](grad, gate_up, result, width, BLOCK=BLOCK, num_warps=8)
    return result
