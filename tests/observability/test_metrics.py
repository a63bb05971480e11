"""The log line, metrics.jsonl and TensorBoard: same values, one writer, one row an iteration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import RankStats, straggler_stats
from megatron.observability.step_metrics import Speed, StepMetrics
from megatron.options.config import Config, LoggingConfig, TrainingConfig
from megatron.plan.flops import flops_per_token
from tests.observability.test_rank_times import rank_times
from tests.ranks import HANG_S

MEMORY = {"memory_allocated (GB)": 1.0, "max_memory_allocated (GB)": 1.234, "total_memory_available (GB)": 80.0}
STEP = StepMetrics(
    iteration=10,
    steps=10,
    consumed_samples=160,
    consumed_tokens=20480,
    elapsed_s=0.125,
    learning_rate=1e-4,
    global_batch_size=16,
    lm_loss=6.123456,
    loss_scale=1.0,
    grad_norm=1.2344,
    skipped_iterations=0,
    nan_iterations=0,
    memory=MEMORY,
)


def config_for(results_dir: Path | None = None, **logging: Any) -> Config:
    return Config(
        training=TrainingConfig(global_batch_size=16, seq_length=128, train_iters=100),
        logging=LoggingConfig(results_dir=str(results_dir) if results_dir else None, **logging),
    )


def open_log(config: Config, **options: Any) -> MetricsLog:
    defaults: dict[str, Any] = {"writes": True, "world_size": 4, "device_peak_tflops": None, "total_iterations": 100}
    return MetricsLog(config, **{**defaults, **options})


def at(iteration: int, **changes: Any) -> StepMetrics:
    return dataclasses.replace(STEP, iteration=iteration, consumed_samples=16 * iteration, **changes)


def rows(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture(autouse=True)
def _silent_tensorboard(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Spares the tests that do not name TensorBoard its import and its thread."""
    if "tensorboard" not in request.node.name:
        monkeypatch.setattr("megatron.observability.metrics.TensorBoardLog", MagicMock())


# ---------------------------------------------------------------------------------------------------------------------
# The line


def test_line_is_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for(), device_peak_tflops=1e-3) as log:
        log.log_step(STEP)
    tflops = 128 / 4 * 128 * flops_per_token(config_for()) / 1e12
    assert capsys.readouterr().out == (
        " iteration       10/     100 | consumed samples:          160 | consumed tokens:        20480 |"
        " elapsed time per iteration (ms): 125.0 | learning rate: 1.000E-04 | global batch size:    16 |"
        " lm loss: 6.123456E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | samples per second: 128.000 | tokens/s/device: 4096.0 |"
        f" TFLOP/s/device: {tflops:.4g} | MFU: {tflops / 1e-3:.1%} | memory (GB): 1.23 |\n"
    )


def test_line_leaves_out_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for()) as log:
        log.log_step(at(10, grad_norm=None, memory={}))
    line = capsys.readouterr().out
    assert not {"MFU", "memory", "grad norm"} & {part.split(":")[0].split(" (")[0].strip() for part in line.split("|")}
    assert re.search(r"TFLOP/s/device: [\d.e-]+ \|$", line)


def test_peak_of_the_config_overrides_the_devices(tmp_path: Path) -> None:
    for peak_tflops, expected in ((None, 312.0), (100.0, 100.0)):
        with open_log(config_for(tmp_path, peak_tflops=peak_tflops), device_peak_tflops=312.0) as log:
            log.log_step(STEP)
        row = rows(tmp_path)[0]
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / expected)


def test_speed_under_rampup_counts_the_samples_really_consumed(tmp_path: Path) -> None:
    # ten steps of 8, then ten of which five ran at 8 and five at 16, then a resumption at 20 followed by 16 a step
    with open_log(config_for(tmp_path)) as log:
        log.log_step(dataclasses.replace(STEP, iteration=10, consumed_samples=80, global_batch_size=8))
        log.log_step(dataclasses.replace(STEP, iteration=20, consumed_samples=200, global_batch_size=16))
    with open_log(config_for(tmp_path), resumed_iteration=20) as log:
        log.log_step(dataclasses.replace(STEP, iteration=30, consumed_samples=360, global_batch_size=16))
    assert [row["samples_per_second"] for row in rows(tmp_path)] == [8 / 0.125, 12 / 0.125, 16 / 0.125]


