"""Who is to blame, and when: the verdict, the clock, and the datagrams between the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import random
import resource
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.options.config import Config, GuardConfig, LoggingConfig, ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import wait_for
from megatron.resilience import report_channel
from megatron.resilience import watchdog as module
from megatron.resilience.errors import PeerLostError, is_lost_peer
from megatron.resilience.rank_reports import FAILED, LOST, SHOWN, STUCK, Report, verdict
from megatron.resilience.report_channel import Channel
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import agent_link
from megatron.runtime.descriptors import raise_limit
from megatron.runtime.messages import MAC_BYTES, unseal
from megatron.runtime.places import Places
from tests.ranks import HANG_S, RankPools


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


def test_a_look_at_the_main_thread_keeps_nothing_of_it_alive() -> None:
    """Activations in the variables of its functions must be freed with these, not by the collector."""

    class Activations:
        pass

    def layer() -> weakref.ref[Activations]:
        activations = Activations()
        watcher = threading.Thread(target=module._innermost, args=(threading.get_ident(),))
        watcher.start()
        watcher.join()
        return weakref.ref(activations)

    gc.disable()
    try:
        assert layer()() is None
    finally:
        gc.enable()


def test_a_rank_in_the_function_that_waits_for_others_is_said_to_wait() -> None:
    """As a collective that is waited for in the background: its own `wait` is native code without a frame."""
    lock = threading.Lock()

    def hang() -> None:
        lock.acquire()

    def wait() -> None:
        wait_for([SimpleNamespace(wait=lock.acquire)])

    for function, name, expected in ((wait, "wait_for", True), (hang, "hang", False)):
        lock.acquire()
        thread = threading.Thread(target=function)
        thread.start()
        end = time.monotonic() + HANG_S
        while f"in {name} " not in module._innermost(thread.ident)[0]:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert module._innermost(thread.ident)[1] is expected
        lock.release()
        thread.join()
        lock.release()


def test_where_all_wait_the_one_that_is_elsewhere_is_named() -> None:
    """Out of step: one rank logs, the others train."""
    answers = {rank: report(rank) for rank in range(4)} | {2: report(2, "log", 6)}
    told = verdict(STUCK, 4, answers, {})
    assert told.startswith("  rank 2 on node1 (process 102) is elsewhere than most: in step 6, log")


def test_a_broken_link_is_named_and_no_rank_behind_it() -> None:
    """Its ranks all wait; the one whose last message was not lost is a step ahead."""
    answers = {rank: report(rank) for rank in range(6)}
    answers[2] = report(2, step=8, unreachable=["node2"])
    answers[4] = report(4, unreachable=["node1"])
    lines = verdict(STUCK, 6, answers, {}).splitlines()
    assert lines[0] == "  the link between node1 and node2 is broken: both run, and do not reach each other"
    assert "rank 2 on" not in "".join(lines)
    answers[3] = report(3, waits=False)
    assert "rank 3 on node1 (process 103) does not wait for others" in verdict(STUCK, 6, answers, {})


def test_a_host_that_nothing_reaches_is_named_in_place_of_its_ranks() -> None:
    answers = {0: report(0, unreachable=["node1"]), 1: report(1)}
    silent: dict[int, tuple[Report | str, float]] = {2: (report(2), 61.5), 3: ("node1", 0.0), 4: (report(4), 60.5)}
    lines = verdict(STUCK, 5, answers, silent).splitlines()
    assert lines[0].startswith(
        "  host node1 is not reached from node0: it is down, or its link is; ranks 2, 3 on it are"
    )
    assert lines[1].startswith("  rank 4 on node2 (process 104) does not answer: it ended")
    assert not any("rank 2 on" in line for line in lines)


def test_a_host_that_refuses_a_connection_is_reached_and_one_that_says_nothing_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_channel, "PATIENCE_S", 0.3)
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # the kernel drops what comes to a full queue, as a broken link does
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        held = opened.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))  # and does not listen
        probe = report_channel.HostProbe({"refuses": held.getsockname(), "silent": full.getsockname()})
        assert probe.unreachable() == [], "too early"
        time.sleep(0.4)
        assert probe.unreachable() == ["silent"]
        assert probe.unreachable() == ["silent"]
        probe.close()
        assert report_channel.HostProbe({"no route": ("240.0.0.1", 9)})._attempts.keys() <= {"no route"}


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


def test_a_rank_whose_process_ended_is_named_with_its_end() -> None:
    silent: dict[int, tuple[Report | str, float]] = {1: (report(1), 0.5), 2: ("node1", 0.0)}
    endings = {1: "was killed by SIGSEGV", 2: "ended with status 7", 0: "was killed by SIGKILL"}
    assert verdict(LOST, 3, {0: report(0, state=LOST)}, silent, endings).splitlines()[:2] == [
        "  rank 1 on node0 (process 101) was killed by SIGSEGV; last heard of 0.5 s ago, in step 7, train",
        "  rank 2 on node1 ended with status 7",
    ]


def test_a_rank_that_failed_is_named_with_its_message_though_it_has_ended() -> None:
    failed = report(1, state=FAILED, fault="ValueError: boom")
    answers = {0: report(0, state=LOST, fault="Connection closed by peer")}
    told = verdict(LOST, 2, answers, {1: (failed, 0.5)})
    assert told.splitlines() == [
        "  rank 1 on node0 (process 101) failed in step 7, train: ValueError: boom",
        "  rank 0 lost touch with another rank in step 7, train",
    ]


def test_what_was_wrong_before_is_told_of_the_ranks_that_a_verdict_names() -> None:
    """Of each rank by its own record, and of the slow ones by that of all."""
    remark = "in step 5 its own gradients are not finite, its losses are"
    answers = {rank: report(rank, remark=remark if rank == 3 else "") for rank in range(4)}
    lines = verdict(LOST, 4, {0: answers[0]}, {3: (answers[3], 0.5)}, {3: "was killed by SIGBUS"}).splitlines()
    assert lines[0].endswith(f"was killed by SIGBUS; last heard of 0.5 s ago, in step 7, train; {remark}")
    failed = dataclasses.replace(answers[3], state=FAILED, fault="RuntimeError: CUDA error")
    assert f"failed in step 7, train: RuntimeError: CUDA error; {remark}\n" in verdict(
        LOST, 4, answers | {3: failed}, {}
    )
    slow = "until step 6: rank 3 on node1 (cuda:1): forward +40.0 ms a step, own time 2.00 x its earlier steps"
    stuck = answers | {3: dataclasses.replace(answers[3], waits=False)}
    lines = verdict(STUCK, 4, stuck, {}, {}, slow).splitlines()
    assert lines[0].endswith(f"since 60.0 s, in f (x.py:1); {remark}")
    assert lines[-1] == f"  slower than expected {slow}"


def test_what_was_wrong_with_a_rank_is_reported_at_once_since_it_may_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "AgentLink", lambda: SimpleNamespace(send=lambda **message: sent.append(message)))
    with Watchdog(of(0)) as watchdog:
        watchdog.phase("train", 5)
        watchdog.note("in step 5 its loss is not finite, what it received was")
    assert [list(message) for message in sent] == [["step"], ["report"]]
    assert sent[1]["report"]["remark"] == "in step 5 its loss is not finite, what it received was"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:123"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"), True),
        (RuntimeError("NCCL communicator was aborted on rank 3"), True),
        (RuntimeError("[enforce fail at gloo/transport/tcp/socket.cc:24] socket: Too many open files"), False),
        (RuntimeError("[gloo/transport/tcp/device.cc] Unable to find address for: eth7"), False),
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


def test_off_or_not_entered_it_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Watchdog(of(0, results_dir=tmp_path)) as watchdog:
        watchdog.phase("train", 1)
        watchdog.connect(ParallelContext.single())
        watchdog.open()
        error = ValueError("boom")
        assert watchdog.fail(error) is error
        assert isinstance(watchdog.fail(RuntimeError("Connection closed by peer")), PeerLostError)
    assert not list(tmp_path.iterdir())


def exchange() -> tuple[list[int], str, bool]:
    """On each rank, which has 4,000 files open: whose reports came, whether the call did, whether strangers count."""
    raise_limit()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(4000)]
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    channel = Channel(ctx, "127.0.0.1")
    assert channel._datagrams._socket.fileno() > 4000, "select.select ends at 1024"
    state = STUCK if ctx.rank == 1 else "running"
    mine = Report(ctx.rank, "here", os.getpid(), "train", 1, 0.0, state)
    forged = json.dumps({"sender": 0, "number": 1, "verdict": True, "call": STUCK}).encode()
    for address in channel._collectors.values():
        for content in (forged, bytes(MAC_BYTES) + forged, b"\xff no json", b"[" * 60000):
            channel._datagrams._socket.sendto(content, address)
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s and not (channel.call and (not channel.collects or len(channel.reports) == 4)):
        channel.send(mine)
        channel.wait(0.05)
    ctx.broadcast(0)
    for _ in range(5):  # whoever still asks
        channel.wait(0.05)
    ctx.broadcast(0)
    channel.close()
    for descriptor in opened:
        os.close(descriptor)
    return sorted(channel.reports), channel.call, channel.has_verdict


def test_a_call_reaches_every_rank_and_the_reports_both_collectors(ranks: RankPools) -> None:
    results = ranks(4)(exchange)
    assert [call for _, call, _ in results] == [STUCK] * 4
    assert [reporters for reporters, _, _ in results] == [[0, 1, 2, 3], [], [], [0, 1, 2, 3]]
    assert not any(has_verdict for _, _, has_verdict in results), "a datagram without the key was accepted"


# ---------------------------------------------------------------------------------------------------------------------
# Strangers, and many ranks


def channels(size: int) -> list[Channel]:
    """The channels of that many ranks, all in this process."""
    key, places = secrets.token_hex(32), [("here", "127.0.0.1", 0)] * size
    made: list[Channel] = []
    for rank in range(size):

        def gather(mine: Any, rank: int = rank) -> list[Any]:
            if isinstance(mine, str):
                return ["127.0.0.1"] * size
            places[rank] = mine
            return places

        ctx: Any = SimpleNamespace(
            rank=rank, world_size=size, gather_objects=gather, broadcast_object=lambda mine: key, broadcast=int
        )
        made.append(Channel(ctx, "127.0.0.1"))
    for channel in made:
        channel._collectors = {rank: tuple(places[rank][1:]) for rank in (0, size - 1)}
    return made


def test_whatever_strangers_send_the_watchdog_goes_on_and_believes_none_of_it() -> None:
    collector, peer, last = channels(3)
    draw = random.Random(7)
    taken: list[bytes] = []
    sends, real = peer._datagrams, peer._datagrams._socket
    sends._socket = SimpleNamespace(sendto=lambda content, _: taken.append(content))  # type: ignore[assignment]
    for number in range(50):
        peer.send(report(1, step=number, state=STUCK))
    sends._socket = real
    address = collector._datagrams.place
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def altered(content: bytes) -> bytes:
        place = draw.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]

    attacks = [b"", b"[" * 60000, b'{"a":' * 10000, bytes(MAC_BYTES) + b"[" * 60000]
    for _ in range(250):
        genuine = draw.choice(taken)
        attacks += [
            draw.randbytes(draw.randrange(200)),
            genuine[: draw.randrange(len(genuine))],
            altered(genuine),
            genuine + draw.randbytes(1 + draw.randrange(9)),
        ]
    for attack in attacks:
        stranger.sendto(attack, address)
        assert not collector.wait(0.0)
    assert (collector.reports, collector.call, collector.has_verdict) == ({}, "", False)

    peer.send(report(1, step=51))
    collector.wait(1.0)
    assert collector.reports[1][0].step == 51
    for content in taken:  # recorded, and sent again once newer ones have come
        stranger.sendto(content, address)
        collector.wait(0.0)
    assert (collector.reports[1][0].step, collector.call) == (51, "")
    for channel in (collector, peer, last):
        channel.close()
    stranger.close()


def test_a_thousand_ranks_are_heard_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def opened_and_counted(key: bytes, purpose: bytes, content: bytes, largest_bytes: int) -> dict[str, Any]:
        sizes.append(len(content) + 28)  # with the headers of IP and UDP
        return unseal(key, purpose, content, largest_bytes)

    monkeypatch.setattr(agent_link, "unseal", opened_and_counted)
    raise_limit()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(4000)]
    made = channels(1000)
    try:
        collector = made[0]
        for rank, channel in enumerate(made):
            channel.send(report(rank, where="x" * 200))
            if rank % 50 == 0:  # the buffer of a socket holds few more
                collector.wait(0.0)
                made[-1].wait(0.0)
        collector.wait(0.0)
        made[-1].wait(0.0)
        assert len(collector.reports) == len(made[-1].reports) == 1000
        assert sum(sizes) / 2 / Watchdog(of(None))._look_s < 300_000, "bytes a second at each of the two collectors"
        made[500].send(report(500, state=STUCK))
        collector.wait(1.0)
        assert [channel.wait(1.0) for channel in made[1:-1]] == [True] * 998
        made[-1].wait(1.0)
        assert {channel.call for channel in made} == {STUCK}
    finally:
        for channel in made:
            channel.close()
        for descriptor in opened:
            os.close(descriptor)


def test_no_exception_ends_the_watchdog(capfd: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def look(watchdog: Watchdog) -> None:
        nonlocal looks
        looks += 1
        raise RecursionError("maximum recursion depth exceeded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "_look", look)
        with Watchdog(of(600)) as watchdog:
            while looks < 3:
                time.sleep(0.02)
            assert watchdog._thread is not None
            assert watchdog._thread.is_alive()
    shown = capfd.readouterr().err
    assert shown == "rank 0: the watchdog goes on after RecursionError: maximum recursion depth exceeded\n"


# ---------------------------------------------------------------------------------------------------------------------
# Whose fault it is


def test_a_rank_alone_has_lost_no_other(tmp_path: Path) -> None:
    error = RuntimeError("[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. socket: Permission denied")
    with Watchdog(of(600, results_dir=tmp_path)) as watchdog:
        assert watchdog.fail(error) is error


def test_a_rank_that_waits_for_a_place_has_written_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The agent may end meanwhile, and kill it. Where a place comes, nothing is left."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    error, written = RuntimeError("Connection closed by peer"), list[str]()

    def take_next(places: Places, beat: object) -> bool:
        written.extend(path.read_text() for path in tmp_path.rglob("rank_*.txt"))
        return True

    monkeypatch.setattr(Places, "take_next", take_next)
    with contextlib.suppress(RuntimeError), Watchdog(of(600, results_dir=tmp_path)) as watchdog:
        watchdog.connect(ParallelContext.single())
        watchdog.phase("train", 7)
        assert watchdog.await_place(Places(), error)
        raise error
    (text,) = written
    assert " lost in step 7, train\n" in text
    assert "RuntimeError: Connection closed by peer" in text
    assert not list(tmp_path.iterdir())


def test_a_rank_without_descriptors_names_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Watchdog(of(600, results_dir=tmp_path)) as watchdog:
        free = os.dup(2)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))
        try:
            error = watchdog.fail(RuntimeError("Failed to init uv loop, or: Connection closed by peer"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (
            str(error)
            == f"[Errno 24] Too many open files: the limit is {free + 2} (ulimit -n); raise it, or open fewer"
        )
        assert watchdog._report().state == FAILED
        assert "Too many open files" in watchdog._report().fault


def test_where_all_ranks_are_lost_the_verdict_has_their_reasons() -> None:
    answers = {0: report(0, state=LOST, fault="no route to host"), 1: report(1, state=LOST, fault="Connection reset")}
    assert verdict(LOST, 2, answers, {}).splitlines() == [
        "  rank 0 on node0 (process 100): no route to host",
        "  rank 1 on node0 (process 101): Connection reset",
        "  all ranks lost touch with another rank in step 7, train",
    ]


@pytest.mark.parametrize("has_others", [False, True])
def test_the_end_of_a_run_does_not_wait_for_the_next_look(has_others: bool) -> None:
    watchdog = Watchdog(of(600.0))
    watchdog._look_s = 3600.0
    if has_others:
        watchdog._channel = channels(1)[0]
    with watchdog:
        assert watchdog._thread is not None
    assert not watchdog._thread.is_alive()
