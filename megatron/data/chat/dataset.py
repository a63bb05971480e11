"""Datasets of chats with their loss masks, in the order of each epoch.

The files are those of chat/preprocessing.py. A chat of n tokens takes n - 1 places of a row: each token but the last is
an input, each but the first a label.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron.command_names import command_name
from megatron.config.data import parse_data_path, parse_split
from megatron.config.options import Config
from megatron.data.blend import digest
from megatron.data.extension import helpers
from megatron.data.gpt import SPLITS, check_vocabulary
from megatron.data.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, Tokens
from megatron.data.packing import Packs, pack_dataset

logger = logging.getLogger(__name__)

SPLIT_SEED = 0
"""Seed of the split, which depends on the data and `split` only, not on the run."""


@dataclass(frozen=True)
class ChatFile:
    """A dataset of chats, and the numbers of the chats in use."""

    tokens: IndexedDataset
    mask: IndexedDataset
    chats: NDArray[np.int64]


class SampleDataset(ABC):
    """Samples that are read in epochs, each shuffled by itself."""

    lengths: NDArray[np.int64]
    """Places of each sample in a row."""
    seed: int
    fingerprint: str
    """Equal for the same samples in the same order in every epoch."""

    def __len__(self) -> int:
        return len(self.lengths)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of all samples in the order of an epoch."""
        return shuffled(len(self), self.seed, epoch)

    def tokens_before(self, epoch: int, samples: int) -> int:
        """Return the places of the first `samples` samples of an epoch."""
        return int(_ends(self, epoch)[samples - 1]) if samples else 0

    @abstractmethod
    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        """Return the prefix of a sample's file, and its number there."""


class ChatDataset(SampleDataset):
    """Chats of several files, numbered consecutively. Raises DataError if none has a token to train on."""

    def __init__(self, files: Sequence[ChatFile], *, seed: int, vocab_size: int, said: str):
        self._files, self.seed, self._vocab_size = files, seed, vocab_size
        self._firsts = np.cumsum([0, *(len(file.chats) for file in files)])
        self.lengths = np.concatenate([file.tokens.lengths[file.chats].astype(np.int64) - 1 for file in files])
        self.loss_tokens: NDArray[np.int64] = np.concatenate([_loss_tokens(file) for file in files])
        """Labels of each chat in the loss."""
        if not self.loss_tokens.any():
            raise DataError(
                f"{said}: none of the {len(self)} chats has a token to train on; look at the roles and the chat "
                f"template with {command_name('preprocess_chat')} --show"
            )
        identity = [
            (file.tokens.fingerprint, file.mask.fingerprint, hashlib.sha256(file.chats.tobytes()).hexdigest())
            for file in files
        ]
        self.fingerprint = digest("chats", 1, identity, seed)

    def read(self, chat: int) -> tuple[Tokens, Tokens]:
        """Return ids and mask of a chat, both [length + 1]. Raises DataError for an id outside the vocabulary."""
        file, sequence = self._place(chat)
        ids, mask = file.tokens.read(sequence), file.mask.read(sequence)
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            raise DataError(
                f"{file.tokens.prefix}: chat {sequence} holds token {int(ids.max())}, but vocab_size="
                f"{self._vocab_size}; preprocess it with this model's tokenizer, or set vocab_size to the data's"
            )
        return ids, mask

    def documents_of(self, chat: int) -> tuple[str, list[int]]:
        file, sequence = self._place(chat)
        return file.tokens.prefix, [sequence]

    def _place(self, chat: int) -> tuple[ChatFile, int]:
        number = int(np.searchsorted(self._firsts, chat, side="right")) - 1
        file = self._files[number]
        return file, int(file.chats[chat - self._firsts[number]])


class PackedSamples:
    """Rows of samples, each of at most `capacity` tokens: what a run with packing=dataset counts as its samples.

    Every epoch has equally many rows of the same lengths, with different samples packed together.
    """

    def __init__(self, samples: SampleDataset, capacity: int, seed: int):
        self.samples, self._capacity, self._seed = samples, capacity, seed
        self.fingerprint = digest("packed", 1, samples.fingerprint, capacity)

    @lru_cache(maxsize=3)  # noqa: B019 - lives as long as the run
    def _packs(self, epoch: int) -> Packs:
        return pack_dataset(self.samples.lengths, self._capacity, seed_of(self._seed, epoch))

    def __len__(self) -> int:
        return len(self._packs(0))

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of all rows in the order of an epoch."""
        return shuffled(len(self), self._seed, epoch)

    def row(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the numbers of the samples in a row."""
        return self._packs(epoch)[number]

    def tokens_before(self, epoch: int, rows: int) -> int:
        """Return the tokens in the first `rows` rows of an epoch."""
        return int(self._ends(epoch)[rows - 1]) if rows else 0

    @lru_cache(maxsize=2)  # noqa: B019 - lives as long as the run
    def _ends(self, epoch: int) -> NDArray[np.int64]:
        packs = self._packs(epoch)
        tokens = np.add.reduceat(self.samples.lengths[packs.order], packs.starts[:-1])
        return np.cumsum(tokens[self.order(epoch)])

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        return self.samples.documents_of(sample)


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return 0 to count - 1 in the order of a seed and epoch, the same with every version of NumPy."""
    order = np.arange(count, dtype=np.int64)
    helpers.Shuffler(seed_of(seed, epoch)).shuffle(order)
    return order


def seed_of(seed: int, epoch: int) -> int:
    """Return a 32-bit seed for an epoch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "little")


