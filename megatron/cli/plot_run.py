"""Draw one or several runs from their metrics.jsonl into one PNG: loss, learning rate, gradient norm, throughput,
memory and the time of a step.

python tools/plot_run.py RESULTS_DIR [RESULTS_DIR ...] --output run.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.command_names import command_name

METRICS_FILE = "metrics.jsonl"
ALLOCATED, PEAK = "memory_allocated (GB)", "max_memory_allocated (GB)"
TIMER_SUFFIX = "-time"
SINGLE_EVENTS = ("evaluate", "save-checkpoint")
"""Timers of what no step holds."""


class PlotError(ValueError):
    """The runs cannot be drawn: says which file, and what is wrong with it."""


Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=command_name("plot_run"),
        description="Draw training runs from their metrics.jsonl: loss, learning rate, gradient norm, throughput, "
        "memory, time of a step.",
    )
    parser.add_argument("runs", nargs="+", metavar="RESULTS_DIR", help="folder with a metrics.jsonl, or such a file")
    parser.add_argument("--output", default="run.png", metavar="PNG", help="the picture to write [run.png]")
    options = parser.parse_args(argv)
    try:
        runs = [read_run(Path(path)) for path in options.runs]
        output = Path(options.output)
        if output.suffix.lower() != ".png":
            raise PlotError(f"--output {output} does not end in .png")
        draw(dict(zip(run_names([Path(path) for path in options.runs]), runs, strict=True)), output)
    except (PlotError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


def read_run(path: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl. A last line that is still being written is left out.

    Raises PlotError if the file is missing, broken, or holds no training row.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise PlotError(f"{file} is not there; give a run's results folder (--results-dir of the training)")
    rows: list[Row] = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
                raise ValueError("no object with an iteration")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise PlotError(f"{file}, line {number}: {error}") from None
        rows.append(row)
    if not any(row.get("kind") == "train" for row in rows):
        raise PlotError(f"{file} holds no training row yet; a run writes one each log_interval steps")
    return rows


def run_names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the runs apart: folder names where these do, else the paths, else numbered paths."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    for names in ([folder.resolve().name for folder in folders], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


def curve(rows: Sequence[Row], kind: str, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one key; null, as a NaN was written, leaves a gap."""
    chosen = [row for row in rows if row.get("kind") == kind and key in row]
    values = [math.nan if row[key] is None else float(row[key]) for row in chosen]
    return [row["iteration"] for row in chosen], values


def memory_curve(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Iterations and gigabytes of one of the memory's keys, on the rank that has the most; on rank 0 where the run took
    no records of all. Of several records of one iteration the last counts.
    """
    records = [row for row in rows if row.get("kind") == "memory" and key in row]
    # what a run holds while it starts, and each time it is resumed, would be dents in the curve
    records = [row for row in records if row.get("event") in ("first_step", "interval")] or records
    recorded = {row["iteration"]: float(row[key]["max"]) for row in records}
    if recorded:
        return list(recorded), list(recorded.values())
    return curve(rows, "train", key)


def timer_curves(rows: Sequence[Row]) -> dict[str, tuple[list[int], list[float]]]:
    """Iterations and milliseconds of each timer, on the slowest rank, without those of single events such as saves."""
    timed = [row for row in rows if row.get("kind") == "timers"]
    names = dict.fromkeys(key for row in timed for key in row if key.endswith(TIMER_SUFFIX))
    return {
        name.removesuffix(TIMER_SUFFIX): (
            [row["iteration"] for row in timed if name in row],
            [1e3 * float(row[name]["max"]) for row in timed if name in row],
        )
        for name in names
        if name.removesuffix(TIMER_SUFFIX) not in SINGLE_EVENTS
    }


class Panel:
    """One diagram: what is drawn into it, and how it is labelled. Left out points (NaN) leave gaps."""

    def __init__(self, axis: Any, title: str, label: str) -> None:
        self.axis = axis
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(label)
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)

    def line(
        self, points: tuple[list[int], list[float]], color: str, label: str | None = None, style: str = "-"
    ) -> None:
        """`label` None: of a run that another panel's legend names."""
        if not points[0]:
            return
        # few points would be invisible as a line
        marker = "." if len(points[0]) < 60 else ""
        self.axis.plot(
            *points, color=color, linestyle=style, linewidth=1.3, marker=marker, markersize=5, label=label or "_"
        )

    def legend(self) -> None:
        if any(not line.get_label().startswith("_") for line in self.axis.get_lines()):
            self.axis.legend(fontsize=8, frameon=False, ncols=2)


def has_outliers(panel: Panel) -> bool:
    """Whether single values are so large that the others would lie on the axis: a logarithmic one shows both."""
    drawn = [value for line in panel.axis.get_lines() for value in line.get_ydata()]
    values = sorted(value for value in drawn if math.isfinite(value))
    return bool(values) and values[0] > 0 and values[-1] > 10 * values[len(values) // 2]


def draw(runs: dict[str, list[Row]], output: Path) -> None:
    """Write the picture. `runs`: rows by name."""
    import matplotlib

    matplotlib.use("Agg")  # no display on a training machine
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, axes = pyplot.subplots(2, 3, figsize=(16, 8.5), layout="constrained", sharex=True)
    titles = (
        ("Loss", "cross-entropy (nats per token)"),
        ("Learning rate", "learning rate"),
        ("Gradient norm", "norm before clipping"),
        ("Throughput", "tokens per second"),
        ("Memory of the fullest rank", "GB (2^30 bytes)"),
        ("Time of a step", "milliseconds"),
    )
    panels = [Panel(axis, *labels) for axis, labels in zip(axes.flat, titles, strict=True)]
    loss, rate, norm, speed, memory, step = panels
    alone = len(runs) == 1
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number % 10}"
        loss.line(curve(rows, "train", "lm_loss"), color, "training" if alone else name)
        label = "validation" if alone else f"{name}, validation"
        loss.line(curve(rows, "valid", "lm_loss"), "C1" if alone else color, label, "--")
        for panel, key in ((rate, "learning_rate"), (norm, "grad_norm"), (speed, "tokens_per_second")):
            panel.line(curve(rows, "train", key), color)
        memory.line(memory_curve(rows, PEAK), color, "peak so far" if alone else None)
        memory.line(memory_curve(rows, ALLOCATED), "C1" if alone else color, "now" if alone else None, "--")
        iterations, seconds = curve(rows, "train", "iteration_time_s")
        step.line((iterations, [1e3 * value for value in seconds]), color, "whole step" if alone else None)
        for line, (timer, points) in enumerate(timer_curves(rows).items() if alone else (), start=1):
            step.line(points, f"C{line % 10}", timer, "--")
    if not alone:
        memory.line(([0], [math.nan]), "gray", "peak so far")
        memory.line(([0], [math.nan]), "gray", "now", "--")
    for panel in (loss, memory, step):
        panel.legend()
    rate.axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    speed.axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    if has_outliers(norm):
        norm.axis.set_yscale("log")
    for panel, room in ((rate, 1.05), (speed, 1.05), (memory, 1.2), (step, 1.3)):
        panel.axis.set_ylim(0, room * panel.axis.get_ylim()[1])
    for panel in panels:
        panel.axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.axis.tick_params(labelbottom=True)
    figure.suptitle(next(iter(runs)) if alone else f"{len(runs)} runs", fontsize=13)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
