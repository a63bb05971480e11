"""Runs that mpirun starts, with a program in its place."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron.launch.agents import agent_command, mpirun
from megatron.launch.agents.agent_command import without_messages
from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.runtime.messages import SECRET, find_secret
from tests import runs
from tests.ranks import HANG_S
from tests.runs import TINY

ROOT = Path(__file__).resolve().parent.parent.parent
# records its command, starts the processes on this machine, and passes on SIGUSR1
FAKE = """#!{python}
import os, pty, signal, subprocess, sys, threading
words = sys.argv[1:]
if words == ["--version"]:
    print("mpirun (Open MPI) 5.0.8"); sys.exit()
open("mpirun.command", "w").write("\\0".join(words))
if "--hostfile" in words:
    name = words[words.index("--hostfile") + 1]
    open("mpirun.hosts", "w").write(name + "\\n" + open(name).read())
place = words.index({python!r})
def copy(source):
    try:
        while text := os.read(source, 65536):
            os.write(1, text)
    except OSError:
        pass
def start(number):  # with a terminal as its output, whatever that of mpirun is
    reader, terminal = pty.openpty()
    environment = os.environ | {{"OMPI_COMM_WORLD_RANK": str(number), "PMIX_RANK": "0"}}
    one = subprocess.Popen(words[place:], env=environment, stdout=terminal)
    os.close(terminal)
    copying.append(threading.Thread(target=copy, args=(reader,)))
    copying[-1].start()
    return one
copying = []
started = [start(number) for number in range(int(words[words.index("-n") + 1]))]
signal.signal(signal.SIGUSR1, lambda *_: [one.send_signal(signal.SIGUSR1) for one in started])
codes = [one.wait() for one in started]
for each in copying:
    each.join()
sys.exit(next((code for code in codes if code), 0))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put_first(tmp_path, FAKE.format(python=sys.executable), monkeypatch)


def put_first(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program named mpirun before all others."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "mpirun"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MPI_ROOT", raising=False)
    return program


