"""Small indexed datasets for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from megatron.data.index.indexed import IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder


def write_dataset(prefix: Path, lengths: Sequence[int], dtype: DTypeLike = np.uint16, vocab: int = 60000) -> Path:
    """Write documents of these lengths whose tokens count up from 0, so that each token shows its place."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        builder.add_documents(np.arange(sum(lengths)) % vocab, lengths)
        builder.finalize()
    return prefix


def open_dataset(prefix: Path, lengths: Sequence[int], dtype: DTypeLike = np.uint16) -> IndexedDataset:
    return IndexedDataset(write_dataset(prefix, lengths, dtype))
