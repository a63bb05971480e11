"""Pretraining: the next token of an indexed dataset, and its cross-entropy.

B samples of a microbatch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.config import DataConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import linear_cross_entropy

Labels = tuple[Tensor, Tensor]
"""Labels [B, S] and token weights [B, S], as the engine hands them to the loss."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads."""

    inputs: Any
    """Tokens [B, S] int64, or (tokens, positions, starts) over packed documents."""
    labels: Tensor
    """[B, S] int64."""
    loss_mask: Tensor
    """[B, S] float32: 1 where the token's loss counts."""
    num_loss_tokens: float
    """Sum of the mask, known on the host."""


class PretrainTask:
    """Next-token prediction over samples of S + 1 tokens."""

    def __init__(self, data: DataConfig, eod: int | None) -> None:
        self.data, self.eod = data, eod

    @property
    def masks_loss(self) -> bool:
        """Whether ranks may hold different numbers of loss tokens."""
        return self.data.eod_mask_loss

    def collate(self, samples: np.ndarray) -> Microbatch:
        """[B, S + 1] int64 -> a microbatch on the host."""
        tokens, labels = samples[:, :-1], samples[:, 1:]
        mask = np.ones(tokens.shape, dtype=np.float32)
        if self.data.eod_mask_loss:
            mask[tokens == self.eod] = 0.0
        inputs: Any = torch.from_numpy(np.ascontiguousarray(tokens))
        if self.data.reset_position_ids or self.data.reset_attention_mask:
            index, starts = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), self._document_starts(tokens)
            positions = index - starts if self.data.reset_position_ids else index
            seen_from = starts if self.data.reset_attention_mask else np.zeros_like(starts)
            inputs = (inputs, torch.from_numpy(positions.copy()), torch.from_numpy(seen_from))
        return Microbatch(
            inputs, torch.from_numpy(np.ascontiguousarray(labels)), torch.from_numpy(mask), float(mask.sum())
        )

    def _document_starts(self, tokens: np.ndarray) -> np.ndarray:
        """[B, S]: where each token's document begins in its sample; the end-of-document token belongs to its own."""
        begins = np.zeros(tokens.shape, dtype=np.int64)
        begins[:, 1:] = np.where(tokens[:, :-1] == self.eod, np.arange(1, tokens.shape[1]), 0)
        return np.maximum.accumulate(begins, axis=1)

    def loss(self, ctx: ParallelContext) -> Callable[[tuple[Tensor, Tensor], Labels], Tensor]:
        """The loss function of the last stage: ((hidden, output weight), (labels, token weights)) -> scalar."""

        def weighted_cross_entropy(outputs: tuple[Tensor, Tensor], labels: Labels) -> Tensor:
            return linear_cross_entropy(*outputs, *labels, ctx)

        return weighted_cross_entropy
