"""Interface of a training task: its data, options, rules, loss and metrics, and what the plan and the log say of it.

A task is built from the config alone and imports no torch until it reads data: the plan and the validation query it
before torch is loaded. A subclass outside this package is selected by `--task package.module:Class`.

B samples (rows) of a microbatch, S tokens of a row.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from megatron.options.config import Config, num_microbatches
from megatron.options.dependents import idle_options
from megatron.options.plugin_options import filled_options
from megatron.parallel.layout import parallel_batch_size
from megatron.runtime.commands import command_name
from megatron.tasks.loss_result import LossResult, MetricTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megatron.data.batches import BatchPlan
    from megatron.data.blend import Drawn
    from megatron.parallel.context import ParallelContext
    from megatron.tasks.objective import Objective


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Input of one forward pass, on the host."""

    inputs: Any
    """Tensor or tuple of tensors for the first layer: tokens [B, S] int64, or (tokens, positions, starts)."""
    targets: Any
    """Tensor or tuple of tensors for the loss: (labels [B, S] int64, token weights [B, S]) in the built-in tasks."""
    normaliser: float
    """Divides the summed loss; added up over the global batch. The number of loss tokens in the built-in tasks."""
    beside: Microbatch | None = None
    """Another one, over which `Task.before_step` has forward passes made."""

    @property
    def num_positions(self) -> int:
        """Rows times length of the input."""
        tensor = self.inputs[0] if isinstance(self.inputs, tuple) else self.inputs
        return int(tensor.shape[:2].numel())


class LabelPlace(NamedTuple):
    """Labels of one sample in a microbatch."""

    sample: int
    row: int
    places: slice
    """Those of the row; `slice(None)`: all."""


class SampleLabels(NamedTuple):
    """Samples of a dataset, as numbers that are stored for their labels know them."""

    fingerprint: str
    lengths: NDArray[np.int64]
    """Labels of each sample."""


OfOutputs = Callable[[tuple["Tensor", "Tensor"], Any], "Tensor"]
"""Function of (hidden, output weight), as `Task.loss` gets them, and the targets of a microbatch."""


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


