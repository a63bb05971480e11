"""Ranks that stay where another one ends: the agent's side, with ranks that are forks and do as the test says.

tests/training/test_chaos.py has real ones.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.launch.agents import agent, node_ranks
from megatron.launch.agents.agent import AgentOptions
from megatron.options.config import Config, ConfigError, GuardConfig
from megatron.resilience import job
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import network, places
from megatron.runtime.agent_link import AgentLink
from megatron.runtime.commands import ABORTED, FAILED, HUNG, REFUSED
from megatron.runtime.places import Places
from megatron.training.configure import load_settings
from tests.settings.faults import VALID

Train = Callable[[], None]


def run(monkeypatch: pytest.MonkeyPatch, train: Train, *, ranks: int = 3, max_restarts: int = 2) -> int:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(agent, "FAILED_GRACE_S", 0.5)
    monkeypatch.setattr(node_ranks, "run_main", lambda main, flags: train())
    options = AgentOptions(ranks_per_node=ranks, max_restarts=max_restarts, keep_healthy_ranks=True)
    return agent.run_agent(options, [], "fork")


def restarts() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def note_place(folder: Path) -> None:
    """Note the process of this rank in this round, and what it has got with its place."""
    store = network.STORE_SOCKET in os.environ
    if store:
        network.store_socket(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).close()
    (folder / f"{restarts()}.{os.environ['RANK']}").write_text(f"{os.getpid()} {store}")


def noted(folder: Path) -> list[list[str]]:
    """Processes of the ranks, round by round."""
    names = sorted({path.name[0] for path in folder.iterdir()})
    return [[path.read_text() for path in sorted(folder.glob(f"{name}.*"))] for name in names]


def leave_and_go_on(places_of_rank: Places, link: AgentLink) -> None:
    link.send(left=True)
    if not places_of_rank.take_next(lambda: None):
        os._exit(FAILED)


def test_healthy_ranks_stay_round_after_round_and_the_lost_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also rank 0, which serves another store in each round, is lost once."""

    def train() -> None:
        of_rank = Places()
        while True:
            note_place(tmp_path)
            link = AgentLink()
            link.send(step=10 + restarts())
            if restarts() == 2:
                os._exit(0)
            while len(list(tmp_path.glob(f"{restarts()}.*"))) < 3:
                time.sleep(0.01)
            if os.environ["RANK"] == str(1 - restarts()):
                os.kill(os.getpid(), signal.SIGKILL)
            leave_and_go_on(of_rank, link)

    assert run(monkeypatch, train) == 0
    first, second, third = noted(tmp_path)
    assert [place.endswith("True") for place in first + second + third] == [True, False, False] * 3
    assert (first[0], first[2]) == (second[0], second[2])
    assert (second[1], second[2]) == (third[1], third[2])
    assert first[1] != second[1]
    assert second[0] != third[0]
    shown = capfd.readouterr().err
    assert "was killed by SIGKILL; restart 1 of 2\n2 healthy ranks stay: 0, 2\n" in shown
    assert "2 healthy ranks stay: 1, 2\n" in shown


def failing(folder: Path, status: int, *, begins: bool = True, leaves: bool = True) -> Train:
    """Ranks of which the last one ends by this status in the first round; in the second all end well."""

    def train() -> None:
        note_place(folder)
        of_rank, link = Places(), AgentLink()
        if restarts():
            os._exit(0)
        if begins:
            link.send(step=1)
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            os._exit(status)
        if not leaves:
            time.sleep(600)
        leave_and_go_on(of_rank, link)
        note_place(folder)
        os._exit(0)

    return train


@pytest.mark.parametrize(
    ("status", "how", "reason"),
    [
        (FAILED, {"begins": False}, "a rank had not begun a step"),
        (FAILED, {"leaves": False}, "rank 0 has not left its step within 0.5 s"),
        (HUNG, {}, "the watchdog has ended the ranks"),
        (FAILED, {}, ""),
    ],
)
def test_all_ranks_start_again_where_they_cannot_stay_and_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    status: int,
    how: dict[str, bool],
    reason: str,
) -> None:
    monkeypatch.setattr(node_ranks, "LEAVE_S", 0.5)
    assert run(monkeypatch, failing(tmp_path, status, **how), ranks=2) == 0
    first, second = noted(tmp_path)
    stays = first[0] == second[0]
    shown = capfd.readouterr().err
    assert (f"{reason}: all ranks of the node start again\n" in shown) == bool(reason)
    assert stays == (not reason) == ("1 healthy rank stays: 0\n" in shown)


