"""Ranks of a benchmark: the result of one, and a rank that dies is named at once, though others wait for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from benchmarks.alternating import RankError, on_ranks

LONG = 1 << 20
"""Bytes of a result that no pipe holds: its rank waits until it is taken."""


def rank(index: int, port: int, fault: str, results: Any) -> None:
    if index == 1 and fault == "exits":
        sys.exit(7)
    if index == 1 and fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault not in ("", "gives nothing"):
        time.sleep(3600)  # as in a collective
    if index == 1 and not fault:
        results.put((port, b"x" * LONG))


def test_the_result_of_one_rank_is_returned_however_long() -> None:
    port, content = on_ranks(rank, 2, "")
    assert 1024 < port < 65536
    assert content == b"x" * LONG


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exits", "rank 1 of 2 ended with exit status 7"),
        ("is killed", "rank 1 of 2 ended with exit status -9"),
        ("gives nothing", "none of 2 ranks gave a result"),
    ],
)
def test_a_rank_without_a_result_ends_the_others(fault: str, said: str) -> None:
    with pytest.raises(RankError, match=said):
        on_ranks(rank, 2, fault)
