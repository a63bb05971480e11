"""Supervised fine-tuning: the answers in chats, packed so that few tokens are padding.

B rows of a microbatch, S places of a row. A row holds one chat after another; a token sees its own chat alone, and
positions restart with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.tasks.data import Microbatch
from megatron.tasks.packed import PackedData, PackedFacts, samples_of
from megatron.tasks.task import Task

if TYPE_CHECKING:
    from megatron.data.chat.dataset import ChatDataset
    from megatron.tasks.packed import PackedDataset, Rows


class ChatFacts(PackedFacts):
    def describe(self) -> str:
        chats: ChatDataset = self.samples
        tokens, share = self.share_of_epoch(chats.loss_tokens)
        rows = "" if chats is self.dataset else f" in {len(self.dataset):,} rows"
        return (
            f"sft: {len(chats):,} chats{rows}, {tokens:,} tokens an epoch, {share:.1%} of them trained; "
            f"{self.describe_packing()}"
        )


class ChatData(PackedData):
    """Chats, of which the answers are trained."""

    Facts = ChatFacts
    sample_name = "chat"
    content = "chats"
    preprocessor = "preprocess_chat"

    def open_samples(self) -> Sequence[Any]:
        from megatron.data.chat.dataset import open_chats

        return open_chats(self.config)

    def read(self, dataset: PackedDataset, key: Rows) -> Microbatch:
        """Return rows of chats, in which the loss of padding does not count."""
        import numpy as np
        import torch

        chats: ChatDataset = samples_of(dataset)
        read = [[chats.read(int(chat)) for chat in row] for row in key]
        rows = self.filled_rows([[ids for ids, _ in row] for row in read])
        mask = np.zeros(rows.tokens.shape, dtype=np.float32)
        for place, (_, trained) in zip(rows.places, (chat for row in read for chat in row), strict=True):
            # a label is trained where the token that it is was marked: the first token is never a label
            mask[place] = trained[1:]
        targets = torch.from_numpy(rows.labels), torch.from_numpy(mask)
        return Microbatch(rows.inputs, targets, float(mask.sum()))


class SFTTask(Task):
    """Next-token prediction of the answers in chats."""

    Data = ChatData
    data: ChatData
    sections = ("sft",)
