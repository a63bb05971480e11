"""Linear layers whose products run in fp8 with scales from the operands themselves.

Shapes: n tokens of this rank's products, K inputs and N outputs of its part of the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.options.training import Fp8Config
from megatron.parallel import mappings
from megatron.parallel.linear import DENSE, QUANTIZED, BaseMethod, ParallelLinear, end_exchanges, plus_bias, start_sum
from megatron.parallel.operators import products
from megatron.parallel.operators.fp8_products import (
    E4M3,
    E5M2,
    Operand,
    both_by_tensor,
    by_column,
    by_row,
    by_tensor,
    largest_of,
    product,
    transposed,
    transposed_by_tensor,
)
from megatron.parallel.operators.weight_gradient import added_to_own_sum
from megatron.parallel.phase_clock import WAIT


class KeptWeight(NamedTuple):
    """Operands of a weight as it is during one step."""

    step: int
    forward_NK: Operand
    backward_KN: Operand | None


# Products alone: what a layer keeps for the backward pass is its input in 16 bits, as without fp8, so recomputation,
# offloading and sequence parallelism have what they know.
class ScaledMethod(BaseMethod):
    """x @ W^T + b with operands in fp8 in training, in 16 bits otherwise. One method for each layer.

    A weight in 4 bits is dequantised, and rounded to fp8 from there.
    """

    is_plain = False

    def __init__(self, options: Fp8Config, recipe: str) -> None:
        self._options, self._by_row = options, recipe == "rowwise"
        self._gradient_dtype = E5M2 if options.fp8_format == "hybrid" else E4M3
        self.kept: KeptWeight | None = None
        """Those of the last step; graphs compute them in place in each (training/deepspeed/layer_graphs.py)."""

    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if not layer.ctx.state.fp8.is_on or not x.numel():  # an expert without tokens has no largest value
            return _in_16_bits(layer).linear(layer, x, bias)
        return plus_bias(_Product.apply(x, _trained(layer), layer, self, False), bias)

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        if not layer.ctx.state.fp8.is_on:
            return _in_16_bits(layer).column(layer, hidden)
        return plus_bias(_Product.apply(hidden, _trained(layer), layer, self, layer.ctx.tensor_size > 1), layer.bias)

    def output(self, layer: ParallelLinear, x_nK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x W^T and the largest values of x. Collective where a rank's numbers are part of what is scaled."""
        largest = self._largest(layer, x_nK, is_cut=layer.weight_shard.dim == 1)
        operand = _operand(x_nK, largest, E4M3)
        return self._multiply(operand, self._forward_weight(layer, x_nK.dtype), x_nK.dtype, is_fast=True), largest

    def gradient(self, layer: ParallelLinear, grad_nN: Tensor, *, for_weight: bool) -> tuple[Operand, Operand | None]:
        """Return the gradient of the outputs as an operand, and its transpose if the weight's gradient multiplies that.

        Collective as `output` is.
        """
        largest = self._largest(layer, grad_nN, is_cut=layer.weight_shard.dim == 0)
        if largest is not None and for_weight and self._options.fp8_wgrad:
            return both_by_tensor(grad_nN, largest, self._gradient_dtype)
        return _operand(grad_nN, largest, self._gradient_dtype), None

    def input_gradient(self, gradient: Operand, weight_KN: Operand, dtype: torch.dtype) -> Tensor:
        """Return G W, [n, K]."""
        return self._multiply(gradient, weight_KN, dtype)

    # not collective: a pipeline schedule may leave it for later, and ranks exchange other tensors meanwhile
    def weight_gradient(
        self, grad_nN: Tensor, x_nK: Tensor, largest: Tensor | None, operand_Nn: Operand | None
    ) -> Tensor:
        """Return G^T x, [N, K]. `largest` of x and `operand_Nn` serve where a tensor has one scale."""
        if not self._options.fp8_wgrad:
            return products.mm(grad_nN.t(), x_nK)
        if self._by_row:
            left, right = by_column(grad_nN, self._gradient_dtype), by_column(x_nK, E4M3)
        else:
            assert largest is not None
            assert operand_Nn is not None
            left, right = operand_Nn, transposed_by_tensor(x_nK, largest, E4M3)
        return self._multiply(left, right, x_nK.dtype)

    def _multiply(self, a: Operand, b: Operand, dtype: torch.dtype, *, is_fast: bool = False) -> Tensor:
        return product(a, b, dtype, is_fast=is_fast, emulates=self._options.fp8_emulate)

    def _largest(self, layer: ParallelLinear, x: Tensor, *, is_cut: bool) -> Tensor | None:
        """Return the largest values of x [rows, k]; None: each row has its own scale.

        `is_cut`: tensor-parallel ranks hold other parts of x.
        """
        # a power of two more or less rounds a number of fp8 alike: rows need no exchange
        if self._by_row:
            return None
        if not is_cut or not self._options.fp8_amax_reduce or layer.ctx.tensor_size == 1:
            return largest_of(x)
        with layer.ctx.state.clock.phase(WAIT):
            return largest_of(x, layer.ctx.tensor_group)

    # ------------------------------------------------------------------------------------------------------------------
    # The weight, which changes between steps alone

    @property
    def keeps_weight(self) -> bool:
        """Operands are computed once a step, rather than in each pass."""
        return self._options.cache_fp8_weight_fwd

    def keep_weight(self, layer: ParallelLinear, dtype: torch.dtype) -> None:
        """Compute what is kept of the weight in this step, as the first pass of each direction does."""
        self.kept = None
        self._forward_weight(layer, dtype)
        self.backward_weight(layer, dtype)

    def _forward_weight(self, layer: ParallelLinear, dtype: torch.dtype) -> Operand:
        """Return the weight as [N, K]."""
        step = layer.ctx.state.fp8.step
        if self.kept is not None and self.kept.step == step:
            return self.kept.forward_NK
        weight, is_cut = layer.dense_weight(dtype).detach(), layer.weight_shard.dim is not None
        operand = _operand(weight, self._largest(layer, weight, is_cut=is_cut), E4M3)
        if self._options.cache_fp8_weight_fwd:
            self.kept = KeptWeight(step, operand, None)
        return operand

    def backward_weight(self, layer: ParallelLinear, dtype: torch.dtype) -> Operand:
        """Return the weight as [K, N]. Collective as `output` is."""
        kept = self.kept
        if kept is not None and kept.step != layer.ctx.state.fp8.step:
            kept = None
        if kept is not None and kept.backward_KN is not None:
            return kept.backward_KN
        if self._by_row:
            operand = by_column(layer.dense_weight(dtype).detach(), E4M3)
        else:
            operand = transposed(self._forward_weight(layer, dtype))
        if kept is not None and self._options.cache_fp8_weight:
            self.kept = kept._replace(backward_KN=operand)
        return operand


