"""The agent: restarts, signals, ranks that fail or outstay, nodes that are lost, schedulers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from benchmarks import chaos
from megatron.cli import launch
from megatron.launch.agents import agent, hosts, node_ranks, rendezvous, restart_policy
from megatron.launch.agents.agent import AgentOptions
from megatron.launch.agents.restart_policy import Failure
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.runtime import network
from megatron.runtime.agent_link import AgentLink
from megatron.runtime.commands import ABORTED, FAILED, HUNG, REFUSED
from megatron.runtime.messages import SECRET
from tests import runs
from tests.ranks import HANG_S, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SHELLCHECK = shutil.which("shellcheck") or shutil.which(str(Path(sys.executable).parent / "shellcheck"))


# ---------------------------------------------------------------------------------------------------------------------
# Beforehand


def tiny(*flags: str, **settings: Any) -> LaunchRequest:
    common = ["--config", "tiny_bloom", "--data-path", "d", "--micro-batch-size", "1"]
    request = LaunchRequest(device="cpu", dry_run=True, train_flags=[*common, *flags])
    for name, value in settings.items():
        setattr(request, name, value)
    return request


def faults(request: LaunchRequest) -> list[str]:
    with pytest.raises(RefusedError) as refused:
        preflight(request)
    return refused.value.faults


MEETING: dict[str, Any] = {"rendezvous": "node0:29500", "devices_per_node": 2}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (tiny(max_restarts=3), "a restart resumes the newest checkpoint, but none are saved"),
        (tiny("--save", "s", max_restarts=1, nodes=2, min_nodes=3, **MEETING), "more than the 2 nodes"),
        (tiny("--save", "s", nodes=2, min_nodes=1, **MEETING), "continuing with fewer nodes is a restart"),
        (tiny("--save", "s", "--peer-copy-interval", "9"), "peer_copy_interval=9: a restart alone reads copies; set"),
        (tiny("--save", "s", "--keep-healthy-ranks"), "keep_healthy_ranks: ranks stay for a restart alone; set HL_MAX"),
        (tiny(rendezvous="node0"), "rendezvous=node0: it is not HOST:PORT"),
        (tiny("--save", "s", max_restarts=1, nodes=2, spare_hosts=1, **MEETING), "spare_hosts=1 are the last hosts of"),
        (tiny(results_parent="out", rendezvous="node0:1"), "would name the results folder after its own clock"),
        (
            # 16 samples on DP 4, 3 and 2: the batch does not divide by 3
            tiny(
                *("--save", "s", "--micro-batch-size", "1"),
                max_restarts=1,
                nodes=4,
                min_nodes=2,
                rendezvous="a:1",
                devices_per_node=1,
            ),
            "with 3 of 4 nodes the run could not continue",
        ),
        (
            tiny(
                *("--save", "s", "--tensor-model-parallel-size", "4"),
                **{"max_restarts": 1, "nodes": 2, "min_nodes": 1, **MEETING},
            ),
            "with 1 of 2 nodes the run could not continue",
        ),
    ],
)
def test_what_could_not_be_restarted_is_refused(request_: LaunchRequest, said: str) -> None:
    (fault,) = faults(request_)
    assert said in fault


def test_every_number_of_nodes_that_fits_is_accepted() -> None:
    request = tiny("--save", "s", max_restarts=1, nodes=4, min_nodes=1, rendezvous="a:1")
    request.devices_per_node = 1
    request.train_flags += ["--global-batch-size", "24"]
    plan = preflight(request)
    assert (plan.nodes, plan.min_nodes) == (4, 1)
    assert "restarts: 1 at most, from the newest checkpoint, with 1 of the 4 nodes if need be" in launch.plan_text(
        plan, ""
    )


def test_spare_hosts_are_the_lines_after_those_of_the_run(tmp_path: Path) -> None:
    listed = tmp_path / "hosts"
    listed.write_text("w0 slots=2\nw1 slots=2\nw2 slots=2\nw3 slots=2\n")
    options: dict[str, Any] = {"hostsfile": str(listed), "devices_per_node": 2, "nodes": 2, "spare_hosts": 1}
    plan = preflight(tiny("--save", "s", max_restarts=2, dry_run=True, **options))
    assert [host.name for host in plan.hosts] == ["w0", "w1", "w2"]
    assert flag_value(hosts.remote_command(plan), "--num_nodes") == "3"
    assert hosts.agent_options(plan).nodes == 2
    text = launch.plan_text(plan, "")
    assert "  hosts: w0, w1\n  spare hosts: w2\n" in text
    assert "--spare-hosts 1" in text
    assert not [line for line in plan.warnings if "spare_hosts" in line]
    warnings = preflight(tiny("--save", "s", **{**options, "max_restarts": 1})).warnings
    assert any("but not of one that fails, which needs two restarts; set HL_MAX_RESTARTS" in line for line in warnings)
    for wrong, said in [
        ({"max_restarts": 0}, "to take a host's place is a restart; set HL_MAX_RESTARTS"),
        ({"nodes": 1}, "the first host cannot be replaced, and the run has no other"),
        ({"spare_hosts": 3}, "lists 4 hosts for 2 nodes and 3 spare; add hosts, or set HL_SPARE_HOSTS"),
    ]:
        (fault,) = faults(tiny("--save", "s", **{"max_restarts": 2, "dry_run": True, **options, **wrong}))
        assert said in fault


@pytest.mark.parametrize(
    ("returncode", "state", "is_own"),
    [
        (-9, None, True),
        (-11, "lost", True),
        (-6, "lost", False),
        (-6, "failed", True),
        (1, "failed", True),
        (1, "lost", False),
    ],
)
def test_a_rank_that_only_lost_another_counts_for_no_spare_host(
    returncode: int, state: str | None, is_own: bool
) -> None:
    assert Failure.of(0, "node0", returncode, 0, {"state": state} if state else {}).is_own is is_own


def test_a_hostsfile_and_a_rendezvous_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=2\n")
    request = tiny(nodes=2, hostsfile=str(tmp_path / "hosts"), **MEETING)
    assert any("exclude each other" in fault for fault in faults(request))


def test_the_variables_of_a_restart_are_read() -> None:
    variables = {"HL_MAX_RESTARTS": "7", "HL_MIN_NODES": "2", "HL_NUM_NODES": "4", "HL_RENDEZVOUS": "node0:29500"}
    assert from_environment({"HL_SPARE_HOSTS": "2"}, "bloom13b", []).spare_hosts == 2
    request = from_environment(variables, "bloom13b", [])
    assert not request.faults
    assert (request.max_restarts, request.min_nodes, request.rendezvous) == (7, 2, "node0:29500")
    assert from_environment({"HL_MAX_RESTARTS": "0"}, "bloom13b", []).max_restarts == 0
    assert (
        "HL_MAX_RESTARTS='-1' must be a whole number, 0 or more"
        in from_environment({"HL_MAX_RESTARTS": "-1"}, "bloom13b", []).faults
    )


def test_each_host_gets_one_agent_that_sees_all_devices(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    request = tiny("--save", "s", nodes=2, min_nodes=1, max_restarts=3, hostsfile=str(tmp_path / "hosts"))
    request.devices_per_node = 2
    plan = preflight(request)
    command = hosts.remote_command(plan)
    assert command[command.index("--num_gpus") + 1] == "1"
    env = command[command.index("/usr/bin/env") :]
    assert env[1:3] == ["-u", "CUDA_VISIBLE_DEVICES"]
    assert "HABANA_VISIBLE_MODULES" not in env  # the user's own, if any, on that host
    words = env[env.index(sys.executable) :]
    assert words[1] == "-X"  # by which the agents of the run are found on their hosts
    place = words.index("megatron.launch.agents.agent") + 1
    assert flag_value(words, "--node-rank") == "%n"  # pdsh writes the number of the host
    options, flags = agent.parse([word.replace("%n", "1") for word in words[place:]])
    assert flags == list(plan.train_flags)
    assert options == AgentOptions(
        ranks_per_node=2,
        nodes=2,
        min_nodes=1,
        node_rank=1,
        rendezvous="10.0.0.1:29500",
        run_id=plan.run_id,
        max_restarts=3,
        ends_with_connection=True,
        secret_file=f".megatron-{plan.run_id}.1",
    )


def flag_value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_what_a_killed_run_left_does_not_bar_the_next_try(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".global_step5.partial-abc").mkdir()
    plan = preflight(tiny("--save", str(tmp_path), "--load", str(tmp_path), max_restarts=1, devices_per_node=2))
    assert plan.max_restarts == 1


def test_all_nodes_of_a_rendezvous_give_the_run_one_name() -> None:
    def run_id(*flags: str) -> str:
        return preflight(tiny(*flags, nodes=2, **MEETING)).run_id

    assert run_id("--seed", "1") == run_id("--seed", "1") != run_id("--seed", "2")


# ---------------------------------------------------------------------------------------------------------------------
# One node. The ranks are forks of this process that do as the test says; tests/training/test_chaos.py has real ones


Train = Callable[[Any], None]


def run(
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
    max_restarts: int = 0,
    ranks_per_node: int = 2,
    grace_s: float = 60.0,
) -> int:
    """Run an agent whose ranks call `train` with their flags, each in its environment."""
    monkeypatch.setattr(agent, "FAILED_GRACE_S", grace_s)
    monkeypatch.setattr(node_ranks, "run_main", lambda main, flags: train(flags))
    return agent.run_agent(AgentOptions(ranks_per_node=ranks_per_node, max_restarts=max_restarts), [], "fork")


def exit_with(*statuses: int) -> Train:
    """Ranks that end with these, attempt by attempt; the last again and again. Below 0: killed by that signal."""

    def train(flags: Any) -> None:
        status = statuses[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(statuses) - 1)]
        if os.environ["RANK"] == "0":
            time.sleep(600)  # as in a collective; only the other one ends by itself
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    return train


@pytest.mark.parametrize(
    ("statuses", "max_restarts", "status", "restarts"),
    [
        pytest.param([FAILED], 0, FAILED, 0, marks=pytest.mark.slow),
        ([FAILED], 2, FAILED, 2),
        ([17], 0, 17, 0),
        ([HUNG, FAILED], 1, FAILED, 1),
        pytest.param([-signal.SIGKILL], 0, 128 + signal.SIGKILL, 0, marks=pytest.mark.slow),
        ([-signal.SIGKILL], 1, 128 + signal.SIGKILL, 1),
        ([REFUSED], 3, REFUSED, 0),
        ([FAILED, ABORTED], 3, ABORTED, 1),
    ],
)
def test_only_failures_that_may_pass_are_restarted(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    statuses: list[int],
    max_restarts: int,
    status: int,
    restarts: int,
) -> None:
    assert run(monkeypatch, exit_with(*statuses), max_restarts, grace_s=0.5) == status
    shown = capfd.readouterr().err
    assert shown.count("; restart ") == restarts
    assert "rank 1 on " in shown
    if restarts:
        assert f"restart 1 of {max_restarts}\n" in shown
    if restarts == max_restarts > 0:
        assert f"; all {max_restarts} restarts are used up without a new checkpoint\n" in shown
    # the policy of restarts decides once they have ended
    assert shown.count("; ending the ranks that still run") == (restarts < max_restarts or max_restarts == 0)
    assert "Traceback" not in shown


def test_a_restart_says_the_error_that_a_rank_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(flags: Any) -> None:
        error = {"state": "failed", "step": 41, "phase": "train", "fault": "ValueError: boom"}
        agent_of_this_rank = AgentLink()
        agent_of_this_rank.send(report=error | {"step": 40, "fault": ""})
        agent_of_this_rank.send(report=error)
        if os.environ["RANK"] == "1":
            os._exit(FAILED)
        time.sleep(600)

    assert run(monkeypatch, train, max_restarts=1, grace_s=0.5) == FAILED
    assert "ended with status 1 in step 41, train: ValueError: boom; restart 1 of 1\n" in capfd.readouterr().err


def reporting(attempts: list[dict[str, Any]], then: int = FAILED) -> Train:
    """Ranks of which the second one sends its agent these messages, in its n-th attempt the n-th, then ends."""

    def train(flags: Any) -> None:
        if os.environ["RANK"] == "0":
            time.sleep(600)
        to_agent = AgentLink()
        for name, value in attempts[int(os.environ["TORCHELASTIC_RESTART_COUNT"])].items():
            to_agent.send(**{name: value})
        if then < 0:
            os.kill(os.getpid(), -then)
        os._exit(then)

    return train


def boom(step: int, fault: str = "ValueError: boom", **more: Any) -> dict[str, Any]:
    return {"report": {"state": "failed", "step": step, "phase": "train", "fault": fault, **more}}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.05)


@pytest.mark.usefixtures("_soon")
def test_a_crash_loop_ends_the_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    attempts = [boom(41, f"ValueError: boom at 0x{n}") for n in range(9)]
    assert run(monkeypatch, reporting(attempts), max_restarts=8, grace_s=0.1) == ABORTED
    shown = capfd.readouterr().err
    assert shown.count("; restart ") == 2
    assert " ended with status 1 in step 41, train: ValueError: boom at 0x2: the same error 3 times" in shown


@pytest.mark.usefixtures("_soon")
def test_a_crash_loop_of_kills_is_known_by_the_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts = [{"report": {"state": "running", "step": 30 + n, "phase": "train"}, "step": 41} for n in range(9)]
    assert run(monkeypatch, reporting(attempts, -signal.SIGKILL), max_restarts=8) == ABORTED
    assert " was killed by SIGKILL in step 41, train: the same error 3 times" in capfd.readouterr().err
    elsewhere = [{"step": step} for step in (41, 42, 43, 44)]
    assert run(monkeypatch, reporting(elsewhere, -signal.SIGKILL), max_restarts=3) == 128 + signal.SIGKILL
    assert "all 3 restarts are used up without a new checkpoint" in capfd.readouterr().err


@pytest.mark.usefixtures("_soon")
def test_restarts_count_from_the_last_new_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts = [boom(41), boom(41), {"saved": 60, **boom(61)}, boom(61), {"saved": 60, **boom(65)}]
    assert run(monkeypatch, reporting(attempts), max_restarts=2, grace_s=0.1) == FAILED
    # a loaded machine may also name a process that outlives its SIGKILL by a second
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    said = [line.partition("; ")[2] for line in lines]
    assert said[0] == "restart 1 of 2"
    assert said[1].startswith("restart 2 of 2, in 0.0 s")
    assert said[2] == "restart 1 of 2 since the checkpoint of iteration 60"
    assert said[3].startswith("restart 2 of 2 since the checkpoint of iteration 60, in 0.")
    assert said[4] == "all 2 restarts are used up without a new checkpoint"


def test_a_signal_ends_the_wait_for_a_restart_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    def request_stop() -> None:
        assert waits.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(restart_policy, "LONGEST_DELAY_S", 600.0)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    requesting = threading.Thread(target=request_stop)
    requesting.start()
    assert run(monkeypatch, exit_with(FAILED), max_restarts=5, grace_s=0.1) == 0
    requesting.join()
    shown = capfd.readouterr().err
    assert "; restart 2 of 5, in " in shown
    assert shown.endswith("; SIGTERM: the run stops here, with the checkpoints that it has saved\n")


def test_ranks_that_are_done_end_the_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, lambda flags: os._exit(0), max_restarts=1) == 0
    assert capfd.readouterr().err == ""


def test_a_rank_that_reported_its_fault_is_not_reported_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, lambda flags: os._exit(FAILED)) == FAILED
    assert capfd.readouterr().err == ""


def test_a_killed_rank_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, lambda flags: os.kill(os.getpid(), signal.SIGKILL), ranks_per_node=1) == 128 + 9
    assert capfd.readouterr().err.endswith(" was killed by SIGKILL\n")


def test_ranks_know_their_place(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()

    def train(flags: Any) -> None:
        os.write(1, (" ".join(os.environ[name] for name in names) + "\n").encode())
        os._exit(0)

    assert run(monkeypatch, train) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]


def test_rank_zero_inherits_the_socket_that_holds_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(flags: Any) -> None:
        if os.environ["RANK"] != "0":
            # it listens before rank 0 does
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
                os._exit(network.STORE_SOCKET in os.environ)
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.socket() as other, contextlib.suppress(OSError):
            other.bind(place)
            os._exit(FAILED)
        with network.store_socket(*place) as store:
            store.accept()
            os._exit(store.getsockname() != place)

    assert run(monkeypatch, train) == 0


@pytest.mark.parametrize("heeds", [True, False])
def test_a_signal_reaches_the_ranks_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, heeds: bool
) -> None:
    def train(flags: Any) -> None:
        def stop(number: int, frame: object) -> None:
            time.sleep(0.5)  # as a checkpoint takes
            os._exit(0)

        signal.signal(signal.SIGTERM, stop if heeds else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, agent.SIGNALS)
        (tmp_path / os.environ["RANK"]).touch()
        time.sleep(600)

    def request_stop() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    requesting = threading.Thread(target=request_stop)
    requesting.start()
    # a rank that the signal killed had nothing to save; it is not started again
    assert run(monkeypatch, train, max_restarts=5) == (0 if heeds else 128 + signal.SIGTERM)
    requesting.join()
    shown = capfd.readouterr().err
    assert shown.startswith("SIGTERM: the ranks stop after this step and save")
    assert "restart" not in shown


def test_a_signal_between_two_attempts_is_a_clean_stop(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = agent.Agent._note_failures

    def note_failures(self: agent.Agent, first: Failure) -> None:
        original(self, first)
        if not self._received:
            self._received.append(signal.SIGTERM)

    monkeypatch.setattr(agent.Agent, "_note_failures", note_failures)
    assert run(monkeypatch, exit_with(FAILED), max_restarts=5, grace_s=0.5) == 0
    shown = capfd.readouterr().err
    assert "SIGTERM: the run stops here, with the checkpoints that it has saved\n" in shown
    assert "; restart " not in shown


def test_a_signal_that_waits_while_a_rank_starts_is_a_clean_stop() -> None:
    """It came with the restart: the rank must handle it before it unblocks it."""
    code = (
        "import os, signal, sys, types\n"
        "from megatron.launch.agents import node_ranks as rank\n"
        "from megatron.resilience.shutdown import SIGNALS, Signals\n"
        "def process():\n"
        "    with Signals() as signals:\n"
        "        print('noted', signals.first, flush=True)\n"
        "sys.modules['megatron.train'] = types.SimpleNamespace(process=process)\n"
        "rank.importlib.import_module = sys.modules.__getitem__\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "rank.run_main('megatron.train', [])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stdout) == (0, "noted 15\n"), ended.stderr


def test_a_stopped_rank_is_gone_within_5_s_of_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a clock of its own, which a busy machine does not disturb
    now_s, waited_s = time.monotonic(), 0.0
    real_wait = node_ranks.wait

    def wait(sentinels: Any, timeout: float) -> Any:
        nonlocal waited_s
        if ended := real_wait(sentinels, 0.002):
            return ended
        waited_s += timeout
        return []

    def train(flags: Any) -> None:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(node_ranks, "wait", wait)
    clock = SimpleNamespace(monotonic=lambda: now_s + waited_s)
    monkeypatch.setattr(agent, "time", clock)
    monkeypatch.setattr(node_ranks, "time", clock)
    monkeypatch.setattr(node_ranks, "run_main", lambda main, flags: train(flags))
    failed_s: list[float] = []
    original = agent.Agent._end_after

    def end_after(self: agent.Agent, failure: Failure) -> int:
        failed_s.append(waited_s)
        return original(self, failure)

    monkeypatch.setattr(agent.Agent, "_end_after", end_after)
    assert agent.run_agent(AgentOptions(ranks_per_node=2), [], "fork") == 128 + signal.SIGKILL
    assert 0 < waited_s - failed_s[0] < 4.5, "and half a second for the kernel"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--config tiny_bloom", False),
        ("--pipeline-model-parallel-size 1 --seed 2", False),
        ("--pipeline-model-parallel-size 2", True),
        ("--pipeline-model-parallel-size=4 --seed 1", True),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-size 1", False),
    ],
)
def test_a_pipeline_is_found_in_the_flags(flags: str, expected: bool) -> None:
    assert agent.has_pipeline(flags.split()) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--config tiny_bloom", False),
        ("--config tiny_bloom --results-dir results", True),
        ("--tensorboard-dir=events", True),
        ("--data-path results-dir", False),
    ],
)
def test_the_events_of_tensorboard_are_found_in_the_flags(flags: str, expected: bool) -> None:
    assert agent.writes_events(flags.split()) is expected


def test_one_node_needs_no_torch_and_its_agent_listens_nowhere() -> None:
    # rank 0 alone has a listener: that of the store, which no other machine reaches
    code = (
        "import os, sys, psutil\n"
        "from megatron.launch.agents import agent, node_ranks as rank\n"
        "rank.run_main = lambda main, flags: os._exit(0)\n"
        "listening = []\n"
        "watch = agent.Agent._watch\n"
        "def note(self):\n"
        "    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:\n"
        "        found = [c.laddr for c in process.net_connections('inet') if c.status == 'LISTEN']\n"
        "        is_agent = process.pid == os.getpid()\n"
        "        store = ('127.0.0.1', self._membership.master_port)\n"
        "        listening.extend(each for each in found if is_agent or each != store)\n"
        "    return watch(self)\n"
        "agent.Agent._watch = note\n"
        "assert agent.run_agent(agent.AgentOptions(ranks_per_node=2, max_restarts=3), [], 'fork') == 0\n"
        "print(listening, {'torch', 'numpy', 'deepspeed'} & set(sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert ran.stdout == "[] set()\n", ran.stderr


def test_several_nodes_without_a_secret_in_common_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = f"{SECRET} has 5 characters; give all nodes of the run the same 16 characters or more"
    monkeypatch.setenv(SECRET, "short")
    assert any(fault.startswith(said) for fault in faults(tiny(nodes=2, **{**MEETING, "dry_run": False})))
    two = AgentOptions(nodes=2, rendezvous=f"127.0.0.1:{free_port()}")
    assert agent.run_agent(two, [], "fork") == REFUSED
    assert capfd.readouterr().err.startswith(said)


def test_an_agent_that_waits_for_others_ends_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of the nodes of a test")
    port = free_port()
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    alone = AgentOptions(nodes=2, min_nodes=2, rendezvous=f"127.0.0.1:{port}")
    assert agent.run_agent(alone, [], "fork") == 128 + signal.SIGTERM
    timer.join()


WAITING_NODE = """
import os, sys, time, types
from megatron.launch.agents import agent, node_ranks as rank, restart_policy
sys.modules["megatron.launch.preload"] = types.ModuleType("preload")  # the ranks need no torch
restart_policy.FIRST_DELAY_S = restart_policy.LONGEST_DELAY_S = 600.0
rank.run_main = lambda main, flags: os._exit(1) if os.environ["RANK"] == "1" else time.sleep(600)
options = agent.AgentOptions(nodes=2, node_rank=int(sys.argv[1]), rendezvous=sys.argv[2], max_restarts=5)
sys.exit(agent.run_agent(options, [], "fork"))
"""


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_that_waits_for_a_restart_stops_cleanly_with_the_others(stopped: int, tmp_path: Path) -> None:
    endpoint, output = f"127.0.0.1:{free_port()}", tmp_path / "said"
    with output.open("wb") as file:
        nodes = [
            subprocess.Popen(
                [sys.executable, "-c", WAITING_NODE, str(number), endpoint],
                stderr=file,
                cwd=ROOT,
                env=os.environ | {SECRET: "of the nodes of a test"},
            )
            for number in range(2)
        ]
    try:
        wait_for(lambda: "; restart 2 of 5, in " in output.read_text(), output.read_text)
        nodes[stopped].send_signal(signal.SIGTERM)
        assert [node.wait(timeout=HANG_S) for node in nodes] == [0, 0], output.read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert "SIGTERM: the run stops here, with the checkpoints that it has saved" in output.read_text()


AGENT = """
import os, sys
from multiprocessing import forkserver
from megatron.launch.agents import agent, ownership, node_ranks as rank
code = sys.argv[1]
rank.run_main = lambda main, flags: exec(code, {})
def run():
    forkserver.ensure_running()  # has a socket in a temporary folder
    os.write(1, f"pids {os.getpid()}\\n".encode())
    return agent.run_agent(agent.AgentOptions(ranks_per_node=2), [], "fork")
