"""Products with low-rank adapters in few passes over memory: they are added to what the base layer has computed.

Shapes: R the ranks of a layer's adapters together, A [R, in], B [out, R].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel import products
from megatron.parallel.linear import ParallelLinear


def plus(output: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """output [..., out] + low [..., R] up^T, into the memory of `output`, which nothing reads later."""
    if torch.compiler.is_compiling():
        return output + products.linear(low, up)
    return _Plus.apply(output, low, up)  # type: ignore[no-any-return]


def adapted_product(layer: ParallelLinear, x: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """Return x W^T + bias + x A^T B^T with this rank's frozen weight W: [..., in] -> [..., out]."""
    if torch.compiler.is_compiling():
        return plus(layer.base.linear(layer, x, bias), products.linear(x, down), up)
    return _AdaptedProduct.apply(x, bias, down, up, layer)  # type: ignore[no-any-return]


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, output: Tensor, low: Tensor, up: Tensor) -> Tensor:
        function.save_for_backward(low, up)
        result = output.detach()  # the same memory; autograd forbids changes of a view, which some outputs are
        products.add_mm_(_rows(result), low.flatten(0, -2), up.t())
        return result

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (low, up), (_, needs_low, needs_up) = function.saved_tensors, function.needs_input_grad
        return grad, products.mm(grad, up) if needs_low else None, _up_gradient(grad, low) if needs_up else None


class _AdaptedProduct(torch.autograd.Function):
    """The gradient of x is also one sum. A weight in 4 bits is dequantised again for it."""

    @staticmethod
    def forward(
        function: Any, x: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, layer: ParallelLinear
    ) -> Tensor:
        low, output = products.linear(x, down), products.linear(x, layer.dense_weight(x.dtype), bias)
        function.layer = layer
        function.save_for_backward(x, low, down, up)
        products.add_mm_(_rows(output), low.flatten(0, -2), up.t())
        return output

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        x, low, down, up = function.saved_tensors
        layer, grad_low, grad_x = function.layer, products.mm(grad, up), None
        if function.needs_input_grad[0]:
            grad_x = products.mm(grad, layer.dense_weight(grad.dtype))
            products.add_mm_(_rows(grad_x), grad_low.flatten(0, -2), down)
        grad_bias = grad.flatten(0, -2).sum(0) if function.needs_input_grad[1] else None
        grad_down = products.mm(grad_low.flatten(0, -2).t(), x.flatten(0, -2))
        return grad_x, grad_bias, grad_down, _up_gradient(grad, low), None


def _up_gradient(grad: Tensor, low: Tensor) -> Tensor:
    """[out, R]. CPUs compute few rows of a product faster than few columns."""
    return products.mm(low.flatten(0, -2).t(), grad.flatten(0, -2)).t()


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [tokens, n], the same memory."""
    return x.view(-1, x.shape[-1])
