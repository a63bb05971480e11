"""Padding cost of length buckets: the optimal edges against the rule that InstructLab documents.

    MEGATRON_TEST_DATA=... python benchmarks/bucketing.py [--samples 1000000]

Each sample is padded to its bucket. The rule has 16 buckets in each power of two; the optimal edges are as many as the
rule uses on the same lengths, and then the fewest that waste no more than it does. Lengths up to 4,096: lognormal (665
tokens on average), uniform, and those of real chats (left out without MEGATRON_TEST_DATA).

Prints waste (padding for each token) and shapes. Exit status 1 if, for one of the distributions, the waste is above
0.65 times the rule's and the shapes for its waste are above 0.6 times its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.alternating import positive
from benchmarks.sample_lengths import available, draw
from megatron.data.packing import bucket_edges, bucket_length, pad_to_edges

MOST_WASTE = 0.65
MOST_SHAPES = 0.6


def padding_waste(lengths: NDArray[np.int64], edges: NDArray[np.int64]) -> float:
    """Return the padding for each token when every sample is padded to the first edge at or above its length."""
    return float(pad_to_edges(lengths, edges).sum() / lengths.sum()) - 1


def fewest_shapes(lengths: NDArray[np.int64], waste: float, enough: int) -> int:
    """Optimal edges that waste no more than that, where `enough` of them do."""
    low, high = 1, enough
    while low < high:
        middle = (low + high) // 2
        if padding_waste(lengths, bucket_edges(lengths, middle)) <= waste:
            high = middle
        else:
            low = middle + 1
    return low


def compare(distribution: str, samples: int) -> bool:
    lengths = draw(distribution, samples, np.random.default_rng(0))
    rule = np.unique(bucket_length(lengths))
    began_s = time.perf_counter()
    edges = bucket_edges(lengths, len(rule))
    elapsed_ms = (time.perf_counter() - began_s) * 1000
    by_rule, by_edges = padding_waste(lengths, rule), padding_waste(lengths, edges)
    shapes = fewest_shapes(lengths, by_rule, len(rule))
    print(f"{distribution}: {samples} samples of {len(np.unique(lengths))} distinct lengths")
    print(f"  the rule       {by_rule:.2%} of padding, {len(rule)} shapes")
    print(f"  optimal edges  {by_edges:.2%} of padding, {len(edges)} shapes, found in {elapsed_ms:.0f} ms")
    print(f"  waste {by_edges / by_rule:.3f} of the rule's, at most {MOST_WASTE}, the target;", end=" ")
    print(f"its waste with {shapes} shapes, {shapes / len(rule):.3f} of its own, at most {MOST_SHAPES}, the target")
    return by_edges <= MOST_WASTE * by_rule or shapes <= MOST_SHAPES * len(rule)


def main() -> int:
    parser = argparse.ArgumentParser(description="Padding to length buckets.", allow_abbrev=False)
    parser.add_argument("--samples", type=positive, default=1_000_000, metavar="N", help="default: 1000000")
    options = parser.parse_args()
    passed = [compare(distribution, options.samples) for distribution in available()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