class Task(ABC):
    """Base of all tasks. Its defaults fit next-token prediction over a stream of samples of seq_length + 1 tokens.

    Every rank builds one from the same config. A dataset is one entry of what `open_data` returns; it has a length and
    a `fingerprint`, a string that changes with its content.
    """

    Options: ClassVar[type | None] = None
    """Pydantic dataclass of the options in `--task-options NAME=VALUE ...`; None: the task has none."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the config that this task reads and no other task does."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that `loss` returns beside the loss."""
    loss_unit: str = "tokens"
    """Unit of the normaliser. A validation has a perplexity if that is tokens and there is no `--loss`."""
    loss_name: str = "lm loss"
    """Name of the loss in the log."""
    counts_epochs: ClassVar[bool] = False
    """The training data is read in epochs, whose length `samples_per_epoch` returns; else it is a stream."""
    reads_data_path: ClassVar[bool] = True
    """The data is that of `data_path` or `train_data_path`, one of which is then required."""
    preprocessor: ClassVar[str] = "preprocess_data"
    """Tool that writes the data."""
    order_options: ClassVar[tuple[str, ...]] = (
        "data.data_path",
        "data.split",
        "training.seq_length",
        "training.seed",
        "training.task_options",
    )
    """Options that select the training samples and their order; a resume reports those that have changed."""

    def __init__(self, config: Config) -> None:
        """Raise ConfigError if the task options are wrong."""
        self.config = config
        self.options: Any = None
        if self.Options is not None or config.training.task_options:
            owner = f"task={config.training.task}"
            self.options = filled_options(self.Options, config.training.task_options, "task_options", owner)
        self.objective: Objective | None = None
        """The user's loss function, if there is one."""
        if config.training.loss is not None:
            from megatron.tasks.objective import Objective

            self.objective = Objective(config)
            self.metrics = (*self.metrics, *self.objective.metrics)
            self.loss_name = f"{self.objective.function.name.rpartition(':')[2]} loss"
            if self.objective.takes_rows:
                self.loss_unit = "samples"

    @property
    def metric_table(self) -> MetricTable:
        """The metrics and their reductions: the mean, but for those of a user's loss function that declares another."""
        own = {} if self.objective is None else self.objective.metrics
        return MetricTable(self.metrics, tuple(own.get(name, "mean") for name in self.metrics))

    # Before torch is imported: rules, plan

    def faults(self, world_size: int) -> Iterator[str]:
        """Yield a message for every broken rule of this task: value, rule, remedy."""
        config = self.config
        training, data = config.training, config.data
        if self.reads_data_path and not data.data_path and not data.per_split:
            yield f"data_path is not given; pass the prefix that {command_name(self.preprocessor)} wrote (--data-path)"
        yield from self._length_faults()
        yield from self._objective_faults()
        yield from self._teacher_faults()
        yield from self._smoothing_faults()
        if self.counts_epochs:
            return
        size, (dp, per_pass) = training.global_batch_size, parallel_batch_size(config, world_size)
        if size % per_pass:
            yield (
                f"global_batch_size={size} is not a multiple of micro_batch_size x data-parallel size = "
                f"{training.micro_batch_size} x {dp} = {per_pass}; use a multiple of {per_pass}"
            )
        samples = training.train_samples
        if samples and samples < size:
            yield (
                f"train_samples={samples} is less than one global_batch_size={size}; train longer, or in smaller "
                "batches"
            )

    def idle(self) -> Iterator[str]:
        """Yield a message for every option that has no effect in this task, given the others."""
        if not self.counts_epochs:
            names = ("num_epochs", *(["save_at_epoch"] if self.config.checkpoint.save else []))
            yield from idle_options(self.config, "a task that counts epochs, such as task=sft", "choose one", names)

    def _length_faults(self) -> Iterator[str]:
        training = self.config.training
        names = ["train_samples", "train_iters", *(["num_epochs"] if self.counts_epochs else [])]
        given = [f"{name}={getattr(training, name)}" for name in names if getattr(training, name)]
        if len(given) > 1:
            yield f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} given; keep one"
        if not given and (not training.skip_train or training.teacher_top_k is not None):
            said = f"neither {names[0]} nor {names[1]}" if len(names) == 2 else f"none of {', '.join(names)}"
            yield f"{said} is given; give one to set the length of training"

    def _objective_faults(self) -> Iterator[str]:
        if self.objective is None:
            return
        loss, config = self.config.training.loss, self.config
        if type(self).loss is not Task.loss:
            yield f"loss={loss} is given, but task={config.training.task} has a loss of its own; leave one out"
        whole = [
            name for name in ("lora_modules_to_save", "lora_bias") if getattr(config.lora, name) not in ((), "none")
        ]
        if self.objective.needs_reference and whole and not self.objective.stores_reference:
            yield f"{whole[0]} trains a part of the base, which is the reference of loss={loss}; leave it out"

    def _smoothing_faults(self) -> Iterator[str]:
        training = self.config.training
        if not training.label_smoothing_factor:
            return
        if training.loss is not None:
            own = f"loss={training.loss}"
        elif type(self).loss is not Task.loss:
            own = f"the loss of task={training.task}"
        else:
            return
        more = "; its pairs have label_smoothing" if training.task == "preference" else ""
        yield f"label_smoothing_factor={training.label_smoothing_factor} is not read by {own}; leave it out{more}"

    def _teacher_faults(self) -> Iterator[str]:
        training, top_k = self.config.training, self.config.training.teacher_top_k
        needed = self.objective is not None and self.objective.needs_teacher
        if needed and not training.teacher:
            yield f"loss={training.loss} takes a teacher; give teacher, the files that a run with teacher_top_k wrote"
        if training.teacher and not needed:
            yield f"teacher={training.teacher[0]} is given, but no loss that takes a teacher; give one, or leave it out"
        for name in training.teacher:
            if not os.path.isfile(name):
                yield f"teacher={name} is not a file; give the files that a run with teacher_top_k wrote"
        if top_k is None:
            return
        if not training.skip_train:
            yield f"teacher_top_k={top_k} writes what the model in load computes, without training; give skip_train"
        if top_k > self.config.model.vocab_size:
            yield f"teacher_top_k={top_k} is more than vocab_size={self.config.model.vocab_size}; lower it"
        if type(self).loss is not Task.loss:
            yield f"teacher_top_k={top_k} is for next-token prediction, not task={training.task}; use pretrain or sft"

    @property
    def sample_length(self) -> int:
        """Tokens in the longest sample."""
        return self.config.training.seq_length

    @property
    def row_length(self) -> int:
        """Tokens in the longest row of a microbatch."""
        return self.sample_length

    @property
    def num_forwards(self) -> int:
        """Forward passes over as many tokens as a step has, made before it."""
        objective = self.objective
        return int(objective is not None and objective.needs_reference and not objective.stores_reference)

    @property
    def pads_rows(self) -> bool:
        """Rows may hold padding, so a step may have fewer tokens than places."""
        return False

    @property
    def varies_shapes(self) -> bool:
        """Microbatches differ in their number of rows or tokens."""
        return False

    @property
    def packs_documents(self) -> bool:
        """A row may hold several documents that do not see each other, or whose positions restart."""
        return False

    @property
    def varies_normaliser(self) -> bool:
        """Ranks may differ in the sum of their normalisers; else a rank's own times their number is the whole."""
        return True

    def num_microbatches(self, data_parallel_size: int) -> int | None:
        """Return the microbatches of each rank in a full step; None if the data decides."""
        return num_microbatches(self.config.training, data_parallel_size)

    def batch_text(self, data_parallel_size: int) -> str:
        """Return the plan's line on the global batch."""
        training, m = self.config.training, self.num_microbatches(data_parallel_size)
        microbatches = "1 microbatch" if m == 1 else f"{m} microbatches"
        split = f"DP {data_parallel_size} x micro {training.micro_batch_size} x {microbatches}"
        return f"{training.global_batch_size} samples = {split}"

    # The data

    @abstractmethod
    def open_data(self, ctx: ParallelContext) -> Sequence[Any]:
        """Return the datasets for training, validation and test; the last two may be None. Raises DataError."""

    def samples_per_epoch(self, dataset: Any) -> int | None:
        """Return the length of an epoch; None for a stream of samples."""
        return None

    def consumed_tokens(self, dataset: Any, consumed_samples: int) -> int:
        """Return the number of tokens in the first `consumed_samples` samples of a run."""
        return consumed_samples * self.config.training.seq_length

    def plan(
        self, dataset: Any, global_batch_size: Callable[[int], int], batch_rank: int, num_batch_ranks: int
    ) -> BatchPlan[Any]:
        """Return what a rank reads in each step, of `global_batch_size(consumed_samples)` samples."""
        from megatron.data.batches import dealt_evenly

        return dealt_evenly(
            len(dataset),
            global_batch_size=global_batch_size,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=batch_rank,
            data_parallel_size=num_batch_ranks,
        )

    def keys_of_shapes(
        self, dataset: Any, global_batch_size: Callable[[int], int], consumed_samples: int, total_samples: int
    ) -> Sequence[Any]:
        """Return the key of one microbatch of each shape between two counts of samples, the largest first.

        Empty where the device is not to compile them before the first step. Equal on all ranks.
        """
        return ()

    @abstractmethod
    def read(self, dataset: Any, key: Any) -> Microbatch:
        """Return the microbatch that the plan calls `key`. Called by several threads. Raises DataError."""

    def samples_of(self, key: Any) -> list[int]:
        """Return the numbers of the samples in a microbatch."""
        return list(key)

    def label_places(self, dataset: Any, key: Any) -> list[LabelPlace]:
        """Return where the labels of each sample of a microbatch are."""
        return [LabelPlace(sample, row, slice(None)) for row, sample in enumerate(self.samples_of(key))]

    def with_label_origins(self, dataset: Any, key: Any, batch: Microbatch) -> Microbatch:
        """Return a microbatch of (labels, weights) with the origins of its labels, if a user's loss function is given.

        These are, each [B, S]: the place in `data_path` of a label's dataset, and the place in its row at which its
        sample begins; then what is stored for each label.
        """
        if self.objective is None:
            return batch
        import torch

        labels, weights = batch.targets
        sources, begins = torch.zeros_like(labels), torch.arange(labels.shape[1]).repeat(len(labels), 1)
        label_places = self.label_places(dataset, key)
        for sample, row, places in label_places:
            documents = self.documents_of(dataset, sample)
            sources[row, places] = 0 if documents is None else self.objective.source_of(documents[0])
            begins[row, places] = places.start or 0
        stored = self.objective.stored_at(self.labels_of(dataset).fingerprint, label_places, labels.shape)
        normaliser = batch.normaliser
        if self.objective.takes_rows:
            normaliser = float(sum(bool(weights[row, places].any()) for _, row, places in label_places))
        targets = (labels, weights, sources, begins, *stored)
        return dataclasses.replace(batch, targets=targets, normaliser=normaliser)

    def labels_of(self, dataset: Any, split: int | None = None) -> SampleLabels:
        """Return the samples for whose labels numbers can be stored: those that a run may read of this split."""
        import numpy as np

        length = np.int64(self.config.training.seq_length)
        return SampleLabels(dataset.fingerprint, np.broadcast_to(length, len(dataset)))

    def keys_of_samples(self, dataset: Any, samples: NDArray[np.int64], num_ranks: int) -> Sequence[Any]:
        """Return the keys of microbatches of these samples, of which rank r takes [r::num_ranks].

        All ranks have as many. Samples may come twice, to fill the last microbatches.
        """
        import numpy as np

        size = self.config.training.micro_batch_size
        count = -(-len(samples) // (size * num_ranks)) * num_ranks
        return np.resize(samples, (count, size)).tolist()  # type: ignore[no-any-return]

    def documents_of(self, dataset: Any, sample: int) -> tuple[str, list[int]] | None:
        """Return the prefix and the document numbers that a sample is from; None if there are none."""
        return None

    def drawn(self, dataset: Any, consumed_samples: int) -> list[Drawn]:
        """Return what the first `consumed_samples` samples of a run are of each dataset of a mix; empty: no mix."""
        return []

    def describe(self, dataset: Any) -> str | None:
        """Return a line on the training data, printed before the first step; None: nothing."""
        return None

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        """Return the microbatches of a step, completed with what the model computes of them before it.

        Called on every rank, before each step and each batch of an evaluation; `microbatches` is empty on inner
        pipeline stages.
        """
        if self.objective is None or not self.objective.needs_reference or self.objective.stored_reference:
            return list(microbatches)
        from megatron.tasks.objective import completed

        found = forward(microbatches, partial(self.objective.log_probs, ctx=ctx), adapters=False)
        if not ctx.is_last_stage:
            return list(microbatches)
        return [
            dataclasses.replace(batch, targets=(*completed(batch.targets), reference))
            for batch, reference in zip(microbatches, found, strict=True)
        ]

    def before_training(
        self, datasets: Sequence[Any], forward: Forward, start: StartWeights, ctx: ParallelContext
    ) -> list[str]:
        """Complete the datasets with what the model that the run started from computes of them. Collective.

        Called once, before the first step or evaluation. Return lines to print on rank 0. Raises DataError.
        """
        return []

    # The loss

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the loss of one microbatch from (hidden, output weight), on the last pipeline stage.

        `hidden` is the residual stream [S, B, H] ([S/tp, B, H] under sequence parallelism), `weight` this rank's rows
        of the vocabulary. `scale` belongs into the weights of the single losses rather than onto their sum, where
        16-bit gradients would be rounded differently. Default: the user's loss function, or else cross-entropy, over
        (labels, token weights).
        """
        if self.objective is not None:
            return self.objective(outputs, targets, scale, ctx)
        from megatron.parallel.losses import linear_cross_entropy

        labels, weights = targets
        # a subclass may scale, replace or merely report what it gets from here
        is_total = type(self).loss is Task.loss
        smoothing = self._label_smoothing()
        total = linear_cross_entropy(
            *outputs, labels, weights * scale, ctx, is_total=is_total, label_smoothing=smoothing
        )
        return LossResult(total)

    def _label_smoothing(self) -> float:
        """Return the label smoothing of a training step; 0 without gradients, so that a perplexity is one of labels."""
        import torch

        return self.config.training.label_smoothing_factor if torch.is_grad_enabled() else 0.0
