"""What a task is: a dataset, how its samples become the microbatches of a step, and a loss.

B samples (rows) of a microbatch, S tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.config.options import Config
from megatron.data.batches import BatchPlan
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import linear_cross_entropy

Labels = tuple[Tensor, Tensor]
"""Labels [B, S] and token weights [B, S], as the engine hands them to the loss."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads."""

    inputs: Any
    """Tokens [B, S] int64, or (tokens, positions, starts) over packed documents."""
    labels: Tensor
    """[B, S] int64."""
    loss_mask: Tensor
    """[B, S] float32: 1 where the token's loss counts."""
    num_loss_tokens: float
    """Sum of the mask, known on the host."""


class Task(ABC):
    """One for a run, alike on every rank. A dataset is what `open_data` returned; None is no dataset."""

    @property
    @abstractmethod
    def masks_loss(self) -> bool:
        """Whether ranks may hold different numbers of loss tokens."""

    @abstractmethod
    def open_data(self) -> Sequence[Any]:
        """To train on, to validate on, to test on; the last two None where the config leaves none. Raises DataError."""

    @abstractmethod
    def samples_per_epoch(self, dataset: Any) -> int | None:
        """None where there are no epochs: a stream of samples."""

    @abstractmethod
    def consumed_tokens(self, dataset: Any, consumed_samples: int) -> int:
        """Tokens in the first so many samples that a run trains on."""

    @abstractmethod
    def plan(
        self, dataset: Any, global_batch_size: Callable[[int], int], data_parallel_rank: int, data_parallel_size: int
    ) -> BatchPlan[Any]:
        """What a rank reads for each step, whose sizes are as `global_batch_size(consumed_samples)` says."""

    @abstractmethod
    def read(self, dataset: Any, key: Any) -> Microbatch:
        """A microbatch on the host, of what the plan named. Called by several threads. Raises DataError."""

    @abstractmethod
    def samples_of(self, key: Any) -> list[int]:
        """The samples in a microbatch, by their number in the dataset."""

    def describe(self, dataset: Any) -> str | None:
        """What a user wants to know of the training data before the first step; None: nothing."""
        return None

    def loss(self, ctx: ParallelContext) -> Callable[[tuple[Tensor, Tensor], Labels], Tensor]:
        """The loss function of the last stage: ((hidden, output weight), (labels, token weights)) -> scalar."""

        def weighted_cross_entropy(outputs: tuple[Tensor, Tensor], labels: Labels) -> Tensor:
            return linear_cross_entropy(*outputs, *labels, ctx)

        return weighted_cross_entropy


TaskFactory = Callable[[Config, ParallelContext], Task]
