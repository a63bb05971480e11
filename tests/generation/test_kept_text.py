"""A chat's later turns read their new tokens alone, and are answered as from a fresh start."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megatron.generation import passes
from tests.generation.outputs import LAYOUT, turns
from tests.generation.test_generator import reference
from tests.ranks import RankPools

NUM_NEW = 6
SAME = 1000
"""More tokens than there are: all earlier ones."""
ADDED = [
    (0, [5, 9, 2] * 12),
    (SAME, [7, 3, 11, 4]),
    (20, [8, 1] * 25),  # earlier turns are written otherwise
    (-NUM_NEW, []),  # the same prompt again
    (SAME, [6] * 70),
    (0, [40, 41]),  # a new chat
]
READ = [36, 1 + 4, 50, 1, 1 + 70, 2]
"""The last token of an answer has not been read."""
PLACES = [64, 64, 128, 128, 256, 256]


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"), [("llama_gqa", 1, 1), ("llama_3.1", 2, 1), ("bloom_12_heads", 1, 2)]
)
def test_new_tokens_alone_are_read(ranks: RankPools, name: str, tensor: int, pipeline: int) -> None:
    theirs, world = reference(name), tensor * pipeline
    arguments = f"{theirs.arguments} {LAYOUT.format(tensor, pipeline)}"
    if world == 1:
        results = [turns(arguments, theirs.weights, ADDED, NUM_NEW, True)]
    else:
        results = ranks(world)(turns, arguments, theirs.weights, ADDED, NUM_NEW, False)
    ours, fresh, _, num_bytes = zip(*results[0], strict=True)
    assert all(len(ids) == NUM_NEW for ids in fresh)
    assert ours == fresh
    for each in results:
        assert [num_read for *_, num_read, _ in each] == READ
    assert [each / num_bytes[0] for each in num_bytes] == [places / PLACES[0] for places in PLACES]


@pytest.mark.parametrize(("free", "num_read", "places"), [(4, 41, 256), (3, 41, 192), (2, 146, 192)])
def test_a_larger_cache_takes_what_memory_there_is(free: int, num_read: int, places: int) -> None:
    """`free`: in units of 64 places, beside the first cache of 128."""
    theirs = reference("llama_gqa")
    added = [(0, [5, 9] * 50), (SAME, [7] * 40)]
    ((*_, unit),) = turns(theirs.arguments, theirs.weights, [(0, [5])], NUM_NEW, True)
    with patch.object(passes, "free_memory_bytes", lambda: free * unit):
        first, second = turns(theirs.arguments, theirs.weights, added, NUM_NEW, True)
    assert first[2:] == (100, 2 * unit)
    assert second[2:] == (num_read, places / 64 * unit)
    assert second[0] == second[1]
