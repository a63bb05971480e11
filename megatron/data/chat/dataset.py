"""Datasets of chats with their loss masks, in the order of each epoch.

The files are those of chat/preprocessing.py. A chat of n tokens takes n - 1 places of a row: each token but the last is
an input, each but the first a label.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.gpt import SPLITS
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, Tokens, check_vocabulary
from megatron.data.samples import SampleDataset, SampleFile
from megatron.data.splits import Splits, open_splits, rows_of_split
from megatron.options.config import Config
from megatron.runtime.commands import command_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatFile(SampleFile):
    """A dataset of chats, and the numbers of those in use."""

    mask: IndexedDataset


class ChatDataset(SampleDataset[ChatFile]):
    """Chats of several files, numbered consecutively. Raises DataError if none has a token to train on."""

    def __init__(
        self, files: Sequence[ChatFile], weights: Sequence[float] | None, *, seed: int, vocab_size: int, said: str
    ):
        # n - 1 places: inputs without the last token, labels without the first
        lengths = np.concatenate([file.lengths()[:, 0] - 1 for file in files])
        super().__init__(files, lengths, weights, seed)
        self._vocab_size = vocab_size
        self.loss_tokens: NDArray[np.int64] = np.concatenate([_loss_tokens(file) for file in files])
        """Labels of each chat in the loss."""
        if not self.loss_tokens.any():
            raise DataError(
                f"{said}: none of the {len(self)} chats has a token to train on; look at the roles and the chat "
                f"template with {command_name('preprocess_chat')} --show"
            )
        # rows too: another split of the same files is other data
        identity = [
            (file.tokens.fingerprint, file.mask.fingerprint, hashlib.sha256(file.rows.tobytes()).hexdigest())
            for file in files
        ]
        self.fingerprint = self.identity("chats", 1, identity, seed)

    def read(self, chat: int) -> tuple[Tokens, Tokens]:
        """Return ids and mask of a chat, both [length + 1]. Raises DataError for an id outside the vocabulary."""
        file, sequence = self.place(chat)
        ids, mask = file.tokens.read(sequence), file.mask.read(sequence)
        # a lookup beyond the embedding is a fault of the device without the name of a file
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            raise DataError(
                f"{file.tokens.prefix}: chat {sequence} holds token {int(ids.max())}, but vocab_size="
                f"{self._vocab_size}; preprocess it with this model's tokenizer, or set vocab_size to the data's"
            )
        return ids, mask


def _loss_tokens(file: ChatFile) -> NDArray[np.int64]:
    """Return the trained labels of each chat. The first token is never a label, whatever its mask."""
    mask, starts = file.mask.tokens, np.asarray(file.mask.pointers, dtype=np.int64)
    # [chats]: one sum over the whole memory-mapped file instead of a read for each chat
    sums = np.add.reduceat(mask, starts, dtype=np.int64) - mask[starts]
    return np.asarray(sums[file.rows], dtype=np.int64)


def open_chats(config: Config) -> Splits[ChatDataset]:
    """Return chats for training, validation and test; the last two None if the config leaves none.

    Raises DataError.
    """
    opened: dict[str, tuple[IndexedDataset, IndexedDataset]] = {}

    def open_file(prefix: str, split: int) -> ChatFile:
        # training, validation and test are often splits of one file, which is opened and checked once
        if prefix not in opened:
            opened[prefix] = _open(prefix, config.model.vocab_size)
        tokens, mask = opened[prefix]
        rows = _usable(tokens, config, None if config.data.per_split else split)
        return ChatFile(tokens, rows, mask)

    def build(files: Sequence[ChatFile], weights: Sequence[float] | None, said: str) -> ChatDataset:
        seed, vocab_size = config.training.seed, config.model.vocab_size
        return ChatDataset(files, weights, seed=seed, vocab_size=vocab_size, said=said)

    return open_splits(config, "chats", open_file, build)


def _open(prefix: str, vocab_size: int) -> tuple[IndexedDataset, IndexedDataset]:
    tokens = IndexedDataset(prefix)
    try:
        mask = IndexedDataset(prefix + LOSS_MASK_SUFFIX)
    except DataError as error:
        raise DataError(
            f"{prefix} has no loss mask, which task=sft needs ({error}); write both with "
            f"{command_name('preprocess_chat')}, or train with task=pretrain"
        ) from None
    # a wrong tokenizer shows at the start, not at the first chat with a large id
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
    # a chat gives one label less than it has tokens
    limit = config.training.seq_length + 1
    longest = int(lengths.max(initial=0))
    if longest > limit:
        raise DataError(
            f"{tokens.prefix}: chat {int(chats[lengths.argmax()])} has {longest} tokens, more than seq_length + 1 = "
            f"{limit}; raise seq_length, or preprocess with --max-length {limit}"
        )
    kept = chats[lengths >= 2]
    if len(kept) < len(chats):
        name = "" if split is None else f"{SPLITS[split]}: "
        logger.warning(
            "%s%d chats of %s have less than 2 tokens; left out", name, len(chats) - len(kept), tokens.prefix
        )
    return kept