def test_validation_line_and_row_have_the_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_validation(50, 800, math.log(32), 5120)
        log.log_validation(100, 1600, 1000.0, 5120, split="test")
    valid, test = rows(tmp_path)
    assert [valid[key] for key in ("kind", "iteration", "consumed_samples", "num_tokens")] == ["valid", 50, 800, 5120]
    assert (valid["lm_loss"], valid["perplexity"]) == (math.log(32), pytest.approx(32))
    assert (test["kind"], test["perplexity"]) == ("test", math.exp(20))
    first, second = capsys.readouterr().out.splitlines()
    expected = (
        " validation loss at iteration 50 | lm loss value: 3.465736E+00 | lm loss PPL: 3.200000E+01 | tokens: 5120 |"
    )
    assert first == expected
    assert second.startswith(" test loss at iteration 100 |")


def test_a_loss_over_pairs_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for(tmp_path), loss_unit="pairs", loss_name="ipo loss") as log:
        log.log_step(STEP)
        log.log_validation(50, 800, 0.5, 24, metrics={"rewards/accuracies": 0.75})
    _, valid = rows(tmp_path)
    assert (valid["num_pairs"], valid["lm_loss"], valid["metrics"]) == (24, 0.5, {"rewards/accuracies": 0.75})
    assert not {"perplexity", "num_tokens"} & valid.keys()
    expected = "| ipo loss value: 5.000000E-01 | pairs: 24 | rewards/accuracies: 7.500000E-01 |"
    step, validation = capsys.readouterr().out.splitlines()
    assert " | ipo loss: 6.123456E+00 | " in step
    assert validation == " validation loss at iteration 50 " + expected


def test_a_users_own_loss_has_no_perplexity(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    training = dataclasses.replace(config.training, loss="my_loss.py:ascent")
    with open_log(dataclasses.replace(config, training=training)) as log:
        log.log_validation(50, 800, -3.0, 24)
    (valid,) = rows(tmp_path)
    assert (valid["lm_loss"], valid["num_tokens"]) == (-3.0, 24)
    assert "perplexity" not in valid


def test_the_first_metrics_of_a_task_stay_in_a_narrow_terminal() -> None:
    from megatron.observability.console import step_columns
    from megatron.tasks.preference import PreferenceObjective

    step = dataclasses.replace(STEP, metrics=dict.fromkeys(PreferenceObjective.metrics, -0.0123))
    speed = Speed(1.0, 1.0, 1.0, 1.0, None)
    names = [column.name for column in step_columns(step, speed, 1000, 100)]
    assert names[2:5] == ["rewards/accuracies", "rewards/margins", "rewards/chosen"]
    assert "rewards/rejected" not in names


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl


def test_row_holds_every_value_under_its_key(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path), device_peak_tflops=312.0) as log:
        log.log_step(STEP)
    (row,) = rows(tmp_path)
    tflops = 4096 * flops_per_token(config_for()) / 1e12
    assert row.pop("time") > 1.7e9
    assert row == {
        "kind": "train",
        "iteration": 10,
        "steps": 10,
        "consumed_samples": 160,
        "consumed_tokens": 20480,
        "lm_loss": 6.123456,
        "learning_rate": 1e-4,
        "global_batch_size": 16,
        "grad_norm": 1.2344,
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "iteration_time_s": 0.125,
        "samples_per_second": 128.0,
        "tokens_per_second": 128.0 * 128,
        "tokens_per_second_per_device": 4096.0,
        "tflops_per_device": pytest.approx(tflops),
        "mfu": pytest.approx(tflops / 312),
        **MEMORY,
    }


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_values_become_null(tmp_path: Path, wrong: float) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(10, lm_loss=wrong, grad_norm=wrong))
        log.log_validation(10, 160, math.nan, 128)
    train, valid = rows(tmp_path)
    assert (train["lm_loss"], train["grad_norm"], train["mfu"]) == (None, None, None)
    assert (valid["lm_loss"], valid["perplexity"]) == (None, None)


