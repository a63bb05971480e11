"""End of a round in a process that stays: others that wait for it notice, and nothing of the round goes on."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron import train
from megatron.options.config import Config, ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import OtherRankFailed, has_lost_another
from megatron.resilience.process import ProcessState
from megatron.resilience.shutdown import Signals
from megatron.runtime.network import rank_connections
from megatron.training.deepspeed.releases import leave_groups
from tests.ranks import RankPools
from tests.settings.faults import VALID

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


def leave_where_that_fails(port: int) -> tuple[bool, str]:
    """Rank 0 alone has a connection with another program, as with a tracker's server; it still sends by it.

    Returns if this rank stays, and what it prints.
    """
    before = ProcessState.now()
    ctx = ParallelContext.build(ParallelConfig(), "cpu")

    def leave_half() -> None:
        raise ValueError("an engine cannot be destroyed")

    if ctx.rank:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            stays = before.restore(leave_half)
        dist.destroy_process_group()
        return stays, printed.getvalue()
    with socket.create_connection(("127.0.0.1", port)) as tracker:
        stays = before.restore(leave_groups)
        tracker.sendall(b"row")
    return stays, ""


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


def connections_by_psutil(port: int) -> tuple[bool, int]:
    """Return whether those of this rank with the others are what psutil says, and how many there are."""
    ParallelContext.build(ParallelConfig(), "cpu")
    dist.barrier()
    with socket.create_connection(("127.0.0.1", port)):  # with another program
        found = set(rank_connections().values())
        ends = set[Any]()
        for rank in psutil.Process(os.getppid()).children():
            ends |= {(each.raddr, each.laddr) for each in rank.net_connections("tcp") if each.raddr}
        own = psutil.Process().net_connections("tcp")
        expected = {each.fd for each in own if each.raddr and (each.laddr, each.raddr) in ends}
        dist.barrier()
    dist.destroy_process_group()
    return found == expected, len(found)


def test_the_connections_with_other_ranks_are_those_of_psutil(ranks: RankPools) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for equal, count in ranks(3)(connections_by_psutil, server.getsockname()[1]):
            assert equal
            assert count >= 2


def test_ranks_that_wait_for_each_other_in_a_chain_leave_with_the_first(ranks: RankPools) -> None:
    """gloo breaks no wait, and keeps connections of groups that something still holds."""
    assert ranks(3)(wait_in_a_chain) == [(False, True), (True, True), (True, True)]


def test_a_process_with_a_thread_of_its_round_at_work_does_not_stay(ranks: RankPools) -> None:
    assert ranks(2)(leave_with_a_thread_at_work) == [False, False]


def test_an_error_while_a_rank_leaves_is_shown_and_connections_with_other_programs_stay(
    ranks: RankPools,
) -> None:
    said = "rank 1 does not stay: ValueError: an engine cannot be destroyed\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ranks(2)(leave_where_that_fails, server.getsockname()[1]) == [(True, ""), (False, said)]
        connection, _ = server.accept()
        with connection:
            assert connection.recv(3) == b"row"


def test_a_rank_stays_for_the_fault_of_another_alone() -> None:
    assert has_lost_another(OtherRankFailed("rank 1 on b failed: full"))
    assert has_lost_another(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not has_lost_another(OSError(5, os.strerror(5)))
    assert not has_lost_another(ArithmeticError("own"))


def test_a_process_that_stays_reads_its_options_again_as_a_new_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of options that was edited meanwhile would otherwise end the run: ranks would differ."""
    options, seen = tmp_path / "options.yaml", list[float]()
    options.write_text("optimizer: {lr: 0.25}")

    def left_round(config: Config, *rest: object) -> bool:
        seen.append(config.optimizer.lr)
        options.write_text("optimizer: {lr: 0.5}")
        return len(seen) < 2

    monkeypatch.setattr(train, "_left_round", left_round)
    with Signals() as signals:
        train.main([*VALID, "--config", str(options), "--device", "cpu"], signals)
    assert seen == [0.25, 0.5]
