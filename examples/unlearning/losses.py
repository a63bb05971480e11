"""Losses for --loss that make a model forget the first dataset of --data-path and keep the others: README.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.tasks.loss_function import LossBatch

BETA = 0.1
"""The smaller, the further `npo` lets a sample be forgotten before its loss levels off."""


def gradient_ascent(log_probs: Tensor, batch: LossBatch) -> Tensor:
    """Gradient ascent on what is to be forgotten; the other datasets are only measured."""
    return torch.where(batch.sources == 0, log_probs, 0.0 * log_probs)


def gradient_difference(log_probs: Tensor, batch: LossBatch) -> Tensor:
    """Gradient ascent on what is to be forgotten, cross-entropy on the rest (Liu et al. 2022)."""
    return torch.where(batch.sources == 0, log_probs, -log_probs)


def npo(log_probs: Tensor, batch: LossBatch, reference: Tensor) -> Tensor:
    """NPO, negative preference optimization (Zhang et al. 2024), of each sample to be forgotten; else cross-entropy."""
    ratios = batch.sample_sums(log_probs - reference)
    lengths = batch.sample_sums(torch.ones_like(log_probs)).clamp(min=1)
    losses = -2 / BETA * F.logsigmoid(-BETA * ratios) / lengths  # each label has its share of the sample's loss
    return torch.where(batch.sources == 0, losses, -log_probs)


def near_reference(log_probs: Tensor, batch: LossBatch, reference: Tensor) -> Tensor:
    """Gradient ascent on what is to be forgotten; on the rest a divergence from the reference, estimated at the labels.

    The estimate of each label is never negative, and 0 where model and reference agree.
    """
    ratios = reference - log_probs
    return torch.where(batch.sources == 0, log_probs, ratios.exp() - ratios - 1)