@pytest.mark.slow  # a busy machine may not end the rank within the time that it is given
@pytest.mark.parametrize("status", [REFUSED, ABORTED])
def test_a_run_that_is_over_lets_waiting_ranks_go(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, status: int
) -> None:
    assert run(monkeypatch, failing(tmp_path, status), ranks=2) == status
    shown = capfd.readouterr().err
    assert "stay" not in shown
    assert "ending the ranks that still run" not in shown, "the waiting rank ends by itself"


def test_a_rank_that_lost_others_which_run_on_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The network has failed between two ranks, and neither has ended."""

    def train() -> None:
        of_rank, link = Places(), AgentLink()
        # which of them gives up first is chance
        monkeypatch.setattr(places, "NOTICE_S", 0.3 if os.environ["RANK"] == "0" else 60.0)
        if restarts():
            note_place(tmp_path)
            os._exit(0)
        link.send(step=1)
        leave_and_go_on(of_rank, link)
        note_place(tmp_path)
        os._exit(0)

    assert run(monkeypatch, train, ranks=2) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_ranks_that_have_given_up_are_not_counted_on_while_they_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They wait for a verdict before they end, and the end of the first one wakes the agent."""

    def train() -> None:
        note_place(tmp_path)
        of_rank, rank = Places(), int(os.environ["RANK"])
        if restarts():
            os._exit(0)
        monkeypatch.setattr(places, "NOTICE_S", 60.0 if rank == 2 else 0.2)
        with Watchdog(Config(guard=GuardConfig(watchdog_timeout_s=0))) as watchdog:
            watchdog.phase("train", 1)
            if not watchdog.await_place(of_rank, RuntimeError("Connection closed by peer")):
                time.sleep(0.3 + rank)
                os._exit(FAILED)
        note_place(tmp_path)
        os._exit(0)

    assert run(monkeypatch, train, max_restarts=1) == 0
    first, second = noted(tmp_path)
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, False, True]
    assert "1 healthy rank stays: 2\n" in capfd.readouterr().err


def test_a_signal_ends_the_wait_for_ranks_that_do_not_leave(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_ranks, "LEAVE_S", 20.0)

    def train() -> None:
        AgentLink().send(step=1)
        time.sleep(0.3)
        if os.environ["RANK"] == "1":
            os._exit(FAILED)
        time.sleep(3)  # by then the agent waits for this rank, also on a busy machine
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)

    assert run(monkeypatch, train, ranks=2) == 0
    shown = capfd.readouterr().err
    assert "SIGTERM: the run stops here" in shown
    assert "has not left its step" not in shown
    assert "start again" not in shown


def test_ranks_that_wait_while_the_run_is_given_up_end_as_lost_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        of_rank = Places()
        while True:
            link = AgentLink()
            link.send(step=1)
            time.sleep(0.3)
            if os.environ["RANK"] == "1":
                os._exit(FAILED)
            link.send(left=True)
            if not of_rank.take_next(lambda: None):
                (tmp_path / "verdict").write_text(str(restarts()))
                os._exit(FAILED)

    assert run(monkeypatch, train, ranks=2, max_restarts=1) == FAILED
    assert (tmp_path / "verdict").read_text() == "1"


@pytest.mark.parametrize(
    ("options", "accelerator", "reason"),
    [
        ({"nodes": 2, "rendezvous": "a:1"}, "cpu", "over several nodes"),
        ({}, "cuda", "on cuda, since a rank that waits in a collective of nccl cannot leave it"),
        ({}, "hpu", "on hpu, since a rank that waits in a collective of hccl cannot leave it"),
        ({}, "", "where the ranks detect their device (give the launcher --device cpu, HL_DEVICE=cpu)"),
        ({"main": "megatron.generate"}, "cpu", "of megatron.generate"),
    ],
)
def test_runs_whose_ranks_cannot_stay_say_so_and_restart_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: dict[str, int],
    accelerator: str,
    reason: str,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    kept = agent.with_ranks_that_stay(AgentOptions(keep_healthy_ranks=True, **options))  # type: ignore[arg-type]
    assert not kept.keep_healthy_ranks
    assert capfd.readouterr().err == f"keep_healthy_ranks: no ranks are kept {reason}; all start again where one ends\n"
    assert agent.with_ranks_that_stay(AgentOptions()) == AgentOptions()
    assert capfd.readouterr().err == ""


def test_ranks_that_no_agent_restarts_refuse_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun and srun start them."""
    flags = [*VALID, "--save", "s", "--keep-healthy-ranks"]
    monkeypatch.setenv(job.COPIES, job.NO_MEMORY)
    assert load_settings(flags).checkpoint.keep_healthy_ranks
    monkeypatch.delenv(job.COPIES)
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    (fault,) = caught.value.faults
    assert fault.startswith("keep_healthy_ranks: ")
    assert "start them by megatron-launch with --max-restarts" in fault
