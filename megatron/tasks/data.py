"""Interface of what a task reads: its datasets, the order of their samples, and microbatches of them.

It is built from the config alone and imports no torch until it reads: the plan and the validation query it before torch
is loaded. B samples (rows) of a microbatch, S tokens of a row.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from megatron.options.config import Config, num_microbatches
from megatron.options.dependents import idle_options
from megatron.parallel.layout import parallel_batch_size
from megatron.runtime.commands import command_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron.data.batches import BatchPlan
    from megatron.data.blend import Drawn
    from megatron.parallel.context import ParallelContext


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
    """Another one, over which `Objective.before_step` has forward passes made."""

    def with_targets(self, *more: Any) -> Microbatch:
        """Return this one with further targets behind its own."""
        return dataclasses.replace(self, targets=(*self.targets, *more))

    @property
    def num_tokens(self) -> int:
        """Tokens of the input, without padding."""
        if not isinstance(self.inputs, tuple):
            return self.num_positions
        from megatron.models.positions import Packing

        _, positions, starts = self.inputs
        # padding is known by its starts: at the end of a row each place sees itself alone
        return int(Packing(positions, starts).is_token_BS.sum())

    @property
    def num_positions(self) -> int:
        """Rows times length of the input."""
        tokens = self.inputs[0] if isinstance(self.inputs, tuple) else self.inputs
        return int(tokens.shape[:2].numel())


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


class DatasetFacts:
    """Facts of one dataset that a run reads: epochs, tokens, documents, and shares of a mix.

    The default is that of a stream of samples of seq_length + 1 tokens.
    """

    def __init__(self, data: TaskData, dataset: Any) -> None:
        self.data, self.dataset = data, dataset

    @property
    def samples_per_epoch(self) -> int | None:
        """Length of an epoch; None for a stream of samples."""
        return None

    def consumed_tokens(self, consumed_samples: int) -> int:
        """Return the number of tokens in the first `consumed_samples` samples of a run."""
        return consumed_samples * self.data.config.training.seq_length

    def documents_of(self, sample: int) -> tuple[str, list[int]] | None:
        """Return the prefix and the document numbers that a sample is from; None if there are none."""
        return None

    def drawn(self, consumed_samples: int) -> list[Drawn]:
        """Return what the first `consumed_samples` samples of a run are of each dataset of a mix; empty: no mix."""
        return []

    def describe(self) -> str | None:
        """Return a line on the training data, printed before the first step; None: nothing."""
        return None


class LabelIndex:
    """Labels of a task's samples, by which numbers of them are stored and found again.

    The default is that of samples of seq_length + 1 tokens, one a row.
    """

    def __init__(self, data: TaskData) -> None:
        self._data = data

    def of(self, dataset: Any, split: int | None = None) -> SampleLabels:
        """Return the samples for whose labels numbers can be stored: those that a run may read of this split."""
        import numpy as np

        # a view of one number, however many samples there are
        length = np.int64(self._data.config.training.seq_length)
        return SampleLabels(dataset.fingerprint, np.broadcast_to(length, len(dataset)))

    def places(self, dataset: Any, key: Any) -> list[LabelPlace]:
        """Return where the labels of each sample of a microbatch are."""
        return [LabelPlace(sample, row, slice(None)) for row, sample in enumerate(self._data.samples_of(key))]

    def keys(self, dataset: Any, samples: NDArray[np.int64], num_ranks: int) -> Sequence[Any]:
        """Return the keys of microbatches of these samples, of which rank r takes [r::num_ranks].

        All ranks have as many. Samples may come twice, to fill the last microbatches.
        """
        import numpy as np

        size = self._data.config.training.micro_batch_size
        # rounded up to as many microbatches for each rank: their forward passes are collective
        count = -(-len(samples) // (size * num_ranks)) * num_ranks
        # np.resize repeats the samples from the first on where they do not suffice
        return np.resize(samples, (count, size)).tolist()  # type: ignore[no-any-return]


class TaskData(ABC):
    """Data of a task. The defaults fit a stream of samples of seq_length + 1 tokens.

    Every rank builds one from the same config. A dataset is one entry of what `open` returns; it has a length and a
    `fingerprint`, a string that changes with its content.
    """

    Facts: ClassVar[type[DatasetFacts]] = DatasetFacts
    Labels: ClassVar[type[LabelIndex]] = LabelIndex
    counts_epochs: ClassVar[bool] = False
    """The training data is read in epochs, whose length `DatasetFacts.samples_per_epoch` is; else it is a stream."""
    reads_data_path: ClassVar[bool] = True
    """The data is that of `data_path` or `train_data_path`, one of which is then required."""
    content: ClassVar[Literal["text", "chats", "pairs"]] = "text"
    """Its samples are texts, chats or pairs of answers; the last two begin with prompts of a user."""
    cuts_samples: ClassVar[bool] = False
    """Its samples may be cut into shorter rows, as seq_length_stages has it."""
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

    def __init__(self, config: Config, options: Any) -> None:
        """`options`: those of `--task-options`, as `Task.Options` declares them; None if it declares none."""
        self.config = config
        self.options = options

    # Before torch is imported: rules, plan

    def faults(self, world_size: int) -> Iterator[str]:
        """Yield a message for every broken rule of the data: value, rule, remedy."""
        config = self.config
        training, data = config.training, config.data
        if self.reads_data_path and not data.data_path and not data.per_split:
            yield f"data_path is not given; pass the prefix that {command_name(self.preprocessor)} wrote (--data-path)"
        yield from self._length_faults()
        if training.seq_length_stages and not self.cuts_samples:
            stages = " ".join(map(str, training.seq_length_stages))
            yield (
                f"seq_length_stages={stages} cuts samples of running text, but task={training.task} has samples that "
                "are whole; leave it out, or train in several runs, each from the one before"
            )
        # a last batch of an epoch may be smaller, so nothing need be divisible
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

    def _length_faults(self) -> Iterator[str]:
        training = self.config.training
        names = ["train_samples", "train_iters"]
        if self.counts_epochs:
            names.append("num_epochs")
        given = [f"{name}={getattr(training, name)}" for name in names if getattr(training, name)]
        if len(given) > 1:
            count = "both" if len(given) == 2 else "all"
            yield f"{' and '.join(given)} are {count} given; keep one"
        # a teacher's labels are those of the samples that a run would train on, so it needs their number
        only_evaluates = training.skip_train and training.teacher_top_k is None
        if given or only_evaluates:
            return
        lacking = " nor ".join([f"neither {names[0]}", *names[1:]])
        if len(names) > 2:
            lacking = f"none of {', '.join(names)}"
        yield f"{lacking} is given; give one to set the length of training"

    def idle(self) -> Iterator[str]:
        """Yield a message for every option that has no effect in this data, given the others."""
        if self.counts_epochs:
            return
        names = ["num_epochs"]
        if self.config.checkpoint.save:
            names.append("save_at_epoch")
        yield from idle_options(self.config, "a task that counts epochs, such as task=sft", "choose one", names)

    @property
    def sample_length(self) -> int:
        """Tokens in the longest sample."""
        return self.config.training.seq_length

    @property
    def row_length(self) -> int:
        """Tokens in the longest row of a microbatch."""
        return self.sample_length

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

    @property
    def varied_by(self) -> str | None:
        """Option by which full steps have different numbers of microbatches; None: all have as many."""
        return None if self.config.training.rampup_batch_size is None else "rampup_batch_size"

    def batch_text(self, data_parallel_size: int) -> str:
        """Return the plan's line on the global batch."""
        training, m = self.config.training, self.num_microbatches(data_parallel_size)
        split = f"DP {data_parallel_size} x micro {training.micro_batch_size} x {m} microbatch{'' if m == 1 else 'es'}"
        return f"{training.global_batch_size} samples = {split}"

    # Datasets

    @abstractmethod
    def open(self, ctx: ParallelContext) -> Sequence[Any]:
        """Return the datasets for training, validation and test; the last two may be None. Raises DataError."""

    def facts(self, dataset: Any) -> DatasetFacts:
        """Return what a run reads of a dataset."""
        return self.Facts(self, dataset)

    @property
    def labels(self) -> LabelIndex:
        """The labels of the samples, for which numbers can be stored."""
        return self.Labels(self)

    # Microbatches

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
