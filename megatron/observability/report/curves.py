"""Curves over the iterations of a run, as elements of a page."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from megatron.plan.page.charts import legend
from megatron.plan.page.marks import element, percent

WIDTH, HEIGHT = 1000, 220
"""Units of a drawing, which is stretched to its place on the page."""
MOST_POINTS = 1_000
"""Points of a curve: of more the smallest and the largest of each stretch are drawn, so that no peak is lost."""
MOST_COLORS = 8


@dataclass(frozen=True)
class Curve:
    """Values by iteration. NaN leaves a gap."""

    name: str
    kind: str
    """Class that gives its colour, and `dashed` or `faint` behind it."""
    iterations: Sequence[int]
    values: Sequence[float]


def color(number: int) -> str:
    """Return the class of a run's colour."""
    return f"c{number % MOST_COLORS}"


def curve_chart(title: str, unit: str, curves: Sequence[Curve], *, from_zero: bool = False) -> Element | None:
    """Return a diagram; None: there is nothing to draw. `from_zero`: the axis begins there."""
    drawn = [curve for curve in curves if any(map(math.isfinite, curve.values))]
    if not drawn:
        return None
    scale = _Scale.of([value for curve in drawn for value in curve.values if math.isfinite(value)], from_zero=from_zero)
    first = min(curve.iterations[0] for curve in drawn)
    axis = range(first, max(max(curve.iterations[-1] for curve in drawn), first + 1))
    points = [_thinned(curve) for curve in drawn]
    drawing = element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img", aria_label=title)
    drawing.extend(_ticks(scale))
    drawing.extend(_line(curve, own, axis, scale) for curve, own in zip(drawn, points, strict=True))
    caption = element("figcaption", element("strong", title), f" {unit}{scale.note}")
    figure = element("figure", caption, class_="chart", data_first=axis.start, data_last=axis.stop)
    # for the script, which shows the values at the pointer
    figure.set("data-curves", _recorded(drawn, points))
    if len(drawn) > 1:
        figure.append(legend([(curve.kind, curve.name) for curve in drawn]))
    across = map(functools.partial(element, "span"), (f"{axis.start:,}", "iteration", f"{axis.stop:,}"))
    figure.append(element("div", _labels(scale), drawing, class_="plot"))
    figure.append(element("div", *across, class_="across"))
    figure.append(element("p", "\N{NO-BREAK SPACE}", class_="readout"))
    return figure


def _recorded(curves: Sequence[Curve], points: Sequence[Sequence[tuple[int, float]]]) -> str:
    finite = [[[x, y] for x, y in own if math.isfinite(y)] for own in points]
    return json.dumps([{"name": curve.name, "points": own} for curve, own in zip(curves, finite, strict=True)])


def _ticks(scale: _Scale) -> Iterator[Element]:
    for tick in scale.ticks:
        y = f"{scale.place(tick):.1f}"
        yield element("line", class_="tick", x1=0, x2=WIDTH, y1=y, y2=y)


def _line(curve: Curve, points: Sequence[tuple[int, float]], axis: range, scale: _Scale) -> Element:
    """Return a curve, whose parts between its gaps are lines of their own."""
    group = element("g", element("title", curve.name), class_=f"curve {curve.kind}")
    for stretch in _stretches(points):
        places = [(WIDTH * (x - axis.start) / (axis.stop - axis.start), scale.place(y)) for x, y in stretch]
        if len(places) == 1:  # a line of one point would not be seen
            places.append((places[0][0] + 2, places[0][1]))
        group.append(element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places)))
    return group


def _labels(scale: _Scale) -> Element:
    """Return the numbers of the axis, each at the height of its line."""
    drawing = element("svg", class_="labels", width=64, height="100%", aria_hidden="true")
    for tick in scale.ticks:
        y = percent(scale.place(tick), HEIGHT)
        drawing.append(element("text", number_text(tick), class_="last", x=60, y=y, dy="0.35em"))
    return drawing


@dataclass(frozen=True)
class _Scale:
    """Axis of values."""

    low: float
    high: float
    is_log: bool
    ticks: Sequence[float]

    @classmethod
    def of(cls, values: Sequence[float], *, from_zero: bool) -> _Scale:
        # after the first lines, so that a page of other things does without
        from matplotlib.ticker import LogLocator, MaxNLocator

        low, high = min(values), max(values)
        # single values so large that all others would be flat
        if low > 0 and not from_zero and high > 10 * sorted(values)[len(values) // 2]:
            ticks = [tick for tick in LogLocator(numticks=6).tick_values(low, high) if low <= tick <= high]
            return cls(low, high, True, ticks)
        if from_zero:
            low = min(0.0, low)
        if low == high:
            low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
        ticks = [float(tick) for tick in MaxNLocator(nbins=5).tick_values(low, high)]
        return cls(ticks[0], ticks[-1], False, ticks)

    @property
    def note(self) -> str:
        return " (logarithmic)" if self.is_log else ""

    def place(self, value: float) -> float:
        """Return the distance from the upper edge."""
        if self.is_log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
        else:
            low, high = self.low, self.high
        return HEIGHT * (1 - (value - low) / (high - low))


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    """Return the points that are drawn."""
    points = list(zip(curve.iterations, curve.values, strict=True))
    if len(points) <= MOST_POINTS:
        return points
    chosen = []
    size = math.ceil(2 * len(points) / MOST_POINTS)
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if len(finite) < len(stretch):
            # the gap is seen
            chosen.append(next(point for point in stretch if not math.isfinite(point[1])))
        if finite:
            ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
            chosen += sorted(ends)
    return sorted(chosen, key=lambda point: point[0])


def _stretches(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Return the parts of a curve between its gaps."""
    stretches: list[list[tuple[int, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def number_text(value: float) -> str:
    """Return a number as short as its size needs."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"
