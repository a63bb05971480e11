"""Samples of seq_length + 1 tokens cut from documents, in megatron-core's order, array for array.

Documents are shuffled and concatenated, epoch after epoch. Sample k begins at token k * seq_length of that stream and
shares its last token with its neighbour: the label of one and the input of the other. Three arrays describe this:

    document_index [E * D]     the order of the documents
    sample_index   [N + 1, 2]  the start of each sample: position in document_index, offset in that document
    shuffle_index  [N]         the order of the samples

A "document" is one sequence of the .idx, as in megatron-core; the two differ only in files cut into sentences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.data.blend import SeparateSets, TokenDataset, blend_by_size, blend_by_weight, digest, sets_of
from megatron.data.extension import helpers
from megatron.data.index.index_cache import Arrays, ArraySpec, cached_arrays
from megatron.data.index.indexed import DataError, IndexedDataset, check_vocabulary
from megatron.options.config import Config, DataConfig
from megatron.options.data import parse_data_path, parse_split
from megatron.options.schedule import Schedule

logger = logging.getLogger(__name__)

HeldOut = TokenDataset | SeparateSets | None
Datasets = tuple[TokenDataset | None, HeldOut, HeldOut]
"""Training, validation and test samples."""
SPLITS = ("train", "valid", "test")
SPLIT_WORDS = ("training", "validation", "test")
SEPARATE_BELOW = 0.80
"""A last epoch of which less than this is needed is shuffled separately, so that no document repeats too early."""
UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class EpochPlan:
    """Repetitions of the documents that give the requested samples."""

    num_epochs: int
    num_samples: int
    """Samples in all epochs, at least the requested ones."""
    num_samples_before_last: int
    """Samples shuffled first, as a group. Equals num_samples unless the last epoch is shuffled separately."""

    @property
    def separate_last_epoch(self) -> bool:
        return self.num_samples_before_last < self.num_samples


def plan_epochs(tokens_per_epoch: int, num_samples: int, seq_length: int) -> EpochPlan:
    """Return the fewest epochs that hold num_samples samples, which overlap by one token."""
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    built = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_epochs == 1:
        return EpochPlan(1, built, built)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    # the rule of megatron-core, which decides the order of all samples: change it, and no run can be compared with it
    per_epoch = (tokens_per_epoch - 1) // seq_length
    if num_samples - before_last < int(SEPARATE_BELOW * per_epoch):
        return EpochPlan(num_epochs, built, before_last)
    return EpochPlan(num_epochs, built, built)


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Return the contiguous document ranges of training, validation and test."""
    bounds, total = [0], 0.0
    for part in parse_split(split):
        total += part
        bounds.append(round(total * num_documents))
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