def test_each_row_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        for iteration in (10, 20, 30):
            log.log_step(at(iteration))
            assert rows(tmp_path)[-1]["iteration"] == iteration


def test_resumed_run_holds_each_iteration_once(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        for iteration in (10, 20, 30, 40):
            log.log_step(at(iteration, lm_loss=5.0))
            log.log_validation(iteration, 16 * iteration, 5.0, 128)
    with open_log(config_for(tmp_path), resumed_iteration=20) as log:
        for iteration in (30, 40, 50):
            log.log_step(at(iteration, lm_loss=4.0))
    train = [(row["iteration"], row["lm_loss"]) for row in rows(tmp_path) if row["kind"] == "train"]
    assert train == [(10, 5.0), (20, 5.0), (30, 4.0), (40, 4.0), (50, 4.0)]
    assert [row["iteration"] for row in rows(tmp_path) if row["kind"] == "valid"] == [10, 20]
    moved = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in moved] == [30, 30, 40, 40]
    assert {path.name for path in tmp_path.iterdir()} >= {"metrics.jsonl", "metrics.superseded.jsonl"}
    assert not list(tmp_path.glob("*.new"))


def test_resumption_without_superseded_rows_leaves_the_file_alone(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(10))
    before = (tmp_path / "metrics.jsonl").stat()
    open_log(config_for(tmp_path), resumed_iteration=10).close()
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"kind":"train","iteration":15,"consumed_sam', '{"kind":"train","iteration":15}'])
def test_line_torn_by_a_kill_is_moved_out(tmp_path: Path, torn: str) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(10))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    with open_log(config_for(tmp_path), resumed_iteration=20) as log:
        log.log_step(at(30))
    assert [row["iteration"] for row in rows(tmp_path)] == [10, 30]


def test_new_run_in_a_used_folder_keeps_the_old_rows_aside(tmp_path: Path) -> None:
    for lm_loss in (5.0, 4.0):
        with open_log(config_for(tmp_path)) as log:
            log.log_step(at(10, lm_loss=lm_loss))
    assert [row["lm_loss"] for row in rows(tmp_path)] == [4.0]
    assert json.loads((tmp_path / "metrics.superseded.jsonl").read_text())["lm_loss"] == 5.0


def test_run_that_starts_at_0_again_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    for lm_loss in (5.0, 4.0):
        with open_log(config_for(tmp_path)) as log:
            log.log_memory("before_model", 0, {"memory_allocated (GB)": SPREAD})
            log.log_validation(0, 0, lm_loss, 128)
    assert [(row["kind"], row.get("lm_loss")) for row in rows(tmp_path)] == [("memory", None), ("valid", 4.0)]


def test_totals_of_a_resumed_run_are_of_the_whole_run(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(10, lm_loss=3.0))
        log.log_validation(10, 160, 3.5, 128)
        log.log_step(at(20, lm_loss=1.0, elapsed_s=9.0))  # will be superseded
    with open_log(config_for(tmp_path), resumed_iteration=15) as log:
        log.log_step(at(20, steps=5, lm_loss=4.0, elapsed_s=0.5))
        totals = log.totals
    assert totals.training_s == 10 * 0.125 + 5 * 0.5
    assert (totals.lowest["train"].loss, totals.last["train"].loss, totals.last["valid"].loss) == (3.0, 4.0, 3.5)


# ---------------------------------------------------------------------------------------------------------------------
# Memory and timers

SPREAD = RankStats(min=1.0, mean=1.5, max=2.5, max_rank=3)


