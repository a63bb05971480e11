"""Positions in attention: those of packed documents, ALiBi's slopes, the angles of rotary embeddings.

Shapes: S sequence, B batch, n query heads of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.options.config import ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.mappings import own_places, own_rows


@dataclass(frozen=True, eq=False)
class Packing:
    """Positions of a microbatch's tokens in their documents, those of whole rows also where ranks share the rows. None
    instead of this: one document a sample.

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

    def weights_SB(self, ctx: ParallelContext) -> Tensor:
        """Return 1 for each token, 0 for padding, of this rank's rows of the residual stream: [rows, B] float32."""
        return own_rows(self.is_token_BS.t(), ctx).float()


def lengths_of(positions_BS: Tensor) -> Tensor:
    """Return the length of the text that each token belongs to, [B, S]: a run of consecutive positions."""
    num_tokens = positions_BS.shape[1]
    places = torch.arange(num_tokens, device=positions_BS.device).expand_as(positions_BS)
    follows = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    ends = torch.where(torch.nn.functional.pad(follows, (0, 1)), num_tokens, places)
    last = ends.flip(1).cummin(1).values.flip(1)
    return positions_BS.gather(1, last) + 1


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


def own_slopes(model: ModelConfig, ctx: ParallelContext) -> Tensor | None:
    """Return the ALiBi slopes of this rank's heads, [n] float32; None: the model has other positions."""
    if model.position_embedding_type != "alibi":
        return None
    own = ctx.slice_size(model.num_attention_heads)
    return alibi_slopes(model.num_attention_heads)[ctx.tensor_rank * own : (ctx.tensor_rank + 1) * own]


# ---------------------------------------------------------------------------------------------------------------------
# Angles of rotary positions, and their scaling for texts longer than those of the training. d rotated channels of a
# head. Source of the scalings: transformers' modeling_rope_utils, in whose words published models name them.

Angles = tuple[Tensor, Tensor]


def _exponents(model: ModelConfig) -> Tensor:
    return torch.arange(0, model.rotary_size, 2, dtype=torch.float32) / model.rotary_size


def rotary_frequencies(model: ModelConfig, *, is_local: bool = False) -> Tensor:
    """Radians per position for each pair of rotated channels, [d/2] float32, in texts up to the `rotary_border`.

    `is_local`: in layers with a window, which may have a base of their own, and then no scaling.
    Source: Su et al. 2021 (arXiv:2104.09864).
    """
    if is_local and model.rotary_base_local is not None:
        return 1.0 / model.rotary_base_local ** _exponents(model)
    frequencies = 1.0 / model.rotary_base ** _exponents(model)
    if model.rope_scaling_factor is None:
        return frequencies
    return SCALINGS[model.rope_scaling_type](model, frequencies, model.rope_scaling_factor)


