"""Scales of a set of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class FP8TensorMeta:
    """Scales of several tensors, and the largest absolute values from which they follow, newest first."""

    def __init__(self, history_len: int, num_tensors: int, device: torch.device) -> None:
        self.scale = torch.ones(num_tensors, device=device)
        self.scale_inv = torch.ones(num_tensors, device=device)
        self.amax_history = torch.zeros(history_len, num_tensors, device=device)

    def resize(self, history_len: int) -> None:
        kept = self.amax_history[:history_len]
        self.amax_history = torch.cat([kept, kept.new_zeros(history_len - len(kept), kept.shape[1])])

    def measure(self, index: int, amax: Tensor) -> None:
        self.amax_history[:, index] = self.amax_history[:, index].roll(1)
        self.amax_history[0, index] = amax

    def update(self, largest: float, algorithm: str, margin: int) -> None:
        amax = self.amax_history.amax(0) if algorithm == "max" else self.amax_history[0]
        self.scale = scale_of(amax, self.scale, largest, margin)
        self.scale_inv = 1 / self.scale


def scale_of(amax: Tensor, scale: Tensor, largest: float, margin: int) -> Tensor:
    """The power of two that brings amax below the format's largest number; as before where amax is 0 or not finite."""
    exponent = (largest / amax).log2().floor() - margin
    return torch.where((amax > 0) & amax.isfinite(), exponent.exp2(), scale)
