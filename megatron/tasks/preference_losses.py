"""Objectives over pairs of answers, as functions of log-probabilities. No data, no engine.

P pairs of a microbatch, A = 2 P answers, K labels of their tokens. All are float32, of the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.options.preference import PreferenceConfig
from megatron.parallel.chosen_log_probs import log_probs_of
from megatron.parallel.context import ParallelContext
from megatron.tasks.loss_result import Metric

LARGEST_EXPONENT = 80.0
"""Limit of a divergence, whose exp() is finite in float32. As in TRL."""


class AnswerLabels(NamedTuple):
    """The first targets of a microbatch, those of `PreferenceData.sequences`."""

    labels_K: Tensor
    numbers_K: Tensor
    places_K: Tensor
    lengths_A: Tensor
    weights_K: Tensor
    own: Tensor
    """Numbers of the labels that this rank computes, of ranks that share rows."""

    def sums(self, values_K: Tensor) -> Tensor:
        """Return the sum of values over the tokens of each answer, [A]."""
        # one more for a microbatch without answers, whose tokens are all padding
        sums = torch.zeros(len(self.lengths_A) + 1, dtype=values_K.dtype, device=values_K.device)
        return sums.index_add(0, self.numbers_K, values_K)[:-1]


def split_targets(targets: Sequence[Tensor]) -> tuple[AnswerLabels, Sequence[Tensor]]:
    """Return the labels of a microbatch's answers, and the targets after them."""
    count = len(AnswerLabels._fields)
    return AnswerLabels(*targets[:count]), targets[count:]


def label_logps(outputs: tuple[Tensor, Tensor], labels: AnswerLabels, ctx: ParallelContext) -> Tensor:
    """Return the log-probability of each token of the answers, [K]. `outputs` as in `Objective.loss`."""
    return log_probs_of(labels.places_K, *outputs, labels.labels_K, ctx, labels.own)


def answer_logps(outputs: tuple[Tensor, Tensor], targets: Sequence[Tensor], ctx: ParallelContext) -> Tensor:
    """Return the log-probabilities [A] of the answers of a microbatch, each the weighted sum over its tokens.

    `outputs` as in `Objective.loss`; `targets` begin with those of `PreferenceData.sequences`.
    """
    labels, _ = split_targets(targets)
    return labels.sums(label_logps(outputs, labels, ctx) * labels.weights_K)


@dataclass(frozen=True)
class PairScores:
    """Input of an objective: the model and its reference on the answers of P pairs, the chosen and the rejected one."""

    ratios_P2: Tensor
    """Log-probabilities beyond the reference's; without one the log-probabilities, sums or means over tokens."""
    scores_P2: Tensor
    """The ratios as the divergence measures them; the ratios themselves for reverse_kl."""
    lengths_P2: Tensor
    """Tokens of the answers, at least 1."""

    @property
    def margins_P(self) -> Tensor:
        return self.scores_P2[:, 0] - self.scores_P2[:, 1]

    @property
    def mean_margins_P(self) -> Tensor:
        """The difference of the means over the tokens of an answer."""
        means_P2 = self.scores_P2 / self.lengths_P2
        return means_P2[:, 0] - means_P2[:, 1]

    def rewards(self, beta: float) -> tuple[Tensor, Tensor]:
        """Return those of the chosen and of the rejected answers, [P] each."""
        return beta * self.ratios_P2[:, 0], beta * self.ratios_P2[:, 1]


