"""Packing of samples into rows, and bucketing of row lengths.

    pack_dataset   a whole dataset into the fewest rows of one capacity
    pack_step      one global batch over the data-parallel ranks and their microbatches
    bucket_length  the rule of InstructLab's HPU variant: 16 lengths in each power of two
    bucket_edges   the k lengths that pad given data least

All take lengths in tokens and return indices of samples. The loops are C++ (packing.cpp, steps.cpp, buckets.cpp) and
release the GIL. Equal input gives equal output on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.data.extension import helpers
from megatron.data.index.indexed import DataError

LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Packs:
    """Rows of samples: pack p holds the samples order[starts[p] : starts[p + 1]]."""

    order: NDArray[np.int64]
    """[num_samples] Every sample once, pack by pack."""
    starts: NDArray[np.int64]
    """[num_packs + 1]"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> NDArray[np.int64]:
        """Return the samples of one pack. Raises IndexError."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} is outside the {len(self)}")
        return self.order[self.starts[pack] : self.starts[pack + 1]]


@dataclass(frozen=True)
class StepPlan:
    """Cells of a step, one a microbatch and rank, some maybe empty. Microbatch m of rank r is m * num_ranks + r."""

    order: NDArray[np.int64]
    """[num_samples] Every sample once, cell by cell, ascending within a cell."""
    starts: NDArray[np.int64]
    """[num_microbatches * num_ranks + 1] Start of each cell in `order`."""
    num_ranks: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank."""
        return (len(self.starts) - 1) // self.num_ranks

    def cell(self, microbatch: int, rank: int) -> NDArray[np.int64]:
        """Return the samples of one microbatch of one rank. Raises IndexError."""
        if not (0 <= microbatch < self.num_microbatches and 0 <= rank < self.num_ranks):
            raise IndexError(
                f"microbatch {microbatch} of rank {rank} is outside the {self.num_microbatches} of {self.num_ranks}"
            )
        number = microbatch * self.num_ranks + rank
        return self.order[self.starts[number] : self.starts[number + 1]]


def pack_dataset(lengths: ArrayLike, capacity: int, seed: int | None = None) -> Packs:
    """Pack all samples into packs of at most `capacity` tokens: as few as best-fit-decreasing gives, or fewer.

    If that exceeds ceil(sum / capacity) by more than 1 in 5000, exactly filled packs are tried too. Within a pack the
    longest sample comes first; the order of packs is arbitrary. `seed` shuffles samples of equal length, which changes
    neighbours but not the lengths in a pack; without it they keep their order. Raises DataError.
    Source: Johnson 1974, "Fast algorithms for bin packing"; over a histogram as in Krell et al. 2021
    (arXiv:2107.02027).
    """
    order, starts = _checked(helpers.pack_dataset, lengths, capacity=capacity, seed=seed)
    return Packs(order, starts)


def pack_step(lengths: ArrayLike, max_tokens: int, num_ranks: int) -> StepPlan:
    """Pack one global batch into cells of at most `max_tokens` tokens, equally many for each rank.

    Uses the fewest microbatches that it finds, nearly always ceil(sum / (max_tokens * num_ranks)). It then balances
    tokens over all cells and, above all, between the ranks of a microbatch; ranks of similar tokens are balanced by the
    squares of lengths, the cost of attention. The fullest microbatch comes first. Raises DataError.
    """
    order, starts = _checked(helpers.pack_step, lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    return StepPlan(order, starts, num_ranks)


@overload
def bucket_length(length: int, per_octave: int = 16) -> int: ...
@overload
def bucket_length(length: NDArray[np.integer], per_octave: int = 16) -> NDArray[np.int64]: ...
def bucket_length(length: int | NDArray[np.integer], per_octave: int = 16) -> int | NDArray[np.int64]:
    """Round lengths up to one of `per_octave` evenly spaced ones between powers of two.

    Adds less than length / per_octave. 16 is the rule of InstructLab's documentation, steps of 2**floor(log2 length) /
    16; its code has 8. Raises DataError.
    """
    if isinstance(length, np.ndarray):
        rounded: NDArray[np.int64] = _checked(helpers.bucket_lengths, length.reshape(-1), per_octave=per_octave)
        return rounded.reshape(length.shape)
    return int(_checked(helpers.bucket_lengths, [length], per_octave=per_octave)[0])


def bucket_edges(lengths: ArrayLike, num_buckets: int) -> NDArray[np.int64]:
    """Return the lengths to which samples are best padded: [num_buckets], ascending, the longest sample's at the end.

    Exact: no other set of this size gives fewer tokens when each sample is padded to the first edge at or above its
    length. With fewer distinct lengths there are fewer edges. Raises DataError.
    """
    return _checked(helpers.bucket_edges, lengths, num_buckets=num_buckets)


def pad_to_edges(lengths: ArrayLike, edges: ArrayLike) -> NDArray[np.int64]:
    """Round each length up to the first of the ascending `edges` at or above it. Raises DataError."""
    given, limits = _integers(lengths, "lengths"), _integers(edges, "edges")
    # searchsorted gives any answer for edges that are not in order
    if len(limits) == 0 or (np.diff(limits) <= 0).any():
        raise DataError(f"edges={limits.tolist()} must be ascending, and at least one; take those of bucket_edges")
    if len(given) and given.max() > limits[-1]:
        raise DataError(
            f"a sample of {given.max()} tokens is longer than the last edge, {limits[-1]}; make edges of all lengths"
        )
    return limits[np.searchsorted(limits, given)]


def _integers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return values as flat, contiguous, aligned int64. Raises DataError."""
    try:
        # without a dtype: floats and bools would be rounded in silence
        array: NDArray[Any] = np.asarray(values)
    except ValueError:  # lists of several lengths
        raise DataError(f"{name} are not numbers; give a flat array") from None
    if array.ndim != 1:
        raise DataError(f"{name} has the shape {array.shape}; give a flat array")
    if not array.size:  # NumPy makes an empty list one of floats
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise DataError(f"{name} has the type {array.dtype}; give integers")
    if array.dtype.kind == "u" and array.max() > LARGEST:
        raise DataError(f"{name} has {array.max()} in it, which is beyond 64 bits")
    # C++ reads it by its address
    return np.require(array, np.int64, ["C", "A"])


def _check_limit(name: str, limit: Any) -> None:
    # True is an int for Python, and a mistake here
    if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)):
        raise DataError(f"{name}={limit!r} is not an integer; give a number of tokens, ranks or buckets as one")
    if abs(int(limit)) > LARGEST:
        raise DataError(f"{name}={limit} is beyond 64 bits; give a smaller number")


def _checked(function: Any, lengths: ArrayLike, **limits: int | None) -> Any:
    """Call a function of the extension, with its ValueError as a DataError, as for a limit that is not an integer."""
    for name, limit in limits.items():
        # only the seed may be left out
        if limit is not None or name != "seed":
            _check_limit(name, limit)
    try:
        return function(_integers(lengths, "lengths"), *limits.values())
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None