def test_memory_row_has_every_key_over_the_ranks(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_memory("first_step", 1, {"memory_allocated (GB)": SPREAD, "num_ooms": SPREAD})
    (row,) = rows(tmp_path)
    assert row.pop("time") > 1.7e9
    spread = {"min": 1.0, "mean": 1.5, "max": 2.5, "max_rank": 3}
    memory = {"memory_allocated (GB)": spread, "num_ooms": spread}
    assert row == {"kind": "memory", "iteration": 1, "event": "first_step", **memory}


def test_timers_are_rows_in_seconds_and_lines_in_milliseconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_timers(10, 160, {"optimizer-time": SPREAD})
        log.log_timers(20, 320, {})
    (row,) = rows(tmp_path)
    assert row["optimizer-time"] == {"min": 1.0, "mean": 1.5, "max": 2.5, "max_rank": 3}
    first, second = capsys.readouterr().out.splitlines()
    assert first == "(min, max) time across ranks (ms):"
    assert second.startswith("    optimizer ....")
    assert second.endswith(": (1000.00, 2500.00)")


# ---------------------------------------------------------------------------------------------------------------------
# Who writes, where


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for(tmp_path / "results"), writes=False) as log:
        log.log_step(STEP)
        log.log_validation(10, 160, 5.0, 128)
        log.log_memory("interval", 10, {"num_ooms": SPREAD})
        log.log_timers(10, 160, {"optimizer-time": SPREAD})
        log.message("text")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_without_results_dir_only_the_line_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_log(config_for()) as log:
        log.log_step(STEP)
        log.message("Saved")
    assert not list(tmp_path.iterdir())
    assert [line[:10] for line in capsys.readouterr().out.splitlines()] == [" iteration", "Saved"]


def test_close_twice_is_harmless(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(STEP)
        log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_pipe_gets_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for()) as log:
        log.log_step(STEP)
    captured = capsys.readouterr()
    assert "\r" not in captured.out
    assert captured.err == ""


