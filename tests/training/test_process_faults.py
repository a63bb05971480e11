"""Each fault of the table in docs/guides/reliability.md, met by a rank of a real run: how it ends, and whom it names.

Faults that the watchdog must find run side by side, since they mostly wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.runtime.commands import DONE, FAILED, HUNG, REFUSED
from tests import runs
from tests.training.faulty_run import STEP, Ended, Zygote

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "reliability.md"
TIMEOUT_S = 5
IN_TIME_S = 300  # a fault that nobody notices ends with the collectives, after 30 minutes
SAVE, SAVE_EVERY_STEP = "--save {folder}/saved", "--save {folder}/saved --save-interval 1 --no-async-save"


@dataclass(frozen=True)
class Case:
    fault: str
    status: int
    says: str
    """In what the run tells."""
    rank: int = 1
    """That meets the fault."""
    flags: str = ""
    has_launcher: bool = True
    stacks: str = ""
    """In the file of the rank that met it."""


PATIENT = "--watchdog-timeout-s 60"
FAILS = r"rank 1 on \S+ \(process \d+\) failed in step 3, train:\n(.*\n)*ArithmeticError"
HANG = r"rank {rank} on \S+ \(process \d+\) does not wait for others: in step 3, "
GONE = r"rank {rank} on \S+ (\(process \d+\) does not answer|was never heard of)"
KILLED = r"rank {rank} on \S+ \(process \d+\) was killed by SIG%s; last heard of [\d.]+ s ago, "
SILENT = r"rank {rank} on \S+ \(process \d+\) does not answer: .* last heard of [\d.]+ s ago, "
WAITS = r"in wait_for\n|[/\\]torch[/\\]distributed[/\\]"
CASES = {
    "exception": Case("exception", FAILED, FAILS),
    "async exception": Case("async exception", FAILED, FAILS),
    "SIGINT": Case("SIGINT", DONE, "Received SIGINT", flags=SAVE),
    "SIGTERM": Case("SIGTERM", DONE, "Received SIGTERM", flags=SAVE),
    "SIGKILL": Case("SIGKILL", 128 + 9, KILLED % "KILL"),
    "SIGKILL of rank 0": Case("SIGKILL", 128 + 9, KILLED % "KILL", rank=0),
    "SIGKILL of rank 0 in a save, no launcher": Case(
        "SIGKILL in a save", FAILED, GONE, rank=0, flags=f"{SAVE} --save-interval 2 {PATIENT}", has_launcher=False
    ),
    "SIGKILL of rank 0 in the last save, no launcher": Case(
        "SIGKILL in a save", FAILED, GONE, rank=0, flags=f"{SAVE} --train-iters 2 {PATIENT}", has_launcher=False
    ),
    "SIGSTOP": Case("SIGSTOP", HUNG, SILENT),
    "SIGSTOP of rank 0": Case("SIGSTOP", HUNG, SILENT, rank=0),
    "segfault": Case("segfault", 128 + 11, KILLED % "SEGV"),
    "abort": Case("abort", 128 + 6, KILLED % "ABRT"),
    "deadlock": Case("deadlock", HUNG, HANG + "train, .* in deadlock", stacks="in deadlock"),
    "interpreter lock held": Case("interpreter lock held", HUNG, SILENT),
    "reader thread fails": Case(
        "reader thread fails", FAILED, r"rank 1 on \S+ \(process \d+\) failed in step 3, data:\n(.*\n)*ArithmeticError"
    ),
    "reader thread hangs": Case("reader thread hangs", HUNG, HANG + "data, .* in _wait_for", stacks="in read"),
    "iterator one short": Case(
        "iterator one short", REFUSED, r"failed in step 3, data: DataError: this rank has no data after 16 samples"
    ),
    "too few descriptors": Case(
        "too few descriptors",
        FAILED,
        r"rank 1 on \S+ \(process \d+\) failed in step 3, train: OSError: .*Too many open files: the limit is",
    ),
    "disk full while logging": Case(
        "disk full while logging", DONE, r"metrics\.jsonl .* File too large.*\n(.*\n)*.* content is lost", rank=0
    ),
    "disk full while saving": Case(
        "disk full while saving", FAILED, r"global_step3 was not saved.*File too large", flags=SAVE_EVERY_STEP
    ),
}


# tests/training/test_stragglers.py has the layouts and the phases
SLOW = {"sequential engine": ("slow layer", "--zero-stage 2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Iterator[dict[str, Future[Ended]]]:
    data = runs.write_dataset(folder / "data")
    zygote = Zygote()

    def run(name: str, case: Case) -> Ended:
        own = folder / name.replace(" ", "_")
        flags = f"{runs.TINY} --data-path {data} --train-iters 6 --eval-iters 0 --watchdog-timeout-s {TIMEOUT_S} "
        flags += f"--results-dir {own}/results {case.flags.format(folder=own)}"
        return zygote.run(own, flags.split(), case.fault, fault_rank=case.rank, has_launcher=case.has_launcher)

    # those that hang first
    order = sorted(CASES, key=lambda name: CASES[name].status != HUNG)
    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(run, name, CASES[name]) for name in order}
        for name, (fault, flags) in SLOW.items():
            case = Case(fault, DONE, "", flags=f"--log-straggler --log-interval 3 {flags}")
            futures[name] = pool.submit(run, name, case)
        yield futures
    zygote.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_the_run_in_time_and_names_the_rank(
    ended: dict[str, Future[Ended]], folder: Path, name: str
) -> None:
    case, run = CASES[name], ended[name].result()
    own = folder / name.replace(" ", "_")
    assert run.status == case.status, run.told
    assert re.search(case.says.format(rank=case.rank), run.told), run.told
    assert run.alive == []
    assert not run.seconds >= IN_TIME_S, f"{run.seconds} s after the fault\n{run.told}"
    assert "gloo" not in run.told, run.told  # no traceback of a rank that only lost another
    faults = own / "results" / "faults"
    if case.status == DONE:
        assert not faults.exists()
        return
    if case.status == HUNG:
        [start] = faults.iterdir()
        stacks = {path.name: path.read_text() for path in start.glob("rank_*.txt")}
        assert len(stacks) == 2
        assert re.search(WAITS, stacks[f"rank_{1 - case.rank:05d}.txt"]), "the other one waits in a collective"
        assert case.stacks in stacks[f"rank_{case.rank:05d}.txt"]
        assert (start / "verdict.txt").read_text() in run.told


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_launcher])
def test_each_fault_that_ends_a_run_is_one_alert_which_names_the_rank(
    ended: dict[str, Future[Ended]], folder: Path, name: str
) -> None:
    case, run, file = CASES[name], ended[name].result(), folder / name.replace(" ", "_") / "alerts.jsonl"
    alerts = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    expected = [] if case.status == DONE else ["stall" if case.status == HUNG else "abort"]
    if name == "disk full while saving":
        expected.insert(0, "save")
    assert [alert["event"] for alert in alerts] == expected, run.told
    if case.status != DONE:
        assert (alerts[-1]["status"], alerts[-1]["run"]) == (case.status, "faulty")
        assert name == "disk full while saving" or f"rank {case.rank} on " in alerts[-1]["message"]


def test_a_stop_by_signal_saves(ended: dict[str, Future[Ended]], folder: Path) -> None:
    for name in ("SIGINT", "SIGTERM"):
        assert ended[name].result().status == DONE
        step = re.search(r"Received SIG\w+.*iteration=(\d)", ended[name].result().told)
        assert step is not None
        assert (folder / name / "saved" / "latest").read_text().split()[0] == f"global_step{step[1]}"


def test_a_full_disk_costs_rows_but_no_step_and_leaves_the_last_checkpoint(
    ended: dict[str, Future[Ended]], folder: Path
) -> None:
    assert ended["disk full while logging"].result().status == DONE
    logged = runs.rows(folder / "disk_full_while_logging" / "results")
    assert [row["iteration"] for row in logged] == list(range(1, len(logged) + 1))
    assert len(logged) < 6
    assert "iteration        6/       6" in ended["disk full while logging"].result().told
    assert ended["disk full while saving"].result().status == FAILED
    saved = folder / "disk_full_while_saving" / "saved"
    assert (saved / "latest").read_text().split()[0] == f"global_step{STEP - 1}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.has_launcher])
def test_a_save_that_lost_a_rank_is_marked_as_failed(ended: dict[str, Future[Ended]], folder: Path, name: str) -> None:
    assert ended[name].result().status == FAILED
    saved = folder / name.replace(" ", "_") / "saved"
    [mark] = saved.glob(".global_step2.failed-*")
    assert mark.read_text() == "saving global_step2 failed on rank 1: another rank has ended"
    assert not (saved / "latest").exists()


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_rank_is_named_though_all_ranks_step_alike(
    ended: dict[str, Future[Ended]], folder: Path, name: str
) -> None:
    run = ended[name].result()
    assert run.status == DONE, run.told
    logged = runs.rows(folder / name.replace(" ", "_") / "results")
    assert len(logged) == 2
    for row in logged:
        assert row["slowest_rank"] == 1
        assert row["own_time_min_s"] < row["own_time_max_s"]
    assert logged[-1]["straggler_ranks"] == [1]
    assert re.search(r"\| straggler: rank 1 on \S+ \(cpu\): forward \+", run.told), run.told


def test_the_table_of_the_docs_and_the_cases_have_the_same_rows() -> None:
    table = re.search(r"^\| fault \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert table is not None
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table[1].splitlines()]
    assert {row[0]: row[-1] for row in rows} == {name: str(case.status) for name, case in CASES.items()}