def paired_loss(
    logps_A: Tensor, targets: Sequence[Tensor], options: PreferenceConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the sum of the losses of a microbatch's pairs, and the metrics.

    `logps_A`: those of `answer_logps`. `targets`: those of `PreferenceData.read`, with the reference's.
    """
    labels, rest = split_targets(targets)
    # answers of a pair follow each other, [chosen, rejected, chosen, ...]; an answer may have been cut to nothing
    logps_P2, lengths_P2 = logps_A.view(-1, 2), labels.lengths_A.view(-1, 2).clamp(min=1)
    if options.needs.takes_means:
        logps_P2 = logps_P2 / lengths_P2
    # rest: is_chosen [A], step [3], reference [A]
    ratios_P2 = logps_P2 - rest[2].view(-1, 2) if options.needs_reference else logps_P2
    scores = PairScores(ratios_P2, divergence(ratios_P2, options), lengths_P2)
    rewards_P2, logps_P2 = (options.beta * ratios_P2).detach(), logps_P2.detach()
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


def divergence(ratios: Tensor, options: PreferenceConfig) -> Tensor:
    """Return f'(exp(ratio)) of the f-divergence. Source: Wang et al. 2023 (arXiv:2309.16240), table 1."""
    match options.f_divergence:
        case "forward_kl":
            # f'(u) = -1/u with u = exp(ratio), and 1 more, which the difference of two scores drops: -exp(-r) + 1
            return -torch.expm1((-ratios).clamp(max=LARGEST_EXPONENT))
        case "js_divergence":
            # f'(u) = log(2 u / (1 + u))
            return math.log(2) + F.logsigmoid(ratios)
        case "alpha_divergence" if options.f_alpha != 1:
            # f'(u) = (u^(alpha - 1) - 1) / (alpha - 1); for alpha = 1 log(u), the ratio
            power = options.f_alpha - 1
            return torch.expm1((power * ratios).clamp(max=LARGEST_EXPONENT)) / power
    return ratios


def sigmoid(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """DPO. Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7.

    With label smoothing cDPO. Source: Mitchell 2023 (ericmitchell.ai/cdpo.pdf).
    """
    return _smoothed(options.beta * scores.margins_P, options)


def sigmoid_norm(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """DPO over the mean log-probability of a token. Source: Lambert et al. 2024 (arXiv:2411.15124)."""
    return -F.logsigmoid(options.beta * scores.mean_margins_P)


def robust(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """Unbiased under wrong pairs. Source: Chowdhury et al. 2024 (arXiv:2403.00409), equation 9."""
    logits, wrong = options.beta * scores.margins_P, options.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(logits) + wrong * F.logsigmoid(-logits)) / (1 - 2 * wrong)


def hinge(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """SLiC's hinge on DPO's margins. Source: Liu et al. 2023 (arXiv:2309.06657)."""
    return torch.relu(1 - options.beta * scores.margins_P)


def ipo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """IPO over the mean log-probability of a token. Source: Azar et al. 2023 (arXiv:2310.12036), equation 17."""
    return (scores.mean_margins_P - 1 / (2 * options.beta)) ** 2


def exo_pair(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """EXO over two answers. Source: Ji et al. 2024 (arXiv:2402.00856), equation 16."""
    logits, wrong = options.beta * scores.margins_P, options.label_smoothing
    chosen, rejected = F.logsigmoid(logits), F.logsigmoid(-logits)
    return chosen.exp() * (chosen - math.log1p(-wrong)) + rejected.exp() * (rejected - math.log(wrong))


def discopop(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """DiscoPOP's blend of two losses. Source: Lu et al. 2024 (arXiv:2406.08414), equation 5."""
    logits = options.beta * scores.margins_P
    blend = logits / options.discopop_tau
    # sigmoid(blend) * exp(-logits) in one, which is 0 times infinity otherwise
    exponential = torch.exp(F.logsigmoid(blend) - logits)
    return exponential - torch.sigmoid(-blend) * F.logsigmoid(logits)


def nca_pair(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """NCA over two answers. Source: Chen et al. 2024 (arXiv:2402.05369)."""
    chosen, rejected = scores.rewards(options.beta)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """BCO over pairs, with a shift of rewards of 0, as in TRL. Source: Jung et al. 2024 (arXiv:2404.04656)."""
    chosen, rejected = scores.rewards(options.beta)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """SPPO where the chosen answer always wins. Source: Wu et al. 2024 (arXiv:2405.00675), equation 4.7."""
    chosen, rejected = scores.ratios_P2.unbind(1)
    return (chosen - 0.5 / options.beta) ** 2 + (rejected + 0.5 / options.beta) ** 2


def apo_zero(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """APO-zero. Source: D'Oosterlinck et al. 2024 (arXiv:2408.06266), equation 7."""
    chosen, rejected = scores.rewards(options.beta)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """APO-down, for answers that are worse than the model's own. Source: as apo_zero, equation 8."""
    chosen, rejected = scores.rewards(options.beta)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def orpo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """The odds ratio of ORPO. Source: Hong et al. 2024 (arXiv:2403.07691), equation 7."""
    # log odds(p) = log p - log(1 - p) of the mean log-probability of a token
    odds_P2 = scores.ratios_P2 - _log1mexp(scores.ratios_P2)
    return -options.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


def simpo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """SimPO. Source: Meng et al. 2024 (arXiv:2405.14734), equation 6."""
    return _smoothed(options.beta * scores.margins_P - options.simpo_gamma, options)


def cpo(scores: PairScores, options: PreferenceConfig) -> Tensor:
    """The preference term of CPO. Source: Xu et al. 2024 (arXiv:2401.08417), equation 3."""
    return _smoothed(options.beta * scores.margins_P, options)


def _smoothed(logits: Tensor, options: PreferenceConfig) -> Tensor:
    """-log sigmoid of the logits where a share of the pairs, label_smoothing, is the wrong way round."""
    wrong = options.label_smoothing
    return -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, with the digits of both small and large probabilities."""
    x = x.clamp(max=-1e-7)  # a probability that rounds to 1
    # log 2: Maechler's rule for which of expm1 and log1p keeps the digits
    is_near_0 = x > -0.693
    # both branches are computed, and a gradient of infinity times 0 is NaN: each gets arguments that it can bear
    return torch.where(
        is_near_0,
        torch.log(-torch.expm1(torch.where(is_near_0, x, -0.1))),
        torch.log1p(-torch.exp(torch.where(is_near_0, -1.0, x))),
    )


PAIR_LOSSES: dict[str, Callable[[PairScores, PreferenceConfig], Tensor]] = {
    function.__name__: function
    for function in (
        *(sigmoid, sigmoid_norm, robust, hinge, ipo, exo_pair, discopop),
        *(nca_pair, bco_pair, sppo_hard, apo_zero, apo_down),
        *(orpo, simpo, cpo),
    )
}
"""Loss [P] of each pair, by preference_loss. `options/preference.py` has what each reads."""


# ---------------------------------------------------------------------------------------------------------------------
# Objectives of single answers, as functions of log-probabilities: KTO and APO-zero. No data, no engine.
#
# A answers of a microbatch. All tensors are float32, of the device.


def unpaired_loss(
    logps_A: Tensor, targets: Sequence[Tensor], options: PreferenceConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the sum of the losses of a microbatch's answers, and the metrics.

    `logps_A`: the sums over the tokens of the answers. `targets`: those of `PreferenceData.read`, with the reference's
    and, for KTO, the KL term. Source: Ethayarajh et al. 2024 (arXiv:2402.01306), equation 7; without the KL term
    APO-zero, each term by itself: D'Oosterlinck et al. 2024 (arXiv:2408.06266).
    """
    _, (is_chosen_A, step, reference_A, *kl_term) = split_targets(targets)
    kl = kl_term[0] if options.needs_kl else torch.zeros((), device=logps_A.device)
    ratios_A = logps_A - reference_A
    lead_A = options.beta * (ratios_A - kl)
    losses_A = torch.where(
        is_chosen_A,
        options.desirable_weight * torch.sigmoid(-lead_A),
        options.undesirable_weight * torch.sigmoid(lead_A),
    )
    rewards_A = (options.beta * ratios_A).detach()
    return losses_A.sum(), _metrics(rewards_A, logps_A.detach(), is_chosen_A, step[1:], kl)


def _metrics(rewards_A: Tensor, logps_A: Tensor, is_chosen_A: Tensor, counts: Tensor, kl: Tensor) -> dict[str, Metric]:
    """Return the metrics of a microbatch. `counts` [2]: chosen and rejected answers of the step.

    The margin is the difference of the mean rewards, of a step that has both.
    """
    num_answers, num_chosen = len(logps_A), is_chosen_A.sum().float()
    num_rejected = num_answers - num_chosen
    # a step with answers of one kind has no difference of means, so its weight in the mean over the interval is 0
    has_both = (counts > 0).all().float()
    # mean of chosen minus mean of rejected over the step, as a sum that microbatches and ranks add up
    by_kind_A = torch.where(is_chosen_A, 1 / counts[0].clamp(min=1), -1 / counts[1].clamp(min=1))

    def of(values_A: Tensor, *, chosen: bool) -> Metric:
        kept_A = torch.where(is_chosen_A == chosen, values_A, 0)
        return Metric(kept_A.sum(), num_chosen if chosen else num_rejected)

    return {
        "rewards/margins": Metric((rewards_A * by_kind_A).sum() * has_both, has_both * num_answers / counts.sum()),
        "rewards/chosen": of(rewards_A, chosen=True),
        "rewards/rejected": of(rewards_A, chosen=False),
        "kl": Metric(kl * num_answers, float(num_answers)),
        "logps/chosen": of(logps_A, chosen=True),
        "logps/rejected": of(logps_A, chosen=False),
    }


def mean_kl(policy: Sequence[Tensor], reference: Sequence[Tensor], num_answers: float, ctx: ParallelContext) -> Tensor:
    """Return the mean log-ratio of mismatched answers over the `num_answers` of all ranks, at least 0. Collective.

    Each entry is that of a microbatch, [A]. On the last pipeline stage.
    """
    total = torch.stack([(one - other).sum() for one, other in zip(policy, reference, strict=True)]).sum()
    # in a recheck a wrong term of one replica must not reach the others
    if ctx.batch_group is not None and not ctx.state.is_recheck:
        dist.all_reduce(total, group=ctx.batch_group)
    # at least 0, as a divergence is; an estimate from samples may be below
    return (total / num_answers).clamp(min=0)
