"""Draw one or several runs from their metrics.jsonl: loss, learning rate, gradient norm and throughput in one PNG.

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

METRICS_FILE = "metrics.jsonl"


class PlotError(ValueError):
    """The runs cannot be drawn: says which file, and what is wrong with it."""


Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw training runs from their metrics.jsonl: loss, learning rate, gradient norm, throughput."
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


def draw(runs: dict[str, list[Row]], output: Path) -> None:
    """Write the picture. `runs`: rows by name."""
    import matplotlib

    matplotlib.use("Agg")  # no display on a training machine
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5), layout="constrained", sharex=True)
    loss, rate, norm, speed = axes.flat
    alone = len(runs) == 1
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number % 10}"
        # single points would be invisible as a line
        points = {"color": color, "linewidth": 1.3, "marker": "." if len(rows) < 60 else "", "markersize": 5}
        loss.plot(*curve(rows, "train", "lm_loss"), label="training" if alone else name, **points)
        validation = curve(rows, "valid", "lm_loss")
        if validation[0]:
            loss.plot(
                *validation,
                label="validation" if alone else f"{name}, validation",
                color="C1" if alone else color,
                linestyle="--",
                marker="o",
                markersize=4,
                linewidth=1.3,
            )
        for axis, key in ((rate, "learning_rate"), (norm, "grad_norm"), (speed, "tokens_per_second")):
            axis.plot(*curve(rows, "train", key), **points)
    titles = (
        (loss, "Loss", "cross-entropy (nats per token)"),
        (rate, "Learning rate", "learning rate"),
        (norm, "Gradient norm", "norm before clipping"),
        (speed, "Throughput", "tokens per second"),
    )
    for axis, title, label in titles:
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    loss.legend(fontsize=9, frameon=False)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in (rate, speed):
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    for axis in (norm, speed):
        axis.set_xlabel("iteration")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(next(iter(runs)) if alone else f"{len(runs)} runs", fontsize=13)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
