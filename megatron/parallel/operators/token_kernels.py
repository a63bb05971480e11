"""The operators of kernels.py for passes over single tokens on a CPU, each one call of a C++ function.

The functions here take float32 and bfloat16, compute in float32, run on one thread and have no gradients; for anything
else they return None, and the caller takes torch's operators.

Shapes: B rows, n query heads and k key/value heads of this rank, d head size, T places of a row in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# A token's pass is hundreds of operators on a few hundred numbers, and their dispatch takes longer than their work: 4
# of 9 ms of a Llama of 34 million parameters in bfloat16 on one thread.
DTYPES = (torch.bfloat16, torch.float32)
FEW_NUMBERS = 2**15
"""Size of an input up to which the calls of operators take longer than their passes over memory."""


def most_keys(num_threads: int) -> float:
    """Return the numbers of a pass's keys up to which one thread attends to them as fast as all with torch's operator.

    That takes as long as 2^17 numbers to start, and twice as long for each number. Measured on two threads.
    """
    if num_threads == 1:
        return math.inf
    return max(2**17, 2**22 // num_threads)


try:
    from megatron.parallel import token_operators

    operators: Any = token_operators
    missing = ""
    """Reason for which there are no operators."""
except ImportError as error:
    operators, missing = None, str(error)


def most_numbers(num_threads: int) -> int:
    """Return the size of an input up to which one pass on one thread is faster than torch's several on all threads."""
    return max(FEW_NUMBERS, 2**21 // num_threads)


def takes(*tensors: Tensor) -> bool:
    """Return whether the operators can read these tensors, which have one dtype."""
    dtype = tensors[0].dtype
    if operators is None or torch.is_grad_enabled() or dtype not in DTYPES:
        return False
    for x in tensors:  # noqa: SIM110  # a generator takes as long as an operator
        if not x.is_cpu or x.dtype != dtype or not x.is_contiguous():
            return False
    return True


# reads and writes the model's dtype once, where torch's operators pass over copies in float32
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """Return x / rms(x) * weight over the last dimension."""
    if x.numel() > most_numbers(torch.get_num_threads()) or not takes(x, weight):
        return None
    size, width, result = x.numel(), x.shape[-1], torch.empty_like(x)
    is_bfloat16 = x.dtype == torch.bfloat16
    operators.rms_norm(x.data_ptr(), weight.data_ptr(), result.data_ptr(), size // width, width, epsilon, is_bfloat16)
    return result


def swiglu(gate_up: Tensor) -> Tensor | None:
    """Return silu(gate) * up: [..., 2 F] -> [..., F]."""
    if gate_up.numel() > FEW_NUMBERS or not takes(gate_up):
        return None
    size, width = gate_up.numel(), gate_up.shape[-1] // 2
    result = gate_up.new_empty((*gate_up.shape[:-1], width))
    operators.swiglu(gate_up.data_ptr(), result.data_ptr(), size // (2 * width), width, gate_up.dtype == torch.bfloat16)
    return result


def rotate(q_SBnd: Tensor, k_SBkd: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Turn the channel pairs (i, i + d/2) of queries and keys. cos, sin: float32 [S, B, 1, d/2]."""
    if q_SBnd.numel() > most_numbers(torch.get_num_threads()) or not takes(cos, sin) or cos.dtype != torch.float32:
        return None
    rotated = []
    for x in (q_SBnd, k_SBkd):
        num_tokens, num_rows, heads, size = x.shape
        # queries and keys are slices of one product's result: a row of them does not end where the next begins
        stride = x.stride(1)
        if num_rows == 1:
            stride = x.stride(0)
        is_even = num_tokens == 1 or num_rows == 1 or x.stride(0) == num_rows * stride
        is_whole = x.stride(3) == 1 and (heads == 1 or x.stride(2) == size)
        if x.dtype not in DTYPES or not is_even or not is_whole or cos.numel() * 2 != num_tokens * num_rows * size:
            return None
        result, rows = x.new_empty(x.shape), num_tokens * num_rows
        operators.rotate(
            *(each.data_ptr() for each in (x, cos, sin, result)), rows, stride, heads, size, x.dtype == torch.bfloat16
        )
        rotated.append(result)
    return rotated[0], rotated[1]


def attend(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    slopes: Tensor | None,
    positions: Tensor,
    num_places: int,
    keys: Tensor,
    values: Tensor,
) -> Tensor | None:
    """Write the key and value of one token of each row into a cache, and return the token's context.

    qkv: [1, B, (n + 2 k) d]. angles: cos and sin, each float32 [1, B, 1, d/2], by which queries and keys are turned.
    slopes: float32 [n], of ALiBi. positions: int64 [B], the tokens' places, below `num_places`.
    keys, values: [B, k, T, d].

    Returns [1, B, n d]. Raises IndexError for a position outside of the cache.
    """
    rows, kv_heads, places, head_size = keys.shape
    is_much = rows * kv_heads * num_places * head_size > most_keys(torch.get_num_threads())
    if is_much or not takes(qkv, keys, values) or not _are_plain(angles, slopes):
        return None
    num_heads = qkv.shape[-1] // head_size - 2 * kv_heads
    assert qkv.shape[:2] == (1, rows)
    assert positions.shape == (rows,)
    assert positions.dtype == torch.int64
    context = qkv.new_empty((1, rows, num_heads * head_size))
    cos, sin = angles or (None, None)
    operators.attend(
        qkv=qkv.data_ptr(),
        cos=_address(cos),
        sin=_address(sin),
        slopes=_address(slopes),
        positions=positions.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        context=context.data_ptr(),
        rows=rows,
        kv_heads=kv_heads,
        group=num_heads // kv_heads,
        head_size=head_size,
        places=places,
        is_bfloat16=qkv.dtype == torch.bfloat16,
    )
    return context


# addresses are passed rather than tensors, so that the extension is not tied to a version of torch
def _address(x: Tensor | None) -> int:
    """Return the address of a tensor's numbers; 0, the null pointer, of none."""
    if x is None:
        return 0
    return x.data_ptr()


def _are_plain(angles: tuple[Tensor, Tensor] | None, slopes: Tensor | None) -> bool:
    """Return whether the angles and slopes that there are can be read as float32 numbers one behind the other."""
    found = [x for x in (*(angles or ()), slopes) if x is not None]
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in found)
