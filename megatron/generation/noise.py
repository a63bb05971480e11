"""Random numbers that depend on a key alone, not on what else is drawn, where or in which order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Key = tuple[int, ...]


def exponentials(keys: Sequence[Key], count: int) -> Tensor:
    """Return [keys, count] independent exponential variables of mean 1 in float32 on the CPU, a row for each key.

    SHAKE-128 of the key is the generator: a row is the same on every machine and in every batch. 32 bits for each
    number, of which none is 0.
    """
    if not keys:
        return torch.empty(0, count)
    rows = b"".join(hashlib.shake_128(repr(key).encode()).digest(4 * count) for key in keys)
    uniform = (np.frombuffer(rows, dtype="<u4").astype(np.float64) + 0.5) * 2.0**-32
    return torch.from_numpy(-np.log(uniform)).to(torch.float32).view(len(keys), count)


class Draws:
    """Draws of one id from each row of a batch of distributions, by keys.

    A row of V probabilities is drawn from in two steps: a block of about sqrt(V) ids, then an id in it. In each step
    the largest quotient of a probability and an exponential variable wins, which chooses in proportion to the
    probabilities. So a draw needs 2 sqrt(V) random numbers, and probabilities that differ by rounding, as on another
    layout, give another id only where two quotients are as close as that. Inverting the cumulative distribution would
    add up the roundings of all V.
    """

    def __init__(self, vocab_size: int):
        self.block = math.isqrt(vocab_size - 1) + 1
        self.num_blocks = -(-vocab_size // self.block)
        self.padded_size = self.num_blocks * self.block
        """Ids with those that fill the last block; their probabilities must be 0."""

    def draw(self, weights_BV: Tensor, keys: Sequence[Key]) -> Tensor:
        """Return ids, int64 [B], drawn in proportion to weights: float32 [B, padded_size], not negative, of any sum."""
        batch = len(keys)
        noise = exponentials(keys, self.num_blocks + self.block).to(weights_BV.device)
        blocks_BNK = weights_BV.view(batch, self.num_blocks, self.block)
        chosen_B = (blocks_BNK.sum(dim=2) / noise[:, : self.num_blocks]).argmax(dim=1)
        rows_BK = blocks_BNK[torch.arange(batch, device=weights_BV.device), chosen_B]
        return chosen_B * self.block + (rows_BK / noise[:, self.num_blocks :]).argmax(dim=1)
