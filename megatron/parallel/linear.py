"""Column- and row-parallel linear layers, and the one seam through which they compute.

Shapes: S sequence, B batch, tp tensor-parallel ranks. The residual stream is [S, B, H], or [S/tp, B, H] under sequence
parallelism ("rows" below).
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import mappings
from megatron.parallel.context import ParallelContext
from megatron.parallel.costs import PassSizes
from megatron.parallel.messages import wait_for
from megatron.parallel.operators import products
from megatron.parallel.operators.nf4 import QuantizedWeight
from megatron.parallel.operators.weight_gradient import add_product, own_sum
from megatron.parallel.pass_state import DeferredGradients
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import Shard, Shards


class LinearMethod(ABC):
    """Computation of a linear layer: the seam for low-rank adapters, quantised weights, fp8 and fused kernels.

    A method comes with the declaration of a layer (`LayerDeclaration.with_method`); models do not know it. It needs
    `product` alone; communication and bias are added around it.
    """

    starts_from_base = False
    """`start` has values that follow from the base model's weights."""
    scales_weight = False
    """An output projection multiplies the rows of its weight by trained factors first."""

    def start(self, layer: ParallelLinear) -> dict[str, Tensor]:
        """Return the start of parameters of its own by local name, float32. Collective."""
        return {}

    def shards(self, weight: Shard) -> Mapping[str, Shard]:
        """Return the parameters that the method declares beside this weight, by local name.

        A replicated one is `used_on="heads"`: each rank multiplies it with its own channels.
        """
        return {}

    def kept_bytes(self, weight: Shard, sizes: PassSizes) -> int:
        """Return the bytes that the method keeps for the backward pass, beside the layer's input."""
        return 0

    def linear_method(self) -> LinearMethod:
        """Return itself. A declaration that is made without torch returns the method that it stands for."""
        return self

    @abstractmethod
    def product(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """Return x [..., in] times this rank's weight, [..., out], without the bias."""

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        """[rows, B, in] -> [S, B, out/tp]"""
        return plus_bias(self.product(layer, mappings.enter_tensor_region(hidden, layer.ctx)), layer.bias)

    def row(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """[S, B, in/tp] -> [rows, B, out]; the bias is added once, after the sum over ranks."""
        return plus_bias(mappings.leave_tensor_region(self.product(layer, x), layer.ctx), layer.bias)


def plus_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    """Return output + bias; the output itself without one."""
    if bias is None:
        return output
    return output + bias


class BaseMethod(LinearMethod):
    """Computation with a layer's own weight alone."""

    is_plain = True
    """It multiplies by `dense_weight` in the precision of its input."""

    @abstractmethod
    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, rounded to 16 bits once: [..., in] -> [..., out]."""

    def product(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        return self.linear(layer, x, None)

    def row(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        if layer.ctx.tensor_size > 1:
            return super().row(layer, x)
        return self.linear(layer, x, layer.bias)  # no sum over ranks stands between product and bias


class DenseMethod(BaseMethod):
    """x @ W^T + b; the column side's backward communicates behind its matrix products."""

    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.ctx.state.deferred is None and own_sum(layer.weight) is None:
            return products.linear(x, layer.weight, bias)
        return _DeferringLinear.apply(x, layer.weight, bias, layer.ctx.state.deferred)

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        if layer.ctx.tensor_size == 1:
            return self.linear(layer, hidden, layer.bias)
        return _ColumnLinear.apply(hidden, layer.weight, layer.bias, layer.ctx)


class QuantizedMethod(BaseMethod):
    """x @ W^T + b with a weight held in 4 bits, dequantised for each product."""

    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        return layer.quantized.product(x, bias)

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        return self.linear(layer, mappings.enter_tensor_region(hidden, layer.ctx), layer.bias)


DENSE, QUANTIZED = DenseMethod(), QuantizedMethod()


class _Parameters(NamedTuple):
    """Weight and bias of a product, and where their gradients may be deferred."""

    weight: Tensor
    bias: Tensor | None
    deferred: DeferredGradients | None

    def gradients(
        self, needed: Sequence[bool], grad: Tensor, inputs: Callable[[], Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias, None for what is deferred, added to its sum or not `needed`."""
        defers = self.deferred is not None and self.deferred.is_open
        into = None
        if needed[0] and not defers:
            into = own_sum(self.weight)
        if into is not None:
            add_product(into, grad.flatten(0, -2), inputs().flatten(0, -2))
            needed = (False, *needed[1:])
        trained = [
            (parameter, compute)
            for parameter, is_needed, compute in zip(self[:2], needed, (_weight_gradient, _bias_gradient), strict=True)
            if parameter is not None and is_needed
        ]
        rows = grad.flatten(0, -2)
        if self.deferred is not None and defers:
            # autograd accumulates them later, with all hooks of the parameters (pass_state.compute_deferred)
            if trained:
                parameters = [parameter for parameter, _ in trained]
                self.deferred.defer(parameters, lambda: [compute(rows, inputs) for _, compute in trained])
            return None, None
        found = {id(parameter): compute(rows, inputs) for parameter, compute in trained}
        return found.get(id(self.weight)), found.get(id(self.bias))


def _weight_gradient(rows: Tensor, inputs: Callable[[], Tensor]) -> Tensor:
    return products.mm(rows.t(), inputs().flatten(0, -2))


def _bias_gradient(rows: Tensor, inputs: Callable[[], Tensor]) -> Tensor:
    return rows.sum(0)


class _DeferringLinear(torch.autograd.Function):
    """x @ W^T + b, whose gradients of W and b may be deferred, and that of W added to the optimizer's sum."""

    @staticmethod
    def forward(
        function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients | None
    ) -> Tensor:
        function.parameters = _Parameters(weight, bias, deferred)
        function.save_for_backward(products.kept(x, is_needed=function.needs_input_grad[1]))
        return products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (x,), parameters = function.saved_tensors, function.parameters
        grad_x = None
        if function.needs_input_grad[0]:
            grad_x = products.mm(grad, parameters.weight)
        return grad_x, *parameters.gradients(function.needs_input_grad[1:3], grad, lambda: x), None


class _ColumnLinear(torch.autograd.Function):
    """x @ W^T + b from the residual stream, with the backward's communication behind its matrix products.

    A frozen weight needs no x in backward, and a frozen x no communication.
    """

    @staticmethod
    def forward(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        function.ctx, function.parameters = ctx, _Parameters(weight, bias, ctx.state.deferred)
        # this rank's rows, gathered again in backward as Korthikanti et al. do: the gathered copy would undo the
        # memory that sequence parallelism saves
        function.save_for_backward(products.kept(x, is_needed=function.needs_input_grad[1]), weight)
        if ctx.sequence_parallel:
            x = mappings.all_gather_rows(x, ctx)
        return products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        x, weight = function.saved_tensors
        ctx: ParallelContext = function.ctx
        needs_x, needs_weight, needs_bias, _ = function.needs_input_grad
        grad = grad.contiguous()
        defers = ctx.state.deferred is not None and ctx.state.deferred.is_open
        full, grad_full, grad_x, works = x, None, None, []
        if needs_weight and ctx.sequence_parallel and not defers:
            full = x.new_empty((x.shape[0] * ctx.tensor_size, *x.shape[1:]))
            works.append(mappings.all_gather_into(full, x.contiguous(), group=ctx.tensor_group, async_op=True))
        if needs_x:
            grad_full = products.mm(grad, weight)
        # one collective at a time: the rows of x have come behind the first product, the sum goes behind the others
        end_exchanges(works, ctx)
        if grad_full is not None:
            grad_x, work = start_sum(grad_full, ctx)
            works.append(work)

        def inputs() -> Tensor:
            # a deferred gradient of the weight gathers the rows only when it is computed
            if ctx.sequence_parallel and defers:
                return mappings.all_gather_rows(x, ctx)
            return full

        gradients = function.parameters.gradients((needs_weight, needs_bias), grad, inputs)
        end_exchanges(works, ctx)
        return grad_x, *gradients, None


def start_sum(grad_full: Tensor, ctx: ParallelContext) -> tuple[Tensor, Any]:
    """Start to sum the ranks' gradients of a layer's input; return where this rank's rows will be, and the work."""
    ctx.state.checks.partial(grad_full)
    if not ctx.sequence_parallel:
        return grad_full, dist.all_reduce(grad_full, group=ctx.tensor_group, async_op=True)
    own = grad_full.new_empty((grad_full.shape[0] // ctx.tensor_size, *grad_full.shape[1:]))
    return own, mappings.reduce_scatter_into(own, grad_full, group=ctx.tensor_group, async_op=True)


def end_exchanges(works: list[Any], ctx: ParallelContext) -> None:
    """Wait for the collectives that were started, and forget them."""
    if not works:
        return
    with ctx.state.clock.phase(WAIT):
        wait_for(works)
    works.clear()


class ParallelLinear(nn.Module):
    """A linear layer's declared parameters and its method.

    `base` computes with the layer's own weight alone, dense or quantised; an adapter's method adds to its product.
    """

    weight: nn.Parameter
    """Absent where the weight is quantised or packed."""
    quantized: QuantizedWeight
    """Present where it is quantised."""
    packed: Tensor
    """Weight in oneDNN's blocks, for inference (cpu_weights.py)."""
    bias: nn.Parameter | None

    def __init__(self, shards: Shards, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        for name in shards:
            if shards[name].quantized:
                self.quantized = QuantizedWeight(shards.full_name(name), shards[name], ctx)
            else:
                self.register_parameter(name, shards.allocate(name, ctx))
        self.weight_shard = shards["weight"]
        self.base: BaseMethod = DENSE
        if self.weight_shard.quantized:
            self.base = QUANTIZED
        self.base = shards.base_method or self.base
        self.method = shards.method or self.base
        if "bias" not in shards:
            self.register_parameter("bias", None)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's weight, dequantised to `dtype` where it is held in 4 bits."""
        if hasattr(self, "packed"):
            return self.packed.to_dense()
        if self.weight_shard.quantized:
            return self.quantized.dense(dtype)
        return self.weight


class ColumnParallelLinear(ParallelLinear):
    """[rows, B, in] -> [S, B, out/tp]: each rank computes its part of the output channels.

    The weight's pieces are the outputs fused in it (q, k, v; gate, up); each is cut evenly over the ranks.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        return self.method.column(self, hidden)


class RowParallelLinear(ParallelLinear):
    """[S, B, in/tp] -> [rows, B, out]: each rank multiplies its part of the input channels; the sums are added up."""

    def forward(self, x: Tensor) -> Tensor:
        return self.method.row(self, x)
