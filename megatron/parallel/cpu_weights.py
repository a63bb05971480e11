"""Weights of linear layers laid out for inference on a CPU, where a token costs the time to read them.

Measured on Zen 4, one thread, torch 2.13, all products of a Llama of 34 million parameters, milliseconds of processor
time. M: rows of the input.

| layout | fp32: M=1 | 16 | 128 | bf16: M=1 | 16 | 128 |
|---|---|---|---|---|---|---|
| as trained, [out, in] | 13.7 | 34 | 132 | 9.5 | 18 | 63 |
| fp32: [in, out] in memory, from 16 rows on by oneDNN | 8.6 | 25 | 106 | | | |
| bf16: blocks of oneDNN | | | | 6.7 | 11 | 50 |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.linear import DENSE, BaseMethod, ParallelLinear
from megatron.parallel.mappings import enter_tensor_region

MANY_ROWS = 16
"""Rows of an input from which on oneDNN's products with float32 weights are the faster ones."""


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
    if x.numel() // x.shape[-1] < MANY_ROWS or not _has_onednn():
        return F.linear(x, weight, bias)
    return onednn_product(x, weight, bias)


def pack(weight: Tensor) -> Tensor | None:
    """Return a bfloat16 weight [out, in] in oneDNN's blocks; None where oneDNN has no kernels for it."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _packs_bfloat16():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), MANY_ROWS)  # type: ignore[no-any-return]


def transpose(weight: nn.Parameter) -> bool:
    """Let a float32 weight on the CPU lie as [in, out] in memory, its shape as it was; return True if it does now."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
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
            del layer.weight
        elif transpose(layer.weight):
            layer.base = TRANSPOSED
        layer.method = layer.base


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packs_bfloat16() -> bool:
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
