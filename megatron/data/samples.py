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
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import Drawn, SeparateSets, digest, normalize
from megatron.data.extension import helpers
from megatron.data.gpt import SPLIT_WORDS, SPLITS
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.packing import Packs, pack_dataset
from megatron.options.config import Config
from megatron.options.data import parse_data_path, parse_split


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


# ---------------------------------------------------------------------------------------------------------------------
# Held-out samples that are in other data too, token for token, so that their loss is not one of unseen data.

LOOKED_AT = 8
"""Tokens of a sample that are compared before all of them are."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Documents(Protocol):
    """Documents of an indexed dataset, of equally many sequences each, and those in use."""

    @property
    def tokens(self) -> IndexedDataset: ...
    @property
    def rows(self) -> NDArray[np.int64]:
        """[rows]"""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each sequence, [rows, sequences]."""


# What is repeated leaves the validation, not the training, whose data and fingerprint so stay what they are.
def repeats(held_out: Documents, others: Sequence[Documents]) -> NDArray[np.bool_]:
    """Return which of the documents [rows] are also in one of the other files."""
    signs, count = _signs(held_out), held_out.lengths().shape[1]
    is_candidate = np.zeros(len(signs), np.bool_)
    contents: set[bytes] = set()
    for other in others:
        theirs = _signs(other)
        is_candidate |= np.isin(signs, theirs)
        contents |= {_content(other, int(number), count) for number in np.flatnonzero(np.isin(theirs, signs))}
    found = np.zeros(len(signs), np.bool_)
    for number in np.flatnonzero(is_candidate).tolist():
        found[number] = _content(held_out, number, count) in contents
    return found


def _signs(file: Documents) -> NDArray[np.uint64]:
    """Return a number for each document, equal for equal ones, from its lengths and a few of its tokens."""
    file.tokens.files.check(always=True)
    lengths = file.lengths()
    starts = np.asarray(file.tokens.pointers[file.rows * lengths.shape[1]]) // file.tokens.dtype.itemsize
    totals = lengths.sum(axis=1)
    parts = [*lengths.T]
    for part in range(LOOKED_AT):
        # from both ends: chats often begin alike
        places = starts + (totals - 1) * part // (LOOKED_AT - 1)
        parts.append(np.take(file.tokens.tokens, places, mode="clip"))
    found = np.zeros(len(totals), np.uint64)
    for each in parts:
        found = (found ^ each.astype(np.int64).astype(np.uint64)) * FACTOR
        found ^= found >> np.uint64(29)
    return found


def _content(file: Documents, number: int, count: int) -> bytes:
    first = count * int(file.rows[number])
    digest = hashlib.blake2b(digest_size=16)
    for sequence in range(first, first + count):
        ids = file.tokens.read(sequence).astype(np.int64)
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.digest()


# ---------------------------------------------------------------------------------------------------------------------
# Samples of several files that are read in epochs: the base of the datasets of chats and pairs, and rows of them.

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
    parsed: list[tuple[Sequence[str], Sequence[float] | None]] = []
    for _, words in config.data.paths:
        parsed.append(parse_data_path(words) if words else ([], None))
    files = [[open_file(prefix, split) for prefix in prefixes] for split, (prefixes, _) in enumerate(parsed)]
    for split in (1, 2):
        earlier = [file for before in files[:split] for file in before]
        files[split] = [_without_repeats(file, earlier, config, split, noun) for file in files[split]]

    def dataset_of(split: int) -> Any:
        option, words = config.data.paths[split]
        said = f"{option}={' '.join(words)}"
        if not config.data.per_split:
            said += f", split={config.data.split}"
        kept = [number for number, file in enumerate(files[split]) if len(file.rows)]
        if len(kept) < len(files[split]) or (not kept and split == 0):
            _report_empty(config, split, noun, said, files[split])
        if not kept:
            return None
        weights = parsed[split][1]
        shares = None if weights is None else [weights[number] for number in kept]
        chosen = [files[split][number] for number in kept]
        if split == 0 or not config.data.multiple_validation_sets or len(kept) == 1:
            return build(chosen, shares, said)
        names = [file.tokens.prefix for file in chosen]
        apart = [build([file], None, f"{said}: {file.tokens.prefix}") for file in chosen]
        return SeparateSets(names, apart, shares)

    return dataset_of(0), dataset_of(1), dataset_of(2)


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
