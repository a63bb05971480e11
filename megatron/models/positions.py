"""Positions in attention: those of packed documents, ALiBi's slopes, the angles of rotary embeddings.

Shapes: S sequence, B batch, n query heads of this rank, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.options.config import ModelConfig
from megatron.parallel.context import ParallelContext


@dataclass(frozen=True, eq=False)
class Packing:
    """Positions of a microbatch's tokens in their documents. None instead of this: one document a sample.

    positions_BS: the position each token is encoded with.
    starts_BS: the index in the sample of the first token that each token may see.
    """

    positions_BS: Tensor
    starts_BS: Tensor

    @property
    def is_token_BS(self) -> Tensor:
        """True but for padding: what sees itself alone at the end of a row, as a last document of one token does."""
        sees_others_BS = self.starts_BS != torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device)
        return sees_others_BS.int().flip(1).cummax(1).values.flip(1).bool()

    def weights_SB(self, num_rows: int, ctx: ParallelContext) -> Tensor:
        """Return 1 for each token, 0 for padding, of this rank's rows of the residual stream: [rows, B] float32."""
        first = ctx.tensor_rank * num_rows if ctx.sequence_parallel else 0
        return self.is_token_BS.t()[first : first + num_rows].float()


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, [num_heads] float32.

    For a power of two, the geometric sequence from 2^(-8/n); otherwise that of the next lower power of two, filled up
    with every other slope of the next higher one. Source: Press et al. 2021 (arXiv:2108.12409) and its published code.
    """

    def geometric(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (index + 1) for index in range(count)]

    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = geometric(lower)
    slopes += geometric(2 * lower)[::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")  # a plan allocates models on "meta"


def rotary_frequencies(model: ModelConfig, *, is_local: bool = False) -> Tensor:
    """Radians per position for each pair of rotated channels, [d/2] float32, with Llama 3.1's scaling if configured.

    `is_local`: in layers with a window, which may have a base of their own, and then no scaling.
    Scaling divides long wavelengths by the factor, keeps short ones, and interpolates between.
    Source: Su et al. 2021 (arXiv:2104.09864); Llama 3.1's published model code.
    """
    exponents = torch.arange(0, model.rotary_size, 2, dtype=torch.float32) / model.rotary_size
    if is_local and model.rotary_base_local is not None:
        return 1.0 / model.rotary_base_local**exponents
    frequencies = 1.0 / model.rotary_base**exponents
    if model.rope_scaling_factor is None:
        return frequencies
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    turns = model.rope_scaling_original_length * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / model.rope_scaling_factor)


class RotaryEmbedding:
    """cos and sin for given positions, from a table computed once and grown on demand."""

    def __init__(self, model: ModelConfig, *, is_local: bool = False) -> None:
        self._frequencies = rotary_frequencies(model, is_local=is_local)
        self._table: tuple[Tensor, Tensor] | None = None

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of each pair of channels, each [length, d/2] float32."""
        if self._table is None or self._table[0].shape[0] < length or self._table[0].device != device:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            angles = angles.to(device, non_blocking=True)
            self._table = angles.cos(), angles.sin()
        cos, sin = self._table
        return cos[:length], sin[:length]

    def angles(self, length: int, device: torch.device, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, each [S, 1 or B, 1, d/2] float32."""
        cos, sin = self.table(length, device)
        if packing is None:
            return cos[:, None, None], sin[:, None, None]
        positions_SB = packing.positions_BS.t()
        return cos[positions_SB].unsqueeze(2), sin[positions_SB].unsqueeze(2)


def own_slopes(model: ModelConfig, ctx: ParallelContext) -> Tensor | None:
    """Return the ALiBi slopes of this rank's heads, [n] float32; None: the model has other positions."""
    if model.position_embedding_type != "alibi":
        return None
    own = ctx.slice_size(model.num_attention_heads)
    return alibi_slopes(model.num_attention_heads)[ctx.tensor_rank * own : (ctx.tensor_rank + 1) * own]
