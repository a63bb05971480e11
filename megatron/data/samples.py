"""Samples of several files that are read in epochs: the base of the datasets of chats and pairs, and rows of them."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import parse_data_path, parse_split
from megatron.config.options import Config
from megatron.data.blend import Drawn, digest, normalize
from megatron.data.epochs import EpochOrder, seed_of, shuffled
from megatron.data.gpt import SPLIT_WORDS, SPLITS
from megatron.data.indexed import DataError
from megatron.data.packing import Packs, pack_dataset
from megatron.data.repeats import Documents, repeats
from megatron.data.separate_sets import SeparateSets

logger = logging.getLogger(__name__)

SPLIT_SEED = 0
"""Seed of the split, which depends on the data and `split` only, not on the run."""


S = TypeVar("S")


class SampleFile(Documents, Protocol):
    """An indexed dataset, and the samples in use."""

    def keep(self: S, kept: NDArray[np.bool_]) -> S:
        """Return the file with some of its samples, [rows]."""


F = TypeVar("F", bound=SampleFile)
D = TypeVar("D")
Splits = tuple[D, D | SeparateSets | None, D | SeparateSets | None]
"""Training, validation and test samples."""


class SampleDataset(ABC, Generic[F]):
    """Samples of several files, numbered consecutively, in the order of each epoch.

    `lengths`: the places of each sample in a row. `weights`: the share of each file in the samples that are read; None:
    every epoch reads each sample once. Raises DataError.
    """

    def __init__(self, files: Sequence[F], lengths: NDArray[np.int64], weights: Sequence[float] | None, seed: int):
        self.files, self.lengths, self.weights, self.seed = files, lengths, weights, seed
        self._firsts = np.cumsum([0, *(len(file.rows) for file in files)])
        self.epochs = EpochOrder(
            np.diff(self._firsts).tolist(),
            weights,
            seed,
            lambda number, _: self._lengths_of(number),
        )
        self.fingerprint = ""
        """Equal for the same samples in the same order in every epoch."""

    def _lengths_of(self, number: int) -> NDArray[np.int64]:
        first, end = self.epochs.firsts[number : number + 2]
        return self.lengths[first:end]

    def identity(self, *described: object) -> str:
        """Return the fingerprint of what is described and of the weights."""
        return digest(*described, *([] if self.weights is None else ["weights", normalize(self.weights).tolist()]))

    def __len__(self) -> int:
        """Return the number of samples, of which an epoch reads as many."""
        return len(self.lengths)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples in the order of an epoch."""
        return self.epochs.epoch(epoch)[0]

    def by_file(self) -> Iterator[tuple[F, slice]]:
        """Yield the files, and which samples are theirs."""
        for number, file in enumerate(self.files):
            yield file, slice(int(self._firsts[number]), int(self._firsts[number + 1]))

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        """Return the prefix of a sample's file, and its number there."""
        file, row = self.place(sample)
        return file.tokens.prefix, [row]

    def place(self, sample: int) -> tuple[F, int]:
        """Return the file of a sample, and its number there."""
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        file = self.files[number]
        return file, int(file.rows[sample - self._firsts[number]])


