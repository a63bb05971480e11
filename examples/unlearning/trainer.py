"""A trainer with a loss and a metric of its own, as a task: README.md."""

from typing import Any

from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import token_log_probs
from megatron.tasks.loss_result import LossResult, Metric
from megatron.tasks.sft import SFTTask


class CustomTrainer(SFTTask):
    metrics = ("likely",)

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        labels, weights = targets
        log_probs = token_log_probs(*outputs, labels, ctx)
        likely = (log_probs.detach().exp() > 0.5) * weights
        return LossResult(-(log_probs * weights * scale).sum(), {"likely": Metric(likely.sum(), weights.sum())})
