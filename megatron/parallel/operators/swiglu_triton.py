"""Triton kernel of SwiGLU's backward pass. Imported on CUDA only.

The compiler writes the gradient of [gate; up] as one tensor, and reads the output's gradient and the gate once for each
half of it. Here both halves come from one reading of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _backward_kernel(grad, gate_up, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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


def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up [..., 2 F] from that of silu(gate) * up, [..., F]; computed in float32."""
    grad, gate_up, width = grad.contiguous(), gate_up.contiguous(), grad.shape[-1]
    result = torch.empty_like(gate_up)
    grid = (grad.numel() // width, triton.cdiv(width, BLOCK))
    _backward_kernel[grid](grad, gate_up, result, width, BLOCK=BLOCK, num_warps=8)
    return result
