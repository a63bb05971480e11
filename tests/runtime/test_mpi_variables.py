"""Ranks that mpirun starts find their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.observability.console import prints_rows
from megatron.options.config import ConfigError, LoggingConfig
from megatron.runtime.network import HYDRA, OPEN_MPI, OURS, STDOUT, adopt_mpi_variables, prints_to_terminal
from tests.ranks import HANG_S

MPIRUN = shutil.which("mpirun")
SHOWN = (
    "import os; from megatron.runtime.network import OURS, adopt_mpi_variables as a; a(); "
    "open('rank' + os.environ['RANK'], 'w').write(' '.join(os.environ[name] for name in OURS))"
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OURS, *OPEN_MPI, *HYDRA, STDOUT, "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that what is adopted is undone
        monkeypatch.delenv(name)


def adopted(monkeypatch: pytest.MonkeyPatch, **given: str) -> list[str | None]:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    adopt_mpi_variables()
    return [os.environ.get(name) for name in OURS]


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA])
def test_the_place_of_a_rank_is_read(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    assert adopted(monkeypatch, MASTER_ADDR="node1", **places) == ["3", "4", "1", "2"]


@pytest.mark.parametrize(
    ("given", "is_seen"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_RANK": "0", STDOUT: "terminal"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", STDOUT: "file"}, False),
        ({"PMI_RANK": "0"}, True),
    ],
)
def test_a_terminal_of_mpirun_shows_nobody_anything(
    given: dict[str, str], is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI gives each rank a terminal, also in `mpirun ... > log`."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    adopted(monkeypatch, **given)
    assert prints_to_terminal() == is_seen
    assert prints_rows(LoggingConfig()) == is_seen
    assert prints_rows(LoggingConfig(log_format="compact"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not prints_to_terminal()


def test_a_launcher_that_has_set_the_rank_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(zip(OPEN_MPI, ("1", "2", "1", "2"), strict=True))
    assert adopted(monkeypatch, RANK="0", WORLD_SIZE="1", **places) == ["0", "1", None, None]


def test_a_task_of_slurm_is_no_rank_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adopted(monkeypatch, PMI_RANK="1", PMI_SIZE="2") == [None] * 4


def test_several_hosts_need_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(zip(OPEN_MPI, ("0", "4", "0", "2"), strict=True))
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, but mpirun has started 4 ranks on several hosts"):
        adopted(monkeypatch, **places)


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_a_real_mpirun_sets_what_is_read(tmp_path: Path) -> None:
    given = str(MPIRUN)
    if "Open MPI" in subprocess.run([given, "--version"], capture_output=True, text=True).stdout:
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        command = [given, "--allow-run-as-root", "--bind-to", "none", "--hostfile", str(tmp_path / "hosts")]
    else:
        command = [given]
    ran = subprocess.run(
        [*command, "-n", "2", sys.executable, "-c", SHOWN], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    # in files: mpirun may mix the lines of its ranks
    assert [(path.name, path.read_text()) for path in sorted(tmp_path.glob("rank?"))] == [
        ("rank0", "0 2 0 2"),
        ("rank1", "1 2 1 2"),
    ], ran.stderr
