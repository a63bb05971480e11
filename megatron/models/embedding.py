"""The first and the last layers of a decoder: word and position embeddings with NEFTune's noise, output projection.

What flows between layers is the residual stream [rows, B, H], alone or, over packed documents, as the tuple (hidden,
positions, starts) of `Packing`: DeepSpeed's pipeline passes tensors and tuples of tensors between stages. In generation
it is (hidden, tokens), with the `CachedTokens` of the pass. The rows are this rank's of the S places (sequence and
context parallelism); tokens, positions and starts are those of all places.
Source of NEFTune, uniform noise on the embeddings of the training sequences: Jain et al. 2023 (arXiv:2310.05914).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.models.attention.kv_cache import CachedTokens
from megatron.models.attention.layer import Shared
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import LayerNorm, VocabParallelEmbedding
from megatron.parallel.low_rank import output_weight, vocabulary_adapters
from megatron.parallel.mappings import own_places, own_rows
from megatron.parallel.rng import dropout
from megatron.parallel.shards import Shards
from megatron.runtime.devices import device_of

Stream = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, CachedTokens]


def unpack(stream: Stream) -> tuple[Tensor, Packing | CachedTokens | None]:
    """Return the hidden state (or tokens) of what flows between layers, and the places of its tokens."""
    if isinstance(stream, Tensor):
        return stream, None
    if len(stream) == 2:
        return stream
    hidden, positions, starts = stream
    return hidden, Packing(positions, starts)


def repack(hidden: Tensor, stream: Stream) -> Stream:
    """Return `hidden` with what came beside it in `stream`."""
    return hidden if isinstance(stream, Tensor) else (hidden, *stream[1:])


class WordEmbedding(VocabParallelEmbedding):
    """First layer, and under tied weights the last: see VocabParallelEmbedding."""

    def __init__(self, shards: Shards, shared: Shared, *, scales_noise: bool = False) -> None:
        super().__init__(shards, shared.ctx)
        self.noise_alpha = shared.config.training.neftune_noise_alpha
        if self.noise_alpha is not None and scales_noise:
            # EmbeddingOutput multiplies the noise too
            self.noise_alpha /= shared.config.model.embedding_multiplier
        self.logits_cap = shared.config.model.logits_softcap

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        inside, packing = unpack(stream)
        if project is not None:
            return super().forward(inside, project)
        result = super().forward(own_places(inside, self.ctx, dim=1))
        if self.noise_alpha is not None and self.training and not isinstance(packing, CachedTokens):
            result = add_noise(result, inside, packing, self.noise_alpha, self.ctx)
        return repack(result, stream)


class OutputProjection(nn.Module):
    """Last layer of an untied model: passes (hidden, weight) to `project`, which computes the loss or the logits."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx, self.weight = shared.ctx, shards.allocate("weight", shared.ctx)
        self.adapters = vocabulary_adapters(self, shards, shared.ctx)
        self.logits_cap = shared.config.model.logits_softcap

    def forward(self, stream: Stream, project: Callable[[tuple[Tensor, Tensor]], Any] | None = None) -> Any:
        outputs = output_weight(self, unpack(stream)[0])
        return outputs if project is None else project(outputs)


class PositionEmbedding(nn.Module):
    """Learned positions: the table's rows for this rank's rows of the sequence, [rows, 1 or B, H]."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.ctx = shared.ctx
        self.weight = shards.allocate("weight", self.ctx)

    def forward(self, num_rows: int, packing: Packing | CachedTokens | None) -> Tensor:
        if packing is None:
            length = num_rows * self.ctx.context_size * (self.ctx.tensor_size if self.ctx.sequence_parallel else 1)
            return own_rows(self.weight[:length], self.ctx).unsqueeze(1)
        return F.embedding(own_rows(packing.positions_BS.t(), self.ctx), self.weight)


class EmbeddingOutput(nn.Module):
    """Layer after the word embedding: multiplier, learned positions and LayerNorm, where declared, and dropout."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        model = shared.config.model
        self.ctx, self.probability, self.multiplier = shared.ctx, model.hidden_dropout, model.embedding_multiplier
        position, norm = shards.below("position"), shards.below("norm")
        self.position = PositionEmbedding(position, shared) if position else None
        self.norm = LayerNorm(norm, model.norm_epsilon, shared.ctx) if norm else None

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.multiplier != 1.0:
            # rounded as transformers' models round it: in bfloat16 the square root of a width is another number
            hidden = hidden * torch.tensor(self.multiplier, dtype=hidden.dtype, device="cpu").item()
        if self.position is not None:
            hidden = hidden + self.position(hidden.shape[0], packing)
        if self.norm is not None:
            hidden = self.norm(hidden)
        sharded = self.ctx.sequence_parallel
        return repack(dropout(hidden, self.probability, self.training, self.ctx.state.streams, sharded=sharded), stream)