sys.exit(ownership.owned(run, [1]))
"""

# prints its process id and that of a child, then waits; a signal ends it with status 0 after a moment
RANK = """
import os, signal, subprocess, sys, time
def stop(number, frame):
    time.sleep(0.3)
    os.write(1, f"stopped {os.environ['RANK']} {number}\\n".encode())  # in one piece: two ranks share the pipe
    os._exit(0)
numbers = [getattr(signal, "SIG" + name) for name in "TERM INT USR1 USR2 HUP XCPU".split()]
for number in numbers:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, f"pids {os.getpid()} {child.pid}\\n".encode())
time.sleep(600)
"""


def started(
    preexec_fn: Callable[[], object] | None = None, **variables: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start an agent with two ranks; return its owner, and the ids of the agent, the ranks and their children."""
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, RANK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
        preexec_fn=preexec_fn,
    )
    assert process.stdout is not None
    pids = [int(pid) for _ in range(3) for pid in process.stdout.readline().split()[1:]]
    return process, pids


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while any(map(running, pids)):
        assert time.monotonic() < deadline_s, f"still running: {[pid for pid in pids if running(pid)]}"
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        "SIGINT",
        *(pytest.param(f"SIG{name}", marks=pytest.mark.slow) for name in "USR1 USR2 HUP XCPU".split()),
    ],
)
def test_a_signal_reaches_every_rank_once_and_leaves_no_orphan(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    number = getattr(signal, name)
    process, pids = started()
    assert sorted(chaos.session_leaders(process.pid)) == sorted(pids[1:]), "the agent is not a rank"
    process.send_signal(number)
    shown, _ = process.communicate(timeout=HANG_S)
    assert sorted(shown.splitlines()) == [f"stopped 0 {number}", f"stopped 1 {number}"]
    assert process.returncode == 0
    assert capfd.readouterr().err.startswith(f"{name}: the ranks stop after this step and save")
    wait_until_gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("what", ["owner", "agent", "rank", "SIGQUIT", "reader of its output"])
def test_whatever_ends_an_agent_nothing_of_it_remains(what: str) -> None:
    """Children of ranks in sessions of their own included, and temporary files."""
    with tempfile.TemporaryDirectory() as folder:  # of pytest's the path is too long for a socket
        check_that_nothing_remains(what, Path(folder))


def check_that_nothing_remains(what: str, temporary: Path) -> None:
    # as of what a shell runs in the background
    process, pids = started(lambda: signal.signal(signal.SIGQUIT, signal.SIG_IGN), TMPDIR=str(temporary))
    assert process.stdout is not None
    assert list(temporary.rglob("listener-*"))
    if what == "reader of its output":  # as where a connection of ssh is closed
        process.stdout.close()
    elif what == "SIGQUIT":
        process.send_signal(signal.SIGQUIT)
    else:
        os.kill({"owner": process.pid, "agent": pids[0], "rank": pids[1]}[what], signal.SIGKILL)
    status = process.wait(timeout=HANG_S)
    assert status == {"owner": -9, "SIGQUIT": 128 + 3, "reader of its output": 1}.get(what, 128 + 9)
    wait_until_gone(pids)
    assert list(temporary.iterdir()) == []
    process.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_under_nohup_outlives_its_terminal() -> None:
    process, pids = started(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.6)  # twice what a rank needs to end
    assert all(map(running, pids))
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=HANG_S)
    assert sorted(shown.splitlines()) == ["stopped 0 15", "stopped 1 15"]
    wait_until_gone(pids)


