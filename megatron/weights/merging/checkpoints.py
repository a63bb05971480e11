"""The weighted mean of checkpoints of one model, as one source of weights.

Checkpoints of the stable part of a schedule, merged, stand for the model that an annealing would have given (Tian et
al. 2025, WSM, arXiv:2507.17634); the mean of several runs from one start is a model soup (Wortsman et al. 2022,
arXiv:2203.05482).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.folders import checkpoint_folders, of_run
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import read_latest
from megatron.checkpoint.source import Slice, WeightSource
from megatron.options.schedule import ANNEALING
from megatron.runtime.commands import counted
from megatron.weights.model import WholeModel, different

CHUNK_NUMEL = 1 << 22
"""Numbers that are summed at a time, in float64."""


class AveragedSource(WeightSource):
    """The mean of the weights of several models. Sums are in float64, and rounded once."""

    format, title = "averaged", "averaged"
    # the moments of the checkpoints belong to none of their means
    holds_run = False

    def __init__(self, models: Sequence[WholeModel], shares: Sequence[float]) -> None:
        """`shares`: of each model; their sum is 1. The last model says what is beside the weights.

        Raises CheckpointError unless all are of one model.
        """
        last = models[-1]
        for model in models[:-1]:
            _check_same(model, last)
        super().__init__(last.source.folder, last.source.parameters, metadata=last.source.metadata, config=last.config)
        self._sources = [model.source for model in models]
        self._shares = list(shares)
        # what is read in order cannot be read chunk by chunk
        self.reads_slices = all(source.reads_slices for source in self._sources)

    @property
    def parts(self) -> Sequence[WeightSource]:
        return self._sources

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        mean = torch.empty(at.numel)
        step = CHUNK_NUMEL if self.reads_slices else max(1, at.numel)
        for start in range(0, at.numel, step):
            part = replace(at, start=at.start + start, numel=min(step, at.numel - start))
            total = torch.zeros(part.numel, dtype=torch.float64)
            for source, share in zip(self._sources, self._shares, strict=True):
                total.add_(source.read(part, kind), alpha=share)
            mean[start : start + part.numel] = total
        return mean

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        checked = [source.verify(share, ("weight",)) for source in self._sources]
        return "; ".join(dict.fromkeys(checked))


def averaged_model(models: Sequence[WholeModel], shares: Sequence[float]) -> WholeModel:
    """Return the mean of the models. Raises CheckpointError."""
    return WholeModel(AveragedSource(models, shares), models[-1].config)


def _check_same(model: WholeModel, other: WholeModel) -> None:
    """Raise CheckpointError unless both are of one model: of the same options and the same parameters."""
    ours, theirs = model.config.model, other.config.model
    names = [each.name for each in dataclasses.fields(ours) if getattr(ours, each.name) != getattr(theirs, each.name)]
    if names:
        name = names[0]
        raise CheckpointError(
            f"{model.source.folder} is of {name}={getattr(ours, name)}, {other.source.folder} of "
            f"{name}={getattr(theirs, name)}; give checkpoints of one model"
        )
    if fault := different(model.source.parameters, other.source.parameters):
        raise CheckpointError(f"{model.source.folder} and {other.source.folder} are of two models: {fault}")


def check_sequence(models: Sequence[WholeModel], *, oldest_first: bool) -> None:
    """Raise CheckpointError for a checkpoint that is named twice or, if `oldest_first`, before an earlier one."""
    folders = [model.source.folder.resolve() for model in models]
    for model, folder in zip(models, folders, strict=True):
        if folders.count(folder) > 1:
            raise CheckpointError(f"{model.source.folder} is named twice; name it once, with a weight")
    if not oldest_first:
        return
    for before, model in itertools.pairwise(models):
        (run, step), (next_run, next_step) = (_moment(each.source) for each in (before, model))
        if run is not None and run == next_run and next_step < step:
            raise CheckpointError(
                f"{model.source.folder} is of step {next_step}, {before.source.folder} of step {step}; name the oldest "
                "first"
            )


def _moment(source: WeightSource) -> tuple[str | None, int]:
    """Return the run that saved a checkpoint, None for other formats, and its step."""
    run, progress = source.metadata.get("run") or {}, source.metadata.get("progress") or {}
    return run.get("id"), progress.get("iteration", 0)


def mean_shares(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum. Raises CheckpointError for a sum that gives no mean."""
    total = math.fsum(weights)
    if not total > 0:
        raise CheckpointError(f"the weights add up to {total:g}, but a mean needs a positive sum; change them")
    return [weight / total for weight in weights]


def moving_shares(count: int, decay: float) -> list[float]:
    """Return the shares of an exponential moving average of so many checkpoints, the oldest first.

    It starts as the oldest, and each later one takes 1 - decay of it.
    """
    newer = [(1 - decay) * decay ** (count - 1 - index) for index in range(1, count)]
    return [decay ** (count - 1), *newer]


def annealed_shares(count: int, shape: str) -> list[float]:
    """Return the shares of so many checkpoints, the oldest first, whose mean is what an annealing would have given.

    `shape`: of ANNEALING (options/schedule.py). The steps between the checkpoints j - 1 and j count by the share of the
    learning rate that a decay over `count` intervals has left at its j-th; linear gives equal shares. Source: WSM
    (arXiv:2507.17634), theorem 3.1: the share of a checkpoint is what the steps before it count more than those after.
    """
    # 1 before the oldest: what came before the decay counts in full; after the newest nothing counts
    left = [1.0, *(ANNEALING[shape](index / count) for index in range(1, count)), 0.0]
    return [before - after for before, after in itertools.pairwise(left)]


def newest_of_run(save: Path, count: int) -> list[Path]:
    """Return the newest checkpoints of the run that saved last in a folder, and of those it continues, oldest first.

    Raises CheckpointError if there are fewer.
    """
    if not save.is_dir():
        raise CheckpointError(
            f"{save} is {'a file' if save.exists() else 'not there'}; give the folder of a run's saves"
        )
    _, run = read_latest(save)
    found = checkpoint_folders(save)
    # checkpoints of two runs in one folder have no mean that anybody wants
    if run is None:
        raise CheckpointError(f"{save} does not say which run saved there last; give --load its checkpoints one by one")
    found = of_run(run, found, with_ancestors=True)
    found = [path for path in found if not path.name.startswith(".")]
    if len(found) < count:
        raise CheckpointError(
            f"{save} holds {counted(len(found), 'checkpoint')} of its run, but --last is {count}; use {len(found)}"
        )
    return found[:count][::-1]
