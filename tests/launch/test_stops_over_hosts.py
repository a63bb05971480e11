"""Ends of a run over two hosts with an sshd of their own, which pdsh reaches: its status, and nothing that is left."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.launch.agents.mpirun import LOST_HOST
from tests import runs
from tests.host_runs import ITERATIONS, Run, losses, python_processes, wait_until
from tests.hosts import Host, Hosts, send_signal, why_not

LAST = 6
LOST_PDSH = "pdsh on this machine was ended when the agents of"
PDSH = ("-f", "^pdsh -S ")
"""That of the run; the launcher sends signals by others."""


def finds(host: Host, *words: str) -> bool:
    return host.run("pgrep", *words).returncode == 0


MOMENTS: dict[str, Callable[[Hosts, Run], bool]] = {
    "pdsh begins": lambda hosts, run: finds(hosts.login, *PDSH),
    "an agent begins": lambda hosts, run: any(finds(host, "-f", "megatron.launch.agents.agent") for host in hosts),
    "ranks begin": lambda hosts, run: all(finds(host, "-f", "multiprocessing") for host in hosts),
    "a step": lambda hosts, run: '"iteration":3,' in run.metrics,
    "the last step": lambda hosts, run: f"Reached exit_interval={LAST}" in run.said,
    "the end": lambda hosts, run: "run ended: " in run.said,
}
BY_DEFAULT = {("SIGTERM", "a step")}
"""tests/launch/test_endings.py has the other moments on one host, tests/launch/test_launch.py the death of a stand-in
for pdsh; -m slow: here too."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, tmp_path_factory.mktemp("stops") / "hosts") as two:
        yield two


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    runs.write_dataset(folder / "text")
    return folder


@pytest.mark.parametrize(
    ("what", "moment"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
        for case in itertools.product(("SIGTERM", "pdsh"), MOMENTS)
    ],
)
def test_a_signal_and_the_death_of_pdsh_have_one_status_and_leave_nothing(
    hosts: Hosts, data: Path, tmp_path: Path, what: str, moment: str
) -> None:
    results = tmp_path / "run"
    layout = {"HL_DP": "1", "HL_TP": "1", "HL_PP": "2"}
    if moment in ("the last step", "the end"):
        layout["HL_EXIT_INTERVAL"] = str(LAST)
    run = Run(hosts, hosts.login, data, results, nodes=2, **layout)
    wait_until(lambda: MOMENTS[moment](hosts, run), run)
    if what == "SIGTERM":
        send_signal(run.process, signal.SIGTERM)
    else:
        hosts.login.run("pkill", "-KILL", *PDSH)
    status = run.status()
    everywhere = (*hosts, hosts.login)
    assert "Traceback" not in run.said
    if what == "SIGTERM":
        # as hosts that wait for each other have nothing to save
        has_begun = bool(run.metrics) or "SIGTERM: the ranks stop after this step and save" in run.said
        assert status == (0 if has_begun else 128 + signal.SIGTERM), run.said
        assert not any(map(python_processes, everywhere)), run.said
    elif LOST_PDSH in run.said:
        assert status == LOST_HOST, run.said
    else:
        assert "run ended: " in run.said
        assert status == 0, run.said
    if moment == "a step":
        assert 3 <= max(losses(results)) < ITERATIONS
        assert (LOST_PDSH in run.said) == (what == "pdsh")
        assert (results / "checkpoints" / "latest").exists() == (what == "SIGTERM")
    wait_until(lambda: not any(map(python_processes, everywhere)), run, while_it_runs=False)