@lru_cache(maxsize=4)
def _ends(dataset: SampleDataset, epoch: int) -> NDArray[np.int64]:
    return np.cumsum(dataset.lengths[dataset.order(epoch)])


def _loss_tokens(file: ChatFile) -> NDArray[np.int64]:
    """Return the trained labels of each chat. The first token is never a label, whatever its mask."""
    mask, starts = file.mask.tokens, np.asarray(file.mask.pointers, dtype=np.int64)
    sums = np.add.reduceat(mask, starts, dtype=np.int64) - mask[starts]
    return np.asarray(sums[file.chats], dtype=np.int64)


def rows_of_split(count: int, config: Config, split: int | None) -> NDArray[np.int64]:
    """Return the rows of a file of `count` that a split has (None: all), in the order of the file."""
    if split is None:
        return np.arange(count, dtype=np.int64)
    bounds = np.rint(np.cumsum((0.0, *parse_split(config.data.split))) * count).astype(np.int64)
    return np.sort(shuffled(count, SPLIT_SEED, 0)[bounds[split] : bounds[split + 1]])


def open_chats(config: Config) -> tuple[ChatDataset, ChatDataset | None, ChatDataset | None]:
    """Return chats for training, validation and test; the last two None if the config leaves none.

    Raises DataError.
    """
    opened: dict[str, tuple[IndexedDataset, IndexedDataset]] = {}
    found: list[ChatDataset | None] = []
    for split, (option, words) in enumerate(config.data.paths):
        files = []
        for prefix in parse_data_path(words)[0] if words else []:
            if prefix not in opened:
                opened[prefix] = _open(prefix, config.model.vocab_size)
            tokens, mask = opened[prefix]
            chats = _usable(tokens, config, None if config.data.per_split else split)
            if len(chats):
                files.append(ChatFile(tokens, mask, chats))
        said = f"{option}={' '.join(words)}" + ("" if config.data.per_split else f", split={config.data.split}")
        if not files and split == 0:
            raise DataError(f"{said} leaves no chats to train on; give more chats, or raise the first share of split")
        seed, vocab_size = config.training.seed, config.model.vocab_size
        found.append(ChatDataset(files, seed=seed, vocab_size=vocab_size, said=said) if files else None)
    train, valid, test = found
    assert train is not None
    return train, valid, test


def _open(prefix: str, vocab_size: int) -> tuple[IndexedDataset, IndexedDataset]:
    tokens = IndexedDataset(prefix)
    try:
        mask = IndexedDataset(prefix + LOSS_MASK_SUFFIX)
    except DataError as error:
        raise DataError(
            f"{prefix} has no loss mask, which task=sft needs ({error}); write both with "
            f"{command_name('preprocess_chat')}, or train with task=pretrain"
        ) from None
    check_vocabulary(tokens, vocab_size)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, tokens.lengths):
        raise DataError(
            f"{mask.prefix} is not the mask of {prefix}: it holds {len(mask)} sequences of {mask.num_tokens} "
            f"{mask.dtype}, that {len(tokens)} of {tokens.num_tokens} tokens; preprocess the chats again, or copy "
            "both again"
        )
    return tokens, mask


def _usable(tokens: IndexedDataset, config: Config, split: int | None) -> NDArray[np.int64]:
    """Return the chats of a split (None: all) in the order of the file. Raises DataError for one that is too long."""
    chats = rows_of_split(len(tokens), config, split)
    lengths = tokens.lengths[chats]
    if len(chats) and (longest := int(lengths.max())) > config.training.seq_length + 1:
        raise DataError(
            f"{tokens.prefix}: chat {int(chats[lengths.argmax()])} has {longest} tokens, more than seq_length + 1 = "
            f"{config.training.seq_length + 1}; raise seq_length, or preprocess with --max-length "
            f"{config.training.seq_length + 1}"
        )
    kept = chats[lengths >= 2]
    if len(kept) < len(chats):
        name = "" if split is None else f"{SPLITS[split]}: "
        logger.warning(
            "%s%d chats of %s have less than 2 tokens; left out", name, len(chats) - len(kept), tokens.prefix
        )
    return kept
