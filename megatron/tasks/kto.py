"""Objectives of single answers, as functions of log-probabilities: KTO and APO-zero. No data, no engine.

A answers of a microbatch. All tensors are float32, of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.preference import PreferenceConfig
from megatron.parallel.context import ParallelContext
from megatron.tasks.loss_result import Metric
from megatron.tasks.preference_losses import split_targets


def unpaired_loss(
    logps_A: Tensor, targets: Sequence[Tensor], options: PreferenceConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """Return the sum of the losses of a microbatch's answers, and the metrics.

    `logps_A`: the sums over the tokens of the answers. `targets`: those of `PreferenceTask.read`, with the reference's
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
    has_both = (counts > 0).all().float()
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
    if ctx.batch_group is not None:
        dist.all_reduce(total, group=ctx.batch_group)
    return (total / num_answers).clamp(min=0)
