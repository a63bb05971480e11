"""Order in which samples are read, epoch by epoch: each once, or drawn from several sets by weight.

An epoch reads as many samples as there are. Without weights that is each of them once, shuffled. With weights each
place of an epoch goes to the set furthest behind its weight. A set is read in passes, each a shuffle of its own, which
run on from one epoch to the next: no sample is read again before all others of its set were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import normalize
from megatron.data.extension import helpers


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
        self.sizes = list(sizes) if weights is not None else [sum(sizes)]
        self._seed, self._lengths_of = seed, lengths_of
        self.epoch = lru_cache(maxsize=4)(self._epoch)
        """Returns the samples of an epoch in their order, and of each the pass through its set."""
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
            return shuffled(len(self), self._seed, epoch), np.broadcast_to(np.int64(epoch), len(self))
        numbers, passes = np.empty(len(self), np.int64), np.empty(len(self), np.int64)
        for number, (size, count) in enumerate(zip(self.sizes, self.counts.tolist(), strict=True)):
            if not count:
                continue
            places = self._set_of == number
            begin, end = epoch * count, (epoch + 1) * count
            each = range(begin // size, -(-end // size))
            drawn = slice(begin - each.start * size, end - each.start * size)
            numbers[places] = self.firsts[number] + np.concatenate([self._shuffle(number, p) for p in each])[drawn]
            passes[places] = np.repeat(each, size)[drawn]
        return numbers, passes

    def drawn(self, consumed_samples: int) -> NDArray[np.int64]:
        """Return how many samples of each set are among the first `consumed_samples` of a run."""
        epochs, rest = divmod(consumed_samples, len(self))
        if self._set_of is None:
            return np.array([consumed_samples], np.int64)
        return epochs * self.counts + np.bincount(self._set_of[:rest], minlength=len(self.sizes))

    def tokens(self, consumed_samples: int) -> NDArray[np.int64]:
        """Return how many tokens of each set are in the first `consumed_samples` samples of a run."""
        found = []
        for number, drawn in enumerate(self.drawn(consumed_samples).tolist()):
            passes, rest = divmod(drawn, self.sizes[number])
            total = int(self._ends(number, 0)[-1])
            found.append(passes * total + (int(self._ends(number, passes)[rest - 1]) if rest else 0))
        return np.array(found, np.int64)

    def _shuffle(self, number: int, each: int) -> NDArray[np.int64]:
        # sets of one size may hold translations of each other: they are not to be read side by side
        seed = self._seed if self._set_of is None else seed_of(self._seed, -1 - number)
        return shuffled(self.sizes[number], seed, each)

    def _ends_of(self, number: int, each: int) -> NDArray[np.int64]:
        return np.cumsum(self._lengths_of(number, each)[self._shuffle(number, each)])


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return 0 to count - 1 in the order of a seed and epoch, the same with every version of NumPy."""
    order = np.arange(count, dtype=np.int64)
    helpers.Shuffler(seed_of(seed, epoch)).shuffle(order)
    return order


def seed_of(seed: int, epoch: int) -> int:
    """Return a 32-bit seed for an epoch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "little")
