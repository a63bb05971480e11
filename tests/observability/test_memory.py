"""The memory log: every rank's numbers, at the moments that matter, wherever the run tells."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron.observability.console import memory_line
from megatron.observability.memory import MemoryLog
from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import RankStats, gather_stats
from megatron.options.config import Config, LoggingConfig, ParallelConfig, TrainingConfig
from megatron.parallel.context import ParallelContext
from megatron.runtime import accelerator
from tests import runs
from tests.ranks import RankPools

FIRST_THREE = ("memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)")


def gathered_by_rank() -> dict[str, RankStats]:
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    mine = {"rank": ctx.rank + 0.5, "one rank's": 7.0 if ctx.rank == 2 else math.nan, "nobody's": math.nan}
    return gather_stats({**mine, "equal": 3.0}, ctx)


def test_spread_is_over_the_ranks_that_have_the_number(ranks: RankPools) -> None:
    first, *others = ranks(4)(gathered_by_rank)
    assert first == {
        "rank": RankStats(0.5, 2.0, 3.5, 3),
        "one rank's": RankStats(7.0, 7.0, 7.0, 2),
        "equal": RankStats(3.0, 3.0, 3.0, 0),
    }
    assert others == [{}, {}, {}]


def log_of(results: Path) -> MetricsLog:
    config = Config(
        training=TrainingConfig(train_iters=10), logging=LoggingConfig(results_dir=str(results), log_interval=1)
    )
    return MetricsLog(config, writes=True, world_size=1, device_peak_tflops=None, total_iterations=10)


@pytest.fixture
def details(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    numbers = dict.fromkeys(FIRST_THREE, 1.0)
    monkeypatch.setattr(accelerator, "memory_details", lambda: dict(numbers))
    return numbers


def test_records_before_the_log_is_open_are_told_at_once_and_written_later(
    tmp_path: Path, details: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    memory = MemoryLog(LoggingConfig(log_memory_interval=5), ParallelContext.single())
    memory.take("before_model", 0)
    details["memory_allocated (GB)"] = 2.0
    memory.take("after_model", 0)
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()] == [
        " memory at iteration 0, before model",
        " memory at iteration 0, after model",
    ]
    with log_of(tmp_path) as log:
        memory.open(log)
        memory.take("after_optimizer", 0)
    rows = runs.rows(tmp_path, "memory")
    assert [row["event"] for row in rows] == ["before_model", "after_model", "after_optimizer"]
    assert [row["memory_allocated (GB)"]["max"] for row in rows] == [1.0, 2.0, 2.0]
    assert len(capsys.readouterr().out.splitlines()) == 1, "what was told is not told again"


def test_steps_are_recorded_once_after_the_first_and_then_at_the_interval(
    tmp_path: Path, details: dict[str, float]
) -> None:
    memory = MemoryLog(LoggingConfig(log_memory_interval=5), ParallelContext.single())
    with log_of(tmp_path) as log:
        memory.open(log)
        for iteration in range(13, 26):  # a run that resumed at 12
            memory.after_step(iteration)
    rows = [(row["event"], row["iteration"]) for row in runs.rows(tmp_path, "memory")]
    assert rows == [("first_step", 13), ("interval", 15), ("interval", 20), ("interval", 25)]


def test_interval_0_takes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(accelerator, "memory_details", lambda: pytest.fail("asked for"))
    memory = MemoryLog(LoggingConfig(log_memory_interval=0), ParallelContext.single())
    memory.take("before_model", 0)
    for iteration in range(1, 4):
        memory.after_step(iteration)
    assert capsys.readouterr().out == ""


def test_line_names_the_fullest_rank_where_they_differ() -> None:
    values = {"memory_allocated (GB)": RankStats(1.0, 1.5, 2.25, 3), "num_alloc_retries": RankStats(0.0, 0.0, 0.0, 0)}
    assert memory_line("first_step", 7, values) == (
        " memory at iteration 7, first step | memory_allocated (GB): 1 / 1.500 / 2.250 on rank 3 |"
        " num_alloc_retries: 0 |"
    )


def points(results: Path, tag: str) -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(results / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_run_records_every_moment_and_a_resumed_one_its_own(ranks: RankPools, tmp_path: Path) -> None:
    """Pipeline of two stages: both are in each record; timers, at level 2, tell the stages' work apart."""
    data, results = runs.write_dataset(tmp_path / "data"), tmp_path / "results"
    flags = f"--data-path {data} --train-iters 6 --results-dir {results} --save {tmp_path / 'saved'} --log-interval 2"
    flags += f" --load {tmp_path / 'saved'} --pipeline-model-parallel-size 2 --log-memory-interval 2"
    assert set(ranks(2)(runs.train, f"{flags} --exit-interval 3 --timing-log-level 2")) == {""}
    assert set(ranks(2)(runs.train, f"{flags} --timing-log-level 1")) == {""}
    rows = runs.rows(results, "memory")
    building = ["before_model", "after_model", "after_optimizer"]
    assert [(row["event"], row["iteration"]) for row in rows] == [
        *((event, 0) for event in building),
        ("first_step", 1),
        ("interval", 2),
        *((event, 3) for event in [*building, "after_restore"]),
        ("first_step", 4),
        ("interval", 6),
    ]
    for row in rows:
        for key in (*FIRST_THREE, "host_rss (GB)", "host_memory_available (GB)"):
            spread: dict[str, Any] = row[key]
            assert 0 < spread["min"] <= spread["mean"] <= spread["max"]
            assert spread["max_rank"] in (0, 1)
    peaks = points(results, "memory/max_memory_allocated (GB) max")
    assert len(peaks) == len(rows)
    assert peaks[-1] == (6, pytest.approx(rows[-1]["max_memory_allocated (GB)"]["max"]))

    first, *later = runs.rows(results, "timers")
    assert [row["iteration"] for row in (first, *later)] == [2, 4, 6]
    kinds = {f"{way}-{what}-time" for way in ("forward", "backward") for what in ("send", "recv")}
    assert kinds | {"grads-all-reduce-time", "embedding-grads-all-reduce-time"} < set(first)
    assert not kinds & set(later[0])
    assert "evaluate-time" in first
    for row in later:
        assert {"batch-generator-time", "forward-compute-time", "communication-time", "optimizer-time"} < set(row)
        assert row["backward-compute-time"]["min"] > 0
    assert points(results, "forward-compute-time")[0] == (2, pytest.approx(first["forward-compute-time"]["max"]))
