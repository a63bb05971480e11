"""Splits of files of samples, drawn at random, and of held-out samples those that no other data has.

A held-out sample that is in other data too, token for token, would make its loss one of data that was seen.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import SeparateSets
from megatron.data.gpt import SPLIT_WORDS, SPLITS
from megatron.data.index.indexed import DataError
from megatron.data.samples import SampleFile, shuffled
from megatron.options.config import Config
from megatron.options.data import parse_data_path, parse_split

logger = logging.getLogger(__name__)

SPLIT_SEED = 0
"""Seed of the split, which depends on the data and `split` only, not on the run."""
LOOKED_AT = 8
"""Tokens of a sample that are compared before all of them are."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)

F = TypeVar("F", bound=SampleFile)
D = TypeVar("D")
Splits = tuple[D, D | SeparateSets | None, D | SeparateSets | None]
"""Training, validation and test samples."""


def rows_of_split(count: int, config: Config, split: int | None) -> NDArray[np.int64]:
    """Return the rows of a file of `count` that a split has (None: all), in the order of the file."""
    if split is None:
        return np.arange(count, dtype=np.int64)
    bounds = np.rint(np.cumsum((0.0, *parse_split(config.data.split))) * count).astype(np.int64)
    # drawn at random, since files are often sorted by source or topic; in the order of the file, to be read from disk
    # so
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
    splits = [_opened(config, number, open_file) for number in range(len(SPLITS))]
    for number in (1, 2):
        earlier = [file for before in splits[:number] for file in before.files]
        files = [_without_repeats(file, earlier, config, number, noun) for file in splits[number].files]
        splits[number] = replace(splits[number], files=files)

    def dataset_of(split: _Split[F]) -> Any:
        filled = split.filled()
        if len(filled.files) < len(split.files) or not filled.files:
            _report_empty(config, split, noun)
        if not filled.files:
            return None
        if split.number == 0 or not config.data.multiple_validation_sets or len(filled.files) == 1:
            return build(filled.files, filled.weights, split.said)
        names = [file.tokens.prefix for file in filled.files]
        apart = [build([file], None, f"{split.said}: {file.tokens.prefix}") for file in filled.files]
        return SeparateSets(names, apart, filled.weights)

    training, validation, test = map(dataset_of, splits)
    return training, validation, test


@dataclass(frozen=True)
class _Split(Generic[F]):
    """Files of a split, each with its samples of it."""

    number: int
    said: str
    """The option that names the files."""
    files: Sequence[F]
    weights: Sequence[float] | None

    def filled(self) -> _Split[F]:
        """Return the files that have samples, and their weights."""
        numbers = [number for number, file in enumerate(self.files) if len(file.rows)]
        weights = self.weights
        if weights is not None:
            weights = [weights[number] for number in numbers]
        return replace(self, files=[self.files[number] for number in numbers], weights=weights)


def _opened(config: Config, number: int, open_file: Callable[[str, int], F]) -> _Split[F]:
    option, words = config.data.paths[number]
    said = f"{option}={' '.join(words)}"
    if not config.data.per_split:
        said += f", split={config.data.split}"
    if not words:
        return _Split(number, said, [], None)
    prefixes, weights = parse_data_path(words)
    return _Split(number, said, [open_file(prefix, number) for prefix in prefixes], weights)


def _report_empty(config: Config, split: _Split[F], noun: str) -> None:
    """Raise DataError for files without training samples; warn of files without held-out ones, if there should be."""
    empty = [file.tokens.prefix for file in split.files if not len(file.rows)]
    if split.number == 0:
        said = split.said
        if 0 < len(empty) < len(split.files):
            said += f": {empty[0]}"
        raise DataError(f"{said} leaves no {noun} to train on; give more {noun}, or raise the first share of split")
    is_wanted = config.data.per_split or parse_split(config.data.split)[split.number]
    if empty and is_wanted:
        words = SPLIT_WORDS[split.number]
        effect = "left out" if len(empty) < len(split.files) else f"the run has no {words} loss"
        logger.warning("no %s %s in %s; %s", words, noun, ", ".join(empty), effect)


def _without_repeats(file: F, earlier: Sequence[F], config: Config, split: int, noun: str) -> F:
    """Leave out held-out samples that are in the data before them, and count them in a warning.

    Files that the user gave as validation or test data are left as they are.
    """
    if not len(file.rows):
        return file
    repeated = _repeats(file, earlier)
    if not repeated.any():
        return file
    where, effect = "training", "left out"
    if split == 2:
        where = "training or validation"
    if config.data.per_split:
        effect = "the loss over them is not one of unseen data"
    logger.warning(
        "%s: %d of %d %s of %s are in the %s data too; %s",
        SPLITS[split],
        int(repeated.sum()),
        len(repeated),
        noun,
        file.tokens.prefix,
        where,
        effect,
    )
    if config.data.per_split:
        return file
    return replace(file, rows=file.rows[~repeated])


# What is repeated leaves the validation, not the training, whose data and fingerprint so stay what they are.
def _repeats(held_out: SampleFile, others: Sequence[SampleFile]) -> NDArray[np.bool_]:
    """Return which of the samples [rows] are also in one of the other files."""
    signs = _signs(held_out)
    is_candidate = np.zeros(len(signs), np.bool_)
    contents: set[bytes] = set()
    for other in others:
        theirs = _signs(other)
        # contents are read of candidates only: reading all of a million pairs takes seconds
        is_candidate |= np.isin(signs, theirs)
        contents |= {_content(other, int(number)) for number in np.flatnonzero(np.isin(theirs, signs))}
    is_repeated = np.zeros(len(signs), np.bool_)
    for number in np.flatnonzero(is_candidate).tolist():
        is_repeated[number] = _content(held_out, number) in contents
    return is_repeated


def _signs(file: SampleFile) -> NDArray[np.uint64]:
    """Return a number for each sample, equal for equal ones, from its lengths and a few of its tokens."""
    file.tokens.files.check(always=True)
    # the tables are read through maps, which end the process if the file was cut off
    lengths = file.lengths()
    starts = np.asarray(file.tokens.pointers[file.rows * file.sequences]) // file.tokens.dtype.itemsize
    totals = lengths.sum(axis=1)
    parts = [*lengths.T]
    for part in range(LOOKED_AT):
        # from both ends: chats often begin alike
        offsets = starts + (totals - 1) * part // (LOOKED_AT - 1)
        # an empty sample has no token to look at; what is taken for it is of its neighbour, and does no harm
        parts.append(np.take(file.tokens.tokens, offsets, mode="clip"))
    signs = np.zeros(len(totals), np.uint64)
    for each in parts:
        signs = (signs ^ each.astype(np.int64).astype(np.uint64)) * FACTOR
        signs ^= signs >> np.uint64(29)
    return signs


def _content(file: SampleFile, number: int) -> bytes:
    first = file.sequences * int(file.rows[number])
    digest = hashlib.blake2b(digest_size=16)
    for sequence in range(first, first + file.sequences):
        ids = file.tokens.read(sequence).astype(np.int64)
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.digest()
