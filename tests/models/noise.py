"""NEFTune's noise a second time: with NumPy's unsigned words, a sequence at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def expected_noise(tokens_L: NDArray[np.int64], key: int, size: int, alpha: float) -> NDArray[np.float32]:
    """[L, H]"""
    places = np.arange(1, len(tokens_L) + 1, dtype=np.uint32)
    words = _hash(tokens_L.astype(np.uint32) * np.uint32(0x9E3779B1) + places * np.uint32(0x85EBCA77))
    sequence = np.array([words.sum(dtype=np.uint64)]).astype(np.uint32)
    low, high = np.uint32(key % 2**32), np.uint32(key // 2**32)
    starts = _hash(_hash(sequence + low) + places * np.uint32(0xC2B2AE3D))
    strides = _hash(starts ^ high) | np.uint32(1)
    channels = np.arange(1, size + 1, dtype=np.uint32)
    bits = _hash(starts[:, None] + strides[:, None] * channels)
    unit = ((bits >> np.uint32(9)).astype(np.float64) + 0.5) / 2**22 - 1
    return (unit * alpha / np.sqrt(len(tokens_L) * size)).astype(np.float32)


def our_noise(tokens_BS: Tensor) -> Callable[[Tensor, float, float], Tensor]:
    """Return what takes the place of torch's `uniform_` in transformers' hook: our numbers between its bounds."""

    def between(into: Tensor, low: float, high: float) -> Tensor:
        assert low == -high
        places, size = into.shape[1:]
        unit = [expected_noise(row, 0, size, np.sqrt(places * size)) for row in tokens_BS.numpy()]
        return into.copy_(torch.from_numpy(np.stack(unit)) * high)

    return between


def _hash(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))
