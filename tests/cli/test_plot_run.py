"""megatron-plot-run draws what metrics.jsonl holds, and reports what is wrong with it."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import plot_run
from megatron.observability import run_plots

PNG = b"\x89PNG\r\n\x1a\n"


def row(iteration: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    defaults = {"lm_loss": 5.0, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1e4}
    return {"kind": kind, "iteration": iteration, **(defaults if kind == "train" else {"lm_loss": 5.5}), **values}


def memory(iteration: int, peak: float, now: float) -> dict[str, Any]:
    return {
        "kind": "memory",
        "iteration": iteration,
        "event": "interval",
        "max_memory_allocated (GB)": {"min": 0.1, "mean": 0.2, "max": peak, "max_rank": 1},
        "memory_allocated (GB)": {"min": 0.1, "mean": 0.2, "max": now, "max_rank": 1},
    }


def write(folder: Path, *rows: dict[str, Any], tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + tail)
    return folder


def test_one_run_with_validation_becomes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", row(10), row(20), row(20, "valid"), row(30))
    output = tmp_path / "plots" / "run.png"
    assert plot_run.main([str(run), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"wrote {output}\n"


def test_a_full_disk_leaves_the_earlier_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(figure: Any, file: Any, **options: Any) -> None:
        file.write_bytes(PNG) if isinstance(file, Path) else file.write(PNG)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill)
    run, output = write(tmp_path / "run", row(10)), tmp_path / "run.png"
    output.write_bytes(b"earlier")
    assert plot_run.main([str(run), "--output", str(output)]) == 2
    assert capsys.readouterr().err == f"plot_run: {output}: No space left on device\n"
    assert output.read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.png"]


def test_the_loss_alone_is_a_small_picture_with_both_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(run_plots.pyplot(), "close", figures.append)
    run = write(tmp_path / "run", row(10), row(20), row(20, "valid"), row(30))
    output = tmp_path / "loss.png"
    assert plot_run.main([str(run), "--loss-only", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(PNG)
    assert output.stat().st_size < 60_000
    (axis,) = figures[0].axes
    assert {line.get_label(): list(line.get_xdata()) for line in axis.get_lines()} == {
        "training": [10, 20, 30],
        "validation": [20],
    }


def test_every_curve_is_on_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    on_rank_0: dict[str, Any] = {"max_memory_allocated (GB)": 3.0}
    runs = {
        "a": [
            row(10, lm_loss=6.0),
            row(20, lm_loss=None),
            row(20, "valid", lm_loss=5.25),
            row(30, lm_loss=4.0),
            memory(10, peak=0.5, now=0.5),
            {**memory(20, peak=0.1, now=0.1), "event": "after_restore"},
            memory(30, peak=2.0, now=1.0),
        ],
        "b": [row(10, lm_loss=7.0, grad_norm=2.5, iteration_time_s=0.125, **on_rank_0)],
    }
    run_plots.draw(runs, tmp_path / "run.png")
    monkeypatch.undo()
    (figure,) = kept
    loss, rate, norm, speed, memory_panel, step = figure.axes
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in loss.get_lines()]
    assert [(label, x) for label, x, _ in lines] == [("a", [10, 20, 30]), ("a, validation", [20]), ("b", [10])]
    assert [y for _, _, y in lines[1:]] == [[5.25], [7.0]]
    training = lines[0][2]
    assert (training[0], training[2]) == (6.0, 4.0)
    assert math.isnan(training[1]), "null is a gap"
    assert list(norm.get_lines()[1].get_ydata()) == [2.5]
    held = [(list(line.get_xdata()), list(line.get_ydata())) for line in memory_panel.get_lines()[:3]]
    assert held == [([10, 30], [0.5, 2.0]), ([10, 30], [0.5, 1.0]), ([10], [3.0])], "of all ranks; else of rank 0"
    assert list(step.get_lines()[0].get_ydata()) == [125.0]
    assert [axis.get_title() for axis in (loss, rate, norm, speed, memory_panel, step)] == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Memory of the fullest rank",
        "Time of a step",
    ]
    assert all(axis.get_ylabel() and axis.get_xlabel() for axis in figure.axes)
    pyplot.close(figure)


@pytest.mark.parametrize(("norms", "scale"), [([1.0, 1.5, 2.0], "linear"), ([1.0, 1.5, 30.0, 1.2], "log")])
def test_gradient_norms_with_outliers_are_drawn_on_a_logarithmic_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norms: list[float], scale: str
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    run_plots.draw({"a": [row(10 * at, grad_norm=norm) for at, norm in enumerate(norms)]}, tmp_path / "run.png")
    monkeypatch.undo()
    assert kept[0].axes[2].get_yscale() == scale
    pyplot.close(kept[0])


def test_timers_are_drawn_in_milliseconds_of_the_slowest_rank() -> None:
    spread = {"min": 0.01, "mean": 0.02, "max": 0.03, "max_rank": 1}
    rows = [
        {"kind": "timers", "iteration": 10, "forward-compute-time": spread},
        {"kind": "timers", "iteration": 20, "forward-compute-time": spread, "save-checkpoint-time": spread},
    ]
    assert run_plots.timer_curves(rows) == {"forward-compute": ([10, 20], [30.0, 30.0])}


def test_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", row(10), tail='{"kind":"train","itera')
    assert [each["iteration"] for each in run_plots.read_run(run)] == [10]


def test_a_metrics_file_may_be_given_itself(tmp_path: Path) -> None:
    run = write(tmp_path / "run", row(10))
    assert run_plots.read_run(run / "metrics.jsonl") == run_plots.read_run(run)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "does not exist; give a run's results folder"),
        ("", "has no training row"),
        ('{"kind":"valid","iteration":5,"lm_loss":1.0}\n', "has no training row"),
        ('{"kind":"train","iteration":5}\nnonsense\n{"kind":"train","iteration":6}\n', "line 2: Expecting value"),
        ('{"kind":"train","iteration":5}\nnonsense\n', "line 2: Expecting value"),
        ('[1]\n{"kind":"train","iteration":6}\n', "line 1: not an object with an iteration"),
    ],
)
def test_fault_names_the_file_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, fault: str
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    output = tmp_path / "run.png"
    assert plot_run.main([str(tmp_path), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"plot_run: {tmp_path / 'metrics.jsonl'}")
    assert fault in error
    assert not output.exists()


def test_output_must_be_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", row(10))
    assert plot_run.main([str(run), "--output", str(tmp_path / "run.svg")]) == 2
    assert "does not end in .png" in capsys.readouterr().err


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "results", tmp_path / "b" / "results"
    for path in (first, second):
        path.mkdir(parents=True)
    assert run_plots.run_names([first]) == ["results"]
    assert run_plots.run_names([first, second]) == [str(first), str(second)]
    assert run_plots.run_names([first, first]) == [f"{first} (1)", f"{first} (2)"]
