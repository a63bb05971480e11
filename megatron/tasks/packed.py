"""Data of the tasks whose samples are packed into rows, so that few tokens are padding.

A sample is one or several documents; a row holds one sample after another. A token sees its own document alone, and
positions restart with each. B rows of a microbatch, S places of a row.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.models.rules import check_row_length, row_multiple
from megatron.options.config import Config
from megatron.options.data import DOCUMENT_ENDS, parse_split
from megatron.options.dependents import idle_options
from megatron.parallel.layout import Layout, parallel_batch_size
from megatron.runtime.commands import counted
from megatron.runtime.devices import device_of, find_device, is_device
from megatron.tasks.data import DatasetFacts, LabelIndex, LabelPlace, SampleLabels, TaskData

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megatron.data.batches import BatchPlan
    from megatron.data.blend import Drawn, SeparateSets
    from megatron.data.samples import PackedSamples, SampleDataset
    from megatron.parallel.context import ParallelContext

    PackedDataset = SampleDataset[Any] | PackedSamples
    Rows = list[NDArray[np.int64]]
    """The rows of a microbatch, each the numbers of its samples."""

SAMPLED_STEPS = 64
"""Steps from which the shapes of rows and the share of padding are estimated."""


@dataclasses.dataclass(frozen=True)
class FilledRows:
    """Rows of documents, filled up with token 0, which no token sees: each array is [B, S]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The next token of each token."""
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Place in the row at which the token's document begins."""
    places: list[tuple[int, slice]]
    """Row of each document in turn, and the places in it."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        return torch.from_numpy(self.tokens), torch.from_numpy(self.positions), torch.from_numpy(self.starts)


def samples_of(dataset: Any) -> Any:
    """Return the samples themselves, where `dataset` may be rows of them."""
    # packing=dataset has rows that were packed once, other packings the samples themselves
    return getattr(dataset, "samples", dataset)


def fullest(lengths: NDArray[np.int64], rows: Rows) -> int:
    """Return the tokens in the fullest row."""
    return max((int(lengths[row].sum()) for row in rows), default=0)


class PackedFacts(DatasetFacts):
    """Epochs of samples, or of rows of them."""

    data: PackedData
    dataset: PackedDataset

    @property
    def samples(self) -> Any:
        """The samples, of which the dataset may be rows."""
        return samples_of(self.dataset)

    @property
    def samples_per_epoch(self) -> int:
        return len(self.dataset)

    def consumed_tokens(self, consumed_samples: int) -> int:
        return int(self.dataset.epochs.tokens(consumed_samples).sum())

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        return self.dataset.documents_of(sample)

    def drawn(self, consumed_samples: int) -> list[Drawn]:
        from megatron.data.samples import drawn_of

        return drawn_of(self.dataset, consumed_samples)

    def first_steps(self) -> list[list[int]]:
        """Return the tokens in the fullest row of each microbatch of all ranks, for the first epoch's first steps."""
        size, steps = self.data.config.training.global_batch_size, []
        for begin in range(0, min(len(self.dataset), SAMPLED_STEPS * size), size):
            _, cells = self.data.step(self.dataset, begin, size, self.data.layout.num_batch_ranks)
            steps.append([fullest(self.samples.lengths, rows) for rows in cells])
        return steps

    def share_of_epoch(self, labels: NDArray[np.int64]) -> tuple[int, float]:
        """Return the tokens of an epoch, and the share of `labels`, a number for each sample, in them."""
        import numpy as np

        samples, order = self.samples, self.dataset.epochs
        # first sample of each dataset of a mix, of which an epoch reads `passes`, more or less than one
        firsts = samples.epochs.firsts[:-1]
        passes = order.counts / order.sizes
        tokens, trained = (float(passes @ np.add.reduceat(each, firsts)) for each in (samples.lengths, labels))
        return self.consumed_tokens(len(self.dataset)), trained / tokens

    def describe_packing(self) -> str:
        """Return how full the rows of the first steps are."""
        config, steps = self.data.config, self.first_steps()
        lengths = [self.data.padded_length(tokens) for cells in steps for tokens in cells]
        held = self.consumed_tokens(min(len(self.dataset), len(steps) * config.training.global_batch_size))
        filled = held / (config.training.micro_batch_size * sum(lengths))
        shapes = len(set(lengths))
        return (
            f"packing={config.sft.packing} fills {filled:.1%} of the places, in {len(lengths) / len(steps):.1f} "
            f"microbatches a step and {counted(shapes, 'shape')} (of the first {len(steps)} steps)"
        )