# ---------------------------------------------------------------------------------------------------------------------
# Two nodes: two agents on this machine, with real ranks

NODE = """
import sys
from megatron.launch.agents import agent, rendezvous_server
rendezvous_server.LAST_CALL_S = 2
rendezvous_server.KEEP_ALIVE_S = 60  # a node that the machine keeps waiting is not lost
sys.exit(agent.main(sys.argv[1:]))
"""


def node(number: int, rendezvous: str, flags: list[str], output: Path) -> subprocess.Popen[bytes]:
    own = f"--nodes 2 --min-nodes 1 --ranks-per-node 2 --max-restarts 3 --node-rank {number} --rendezvous".split()
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", NODE, *own, rendezvous, "--", *flags],
            cwd=ROOT,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", SECRET: "of the nodes of a test"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = HANG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks die with their agent on Linux")
def test_a_run_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    data, results = chaos.write_dataset(tmp_path / "data"), tmp_path / "results"
    flags = [*runs.TINY.split(), "--data-path", str(data), "--save", str(tmp_path / "saved"), "--save-interval", "5"]
    flags += ["--tensor-model-parallel-size", "2", "--train-iters", "100000", "--lr-decay-style", "constant"]
    flags += ["--results-dir", str(results), "--eval-iters", "0"]
    rendezvous = f"127.0.0.1:{free_port()}"
    outputs = [tmp_path / name for name in ("first.txt", "second.txt", "third.txt")]
    agents: list[subprocess.Popen[bytes]] = []

    def shown() -> str:
        return "\n".join(output.read_text() for output in outputs if output.exists())

    def start_node() -> None:
        agents.append(node(min(len(agents), 1), rendezvous, flags, outputs[len(agents)]))

    def run_together() -> bool:
        path = results / "run.json"
        return path.exists() and json.loads(path.read_text())["starts"][-1]["world_size"] == 4

    def length() -> int:
        return len(outputs[0].read_text())

    def wait_for_words(after: int, *words: str) -> None:
        """In this order, in what the first node shows beyond the first `after` characters."""

        def are_there() -> bool:
            assert agents[0].poll() is None, shown()
            text, at = outputs[0].read_text(), after
            for word in words:
                at = text.find(word, at) + 1
                if at == 0:
                    return False
            return True

        wait_for(are_there, shown)

    try:
        start_node()
        start_node()
        # on a busy machine the first may begin without the second, which then joins
        wait_for(run_together, shown)
        wait_for_words(length(), "saved", "saved")

        # taken before what is awaited can happen: the nodes may be quicker than this process
        before = length()
        ranks = [psutil.Process(pid) for pid in chaos.session_leaders(agents[1].pid)]
        agents[1].kill()
        agents[1].wait()
        wait_for(
            lambda: not any(node_ranks.is_running() and node_ranks.status() != "zombie" for node_ranks in ranks), shown
        )
        wait_for_words(before, "2 ranks on 1 node from now on, instead of 4", "resumed", "saved")

        before = length()
        start_node()  # one comes back
        wait_for_words(
            before, "the nodes have changed; the ranks save and restart", "4 ranks on 2 nodes", "resumed", "saved"
        )
        for agent in (agents[0], agents[2]):
            agent.send_signal(signal.SIGTERM)
        for agent in (agents[0], agents[2]):
            assert agent.wait(timeout=HANG_S) == 0, shown()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert shown().count("; restart ") == 1, "a node that joins costs no restart"
    assert "Received SIGTERM" in shown()
    steps = chaos.steps_of(results)
    assert [row["iteration"] for row in steps] == list(range(1, len(steps) + 1))
    assert {row["global_batch_size"] for row in steps} == {8}
    assert [row["consumed_samples"] for row in steps] == [8 * row["iteration"] for row in steps]
    assert (tmp_path / "saved" / "latest").read_text().split()[0] == f"global_step{len(steps)}"