class GPTDataset:
    """At least num_samples samples of `documents` of a dataset, which are repeated as needed.

    num_samples=None: the samples of one epoch. Ids are checked against vocab_size, if given, when they are read. Raises
    DataError if the documents hold no token.
    """

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
        cache_dir: Path | None = None,
    ):
        self._data, self._documents = data, documents
        self.prefix = data.prefix
        self.seq_length, self._seed = seq_length, seed
        self.tokens_per_epoch = data.count_tokens(documents)
        if self.tokens_per_epoch == 0:
            raise DataError(
                f"documents {documents.start} to {documents.stop} of {data.prefix} hold no tokens; "
                "enlarge their part of split, or give more text"
            )
        # the last token is a label only
        if num_samples is None:
            num_samples = (self.tokens_per_epoch - 1) // seq_length
        self._plan = plan_epochs(self.tokens_per_epoch, num_samples, seq_length)
        # in two parts: a longer run over the same data continues an earlier one
        content = digest("gpt", 2, data.fingerprint, documents.start, documents.stop, seq_length, seed)
        self.fingerprint = content + "-" + digest(self._plan.num_epochs, self._plan.num_samples_before_last)
        """Equal if all samples are: a digest of the data's content, not its path, and of all that orders the samples;
        then one of the number of epochs."""
        num_positions = self._plan.num_epochs * len(documents)
        # the types of megatron-core
        offsets = np.dtype(np.int32 if num_positions < 2**31 else np.int64)
        sample_ids = np.dtype(np.uint32 if self._plan.num_samples < UINT32_MAX - 1 else np.int64)
        self._specs = {
            "document_index": ArraySpec((num_positions,), np.dtype(np.int32)),
            "sample_index": ArraySpec((self._plan.num_samples + 1, 2), offsets),
            "shuffle_index": ArraySpec((self._plan.num_samples,), sample_ids),
        }
        index = cached_arrays(cache_dir, "gpt-" + digest(self.fingerprint), self._specs, self._build_index)
        self.cache_paths, self._index_files = index.paths, index.files
        """Files of the three arrays; none without a cache."""
        self.document_index: NDArray[np.int32] = index.arrays["document_index"]
        self.sample_index: NDArray[np.signedinteger] = index.arrays["sample_index"]
        self.shuffle_index: NDArray[np.integer] = index.arrays["shuffle_index"]
        # reads in C++, without the interpreter's lock, and checks each id, pointer and offset
        self._reader = helpers.SampleReader(
            data.tokens,
            data.lengths,
            data.pointers,
            self.document_index,
            self.sample_index,
            self.shuffle_index,
            seq_length,
            vocab_size,
        )

    def _build_index(self) -> Arrays:
        plan = self._plan
        shuffler = helpers.Shuffler(self._seed)
        # one generator for all four shuffles: their order is part of the format
        one_epoch = np.arange(self._documents.start, self._documents.stop, dtype=np.int32)
        document_index = np.tile(one_epoch, plan.num_epochs)
        boundary = len(document_index)
        if plan.separate_last_epoch:
            boundary -= len(one_epoch)
        shuffler.shuffle(document_index[:boundary])
        shuffler.shuffle(document_index[boundary:])
        # after both shuffles of the documents: the samples are cut from their order
        sample_index = helpers.build_sample_index(self._data.lengths, document_index, self.seq_length, plan.num_samples)
        shuffle_index = np.arange(plan.num_samples, dtype=self._specs["shuffle_index"].dtype)
        shuffler.shuffle(shuffle_index[: plan.num_samples_before_last])
        shuffler.shuffle(shuffle_index[plan.num_samples_before_last :])
        return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}

    def __len__(self) -> int:
        return self._plan.num_samples

    @property
    def num_epochs(self) -> int:
        return self._plan.num_epochs

    @property
    def num_documents(self) -> int:
        """Documents in one epoch."""
        return len(self._documents)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return sample `index`: seq_length + 1 token ids.

        Raises DataError for an id outside the vocabulary, or if the files contradict each other or were truncated.
        """
        self._check_files(always=False)
        sample: NDArray[np.int64] = self._read(self._reader.read_one, index)
        return sample

    def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return several samples: [len(indices), seq_length + 1]. Raises as for one."""
        self._check_files(always=True)
        samples: NDArray[np.int64] = self._read(self._reader.read, np.asarray(indices, dtype=np.int64))
        return samples

    def read_into(self, indices: NDArray[np.int64], out: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Write sample indices[i] to row rows[i] of `out`, [any, seq_length + 1]. Raises as for one."""
        self._check_files(always=True)
        self._read(self._reader.read_into, indices, out, rows)

    def documents_of(self, index: int) -> tuple[str, list[int]]:
        """Return the dataset's prefix, and the documents from which sample `index` is cut."""
        number = int(self.shuffle_index[index])
        first, last = int(self.sample_index[number, 0]), int(self.sample_index[number + 1, 0])
        return str(self._data.prefix), [int(document) for document in self.document_index[first : last + 1]]

    def _check_files(self, *, always: bool) -> None:
        self._data.files.check(always=always)
        self._index_files.check(always=always)

    def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Call the reader, and add the name of this dataset to its errors."""
        try:
            return read(*arguments)
        except IndexError as error:
            raise IndexError(f"{self._data.prefix}: {error}") from None
        except ValueError as error:
            raise DataError(f"{self._data.prefix}: {error}") from None


@dataclass(frozen=True)
class Member:
    """Documents of one dataset in a split."""

    data: IndexedDataset
    documents: range
    weight: float | None
    """Its share of the blend; None without a blend, or for one by size."""

    @property
    def num_tokens(self) -> int:
        return self.data.count_tokens(self.documents)

    @property
    def by_documents(self) -> Member:
        """The member whose weight, a share of documents, is a share of samples."""
        if self.weight is None:
            return self
        # samples hold equally many tokens, so that a share of samples is one of tokens
        return replace(self, weight=self.weight * self.num_tokens / len(self.documents))


def open_datasets(config: Config) -> Datasets:
    """Return training, validation and test samples of a run; the last two None if the config leaves none.

    Raises DataError.
    """
    training, data, needed = config.training, config.data, samples_needed(config)
    datasets = build_datasets(
        data,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples=needed,
        vocab_size=config.model.vocab_size,
    )
    if datasets[0] is None and not training.skip_train:
        raise DataError(f"split={data.split} leaves no documents to train on; raise its first share")
    for dataset, (option, words), count, length in zip(
        datasets, data.paths, needed, ("train_samples or train_iters", "eval_iters", "eval_iters"), strict=True
    ):
        if dataset is not None and len(dataset) < count:
            raise DataError(
                f"{option}={' '.join(words)!r} has no weights, so it is read once: {len(dataset)} samples, but "
                f"{count} are needed; give weights, which repeat the data as needed, or lower {length}"
            )
    read_first: Sequence[HeldOut] = datasets[:1]
    if datasets[0] is None:
        read_first = datasets[1:]
    for dataset in read_first:
        for each in sets_of(dataset):
            each[0]  # ids of another tokenizer fail here, before anything is built or written
    return datasets


def samples_needed(config: Config) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test samples that a run reads."""
    eval_samples = config.data.eval_iters * config.training.global_batch_size
    if config.training.skip_train and config.training.teacher_top_k is None:
        return 0, eval_samples, eval_samples
    return Schedule(config.training, config.optimizer).total_samples, eval_samples, eval_samples


def build_datasets(
    data: DataConfig, *, seq_length: int, seed: int, num_samples: tuple[int, int, int], vocab_size: int
) -> Datasets:
    """Return training, validation and test samples: at least num_samples of each, repeating documents as needed.

    Several prefixes without weights are not repeated: they give at most one epoch. Those of validation and test are
    with multiple_validation_sets, which keeps all datasets of a split apart. A split is None if num_samples is 0,
    or without documents for validation or test. Training documents must hold at least one sample. Raises DataError.
    """
    builder = _Builder(data, seq_length, seed, num_samples, vocab_size)
    return builder.split(0), builder.split(1), builder.split(2)


class _Builder:
    """Builder of the splits of a run, which opens each dataset once."""

    def __init__(
        self, data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int], vocab_size: int
    ):
        self._data, self._seq_length, self._seed = data, seq_length, seed
        self._num_samples, self._vocab_size = num_samples, vocab_size
        self._opened: dict[str, IndexedDataset] = {}

    def _open(self, prefix: str) -> IndexedDataset:
        # the splits of one dataset share its maps
        if prefix not in self._opened:
            dataset = IndexedDataset(prefix)
            check_vocabulary(dataset, self._vocab_size)
            warn_of_sentences(dataset)
            self._opened[prefix] = dataset
        return self._opened[prefix]

    def split(self, split: int) -> Any:
        """Return the samples of a split; None without any."""
        members, blended = split_members(self._data, split, self._open)
        num_samples = self._num_samples[split]
        if num_samples == 0 or not members:
            return None
        if split == 0:
            check_training_size(members, self._data, self._seq_length)
        by_size = blended and members[0].weight is None
        kept = _members_with_samples(members, split, self._data, self._seq_length if by_size else 0)
        if not kept:
            return None
        if not blended:
            return self._dataset(kept[0], num_samples)
        if split > 0 and self._data.multiple_validation_sets and len(kept) > 1:
            return self._apart(kept, num_samples)
        return self._blend(kept, num_samples, cache_folder(self._data, members[0].data.prefix))

    def _apart(self, members: Sequence[Member], num_samples: int) -> SeparateSets:
        datasets = [self._dataset(member, num_samples) for member in members]
        return SeparateSets([member.data.prefix for member in members], datasets, _weights_of(members) or None)

    def _blend(self, members: Sequence[Member], num_samples: int, cache_dir: Path) -> TokenDataset:
        weights = _weights_of(members)
        if weights:
            return blend_by_weight(
                weights, num_samples, lambda number, count: self._dataset(members[number], count), cache_dir
            )
        # one epoch of each: nothing is repeated that the user gave no weight
        return blend_by_size([self._dataset(member, None) for member in members], num_samples, cache_dir)

    def _dataset(self, member: Member, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            member.data,
            member.documents,
            num_samples=num_samples,
            seq_length=self._seq_length,
            seed=self._seed,
            vocab_size=self._vocab_size,
            cache_dir=cache_folder(self._data, member.data.prefix),
        )


