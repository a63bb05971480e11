"""The starts of a run along its wall time: when each began, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from xml.etree.ElementTree import Element

from megatron.observability.report.recorded import ReportedRun, RunStart
from megatron.plan.campaign.failures import duration
from megatron.plan.page.charts import legend
from megatron.plan.page.marks import element, percent
from megatron.plan.page.parts import number_cell, table

KINDS = {
    "done": "trained to the end",
    "stopped": "stopped by a signal, a limit or validations",
    "failed": "ended by a fault",
    "open": "no end is recorded",
}
"""Classes of the bars, with the words of the legend."""
ROW = 26
LEAST_SHARE = 0.004
"""Part of the drawing that a start takes at least, so that one of seconds is seen beside days."""


def time_line(run: ReportedRun) -> Element:
    """Return a bar for each start, along the time since the first."""
    began = run.starts[0].began_s
    ends = [start.began_s if start.ended_s is None else start.ended_s for start in run.starts]
    whole = max(max(ends) - began, 1.0)
    drawing = element("svg", height=ROW, width="100%", role="img", aria_label=f"starts of {run.name}")
    drawing.append(element("rect", class_="ground", x=0, width="100%", y=4, height=ROW - 8))
    for start, end in zip(run.starts, ends, strict=True):
        x, width = start.began_s - began, max(end - start.began_s, LEAST_SHARE * whole)
        title = element("title", f"start {start.number + 1}, {moment(start.began_s)}: {start.cause}")
        place = {"x": percent(min(x, (1 - LEAST_SHARE) * whole), whole), "width": percent(width, whole)}
        drawing.append(element("rect", title, class_=f"start {start.kind}", y=4, height=ROW - 8, **place))
    used = {start.kind for start in run.starts}
    names = legend([(f"start {kind}", text) for kind, text in KINDS.items() if kind in used])
    axis = element("div", element("span", moment(began)), element("span", f"{duration(whole)} later"), class_="across")
    return element("div", names, drawing, axis, class_="history")


def starts_table(run: ReportedRun) -> Element:
    """Return a row for each start."""
    heads = ["start", "began", "lasted", "iterations", "restart", "ranks", "layout", "why it ended"]
    return table(f"Starts of {run.name}", heads, [_start_row(start) for start in run.starts])


def _start_row(start: RunStart) -> list[Element]:
    first, last = start.iterations
    until = "?" if last is None else f"{last:,}"
    lasted = 0.0 if start.ended_s is None else start.ended_s - start.began_s
    ranks, restart = start.row.get("world_size"), start.row.get("restart")
    return [
        number_cell(str(start.number + 1), start.number),
        element("td", moment(start.began_s)),
        number_cell(duration(lasted) if lasted else "?", lasted),
        number_cell(f"{first:,} to {until}", first),
        element("td", "by its agents" if restart else "by a command"),
        element("td", f"{ranks} on {len(hosts_of(start))}" if isinstance(ranks, int) else ""),
        element("td", layout_text(start.row)),
        element("td", start.cause, class_="long"),
    ]


def hosts_of(start: RunStart) -> Sequence[str]:
    hosts = start.row.get("hosts")
    return list(hosts) if isinstance(hosts, dict) else []


def layout_text(row: Mapping[str, Any]) -> str:
    """Return 'tensor 2, pipeline 2': the sizes of a start's layout that are not one."""
    layout = row.get("layout")
    if not isinstance(layout, dict):
        return ""
    sizes = [f"{name.replace('_', ' ')} {size}" for name, size in layout.items() if size not in (0, 1)]
    return ", ".join(sizes) or "one rank"


def moment(time_s: float) -> str:
    """Return '2026-11-26 07:28:01 UTC'."""
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