def project_tied(module: WordEmbedding, stream: Stream) -> tuple[Tensor, Tensor]:
    """The tied last layer in a pipeline: (hidden, weight) for the loss function."""
    return module(stream, project=lambda outputs: outputs)


# NEFTune. Each number is drawn from the run's seed, the samples consumed, the sequence's own tokens, the place in it
# and the channel, by integer hashes. So a sequence gets the same noise in every row, on every layout and device and
# after a resume, and tensor-parallel ranks agree without sending anything.
#
# B rows, S places of a row, L tokens of a sequence, H hidden size; all integers are 32 bits wide and wrap around.

CHUNK_NUMBERS = 2**22
"""Numbers drawn at once, which bounds the memory for them."""


@torch.no_grad()
def add_noise(hidden: Tensor, tokens_BS: Tensor, packing: Packing | None, alpha: float, ctx: ParallelContext) -> Tensor:
    """Add uniform noise of ±alpha / sqrt(L x H) to the embeddings [S, B, H], in place.

    `hidden` may be this rank's rows of them, [rows, B, H]. L is the sequence's own length, whatever it is packed or
    padded with: the published code's rule, where transformers takes the row's length.
    """
    streams_SB2, length_SB = _streams(tokens_BS, packing, ctx)
    num_rows, num_batch, size = hidden.shape
    streams_SB2, length_SB = own_rows(streams_SB2, ctx), own_rows(length_SB, ctx)
    limit_SB = alpha / (length_SB * size).sqrt()
    channels_H = torch.arange(1, size + 1, dtype=torch.int32, device=hidden.device)
    at_once = max(1, CHUNK_NUMBERS // (num_batch * size))
    for begin in range(0, num_rows, at_once):
        rows = slice(begin, begin + at_once)
        start_SB, stride_SB = streams_SB2[rows].unsqueeze(-1).unbind(2)
        bits = _mixed(start_SB + stride_SB * channels_H)
        unit = (_shifted(bits, 9).float() + 0.5) * 2.0**-22 - 1.0
        hidden[begin : begin + at_once] += (unit * limit_SB[rows].unsqueeze(-1)).to(hidden.dtype)
    return hidden


def _streams(tokens_BS: Tensor, packing: Packing | None, ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return the start and the odd stride of each token's stream, [S, B, 2], and its sequence's length, [S, B]."""
    device, length = tokens_BS.device, tokens_BS.shape[1]
    index_S = torch.arange(length, dtype=torch.int32, device=device)
    starts_BS = torch.zeros_like(tokens_BS) if packing is None else packing.starts_BS
    place_BS = index_S - starts_BS.int()
    ends_BS = _ends(starts_BS)
    words_BS = _mixed(tokens_BS.int() * _signed(0x9E3779B1) + (place_BS + 1) * _signed(0x85EBCA77))
    # the sum over each sequence: of equal sequences it is equal
    sums_BS = words_BS.cumsum(1, dtype=torch.int32)
    sequence_BS = sums_BS.gather(1, ends_BS) - sums_BS.gather(1, starts_BS) + words_BS.gather(1, starts_BS)
    low, high = _key(ctx.state.streams.step_key, device)
    start_BS = _mixed(_mixed(sequence_BS + low) + (place_BS + 1) * _signed(0xC2B2AE3D))
    stride_BS = _mixed(start_BS ^ high) | 1
    return torch.stack((start_BS.t(), stride_BS.t()), -1), (ends_BS - starts_BS + 1).t().float()


def _ends(starts_BS: Tensor) -> Tensor:
    """Return the place of the last token of each token's sequence, [B, S]."""
    length = starts_BS.shape[1]
    index_BS = torch.arange(length, device=starts_BS.device).expand_as(starts_BS)
    is_last_BS = torch.ones_like(starts_BS, dtype=torch.bool)
    is_last_BS[:, :-1] = starts_BS[:, 1:] != starts_BS[:, :-1]
    return index_BS.masked_fill(~is_last_BS, length).flip(1).cummin(1).values.flip(1)


def _key(key: int, device: torch.device) -> Tensor:
    """Return a step's key as two words. A tensor, since HPU compiles again for another number, and without a wait."""
    words = torch.tensor([_signed(key & 0xFFFFFFFF), _signed(key >> 32)], dtype=torch.int32)
    if device_of(device.type).is_host:
        return words
    return get_accelerator().pin_memory(words).to(device, non_blocking=True)


def _mixed(words: Tensor) -> Tensor:
    """Hash each word, in place. Source: Wellons, "Prospecting for hash functions" (lowbias32)."""
    words ^= _shifted(words, 16)
    words *= _signed(0x7FEB352D)
    words ^= _shifted(words, 15)
    words *= _signed(0x846CA68B)
    words ^= _shifted(words, 16)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return words >> bits of unsigned words, which torch shifts as signed ones."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
