"""Pictures of runs, from the rows of their metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.observability.console import TIMER_SUFFIX
from megatron.runtime.accelerator import ALLOCATED, MAX_ALLOCATED
from megatron.runtime.files import parse_json, replacing
from megatron.runtime.result_files import METRICS_FILE

SINGLE_EVENTS = ("evaluate", "save-checkpoint", "keep-copy")
"""Timers that are not part of a step."""


class PlotError(ValueError):
    """A run that cannot be drawn: the file, and what is wrong with it."""


Row = dict[str, Any]
Points = tuple[list[int], list[float]]
"""Iterations and values. NaN leaves a gap."""


def read_run(path: Path, *, needs_steps: bool = True) -> list[Row]:
    """Return the rows of a run's metrics.jsonl, without a last line that is still being written.

    Raises PlotError if the file is missing, broken, or holds no training row although it needs one.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise PlotError(f"{file} does not exist; give a run's results folder (--results-dir of the training)")
    rows: list[Row] = []
    for number, line in enumerate(
        file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), start=1
    ):
        try:
            rows.append(_parsed(line))
        except ValueError as error:
            if not line.endswith("\n"):  # the run is still writing it
                break
            raise PlotError(f"{file}, line {number}: {error}") from None
    if needs_steps and not any(row.get("kind") == "train" for row in rows):
        raise PlotError(f"{file} has no training row; a run writes one every log_interval steps")
    return rows


def _parsed(line: str) -> Row:
    """Return a row. Raises ValueError."""
    row = parse_json(line)
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
        raise ValueError("not an object with an iteration")
    return row


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return short, distinct names: of the folders, else their paths, else numbered paths."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    for names in ([folder.resolve().name for folder in folders], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


def curve(rows: Sequence[Row], kind: str, key: str) -> Points:
    """Return the values of a key. null, which stands for NaN, leaves a gap."""
    chosen = [row for row in rows if row.get("kind") == kind and key in row]
    values = [math.nan if row[key] is None else float(row[key]) for row in chosen]
    return [row["iteration"] for row in chosen], values


def memory_curve(rows: Sequence[Row], key: str, which: str = "max") -> Points:
    """Return the gigabytes of a memory key over the ranks: their min, mean or max.

    Of several records of one iteration the last counts.
    """
    records = [row for row in rows if row.get("kind") == "memory" and isinstance(row.get(key), dict)]
    # records of a start or a resume would be dents in the curve
    records = [row for row in records if row.get("event") in ("first_step", "interval")] or records
    recorded = {row["iteration"]: float(row[key][which]) for row in records if row[key].get(which) is not None}
    return list(recorded), list(recorded.values())


def timer_curves(rows: Sequence[Row]) -> dict[str, Points]:
    """Return the milliseconds of each timer on the slowest rank, without single events such as saves."""
    curves: dict[str, Points] = {}
    for row in rows:
        if row.get("kind") != "timers":
            continue
        for key, stats in row.items():
            name = key.removesuffix(TIMER_SUFFIX)
            if name != key and name not in SINGLE_EVENTS:
                iterations, values = curves.setdefault(name, ([], []))
                iterations.append(row["iteration"])
                values.append(1e3 * float(stats["max"]))
    return curves


@dataclass(frozen=True)
class Style:
    """Colours and labels of one run's curves."""

    color: str
    second: str
    """Colour of validations, and of the memory of now."""
    labels: Mapping[str, str]
    """By curve; one without a label is named by another panel's legend."""
    shows_timers: bool = False


ALONE = Style(
    "C0",
    "C1",
    {"train": "training", "valid": "validation", "peak": "peak so far", "now": "now", "step": "whole step"},
    shows_timers=True,
)
"""A single run, whose curves are labelled by content."""


def styles_of(names: Sequence[str]) -> list[Style]:
    """Return the styles of several runs, which differ in colour and are labelled by name, or of a single one."""
    if len(names) == 1:
        return [ALONE]
    colors = [f"C{number % 10}" for number in range(len(names))]
    return [
        Style(color, color, {"train": name, "valid": f"{name}, validation"})
        for color, name in zip(colors, names, strict=True)
    ]


