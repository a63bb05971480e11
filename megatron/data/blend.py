"""Blends of several datasets by weight or by size, sample for sample as in megatron-core."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.data.extension import helpers
from megatron.data.index.index_cache import Arrays, ArraySpec, CachedArrays, cached_arrays
from megatron.data.index.indexed import DataError

SURPLUS = 0.005
"""Excess length of each dataset over its share, since a blend may draw slightly more. The same as megatron-core's."""


class TokenDataset(Protocol):
    """Samples of seq_length + 1 token ids, in the order they are trained on."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
    def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return several samples: [len(indices), seq_length + 1]."""


class BlendMember(TokenDataset, Protocol):
    """A dataset that can be blended."""

    @property
    def prefix(self) -> str: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def tokens_per_epoch(self) -> int: ...
    def documents_of(self, index: int) -> tuple[str, list[int]]: ...
    def read_into(self, indices: NDArray[np.int64], out: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Write sample indices[i] to row rows[i] of `out`, [any, seq_length + 1]."""


@dataclass(frozen=True)
class Drawn:
    """Samples of one dataset that a run reads of a mix."""

    prefix: str
    samples: int
    tokens: int
    epochs: float
    """Times that the dataset is read through."""


SHOWN_DATASETS = 40


def describe_mix(mix: Sequence[Drawn]) -> list[str]:
    """Return a line on each dataset of a mix, and one on those that are too many to show."""
    samples = max(1, sum(each.samples for each in mix))
    tokens = max(1, sum(each.tokens for each in mix))
    lines = [
        f"{each.prefix}: {each.samples:,} samples ({each.samples / samples:.1%}), {each.tokens:,} tokens "
        f"({each.tokens / tokens:.1%}), {each.epochs:.2f} epochs"
        for each in mix[:SHOWN_DATASETS]
    ]
    if len(mix) > SHOWN_DATASETS:
        lines.append(f"and {len(mix) - SHOWN_DATASETS} datasets more")
    return lines


def digest(*described: Any) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def content_of(fingerprint: str) -> str:
    """Return the part of a fingerprint that identifies the data, independent of the number of epochs."""
    return fingerprint.partition("-")[0]


def normalize(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the weights divided by their sum."""
    raw = np.asarray(weights, dtype=np.float64)
    return raw / raw.sum()


def shares(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return the samples due from each dataset, rounded up: at least num_samples in all."""
    # rounded up one by one, as in megatron-core, so that the sum may exceed num_samples
    return [math.ceil(num_samples * weight) for weight in normalize(weights).tolist()]


def with_surplus(share: int) -> int:
    """Return the number of samples to build for a share."""
    return math.ceil(share * (1 + SURPLUS))


class BlendedDataset:
    """Blend whose sample i is sample dataset_sample_index[i] of datasets[dataset_index[i]].

    Made by blend_by_weight or blend_by_size. `mixture` names the rule and the weights, for the fingerprint.
    """

    def __init__(self, datasets: Sequence[BlendMember], index: CachedArrays, *mixture: Any):
        self.datasets = list(datasets)
        self.dataset_index: NDArray[np.int16] = index.arrays["dataset_index"]
        """Dataset of each sample."""
        self.dataset_sample_index: NDArray[np.int64] = index.arrays["dataset_sample_index"]
        """Number of each sample in its dataset."""
        self.cache_paths, self._index_files = index.paths, index.files
        """Files of the blend's own arrays; none without a cache."""
        # without the numbers of epochs, which a longer run changes
        content = digest("blend", 2, mixture, [content_of(dataset.fingerprint) for dataset in self.datasets])
        self.fingerprint = content + "-" + digest([dataset.fingerprint for dataset in self.datasets])
        """Equal for blends with equal samples up to the end of the shorter one."""

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise self._outside(index)
        self._index_files.check()
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]

    def get_batch(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return several samples: [len(indices), seq_length + 1]. Raises as the datasets do."""
        chosen = np.asarray(indices, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise self._outside(int(outside[0]))
        self._index_files.check(always=True)
        # by dataset, not by sample: each call of the C++ reader checks its files once
        sources, numbers = self.dataset_index[chosen], self.dataset_sample_index[chosen]
        # written by each dataset in place: no sample is copied twice
        samples = np.empty((len(chosen), self.datasets[0].seq_length + 1), dtype=np.int64)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            self.datasets[source].read_into(numbers[rows], samples, rows)
        return samples

    def documents_of(self, index: int) -> tuple[str, list[int]]:
        """Return the prefix of the dataset of sample `index`, and its documents in there."""
        return self.datasets[int(self.dataset_index[index])].documents_of(int(self.dataset_sample_index[index]))

    def drawn(self, consumed_samples: int) -> list[Drawn]:
        """Return what the first `consumed_samples` samples are of each dataset."""
        self._index_files.check(always=True)
        counts = np.bincount(self.dataset_index[:consumed_samples], minlength=len(self.datasets)).tolist()
        # a sample shares its last token with the next one, so it is counted once
        tokens = [count * dataset.seq_length for count, dataset in zip(counts, self.datasets, strict=True)]
        return [
            Drawn(dataset.prefix, count, of_dataset, of_dataset / dataset.tokens_per_epoch)
            for dataset, count, of_dataset in zip(self.datasets, counts, tokens, strict=True)
        ]

    def _outside(self, index: int) -> IndexError:
        return IndexError(f"sample {index} is outside the {len(self)} of the blend")


def blend_by_weight(
    weights: Sequence[float],
    num_samples: int,
    build: Callable[[int, int], BlendMember],
    cache_dir: Path | None = None,
) -> BlendedDataset:
    """Return a blend in which each sample comes from the dataset furthest behind its weight.

    `build(d, num_samples)` returns dataset d with at least that many samples. The length of the blend is the sum of the
    rounded-up shares, at least num_samples.
    """
    due = shares(weights, num_samples)
    # normalised twice, as in megatron-core: the last bit decides between equals
    normalized = normalize(normalize(weights).tolist())

    def build_index() -> Arrays:
        return _named(helpers.build_blend_index(normalized, sum(due)))

    key = "blend-" + digest("weights", 2, normalized.tolist(), sum(due))
    index = _cached(cache_dir, key, sum(due), build_index)
    # the index is built first: only it knows how many samples each dataset gives
    drawn = _count_drawn(index, len(due))
    datasets: list[BlendMember] = []
    for d, share in enumerate(due):
        dataset = build(d, with_surplus(share))
        if drawn[d] > len(dataset):
            # many small weights can exceed the surplus; megatron-core then fails at that sample, hours later
            dataset = build(d, drawn[d])
        datasets.append(dataset)
    return BlendedDataset(datasets, index, "weights", normalized.tolist())


def blend_by_size(
    datasets: Sequence[BlendMember], num_samples: int | None = None, cache_dir: Path | None = None
) -> BlendedDataset:
    """Return a blend of every sample of every dataset once, each dataset spread evenly.

    num_samples truncates the blend, which never exceeds the sum of its datasets.
    """
    sizes = np.array([len(dataset) for dataset in datasets], dtype=np.int64)
    size = int(sizes.sum())
    if num_samples is not None:
        size = min(size, num_samples)

    def build_index() -> Arrays:
        return _named(helpers.build_exhaustive_blend_index(sizes, size))

    key = "blend-" + digest("sizes", 1, sizes.tolist(), size)
    index = _cached(cache_dir, key, size, build_index)
    _count_drawn(index, len(sizes))
    return BlendedDataset(datasets, index, "sizes")


def _named(index: tuple[NDArray[np.int16], NDArray[np.int64]]) -> Arrays:
    return {"dataset_index": index[0], "dataset_sample_index": index[1]}


def _cached(folder: Path | None, key: str, size: int, build: Callable[[], Arrays]) -> CachedArrays:
    specs = {
        "dataset_index": ArraySpec((size,), np.dtype(np.int16)),
        "dataset_sample_index": ArraySpec((size,), np.dtype(np.int64)),
    }
    return cached_arrays(folder, key, specs, build)


def _count_drawn(index: CachedArrays, num_datasets: int) -> list[int]:
    """Return the samples drawn from each dataset. Raises DataError if the arrays name unknown datasets."""
    numbers = index.arrays["dataset_index"]
    if not 0 <= numbers.min(initial=0) <= numbers.max(initial=0) < num_datasets:
        raise DataError(
            f"{index.paths[0]} names datasets outside the {num_datasets} of the blend; it is damaged, delete it"
        )
    drawn: list[int] = np.bincount(numbers, minlength=num_datasets).tolist()
    return drawn


class SeparateSets:
    """Datasets of one split that are evaluated one by one, by name, with the weight of each in their mean.

    `weights` None: by what their losses count. A task's `open_data` may return one in place of a validation or test
    dataset.
    """

    def __init__(self, prefixes: Sequence[str], datasets: Sequence[Any], weights: Sequence[float] | None):
        self.prefixes, self.datasets = list(prefixes), list(datasets)
        self.names = names_of(prefixes)
        self.weights = None if weights is None else normalize(weights).tolist()
        self.fingerprint = digest("separate", [dataset.fingerprint for dataset in datasets], self.weights)

    def __len__(self) -> int:
        """Return the number of samples of the shortest dataset."""
        return min(map(len, self.datasets))

    def map(self, function: Callable[[Any], Any]) -> SeparateSets:
        """Return the results of a function of each dataset."""
        return SeparateSets(self.prefixes, [function(dataset) for dataset in self.datasets], self.weights)


def sets_of(dataset: Any) -> list[Any]:
    """Return the datasets that are evaluated one by one, or the dataset itself; none for None."""
    if dataset is None:
        return []
    if isinstance(dataset, SeparateSets):
        return dataset.datasets
    return [dataset]


def names_of(prefixes: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths, of whole parts, that differ from each other."""
    parts = [PurePath(prefix).parts for prefix in prefixes]
    # names of folders are often the only difference: en/dev and de/dev
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(prefixes, 1)]  # one of them twice
