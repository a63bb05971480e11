"""The drawings of a page as one picture, by matplotlib."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import IO, Any

from megatron.plan.page.content import KINDS, MemoryByStage, PageContent, Timeline
from megatron.plan.page.marks import clean
from megatron.plan.page.timeline import Window, ticks, windows
from megatron.plan.timing.text import seconds_text
from megatron.runtime.devices import GIB

BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#f0e442"
ORANGE, RED, PURPLE, GREY, BROWN, INK = "#e69f00", "#d55e00", "#cc79a7", "#8a929c", "#8d6e4f", "#30363d"
# those of the style sheet
MEMORY_COLORS = (BLUE, SKY, GREEN, YELLOW, ORANGE, RED, PURPLE)
PART_COLORS = (BLUE, SKY, ORANGE, YELLOW, RED, ORANGE, YELLOW, PURPLE, GREY, GREY, GREEN, INK, BLUE, BROWN)
HATCHED = (5, 6, 9, 12)
"""Parts that have the colour of another."""
KIND_COLORS = {
    "forward": SKY,
    "backward": BLUE,
    "weight": PURPLE,
    "message": ORANGE,
    "reduction": GREEN,
    "update": RED,
    "other": GREY,
}
EDGE: Any = {"edgecolor": INK, "linewidth": 0.3}
DPI = 110
LONGEST = 130
"""Letters of a line over the whole width."""


def draw_picture(content: PageContent, file: IO[bytes]) -> None:
    """Write the picture as PNG: headline, memory by stage, parts of a step, timelines."""
    from matplotlib import rc_context

    # a dollar sign of a name would begin a formula
    with rc_context({"text.parse_math": False}):
        _figure(content).savefig(file, format="png", dpi=DPI)


def _figure(content: PageContent) -> Any:
    from matplotlib.figure import Figure

    heights = [_rows_height(len(content.memory.stages))]
    if content.parts:
        heights.append(1.4)
    heights += [_rows_height(len(timeline.rows)) for timeline in content.timelines]
    figure = Figure(figsize=(13, sum(heights) + 0.8), layout="constrained")
    axes = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    figure.suptitle(_headline(content), fontsize=12)
    _draw_memory(next(axes), content.memory)
    if content.parts:
        _draw_parts(next(axes), content)
    for timeline in content.timelines:
        _draw_timeline(next(axes), timeline)
    return figure


def _headline(content: PageContent) -> str:
    figures = [f"{figure.name} {figure.value}" for figure in content.figures]
    return "\n".join(
        [_label(content.title), *textwrap.wrap(clean("   ".join(figures)), LONGEST, break_on_hyphens=False)]
    )


def _label(text: str) -> str:
    """Return a text that leaves room for the drawing."""
    return textwrap.shorten(clean(text), LONGEST // 2, break_on_hyphens=False, placeholder="...")


def _rows_height(num_rows: int) -> float:
    """Return the inches of so many rows with their title and axis."""
    return 1.2 + 0.25 * min(num_rows, 40)


def _name_rows(axis: Any, title: str, names: Sequence[str]) -> None:
    axis.set_title(clean(title)[:LONGEST], fontsize=11, loc="left")
    axis.set_yticks(range(len(names)), [_label(name) for name in names], fontsize=min(9, 360 / len(names)))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_memory(axis: Any, memory: MemoryByStage) -> None:
    before = [0.0] * len(memory.stages)
    rows = range(len(memory.stages))
    for name, color in zip(memory.part_names, MEMORY_COLORS, strict=False):
        sizes = [stage.parts[name] / GIB for stage in memory.stages]
        axis.barh(rows, sizes, left=before, height=0.8, color=color, label=_label(name), **EDGE)
        before = [done + size for done, size in zip(before, sizes, strict=True)]
    if memory.device_bytes is not None and memory.usable_bytes is not None:
        axis.axvline(memory.device_bytes / GIB, color=INK, label=_label(f"memory of the {memory.device}"))
        axis.axvline(memory.usable_bytes / GIB, color=INK, linestyle="--", label="without the reserve")
    _name_rows(axis, "Memory of a rank by pipeline stage, GiB", [stage.name for stage in memory.stages])
    _legend(axis)


def _draw_parts(axis: Any, content: PageContent) -> None:
    before = 0.0
    for number, (name, seconds) in enumerate(content.parts.items()):
        if seconds > 0:
            label = _label(f"{name} {seconds_text(seconds)}")
            hatch = "//" if number in HATCHED else None
            axis.barh([0], [seconds], left=[before], color=PART_COLORS[number], hatch=hatch, label=label, **EDGE)
            before += seconds
    _name_rows(axis, "Where the time of a step goes, seconds", [""])
    axis.set_xlim(0, before)
    _legend(axis)


def _draw_timeline(axis: Any, timeline: Timeline) -> None:
    drawn = windows(timeline)
    spans = _spans(timeline, drawn)
    for (row, kind), of_row in spans.items():
        place = (row - 0.4, 0.8)
        if kind == "message":
            place = (row + 0.25, 0.15)
        axis.broken_barh(of_row, place, facecolor=KIND_COLORS[kind], **EDGE)
    shown = {kind for _, kind in spans}
    for kind, text in KINDS.items():
        if kind in shown:
            axis.barh([0], [0], color=KIND_COLORS[kind], label=text)
    title = f"{timeline.title}: {timeline.note or seconds_text(timeline.seconds)}"
    if len(drawn) > 1:
        title += ", its beginning, a part of the middle, and its end"
    _name_rows(axis, title, timeline.rows)
    axis.set_xlim(0, 1)
    marks = [(window.place(moment), seconds_text(moment)) for window in drawn for moment in ticks(window)]
    axis.set_xticks([place for place, _ in marks], [text for _, text in marks], fontsize=9)
    _legend(axis)


def _spans(timeline: Timeline, drawn: Sequence[Window]) -> Mapping[tuple[int, str], list[tuple[float, float]]]:
    """Return start and width of the bars of each row and kind, as shares of the width."""
    spans: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in timeline.bars:
        for window in drawn:
            start, end = max(bar.start, window.start), min(bar.end, window.end)
            if start < end:
                left = window.place(start)
                spans[bar.row, bar.kind].append((left, window.place(end) - left))
    return spans


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False, ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.05))