def test_tensorboard_has_megatrons_tags_and_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log(config_for(tmp_path), device_peak_tflops=312.0) as log:
        log.log_step(at(10))
        log.log_step(at(20, lm_loss=5.0, grad_norm=None))
        log.log_validation(20, 320, 4.5, 128)
        log.log_validation(20, 320, 4.75, 128, split="test")
    with open_log(config_for(tmp_path / "pairs"), loss_unit="pairs") as log:
        log.log_validation(20, 320, 0.5, 24, metrics={"rewards/margins": 0.75})
    of_pairs = EventAccumulator(str(tmp_path / "pairs" / "tensorboard"))
    of_pairs.Reload()
    assert {tag.removesuffix(" vs samples") for tag in of_pairs.Tags()["scalars"]} == {
        "lm-loss-validation/lm loss validation",
        "metrics-validation/rewards/margins validation",
    }
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    def points(tag: str) -> list[tuple[int, Any]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert points("lm-loss-training/lm loss") == [(10, pytest.approx(6.123456)), (20, 5.0)]
    assert points("lm-loss-training/lm loss vs samples") == [(160, pytest.approx(6.123456)), (320, 5.0)]
    assert points("grad-norm/grad-norm") == [(10, pytest.approx(1.2344))]
    assert points("learning-rate/learning-rate") == [(10, pytest.approx(1e-4)), (20, pytest.approx(1e-4))]
    assert points("batch-size/batch-size") == [(10, 16), (20, 16)]
    assert points("loss-scale/loss-scale vs samples") == [(160, 1.0), (320, 1.0)]
    assert points("iteration-time/iteration-time") == [(10, 0.125), (20, 0.125)]
    assert points("lm-loss-validation/lm loss validation") == [(20, 4.5)]
    assert points("lm-loss-validation/lm loss validation ppl vs samples") == [(320, pytest.approx(math.exp(4.5)))]
    assert points("lm-loss-validation/lm loss test") == [(20, 4.75)]
    row = rows(tmp_path)[0]
    assert points("throughput/tokens_per_sec")[0] == (10, row["tokens_per_second"])
    assert points("throughput/mfu")[0] == (10, pytest.approx(row["mfu"]))


def test_tensorboard_dir_of_its_own_is_used(tmp_path: Path) -> None:
    with open_log(config_for(tmp_path / "results", tensorboard_dir=str(tmp_path / "events"))) as log:
        log.log_step(STEP)
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
    assert not (tmp_path / "results" / "tensorboard").exists()


def test_torch_is_not_imported_where_no_tensorboard_is_written() -> None:
    program = """
import sys
from megatron.options.config import *
from megatron.observability.metrics import MetricsLog
with MetricsLog(Config(), writes=True, world_size=1, device_peak_tflops=None, total_iterations=1) as log:
    log.message("ran")
config = Config(logging=LoggingConfig(results_dir="/nonexistent"))
MetricsLog(config, writes=False, world_size=1, device_peak_tflops=None, total_iterations=1)
print(sorted({"torch", "tensorboard", "deepspeed", "tqdm"} & set(sys.modules)))
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert result.stdout.splitlines() == ["ran", "[]"]


def test_a_full_disk_costs_rows_and_is_said_once_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_log(config_for(tmp_path))
    log.log_step(at(1))
    assert log._rows is not None
    own, log._rows._file = log._rows._file, os.open("/dev/full", os.O_WRONLY)
    log.log_step(at(2))
    log.log_step(at(3))
    os.close(log._rows._file)
    log._rows._file = own
    log.log_step(at(4))
    told = capsys.readouterr()
    assert told.err == "WARNING: metrics.jsonl cannot be written: No space left on device; training continues\n"
    assert told.out.count("consumed samples") == 4, "what can be told is told"
    log.close()
    assert capsys.readouterr().err == "WARNING: metrics.jsonl: 2 writes failed, and their content is lost\n"
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 4]


def test_a_deleted_results_folder_is_reported_once_a_file_and_recreated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with open_log(config_for(folder)) as log:
        log.log_step(at(1))
        shutil.rmtree(folder)
        log.log_step(at(2))
        log.log_step(at(3))
    assert capsys.readouterr().err.splitlines() == [
        f"WARNING: {folder / name} was deleted during the run: its content so far is lost. It is recreated; training "
        "continues"
        for name in ("metrics.jsonl", "train.log")
    ]
    assert [row["iteration"] for row in rows(folder)] == [2, 3]
    assert (folder / "train.log").read_text().count("consumed samples") == 2


def test_a_folder_that_cannot_be_made_again_costs_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with open_log(config_for(folder)) as log:
        shutil.rmtree(folder)
        folder.touch()  # a file in its place
        log.log_step(at(1))
        log.log_step(at(2))
    files = ("metrics.jsonl", "train.log")
    assert capsys.readouterr().err.splitlines() == [
        *(f"WARNING: {name} cannot be written: File exists; training continues" for name in files),
        *(f"WARNING: {name}: 2 writes failed, and their content is lost" for name in files),
    ]


def test_a_row_that_fits_in_part_is_taken_back(tmp_path: Path) -> None:
    """Written to its end on a disk that has just filled up, it would run into the next one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(1))
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        try:
            log.log_step(at(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.log_step(at(3))
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 3]


def test_the_graphs_that_hpu_compiled_are_in_line_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(1))
        log.log_step(at(2, compiled_graphs=17))
    lines = capsys.readouterr().out.splitlines()
    assert ["compiled graphs: 17" in line for line in lines if " iteration " in line] == [False, True]
    assert [row.get("compiled_graphs") for row in rows(tmp_path)] == [None, 17]


def test_the_spread_over_the_ranks_is_in_line_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = [rank_times(0, 1.0), rank_times(1, 0.7, data_s=0.4), rank_times(2, 3.0, stage=1)]
    times.append(rank_times(3, 3.9, stage=1))
    with open_log(config_for(tmp_path)) as log:
        log.log_step(at(1, straggler=straggler_stats(times)))
    # rank 3 is slow for its stage, the second one of which all have more to do
    told = "own time (ms): min 1000.0, median 2050.0, max 3900.0 | slowest: rank 3 on node3, 1.30 x as expected"
    assert told in capsys.readouterr().out
    [row] = rows(tmp_path)
    assert (row["slowest_rank"], row["own_time_max_s"], row["data_wait_rank"]) == (3, 3.9, 1)
    assert row["straggler_ranks"] == []
