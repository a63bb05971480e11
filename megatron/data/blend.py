"""Several datasets as one, mixed by weight, sample for sample as megatron-core mixes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_cache import Arrays, ArraySpec, cached_arrays

SURPLUS = 0.005
"""Each dataset is built this much longer than its share: the blend may draw a little more of it. megatron-core's."""


class TokenDataset(Protocol):
    """Samples of seq_length + 1 token ids, in the order they are trained on."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


def normalize(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights that sum to 1."""
    raw = np.asarray(weights, dtype=np.float64)
    return raw / raw.sum()


def shares(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples due from each dataset, rounded up, so that they add up to at least num_samples."""
    return [math.ceil(num_samples * weight) for weight in normalize(weights).tolist()]


def with_surplus(share: int) -> int:
    """Samples to build so that the blend cannot run out."""
    return math.ceil(share * (1 + SURPLUS))


class BlendedDataset:
    """Sample i comes from the dataset furthest behind its weight at i.

    `build(d, num_samples)` makes dataset d with at least that many samples. The blend's length is the sum of the
    rounded-up shares, at least num_samples.
    """

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int,
        build: Callable[[int, int], TokenDataset],
        cache_dir: Path | None = None,
    ):
        due = shares(weights, num_samples)
        self._size = sum(due)
        # normalised a second time, as megatron-core does: the last bit decides between equals
        self._weights = normalize(normalize(weights).tolist())
        description = json.dumps(["blend", 1, self._weights.tolist(), self._size])
        specs = {
            "dataset_index": ArraySpec((self._size,), np.dtype(np.int16)),
            "dataset_sample_index": ArraySpec((self._size,), np.dtype(np.int64)),
        }
        key = "blend-" + hashlib.sha256(description.encode()).hexdigest()[:32]
        arrays = cached_arrays(cache_dir, key, specs, self._build_index)
        self.dataset_index: NDArray[np.int16] = arrays["dataset_index"]
        """The dataset each sample comes from."""
        self.dataset_sample_index: NDArray[np.int64] = arrays["dataset_sample_index"]
        """Which of that dataset's samples it is."""
        drawn = np.bincount(self.dataset_index, minlength=len(due)).tolist()
        self.datasets: list[TokenDataset] = []
        for d, share in enumerate(due):
            dataset = build(d, with_surplus(share))
            # Many small weights can outrun the surplus, where megatron-core fails at that sample, hours in.
            self.datasets.append(dataset if drawn[d] <= len(dataset) else build(d, drawn[d]))
        members = [description, *(dataset.fingerprint for dataset in self.datasets)]
        self.fingerprint = hashlib.sha256("\n".join(members).encode()).hexdigest()
        """Equal where every sample is."""

    def _build_index(self) -> Arrays:
        from megatron.data import helpers  # late: gpt.py, which makes every blend, says what to do if it is missing

        dataset_index, dataset_sample_index = helpers.build_blend_index(self._weights, self._size)
        return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} is outside the {self._size} of the blend")
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]