class Panel:
    """One diagram of the picture."""

    def __init__(self, axis: Any, title: str, label: str) -> None:
        self.axis = axis
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(label)
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)

    def line(self, points: Points, color: str, label: str | None = None, style: str = "-") -> None:
        """Draw a curve. `label` None: another panel's legend names the run."""
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

    def has_outliers(self) -> bool:
        """Return True if a logarithmic axis is needed: single values are so large that the others would be flat."""
        drawn = [value for line in self.axis.get_lines() for value in line.get_ydata()]
        values = sorted(value for value in drawn if math.isfinite(value))
        # against the median: a few steps of ten times the norm would press all others flat
        return bool(values) and values[0] > 0 and values[-1] > 10 * values[len(values) // 2]


TITLES = (
    ("Loss", "cross-entropy (nats per token)"),
    ("Learning rate", "learning rate"),
    ("Gradient norm", "norm before clipping"),
    ("Throughput", "tokens per second"),
    ("Memory of the fullest rank", "GB (2^30 bytes)"),
    ("Time of a step", "milliseconds"),
)


def draw_loss(runs: dict[str, list[Row]], output: Path) -> None:
    """Write a small picture of the loss alone. `runs`: rows by name."""
    figure, axis = pyplot().subplots(figsize=(8, 4), layout="constrained")
    panel = Panel(axis, *TITLES[0])
    for rows, style in zip(runs.values(), styles_of(list(runs)), strict=True):
        draw_loss_of(panel, rows, style)
    panel.legend()
    save(figure, output, dpi=80)


def draw_experts(runs: dict[str, list[Row]], output: Path) -> None:
    """Write the picture of the last loads of experts, by layer: of each run a row, with its largest share over time.

    Raises PlotError if a run has none.
    """
    figure, axes = pyplot().subplots(
        len(runs), 2, figsize=(14, 4 * len(runs)), layout="constrained", squeeze=False, width_ratios=(2, 1)
    )
    for (name, rows), (picture, over_time) in zip(runs.items(), axes, strict=True):
        loads = [row for row in rows if row.get("kind") == "experts"]
        if not loads:
            raise PlotError(f"{name} has no loads of experts; a run with --num-experts writes them")
        last = loads[-1]
        layers, shares = list(last["shares"]), list(last["shares"].values())
        image = picture.imshow(shares, cmap="RdBu_r", vmin=0, vmax=2 * last["balanced"], aspect="auto")
        picture.set_title(f"{name}: share of the tokens of each expert, iteration {last['iteration']}", fontsize=11)
        picture.set_xlabel("expert")
        picture.set_ylabel("layer")
        picture.set_yticks(range(len(layers)), layers)
        figure.colorbar(image, ax=picture, label=f"white: {last['balanced']:.3g}, all used alike")
        panel = Panel(over_time, "Largest share of an expert", "share of the tokens")
        steps = [row for row in rows if row.get("kind") == "train" and "experts" in row]
        largest = [float(row["experts"]["largest_share"]) for row in steps]
        panel.line(([row["iteration"] for row in steps], largest), ALONE.color)
    save(figure, output, dpi=100)


def draw(runs: dict[str, list[Row]], output: Path) -> None:
    """Write the picture of all diagrams. `runs`: rows by name."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, axes = pyplot().subplots(2, 3, figsize=(16, 8.5), layout="constrained", sharex=True)
    panels = [Panel(axis, *labels) for axis, labels in zip(axes.flat, TITLES, strict=True)]
    loss, rate, norm, speed, memory, step = panels
    for rows, style in zip(runs.values(), styles_of(list(runs)), strict=True):
        draw_run(panels, rows, style)
    title = next(iter(runs))
    if len(runs) > 1:
        title = f"{len(runs)} runs"
        # the curves have the colours of runs, so their kinds are named without a colour
        memory.line(([0], [math.nan]), "gray", "peak so far")
        memory.line(([0], [math.nan]), "gray", "now", "--")
    for panel in (loss, memory, step):
        panel.legend()
    rate.axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    speed.axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    if norm.has_outliers():
        norm.axis.set_yscale("log")
    # room above the curves for the legends
    for panel, room in ((rate, 1.05), (speed, 1.05), (memory, 1.2), (step, 1.3)):
        panel.axis.set_ylim(0, room * panel.axis.get_ylim()[1])
    for panel in panels:
        panel.axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        # sharex hides the numbers of the upper row
        panel.axis.tick_params(labelbottom=True)
    figure.suptitle(title, fontsize=13)
    save(figure, output, dpi=110)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # a training machine has no display
    from matplotlib import pyplot as module

    return module


def save(figure: Any, output: Path, dpi: int) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as file:
        figure.savefig(file, format="png", dpi=dpi)
    pyplot().close(figure)


def draw_loss_of(panel: Panel, rows: Sequence[Row], style: Style) -> None:
    """Add the loss of a run."""
    panel.line(curve(rows, "train", "lm_loss"), style.color, style.labels["train"])
    panel.line(curve(rows, "valid", "lm_loss"), style.second, style.labels["valid"], "--")


def draw_run(panels: Sequence[Panel], rows: Sequence[Row], style: Style) -> None:
    """Add all curves of a run."""
    loss, rate, norm, speed, memory, step = panels
    draw_loss_of(loss, rows, style)
    for panel, key in ((rate, "learning_rate"), (norm, "grad_norm"), (speed, "tokens_per_second")):
        panel.line(curve(rows, "train", key), style.color)
    for key, color, label, dashes in (
        (MAX_ALLOCATED, style.color, "peak", "-"),
        (ALLOCATED, style.second, "now", "--"),
    ):
        points = memory_curve(rows, key)
        if not points[0]:  # the run recorded rank 0 alone
            points = curve(rows, "train", key)
        memory.line(points, color, style.labels.get(label), dashes)
    iterations, seconds = curve(rows, "train", "iteration_time_s")
    step.line((iterations, [1e3 * value for value in seconds]), style.color, style.labels.get("step"))
    if style.shows_timers:
        for line, (timer, points) in enumerate(timer_curves(rows).items(), start=1):
            step.line(points, f"C{line % 10}", timer, "--")
