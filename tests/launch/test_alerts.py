"""Alerts of a run: one for each event, from the agent, whatever has become of the ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.launch.agents import agent, node_ranks, restart_policy
from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.agents.restart_policy import Failure
from megatron.launch.agents.run_alerts import RunAlerts
from megatron.runtime.agent_link import AgentLink
from megatron.runtime.alerts import Alert
from megatron.runtime.commands import ABORTED, DONE, FAILED, HUNG
from tests import runs

ROOT = Path(__file__).resolve().parent.parent.parent
HANGS = {"state": "stuck", "step": 12, "phase": "train"}
Rank = Callable[[AgentLink, int], None]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(agent, "FAILED_GRACE_S", 0.5)


def alerts_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rank: Rank, max_restarts: int = 0, *, ends_at: int = 99
) -> tuple[int, list[Any]]:
    """Run an agent whose second rank does as `rank` says with its link and attempt; return its status and the alerts.

    `ends_at`: the attempt in which the first rank ends well; before, it waits for the other one.
    """
    (folder / "record.sh").write_text(f"cat >> {folder}/got.jsonl\n")

    def train(main: str, flags: Any) -> None:
        link, attempt = AgentLink(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "0":
            time.sleep(600 if attempt < ends_at else 0)  # as in a collective
            os._exit(DONE)
        rank(link, attempt)

    monkeypatch.setattr(node_ranks, "run_main", train)
    command = f"sh {folder}/record.sh"
    options = AgentOptions(ranks_per_node=2, max_restarts=max_restarts, alert_command=command, run_name="run7")
    status = agent.run_agent(options, [], "fork")
    got = folder / "got.jsonl"
    return status, [json.loads(line) for line in got.read_text().splitlines()] if got.exists() else []


def shown(alerts: list[Any]) -> list[tuple[Any, ...]]:
    return [(each["event"], each["rank"], each["iteration"], each["status"]) for each in alerts]


def test_a_killed_rank_ends_the_run_with_one_alert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def killed(link: AgentLink, attempt: int) -> None:
        link.send(step=41)
        os.kill(os.getpid(), signal.SIGKILL)

    status, alerts = alerts_of(monkeypatch, tmp_path, killed)
    assert status == 128 + signal.SIGKILL
    assert shown(alerts) == [("abort", 1, 41, status)]
    assert (alerts[0]["run"], alerts[0]["host"]) == ("run7", socket.gethostname())
    assert f"the run ended: rank 1 on {socket.gethostname()} was killed by SIGKILL" in alerts[0]["message"]


def test_a_hang_is_a_stall_with_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hung(link: AgentLink, attempt: int) -> None:
        link.send(report=HANGS)
        link.send(verdict={"text": "watchdog: rank 1 does not wait for others", "alone": False})
        os._exit(HUNG)

    status, alerts = alerts_of(monkeypatch, tmp_path, hung)
    assert status == HUNG
    assert shown(alerts) == [("stall", 1, 12, HUNG)]
    assert "watchdog: rank 1 does not wait for others" in alerts[0]["message"]


@pytest.mark.parametrize("then", [DONE, FAILED])
def test_a_hang_that_is_followed_by_a_restart_is_said_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: int
) -> None:
    def hangs_first(link: AgentLink, attempt: int) -> None:
        if attempt == 0:
            link.send(report=HANGS)
            os._exit(HUNG)
        os._exit(then)

    status, (stall, *others) = alerts_of(monkeypatch, tmp_path, hangs_first, max_restarts=1, ends_at=1)
    assert status == then
    assert shown([stall]) == [("stall", 1, 12, None)]
    assert "the ranks were started again" in stall["message"]
    assert shown(others) == ([] if then == DONE else [("abort", 1, None, FAILED)])


def test_a_crash_that_a_restart_heals_is_none_and_one_that_stays_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(link: AgentLink, attempt: int) -> None:
        link.send(report={"state": "failed", "step": 5, "phase": "train", "fault": "ValueError: boom"})
        os._exit(FAILED)

    status, alerts = alerts_of(monkeypatch, tmp_path, fails, max_restarts=8)
    assert status == ABORTED
    assert shown(alerts) == [("abort", 1, 5, ABORTED)]
    assert "ValueError: boom: the same error 3 times without a new checkpoint" in alerts[0]["message"]


def test_what_a_rank_sends_is_passed_on_also_if_it_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spikes(link: AgentLink, attempt: int) -> None:
        link.send(alert=vars(Alert("spike", "loss 9.1 at https://me:pw@host/x", 0, 7)))
        os._exit(ABORTED)

    status, alerts = alerts_of(monkeypatch, tmp_path, spikes)
    assert status == ABORTED
    assert shown(alerts) == [("spike", 0, 7, None), ("abort", 1, None, ABORTED)]
    assert alerts[0]["message"] == "loss 9.1 at https://host/x"


def test_of_several_agents_the_first_alerts_or_that_of_a_verdict_without_it() -> None:
    def sent(node: int, *, alone: bool) -> int:
        """Return how many alerts the agent of this node sends of one failure."""
        alerts: list[Alert] = []
        agents: Any = RunAlerts(AgentOptions(nodes=2, node_rank=node, rendezvous="h:1"))
        agents._sender.send = alerts.append
        agents.begin(node)
        agents.verdict = {"text": "rank 0 was lost", "alone": alone}
        agents.ended(FAILED, "", [Failure(4, "host", FAILED)])
        return len(alerts)

    assert [sent(0, alone=False), sent(1, alone=False), sent(1, alone=True)] == [1, 0, 1]


def test_ending_processes_leaves_a_delivery_with_all_that_it_starts_alone() -> None:
    script = (
        "import os, subprocess, time, psutil\n"
        "from megatron.launch.agents.ownership import end_processes\n"
        "kept = subprocess.Popen(['sh', '-c', 'sleep 60 & wait'], start_new_session=True)\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        "while not psutil.Process(kept.pid).children(): time.sleep(0.01)\n"
        "left = end_processes(os.getpid(), (), {kept.pid})\n"
        "print(left, kept.poll(), len(psutil.Process(kept.pid).children()), other.wait())\n"
        "end_processes(os.getpid())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.stdout.strip() == "[] None 1 -9", run.stderr


def test_a_clean_end_is_no_event() -> None:
    alerts: list[Alert] = []
    agents: Any = RunAlerts(AgentOptions())
    agents._sender.send = alerts.append
    agents.ended(DONE, "")
    agents.restarted([Failure(1, "host", FAILED)])
    agents.restarted([])
    assert alerts == []


def test_a_training_under_the_launcher_alerts_of_its_end(tmp_path: Path) -> None:
    """Steps that are not finite are bad steps, of which the run ends; and it names both, by its own name."""
    data = runs.write_dataset(tmp_path / "text")
    (tmp_path / "record.sh").write_text(f"cat >> {tmp_path}/got.jsonl\n")
    flags = (
        f"{runs.TINY} --data-path {data} --train-iters 9 --lr 1e30 --min-lr 0 --clip-grad 0 --max-skipped-in-a-row 3 "
        f"--log-interval 1 --results-dir {tmp_path / 'run7'} --save {tmp_path / 's'}"
    ).split()
    command = [sys.executable, "tools/launch.py", "--device", "cpu", "--devices-per-node", "1", "--", *flags]
    done = subprocess.run(
        [*command, "--alert-command", f"sh {tmp_path}/record.sh"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == ABORTED, done.stderr
    first, last = [json.loads(line) for line in (tmp_path / "got.jsonl").read_text().splitlines()]
    assert (first["event"], first["run"], last["event"], last["run"]) == ("spike", "run7", "abort", "run7")
    assert "is not finite" in first["message"]
    assert last["status"] == ABORTED
    assert "3 steps in a row were skipped" in last["message"]
