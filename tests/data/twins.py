"""NumPy oracles of the C++ extension: the same arrays by other, slower methods."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def numpy_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int, num_samples: int
) -> NDArray[np.int64]:
    """Oracle of helpers.build_sample_index: sample k begins in the document that holds token k * seq_length."""
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, boundaries, side="right")
    positions[0] = 0  # an empty first document is where the stream begins all the same
    begins = np.concatenate(([0], ends))[positions]
    offsets = boundaries - begins
    offsets[0] = 0
    return np.stack((positions, offsets), axis=1)


def walked_sample_index(
    lengths: list[int], document_index: list[int], seq_length: int, num_samples: int
) -> list[list[int]]:
    """Oracle of the same, token by token, as the format describes it."""
    stream = [(p, o) for p, document in enumerate(document_index) for o in range(lengths[document])]
    return [[0, 0]] + [list(stream[k * seq_length]) for k in range(1, num_samples + 1)]


def numpy_blend(weights: ArrayLike, size: int, sizes: ArrayLike | None = None) -> list[tuple[int, int]]:
    """Oracle of helpers.build_blend_index; with `sizes`, of helpers.build_exhaustive_blend_index."""
    shares = np.asarray(weights, dtype=np.float64)
    drawn = np.zeros(len(shares))
    found = []
    for i in range(size):
        behind = shares * max(i, 1) - drawn
        if sizes is not None:
            behind[drawn == np.asarray(sizes)] = -np.inf  # all of it is dealt
        neediest = int(np.argmax(behind))  # argmax: the first of equals
        found.append((neediest, int(drawn[neediest])))
        drawn[neediest] += 1
    return found


def numpy_samples(
    documents: list[NDArray[np.integer]],
    document_index: NDArray[np.int32],
    shuffle_index: NDArray[np.integer],
    seq_length: int,
    indices: list[int],
) -> NDArray[np.int64]:
    """Oracle of helpers.SampleReader.read: slices of the concatenated documents."""
    stream = np.concatenate([documents[d] for d in document_index.tolist()]).astype(np.int64)
    begins = [int(shuffle_index[i]) * seq_length for i in indices]
    return np.array([stream[begin : begin + seq_length + 1] for begin in begins]).reshape(-1, seq_length + 1)