class PackedLabels(LabelIndex):
    """Labels of packed samples: one for each place that a sample has in its row."""

    _data: PackedData

    def of(self, dataset: PackedDataset, split: int | None = None) -> SampleLabels:
        samples = samples_of(dataset)
        return SampleLabels(samples.fingerprint, samples.lengths)

    def places(self, dataset: PackedDataset, key: Rows) -> list[LabelPlace]:
        lengths, places = samples_of(dataset).lengths, []
        # samples lie in a row one after the other, without a gap
        for number, row in enumerate(key):
            begin = 0
            for sample in row:
                end = begin + int(lengths[sample])
                places.append(LabelPlace(int(sample), number, slice(begin, end)))
                begin = end
        return places

    def keys(self, dataset: PackedDataset, samples: NDArray[np.int64], num_ranks: int) -> Sequence[Any]:
        import numpy as np

        from megatron.data.packing import pack_step

        data = self._data
        step = pack_step(samples_of(dataset).lengths[samples], data.row_length, num_ranks)
        # a pipeline whose shapes do not vary takes full microbatches
        empty = 0 if data.varies_shapes else data.config.training.micro_batch_size - 1
        cells = np.split(samples[step.order], step.starts[1:-1])
        return data.keys_of_step(dataset, [[cell, *[cell[:0]] * empty] for cell in cells])