# ---------------------------------------------------------------------------------------------------------------------
# Schedulers


def without_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("HL_", "SLURM_"))}


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
def test_the_slurm_script_is_shellcheck_clean() -> None:
    checked = subprocess.run([str(SHELLCHECK), str(ROOT / "scripts" / "slurm.sbatch")], capture_output=True, text=True)
    assert (checked.stdout, checked.returncode) == ("", 0)


def slurm(folder: Path, srun: str, lost: str = "") -> dict[str, str]:
    """An environment with stand-ins for Slurm's programs; `requeued` is written by scontrol, `lost` by sinfo."""
    programs = folder / "bin"
    programs.mkdir()
    scontrol = f'if [[ $1 == requeue ]]; then echo "$2" > {folder}/requeued; else printf "node3\\nnode4\\n"; fi'
    for name, code in {"srun": srun, "scontrol": scontrol, "sinfo": f"echo '{lost}'"}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (programs / name).chmod(0o755)
    return without_variables() | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_ID": "4042",
        "SLURM_JOB_NAME": "mine",
        "SLURM_JOB_NUM_NODES": "2",
    }


def test_the_slurm_script_starts_an_agent_on_each_node(tmp_path: Path) -> None:
    srun = 'while [[ $1 == --* ]]; do shift; done\nexec "$@"'
    variables = {"HL_DRY_RUN": "1", "HL_DEVICE": "hpu", "HL_MIN_NODES": "1", "HL_DP": "4", "HL_MAX_RESTARTS": "5"}
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "scripts/run_bloom13b.sh", "--lr", "2e-4"],
        env=slurm(tmp_path, srun) | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ran.returncode == 0, ran.stderr
    for said in (
        *("2 nodes x 8 hpu devices = 16 ranks", "--nodes 2", "--min-nodes 1", "--max-restarts 5", "--lr 2e-4"),
        *("--rendezvous node3:29542", "--results-dir out/mine", "--save out/mine/checkpoints"),
    ):
        assert said in ran.stdout
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("status", [0, 3])
def test_the_slurm_script_requeues_what_was_stopped_by_the_time_limit(tmp_path: Path, status: int) -> None:
    srun = f"trap 'sleep 0.3; exit {status}' TERM\ntouch {tmp_path}/started\nwhile :; do sleep 0.05; done"
    job = subprocess.Popen(["bash", str(ROOT / "scripts" / "slurm.sbatch")], env=slurm(tmp_path, srun))
    try:
        wait_for((tmp_path / "started").exists, lambda: "no srun", 30)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=HANG_S) == status
    finally:
        job.kill()
        job.wait()
    assert (tmp_path / "requeued").exists() == (status == 0)