class PackedSamples:
    """Rows of samples, each of at most `capacity` tokens: what a run with packing=dataset counts as its samples.

    Every pass through the samples has equally many rows of the same lengths, with different samples packed together.
    With weights each row holds samples of one file, and the weights are the shares of the rows.
    """

    def __init__(self, samples: SampleDataset[SampleFile], capacity: int):
        self.samples, self._capacity = samples, capacity
        # of one set, or of each file by itself
        count = len(samples.epochs.sizes)
        self._packs = lru_cache(maxsize=3 * count + 2)(self._pack)
        """Returns the rows of a pass."""
        sizes = [len(self._packs(number, 0)) for number in range(count)]
        self.epochs = EpochOrder(sizes, samples.weights, samples.seed, self._row_lengths)
        self.fingerprint = digest("packed", 1, samples.fingerprint, capacity)

    def _pack(self, number: int, each: int) -> Packs:
        return pack_dataset(self._lengths_of(number), self._capacity, seed_of(self.samples.seed, each))

    def _lengths_of(self, number: int) -> NDArray[np.int64]:
        first, end = self.samples.epochs.firsts[number : number + 2]
        return self.samples.lengths[first:end]

    def _row_lengths(self, number: int, each: int) -> NDArray[np.int64]:
        packs = self._packs(number, each)
        return np.add.reduceat(self._lengths_of(number)[packs.order], packs.starts[:-1])

    def __len__(self) -> int:
        """Return the number of rows in an epoch."""
        return len(self.epochs)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the places of an epoch, which `row` takes."""
        return np.arange(len(self), dtype=np.int64)

    def row(self, epoch: int, place: int) -> NDArray[np.int64]:
        """Return the numbers of the samples in the row at a place of an epoch."""
        rows, passes = self.epochs.epoch(epoch)
        number = int(np.searchsorted(self.epochs.firsts, rows[place], side="right")) - 1
        packs = self._packs(number, int(passes[place]))
        first = self.samples.epochs.firsts[number]
        return first + packs[int(rows[place] - self.epochs.firsts[number])]

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        return self.samples.documents_of(sample)


def check_weights(dataset: SampleDataset[SampleFile] | PackedSamples, split: int) -> None:
    """Raise DataError for a file whose weight is too small for one training sample; warn of a held-out one."""
    samples = dataset.samples if isinstance(dataset, PackedSamples) else dataset
    for number in np.flatnonzero(dataset.epochs.counts == 0).tolist():
        weights = samples.weights or []
        fault = (
            f"{samples.files[number].tokens.prefix} has the weight {weights[number]:g} of {sum(weights):g}, less than "
            f"one of the {len(dataset)} samples of an epoch"
        )
        if split == 0:
            raise DataError(f"{fault}; raise the weight, or leave the dataset out")
        logger.warning("%s: %s; none is read", SPLITS[split], fault)


def drawn_of(dataset: SampleDataset[SampleFile] | PackedSamples, consumed_samples: int) -> list[Drawn]:
    """Return what the first `consumed_samples` samples of a run are of each file; nothing without weights."""
    samples = dataset.samples if isinstance(dataset, PackedSamples) else dataset
    if samples.weights is None:
        return []
    order = dataset.epochs
    return [
        Drawn(file.tokens.prefix, drawn, tokens, drawn / size)
        for file, drawn, tokens, size in zip(
            samples.files,
            order.drawn(consumed_samples).tolist(),
            order.tokens(consumed_samples).tolist(),
            order.sizes,
            strict=True,
        )
    ]


# Opening


def rows_of_split(count: int, config: Config, split: int | None) -> NDArray[np.int64]:
    """Return the rows of a file of `count` that a split has (None: all), in the order of the file."""
    if split is None:
        return np.arange(count, dtype=np.int64)
    bounds = np.rint(np.cumsum((0.0, *parse_split(config.data.split))) * count).astype(np.int64)
    return np.sort(shuffled(count, SPLIT_SEED, 0)[bounds[split] : bounds[split + 1]])


def open_splits(
    config: Config,
    noun: str,
    open_file: Callable[[str, int], F],
    build: Callable[[Sequence[F], Sequence[float] | None, str], D],
) -> Splits[D]:
    """Return the datasets for training, validation and test; the last two None if the config leaves none.

    With multiple_validation_sets the held-out files are kept apart. `open_file(prefix, split)` returns a file with its
    samples of a split, `build(files, weights, said)` the dataset of several; `said` names them in an error. `noun`: the
    word for several samples. Raises DataError.
    """
    parsed = [parse_data_path(words) if words else ([], None) for _, words in config.data.paths]
    files = [[open_file(prefix, split) for prefix in prefixes] for split, (prefixes, _) in enumerate(parsed)]
    for split in (1, 2):
        earlier = [file for before in files[:split] for file in before]
        files[split] = [_without_repeats(file, earlier, config, split, noun) for file in files[split]]
    found: list[Any] = []
    for split, (option, words) in enumerate(config.data.paths):
        said = f"{option}={' '.join(words)}" + ("" if config.data.per_split else f", split={config.data.split}")
        kept = [number for number, file in enumerate(files[split]) if len(file.rows)]
        if len(kept) < len(files[split]) or (not kept and split == 0):
            _report_empty(config, split, noun, said, files[split])
        weights = parsed[split][1]
        shares = None if weights is None else [weights[number] for number in kept]
        chosen = [files[split][number] for number in kept]
        if split > 0 and config.data.multiple_validation_sets and len(kept) > 1:
            names = [file.tokens.prefix for file in chosen]
            apart = [build([file], None, f"{said}: {file.tokens.prefix}") for file in chosen]
            found.append(SeparateSets(names, apart, shares))
        else:
            found.append(build(chosen, shares, said) if chosen else None)
    train, valid, test = found
    return train, valid, test


def _report_empty(config: Config, split: int, noun: str, said: str, files: Sequence[SampleFile]) -> None:
    """Raise DataError for files without training samples; warn of files without held-out ones, if there should be."""
    empty = [file.tokens.prefix for file in files if not len(file.rows)]
    if split == 0:
        what = f"{said}: {empty[0]}" if 0 < len(empty) < len(files) else said
        raise DataError(f"{what} leaves no {noun} to train on; give more {noun}, or raise the first share of split")
    if config.data.per_split or parse_split(config.data.split)[split]:
        effect = "left out" if len(empty) < len(files) else f"the run has no {SPLIT_WORDS[split]} loss"
        logger.warning("no %s %s in %s; %s", SPLIT_WORDS[split], noun, ", ".join(empty), effect)


def _without_repeats(file: F, earlier: Sequence[F], config: Config, split: int, noun: str) -> F:
    """Leave out held-out samples that are in the data before them, and count them in a warning.

    Files that the user gave as validation or test data are left as they are.
    """
    if not len(file.rows):
        return file
    repeated = repeats(file, earlier)
    if not repeated.any():
        return file
    where = "training" if split == 1 else "training or validation"
    logger.warning(
        "%s: %d of %d %s of %s are in the %s data too; %s",
        SPLITS[split],
        int(repeated.sum()),
        len(repeated),
        noun,
        file.tokens.prefix,
        where,
        "the loss over them is not one of unseen data" if config.data.per_split else "left out",
    )
    return file if config.data.per_split else file.keep(~repeated)
