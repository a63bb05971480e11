"""Gradients of weights, added to a float32 sum without a temporary of their size and without a rounding to 16 bits."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.operators import products
from megatron.parallel.operators.block_sizes import BLOCK_NUMBERS
from megatron.runtime.devices import device_of


class GradientSum(ABC):
    """The float32 sum in which an optimizer adds up a parameter's gradients of a step, the parameter's attribute
    `gradient_sum`. What is added to it directly is neither held a second time nor rounded to 16 bits.
    """

    loss_gradient: float = 1.0
    """Gradient of a microbatch's loss with which its backward pass will start."""

    @abstractmethod
    def open(self) -> tuple[Tensor, bool]:
        """Return the sum, in the parameter's shape, and True if it holds gradients of this step already.

        The caller adds a gradient; the first one of a step replaces what is there.
        """

    @abstractmethod
    def close(self) -> None:
        """Note, in the backward pass of a microbatch, that a gradient has been added."""


class WeightGradient:
    """Sum over tokens of weight x gradient of the outputs [V] x inputs [H], chunk by chunk, as `total` [rows, H]."""

    def __init__(
        self,
        weight: Tensor,
        num_rows: int,
        num_chunks: int,
        token_weights_N: Tensor,
        into: GradientSum | None = None,
    ) -> None:
        """Only the first `num_rows` rows of the weight have outputs; the gradient of the others is 0.

        `into`: add to this sum; `total` is its memory and is not to be returned as a gradient.
        """
        self.unit: Tensor | None = None
        """Factor by which `total` is still to be multiplied; None: there is none."""
        self._dtype = weight.dtype
        has_gradient = False
        if into is not None:
            self.total, has_gradient = into.open()
        else:
            # rounding the sum after each chunk would lose the shares of the later ones; a single one is rounded once by
            # the product itself, and needs no float32 sum; float16 could not hold it
            dtype = torch.promote_types(weight.dtype, torch.float32)
            if num_chunks == 1 and weight.dtype != torch.float16:
                dtype = weight.dtype
            self.total = torch.empty_like(weight, dtype=dtype)
            if dtype != weight.dtype:
                self.unit = _largest(token_weights_N)
                token_weights_N = token_weights_N / self.unit
        if not has_gradient:
            self.total[num_rows:] = 0
        self._rows, self._beta = self.total[:num_rows], int(has_gradient)
        self._token_weights_N1 = token_weights_N.unsqueeze(-1)

    def add(self, part: slice, grad_outputs_CV: Tensor, inputs_CH: Tensor) -> None:
        """Add the tokens `part`."""
        inputs = (inputs_CH * self._token_weights_N1[part]).to(inputs_CH.dtype)
        outputs = grad_outputs_CV.t()
        if products.widens(inputs):
            products.add_mm_(self._rows, outputs, inputs, beta=self._beta)
        elif self.total.dtype == inputs.dtype:
            torch.addmm(self._rows, outputs, inputs, beta=self._beta, out=self._rows)
        elif adds_products_in_float32(inputs.device):
            torch.addmm(self._rows, outputs, inputs, torch.float32, beta=self._beta, out=self._rows)
        else:
            self._add_blocks(outputs, inputs)
        self._beta = 1

    def result(self) -> Tensor:
        """Return the gradient in the dtype of the weight."""
        if self.unit is None:
            return self.total
        return scaled(self.total, self.unit, self._dtype)

    def _add_blocks(self, outputs_VC: Tensor, inputs: Tensor) -> None:
        if inputs.dtype == torch.float16:  # whose range a sum over a chunk may leave
            inputs = inputs.float()
        step = max(1, BLOCK_NUMBERS // inputs.shape[1])
        product = inputs.new_empty((min(step, len(self._rows)), inputs.shape[1]))
        for begin in range(0, len(self._rows), step):
            rows = self._rows[begin : begin + step]
            block = torch.mm(outputs_VC[begin : begin + step].to(inputs.dtype), inputs, out=product[: len(rows)])
            if self._beta:
                rows += block
            else:
                rows.copy_(block)


# On an H100 this saves 19 of the 20 ms of additions in a step of Llama 3.2 1B. A CPU has no such operator, and
# autograd frees each gradient there before the next.
def own_sum(weight: Tensor) -> GradientSum | None:
    """Return the sum to which a layer adds its weight's gradient itself; None: autograd gets the gradient.

    Only where one operator multiplies and adds; torch.compile could not trace it.
    """
    if torch.compiler.is_compiling() or not adds_products_in_float32(weight.device):
        return None
    return getattr(weight, "gradient_sum", None)


def add_product(into: GradientSum, grad_outputs_NO: Tensor, inputs_NI: Tensor) -> None:
    """Add the gradient of a linear layer's weight, [O, I], from the gradient of its outputs and its inputs."""
    total, has_gradient = into.open()
    torch.addmm(total, grad_outputs_NO.t(), inputs_NI, torch.float32, beta=int(has_gradient), out=total)
    into.close()


def added_to_own_sum(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Add a gradient to the sum that the layer adds to itself, and return None; without one return it for autograd."""
    into = own_sum(weight)
    if into is None:
        return gradient
    total, has_gradient = into.open()
    if has_gradient:
        total.add_(gradient)
    else:
        total.copy_(gradient)
    into.close()
    return None


class Lookup(torch.autograd.Function):
    """Rows of a table, [...] -> [..., H], with gradients added to its float32 sum rather than to a table of zeros."""

    @staticmethod
    def forward(function: Any, rows: Tensor, table: Tensor, into: GradientSum) -> Tensor:
        function.save_for_backward(rows)
        function.into = into
        return F.embedding(rows, table)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows,) = function.saved_tensors
        total, has_gradient = function.into.open()
        if not has_gradient:
            total.zero_()
        # not index_add_, whose order, and so its rounding, differs from run to run on CUDA
        total.index_put_((rows.flatten(),), grad.flatten(0, -2).to(total.dtype), accumulate=True)
        function.into.close()
        return None, None, None


@functools.cache
def adds_products_in_float32(device: torch.device) -> bool:
    """Return whether `addmm` adds 16-bit products to a float32 matrix: CUDA from torch 2.10."""
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    return device_of(device.type).adds_16_bit_products and torch.version.cuda is not None and version >= (2, 10)


def _largest(token_weights_N: Tensor) -> Tensor:
    """Return the largest absolute weight, by which weights are divided before they are rounded to 16 bits."""
    # the equal weights of pretraining become 1 and lose nothing; float16 could not hold one token's share of a large
    # batch, whose loss scale is known only in backward
    if not token_weights_N.numel():
        return token_weights_N.new_ones(())
    return token_weights_N.abs().amax().clamp(min=torch.finfo(token_weights_N.dtype).tiny)  # tiny: no token counts


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [rows, H] times a float32 scalar, rounded once to `dtype`, without a float32 temporary of its size."""
    result = torch.empty_like(x, dtype=dtype)
    step = max(1, BLOCK_NUMBERS // max(1, x.shape[1]))
    if x.is_cuda:  # which converts as it writes; elsewhere the product is a temporary
        step = max(1, len(x))
    for begin in range(0, len(x), step):
        block = slice(begin, begin + step)
        # of one dimension: a factor of none would be rounded to the dtype of x before the product
        torch.mul(x[block], factor.view(1), out=result[block])
    return result
