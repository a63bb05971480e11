"""Who is to blame, and when: the verdict, the clock, and the datagrams between the ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.config.options import Config, GuardConfig, LoggingConfig, ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.resilience import watchdog as module
from megatron.resilience.errors import PeerLostError, is_lost_peer
from megatron.resilience.rank_reports import FAILED, LOST, SHOWN, STUCK, Channel, Report, verdict
from megatron.resilience.watchdog import Watchdog
from tests.ranks import RankPools


def report(rank: int, phase: str = "train", step: int = 7, **changes: Any) -> Report:
    fields: dict[str, Any] = {"since_s": 60.0, "where": "in f (x.py:1)", "waits": True}
    return Report(rank, f"node{rank // 2}", 100 + rank, phase, step, **{**fields, **changes})


def test_the_rank_that_does_not_wait_is_named_and_the_others_are_counted() -> None:
    answers = {rank: report(rank) for rank in range(12)} | {3: report(3, waits=False)}
    lines = verdict(STUCK, 12, answers, {}).splitlines()
    assert lines[0] == (
        "  rank 3 on node1 (process 103) does not wait for others: in step 7, train, since 60.0 s, in f (x.py:1)"
    )
    assert lines[1:] == ["  ranks 0, 1, 2, 4, 5, 6, 7, 8 and 3 more waited for others in step 7, train"]


def test_where_all_wait_the_one_that_is_elsewhere_is_named() -> None:
    """Out of step: one rank logs, the others train."""
    answers = {rank: report(rank) for rank in range(4)} | {2: report(2, "log", 6)}
    told = verdict(STUCK, 4, answers, {})
    assert told.startswith("  rank 2 on node1 (process 102) is elsewhere than most: in step 6, log")


def test_without_a_majority_no_rank_is_blamed() -> None:
    told = verdict(STUCK, 2, {0: report(0), 1: report(1, "log")}, {})
    assert "does not wait for others" not in told
    assert "than most" not in told


def test_a_single_rank_is_named_with_the_line_that_it_is_stuck_in() -> None:
    told = verdict(STUCK, 1, {0: report(0, waits=False)}, {})
    assert told.endswith(
        "rank 0 on node0 (process 100) does not wait for others: in step 7, train, since 60.0 s, in f (x.py:1)"
    )


def test_silent_ranks_come_first_and_many_are_counted() -> None:
    silent: dict[int, tuple[Report | str, float]] = {rank: (report(rank), 61.5) for rank in range(20)}
    silent[4] = ("node2", 0.0)
    lines = verdict(STUCK, 24, {rank: report(rank) for rank in range(20, 24)}, silent).splitlines()
    assert lines[0].startswith("  rank 0 on node0 (process 100) does not answer: it ended, is stopped, or is stuck")
    assert "last heard of 61.5 s ago, in step 7, train" in lines[0]
    assert lines[4] == "  rank 4 on node2 was never heard of"
    assert lines[SHOWN] == f"  and {20 - SHOWN} more such ranks"
    assert len(lines) == SHOWN + 2


def test_a_rank_that_failed_is_named_with_its_message_though_it_has_ended() -> None:
    failed = report(1, state=FAILED, fault="ValueError: boom")
    answers = {0: report(0, state=LOST, fault="Connection closed by peer")}
    told = verdict(LOST, 2, answers, {1: (failed, 0.5)})
    assert told.splitlines() == [
        "  rank 1 on node0 (process 101) failed in step 7, train: ValueError: boom",
        "  rank 0 lost touch with another rank in step 7, train",
    ]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:123"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"), True),
        (RuntimeError("NCCL communicator was aborted on rank 3"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (BrokenPipeError("Broken pipe"), False),
    ],
)
def test_errors_of_collectives_are_known_from_others(error: BaseException, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def of(timeout_s: float | None, minutes: float = 30.0, results_dir: Path | None = None) -> Config:
    return Config(
        guard=GuardConfig(watchdog_timeout_s=timeout_s),
        parallel=ParallelConfig(distributed_timeout_minutes=minutes),
        logging=LoggingConfig(results_dir=str(results_dir) if results_dir else None),
    )


def test_unset_it_is_600_s_or_what_collectives_are_given() -> None:
    assert of(None).effective_watchdog_timeout_s == 600
    assert of(None, 5.0).effective_watchdog_timeout_s == 300
    assert of(0).effective_watchdog_timeout_s == 0


def test_the_first_step_has_the_time_of_the_collectives_later_ones_the_watchdogs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    watchdog = Watchdog(of(10, minutes=1))
    assert watchdog._deadline_s() == 1060
    watchdog.started()
    watchdog.phase("data", 2)
    assert watchdog._deadline_s() == 1010
    now_s = 1005.0
    watchdog.beat_of("save")  # of a thread that writes a checkpoint while this rank hangs
    assert watchdog._deadline_s() == 1010
    watchdog.beat()
    assert watchdog._deadline_s() == 1015
    watchdog.phase("save", 2)
    now_s = 1012.0
    watchdog.beat_of("save")
    assert watchdog._deadline_s() == 1022
    watchdog.phase("data", 3)
    assert watchdog._deadline_s() == 1022


def test_off_or_not_entered_it_does_nothing(tmp_path: Path) -> None:
    with Watchdog(of(0, results_dir=tmp_path)) as watchdog:
        watchdog.phase("train", 1)
        watchdog.connect(ParallelContext.single())
        watchdog.open()
        error = ValueError("boom")
        assert watchdog.fail(error) is error
        assert isinstance(watchdog.fail(RuntimeError("Connection closed by peer")), PeerLostError)
    assert not list(tmp_path.iterdir())


def exchange() -> tuple[list[int], str, bool]:
    """On each rank: whose reports came, whether the call did, and whether strangers are heeded."""
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    channel = Channel(ctx, "127.0.0.1")
    state = STUCK if ctx.rank == 1 else "running"
    mine = Report(ctx.rank, "here", os.getpid(), "train", 1, 0.0, state)
    forged = json.dumps({"token": "guessed", "verdict": True, "call": STUCK}).encode()
    for address in channel._collectors.values():
        channel._socket.sendto(forged, address)
        channel._socket.sendto(b"\xff no json", address)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and not (channel.call and (not channel.collects or len(channel.reports) == 4)):
        channel.send(mine)
        channel.wait(0.05)
    ctx.broadcast(0)
    for _ in range(5):  # whoever still asks
        channel.wait(0.05)
    ctx.broadcast(0)
    channel.close()
    return sorted(channel.reports), channel.call, channel.has_verdict


def test_a_call_reaches_every_rank_and_the_reports_both_collectors(ranks: RankPools) -> None:
    told = ranks(4)(exchange)
    assert [call for _, call, _ in told] == [STUCK] * 4
    assert [heard for heard, _, _ in told] == [[0, 1, 2, 3], [], [], [0, 1, 2, 3]]
    assert not any(over for _, _, over in told), "a datagram without the token was heeded"
