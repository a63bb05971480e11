"""Types of the C++ extension built from helpers.cpp, packing.cpp, steps.cpp and buckets.cpp."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def build_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int, num_samples: int
) -> NDArray[np.signedinteger]:
    """Where each sample begins: [num_samples + 1, 2] of (position in document_index, offset in that document).

    Sample k covers tokens k * seq_length .. (k + 1) * seq_length of the documents laid end to end, both included.
    int32, or int64 from 2**31 documents. Raises ValueError.
    """

def build_blend_index(weights: NDArray[np.float64], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """For each sample of a blend, the dataset it comes from and its number within that dataset.

    Each goes to the dataset furthest behind its weight, the first of equals. Weights sum to 1. Raises ValueError.
    """

def build_exhaustive_blend_index(sizes: NDArray[np.int64], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same for the first `size` samples of a blend that holds each of the sizes[d] samples of dataset d once.

    The weights are the sizes; a dataset whose samples are all dealt takes no further part. Raises ValueError.
    """

class SampleReader:
    """Reads samples of seq_length + 1 tokens; vocab_size=None: ids are not checked. Raises ValueError.

    `tokens` is the whole .bin, `pointers` and `lengths` place each document in it (bytes, tokens). The three indices
    are GPTDataset's. For any number of threads at once.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[np.int32],
        pointers: NDArray[np.int64],
        document_index: NDArray[np.int32],
        sample_index: NDArray[np.signedinteger],
        shuffle_index: NDArray[np.integer],
        seq_length: int,
        vocab_size: int | None,
    ) -> None: ...
    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those samples of the shuffled order: [len(indices), seq_length + 1].

        Raises IndexError for a sample that does not exist, ValueError for an id outside the vocabulary, or where one
        of the arrays points outside another.
        """

    def read_into(self, indices: NDArray[np.int64], out: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """The same, each into its row of `out`, [any, seq_length + 1]. After an error `out` is partly written."""

    def read_one(self, index: int) -> NDArray[np.int64]:
        """One of them: [seq_length + 1]."""

class Shuffler:
    """Shuffles as numpy.random.RandomState(seed) does, draw for draw. Not for two threads at once."""

    def __init__(self, seed: int) -> None: ...
    def shuffle(self, array: NDArray[np.integer]) -> None:
        """In place; a flat array of 4- or 8-byte integers. Raises ValueError."""

def pack_dataset(
    lengths: NDArray[np.int64], capacity: int, seed: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order and starts of packing.Packs. Raises ValueError."""

def pack_step(
    lengths: NDArray[np.int64], max_tokens: int, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order and starts of packing.StepPlan. Raises ValueError."""

def bucket_lengths(lengths: NDArray[np.int64], per_octave: int) -> NDArray[np.int64]:
    """packing.bucket_length of each. Raises ValueError."""

def bucket_edges(lengths: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """The optimal edges, ascending. Raises ValueError."""
