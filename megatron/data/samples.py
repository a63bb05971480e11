"""Order in which samples are read, epoch by epoch: each once, or drawn from several sets by weight.

An epoch reads as many samples as there are. Without weights that is each of them once, shuffled. With weights each
place of an epoch goes to the set furthest behind its weight. A set is read in passes, each a shuffle of its own, which
run on from one epoch to the next: no sample is read again before all others of its set were.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import Drawn, digest, normalize
from megatron.data.extension import helpers
from megatron.data.gpt import SPLITS
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.packing import Packs, pack_dataset

logger = logging.getLogger(__name__)


class EpochOrder:
    """The order of the samples of several sets, numbered consecutively.

    `weights`: one for each set, in samples; None: all sets are read as one. `lengths_of(set, pass)` returns the tokens
    of each sample of a set in one of its passes, whose sum is that of every pass.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        seed: int,
        lengths_of: Callable[[int, int], NDArray[np.int64]],
    ):
        self.sizes = [sum(sizes)] if weights is None else list(sizes)
        self._seed, self._lengths_of = seed, lengths_of
        # reading ahead crosses into the next epoch
        self.epoch = lru_cache(maxsize=4)(self._epoch)
        """Returns the samples of an epoch in their order, and of each the pass through its set."""
        # pass 0 of each set, for its sum, and the pass in which it is
        self._ends = lru_cache(maxsize=2 * len(self.sizes) + 2)(self._ends_of)
        """Returns the tokens up to and with each sample of a pass."""
        self.firsts = np.cumsum([0, *self.sizes])
        """Number of the first sample of each set, and of all samples."""
        self._set_of: NDArray[np.int16] | None = None
        self.counts = np.array([len(self)], np.int64)
        """Samples of each set in an epoch."""
        if weights is not None:
            self._set_of, _ = helpers.build_blend_index(normalize(weights), len(self))
            self.counts = np.bincount(self._set_of, minlength=len(self.sizes)).astype(np.int64)

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return int(self.firsts[-1])

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._set_of is None:
            # one set is read whole in each epoch, so that its pass is the epoch
            return shuffled(len(self), self._seed, epoch), np.broadcast_to(np.int64(epoch), len(self))
        numbers, passes = np.empty(len(self), np.int64), np.empty(len(self), np.int64)
        for number, (size, count) in enumerate(zip(self.sizes, self.counts.tolist(), strict=True)):
            if not count:
                continue
            is_of_set = self._set_of == number
            # passes run on from one epoch to the next: this one reads [begin, end) of all passes end to end
            begin, end = epoch * count, (epoch + 1) * count
            each = range(begin // size, -(-end // size))
            drawn = slice(begin - each.start * size, end - each.start * size)
            order = np.concatenate([self._shuffle(number, one) for one in each])
            numbers[is_of_set] = self.firsts[number] + order[drawn]
            passes[is_of_set] = np.repeat(each, size)[drawn]
        return numbers, passes

    def drawn(self, consumed_samples: int) -> NDArray[np.int64]:
        """Return how many samples of each set are among the first `consumed_samples` of a run."""
        epochs, rest = divmod(consumed_samples, len(self))
        if self._set_of is None:
            return np.array([consumed_samples], np.int64)
        return epochs * self.counts + np.bincount(self._set_of[:rest], minlength=len(self.sizes))

    def tokens(self, consumed_samples: int) -> NDArray[np.int64]:
        """Return how many tokens of each set are in the first `consumed_samples` samples of a run."""
        tokens = []
        for number, drawn in enumerate(self.drawn(consumed_samples).tolist()):
            passes, rest = divmod(drawn, self.sizes[number])
            of_set = passes * int(self._ends(number, 0)[-1])
            if rest:
                of_set += int(self._ends(number, passes)[rest - 1])
            tokens.append(of_set)
        return np.array(tokens, np.int64)

    def _shuffle(self, number: int, each: int) -> NDArray[np.int64]:
        seed = self._seed
        if self._set_of is not None:
            # sets of one size may hold translations of each other: they are not to be read side by side
            seed = seed_of(self._seed, -1 - number)
        return shuffled(self.sizes[number], seed, each)

    def _ends_of(self, number: int, each: int) -> NDArray[np.int64]:
        return np.cumsum(self._lengths_of(number, each)[self._shuffle(number, each)])


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return 0 to count - 1 in the order of a seed and epoch, the same with every version of NumPy."""
    # not NumPy's generator, whose shuffles may change with its version
    order = np.arange(count, dtype=np.int64)
    helpers.Shuffler(seed_of(seed, epoch)).shuffle(order)
    return order


def seed_of(seed: int, epoch: int) -> int:
    """Return a 32-bit seed for an epoch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "little")