class PackedData(TaskData):
    """Epochs of packed samples, by the options of the section `sft`."""

    sample_name: str
    """Word of messages for a sample."""
    Facts: ClassVar[type[PackedFacts]] = PackedFacts
    Labels = PackedLabels
    counts_epochs = True
    pads_rows = True
    packs_documents = True
    order_options: ClassVar[tuple[str, ...]] = (*TaskData.order_options, "sft.packing")

    def __init__(self, config: Config, options: Any) -> None:
        super().__init__(config, options)
        self._compiles_shapes, self.layout = False, Layout()  # until `open`
        self._edges: NDArray[np.int64] | None = None
        self._multiple = row_multiple(config)
        """Rows are as long as a multiple of this."""

    # Rules and plan

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        yield from self._batch_faults(world_size)
        config = self.config
        if config.training.rampup_batch_size is not None:
            yield f"rampup_batch_size is for task=pretrain; with task={self.name} leave it out"

    def idle(self) -> Iterator[str]:
        config, sft = self.config, self.config.sft
        yield from super().idle()
        names = [name for name in ("blend_weights", *DOCUMENT_ENDS) if getattr(config.data, name)]
        documents = f"documents, which task={self.name} does not read"
        yield from idle_options(config, documents, "choose task=pretrain", names)
        arrays = f"index arrays, which task={self.name} does not write"
        yield from idle_options(config, arrays, "choose task=pretrain", ["data_cache_path"])
        if not config.data.eval_iters and not config.data.per_split and any(parse_split(config.data.split)[1:]):
            yield (
                f"split={config.data.split} holds out {self.sample_name}s that nothing evaluates, as eval_iters=0; set "
                "it, or take split=1,0,0"
            )
        if sft.packing != "step":
            yield from idle_options(config, "packing=step", "choose that", ["max_batch_len"])
        if not self.varies_shapes:
            names = ["bucketing", "buckets_per_octave", "num_buckets", "compile_ahead"]
            yield from idle_options(config, "packing=step or none", "choose one", names)
        if sft.bucketing != "optimal":
            yield from idle_options(config, "bucketing=optimal", "choose that", ["num_buckets"])
        if sft.bucketing not in ("auto", "octave"):
            yield from idle_options(config, "bucketing=octave", "choose that", ["buckets_per_octave"])

    def _batch_faults(self, world_size: int) -> Iterator[str]:
        config, training, sft = self.config, self.config.training, self.config.sft
        dp, _ = parallel_batch_size(config, world_size)
        # packing deals samples to ranks; fewer would leave one with padding alone in each step
        if training.global_batch_size < dp:
            yield (
                f"global_batch_size={training.global_batch_size} is less than the data-parallel size {dp}: some ranks "
                f"would have no {self.sample_name}; use {dp} or more"
            )
        # checked before the data is read, though its longest sample may be shorter
        if sft.max_batch_len is not None and sft.max_batch_len < self.sample_length:
            times, least = self.sample_length // training.seq_length, f"seq_length={self.sample_length}"
            if times > 1:
                least = f"{times} x seq_length = {self.sample_length}"
            yield (
                f"max_batch_len={sft.max_batch_len} is less than {least}, so the longest "
                f"{self.sample_name} would fit into no microbatch; raise it, or lower seq_length"
            )
        if sft.packing == "step" and training.micro_batch_size > 1:
            yield (
                f"micro_batch_size={training.micro_batch_size}, but packing=step makes each microbatch one row of up "
                "to max_batch_len tokens; use 1, and set max_batch_len"
            )
        yield from self._expert_faults(world_size)
        if self.row_length != training.seq_length:
            yield from check_row_length(config, "max_batch_len", self.row_length)

    def _expert_faults(self, world_size: int) -> Iterator[str]:
        parallel = self.config.parallel
        layout = Layout.of(parallel, world_size)
        shares_samples = layout.expert_tensor_size * layout.expert_size <= layout.tensor_size * layout.context_size
        # `auto` is resolved before a run checks its config
        is_static = is_device(parallel.device) and find_device(parallel.device).static_experts
        if is_static and self.varies_shapes and not shares_samples:
            yield (
                f"expert_model_parallel_size={layout.expert_size} on {parallel.device} sends messages of one size "
                "between data-parallel ranks, whose rows have different lengths with "
                f"packing={self.config.sft.packing}; use packing=dataset, or a tensor_model_parallel_size as large "
                "and expert_tensor_parallel_size=1"
            )

    @property
    def name(self) -> str:
        """The task as the config selects it."""
        return self.config.training.task

    @property
    def row_length(self) -> int:
        sft = self.config.sft
        if sft.packing == "step" and sft.max_batch_len:
            return sft.max_batch_len
        return self.sample_length

    @property
    def varies_shapes(self) -> bool:
        # rows of a packed dataset are all filled up to the longest
        return self.config.sft.packing != "dataset"

    def num_microbatches(self, data_parallel_size: int) -> None:
        return None

    @property
    def varied_by(self) -> str | None:
        return "packing=step" if self.config.sft.packing == "step" else super().varied_by

    def batch_text(self, data_parallel_size: int) -> str:
        training, packing = self.config.training, self.config.sft.packing
        size, rows = training.global_batch_size, f"rows of at most {self.row_length:,} tokens"
        if packing == "dataset":
            return f"{size} {rows} over DP {data_parallel_size}"
        layout = f"in {rows}"
        if packing == "none":
            layout = f"{training.micro_batch_size} to a microbatch, padded"
        return f"{size} {self.sample_name}s over DP {data_parallel_size}, {layout}"

    @property
    def bucketing(self) -> str:
        """`off`, `octave` or `optimal`."""
        given = self.config.sft.bucketing
        if given != "auto":
            return given
        if self._compiles_shapes:  # each shape costs a compilation
            return "octave"
        return "off"

    # Datasets

    @abstractmethod
    def open_samples(self) -> Sequence[Any]:
        """Return the samples for training, validation and test; the last two may be None. Raises DataError."""

    def open(self, ctx: ParallelContext) -> Sequence[PackedDataset | SeparateSets | None]:
        import numpy as np

        from megatron.data.blend import sets_of
        from megatron.data.packing import bucket_edges
        from megatron.data.samples import check_weights

        self._compiles_shapes = device_of(ctx.device.type).compiles_shapes
        self.layout = ctx
        config = self.config
        datasets: list[Any] = list(self.open_samples())
        if config.sft.packing == "dataset":
            datasets = [self._packed(samples) for samples in datasets]
        for split, dataset in enumerate(datasets):
            # several validation datasets are checked one by one
            for each in sets_of(dataset):
                check_weights(each, split)
        if self.bucketing == "optimal" and self.varies_shapes:
            steps = self.Facts(self, datasets[0]).first_steps()
            filled = [length for cells in steps for length in cells if length]
            # the last edge must hold the longest row of any split, which the first steps may lack
            longest = max(int(samples.lengths.max()) for each in datasets for samples in sets_of(each))
            if config.sft.packing == "step":
                longest = self.row_length
            self._edges = bucket_edges(np.array([*filled, longest]), config.sft.num_buckets)
        return datasets

    def _packed(self, samples: Any) -> Any:
        from megatron.data.blend import SeparateSets
        from megatron.data.samples import PackedSamples

        if isinstance(samples, SeparateSets):
            return samples.map(self._packed)
        if samples is None:
            return None
        return PackedSamples(samples, self.sample_length)

    def samples_of(self, key: Any) -> list[int]:
        return [int(sample) for row in key for sample in row]

    # The microbatches of a step

    def plan(
        self, dataset: PackedDataset, global_batch_size: Callable[[int], int], batch_rank: int, num_batch_ranks: int
    ) -> BatchPlan[Any]:
        @lru_cache(maxsize=8)  # the steps that name a bad microbatch query it again
        def plan(consumed_samples: int) -> tuple[int, Sequence[Any]]:
            size = global_batch_size(consumed_samples)
            if size <= 0:
                return 0, []
            samples, cells = self.step(dataset, consumed_samples, size, num_batch_ranks)
            return samples, self.keys_of_step(dataset, cells)[batch_rank::num_batch_ranks]

        return plan

    def keys_of_step(self, dataset: PackedDataset, cells: Sequence[Rows]) -> Sequence[Any]:
        """Return what `read` is given for each microbatch of a step."""
        return cells

    def step(self, dataset: Any, consumed_samples: int, size: int, num_ranks: int) -> tuple[int, list[Rows]]:
        """Return the number of samples in a step, none beyond its epoch, and all its microbatches.

        Microbatch m of rank r is number m * num_ranks + r. Some may have no rows.
        """
        import numpy as np

        from megatron.data.packing import pack_step

        epoch, begin = divmod(consumed_samples, len(dataset))
        samples = dataset.order(epoch)[begin : begin + size]
        if self.config.sft.packing == "step":
            # a pure function of the lengths: each rank packs the whole step and takes its share, without a message
            step = pack_step(dataset.lengths[samples], self.row_length, num_ranks)
            packed = np.split(samples[step.order], step.starts[1:-1])
            return len(samples), [[row] if len(row) else [] for row in packed]  # an empty one is a row of padding
        rows: Rows
        if self.config.sft.packing == "dataset":
            rows = [dataset.row(epoch, int(sample)) for sample in samples]
        else:  # the like-sized beside each other: what is padded to the longest is then little
            rows = [samples[i : i + 1] for i in np.argsort(-dataset.lengths[samples], kind="stable")]
        per_microbatch = self.config.training.micro_batch_size
        # as many microbatches for each rank; the last may be short or empty
        count = -(-len(rows) // (per_microbatch * num_ranks)) * num_ranks
        if not self.varies_shapes:
            # of one shape, which pipeline stages announce once: the last is filled up with empty rows
            rows += [samples[:0]] * (count * per_microbatch - len(rows))
        return len(samples), [rows[cell * per_microbatch : (cell + 1) * per_microbatch] for cell in range(count)]

    def packed_sequences(self, lengths: NDArray[np.int64], num_ranks: int) -> list[Rows]:
        """Pack sequences of these lengths into few microbatches, equally many for each rank; numbered as in `step`.

        All have the rows of a full microbatch, some of them empty.
        """
        import numpy as np

        from megatron.data.packing import pack_step

        num_rows = self.config.training.micro_batch_size
        step = pack_step(lengths, self.row_length, num_ranks * num_rows)
        rows = np.split(step.order, step.starts[1:-1])
        return [rows[begin : begin + num_rows] for begin in range(0, len(rows), num_rows)]

    def filled_rows(self, rows: Sequence[Sequence[NDArray[Any]]]) -> FilledRows:
        """Lay out rows of documents, each the ids of one token more than it has places."""
        import numpy as np

        filled = [sum(len(ids) - 1 for ids in row) for row in rows]
        # an empty microbatch is one row of padding: its passes still join the collectives
        shape = (max(1, len(rows)), self.padded_length(max(filled, default=1)))
        tokens, labels, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        # of padding, each token sees itself alone
        starts = np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
        places = []
        for number, row in enumerate(rows):
            begin = 0
            for ids in row:
                # n tokens take n - 1 places: each but the last is an input, each but the first a label
                end = begin + len(ids) - 1
                places.append((number, slice(begin, end)))
                tokens[number, begin:end], labels[number, begin:end] = ids[:-1], ids[1:]
                positions[number, begin:end], starts[number, begin:end] = np.arange(end - begin), begin
                begin = end
        return FilledRows(tokens, labels, positions, starts, places)

    def padded_length(self, filled: int) -> int:
        """Return the length of rows of which the fullest holds `filled` tokens."""
        from megatron.data.packing import bucket_length, pad_to_edges

        most = self.row_length
        if not self.varies_shapes:
            return most
        # of padding alone: tensors have one place at least
        length = max(1, filled)
        if self._edges is not None:
            length = int(pad_to_edges([length], self._edges)[0])
        elif self.bucketing == "octave":
            length = int(bucket_length(length, self.config.sft.buckets_per_octave))
        # rounded up to what sequence and context parallelism cut; `most` is a multiple already, by a rule
        return min(most, -(-length // self._multiple) * self._multiple)

    # What a run compiles

    def keys_of_shapes(
        self, dataset: PackedDataset, global_batch_size: Callable[[int], int], consumed_samples: int, total_samples: int
    ) -> Sequence[Any]:
        ahead = self.config.sft.compile_ahead
        if ahead is None:
            # without buckets most steps have a shape of their own; fp8's history of scales would hold these passes
            ahead = self._compiles_shapes and self.bucketing != "off" and not self.config.fp8.uses_fp8
        if not self.varies_shapes or not ahead:
            return ()
        keys: dict[tuple[int, ...], Any] = {}
        while consumed_samples < total_samples:
            size = global_batch_size(consumed_samples)
            samples, cells = self.step(dataset, consumed_samples, size, self.layout.num_batch_ranks)
            for key in self.keys_of_step(dataset, cells):
                # the first microbatch of each shape stands for all
                keys.setdefault(self.shape_of(dataset, key), key)
            consumed_samples += samples
        return [keys[shape] for shape in sorted(keys, reverse=True)]  # a lack of memory shows at once

    def shape_of(self, dataset: PackedDataset, key: Any) -> tuple[int, ...]:
        """Return numbers that are equal for microbatches whose tensors have equal shapes; the length of rows first."""
        return self._shape_of_rows(samples_of(dataset).lengths, key)

    def _shape_of_rows(self, lengths: NDArray[np.int64], rows: Rows) -> tuple[int, int]:
        """Return length and number of rows of samples of these lengths."""
        return self.padded_length(fullest(lengths, rows)), max(1, len(rows))
