"""Documents cut into samples of seq_length + 1 tokens, in megatron-core's order, array for array.

Documents are shuffled and laid end to end, epoch after epoch. Sample k begins at token k * seq_length of that stream
and shares its last token with its neighbour, as the label of one and the input of the other. Three arrays say so:

    document_index [E * D]   the order of the documents
    sample_index   [N + 1, 2]  where each sample begins: position in document_index, offset in that document
    shuffle_index  [N]       the order of the samples

A "document" is one sequence of the .idx, as in megatron-core; the two differ only in files cut into sentences.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.config import DataConfig, parse_split
from megatron.data.blend import BlendedDataset, TokenDataset
from megatron.data.index_cache import Arrays, ArraySpec, cached_arrays
from megatron.data.indexed import DataError, IndexedDataset, Tokens

try:
    from megatron.data import helpers
except ImportError as error:
    raise ImportError(
        f"the C++ extension megatron.data.helpers cannot be loaded ({error}); build it with `pip install -e .`"
    ) from error

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
SEPARATE_BELOW = 0.80
"""A last epoch needed for less than this part is shuffled apart, so that no document is seen more often early."""
UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are repeated to give the samples asked for."""

    num_epochs: int
    num_samples: int
    """All that the epochs hold, at least those asked for."""
    num_samples_before_last: int
    """Samples shuffled among themselves first. Equals num_samples unless the last epoch is shuffled apart."""

    @property
    def separate_last_epoch(self) -> bool:
        return self.num_samples_before_last < self.num_samples