@dataclass(frozen=True)
class SampleFile:
    """An indexed dataset, and the numbers of the samples in use."""

    tokens: IndexedDataset
    rows: NDArray[np.int64]
    """[rows]"""
    sequences: ClassVar[int] = 1
    """Sequences of a sample."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sequence as they are stored, [rows, sequences]."""
        return self.tokens.lengths.reshape(-1, self.sequences)[self.rows].astype(np.int64)


F = TypeVar("F", bound=SampleFile)


class SampleDataset(ABC, Generic[F]):
    """Samples of several files, numbered consecutively, in the order of each epoch.

    `lengths`: the places of each sample in a row. `weights`: the share of each file in the samples that are read; None:
    every epoch reads each sample once. Raises DataError.
    """

    def __init__(self, files: Sequence[F], lengths: NDArray[np.int64], weights: Sequence[float] | None, seed: int):
        self.files, self.lengths, self.weights, self.seed = files, lengths, weights, seed
        # the sets of `epochs` may be one for all files; a sample is found in its file by these
        self._firsts = np.cumsum([0, *(len(file.rows) for file in files)])
        self.epochs = EpochOrder(
            np.diff(self._firsts).tolist(),
            weights,
            seed,
            lambda number, _: self.lengths_of(number),
        )
        self.fingerprint = ""
        """Equal for the same samples in the same order in every epoch."""

    def lengths_of(self, number: int) -> NDArray[np.int64]:
        """Return the places of the samples of a set of `epochs`."""
        first, end = self.epochs.firsts[number : number + 2]
        return self.lengths[first:end]

    def identity(self, *described: object) -> str:
        """Return the fingerprint of what is described and of the weights."""
        if self.weights is None:
            return digest(*described)
        return digest(*described, "weights", normalize(self.weights).tolist())

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
        self.files, self.weights = samples.files, samples.weights
        # of one set, or of each file by itself
        count = len(samples.epochs.sizes)
        self._packs = lru_cache(maxsize=3 * count + 2)(self._pack)
        """Returns the rows of a pass."""
        # every pass has as many rows as the first: the seed changes neighbours, not the lengths in a row
        sizes = [len(self._packs(number, 0)) for number in range(count)]
        self.epochs = EpochOrder(sizes, samples.weights, samples.seed, self._row_lengths)
        self.fingerprint = digest("packed", 1, samples.fingerprint, capacity)

    def _pack(self, number: int, each: int) -> Packs:
        return pack_dataset(self.samples.lengths_of(number), self._capacity, seed_of(self.samples.seed, each))

    def _row_lengths(self, number: int, each: int) -> NDArray[np.int64]:
        # no row is empty, which reduceat would take for one of the next
        packs = self._packs(number, each)
        return np.add.reduceat(self.samples.lengths_of(number)[packs.order], packs.starts[:-1])

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
    weights = dataset.weights or []
    for number in np.flatnonzero(dataset.epochs.counts == 0).tolist():
        fault = (
            f"{dataset.files[number].tokens.prefix} has the weight {weights[number]:g} of {sum(weights):g}, less than "
            f"one of the {len(dataset)} samples of an epoch"
        )
        if split == 0:
            raise DataError(f"{fault}; raise the weight, or leave the dataset out")
        logger.warning("%s: %s; none is read", SPLITS[split], fault)


def drawn_of(dataset: SampleDataset[SampleFile] | PackedSamples, consumed_samples: int) -> list[Drawn]:
    """Return what the first `consumed_samples` samples of a run are of each file; nothing without weights."""
    if dataset.weights is None:
        return []
    samples = dataset.epochs.drawn(consumed_samples).tolist()
    tokens = dataset.epochs.tokens(consumed_samples).tolist()
    return [
        Drawn(file.tokens.prefix, samples[number], tokens[number], samples[number] / dataset.epochs.sizes[number])
        for number, file in enumerate(dataset.files)
    ]
