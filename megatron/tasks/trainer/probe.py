"""Measurement on made-up samples whether the loss of a user's trainer is a mean over labels or over samples.

A trainer is called with each sample alone, so that its loss cannot depend on how samples are divided among microbatches
and ranks. That this is the loss that it has of several samples together, as in transformers, is what is measured here.
N samples, of at most L + 1 tokens; V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.options.config import ConfigError
from megatron.tasks.loss_function import IGNORED
from megatron.tasks.loss_result import LossError
from megatron.tasks.trainer.stand_ins import LossCall, computed_loss
from megatron.tasks.trainer.user_class import GUIDE, UserTrainer, load_trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Unit = Literal["tokens", "samples"]
LENGTHS = (9, 5, 7, 4)
"""Tokens of the samples."""
QUESTIONS = (3, 3, 1, 2)
"""Tokens at their beginnings that are not in the loss: the samples have 6, 2, 6 and 2 labels in it."""
SURENESS = ((0, 0, 0, 0), (6, -30, 0, 12), (12, 6, 9, 0), (-90, 4, 12, -30))
"""Numbers added to the logit of each label of a sample, in each set: losses from 0 to 100, so that a bound on the loss,
or another formula from some loss on, is met."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class TrainerUse:
    """Input of a trainer's loss, and the unit that it is a mean over."""

    takes: Literal["rows", "logits"]
    unit: Unit


@dataclass
class _Computed:
    """Loss of some samples, and its gradient by their logits."""

    loss: float
    gradient: Tensor
    """[N, L + 1, V]"""

    def equals(self, other: _Computed) -> bool:
        size = max(abs(self.loss), abs(other.loss), 1e-3)
        # written so that NaN is unequal
        return abs(self.loss - other.loss) <= TOLERANCE * size and self._same_gradient(other)

    def _same_gradient(self, other: _Computed) -> bool:
        ours, theirs = self.gradient, other.gradient
        size = max(float(ours.abs().max()), float(theirs.abs().max()), 1e-6)
        return bool((ours - theirs).abs().max() <= TOLERANCE * size)


@dataclass
class _Samples:
    """Samples side by side, as a collator of transformers fills them up."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    logits: Tensor

    @classmethod
    def made(cls, sureness: tuple[int, ...], vocab_size: int, generator: torch.Generator) -> _Samples:
        import torch

        shape = len(LENGTHS), max(LENGTHS)
        ids = torch.randint(vocab_size, shape, generator=generator)
        logits = torch.randn(*shape, vocab_size, generator=generator)
        # the logits at a token predict the next one
        added = torch.tensor(sureness, dtype=torch.float32)[:, None, None].expand(shape[0], shape[1] - 1, 1)
        logits[:, :-1].scatter_add_(2, ids[:, 1:, None], added)
        places = torch.arange(shape[1])
        mask = (places < torch.tensor(LENGTHS)[:, None]).long()
        in_loss = (mask == 1) & (places >= torch.tensor(QUESTIONS)[:, None])
        return cls(ids * mask, torch.where(in_loss, ids, IGNORED), mask, logits)

    def alone(self, sample: int, length: int) -> _Samples:
        parts = (self.ids, self.labels, self.mask, self.logits)
        return _Samples(*(part[sample : sample + 1, :length].clone() for part in parts))

    @property
    def counts(self) -> Tensor:
        return (self.labels[:, 1:] != IGNORED).sum(1)

    @property
    def matters(self) -> Tensor:
        """True where the logits at a token predict a label in the loss, [N, L + 1]."""
        import torch

        return torch.nn.functional.pad(self.labels[:, 1:] != IGNORED, (0, 1))

    def with_first_labels(self) -> _Samples:
        """Return samples whose first tokens are labels too, as those of a collator that copies the tokens."""
        labels = self.labels.clone()
        labels[:, 0] = self.ids[:, 0]
        return _Samples(self.ids, labels, self.mask, self.logits)


def trainer_use(name: str, vocab_size: int) -> TrainerUse:
    """Return how a trainer's loss is computed. Raises ConfigError for one that is not a mean over labels or samples."""
    return _measured(load_trainer(name), vocab_size)


@functools.cache
def _measured(trainer: UserTrainer, vocab_size: int) -> TrainerUse:
    label = f"trainer={trainer.name}"
    try:
        return _Probe(trainer, vocab_size).use()
    except LossError as error:
        raise ConfigError([str(error)]) from error
    except Exception as error:  # the user's code may raise anything
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == trainer.file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ConfigError(
            [f"{label} raised {type(error).__name__}: {error}{where}; it was called with made-up samples on the CPU"]
        ) from error


