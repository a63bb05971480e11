"""Pretraining: the next token of an indexed dataset, and its cross-entropy.

B samples of a microbatch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.config.options import Config
from megatron.data.batches import BatchPlan, dealt_evenly
from megatron.data.blend import TokenDataset
from megatron.data.gpt import Datasets, open_datasets
from megatron.data.indexed import DataError
from megatron.data.tokenizers.build import build_tokenizer
from megatron.parallel.context import ParallelContext
from megatron.tasks.task import Microbatch, Task


class PretrainTask(Task):
    """Next-token prediction over samples of S + 1 tokens."""

    def __init__(self, config: Config, eod: int | None) -> None:
        self.config, self.data, self.eod = config, config.data, eod

    @classmethod
    def of(cls, config: Config, ctx: ParallelContext) -> PretrainTask:
        """Raises DataError for a tokenizer that does not fit the model, or lacks the token it is needed for."""
        return cls(config, end_of_document(config))

    @property
    def masks_loss(self) -> bool:
        return self.data.eod_mask_loss

    def open_data(self) -> Datasets:
        return open_datasets(self.config)

    def samples_per_epoch(self, dataset: TokenDataset) -> None:
        return None

    def consumed_tokens(self, dataset: TokenDataset, consumed_samples: int) -> int:
        return consumed_samples * self.config.training.seq_length

    def plan(
        self,
        dataset: TokenDataset,
        global_batch_size: Callable[[int], int],
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> BatchPlan[range]:
        return dealt_evenly(
            len(dataset),
            global_batch_size=global_batch_size,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )

    def read(self, dataset: TokenDataset, key: range) -> Microbatch:
        return self.collate(dataset.get_batch(key))

    def samples_of(self, key: range) -> list[int]:
        return list(key)

    def collate(self, samples: np.ndarray) -> Microbatch:
        """[B, S + 1] int64 -> a microbatch on the host."""
        tokens, labels = samples[:, :-1], samples[:, 1:]
        mask = np.ones(tokens.shape, dtype=np.float32)
        if self.data.eod_mask_loss:
            mask[tokens == self.eod] = 0.0
        inputs: Any = torch.from_numpy(np.ascontiguousarray(tokens))
        if self.data.reset_position_ids or self.data.reset_attention_mask:
            index, starts = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), self._document_starts(tokens)
            positions = index - starts if self.data.reset_position_ids else index
            seen_from = starts if self.data.reset_attention_mask else np.zeros_like(starts)
            inputs = (inputs, torch.from_numpy(positions.copy()), torch.from_numpy(seen_from))
        return Microbatch(
            inputs, torch.from_numpy(np.ascontiguousarray(labels)), torch.from_numpy(mask), float(mask.sum())
        )

    def _document_starts(self, tokens: np.ndarray) -> np.ndarray:
        """[B, S]: where each token's document begins in its sample; the end-of-document token belongs to its own."""
        begins = np.zeros(tokens.shape, dtype=np.int64)
        begins[:, 1:] = np.where(tokens[:, :-1] == self.eod, np.arange(1, tokens.shape[1]), 0)
        return np.maximum.accumulate(begins, axis=1)


def end_of_document(config: Config) -> int | None:
    """The id that ends a document, where the config needs one. Raises DataError if the tokenizer has none."""
    data = config.data
    if data.eod_token_id is not None or data.tokenizer_type is None:
        return data.eod_token_id
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        data.tokenizer_model,
        data.vocab_file,
        data.merge_file,
        config.model.vocab_size,
        eod_token=data.eod_token,
        tiktoken_pattern=data.tiktoken_pattern,
    )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model vocab_size={config.model.vocab_size}; "
            f"set vocab_size to {tokenizer.vocab_size} or more"
        )
    needs = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    if needs and tokenizer.eod is None:
        raise DataError(f"tokenizer_type={data.tokenizer_type} has no end-of-document token; give eod_token")
    return tokenizer.eod
