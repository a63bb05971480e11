"""Gradient of a linear layer's weight, summed over chunks of tokens in float32 without a temporary of its size."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron.parallel.loss_chunks import BLOCK_NUMBERS


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
    """Sum over tokens of weight x gradient of the outputs [V] x inputs [H], chunk by chunk, as `total` [rows, H].

    Several chunks are summed in float32, because rounding the sum after each would lose the shares of the later ones. A
    single chunk is rounded once by the product itself, so it needs no float32 sum; float16 could not hold it.
    """

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
        has_gradient = False
        if into is not None:
            self.total, has_gradient = into.open()
        else:
            wide = torch.promote_types(weight.dtype, torch.float32)
            is_rounded = num_chunks == 1 and weight.dtype != torch.float16
            self.total = torch.empty_like(weight, dtype=weight.dtype if is_rounded else wide)
            if self.total.dtype != weight.dtype:
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
        if self.total.dtype == inputs.dtype:
            torch.addmm(self._rows, outputs, inputs, beta=self._beta, out=self._rows)
        elif adds_products_in_float32(inputs.device):
            torch.addmm(self._rows, outputs, inputs, torch.float32, beta=self._beta, out=self._rows)
        else:
            self._add_blocks(outputs, inputs)
        self._beta = 1

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


@functools.cache
def adds_products_in_float32(device: torch.device) -> bool:
    """Return whether `addmm` adds 16-bit products to a float32 matrix: CUDA from torch 2.10."""
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    return device.type == "cuda" and torch.version.cuda is not None and version >= (2, 10)


def _largest(token_weights_N: Tensor) -> Tensor:
    """Return the largest absolute weight, by which weights are divided before they are rounded to 16 bits.

    The equal weights of pretraining become 1 and lose nothing. float16 could not hold one token's share of a large
    batch, whose loss scale is known only in backward.
    """
    if not token_weights_N.numel():
        return token_weights_N.new_ones(())
    return token_weights_N.abs().amax().clamp(min=torch.finfo(token_weights_N.dtype).tiny)  # tiny: no token counts


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [rows, H] times a float32 scalar, rounded once to `dtype`, without a float32 temporary of its size."""
    result = torch.empty_like(x, dtype=dtype)
    # CUDA converts as it writes; elsewhere the product is a temporary
    step = max(1, len(x) if x.is_cuda else BLOCK_NUMBERS // max(1, x.shape[1]))
    for begin in range(0, len(x), step):
        block = slice(begin, begin + step)
        # of one dimension: a factor of none would be rounded to the dtype of x before the product
        torch.mul(x[block], factor.view(1), out=result[block])
    return result