@pytest.mark.parametrize(("status", "lost", "requeued"), [(1, "node4", True), (1, "", False), (2, "node4", False)])
def test_the_slurm_script_requeues_what_failed_for_lack_of_a_node(
    tmp_path: Path, status: int, lost: str, requeued: bool
) -> None:
    """Slurm does not, with --no-kill. Without a node that is down a new start would fail as this one did."""
    environment = slurm(tmp_path, f"exit {status}", lost)
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ran.returncode == status
    assert (tmp_path / "requeued").exists() == requeued
    assert ("status 1 with node4 out of service: the job is requeued" in ran.stderr) == requeued


def test_the_pods_of_the_kubernetes_job_are_nodes_of_one_run(tmp_path: Path) -> None:
    text = (ROOT / "scripts" / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    name = job["metadata"]["name"]
    (secret,) = [entry for entry in container["env"] if "valueFrom" in entry]
    assert secret["name"] == SECRET
    # what gives the first pod its name, and the name its address
    assert variables["HL_RENDEZVOUS"].startswith(f"{name}-0.{service['metadata']['name']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["HL_NUM_NODES"])
    failed, drained = job["spec"]["podFailurePolicy"]["rules"]
    assert failed["onExitCodes"]["values"] == [REFUSED, ABORTED]
    assert failed["onExitCodes"]["containerName"] == container["name"]
    # whose schema requires the status up to Kubernetes 1.31
    assert drained["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy allows no other"
    (port,) = container["ports"]
    assert variables["HL_RENDEZVOUS"].endswith(f":{port['containerPort']}")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    folders = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert (folders[variables["HL_DATA_DIR_ROOT"]], folders["/results"]) == (True, False)
    assert variables["HL_RESULTS_DIR"].startswith("/results/")
    (devices,) = container["resources"]["limits"].values()
    assert int(variables["HL_DP"]) * int(variables["HL_TP"]) == devices * int(variables["HL_NUM_NODES"])
    assert f"create secret generic {secret['valueFrom']['secretKeyRef']['name']} --from-literal=run-secret=" in text
    assert secret["valueFrom"]["secretKeyRef"]["key"] == "run-secret"
    (command,) = container["command"]
    ran = subprocess.run(
        [str(ROOT / command)],
        env=without_variables() | variables | {"PYTHON": sys.executable, "HL_DRY_RUN": "1", "HL_DEVICE": "hpu"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"--rendezvous {variables['HL_RENDEZVOUS']}" in ran.stdout
    assert "with 2 of the 4 nodes if need be" in ran.stdout
