"""Pretraining: the next token of an indexed dataset, and its cross-entropy.

B samples of a microbatch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.models.rules import check_row_length
from megatron.options.config import Config, length_stages, samples_after
from megatron.options.flags import divisors
from megatron.tasks.data import DatasetFacts, LabelIndex, LabelPlace, Microbatch, SampleLabels, TaskData
from megatron.tasks.task import Task

if TYPE_CHECKING:
    import numpy as np

    from megatron.data.batches import BatchPlan
    from megatron.data.blend import Drawn, TokenDataset
    from megatron.data.gpt import Rows
    from megatron.parallel.context import ParallelContext


class PretrainFacts(DatasetFacts):
    """Documents that are joined to a stream, which a mix draws from."""

    def documents_of(self, sample: int) -> tuple[str, list[int]]:
        return self._stream.documents_of(sample)  # type: ignore[no-any-return]

    def drawn(self, consumed_samples: int) -> list[Drawn]:
        from megatron.data.blend import BlendedDataset

        if not isinstance(self._stream, BlendedDataset):
            return []
        return self._stream.drawn(consumed_samples)

    @property
    def _stream(self) -> Any:
        from megatron.data.gpt import StagedSamples

        return self.dataset.dataset if isinstance(self.dataset, StagedSamples) else self.dataset


class PretrainLabels(LabelIndex):
    """Labels of the samples that a run needs: a dataset may be longer."""

    def of(self, dataset: TokenDataset, split: int | None = None) -> SampleLabels:
        from megatron.data.gpt import samples_needed

        labels = super().of(dataset)
        if split is None:
            return labels
        return labels._replace(lengths=labels.lengths[: samples_needed(self._data.config)[split]])

    def places(self, dataset: Any, key: Any) -> list[LabelPlace]:
        from megatron.data.gpt import Rows

        if not isinstance(key, Rows):
            return super().places(dataset, key)
        # each sample is cut into as many rows, one after the other
        times = self._data.config.training.seq_length // key.length
        rows = [sample for sample in key.samples for _ in range(times)]
        return [LabelPlace(sample, row, slice(None)) for row, sample in enumerate(rows)]


class PretrainData(TaskData):
    """Samples of S + 1 tokens of a stream of documents."""

    Facts = PretrainFacts
    Labels = PretrainLabels
    cuts_samples = True

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

    @property
    def varies_shapes(self) -> bool:
        return bool(self.config.training.seq_length_stages)

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        training = self.config.training
        given, length = training.seq_length_stages or (), training.seq_length
        stages = f"seq_length_stages={' '.join(map(str, given))}"
        if len(given) % 2:
            yield f"{stages} has a length without its iterations; give pairs of LENGTH and ITERATIONS"
        for each in given[::2]:
            if each >= length or length % each:
                yield (
                    f"{stages} has rows of {each}, which must divide seq_length={length}, the last; use "
                    f"{divisors(length, length // 2)}"
                )
            else:
                yield from check_row_length(self.config, "a length of seq_length_stages", each)

    def idle(self) -> Iterator[str]:
        yield from super().idle()
        training = self.config.training
        samples = training.train_samples or samples_after(training, training.train_iters or 0)
        ends = [end for _, end in length_stages(training) if end is not None]
        if samples and ends and ends[-1] >= samples:
            yield (
                f"seq_length={training.seq_length} has no effect without more than {ends[-1]} samples, which "
                f"seq_length_stages takes; train longer than {samples}, or shorten the stages"
            )

    def batch_text(self, data_parallel_size: int) -> str:
        text, given = super().batch_text(data_parallel_size), self.config.training.seq_length_stages
        if not given:
            return text
        stages = [f"{length:,} for {steps:,} steps" for length, steps in zip(given[::2], given[1::2], strict=False)]
        return f"{text}; in rows of {', '.join(stages)}, then {self.config.training.seq_length:,}"

    def open(self, ctx: ParallelContext) -> Sequence[Any]:
        """Raise DataError also for a tokenizer that does not fit the model, or lacks a token that is needed."""
        from megatron.data.gpt import StagedSamples, open_datasets

        self.eod = end_of_document(self.config)
        train, *held_out = open_datasets(self.config)
        if train is None or not self.config.training.seq_length_stages:
            return train, *held_out
        return StagedSamples(train, length_stages(self.config.training)), *held_out

    def plan(
        self, dataset: Any, global_batch_size: Callable[[int], int], batch_rank: int, num_batch_ranks: int
    ) -> BatchPlan[Any]:
        from megatron.data.gpt import Rows, StagedSamples

        whole = super().plan(dataset, global_batch_size, batch_rank, num_batch_ranks)
        if not isinstance(dataset, StagedSamples):
            return whole

        def plan(consumed_samples: int) -> tuple[int, Sequence[Rows]]:
            size, keys = whole(consumed_samples)
            length = dataset.length_at(consumed_samples)
            return size, [Rows(key, length) for key in keys]

        return plan

    def read(self, dataset: Any, key: Any) -> Microbatch:
        from megatron.data.gpt import Rows

        if isinstance(key, Rows):
            return self.collate(dataset.read(key))
        return self.collate(dataset.get_batch(key))

    def samples_of(self, key: Any) -> list[int]:
        from megatron.data.gpt import Rows

        return list(key.samples if isinstance(key, Rows) else key)

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

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        training = self.config.training
        if not training.seq_length_stages:
            return
        owner = None
        if training.teacher or training.teacher_top_k is not None:
            owner = "a teacher"
        elif training.loss is not None:
            from megatron.tasks.user_loss import UserLoss

            if isinstance(self.objective, UserLoss) and self.objective.stores_reference:
                owner = f"the reference of loss={training.loss}"
        if owner is not None:
            stages = " ".join(map(str, training.seq_length_stages))
            yield f"seq_length_stages={stages} cuts samples, but {owner} has numbers for whole ones; leave one out"