def plan_epochs(tokens_per_epoch: int, num_samples: int, seq_length: int) -> EpochPlan:
    """The fewest epochs that hold num_samples samples; samples overlap by one token."""
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    built = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_epochs == 1:
        return EpochPlan(1, built, built)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = num_samples - before_last < int(SEPARATE_BELOW * per_epoch)
    return EpochPlan(num_epochs, built, before_last if separate else built)


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Contiguous document ranges of training, validation and test."""
    bounds, total = [0], 0.0
    for part in parse_split(split):
        total += part
        bounds.append(round(total * num_documents))
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


class GPTDataset:
    """Samples of `documents` of a dataset: at least num_samples of them, repeating the documents as needed.

    vocab_size, where given, is what ids are checked against when they are read. Raises DataError if the documents
    hold no token.
    """

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
        cache_dir: Path | None = None,
    ):
        self._data, self._documents = data, documents
        self._seq_length, self._seed, self._vocab_size = seq_length, seed, vocab_size
        tokens_per_epoch = data.count_tokens(documents)
        if tokens_per_epoch == 0:
            raise DataError(
                f"documents {documents.start} to {documents.stop} of {data.prefix} hold no tokens; "
                "enlarge their part of split, or give more text"
            )
        self._plan = plan_epochs(tokens_per_epoch, num_samples, seq_length)
        description = ["gpt", 1, data.fingerprint, documents.start, documents.stop, num_samples, seq_length, seed]
        self.fingerprint = hashlib.sha256(json.dumps(description).encode()).hexdigest()
        """Equal where every sample is: the content, not the place, of the data, and all that orders the samples."""
        num_positions = self._plan.num_epochs * len(documents)
        offsets = np.dtype(np.int32 if num_positions < 2**31 else np.int64)
        sample_ids = np.dtype(np.uint32 if self._plan.num_samples < UINT32_MAX - 1 else np.int64)
        self._specs = {
            "document_index": ArraySpec((num_positions,), np.dtype(np.int32)),
            "sample_index": ArraySpec((self._plan.num_samples + 1, 2), offsets),
            "shuffle_index": ArraySpec((self._plan.num_samples,), sample_ids),
        }
        arrays = cached_arrays(cache_dir, "gpt-" + self.fingerprint[:32], self._specs, self._build_index)
        self.document_index: NDArray[np.int32] = arrays["document_index"]
        self.sample_index: NDArray[np.signedinteger] = arrays["sample_index"]
        self.shuffle_index: NDArray[np.integer] = arrays["shuffle_index"]

    def _build_index(self) -> Arrays:
        plan = self._plan
        shuffler = helpers.Shuffler(self._seed)
        # one generator for all four shuffles, in this order: it is part of the format
        one_epoch = np.arange(self._documents.start, self._documents.stop, dtype=np.int32)
        document_index = np.tile(one_epoch, plan.num_epochs)
        boundary = len(document_index) - (len(one_epoch) if plan.separate_last_epoch else 0)
        shuffler.shuffle(document_index[:boundary])
        shuffler.shuffle(document_index[boundary:])
        sample_index = helpers.build_sample_index(
            self._data.lengths, document_index, self._seq_length, plan.num_samples
        )
        shuffle_index = np.arange(plan.num_samples, dtype=self._specs["shuffle_index"].dtype)
        shuffler.shuffle(shuffle_index[: plan.num_samples_before_last])
        shuffler.shuffle(shuffle_index[plan.num_samples_before_last :])
        return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}

    def __len__(self) -> int:
        return self._plan.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index`: seq_length + 1 token ids. Raises DataError on an id outside the vocabulary."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside the {len(self)} of {self._data.prefix}")
        row = int(self.shuffle_index[index])
        (first, first_offset), (last, last_offset) = self.sample_index[row : row + 2].tolist()
        documents = self.document_index[first : last + 1].tolist()
        parts: list[Tokens] = []
        for document in documents:
            begin = first_offset if not parts else 0
            # one more than the next sample's beginning: the shared token
            length = last_offset + 1 - begin if len(parts) == last - first else None
            parts.append(self._data.read(document, begin, length))
        sample = parts[0].astype(np.int64) if len(parts) == 1 else np.concatenate(parts, dtype=np.int64)
        if len(sample) != self._seq_length + 1:
            raise DataError(
                f"sample {index} of {self._data.prefix} has {len(sample)} tokens, not {self._seq_length + 1}: the "
                "index cache does not fit the data; delete it (data_cache_path) and start again"
            )
        if self._vocab_size is not None and not 0 <= sample.min() <= sample.max() < self._vocab_size:
            raise self._outside_vocabulary(documents)
        return sample

    def _outside_vocabulary(self, documents: list[int]) -> DataError:
        for document in documents:
            tokens = self._data.read(document)
            wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
            if len(wrong):
                return DataError(
                    f"{self._data.prefix}: token {wrong[0]} of document {document} is {tokens[wrong[0]]}, outside "
                    f"vocab_size={self._vocab_size}; use the tokenizer the data was made with, or set vocab_size to its"
                )
        raise AssertionError("the sample had such an id")


def build_datasets(
    data: DataConfig, *, seq_length: int, seed: int, num_samples: tuple[int, int, int], vocab_size: int
) -> tuple[TokenDataset | None, TokenDataset | None, TokenDataset | None]:
    """Training, validation and test samples: at least num_samples of each, repeating documents as needed.

    None where no samples are asked for, or where the split leaves no documents to validation or test. Training
    documents must hold at least one sample. Raises DataError.
    """
    prefixes, weights = parse_data_path(data.data_path)
    opened = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    for dataset in opened.values():
        check_vocabulary(dataset, vocab_size)
    ranges = {prefix: split_documents(len(dataset), data.split) for prefix, dataset in opened.items()}
    if parse_split(data.split)[0] > 0 and num_samples[0] > 0:
        for prefix in opened:
            _check_training_size(opened[prefix], ranges[prefix][0], data.split, seq_length)

    def build_split(split: int) -> TokenDataset | None:
        asked = num_samples[split]
        members = [
            (prefix, weight)
            for prefix, weight in zip(prefixes, weights or [1.0] * len(prefixes), strict=True)
            if opened[prefix].count_tokens(ranges[prefix][split]) > 0
        ]
        if asked == 0 or not members:
            return None
        if len(members) < len(prefixes):
            absent = sorted(set(prefixes) - {prefix for prefix, _ in members})
            logger.warning("no %s documents in %s (split=%s); left out", SPLITS[split], ", ".join(absent), data.split)

        def build(member: int, count: int) -> GPTDataset:
            prefix = members[member][0]
            return GPTDataset(
                opened[prefix],
                ranges[prefix][split],
                num_samples=count,
                seq_length=seq_length,
                seed=seed,
                vocab_size=vocab_size,
                cache_dir=cache_folder(data, prefix),
            )

        if weights is None:
            return build(0, asked)
        return BlendedDataset([weight for _, weight in members], asked, build, cache_folder(data, prefixes[0]))

    return build_split(0), build_split(1), build_split(2)


def parse_data_path(data_path: tuple[str, ...]) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights; no weights where data_path is a single prefix. Raises DataError."""
    if len(data_path) == 1:
        return [data_path[0]], None
    try:
        weights = [float(word) for word in data_path[::2]]
    except ValueError:
        weights = []
    if not data_path or len(data_path) % 2 or not weights or not all(0 < weight < math.inf for weight in weights):
        raise DataError(
            f"data_path={' '.join(data_path)!r} must be one prefix, or WEIGHT PREFIX pairs with weights above 0"
        )
    return list(data_path[1::2]), weights


def cache_folder(data: DataConfig, prefix: str) -> Path:
    return Path(data.data_cache_path) if data.data_cache_path else Path(prefix).parent / "cache"


def check_vocabulary(data: IndexedDataset, vocab_size: int) -> None:
    """Raises DataError if the file's type cannot hold every id of the vocabulary."""
    if data.dtype.kind not in "iu":
        raise DataError(f"{data.prefix} holds {data.dtype}, not token ids; preprocess the text anew")
    largest = int(np.iinfo(data.dtype).max)
    if vocab_size - 1 > largest:
        raise DataError(
            f"{data.prefix} stores ids as {data.dtype}, up to {largest}, but vocab_size={vocab_size}: it was made with "
            "another tokenizer; preprocess the text with this model's tokenizer, or set vocab_size to the data's"
        )


def _check_training_size(data: IndexedDataset, documents: range, split: str, seq_length: int) -> None:
    num_tokens = data.count_tokens(documents)
    if num_tokens <= seq_length:
        raise DataError(
            f"{data.prefix}: the {len(documents)} training documents (split={split} of {len(data)}) hold {num_tokens} "
            f"tokens, less than one sample of seq_length + 1 = {seq_length + 1}; give more text, a larger training "
            "part in split, or a shorter seq_length"
        )