class _Probe:
    def __init__(self, trainer: UserTrainer, vocab_size: int) -> None:
        self._trainer, self._vocab_size = trainer, vocab_size
        self._label = f"trainer={trainer.name}"
        self._used: set[str] = set()

    def use(self) -> TrainerUse:
        import torch

        generator = torch.Generator().manual_seed(0)
        sets = [_Samples.made(sureness, self._vocab_size, generator) for sureness in SURENESS]
        fitting: set[str] = {"tokens", "samples", "sum"}
        for samples in sets:
            fitting &= set(self._fitting(samples))
        for unit in ("tokens", "samples"):
            if unit in fitting:
                return TrainerUse("logits" if "logits" in self._used else "rows", unit)
        if fitting:
            raise LossError(
                f"{self._label} returns a sum, which grows with the number of samples in a microbatch; return the mean "
                "over the labels or over the samples"
            )
        raise LossError(
            f"{self._label} has a loss of several samples that is neither the mean over their labels nor over the "
            "samples, of what it is for each: it would depend on how they are divided among microbatches and ranks. "
            f"Return such a mean, or write a loss function ({GUIDE})"
        )

    def _fitting(self, samples: _Samples) -> Iterator[str]:
        """Yield the means, or the sum, of the single samples' losses that the loss of all is."""
        together = self._computed(samples)
        self._check_independence(samples, together)
        count = len(LENGTHS)
        single = [self._computed(samples.alone(sample, max(LENGTHS))) for sample in range(count)]
        for sample, length in enumerate(LENGTHS):
            exact, filled = self._computed(samples.alone(sample, length)), single[sample]
            filled = _Computed(filled.loss, filled.gradient[:, :length])
            if not exact.equals(filled):
                raise LossError(
                    f"{self._label} depends on the padding of a sample; leave out what has the label {IGNORED}, or the "
                    "attention_mask 0"
                )
        counts = samples.counts.double()
        shares = {"tokens": counts / counts.sum(), "samples": counts.new_full((count,), 1 / count)}
        shares["sum"] = counts.new_ones(count)
        for unit, share in shares.items():
            if together.equals(_joined(single, share)):
                yield unit

    def _check_independence(self, samples: _Samples, computed: _Computed) -> None:
        """Raise LossError for a loss of what a packed row does not have, or what no label in the loss depends on."""
        if not computed.equals(self._computed(samples)):
            raise LossError(
                f"{self._label} has another loss each time that it is called; compute it from its arguments alone"
            )
        if not computed.equals(self._computed(samples.with_first_labels())):
            raise LossError(
                f"{self._label} reads the label of the first token, which nothing predicts; compare logits[:, :-1] "
                "with labels[:, 1:], as transformers' models do"
            )
        elsewhere = computed.gradient.abs().sum(-1)[~samples.matters]
        if bool((elsewhere > 0).any()):
            raise LossError(
                f"{self._label} depends on logits whose next token is not in the loss (its label is {IGNORED}, or the "
                "sample ends); leave them out"
            )

    def _computed(self, samples: _Samples) -> _Computed:
        import torch

        logits = samples.logits.clone().requires_grad_()
        inputs = {"input_ids": samples.ids, "attention_mask": samples.mask, "labels": samples.labels}
        # the user's code may write into its inputs
        inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        call = LossCall(
            self._trainer,
            inputs,
            samples.counts.sum(),
            self._vocab_size,
            # not the leaf itself, which cannot be written
            lambda: logits.clone(),
        )
        with torch.enable_grad():
            # the model's own loss is that of the logits, and taken for what it is: see LossCall.own_loss
            call.loss = lambda: _cross_entropy(logits, samples.labels)
            loss = computed_loss(call)
        self._used |= call.used
        if not loss.isfinite():
            raise LossError(
                f"{self._label} is {float(loss.detach())} for some made-up samples; make it finite for any labels, "
                "also for few of them, and for large losses"
            )
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
        if gradient is None:
            raise LossError(
                f"{self._label} returned a loss without a gradient; compute it of the model's outputs, without "
                "detach() or item()"
            )
        return _Computed(float(loss.detach()), gradient)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _joined(single: list[_Computed], shares: Tensor) -> _Computed:
    import torch

    loss = sum(float(share) * each.loss for share, each in zip(shares, single, strict=True))
    gradients = [each.gradient * float(share) for share, each in zip(shares, single, strict=True)]
    return _Computed(loss, torch.cat(gradients))