def _linear(model: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    return frequencies / factor


def _llama3(model: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and interpolate between. Source: Llama 3.1's code."""
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    turns = model.rope_scaling_original_length * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def _yarn(model: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    """As Llama 3.1, but the interpolation is linear in the number of the channel. Source: arXiv:2309.00071."""

    def channel(turns: float) -> float:
        """Return the pair of channels that turns so often within the original context."""
        ratio = model.rope_scaling_original_length / (2 * math.pi * turns)
        return model.rotary_size * math.log(ratio) / (2 * math.log(model.rotary_base))

    low, high = channel(model.rope_scaling_beta_fast), channel(model.rope_scaling_beta_slow)
    if model.rope_scaling_truncate:
        low, high = math.floor(low), math.ceil(high)
    # rotary_size, not the number of pairs: transformers' bound, as YaRN's published code has it
    low, high = max(low, 0), min(high, model.rotary_size - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / factor * divided + frequencies * (1.0 - divided)


def _unscaled(model: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    return frequencies


def _short(model: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    return frequencies / torch.tensor(model.rope_scaling_short_factors, dtype=torch.float32)


SCALINGS: dict[str, Callable[[ModelConfig, Tensor, float], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _unscaled,
    "longrope": _short,
}
"""Frequencies by rope_scaling_type, from those without scaling and the factor."""


class _Table:
    """cos and sin of each position, computed once and grown on demand."""

    def __init__(self, frequencies: Tensor, amplitude: float) -> None:
        self._frequencies, self._amplitude = frequencies, amplitude
        self._rows: Angles | None = None

    def rows(self, length: int, device: torch.device) -> Angles:
        """cos and sin of each pair of channels, each [length, d/2] float32."""
        if self._rows is None or self._rows[0].shape[0] < length or self._rows[0].device != device:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            angles = angles.to(device, non_blocking=True)
            self._rows = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        cos, sin = self._rows
        return cos[:length], sin[:length]


class RotaryEmbedding:
    """cos and sin for given positions, the same in texts of any length."""

    reads_lengths = False
    """The angles depend on the length of the text."""

    def __init__(self, model: ModelConfig, *, is_local: bool = False) -> None:
        self._amplitude = model.rotary_amplitude
        if is_local and model.rotary_base_local is not None:
            self._amplitude = 1.0
        self._table = _Table(rotary_frequencies(model, is_local=is_local), self._amplitude)
        self._own: dict[tuple[Any, ...], Angles] = {}
        """cos and sin of its places of one text, kept for the layers after the first: each would keep a copy."""

    def angles(self, num_places: int, device: torch.device, packing: Packing | None, ctx: ParallelContext) -> Angles:
        """cos and sin of each of this rank's places of whole rows, each [num_places, 1 or B, 1, d/2] float32."""
        length = num_places * ctx.context_size
        if packing is None:
            cos, sin = self._own_of_text(length, device, ctx)
            return cos[:, None, None], sin[:, None, None]
        positions, lengths = packing.positions_BS, None
        if ctx.context_size > 1:
            if self.reads_lengths:
                # of whole texts, of which a rank may have parts
                lengths = own_places(lengths_of(positions), ctx, dim=1)
            positions = own_places(positions, ctx, dim=1)
        return self.angles_at(positions, lengths, length)

    def angles_at(self, positions_BS: Tensor, lengths_BS: Tensor | None, num_positions: int) -> Angles:
        """cos and sin of tokens at positions below `num_positions`, each [S, B, 1, d/2] float32.

        `lengths_BS`: of the text that each belongs to. None: of runs of consecutive positions.
        """
        return self._gathered(self._table, positions_BS, num_positions)

    def _own_of_text(self, length: int, device: torch.device, ctx: ParallelContext) -> Angles:
        if ctx.context_size == 1:
            return self._of_text(length, device)
        key = length, device, ctx.context_rank
        if key not in self._own:
            cos, sin = self._of_text(length, device)
            self._own = {key: (own_places(cos, ctx), own_places(sin, ctx))}
        return self._own[key]

    def _of_text(self, length: int, device: torch.device) -> Angles:
        """cos and sin of the positions of one text, each [length, d/2]."""
        return self._table.rows(length, device)

    def _gathered(self, table: _Table, positions_BS: Tensor, num_positions: int) -> Angles:
        cos, sin = table.rows(num_positions, positions_BS.device)
        positions_SB = positions_BS.t()
        return cos[positions_SB].unsqueeze(2), sin[positions_SB].unsqueeze(2)


class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE: other frequencies in texts beyond the original length. Source: Ding et al. 2024 (arXiv:2402.13753)."""

    reads_lengths = True

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self._border = model.rope_scaling_original_length
        divisors = torch.tensor(model.rope_scaling_long_factors, dtype=torch.float32)
        self._long = _Table(1.0 / model.rotary_base ** _exponents(model) / divisors, self._amplitude)

    def angles_at(self, positions_BS: Tensor, lengths_BS: Tensor | None, num_positions: int) -> Angles:
        short = self._gathered(self._table, positions_BS, num_positions)
        if num_positions <= self._border:
            return short
        if lengths_BS is None:
            lengths_BS = lengths_of(positions_BS)
        is_long_SB = (lengths_BS > self._border).t()[:, :, None, None]
        cos, sin = self._gathered(self._long, positions_BS, num_positions)
        return torch.where(is_long_SB, cos, short[0]), torch.where(is_long_SB, sin, short[1])

    def _of_text(self, length: int, device: torch.device) -> Angles:
        if length <= self._border:
            return super()._of_text(length, device)
        return self._long.rows(length, device)


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK: a base that grows with the length of a text beyond the original one."""

    reads_lengths = True

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        assert model.rope_scaling_factor is not None
        self._factor, self._border = model.rope_scaling_factor, model.rope_scaling_original_length
        self._base, self._power = model.rotary_base, model.rotary_size / (model.rotary_size - 2)
        self._exponents = _exponents(model)
        self._grown: dict[int, _Table] = {}
        """The table of the last length of whole rows beyond the original one."""

    def angles_at(self, positions_BS: Tensor, lengths_BS: Tensor | None, num_positions: int) -> Angles:
        if num_positions <= self._border:
            return super().angles_at(positions_BS, lengths_BS, num_positions)
        # kept there: a pass that is captured as a graph cannot copy from the host
        self._exponents = self._exponents.to(positions_BS.device)
        if lengths_BS is None:
            lengths_BS = lengths_of(positions_BS)
        lengths = lengths_BS.t().clamp(min=self._border).float()
        frequencies = 1.0 / self._base_of(lengths).unsqueeze(-1) ** self._exponents
        angles = positions_BS.t().float().unsqueeze(-1) * frequencies
        return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)

    def _of_text(self, length: int, device: torch.device) -> Angles:
        if length <= self._border:
            return super()._of_text(length, device)
        if length not in self._grown:
            self._grown = {length: _Table(1.0 / self._base_of(length) ** self._exponents.cpu(), 1.0)}
        return self._grown[length].rows(length, device)

    def _base_of(self, length: Any) -> Any:
        """The base in a text of this length, a number or a tensor of them."""
        return self._base * (self._factor * length / self._border - (self._factor - 1)) ** self._power


def rotary_embedding(model: ModelConfig, *, is_local: bool = False) -> RotaryEmbedding:
    """Return the angles that the model has, of layers with a window if `is_local`."""
    if model.rotary_border is None or (is_local and model.rotary_base_local is not None):
        return RotaryEmbedding(model, is_local=is_local)
    if model.rope_scaling_type == "longrope":
        return LongRotaryEmbedding(model)
    return DynamicRotaryEmbedding(model)
