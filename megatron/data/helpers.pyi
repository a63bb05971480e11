"""Types of the C++ extension built from native/."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def build_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int, num_samples: int
) -> NDArray[np.signedinteger]:
    """Return the start of each sample: [num_samples + 1, 2] of (position in document_index, offset in that document).

    Sample k covers tokens k * seq_length to (k + 1) * seq_length, inclusive, of the concatenated documents. int32, or
    int64 from 2**31 documents. Raises ValueError.
    """

def build_blend_index(weights: NDArray[np.float64], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the dataset of each sample of a blend, and its number in that dataset.

    Each sample comes from the dataset furthest behind its weight, the first of equals. Weights sum to 1. Raises
    ValueError.
    """

def build_exhaustive_blend_index(sizes: NDArray[np.int64], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the same for the first `size` samples of a blend of each of the sizes[d] samples of dataset d once.

    The weights are the sizes. Raises ValueError.
    """

class SampleReader:
    """Reader of samples of seq_length + 1 tokens; vocab_size=None: ids are not checked. Thread-safe. Raises ValueError.

    `tokens` is the whole .bin, `pointers` (bytes) and `lengths` (tokens) give the place of each document in it. The
    three indices are GPTDataset's.
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
        """Return samples by their number in the shuffled order: [len(indices), seq_length + 1].

        Raises IndexError for a sample that does not exist, ValueError for an id outside the vocabulary, or if one of
        the arrays points outside another.
        """

    def read_into(self, indices: NDArray[np.int64], out: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Write each to its row of `out`, [any, seq_length + 1]. After an error `out` is partly written."""

    def read_one(self, index: int) -> NDArray[np.int64]:
        """Return one sample: [seq_length + 1]."""

class Shuffler:
    """Equivalent of numpy.random.RandomState(seed).shuffle, draw for draw. Not thread-safe."""

    def __init__(self, seed: int) -> None: ...
    def shuffle(self, array: NDArray[np.integer]) -> None:
        """Shuffle a flat array of 4- or 8-byte integers in place. Raises ValueError."""

class BytePairEncoder:
    """Byte-level BPE of words, which separators delimit and a space may precede. Not thread-safe, as it has a cache."""

    def __init__(self, byte_ids: NDArray[np.int32], merges: NDArray[np.int32], separators: str) -> None:
        """`byte_ids`: the id of each of the 256 bytes. `merges`: [any, 3], left, right and merged id, by rank.

        Raises ValueError.
        """

    def encode_batch(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts, end to end, and how many each has. Raises UnicodeEncodeError."""

def pack_dataset(
    lengths: NDArray[np.int64], capacity: int, seed: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `order` and `starts` of packing.Packs. Raises ValueError."""

def pack_step(
    lengths: NDArray[np.int64], max_tokens: int, num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `order` and `starts` of packing.StepPlan. Raises ValueError."""

def bucket_lengths(lengths: NDArray[np.int64], per_octave: int) -> NDArray[np.int64]:
    """Return packing.bucket_length of each length. Raises ValueError."""

def bucket_edges(lengths: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Return the optimal edges, ascending. Raises ValueError."""
