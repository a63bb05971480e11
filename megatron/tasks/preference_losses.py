"""Objectives over pairs of answers, as functions of log-probabilities. No data, no engine.

P pairs of a microbatch. All are float32, of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.preference import PreferenceConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import log_probs_of
from megatron.tasks.loss_result import Metric


def answer_logps(outputs: tuple[Tensor, Tensor], targets: Sequence[Tensor], ctx: ParallelContext) -> Tensor:
    """Return the log-probabilities [A] of the answers of a microbatch, each the sum over its tokens.

    `outputs` as in `Task.loss`; `targets` begin with those of `PreferenceTask.sequences`.
    """
    labels_K, numbers_K, places_K, lengths_A = targets[:4]
    logps_K = log_probs_of(places_K, *outputs, labels_K, ctx)
    # one more for a microbatch without answers, whose tokens are all padding
    sums = torch.zeros(len(lengths_A) + 1, dtype=logps_K.dtype, device=logps_K.device)
    return sums.index_add(0, numbers_K, logps_K)[:-1]


def paired_loss(
    logps_A: Tensor, targets: Sequence[Tensor], options: PreferenceConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the sum of the losses of a microbatch's pairs, and the metrics.

    `logps_A`: those of `answer_logps`. `targets`: those of `PreferenceTask.read`, with the reference's.
    """
    logps_P2, lengths_P2 = logps_A.view(-1, 2), targets[3].view(-1, 2)
    scores = (
        PairScores(logps_P2, targets[6].view(-1, 2), lengths_P2)
        if options.needs_reference
        else PairScores(logps_P2 / lengths_P2.clamp(min=1), 0.0, lengths_P2)
    )
    rewards_P2, logps_P2 = (options.beta * scores.ratios_P2).detach(), scores.logps_P2.detach()
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    values = {
        "rewards/accuracies": (margins_P > 0).float(),
        "rewards/margins": margins_P,
        "rewards/chosen": rewards_P2[:, 0],
        "rewards/rejected": rewards_P2[:, 1],
        "logps/chosen": logps_P2[:, 0],
        "logps/rejected": logps_P2[:, 1],
    }
    metrics = {name: Metric(value.sum(), float(len(value))) for name, value in values.items()}
    return PAIR_LOSSES[options.preference_loss](scores, options).sum(), metrics


@dataclass(frozen=True)
class PairScores:
    """Input of an objective: the model and its reference on the answers of P pairs."""

    logps_P2: Tensor
    """Log-probabilities of the chosen and the rejected answer: the sum over tokens, or without a reference the mean."""
    reference_P2: Tensor | float
    """The same under the reference; 0 without one."""
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


def orpo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """The odds ratio of ORPO. Source: Hong et al. 2024 (arXiv:2403.07691), equation 7."""
    odds_P2 = scores.logps_P2 - _log1mexp(scores.logps_P2)
    return -options.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


def simpo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """SimPO. Source: Meng et al. 2024 (arXiv:2405.14734), equation 6."""
    return -F.logsigmoid(options.beta * scores.margins_P - options.simpo_gamma)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, with the digits of both small and large probabilities."""
    x = x.clamp(max=-1e-7)  # a probability that rounds to 1
    is_near_0 = x > -0.693
    return torch.where(
        is_near_0,
        torch.log(-torch.expm1(torch.where(is_near_0, x, -0.1))),
        torch.log1p(-torch.exp(torch.where(is_near_0, -1.0, x))),
    )


PAIR_LOSSES: dict[str, Callable[[PairScores, PreferenceConfig], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "orpo": orpo,
    "simpo": simpo,
}
"""Loss [P] of each pair, by preference_loss."""
