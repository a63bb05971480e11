"""Runs of run_bloom13b.sh over the hosts of tests/hosts.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import chaos
from tests.hosts import Host, Hosts
from tests.ranks import HANG_S
from tests.runs import TINY, rows

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("iteration", "consumed_samples", "lm_loss", "learning_rate", "grad_norm")
ITERATIONS = 2000  # more than most of these runs do


class Run:
    """The script's run over the first `nodes` hosts, a rank on each, started on `start`."""

    def __init__(self, hosts: Hosts, start: Host, data: Path, results: Path, *flags: str, nodes: int, **options: str):
        variables = {
            "PYTHON": sys.executable,
            "HL_CONFIG": "tiny_bloom",
            "HL_DEVICE": "cpu",
            "HL_HOSTSFILE": hosts.hostsfile(slots=1),
            "HL_NUM_NODES": str(nodes),
            "HL_NGPU_PER_NODE": "1",
            "HL_DATA_DIR_ROOT": str(data),
            "HL_DATA_FILE_PREFIX": "text",
            "HL_RESULTS_DIR": str(results),
        }
        self._results = results
        self._log = results.with_name(f"log.{results.name}.{nodes}.{time.monotonic_ns()}")
        self._err = self._log.with_name(f"{self._log.name}.err")
        with self._log.open("wb") as out, self._err.open("wb") as err:
            self.process = start.start(
                *(str(ROOT / "scripts" / "run_bloom13b.sh"), *TINY.split()),
                *("--train-samples", str(8 * ITERATIONS), *flags),
                folder=results.parent,
                variables=variables | options,
                stdout=out,
                stderr=err,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") + self._err.read_text(errors="replace")

    @property
    def metrics(self) -> str:
        path = self._results / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def wait_for_iteration(self, iteration: int) -> None:
        wait_until(lambda: f'"iteration":{iteration},' in self.metrics, self)

    def wait_for_words(self, words: str) -> None:
        wait_until(lambda: words in self.said, self)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def status(self) -> int:
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {HANG_S} s:\n{self.said}")


def wait_until(is_so: Callable[[], bool], run: Run, *, while_it_runs: bool = True) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert not (while_it_runs and run.has_ended), run.said
        assert time.monotonic() < deadline_s, run.said
        time.sleep(0.1)


def runs_ranks(host: Host) -> bool:
    return host.run("pgrep", "-f", "megatron.launch.agents.agent|multiprocessing").returncode == 0


def python_processes(host: Host) -> str:
    # not the shell that removes the secret of a run, within 0.2 s after the launcher has ended
    return host.run("pgrep", "-a", "-f", "python.*(megatron|deepspeed|multiprocessing)").stdout


def losses(results: Path) -> dict[int, float]:
    return {row["iteration"]: row["lm_loss"] for row in rows(results)}


def kill_rank(host: Host) -> None:
    """Kill the only rank of a host: it leads a session below the fork server."""
    shown = host.run("ps", "-eo", "pid,sid,args").stdout.splitlines()
    (pid,) = [line.split()[0] for line in shown if "multiprocessing" in line and line.split()[0] == line.split()[1]]
    assert host.run("kill", "-KILL", pid).returncode == 0


def assert_equal_runs(one: Path, other: Path, num_steps: int) -> None:
    """Assert that two results folders have the same weights, bit for bit, and the same steps."""
    assert chaos.differing(one / "checkpoints", other / "checkpoints") == []
    steps = [[[row[key] for key in EXACT] for row in chaos.steps_of(folder)] for folder in (one, other)]
    assert steps[0] == steps[1]
    assert len(steps[0]) == num_steps
