"""Types of the C++ extension built from helpers.cpp."""

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

class Shuffler:
    """Shuffles as numpy.random.RandomState(seed) does, draw for draw. Not for two threads at once."""

    def __init__(self, seed: int) -> None: ...
    def shuffle(self, array: NDArray[np.integer]) -> None:
        """In place; a flat array of 4- or 8-byte integers. Raises ValueError."""