def _weights_of(members: Sequence[Member]) -> list[float]:
    """Return the weights of a blend; none for one by size."""
    return [member.weight for member in members if member.weight is not None]


def _members_with_samples(members: Sequence[Member], split: int, data: DataConfig, least: int) -> list[Member]:
    """Return the members of more than `least` tokens, with shares of samples as weights, and warn of the others."""
    # a split of a small dataset may round to no document
    kept = [member for member in members if member.num_tokens > least]
    if len(kept) < len(members):
        absent = ", ".join(sorted({member.data.prefix for member in members if member not in kept}))
        what = "samples" if least else "documents"
        effect = f"the run has no {SPLIT_WORDS[split]} loss"
        if kept:
            effect = "left out"
        logger.warning("no %s %s in %s%s; %s", SPLIT_WORDS[split], what, absent, said_split(data), effect)
    # only now, since one without documents has no mean length
    if data.blend_weights == "documents":
        kept = [member.by_documents for member in kept]
    return kept


def split_members(
    data: DataConfig, split: int, open_dataset: Callable[[str], IndexedDataset]
) -> tuple[list[Member], bool]:
    """Return the datasets of a split, and true if they are blended. Raises DataError."""
    option, words = data.paths[split]
    if data.per_split and not words:
        return [], False
    try:
        prefixes, weights = parse_data_path(words)
    except ValueError as error:
        raise DataError(f"{option}={' '.join(words)!r} {error}") from None
    if not data.per_split and parse_split(data.split)[split] == 0:
        return [], False
    members = []
    for prefix, weight in zip_longest(prefixes, weights or []):
        dataset = open_dataset(prefix)
        documents = range(len(dataset))
        if not data.per_split:
            documents = split_documents(len(dataset), data.split)[split]
        members.append(Member(dataset, documents, weight))
    # one dataset with a weight is a blend of one, except in the path of a single split: as in megatron-core
    return members, len(members) > 1 or (weights is not None and not data.per_split)


