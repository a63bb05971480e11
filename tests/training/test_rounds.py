"""End of a round in a process that stays: others that wait for it notice, and nothing of the round goes on."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.options.config import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import OtherRankFailed, has_lost_another
from megatron.resilience.process import ProcessState
from megatron.training.deepspeed.releases import leave_groups
from tests.ranks import RankPools

HELD: list[Any] = []
"""What an engine holds: groups that the process cannot give back yet."""


def wait_in_a_chain() -> tuple[bool, bool]:
    """Rank 1 waits for rank 2, and that for rank 0, which leaves. Returns if another is lost, and if this one stays."""
    before = ProcessState.now()
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    groups = {2: dist.new_group([1, 2]), 0: dist.new_group([0, 2])}
    HELD.extend(groups.values())
    lost = False
    try:
        if ctx.rank == 0:
            time.sleep(0.2)
        else:
            source = 2 if ctx.rank == 1 else 0
            dist.recv(torch.zeros(1), src=source, group=groups[source])
    except Exception as error:
        lost = has_lost_another(error)
    stays = before.restore(leave_groups)
    HELD.clear()
    return lost, stays


def leave_with_a_thread_at_work() -> bool:
    before = ProcessState.now()
    ParallelContext.build(ParallelConfig(), "cpu")
    done = threading.Event()
    at_work = threading.Thread(target=done.wait, name="copy of iteration 5")
    at_work.start()
    stays = before.restore(leave_groups)
    done.set()
    at_work.join()
    return stays


def test_ranks_that_wait_for_each_other_in_a_chain_leave_with_the_first(ranks: RankPools) -> None:
    """gloo breaks no wait, and keeps connections of groups that something still holds."""
    assert ranks(3)(wait_in_a_chain) == [(False, True), (True, True), (True, True)]


def test_a_process_with_a_thread_of_its_round_at_work_does_not_stay(ranks: RankPools) -> None:
    assert ranks(2)(leave_with_a_thread_at_work) == [False, False]


def test_a_rank_stays_for_the_fault_of_another_alone() -> None:
    assert has_lost_another(OtherRankFailed("rank 1 on b failed: full"))
    assert has_lost_another(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not has_lost_another(OSError(5, os.strerror(5)))
    assert not has_lost_another(ArithmeticError("own"))
