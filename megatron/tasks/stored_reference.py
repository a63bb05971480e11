"""A reference that is computed once: by forward passes of the model at the start, into files beside the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError
from megatron.data.label_file import Values, label_path, open_reference
from megatron.data.preference.dataset import PairDataset, PairFile
from megatron.data.preference.preprocessing import SEQUENCES
from megatron.parallel.context import ParallelContext
from megatron.tasks.data import Microbatch
from megatron.tasks.objective import Forward, StartWeights
from megatron.tasks.packed import PackedData
from megatron.tasks.preference_losses import answer_logps
from megatron.tasks.stored_labels import on_rank_0

ANSWERS_AT_A_TIME = 512
"""Answers of each data-parallel rank between two writes."""


class StoredReference:
    """The reference of a dataset's answers. Rank 0 alone reads and writes the files. All methods are collective."""

    def __init__(
        self,
        data: PackedData,
        pairs: PairDataset,
        lengths: NDArray[np.int64],
        read: Callable[[list[NDArray[np.int64]]], Microbatch],
        start: StartWeights,
        ctx: ParallelContext,
        mismatched: str | None = None,
    ) -> None:
        """`lengths` [pairs, 2] are the places of the answers, 0 for one that a row lacks; `read` returns rows of them
        by their numbers. `mismatched`: fingerprint of the dataset by which prompts have other answers.
        """
        self._data, self._pairs, self._start, self._ctx = data, pairs, start, ctx
        self._read, self._lengths, self._mismatched = read, lengths, mismatched
        self._files: list[tuple[PairFile, slice, Path, Values]] = []
        self.lines: list[str] = []
        """A line for each file, of the answers computed now."""

    def facts_of(self, file: PairFile) -> dict[str, str]:
        """Return what the numbers depend on."""
        limits, config = self._pairs.limits, self._data.config
        facts = {
            "data": file.tokens.fingerprint,
            "base": self._start.fingerprint,
            "max_length": str(limits.max_length),
            "max_prompt_length": str(limits.max_prompt_length),
            "truncation": limits.truncation,
            "precision": config.training.precision,
            "quantize_base": str(config.model.quantize_base),
        }
        # only where it is set, so that files written without it keep their name
        if config.preference.ld_alpha is not None:
            facts["ld_alpha"] = str(config.preference.ld_alpha)
        if self._mismatched is not None:
            facts["mismatched"] = self._mismatched
        return facts

    def complete(self, forward: Forward) -> NDArray[np.float32]:
        """Compute what the files lack, and return the log-probabilities [pairs, 2]. Raises DataError."""
        # NaN: not computed yet, in memory as in the files
        values = np.full(self._lengths.shape, np.nan, np.float32)
        on_rank_0(self._ctx, lambda: self._open(values))
        if self._ctx.world_size > 1:
            dist.broadcast(torch.from_numpy(values), src=0, group=self._ctx.control_group)
        missing = np.flatnonzero(np.isnan(values) & (self._lengths > 0))
        # by the weights of now it would be another reference than that of the steps before
        if len(missing) and not self._start.are_loaded:
            raise DataError(
                f"the reference of {len(missing)} of {int((self._lengths > 0).sum())} answers is missing beside "
                f"{' '.join(file.tokens.prefix for file, _ in self._pairs.by_file())}, and this run has trained the "
                "model since; put the reference files back, or start again from the model that they are of"
            )
        step = ANSWERS_AT_A_TIME * self._ctx.num_batch_ranks
        for begin in range(0, len(missing), step):
            numbers = missing[begin : begin + step]
            found = self._compute(numbers, forward)
            values.reshape(-1)[numbers] = found
            on_rank_0(self._ctx, partial(self._write, numbers, found))
        what = "answers" if self._mismatched is None else "mismatched answers"
        # an answer's number is 2 x its pair's, and 1 more if it is the rejected one
        is_new = np.bincount(missing // 2, minlength=len(values))
        self.lines = [
            f"reference of {int((self._lengths[place] > 0).sum()):,} {what}, {int(is_new[place].sum()):,} of them "
            f"computed now: {path}"
            for _, place, path, _ in self._files
        ]
        return values

    def _open(self, values: NDArray[np.float32]) -> None:
        for file, place in self._pairs.by_file():
            facts = self.facts_of(file)
            path = label_path(file.tokens.prefix, "reference", facts)
            stored = open_reference(path, len(file.tokens) // SEQUENCES, facts)
            values[place] = stored[file.rows]
            self._files.append((file, place, path, stored))

    def _write(self, numbers: NDArray[np.int64], found: NDArray[np.float32]) -> None:
        if not np.isfinite(found).all():
            raise DataError(
                "the reference gives log-probabilities that are not finite; start from another model, or in float32"
            )
        pairs, sides = np.divmod(numbers, 2)
        for file, place, _, stored in self._files:
            own = (pairs >= place.start) & (pairs < place.stop)
            stored[file.rows[pairs[own] - place.start], sides[own]] = found[own]
            # after each block, so that a run that is stopped goes on from here
            stored.flush()

    def _compute(self, numbers: NDArray[np.int64], forward: Forward) -> NDArray[np.float32]:
        """Return the log-probabilities [answers] of these, on every rank."""
        ctx = self._ctx
        cells = self._data.packed_sequences(self._lengths.reshape(-1)[numbers], ctx.num_batch_ranks)
        cells = cells[ctx.batch_rank :: ctx.num_batch_ranks]
        microbatches = []
        if ctx.is_first_stage or ctx.is_last_stage:  # inner stages read nothing
            microbatches = [self._read([numbers[row] for row in rows]) for rows in cells]
        # adapters off: with them the reference is their base, stored or not
        results = forward(microbatches, partial(answer_logps, ctx=ctx), adapters=False, num_microbatches=len(cells))
        found = torch.zeros(len(numbers), device=ctx.device)
        if ctx.is_last_stage and ctx.leads_rows:
            for rows, result in zip(cells, results, strict=True):
                found[torch.from_numpy(np.concatenate(rows)).to(ctx.device)] = result.float()
        if ctx.world_size > 1:
            dist.all_reduce(found)
        return found.cpu().numpy()  # type: ignore[no-any-return]
