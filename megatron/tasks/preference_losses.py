"""Objectives of preference training, as functions of log-probabilities. No data, no engine.

P pairs of a microbatch. All are float32, of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.preference import PreferenceConfig


@dataclass(frozen=True)
class PairScores:
    """Input of an objective: the model and its reference on the answers of P pairs."""

    logps_P2: Tensor
    """Log-probabilities of the chosen and the rejected answer, each the sum over its tokens."""
    reference_P2: Tensor
    """The same under the reference."""
    lengths_P2: Tensor
    """Tokens of the answers."""

    @property
    def ratios_P2(self) -> Tensor:
        return self.logps_P2 - self.reference_P2

    @property
    def margins_P(self) -> Tensor:
        return self.ratios_P2[:, 0] - self.ratios_P2[:, 1]


def sigmoid(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """DPO. Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7."""
    return -F.logsigmoid(options.beta * scores.margins_P)


def hinge(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """SLiC's hinge on DPO's margins. Source: Liu et al. 2023 (arXiv:2309.06657)."""
    return torch.relu(1 - options.beta * scores.margins_P)


def ipo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """IPO over the mean log-probability of a token. Source: Azar et al. 2023 (arXiv:2310.12036), equation 17."""
    means_P2 = scores.ratios_P2 / scores.lengths_P2.clamp(min=1)
    return (means_P2[:, 0] - means_P2[:, 1] - 1 / (2 * options.beta)) ** 2


def robust(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """Unbiased under wrong pairs. Source: Chowdhury et al. 2024 (arXiv:2403.00409), equation 9."""
    logits, wrong = options.beta * scores.margins_P, options.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(logits) + wrong * F.logsigmoid(-logits)) / (1 - 2 * wrong)


PAIR_LOSSES: dict[str, Callable[[PairScores, PreferenceConfig], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
}
"""Loss [P] of each pair, by preference_loss."""
