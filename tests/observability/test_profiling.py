"""Traces: of the steps and ranks asked for, whole or not at all."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.observability.profiling import Profile, trace_file
from megatron.observability.timers import StepTimers
from megatron.options.config import LoggingConfig


def options(folder: Path, **more: Any) -> LoggingConfig:
    return LoggingConfig(results_dir=str(folder), profile=True, profile_step_start=3, profile_step_end=5, **more)


def run(logging: LoggingConfig, rank: int, first: int, last: int) -> None:
    """Iterations first to last, each an operator that names its size."""
    with Profile(logging, rank=rank, iteration=first - 1) as profile:
        for iteration in range(first, last + 1):
            torch.ones(iteration, iteration) @ torch.ones(iteration, iteration)
            profile.step(iteration)


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((folder / trace_file(rank)).read_bytes()))
    return [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]


def test_chosen_steps_on_chosen_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        run(options(tmp_path, profile_ranks=(0, 2), pytorch_profiler_collect_shapes=True), rank, 1, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [trace_file(0), trace_file(2)]
    for rank in (0, 2):
        assert [event["args"]["Input Dims"] for event in events(tmp_path, rank)] == [[[3, 3]] * 2, [[4, 4]] * 2]


@pytest.mark.parametrize(("first", "traced"), [(1, 2), (3, 2), (4, 1), (5, None)])
def test_run_that_resumes_among_the_steps_traces_the_rest(tmp_path: Path, first: int, traced: int | None) -> None:
    run(options(tmp_path), 0, first, 6)
    assert (len(events(tmp_path, 0)) if traced else list(tmp_path.iterdir())) == (traced or [])


def test_steps_and_phases_are_marked(tmp_path: Path) -> None:
    timers = StepTimers(0, torch.device("cpu"), marks=True)
    with Profile(options(tmp_path), rank=0, iteration=0) as profile:
        for iteration in range(1, 6):
            with profile.mark(iteration), timers.on_host("batch-generator"), timers("forward-compute"):
                pass
            profile.step(iteration)
    trace = json.loads(gzip.decompress((tmp_path / trace_file(0)).read_bytes()))
    marks = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    phases = ["batch-generator", "forward-compute"]
    assert sorted(marks) == sorted(["ProfilerStep#3", "ProfilerStep#4", *phases, *phases])


def test_run_that_ends_among_the_steps_keeps_them(tmp_path: Path) -> None:
    run(options(tmp_path), 0, 1, 3)
    assert len(events(tmp_path, 0)) == 1


def test_shapes_and_stacks_only_where_asked(tmp_path: Path) -> None:
    run(options(tmp_path), 0, 1, 4)
    assert "Input Dims" not in events(tmp_path, 0)[0]["args"]
    text = gzip.decompress((tmp_path / trace_file(0)).read_bytes())
    assert b"test_profiling.py" not in text
    run(options(tmp_path, pytorch_profiler_collect_callstack=True), 0, 1, 4)
    text = gzip.decompress((tmp_path / trace_file(0)).read_bytes())
    assert b"test_profiling.py" in text


def test_disk_that_is_full_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", refuse)
    with caplog.at_level(logging.WARNING):
        run(options(tmp_path), 0, 1, 6)
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_off_by_default(tmp_path: Path) -> None:
    run(LoggingConfig(results_dir=str(tmp_path)), 0, 1, 6)
    assert list(tmp_path.iterdir()) == []
