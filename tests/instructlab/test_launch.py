"""How torchrun is started, what it is told, and how it ends."""

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
from megatron.instructlab.launch import meaning, run_to_the_end, torchrun_command


@pytest.mark.parametrize(
    ("given", "meeting"),
    [
        ({}, ["--nnodes=1", "--node-rank=0", "--rdzv-id=0", "--standalone"]),
        (
            {"nnodes": 2, "node_rank": 1, "rdzv_id": "run", "rdzv_endpoint": "node0:12345"},
            ["--nnodes=2", "--node-rank=1", "--rdzv-id=run", "--rdzv-endpoint=node0:12345"],
        ),
        (
            {"nnodes": 2, "master_addr": "node0", "master_port": 1234},
            ["--nnodes=2", "--node-rank=0", "--rdzv-id=0", "--master-addr=node0", "--master-port=1234"],
        ),
        (
            {"nnodes": 2, "master_addr": "node0"},
            ["--nnodes=2", "--node-rank=0", "--rdzv-id=0", "--master-addr=node0", "--master-port=29500"],
        ),
    ],
)
def test_torchrun_is_told_where_the_nodes_meet(given: dict[str, Any], meeting: list[str]) -> None:
    command = torchrun_command(TorchrunArgs(**given), 4, ["--config", "file.yaml"])
    assert command[2:] == [
        *("-m", "megatron.instructlab.torchrun", "--nproc-per-node=4", *meeting),
        *("-m", "megatron.train", "--config", "file.yaml"),
    ]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "another try may succeed"),
        (2, "refused"),
        (3, "aborted"),
        (4, "hung"),
        (137, "SIGKILL ended it"),
        (99, "no"),
    ],
)
def test_a_status_is_told_by_its_meaning(status: int, said: str, tmp_path: Path) -> None:
    assert said in meaning(status)
    command = [sys.executable, "-c", f"import sys; print('last words'); sys.exit({status})"]
    with pytest.raises(RuntimeError, match=f"status {status}"):
        run_to_the_end(command, os.environ, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "last words\n"


def test_torchrun_ends_with_the_status_of_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    flags = ["--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    command = [sys.executable, "-m", "megatron.instructlab.torchrun", *flags]
    assert subprocess.run(command, capture_output=True).returncode == 3


RANK = """
import pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1], "told").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""
TORCHRUN = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], start_new_session=True).returncode)
"""
CALLER = """
import os, sys
from pathlib import Path
from megatron.instructlab.launch import run_to_the_end
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
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    command = [sys.executable, "-c", TORCHRUN, str(rank), str(tmp_path)]
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path), *command], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 30
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        caller.send_signal(number)
        said, _ = caller.communicate(timeout=20)
    finally:
        caller.kill()
    assert (tmp_path / "told").read_text() == str(int(number))
    assert caller.returncode == status
    assert "went on" not in said
