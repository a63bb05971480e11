"""The state of a run by its files: running, silent, ended, and what is left of it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from megatron.cli import status
from megatron.observability.report.recorded import read_recorded
from megatron.observability.status import FIRST_SILENCE_S, LEAST_SILENCE_S, RunStatus, status_of
from tests.observability.test_report import START_S, end, recheck, start, step, write_run

NEWEST_S = START_S + 200
"""Time of the last row of a step."""


def write_open_run(folder: Path, options: str = "training:\n  train_iters: 100\n", step_s: float = 0.5) -> Path:
    """A run of 20 steps whose start has no end yet."""
    folder.mkdir()
    rows = [
        step(number, iteration_time_s=step_s, samples_per_second=8.0, consumed_samples=4 * number)
        for number in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"starts": [start(0, 0, 0)]}))
    (folder / "config.yaml").write_text(options)
    (folder / "train.log").write_text("")
    return folder


def seen(folder: Path, now_s: float) -> RunStatus:
    return status_of(read_recorded(folder, folder.name), now_s)


def test_a_run_under_way(tmp_path: Path) -> None:
    found = seen(write_open_run(tmp_path / "run"), NEWEST_S + 3)
    assert (found.state, found.iteration, found.last_iteration, found.row_age_s) == ("running", 20, 100, 3)
    assert found.left_s == 80 * 0.5
    assert (found.ranks, len(found.hosts), found.starts, found.refused_steps) == (4, 2, 1, 0)
    assert found.is_well
    lines = list(found.lines())
    assert lines[1:4] == [
        *("  state         running", "  step          20 of 100, loss 7.0000"),
        "  rate          1,012 tokens/s, 500 ms a step",
    ]
    assert found.ends_s == NEWEST_S + 3 + 40
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.ends_s))
    assert f"  left          40 s at this rate, until {at}" in lines
    assert f"  ranks         4 on {', '.join(found.hosts)}" in lines


def test_a_run_that_failed_often_shows_its_newest_faults(tmp_path: Path) -> None:
    found = seen(write_run(tmp_path / "run", text="boom"), NEWEST_S)
    lines = list(dataclasses.replace(found, starts=9, faults=tuple(f"E{n}" for n in range(8))).lines())
    assert [line.split()[1] for line in lines if line.startswith("  fault")] == ["E5", "E6", "E7"]
    assert "  starts        9, 8 faults" in lines


def test_long_lines_are_folded_on_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", text="boom " * 60)
    status.main([str(run)])
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    status.main([str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert longest > 250
    assert max(len(line) for line in lines if "/" not in line) <= 99  # a path is copied whole
    assert "boom" in next(line for line in lines if line.startswith(" " * 16))


def test_what_is_left_of_a_run_of_so_many_samples(tmp_path: Path) -> None:
    run = write_open_run(tmp_path / "run", "training:\n  train_iters: null\n  train_samples: 1000\n")
    assert seen(run, NEWEST_S).left_s == (1000 - 80) / 8


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, LEAST_SILENCE_S), (60.0, 600.0)])
def test_a_run_without_new_rows_is_silent(tmp_path: Path, step_s: float, limit_s: float) -> None:
    """Silent after ten times of a step, which may take minutes."""
    run = write_open_run(tmp_path / "run", step_s=step_s)
    assert seen(run, NEWEST_S + limit_s - 1).state == "running"
    late = seen(run, NEWEST_S + limit_s + 1)
    assert late.state == "silent"
    assert not late.is_well


def test_a_run_that_ends_or_hangs_before_its_first_log_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit status is that of a run which has failed or is silent, not that of a wrong folder."""
    run = write_open_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "memory", "iteration": 0, "time": START_S + 5}) + "\n")

    def found(now_s: float) -> RunStatus:
        return status_of(read_recorded(run, "run", needs_steps=False), now_s)

    begun = found(START_S + 65)
    assert (begun.state, begun.reason, begun.iteration, begun.row_age_s) == ("running", "no step is logged yet", 0, 60)
    assert (begun.loss, begun.step_s, begun.left_s, begun.is_well) == (None, None, None, True)
    assert found(START_S + 6 + FIRST_SILENCE_S).state == "silent"
    assert status.main([str(run)]) == status.UNWELL
    (run / "run.json").write_text(json.dumps({"starts": [start(0, 0, 0, end(9, "DataError: x", "failed", 0))]}))
    assert status.main([str(run)]) == status.UNWELL
    assert "  state         failed: DataError: x\n" in capsys.readouterr().out
    (run / "run.json").unlink()
    (run / "metrics.jsonl").write_text("")
    assert status.main([str(run)]) == 2
    assert "no start in run.json" in capsys.readouterr().err


def test_the_ends_of_starts(tmp_path: Path) -> None:
    found = seen(write_run(tmp_path / "run", text="boom"), NEWEST_S)
    assert (found.state, found.reason, found.left_s) == ("done", "", None)
    assert found.faults == ("ValueError: boom",)
    assert found.warnings == ("'boom'",)
    assert (found.starts, found.refused_steps) == (3, 1)


def test_the_last_recheck_that_named_ranks_is_shown(tmp_path: Path) -> None:
    run = write_open_run(tmp_path / "run")
    assert seen(run, NEWEST_S).wrong_ranks == ""
    with (run / "metrics.jsonl").open("a") as file:
        for row in (
            recheck(10, [3], "rank 3 on b (cuda:1): its loss differs", is_certain=True),
            recheck(20, [1, 3], "ranks 1 and 3: their losses differ", is_certain=False),
        ):
            file.write(json.dumps(row) + "\n")
    found = seen(run, NEWEST_S)
    text = "ranks 1 and 3: their losses differ; it may be others that are wrong"
    assert f"  wrong ranks   2 rechecks, the last after iteration 20: {text}" in list(found.lines())
    assert found.is_well, "it goes on, by --recheck-action log"


def test_the_newest_save_is_found_from_the_runs_own_folder(tmp_path: Path) -> None:
    run = write_open_run(tmp_path / "run", "checkpoint:\n  save: saves\n")
    rows = json.loads((run / "run.json").read_text())
    rows["starts"][0]["folder"] = str(tmp_path)
    (run / "run.json").write_text(json.dumps(rows))
    assert seen(run, NEWEST_S).save == f"none in {tmp_path / 'saves'}"
    for tag in ("global_step9", "global_step10"):
        (tmp_path / "saves" / tag).mkdir(parents=True)
        (tmp_path / "saves" / tag / "checkpoint.json").touch()
    assert seen(run, NEWEST_S).save.startswith("global_step10, ")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, silent = write_run(tmp_path / "good"), write_open_run(tmp_path / "silent")
    assert status.main([str(good)]) == 0
    assert "  state         done\n" in capsys.readouterr().out
    assert status.main([str(good), str(silent), "--json"]) == status.UNWELL
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["done", "silent"]
    assert status.main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("status: ")
