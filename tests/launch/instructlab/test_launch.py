"""The agent as a child process: its command line, its exit status, signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.api import TorchrunArgs
from megatron.launch.instructlab.launch import agent_command, meaning, run_to_the_end
from tests.ranks import HANG_S


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ({}, "--node-rank 0 --run-id 0"),
        (
            {"nnodes": 2, "node_rank": 1, "rdzv_id": "one", "rdzv_endpoint": "node0:12345"},
            "--nodes 2 --node-rank 1 --rendezvous node0:12345 --run-id one",
        ),
        (
            {"nnodes": 2, "master_addr": "node0", "master_port": 1234},
            "--nodes 2 --node-rank 0 --rendezvous node0:1234 --run-id 0",
        ),
        (
            {"nnodes": 2, "master_addr": "node0"},
            "--nodes 2 --node-rank 0 --rendezvous node0:29500 --run-id 0",
        ),
    ],
)
def test_the_agent_knows_its_node_and_the_first_one(given: dict[str, Any], nodes: str) -> None:
    command = agent_command(TorchrunArgs(**given), 4, ["--config", "file.yaml"])
    assert command[2:] == [
        *("-m", "megatron.launch.agents.agent", *nodes.split(), "--ranks-per-node", "4"),
        *("--", "--config", "file.yaml"),
    ]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "another attempt may succeed"),
        (2, "refused"),
        (3, "aborted"),
        (4, "hung"),
        (137, "SIGKILL ended it"),
        (99, "not a status of this project"),
    ],
)
def test_a_status_is_reported_with_its_meaning(status: int, said: str, tmp_path: Path) -> None:
    assert said in meaning(status)
    command = [sys.executable, "-c", f"import sys; print('last words'); sys.exit({status})"]
    with pytest.raises(RuntimeError, match=f"status {status}"):
        run_to_the_end(command, os.environ, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "last words\n"


RANK = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1], "received").write_text(str(int(number)))
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""
AGENT = """
import sys
from megatron.launch.agents import agent, node_ranks as rank
rank.run_main = lambda main, flags: exec(open(sys.argv[1] + "/rank.py").read(), {})
sys.exit(agent.run_agent(agent.AgentOptions(ranks_per_node=1), [], "fork"))
"""
CALLER = """
import os, sys
from pathlib import Path
from megatron.launch.instructlab.launch import run_to_the_end
try:
    run_to_the_end(sys.argv[2:], os.environ, Path(sys.argv[1], "log"))
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(7)
print("went on")
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_reaches_the_ranks_first_and_then_takes_its_course(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path), *command], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + HANG_S
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        caller.send_signal(number)
        said, _ = caller.communicate(timeout=HANG_S)
    finally:
        caller.kill()
    assert (tmp_path / "received").read_text() == str(int(number))
    assert caller.returncode == status
    assert "went on" not in said
