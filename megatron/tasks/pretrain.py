"""Pretraining: the next token of an indexed dataset, and its cross-entropy.

B samples of a microbatch, S tokens of a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.options.config import Config
from megatron.tasks.data import DatasetFacts, LabelIndex, Microbatch, SampleLabels, TaskData
from megatron.tasks.task import Task

if TYPE_CHECKING:
    import numpy as np

    from megatron.data.blend import Drawn, TokenDataset
    from megatron.data.gpt import Datasets
    from megatron.parallel.context import ParallelContext


class PretrainFacts(DatasetFacts):
    """Documents that are joined to a stream, which a mix draws from."""

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        return self.dataset.documents_of(sample)  # type: ignore[no-any-return]

    def drawn(self, consumed_samples: int) -> list[Drawn]:
        from megatron.data.blend import BlendedDataset

        if not isinstance(self.dataset, BlendedDataset):
            return []
        return self.dataset.drawn(consumed_samples)


class PretrainLabels(LabelIndex):
    """Labels of the samples that a run needs: a dataset may be longer."""

    def of(self, dataset: TokenDataset, split: int | None = None) -> SampleLabels:
        from megatron.data.gpt import samples_needed

        labels = super().of(dataset)
        if split is None:
            return labels
        return labels._replace(lengths=labels.lengths[: samples_needed(self._data.config)[split]])


class PretrainData(TaskData):
    """Samples of S + 1 tokens of a stream of documents."""

    Facts = PretrainFacts
    Labels = PretrainLabels

    def __init__(self, config: Config, options: Any) -> None:
        super().__init__(config, options)
        self.eod = config.data.eod_token_id
        """Id that ends a document; `open` takes the tokenizer's where the config has none."""

    @property
    def packs_documents(self) -> bool:
        return self.config.data.reset_position_ids or self.config.data.reset_attention_mask

    @property
    def varies_normaliser(self) -> bool:
        return self.config.data.eod_mask_loss

    def open(self, ctx: ParallelContext) -> Datasets:
        """Raise DataError also for a tokenizer that does not fit the model, or lacks a token that is needed."""
        from megatron.data.gpt import open_datasets

        self.eod = end_of_document(self.config)
        return open_datasets(self.config)

    def read(self, dataset: TokenDataset, key: range) -> Microbatch:
        return self.collate(dataset.get_batch(key))

    def collate(self, samples: np.ndarray) -> Microbatch:
        """Return the microbatch of [B, S + 1] int64 tokens."""
        import numpy as np
        import torch

        tokens, labels = samples[:, :-1], samples[:, 1:]
        mask = np.ones(tokens.shape, dtype=np.float32)
        if self.config.data.eod_mask_loss:
            # as in Megatron: what follows the end of a document is not predicted from it
            mask[tokens == self.eod] = 0.0
        inputs: Any = torch.from_numpy(np.ascontiguousarray(tokens))
        if self.packs_documents:
            # the two options are apart: positions may restart while attention goes on, and the other way round
            index, starts = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), self._document_starts(tokens)
            positions = index - starts if self.config.data.reset_position_ids else index
            seen_from = starts if self.config.data.reset_attention_mask else np.zeros_like(starts)
            inputs = (inputs, torch.from_numpy(positions.copy()), torch.from_numpy(seen_from))
        targets = torch.from_numpy(np.ascontiguousarray(labels)), torch.from_numpy(mask)
        return Microbatch(inputs, targets, float(mask.sum()))

    def _document_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return [B, S], the place at which each token's document begins; an end-of-document token closes its own."""
        import numpy as np

        begins = np.zeros(tokens.shape, dtype=np.int64)
        # tokens [a, b, eod, c, d] give begins [0, 0, 0, 3, 0], and starts [0, 0, 0, 3, 3]
        begins[:, 1:] = np.where(tokens[:, :-1] == self.eod, np.arange(1, tokens.shape[1]), 0)
        return np.maximum.accumulate(begins, axis=1)


def end_of_document(config: Config) -> int | None:
    """Return the id that ends a document, from the config or its tokenizer. Raises DataError if it is missing."""
    from megatron.data.index.indexed import DataError
    from megatron.data.tokenizers.build import tokenizer_of_run

    data = config.data
    if data.eod_token_id is not None or data.tokenizer_type is None:
        return data.eod_token_id
    tokenizer = tokenizer_of_run(config, prepend_bos=False)  # the data is tokenized
    needs = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    if needs and tokenizer.eod is None:
        raise DataError(f"tokenizer_type={data.tokenizer_type} has no end-of-document token; give eod_token")
    return tokenizer.eod


class PretrainTask(Task):
    """Next-token prediction over samples of S + 1 tokens."""

    Data = PretrainData
    data: PretrainData