def check_training_size(members: Sequence[Member], data: DataConfig, seq_length: int) -> None:
    """Raise DataError for a dataset without one training sample."""
    for member in members:
        if member.num_tokens <= seq_length:
            raise DataError(
                f"{member.data.prefix}: the {len(member.documents)} training documents{said_split(data)} of "
                f"{len(member.data)} hold {member.num_tokens} tokens, less than one sample of seq_length + 1 = "
                f"{seq_length + 1}; give more text, a larger training part in split, or a shorter seq_length"
            )


def said_split(data: DataConfig) -> str:
    """Return the split for a message; empty without one."""
    if data.per_split:
        return ""
    return f" (split={data.split})"


def cache_folder(data: DataConfig, prefix: str) -> Path:
    if data.data_cache_path:
        return Path(data.data_cache_path)
    return Path(prefix).parent / "cache"


def warn_of_sentences(data: IndexedDataset) -> None:
    """Log a warning if documents are cut into several sequences, which the order of the samples takes apart."""
    if len(data) > data.num_documents:
        logger.warning(
            "%s has %d sequences in %d documents, as of --split-sentences: each sequence is shuffled like a document "
            "of its own, as in Megatron; preprocess whole documents for a language model",
            data.prefix,
            len(data),
            data.num_documents,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Rows that grow over a run: a sample is read whole, or cut into rows of the length of a stage.
#
# A step has the same samples, and so the same tokens, whatever the length of its rows: a change of lengths neither
# skips nor repeats text, and a resume may change those to come.


class Rows(NamedTuple):
    """A microbatch: samples, and the length of the rows into which they are cut."""

    samples: range
    length: int


class StagedSamples:
    """The training samples of a run with stages, each (length of its rows, first sample beyond it; None: the last)."""

    def __init__(self, dataset: TokenDataset, stages: Sequence[tuple[int, int | None]]) -> None:
        self.dataset, self._stages = dataset, list(stages)
        # the samples are those of a run without stages
        self.fingerprint = dataset.fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.dataset[index]

    def length_at(self, consumed_samples: int) -> int:
        """Return the length of the rows of the step that begins there."""
        # by the step, not by the sample: with another batch size than planned a step may cross an end
        return next(length for length, end in self._stages if end is None or consumed_samples < end)

    def read(self, rows: Rows) -> NDArray[np.int64]:
        """Return [samples x sample length / length, length + 1] token ids. Raises as the dataset does."""
        return cut(self.dataset.get_batch(rows.samples), rows.length)


def cut(samples: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Cut samples [B, S + 1] into rows [B * S / length, length + 1].

    A row shares its last token with the next one, as samples do: the label of one and the input of the other.
    """
    starts = np.arange(0, samples.shape[1] - 1, length)
    places = starts[:, None] + np.arange(length + 1)
    return samples[:, places].reshape(-1, length + 1)
