"""The loss of a user's Trainer, `--trainer FILE.py:Class`, on any layout: compute_loss is called sample by sample.

B rows of a microbatch, S tokens of a row; N samples in it, of at most L labels; V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.options.config import Config
from megatron.tasks import loss_function
from megatron.tasks.data import Microbatch
from megatron.tasks.loss_result import LossError, Metric
from megatron.tasks.trainer.probe import TrainerUse, trainer_use
from megatron.tasks.trainer.stand_ins import LossCall, computed_loss
from megatron.tasks.trainer.user_class import VALIDATES, UserTrainer, load_trainer
from megatron.tasks.user_loss import Targets, UserLoss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.parallel.context import ParallelContext


@dataclasses.dataclass(frozen=True)
class TrainerFunction(loss_function.LossFunction):
    """A trainer's compute_loss as a loss function of rows, or of their logits."""

    trainer: UserTrainer
    use: TrainerUse

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.use.takes, "batch", "inputs"

    @property
    def file(self) -> str:
        return self.trainer.file

    @property
    def label(self) -> str:
        return f"trainer={self.name}"


class TrainerLoss(UserLoss):
    """A trainer's loss of each sample, by itself; their mean over labels or samples is that of the global batch."""

    function: TrainerFunction

    def _load(self, config: Config) -> loss_function.LossFunction:
        name = config.training.trainer
        assert name is not None
        trainer, use = load_trainer(name), trainer_use(name, config.model.vocab_size)
        call = partial(_losses, trainer, use, config.model.vocab_size)
        return TrainerFunction(name, call, {}, {}, trainer, use)

    @property
    def _unit(self) -> str:
        return self.function.use.unit

    @property
    def takes_rows(self) -> bool:
        return True

    def idle(self) -> Iterator[str]:
        line = self.function.trainer.line_of(VALIDATES)
        if line:
            yield (
                f"{VALIDATES}{line} of {self.function.label} has no effect: a validation computes compute_loss, and "
                "nll, the cross-entropy, beside it"
            )

    def completed(self, dataset: Any, key: Any, batch: Microbatch) -> Microbatch:
        batch = super().completed(dataset, key, batch)
        # to the last stage of a pipeline too: targets hold no first token
        tokens = batch.inputs[0] if isinstance(batch.inputs, tuple) else batch.inputs
        return batch.with_targets(tokens)

    def _targets(self, targets: Any) -> Targets:
        *targets, tokens = targets
        return dataclasses.replace(super()._targets(targets), inputs=tokens)

    def _inputs(
        self, outputs: tuple[Tensor, Tensor], given: Targets, ctx: ParallelContext
    ) -> tuple[Tensor, dict[str, Any], dict[str, Metric]]:
        assert given.inputs is not None
        # -1: no token
        extras = {"inputs": loss_function.rows_of(given.inputs, given.places, -1)}
        if self.function.takes == "rows":
            first, _, nll = super()._inputs(outputs, given, ctx)
        else:
            first, nll = self._logits(outputs, given, ctx)
        return first, extras, nll

    def _logits(
        self, outputs: tuple[Tensor, Tensor], given: Targets, ctx: ParallelContext
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the logits of each sample [N, L, V], and the metrics of the log-probabilities."""
        import torch

        from megatron.parallel.chosen_log_probs import whole_logits
        from megatron.parallel.finite_checks import LOSS_INPUT

        with torch.no_grad():
            nll = self._nll(self.log_probs(outputs, (given.labels,), ctx), given)
        logits = whole_logits(*outputs, ctx)
        left_out = (given.weights == 0).unsqueeze(-1)
        ctx.state.checks.whole(logits.masked_fill(left_out, 0.0), LOSS_INPUT)
        if logits.requires_grad:
            # in backward rather than by a copy: the gradient of 0 times an infinite one would be NaN
            logits.register_hook(lambda grad: grad.masked_fill(left_out, 0.0))
        return loss_function.rows_of(self._watched(logits, ctx), given.places, 0.0), nll


def _losses(
    trainer: UserTrainer,
    use: TrainerUse,
    vocab_size: int,
    first: Tensor,
    batch: loss_function.LossBatch,
    inputs: Tensor,
) -> Tensor:
    """Return the loss of each sample [N], from the log-probabilities of labels [N, L], or logits [N, L, V]."""
    import torch
    import torch.nn.functional as F

    assert batch.tokens is not None
    is_token = inputs >= 0
    ids = torch.cat([inputs[:, :1].clamp(min=0), batch.tokens], 1)
    mask = torch.cat([is_token[:, :1], is_token], 1).long()
    # a sample without a label in the loss counts for nothing, and a mean over no labels may be an error
    is_left_out = (batch.weights == 0).all(1, keepdim=True)
    labels = F.pad(torch.where(is_left_out, batch.tokens, batch.labels), (1, 0), value=loss_function.IGNORED)
    weights = torch.where(is_left_out, 1.0, batch.weights)
    counts = (labels != loss_function.IGNORED).sum(1)
    results = []
    for sample in range(len(ids)):
        own = slice(sample, sample + 1)
        given = {"input_ids": ids[own], "attention_mask": mask[own], "labels": labels[own]}
        # each its own memory, since the user's code may write into it
        given = {name: tensor.clone() for name, tensor in given.items()}
        call = LossCall(trainer, given, counts[sample].clone(), vocab_size, partial(_unforeseen_logits, trainer))
        if use.takes == "logits":
            # behind the last token none is predicted
            call.logits = partial(F.pad, first[own], (0, 0, 0, 1))
            call.loss = partial(_mean_loss, first[own], labels[own])
        else:
            call.loss = partial(_mean_of, -first[own], weights[own])
        results.append(computed_loss(call))
    return torch.stack(results).float()


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of one sample: of logits [1, L, V] and labels [1, L + 1]."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _mean_of(losses: Tensor, weights: Tensor) -> Tensor:
    import torch

    # what is left out may be infinite
    return torch.where(weights == 0, 0.0, losses * weights).sum() / weights.sum()


def _unforeseen_logits(trainer: UserTrainer) -> Tensor:
    raise LossError(
        f"trainer={trainer.name} uses logits, or other labels than its own, of some samples alone, which were not "
        "computed; use them of each, or of none"
    )
