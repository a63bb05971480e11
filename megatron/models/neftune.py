"""NEFTune: uniform noise on the embeddings of the training sequences. Source: Jain et al. 2023 (arXiv:2310.05914).

Each number is drawn from the run's seed, the samples consumed, the sequence's own tokens, the place in it and the
channel, by integer hashes. So a sequence gets the same noise in every row, on every layout and device and after a
resume, and tensor-parallel ranks agree without sending anything.

B rows, S places of a row, L tokens of a sequence, H hidden size; all integers are 32 bits wide and wrap around.
"""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.models.attention import Packing
from megatron.parallel.context import ParallelContext

CHUNK_NUMBERS = 2**22
"""Numbers drawn at once, which bounds the memory for them."""


@torch.no_grad()
def add_noise(hidden: Tensor, tokens_BS: Tensor, packing: Packing | None, alpha: float, ctx: ParallelContext) -> Tensor:
    """Add uniform noise of ±alpha / sqrt(L x H) to the embeddings [S, B, H], in place.

    Under sequence parallelism `hidden` is this rank's rows of them, [S/tp, B, H]. L is the sequence's own length,
    whatever it is packed or padded with: the published code's rule, where transformers takes the row's length.
    """
    streams_SB2, length_SB = _streams(tokens_BS, packing, ctx)
    num_rows, num_batch, size = hidden.shape
    first = ctx.tensor_rank * num_rows if ctx.sequence_parallel else 0
    limit_SB = alpha / (length_SB * size).sqrt()
    channels_H = torch.arange(1, size + 1, dtype=torch.int32, device=hidden.device)
    at_once = max(1, CHUNK_NUMBERS // (num_batch * size))
    for begin in range(0, num_rows, at_once):
        rows = slice(first + begin, first + min(begin + at_once, num_rows))
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
    low, high = _key(ctx.streams.step_key, device)
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
    return words if device.type == "cpu" else get_accelerator().pin_memory(words).to(device, non_blocking=True)


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
