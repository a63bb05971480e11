"""Runs under Open MPI itself: on this machine, and over hosts in namespaces.

`MEGATRON_MPIRUN` names its mpirun where none is in PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.launch.agents.mpirun import LOST_HOST, mpirun_fault
from megatron.runtime.commands import HUNG
from tests import runs
from tests.cli.test_gaudi_spawn_runs import SFT, made_up, run, write_examples
from tests.host_runs import Run, assert_equal_runs, kill_rank, python_processes, wait_until
from tests.hosts import Hosts, send_signal, why_not
from tests.ranks import HANG_S, RankPools
from tests.runs import TINY

ROOT = Path(__file__).resolve().parent.parent.parent
MPIRUN = os.environ.get("MEGATRON_MPIRUN") or shutil.which("mpirun") or ""


@pytest.fixture(autouse=True)
def _open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(MPIRUN).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MPI_ROOT", raising=False)
    if not MPIRUN or mpirun_fault():
        pytest.skip("needs Open MPI 4 or 5: its mpirun in PATH, or MEGATRON_MPIRUN")


def variables(folder: Path, **options: str) -> dict[str, str]:
    runs.write_dataset(folder / "text")
    return {
        "PYTHON": sys.executable,
        "PATH": os.environ["PATH"],
        "HL_LAUNCHER_TYPE": "mpirun",
        "HL_CONFIG": "tiny_bloom",
        "HL_DEVICE": "cpu",
        "HL_DATA_DIR_ROOT": str(folder),
        "HL_DATA_FILE_PREFIX": "text",
        "HL_RESULTS_DIR": str(folder / "results"),
    } | options


def command(*flags: str) -> list[str]:
    return [str(ROOT / "scripts" / "run_bloom13b.sh"), *TINY.split(), "--train-samples", "16000", *flags]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"HL_TP": "2"}, {"HL_PP": "2", "HL_DP": "2", "HL_PE": "1"}])
def test_ranks_on_one_machine_train_to_the_end(layout: dict[str, str], tmp_path: Path) -> None:
    ranks = 2 if len(layout) == 1 else 4
    if (os.cpu_count() or 1) < ranks:
        layout = {name: value for name, value in layout.items() if name != "HL_PE"}
    ran = subprocess.run(
        command("--exit-interval", "3"),
        env=os.environ | variables(tmp_path, **layout),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "results" / "checkpoints" / "latest").read_text().startswith("global_step3\n")
    assert "\x1e" not in ran.stderr


@pytest.mark.slow
def test_gaudi_spawn_starts_its_ranks_by_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    trl = write_examples(tmp_path, made_up(24))
    assert "--use_deepspeed" in SFT
    words = ["--use_mpi" if word == "--use_deepspeed" else word for word in SFT]
    run(trl, words, world_size="2", max_steps="2", warmup_steps="1", logging_steps="1")
    assert [path.name for path in (trl / "sft" / "hf_format").glob("samples_*")] == ["samples_8"]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("end", ["kill switch", "signal", "rank", "agent", "launcher"])
def test_a_run_over_two_hosts_ends_on_both(end: str, tmp_path: Path) -> None:
    """By the kill switch, a signal to the launcher, a dead rank or agent on the second host, or a dead launcher."""
    with Hosts(2, tmp_path / "hosts") as hosts:
        given = {"HL_PP": "2", "HL_DP": "2", "HL_TP": "1", "HL_NGPU_PER_NODE": "2", "HL_NUM_NODES": "2"}
        given |= {"HL_HOSTSFILE": hosts.hostsfile(slots=2), "HL_KILL_SWITCH": str(tmp_path / "stop")}
        given |= {"MEGATRON_RUN_SECRET": "a secret that this test knows"}
        log = tmp_path / "log"
        with log.open("wb") as out:
            process = hosts.login.start(
                *command(), folder=tmp_path, variables=variables(tmp_path, **given), stdout=out, stderr=out
            )
        metrics = tmp_path / "results" / "metrics.jsonl"

        def wait_until(is_so: Callable[[], bool]) -> None:
            deadline_s = time.monotonic() + HANG_S
            while not is_so():
                assert time.monotonic() < deadline_s, log.read_text(errors="replace")
                assert process.poll() is None, log.read_text(errors="replace")
                time.sleep(0.1)

        wait_until(lambda: metrics.exists() and '"iteration":2,' in metrics.read_text())
        seen = hosts[1].run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout
        assert "megatron.launch.agents.agent" in seen
        assert "this test knows" not in seen
        hosts_file = re.search(r"--hostfile\0([^\0]+)", hosts.login.run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout)
        assert hosts_file is not None
        assert Path(hosts_file[1]).exists()
        statuses = {"kill switch": 0, "signal": 0, "rank": 137, "agent": 137, "launcher": 137}
        if end == "kill switch":
            (tmp_path / "stop").touch()
        elif end in ("signal", "launcher"):
            send_signal(process, signal.SIGTERM if end == "signal" else signal.SIGKILL)
        else:
            pattern = "multiprocessing.forkserver" if end == "rank" else "megatron.launch.agents.agent"
            found = hosts[1].run("pgrep", "-f", pattern).stdout.split()
            victim = hosts[1].run("pgrep", "-P", found[0]).stdout.split()[0] if end == "rank" else found[0]
            hosts[1].run("kill", "-KILL", victim)
        try:
            status = process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(log.read_text(errors="replace"))
        said = log.read_text(errors="replace")
        assert status in (statuses[end], -9), said
        if statuses[end] == 0:
            assert (tmp_path / "results" / "checkpoints" / "latest").exists(), said
        if end == "rank":
            assert re.search(r"rank \d on node2 was killed by SIGKILL", said)
        deadline_s = time.monotonic() + HANG_S
        left = ["?"]
        while left and time.monotonic() < deadline_s:  # a launcher that was killed waits for nothing
            left = [
                host.name
                for host in (*hosts, hosts.login)
                if host.run("pgrep", "-f", "megatron.launch.agents.agent|multiprocessing|orted|prted|mpirun").stdout
            ]
            time.sleep(0.2)
        assert left == [], said
        assert not Path(hosts_file[1]).exists()


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_restart_after_one_dies_on_either_host(tmp_path: Path, ranks: RankPools) -> None:
    """The weights are those of an undisturbed run, bit for bit: mpirun knows the agents alone, and these go on."""
    steps, whole = 60, tmp_path / "whole"
    (tmp_path / "data").mkdir()
    data = runs.write_dataset(tmp_path / "data" / "text").parent
    flags = f"--config tiny_bloom --train-samples {8 * steps} --results-dir {whole} --save {whole}/checkpoints"
    assert set(ranks(2)(runs.train, f"{flags} --save-interval 5 --data-path {data}/text")) == {""}
    layout = {"HL_DP": "2", "HL_TP": "1", "HL_PP": "1", "HL_SAVE_INTERVAL": "5", "HL_MAX_RESTARTS": "2"}
    with Hosts(2, tmp_path / "hosts") as hosts:
        length = ["--train-samples", str(8 * steps)]
        run = Run(hosts, hosts.login, data, tmp_path / "run", *length, nodes=2, HL_LAUNCHER_TYPE="mpirun", **layout)
        for rank, host in enumerate(hosts):
            run.wait_for_iteration(8 + 20 * rank)
            kill_rank(host)
            run.wait_for_words(f"rank {rank} on {host.name} was killed by SIGKILL; restart 1 of 2")
        assert run.status() == 0, run.said
        assert run.said.count("resumed ") == 2, run.said
        assert not any(python_processes(host) for host in hosts)
    assert_equal_runs(tmp_path / "run", whole, steps)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_host_that_is_cut_off_ends_the_run_and_its_own_ranks(max_restarts: int, tmp_path: Path) -> None:
    """By the watchdog of the ranks; where these restart, by the agents, and by mpirun half a minute later."""
    (tmp_path / "data").mkdir()
    data = runs.write_dataset(tmp_path / "data" / "text").parent
    layout = {"HL_DP": "2", "HL_TP": "1", "HL_PP": "1", "HL_SAVE_INTERVAL": "5", "HL_MAX_RESTARTS": str(max_restarts)}
    with Hosts(2, tmp_path / "hosts") as hosts:
        flags = ["--watchdog-timeout-s", "120" if max_restarts else "10"]
        run = Run(hosts, hosts.login, data, tmp_path / "run", *flags, nodes=2, HL_LAUNCHER_TYPE="mpirun", **layout)
        run.wait_for_iteration(3)
        hosts[1].cut_off()
        assert run.status() == (LOST_HOST if max_restarts else HUNG), run.said
        said = (
            "mpirun has lost a host; ranks may still run there"
            if max_restarts
            else "watchdog: no progress for 10 s; the run ends"
        )
        assert said in run.said
        for host in hosts:  # on the second one, which nobody reaches, mpirun's daemon remains for a while
            wait_until(lambda host=host: not python_processes(host), run, while_it_runs=False)  # type: ignore[misc]
