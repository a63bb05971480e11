"""A reference that is computed once: by forward passes of the model at the start, into files beside the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron.data.indexed import DataError
from megatron.data.packing import pack_step
from megatron.data.preference.dataset import PairDataset, PairFile
from megatron.data.preference.preprocessing import SEQUENCES
from megatron.data.preference.reference import Values, open_reference, reference_path
from megatron.parallel.context import ParallelContext
from megatron.tasks.packed import PackedTask
from megatron.tasks.preference_losses import answer_logps
from megatron.tasks.task import Forward, StartWeights

PAIRS_AT_A_TIME = 256
"""Pairs of each data-parallel rank between two writes."""


class StoredReference:
    """The reference of a dataset's pairs. Rank 0 alone reads and writes the files. All methods are collective."""

    def __init__(self, task: PackedTask, pairs: PairDataset, start: StartWeights, ctx: ParallelContext) -> None:
        self._task, self._pairs, self._start, self._ctx = task, pairs, start, ctx
        self._files: list[tuple[PairFile, slice, Path, Values]] = []

    def facts_of(self, file: PairFile) -> dict[str, str]:
        """Return what the numbers depend on."""
        limits, config = self._pairs.limits, self._task.config
        return {
            "data": file.tokens.fingerprint,
            "base": self._start.fingerprint,
            "max_length": str(limits.max_length),
            "max_prompt_length": str(limits.max_prompt_length),
            "truncation": limits.truncation,
            "precision": config.training.precision,
            "quantize_base": str(config.model.quantize_base),
        }

    def complete(self, forward: Forward) -> list[str]:
        """Compute what the files lack, and give the numbers to the dataset. Return what was done, a line a file.

        Raises DataError.
        """
        values = np.full((len(self._pairs), 2), np.nan, np.float32)
        self._on_rank_0(lambda: self._open(values))
        if self._ctx.world_size > 1:
            dist.broadcast(torch.from_numpy(values), src=0, group=self._ctx.control_group)
        missing = np.flatnonzero((np.isnan(values) & (self._pairs.labels > 0)).any(axis=1))
        if len(missing) and not self._start.are_loaded:
            raise DataError(
                f"the reference of {len(missing)} of {len(values)} pairs is missing beside "
                f"{' '.join(file.tokens.prefix for file, _ in self._pairs.by_file())}, and this run has trained the "
                "model since; put the reference files back, or start again from the model that they are of"
            )
        step = PAIRS_AT_A_TIME * self._ctx.num_batch_ranks
        for begin in range(0, len(missing), step):
            numbers = missing[begin : begin + step]
            found = self._compute(numbers, forward)
            values[numbers] = found
            self._on_rank_0(partial(self._write, numbers, found))
        self._pairs.reference = values
        return [
            f"reference of {len(values):,} pairs, {len(missing):,} of them computed now: {path}"
            for _, _, path, _ in self._files
        ]

    def _open(self, values: NDArray[np.float32]) -> None:
        for file, place in self._pairs.by_file():
            facts = self.facts_of(file)
            path = reference_path(file.tokens.prefix, facts)
            stored = open_reference(path, len(file.tokens) // SEQUENCES, facts)
            values[place] = stored[file.rows]
            self._files.append((file, place, path, stored))

    def _write(self, numbers: NDArray[np.int64], found: NDArray[np.float32]) -> None:
        if not np.isfinite(found).all():
            raise DataError(
                "the reference gives log-probabilities that are not finite; start from another model, or in float32"
            )
        for file, place, _, stored in self._files:
            own = (numbers >= place.start) & (numbers < place.stop)
            stored[file.rows[numbers[own] - place.start]] = found[own]
            stored.flush()

    def _compute(self, numbers: NDArray[np.int64], forward: Forward) -> NDArray[np.float32]:
        """Return the log-probabilities [pairs, 2] of these pairs, on every rank."""
        ctx, task = self._ctx, self._task
        step = pack_step(self._pairs.lengths[numbers], task.row_length, ctx.num_batch_ranks)
        cells = np.split(step.order, step.starts[1:-1])[ctx.batch_rank :: ctx.num_batch_ranks]
        # a pipeline whose shapes do not vary takes full microbatches
        empty = 0 if task.varies_shapes else task.config.training.micro_batch_size - 1
        keys = task.keys_of_step(self._pairs, [[numbers[cell], *[cell[:0]] * empty] for cell in cells])
        reads = ctx.is_first_stage or ctx.is_last_stage
        results = forward(
            [task.read(self._pairs, key) for key in keys] if reads else [],
            partial(answer_logps, ctx=ctx),
            adapters=False,
            num_microbatches=len(keys),
        )
        found = torch.zeros(len(numbers), 2, device=ctx.device)
        if ctx.is_last_stage and ctx.tensor_rank == 0:
            for cell, result in zip(cells, results, strict=True):
                found[torch.from_numpy(cell).to(ctx.device)] = result.float()
        if ctx.world_size > 1:
            dist.all_reduce(found)
        return found.cpu().numpy()  # type: ignore[no-any-return]

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """Run on rank 0, and raise its error on every rank."""
        error: str | None = None
        if self._ctx.rank == 0:
            try:
                work()
            except (DataError, OSError) as problem:
                error = str(problem)
        if (error := self._ctx.broadcast_object(error)) is not None:
            raise DataError(error)