def _operand(x: Tensor, largest: Tensor | None, dtype: torch.dtype) -> Operand:
    if largest is None:
        return by_row(x, dtype)
    return by_tensor(x, largest, dtype)


def _trained(layer: ParallelLinear) -> Tensor | None:
    """Return the weight that may have a gradient; one in 4 bits has none."""
    if layer.weight_shard.quantized:
        return None
    return layer.weight


def _in_16_bits(layer: ParallelLinear) -> BaseMethod:
    if layer.weight_shard.quantized:
        return QUANTIZED
    return DENSE


class _Product(torch.autograd.Function):
    """x @ W^T of [n, ..., K]; `enters`: from the residual stream, with what `_ColumnLinear` of linear.py exchanges."""

    @staticmethod
    def forward(
        function: Any, x: Tensor, weight: Tensor | None, layer: ParallelLinear, method: ScaledMethod, enters: bool
    ) -> Tensor:
        function.weight, function.layer, function.method, function.enters = weight, layer, method, enters
        function.save_for_backward(products.kept(x, is_needed=function.needs_input_grad[1]))
        if enters and layer.ctx.sequence_parallel:
            x = mappings.all_gather_rows(x, layer.ctx)
        output, function.largest = method.output(layer, x.flatten(0, -2))
        return output.view(*x.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (x,), layer, method = function.saved_tensors, function.layer, function.method
        ctx, largest, deferred = layer.ctx, function.largest, layer.ctx.state.deferred
        needs_x, needs_weight = function.needs_input_grad[:2]
        is_cut = function.enters and ctx.sequence_parallel
        rows = grad.flatten(0, -2).contiguous()
        operand, operand_Nn = method.gradient(layer, rows, for_weight=needs_weight)

        def weight_gradient() -> Tensor:
            inputs = mappings.all_gather_rows(x, ctx) if is_cut else x
            return method.weight_gradient(rows, inputs.flatten(0, -2), largest, operand_Nn)

        grad_x = grad_weight = None
        works: list[Any] = []
        if needs_x:
            weight_KN = method.backward_weight(layer, grad.dtype)
            grad_x = method.input_gradient(operand, weight_KN, grad.dtype).view(*grad.shape[:-1], -1)
        if needs_weight and deferred is not None and deferred.is_open:
            deferred.defer([layer.weight], lambda: [weight_gradient()])
            needs_weight = False
        if needs_weight and is_cut:  # one collective at a time: the rows of x before the sum
            x, is_cut = mappings.all_gather_rows(x, ctx), False
        if grad_x is not None and function.enters:
            grad_x, work = start_sum(grad_x, ctx)
            works.append(work)
        if needs_weight:
            grad_weight = added_to_own_sum(function.weight, weight_gradient())
        end_exchanges(works, ctx)
        return grad_x, grad_weight, None, None, None
