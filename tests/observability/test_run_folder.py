"""What the results folder says of a run: every start, why it ended, what it came to. Nothing of it ends a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.folders import Run
from megatron.observability import run_folder
from megatron.observability.metrics import MetricsLog
from megatron.observability.run_folder import RunFolder
from megatron.observability.step_metrics import LossAt, RunTotals
from megatron.options.config import CheckpointConfig, Config, LoggingConfig, TrainingConfig
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.resilience import job
from tests import runs
from tests.ranks import RankPools


def config_of(results: Path | None, **checkpoint: Any) -> Config:
    return Config(
        training=TrainingConfig(train_iters=10),
        logging=LoggingConfig(results_dir=None if results is None else str(results)),
        checkpoint=CheckpointConfig(**checkpoint),
    )


def live(
    config: Config, progress: Progress, steps: int, stopped: str | None = None, fault: Exception | None = None
) -> None:
    """A run of the loop's part in it."""
    log = MetricsLog(config, writes=True, world_size=1, device_peak_tflops=None, total_iterations=10)
    with log, RunFolder(config, ParallelContext.single(), log, progress) as folder:
        progress.iteration += steps
        progress.consumed_samples += 8 * steps
        if fault is not None:
            raise fault
        folder.stopped = stopped


def starts(results: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((results / "run.json").read_text())["starts"]
    return found


def test_a_resumed_run_appends_and_keeps_what_was_there(tmp_path: Path) -> None:
    live(config_of(tmp_path), Progress(), 4, stopped="Received SIGTERM")
    live(config_of(tmp_path), Progress(iteration=4, consumed_samples=32), 6)
    first, second = starts(tmp_path)
    assert [start["ended"]["reason"] for start in (first, second)] == ["Received SIGTERM", "trained to the end"]
    assert [start["ended"]["outcome"] for start in (first, second)] == ["stopped", "done"]
    assert [(start["resumed_iteration"], start["ended"]["iteration"]) for start in (first, second)] == [(0, 4), (4, 10)]
    assert list(second["hosts"].values()) == [[0]]
    assert {"python", "torch", "deepspeed", "numpy"} <= set(second["versions"])
    assert second["layout"] == {"tensor": 1, "context": 1, "pipeline": 1, "data": 1, "zero_stage": 0}
    assert second["command"]
    summary = (tmp_path / "summary.txt").read_text()
    assert re.search(r"^restarts +0 by agents, 1 new job$", summary, re.MULTILINE)
    assert re.search(r"^iterations +10 \(6 of them in this start\), 80 samples, 10,240 tokens;", summary, re.MULTILINE)
    assert not list(tmp_path.glob("*.new"))


def test_a_start_that_was_killed_stays_without_an_end(tmp_path: Path) -> None:
    log = MetricsLog(config_of(tmp_path), writes=True, world_size=1, device_peak_tflops=None, total_iterations=10)
    RunFolder(config_of(tmp_path), ParallelContext.single(), log, Progress()).__enter__()
    log.close()
    assert "ended" not in starts(tmp_path)[0], "it is on disk as soon as the run starts"
    live(config_of(tmp_path), Progress(iteration=4), 6)
    assert ["ended" in start for start in starts(tmp_path)] == [False, True]
    assert "1 more without a recorded end" in (tmp_path / "summary.txt").read_text()


def test_restarts_and_time_are_those_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose first attempt saved nothing and whose third was killed, and another one, each with its command."""

    def attempt(began_s: float, restart: int, progress: Progress, *, is_killed: bool = False) -> None:
        monkeypatch.setenv(job.BEGAN, repr(time.monotonic() - began_s) if restart == 0 else os.environ[job.BEGAN])
        monkeypatch.setenv(job.RESTARTS, str(restart))
        monkeypatch.setenv(job.COMMAND, json.dumps(["scripts/run.sh", str(began_s)]))
        with contextlib.suppress(RuntimeError):
            live(config_of(tmp_path), progress, 2, fault=RuntimeError("lost") if is_killed else None)

    attempt(600, 0, Progress(), is_killed=True)
    attempt(600, 1, Progress(), is_killed=True)
    attempt(600, 3, Progress(iteration=2), is_killed=True)  # the third found no rank to write
    attempt(60, 0, Progress(iteration=4))
    found = starts(tmp_path)
    assert [(start["restart"], start["command"][1]) for start in found] == [
        (0, "600"),
        (1, "600"),
        (3, "600"),
        (0, "60"),
    ]
    assert [start["job"] == found[0]["job"] for start in found] == [True, True, True, False]
    summary = (tmp_path / "summary.txt").read_text()
    assert re.search(r"^restarts +3 by agents, 1 new job$", summary, re.MULTILINE)
    assert re.search(r"^wall time +0:01:0\d in this job, 0:11:0\d in 2 jobs$", summary, re.MULTILINE)


def test_a_fault_is_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        live(config_of(tmp_path), Progress(), 4, fault=RuntimeError("out of\nmemory"))
    assert starts(tmp_path)[0]["ended"]["reason"] == "RuntimeError: out of memory"
    assert starts(tmp_path)[0]["ended"]["outcome"] == "failed"
    assert "RuntimeError: out of memory" in (tmp_path / "summary.txt").read_text()
    assert " run ended: RuntimeError: out of memory" in capsys.readouterr().out


def test_the_first_end_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    log = MetricsLog(config, writes=True, world_size=1, device_peak_tflops=None, total_iterations=10)
    with log, RunFolder(config, ParallelContext.single(), log, Progress()) as folder:
        folder.end("the watchdog saw no progress")
    assert starts(tmp_path)[0]["ended"]["reason"] == "the watchdog saw no progress"
    assert capsys.readouterr().out.count(" run ended: ") == 1


def test_a_new_run_in_a_used_folder_keeps_the_old_record_aside(tmp_path: Path) -> None:
    live(config_of(tmp_path), Progress(), 4)
    live(config_of(tmp_path), Progress(), 7)
    assert [start["ended"]["iteration"] for start in starts(tmp_path)] == [7]
    (old,) = tmp_path.glob("run.*.json")
    assert json.loads(old.read_text())["starts"][0]["ended"]["iteration"] == 4


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": 3}', '{"starts": [1]}'])
def test_an_unreadable_record_is_kept_aside(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    live(config_of(tmp_path), Progress(iteration=4), 6)
    assert len(starts(tmp_path)) == 1
    (old,) = tmp_path.glob("run.*.json")
    assert old.read_text() == content


def test_without_a_folder_the_end_is_printed_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    live(config_of(None), Progress(), 4)
    assert " run ended: trained to the end\n iterations: 4," in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live(config_of(tmp_path), Progress(), 4)
    before = (tmp_path / "summary.txt").read_text()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.os, "fsync", refuse)
    live(config_of(tmp_path), Progress(iteration=4), 6)
    assert f"WARNING: {tmp_path / 'summary.txt'} was not written: [Errno 28]" in capsys.readouterr().out
    assert (tmp_path / "summary.txt").read_text() == before
    assert not list(tmp_path.glob("*.new"))


def test_checkpoints_are_counted(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ours, theirs = Run.new({}), Run.new({})
    tags = {"global_step5": ours, "global_step10": ours, "global_step12": theirs, ".global_step15.partial-abc": ours}
    for tag, run in tags.items():
        (saved / tag).mkdir(parents=True)
        (saved / tag / "checkpoint.json").write_text(f'{{\n "metadata": {json.dumps({"run": run.to_json()})},\n')
    (saved / "global_step20").mkdir()  # no checkpoint
    (saved / "latest").write_text(f"global_step10\n{json.dumps(ours.to_json())}\n")
    live(config_of(tmp_path / "results", save=str(saved)), Progress(), 10)
    assert f"2 in {saved}, newest global_step10\n" in (tmp_path / "results" / "summary.txt").read_text()


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *arguments],
        check=True,
        capture_output=True,
    )


def test_commit_and_changes_of_the_code_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "IMPORT_ROOT", tmp_path)
    assert run_folder._project()["commit"] is None
    git(tmp_path, "init")
    (tmp_path / "code").write_text("1")
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "-m", "m")
    clean = run_folder._project()
    assert re.fullmatch(r"[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    (tmp_path / "code").write_text("2")
    assert run_folder._project()["dirty"] is True
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(run_folder, "IMPORT_ROOT", tmp_path / "inside")
    assert run_folder._project()["commit"] is None, "another repository's commit is not ours"


# ---------------------------------------------------------------------------------------------------------------------
# What it adds up to


def train_row(iteration: int, **values: Any) -> dict[str, Any]:
    defaults = {"steps": 10, "iteration_time_s": 0.5, "tokens_per_second": 1000.0, "lm_loss": 3.0}
    return {"kind": "train", "iteration": iteration, **defaults, **values}


def test_totals_weigh_by_time_and_keep_the_lowest_loss() -> None:
    totals = RunTotals(flops_per_token=1e9, peak_tflops=10.0, world_size=2)
    totals.add(train_row(10, lm_loss=2.0))
    totals.add(train_row(20, lm_loss=2.5, iteration_time_s=1.5, tokens_per_second=2000.0))
    totals.add({"kind": "valid", "iteration": 20, "lm_loss": None})
    assert totals.training_s == 20.0
    assert totals.tokens_per_second == (5 * 1000 + 15 * 2000) / 20
    assert totals.tflops_per_device == pytest.approx(1750 * 1e9 / 2 / 1e12)
    assert totals.mfu == pytest.approx(1750 * 1e9 / 2 / 1e12 / 10)
    assert (totals.last, totals.lowest) == ({"train": LossAt(2.5, 20)}, {"train": LossAt(2.0, 10)})


def test_totals_of_a_run_whose_devices_grew_in_number_count_those_of_each_start() -> None:
    totals = RunTotals(flops_per_token=1e9, peak_tflops=10.0, world_size=4)
    totals.add(train_row(10, tokens_per_second_per_device=500.0))
    totals.add(train_row(20, tokens_per_second=2000.0, tokens_per_second_per_device=500.0))
    assert totals.tokens_per_second == 1500.0
    assert totals.tflops_per_device == pytest.approx(500 * 1e9 / 1e12)
    assert totals.mfu == pytest.approx(500 * 1e9 / 1e12 / 10)


def test_totals_know_the_fullest_rank() -> None:
    totals = RunTotals(1.0, None, 1)
    totals.add(train_row(10, **{"max_memory_allocated (GB)": 4.0, "total_memory_available (GB)": 96.0}))
    spread = {"min": 1.0, "mean": 2.0, "max": 5.5, "max_rank": 3}
    record = {"max_memory_allocated (GB)": spread, "total_memory_available (GB)": {"max": 128.0}}
    totals.add({"kind": "memory", "iteration": 10, **record})
    totals.add({"kind": "memory", "iteration": 20})
    assert (totals.peak_memory_gb, totals.total_memory_gb) == (5.5, 128.0)
    assert (totals.tokens_per_second, totals.mfu) == (1000.0, None)


def test_totals_of_nothing() -> None:
    totals = RunTotals(1.0, 1.0, 1)
    assert (totals.tokens_per_second, totals.tflops_per_device, totals.mfu, totals.peak_memory_gb) == (None,) * 4


def test_run_over_two_starts_sums_up_in_its_summary(ranks: RankPools, tmp_path: Path) -> None:
    data, results, saved = runs.write_dataset(tmp_path / "data"), tmp_path / "results", tmp_path / "saved"
    flags = f"--data-path {data} --train-iters 6 --results-dir {results} --save {saved} --load {saved} --log-interval 2"
    flags += " --tensor-model-parallel-size 2"
    assert set(ranks(2)(runs.train, f"{flags} --exit-interval 4")) == {""}
    assert "Reached exit_interval=4" in (results / "summary.txt").read_text()
    assert set(ranks(2)(runs.train, flags)) == {""}
    rows = runs.rows(results)
    assert [row["iteration"] for row in rows] == [2, 4, 6]
    summary = dict(re.split(r"  +", line, maxsplit=1) for line in (results / "summary.txt").read_text().splitlines())
    assert summary["ended"].endswith("trained to the end")
    assert summary["iterations"].startswith("6 (2 of them in this start), 48 samples, 768 tokens; 0 skipped, 0 NaN")
    assert summary["training loss"].startswith(f"{rows[-1]['lm_loss']:.4f} at iteration 6, lowest")
    lowest = min(runs.rows(results, "valid"), key=lambda row: row["lm_loss"])
    assert summary["validation loss"].endswith(f"lowest {lowest['lm_loss']:.4f} at iteration {lowest['iteration']}")
    seconds = [row["iteration_time_s"] * row["steps"] for row in rows]
    assert summary["throughput"].startswith(f"{768 / sum(seconds):,.0f} tokens/s")
    assert summary["checkpoints"] == f"2 in {saved}, newest global_step6"
    assert summary["layout"] == "tensor 2, context 1, pipeline 1, data 1, zero_stage 0; 2 ranks on 1 host"
    (hosts,) = starts(results)[-1]["hosts"].values()
    assert hosts == [0, 1]


def run_on_a_lost_device(arguments: str) -> str:
    with patch("megatron.training.engine.Engine.train_step", side_effect=RuntimeError("device lost")):
        return runs.train(arguments)


def test_run_that_fails_says_so(ranks: RankPools, tmp_path: Path) -> None:
    data, results = runs.write_dataset(tmp_path / "data"), tmp_path / "results"
    told = ranks(2)(run_on_a_lost_device, f"--data-path {data} --train-iters 6 --results-dir {results}")
    assert told == ["RuntimeError: device lost"] * 2
    assert starts(results)[0]["ended"]["reason"] == "RuntimeError: device lost"
    assert "RuntimeError: device lost" in (results / "summary.txt").read_text()
