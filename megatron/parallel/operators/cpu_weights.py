"""Weights of linear layers laid out for inference on a CPU, where a token costs the time to read them.

Measured on Zen 4, one thread, torch 2.13, all products of a Llama of 34 million parameters, milliseconds of processor
time. M: rows of the input.

| layout | fp32: M=1 | 16 | 128 | bf16: M=1 | 16 | 128 |
|---|---|---|---|---|---|---|
| as trained, [out, in] | 13.7 | 34 | 132 | 9.5 | 18 | 63 |
| fp32: [in, out] in memory, from 2 rows on by oneDNN | 8.6 | 25 | 106 | | | |
| bf16: blocks of oneDNN | | | | 6.7 | 11 | 50 |

On Zen 3, with AVX2 alone, MKL multiplies by [in, out] as fast as oneDNN at 16 rows, and 1.2 times as fast from 128 on.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.linear import DENSE, BaseMethod, ParallelLinear
from megatron.parallel.mappings import enter_tensor_region
from megatron.parallel.operators import products
from megatron.runtime.accelerator import processor

PACKED_FOR_ROWS = 16
"""Rows of an input for which oneDNN chooses the blocks."""


class _InferenceMethod(BaseMethod):
    """Product with a weight that has another layout. No autograd."""

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        return self.linear(layer, enter_tensor_region(hidden, layer.ctx), layer.bias)


class _TransposedMethod(_InferenceMethod):
    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        return transposed_product(x, layer.weight, bias)


class _PackedMethod(_InferenceMethod):
    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_product(x, layer.packed, bias)


TRANSPOSED, PACKED = _TransposedMethod(), _PackedMethod()


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] W^T + bias by oneDNN, for a packed weight or a float32 one."""
    product: Any = torch.ops.mkldnn._linear_pointwise  # torch.compile's own operator for constant weights
    return product(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] W^T + bias for a float32 weight that lies as [in, out] in memory."""
    channels = x.shape[-1]
    if x.numel() != channels and _onednn_is_faster():
        return onednn_product(x, weight, bias)
    parts = _parts(channels, torch.get_num_threads())
    if x.numel() != channels or parts == 1:
        return F.linear(x, weight, bias)
    # MKL reads a weight for one row on one thread, however many there are. On two, milliseconds by the clock: 8.7 so,
    # and 5.5 in two parts of the input channels; 5.0 is the time to add all weights up.
    by_part = weight.t().view(parts, channels // parts, -1)
    result = torch.bmm(x.reshape(parts, 1, -1), by_part).sum(0)
    if bias is not None:
        result.add_(bias)
    return result.view(*x.shape[:-1], -1)


@functools.cache
def _parts(channels: int, num_threads: int) -> int:
    """Return into how many parts of equal size input channels are cut: a power of two, at most one a thread."""
    return math.gcd(channels, 1 << (num_threads.bit_length() - 1))


def pack(weight: Tensor) -> Tensor | None:
    """Return a bfloat16 weight [out, in] in oneDNN's blocks; None where oneDNN has no kernels for it."""
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or not _packs_bfloat16():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)  # type: ignore[no-any-return]


def transpose(weight: nn.Parameter) -> bool:
    """Let a float32 weight on the CPU lie as [in, out] in memory, its shape as it was; return True if it does now."""
    if not weight.is_cpu or weight.dtype != torch.float32:
        return False
    weight.data = weight.data.t().contiguous().t()
    return True


def lay_out(module: nn.Module) -> None:
    """Give the linear layers of a module that is not trained further the layout above.

    A packed weight takes the place of the layer's own. Layers with adapters, or with a quantised weight, stay as they
    are.
    """
    for layer in module.modules():
        if not isinstance(layer, ParallelLinear) or layer.method is not DENSE:
            continue
        if (packed := pack(layer.weight)) is not None:
            layer.packed, layer.base = packed, PACKED
            del layer.weight  # or it would be held twice
        elif transpose(layer.weight):
            layer.base = TRANSPOSED
        layer.method = layer.base


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn_is_faster() -> bool:
    """Return True if oneDNN multiplies several rows by a float32 weight [in, out] faster than torch's default, MKL."""
    return _has_onednn() and processor().instructions != "AVX2"


def _packs_bfloat16() -> bool:
    return _has_onednn() and torch.bfloat16 not in products.WIDENED
