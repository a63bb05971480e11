"""Interface of what a task optimises: a loss of the model's outputs, its metrics, and what it needs before a step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.options.config import Config
from megatron.tasks.data import Microbatch, TaskData
from megatron.tasks.loss_result import LossResult, MetricTable

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.parallel.context import ParallelContext

OfOutputs = Callable[[tuple["Tensor", "Tensor"], Any], "Tensor"]
"""Function of (hidden, output weight), as `Objective.loss` gets them, and the targets of a microbatch."""


class StartWeights(NamedTuple):
    """The weights that a run started from, as its engine knows them."""

    fingerprint: str
    """Equal for models of equal weights that compute the same, whatever layout, precision and file format."""
    are_loaded: bool
    """The engine holds them: the run has not trained yet, or a frozen base is meant."""


class Forward(Protocol):
    """Forward passes over microbatches, without gradients. Collective."""

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        of_outputs: OfOutputs,
        *,
        adapters: bool = True,
        num_microbatches: int | None = None,
    ) -> list[Tensor]:
        """Return what `of_outputs` returns for each, on the ranks of the last pipeline stage; nothing on the others.

        `adapters=False`: of the base model, without its adapters. `num_microbatches`: those of each rank, also where it
        reads none; None: as many as in the step under way.
        """


class Objective(ABC):
    """Loss of a task, and its metrics. Every rank builds one from the same config, without torch."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics that `loss` returns beside the loss."""
    loss_unit: str = "tokens"
    """Unit of the normaliser. A validation has a perplexity if that is tokens and there is no `--loss`."""
    loss_name: str = "lm loss"
    """Name of the loss in the log."""
    draws_numbers: bool = False
    """The loss may draw random numbers, from a stream of its own."""
    label: str = ""
    """The user's function and its file, as messages name them; empty for a loss of this package."""
    num_forwards: int = 0
    """Forward passes over as many tokens as a step has, made before it."""

    def __init__(self, config: Config, options: Any, data: TaskData) -> None:
        """`options`: those of `--task-options`; `data`: what the task reads."""
        self.config = config
        self.options = options
        self.data = data

    @property
    def metric_table(self) -> MetricTable:
        """The metrics and their reductions."""
        return MetricTable(self.metrics, ("mean",) * len(self.metrics))

    def faults(self) -> Iterator[str]:
        """Yield a message for every broken rule of the loss: value, rule, remedy."""
        yield from ()

    def idle(self) -> Iterator[str]:
        """Yield a message for every option that has no effect in this loss, given the others."""
        yield from ()

    def completed(self, dataset: Any, key: Any, batch: Microbatch) -> Microbatch:
        """Return the microbatch that `data` has read as `key`, with what the loss is given beside its targets."""
        return batch

    def before_training(
        self, datasets: Sequence[Any], forward: Forward, start: StartWeights, ctx: ParallelContext
    ) -> list[str]:
        """Complete the datasets with what the model that the run started from computes of them. Collective.

        Called once, before the first step or evaluation. Return lines to print on rank 0. Raises DataError.
        """
        return []

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        """Return the microbatches of a step, completed with what the model computes of them before it.

        Called on every rank, before each step and each batch of an evaluation; `microbatches` is empty on inner
        pipeline stages.
        """
        return list(microbatches)

    @abstractmethod
    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the loss of one microbatch from (hidden, output weight), on the last pipeline stage.

        `hidden` is the residual stream [S, B, H], or this rank's rows of it where ranks share them (sequence and
        context parallelism), `weight` its rows of the vocabulary. What parallel/losses.py and chosen_log_probs.py
        compute of them is of whole rows, as the targets are, and a loss counts once on each of these ranks. `scale`
        belongs into the weights of the single losses rather than onto their sum, where 16-bit gradients would be
        rounded differently.
        """

    @contextlib.contextmanager
    def naming_faults(self) -> Iterator[None]:
        """Within it raise LossError for an error in the backward pass of the loss itself."""
        yield


class CrossEntropy(Objective):
    """Next-token prediction: the cross-entropy of (labels, token weights)."""

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        import torch

        from megatron.parallel.losses import linear_cross_entropy

        labels, weights = targets
        # a subclass may scale, replace or merely report what it gets from here
        # is_total: the gradient of the weight may be added in forward, since nothing comes between this and backward
        is_total = type(self).loss is CrossEntropy.loss
        # without gradients it is a validation, whose perplexity is one of the labels alone
        smoothing = self.config.training.label_smoothing_factor if torch.is_grad_enabled() else 0.0
        total = linear_cross_entropy(
            *outputs, labels, weights * scale, ctx, is_total=is_total, label_smoothing=smoothing
        )
        return LossResult(total)