def request(tmp_path: Path, hosts: str = "", **options: Any) -> LaunchRequest:
    if hosts:
        (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
        options = {"hostsfile": str(tmp_path / "hosts"), "nodes": len(hosts.split()), "devices_per_node": 1} | options
    if not (tmp_path / "text.idx").exists():
        runs.write_dataset(tmp_path / "text")
    flags = [*TINY.split(), "--train-samples", "16000", "--data-path", str(tmp_path / "text")]
    return LaunchRequest(launcher="mpirun", train_flags=flags, **options)


def faults(given: LaunchRequest) -> list[str]:
    with pytest.raises(RefusedError) as refused:
        preflight(given)
    return refused.value.faults


class Run:
    """A run of the launcher in its own session."""

    def __init__(self, folder: Path, *flags: str, **variables: str):
        runs.write_dataset(folder / "text")
        self.results = folder / "results"
        self._log = folder / "log"
        words = [*flags, "--", *TINY.split(), "--data-path", str(folder / "text"), "--train-samples", "16000"]
        words += ["--results-dir", str(self.results), "--save", str(folder / "saved")]
        self.saved = folder / "saved" / "latest"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "mpirun", "--device", "cpu", *words],
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_iteration(self, iteration: int) -> None:
        path = self.results / "metrics.jsonl"
        wait_until(lambda: path.exists() and f'"iteration":{iteration},' in path.read_text(), self)

    def ranks(self) -> list[psutil.Process]:
        """The processes that compute: those without the command line of the launcher or an agent that have threads."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if "--data-path" not in process.cmdline() and process.num_threads() > 3]

    def status(self) -> int:
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(self.said)


def wait_until(is_so: Callable[[], bool], run: Run) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert run.process.poll() is None, run.said
        assert time.monotonic() < deadline_s, run.said
        time.sleep(0.05)


def of_run(folder: Path) -> list[str]:
    """The processes left of a run in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        ("10.0.0.1 10.0.0.2", {"min_nodes": 1, "max_restarts": 1}, "min_nodes=1: mpirun ends the run on all hosts"),
        ("10.0.0.1 10.0.0.2 10.0.0.3", {"nodes": 2, "spare_hosts": 1, "max_restarts": 1}, "spare_hosts=1: mpirun ends"),
        ("", {"rendezvous": "10.0.0.1:29500"}, "where mpirun has nothing to start"),
        ("10.0.0.1 ssh:fd00::2", {}, "line 2: mpirun takes a name or an IPv4 address, not ssh:fd00::2"),
        ("10.0.0.1 me@10.0.0.2", {}, "mpirun takes a name or an IPv4 address, not me@10.0.0.2; set `User`"),
        ("", {"ranks_per_socket": 4}, "HL_PPR=4 (--ranks-per-socket) places ranks that are bound to cores; set HL_PE"),
        ("", {"cores_per_rank": 10_000}, "HL_PE=10000 (--cores-per-rank) for 1 ranks on each socket needs 10000 cores"),
    ],
)
def test_what_a_run_by_mpirun_cannot_have_is_refused_by_name(
    hosts: str, options: dict[str, Any], said: str, tmp_path: Path, fake: Path
) -> None:
    given = request(tmp_path, hosts, device="cpu", **options)
    given.train_flags += ["--save", str(tmp_path / "saved")]
    assert any(said in fault for fault in faults(given)), faults(given)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'HYDRA build details:'", "is that of MPICH or Intel MPI (Hydra), but the launcher needs Open MPI 4 or"),
        ("echo 'mpirun (Open MPI) 3.1.6'", "is 'mpirun (Open MPI) 3.1.6', but the launcher needs Open MPI 4 or newer"),
        (
            "kill -9 $$",
            "is '', but the launcher needs Open MPI 4 or newer; put its folder first in PATH, or set HL_LAU",
        ),
    ],
)
def test_another_mpirun_is_refused_by_name(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = put_first(tmp_path, f"#!/bin/sh\n{script}\n", monkeypatch)
    (fault,) = faults(request(tmp_path, device="cpu"))
    assert f"{program} {said}" in fault


def test_a_missing_mpirun_is_named_and_a_dry_run_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI_ROOT", str(tmp_path))
    (fault,) = faults(request(tmp_path, device="cpu"))
    assert f"MPI_ROOT={tmp_path} holds no bin/mpirun; install Open MPI 4 or 5 on every host" in fault
    assert preflight(request(tmp_path, device="cpu", dry_run=True)).launcher == "mpirun"


def test_values_and_secrets_are_not_in_the_command(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "a secret that this test knows")
    monkeypatch.setenv("FI_PROVIDER", "a value that this test knows")
    nic = {"HCCL_OVER_OFI": "1"}  # as HL_HNIC sets it
    plan = preflight(request(tmp_path, "10.0.0.1 10.0.0.2", device="cpu", environment=nic))
    command = mpirun.mpirun_command(plan, sorted(plan.environment), "file")
    assert command[0] == str(fake)
    for name in ("FI_PROVIDER", "HCCL_OVER_OFI"):
        assert command[command.index(name) - 1] == "-x"
    assert not [word for word in command if "this test knows" in word or word == SECRET]
    assert ("--allow-run-as-root" in command) == (os.geteuid() == 0)
    assert " -n 2 --map-by ppr:1:node --bind-to none " in " ".join(command)
    assert command[command.index("--secret-file") + 1].endswith(".*")


def test_agents_without_numbers_take_one_secret_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(SECRET, "")  # the one that is found does not stay for other tests
    for number in range(2):
        (tmp_path / f".megatron-run.{number}").write_text("the secret of sixteen letters\n")
    (tmp_path / ".megatron-run.2.partial").write_text("half")
    for left in (1, 0):
        monkeypatch.delenv(SECRET, raising=False)
        find_secret(".megatron-run.*")
        assert os.environ[SECRET] == "the secret of sixteen letters"
        assert len(list(tmp_path.glob(".megatron-run.?"))) == left


def test_messages_of_agents_are_taken_out_of_the_output() -> None:
    line = b"half a line\x1eagent node1 ready\nand \x1eagent node2 ended 137\n"
    assert without_messages(line) == (b"half a lineand ", [("node1", None), ("node2", 137)])


@pytest.mark.parametrize(
    ("said", "status", "is_lost"),
    [
        ("ready ready ended0 ended0", 0, False),
        ("ready ready ended0", 0, True),  # Open MPI 5
        ("ready ready ended0", 205, True),  # Open MPI 4
        ("ready ready ended4", 4, False),
        ("ready", 213, False),  # not all have started
        ("ready ready", 137, False),  # an agent was killed
    ],
)
def test_a_host_that_mpirun_has_lost_is_no_end_of_the_run(said: str, status: int, is_lost: bool) -> None:
    lines = "".join(f"\x1eagent node {word.replace('d0', 'd 0').replace('d4', 'd 4')}\n" for word in said.split())
    output = mpirun.MpirunOutput(io.BytesIO(lines.encode()))
    output.run()
    assert output.has_lost_host(status, 2) is is_lost


def test_a_run_over_two_nodes_has_its_hosts_in_a_file_that_is_removed(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = preflight(request(tmp_path, "10.0.0.1 10.0.0.2", device="cpu"))
    with mpirun.hostfile_of(plan) as name:
        assert name is not None
        assert Path(name).read_text() == "10.0.0.1 slots=1\n10.0.0.2 slots=1\n"
    assert not Path(name).exists()
    assert agent_command.agent_options(plan).by_mpirun


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sigterm_lets_ranks_that_mpirun_started_save_and_each_has_its_core(tmp_path: Path, fake: Path) -> None:
    run = Run(tmp_path, "--devices-per-node", "1", "--cores-per-rank", "1", OMPI_COMM_WORLD_LOCAL_RANK="0")
    run.wait_for_iteration(2)
    (rank,) = run.ranks()
    assert len(rank.cpu_affinity()) == 1
    run.process.send_signal(signal.SIGTERM)
    assert run.status() == 0, run.said
    assert "SIGUSR1: the ranks stop after this step and save" in run.said
    assert ": ranks are bound to the cores " in run.said
    assert re.search(r"iteration +1/.* \| lm loss: ", run.said)  # a line, not a row: the log is no terminal
    assert "\x1e" not in run.said
    assert run.saved.exists()
    assert of_run(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_status(tmp_path: Path, fake: Path) -> None:
    run = Run(tmp_path, "--devices-per-node", "1")
    run.wait_for_iteration(1)
    (rank,) = run.ranks()
    rank.kill()
    assert run.status() == 137, run.said
    assert re.search(r"rank 0 on \S+ was killed by SIGKILL", run.said)
    assert of_run(tmp_path) == []


TERM, XCPU, USR1, USR2 = signal.SIGTERM, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("events", "passed_on", "requested", "ends"),
    [
        ([(0, True, TERM)], [USR1], TERM, False),
        ([(0, True, USR2)], [USR2], USR2, False),
        ([(0, True, TERM), (9, True, TERM)], [USR1, USR1], TERM, False),
        ([(0, True, XCPU), (1, True, XCPU)], [USR1], XCPU, False),  # the kernel repeats it
        ([(0, False, TERM), (0.1, False, TERM), (20, True, None)], [USR1], TERM, False),
        ([(0, False, TERM), (9, False, None)], [], None, False),
        ([(0, False, TERM), (9, False, TERM)], [], TERM, True),
    ],
)
def test_a_signal_waits_for_all_agents_and_a_later_one_ends_their_start(
    events: list[tuple[float, bool, int | None]],
    passed_on: list[int],
    requested: int | None,
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events: the time, whether all agents take signals, and the signal that comes."""
    clock, sent, received = [0.0], list[int](), deque[int]()
    monkeypatch.setattr(mpirun.time, "monotonic", lambda: clock[0])
    process: Any = SimpleNamespace(send_signal=sent.append)
    signals = mpirun._PassedSignals(process, received)
    for now_s, are_ready, number in events:
        clock[0] = now_s
        received.extend([] if number is None else [number])
        has_ended = signals.pass_on(are_ready=are_ready)
    assert (sent, signals.requested, has_ended) == (passed_on, requested, ends)
