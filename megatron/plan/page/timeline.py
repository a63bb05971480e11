"""Drawing of the timeline of a step: a row for each pipeline stage.

A step of many microbatches repeats itself: of such a one the beginning, a part of the middle and the end are drawn.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from megatron.plan.page.charts import legend
from megatron.plan.page.content import KINDS, Bar, Timeline
from megatron.plan.page.marks import element, percent
from megatron.plan.timing.text import seconds_text

MOST_BARS = 3_600
"""Drawn in one timeline: some 0.5 MB of the page."""
GAP = 0.02
"""Share of the width between two windows."""
AXIS = 24
"""Height of the axis in pixels."""


class Window(NamedTuple):
    """A part of a step that is drawn, in seconds; `left` and `right` are shares of the width."""

    start: float
    end: float
    left: float
    right: float

    def place(self, moment: float) -> float:
        """Return the share of the width at which a moment is drawn."""
        return self.left + (self.right - self.left) * (moment - self.start) / (self.end - self.start)


def windows(timeline: Timeline) -> list[Window]:
    """Return the whole step, or three parts of equal length that together show at most MOST_BARS."""
    if len(timeline.bars) <= MOST_BARS:
        return [Window(0.0, timeline.seconds, 0.0, 1.0)]
    # a bar reaches into a window if it starts before the window's end, and ends after its start
    starts, ends = sorted(bar.start for bar in timeline.bars), sorted(bar.end for bar in timeline.bars)
    length = timeline.seconds / 3
    while True:
        length *= 0.9
        spans = _three_spans(timeline.seconds, length)
        if sum(bisect.bisect_left(starts, end) - bisect.bisect_right(ends, start) for start, end in spans) <= MOST_BARS:
            break
    width = (1 - 2 * GAP) / 3
    return [
        Window(start, end, number * (width + GAP), number * (width + GAP) + width)
        for number, (start, end) in enumerate(spans)
    ]


def _three_spans(seconds: float, length: float) -> list[tuple[float, float]]:
    middle = (seconds - length) / 2
    return [(0.0, length), (middle, middle + length), (seconds - length, seconds)]


def timeline_chart(timeline: Timeline) -> Element:
    """Return the drawing with its legend, in a part of the page that scrolls within itself."""
    height = _row_height(len(timeline.rows))
    drawn = windows(timeline)
    lanes = element("svg", height=height * len(timeline.rows) + AXIS, class_="lanes", role="img")
    lanes.set("aria-label", f"{timeline.title}: a timeline of {len(timeline.rows)} stages")
    for window in drawn:
        lanes.extend(_background(window, len(timeline.rows), height))
    for bar in timeline.bars:
        lanes.extend(_bar(bar, timeline.rows[bar.row], drawn, height))
    names = [element("li", name, class_=f"row{height}") for name in timeline.rows]
    scroller = element("div", lanes, class_="scroller", tabindex="0", role="group", aria_label=timeline.title)
    shown = [kind for kind in KINDS if any(bar.kind == kind for bar in timeline.bars)]
    return element(
        "figure",
        element("figcaption", *_caption(timeline, drawn)),
        legend([(kind, KINDS[kind]) for kind in shown]),
        element("div", element("ol", *names, class_="lane-names", aria_hidden="true"), scroller, class_="timeline"),
    )


def _row_height(num_rows: int) -> int:
    """Return the height of a row in pixels: one of three, which the style sheet has."""
    if num_rows <= 16:
        return 26
    if num_rows <= 40:
        return 18
    return 12


def _caption(timeline: Timeline, drawn: Sequence[Window]) -> Iterator[Element | str]:
    yield element("strong", timeline.title)
    if timeline.note:
        yield f" {timeline.note}"
    if len(drawn) > 1:
        length = seconds_text(drawn[0].end - drawn[0].start)
        yield f" The first, a middle and the last {length} of {seconds_text(timeline.seconds)}."


def _background(window: Window, num_rows: int, height: int) -> Iterator[Element]:
    """Yield the ground of a window, and its axis."""
    across = {"x": percent(window.left, 1), "width": percent(window.right - window.left, 1)}
    yield element("rect", class_="ground", y=0, height=height * num_rows, **across)
    for moment in ticks(window):
        x = percent(window.place(moment), 1)
        yield element("line", class_="tick", x1=x, x2=x, y1=0, y2=height * num_rows + 4)
        yield element("text", seconds_text(moment), x=x, y=height * num_rows + 18, class_=_anchor(window.place(moment)))


def _anchor(place: float) -> str:
    """Return the class of a text that stays within the drawing."""
    if place < 0.03:
        return "first"
    if place > 0.95:
        return "last"
    return "between"


def ticks(window: Window) -> list[float]:
    """Return round moments, about as many as have room for their texts."""
    wanted = 8 * (window.right - window.left)
    rough = (window.end - window.start) / wanted
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
    first = math.ceil(window.start / step - 1e-9)
    return [number * step for number in range(first, math.floor(window.end / step + 1e-9) + 1)]


def _bar(bar: Bar, row: str, drawn: Sequence[Window], height: int) -> Iterator[Element]:
    """Yield the bar in each window that it reaches into."""
    for window in drawn:
        start, end = max(bar.start, window.start), min(bar.end, window.end)
        if start >= end:
            continue
        left = window.place(start)
        top, tall = bar.row * height + 2, height - 4
        if bar.kind == "message":  # in the background of a pass, so below it
            top, tall = bar.row * height + height - 5, 4
        title = f"{row}, {bar.text}: {seconds_text(bar.start)} + {seconds_text(bar.end - bar.start)}"
        yield element(
            "rect",
            element("title", title),
            class_=bar.kind,
            x=percent(left, 1),
            width=percent(window.place(end) - left, 1),
            y=top,
            height=tall,
        )
