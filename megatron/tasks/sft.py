"""Supervised fine-tuning: the answers in chats, packed so that few tokens are padding.

B rows of a microbatch, S places of a row. A row holds one chat after another; a token sees its own chat alone, and
positions begin anew with each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config.options import Config
from megatron.data.batches import BatchPlan
from megatron.data.chat.dataset import ChatDataset, PackedChats, open_chats
from megatron.data.packing import bucket_edges, bucket_length, pack_step, pad_to_edges
from megatron.parallel.context import ParallelContext
from megatron.tasks.task import Microbatch, Task

Rows = list[NDArray[np.int64]]
"""The rows of a microbatch, each the numbers of its chats."""
SFTDataset = ChatDataset | PackedChats

LOOKED_AT = 64
"""Steps from which the shapes of rows, and what is padding, are foretold."""


class SFTTask(Task):
    """Next-token prediction of the answers in chats."""

    def __init__(self, config: Config, *, device: str, data_parallel_size: int) -> None:
        self.config, self._device, self._data_parallel_size = config, device, data_parallel_size
        self._edges: NDArray[np.int64] | None = None
        tp = config.parallel.tensor_model_parallel_size
        self._multiple = tp if config.parallel.sequence_parallel else 1

    @classmethod
    def of(cls, config: Config, ctx: ParallelContext) -> SFTTask:
        return cls(config, device=ctx.device.type, data_parallel_size=ctx.num_batch_ranks)

    @property
    def masks_loss(self) -> bool:
        return True

    @property
    def bucketing(self) -> str:
        """off, octave or optimal."""
        asked = self.config.sft.bucketing
        return ("octave" if self._device == "hpu" else "off") if asked == "auto" else asked

    # The data

    def open_data(self) -> Sequence[SFTDataset | None]:
        config = self.config
        datasets: list[Any] = list(open_chats(config))
        if config.sft.packing == "dataset":
            datasets = [
                None if chats is None else PackedChats(chats, config.training.seq_length, config.training.seed)
                for chats in datasets
            ]
        if self.bucketing == "optimal" and config.varies_shapes:
            filled = [length for cells in self._first_steps(datasets[0]) for length in cells if length]
            longest = max(int(chats.lengths.max()) for chats in datasets if chats is not None)
            if config.sft.packing == "step":
                longest = config.row_length
            self._edges = bucket_edges(np.array([*filled, longest]), config.sft.num_buckets)
        return datasets

    def samples_per_epoch(self, dataset: SFTDataset) -> int:
        return len(dataset)

    def consumed_tokens(self, dataset: SFTDataset, consumed_samples: int) -> int:
        epochs, rest = divmod(consumed_samples, len(dataset))
        return epochs * dataset.tokens_before(0, len(dataset)) + dataset.tokens_before(epochs, rest)

    def samples_of(self, key: Rows) -> list[int]:
        return [int(chat) for row in key for chat in row]

    # What a step reads

    def plan(
        self,
        dataset: SFTDataset,
        global_batch_size: Callable[[int], int],
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> BatchPlan[Rows]:
        @lru_cache(maxsize=8)  # asked again by the steps that name a bad microbatch
        def plan(consumed_samples: int) -> tuple[int, Sequence[Rows]]:
            size = global_batch_size(consumed_samples)
            if size <= 0:
                return 0, []
            samples, cells = self._step(dataset, consumed_samples, size, data_parallel_size)
            return samples, cells[data_parallel_rank::data_parallel_size]

        return plan

    def _step(self, dataset: SFTDataset, consumed_samples: int, size: int, num_ranks: int) -> tuple[int, list[Rows]]:
        """The samples of a step, none beyond its epoch, and all its microbatches: microbatch m of rank r is number
        m * num_ranks + r. Some may have no rows.
        """
        epoch, begin = divmod(consumed_samples, len(dataset))
        samples = _order(dataset, epoch)[begin : begin + size]
        if isinstance(dataset, ChatDataset) and self.config.sft.packing == "step":
            step = pack_step(dataset.lengths[samples], self.config.row_length, num_ranks)
            packed = np.split(samples[step.order], step.starts[1:-1])
            return len(samples), [[chats] if len(chats) else [] for chats in packed]
        rows: Rows
        if isinstance(dataset, PackedChats):
            rows = [dataset.row(epoch, int(sample)) for sample in samples]
        else:  # the like-sized beside each other: what is padded to the longest is then little
            rows = [samples[i : i + 1] for i in np.argsort(-dataset.lengths[samples], kind="stable")]
        per_microbatch = self.config.training.micro_batch_size
        count = -(-len(rows) // (per_microbatch * num_ranks)) * num_ranks
        return len(samples), [rows[cell * per_microbatch : (cell + 1) * per_microbatch] for cell in range(count)]

    def read(self, dataset: SFTDataset, key: Rows) -> Microbatch:
        """Rows of chats, filled up with token 0, which nothing sees and whose loss does not count."""
        chats = dataset.chats if isinstance(dataset, PackedChats) else dataset
        lengths = [int(chats.lengths[row].sum()) for row in key]
        shape = (max(1, len(key)), self.row_length(max(lengths, default=1)))
        tokens, labels, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        mask = np.zeros(shape, dtype=np.float32)
        # of padding, each token sees itself alone
        starts = np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
        for number, row in enumerate(key):
            begin = 0
            for chat in row:
                ids, trained = chats.read(int(chat))
                place = (number, slice(begin, begin + len(ids) - 1))
                tokens[place], labels[place], mask[place] = ids[:-1], ids[1:], trained[1:]
                positions[place], starts[place] = np.arange(len(ids) - 1), begin
                begin += len(ids) - 1
        inputs = tuple(torch.from_numpy(part) for part in (tokens, positions, starts))
        return Microbatch(inputs, torch.from_numpy(labels), torch.from_numpy(mask), float(mask.sum()))

    def row_length(self, filled: int) -> int:
        """To how many places rows are padded of which the fullest holds so many tokens."""
        most = self.config.row_length
        if not self.config.varies_shapes:
            return most
        length = max(1, filled)
        if self._edges is not None:
            length = int(pad_to_edges([length], self._edges)[0])
        elif self.bucketing == "octave":
            length = int(bucket_length(length, self.config.sft.buckets_per_octave))
        return min(most, -(-length // self._multiple) * self._multiple)

    # What is told of it

    def _first_steps(self, dataset: SFTDataset) -> list[list[int]]:
        """Tokens in the fullest row of each microbatch, rank by rank, of the first steps of the first epoch."""
        chats = dataset.chats if isinstance(dataset, PackedChats) else dataset
        size = self.config.training.global_batch_size
        found = []
        for begin in range(0, min(len(dataset), LOOKED_AT * size), size):
            _, cells = self._step(dataset, begin, size, self._data_parallel_size)
            found.append([max((int(chats.lengths[row].sum()) for row in rows), default=0) for rows in cells])
        return found

    def describe(self, dataset: SFTDataset) -> str:
        chats = dataset.chats if isinstance(dataset, PackedChats) else dataset
        tokens, trained = int(chats.lengths.sum()), int(chats.loss_tokens.sum())
        training, packing = self.config.training, self.config.sft.packing
        rows = f" in {len(dataset):,} rows" if isinstance(dataset, PackedChats) else ""
        steps = self._first_steps(dataset)
        lengths = [self.row_length(fullest) for cells in steps for fullest in cells]
        held = dataset.tokens_before(0, min(len(dataset), len(steps) * training.global_batch_size))
        filled = held / (training.micro_batch_size * sum(lengths))
        shapes = len(set(lengths))
        return (
            f"sft: {len(chats):,} chats{rows}, {tokens:,} tokens an epoch, {trained / tokens:.1%} of them trained; "
            f"packing={packing} fills {filled:.1%} of the places, in {len(lengths) / len(steps):.1f} microbatches "
            f"a step and {shapes} {'shape' if shapes == 1 else 'shapes'} (of the first {len(steps)} steps)"
        )


@lru_cache(maxsize=4)
def _order(dataset: SFTDataset, epoch: int) -> NDArray[np.int64]:
    return dataset.order(epoch)
