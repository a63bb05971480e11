"""Losses for --loss that train a student on a stored teacher's likeliest tokens: README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.tasks.loss_function import LossBatch, Teacher


def forward_kl(log_probs: Tensor, batch: LossBatch, teacher: Teacher) -> Tensor:
    """KL(teacher || student) over the teacher's likeliest tokens and, as one more outcome, all others.

    It is never negative and never more than that over the whole vocabulary.
    """
    known = (teacher.log_probs.exp() * (teacher.log_probs - teacher.student_log_probs)).sum(-1)
    rest, student_rest = log_rest(teacher.log_probs), log_rest(teacher.student_log_probs)
    return known + rest.exp() * (rest - student_rest)


def forward_kl_and_labels(log_probs: Tensor, batch: LossBatch, teacher: Teacher) -> Tensor:
    """Half of that, and half of the cross-entropy of the labels."""
    return 0.5 * forward_kl(log_probs, batch, teacher) - 0.5 * log_probs


def log_rest(log_probs: Tensor) -> Tensor:
    """Return the logarithm of what probabilities [..., K] leave of 1, [...]; at least that of one in a million."""
    total = log_probs.logsumexp(-1).clamp(max=-1e-6)
    return torch.log(-torch.expm1(total))
