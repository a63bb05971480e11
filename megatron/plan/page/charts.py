"""Bars of memory by stage, and of a step by what its time is spent on. Widths are shares of the page's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from megatron.plan.page.content import MemoryByStage, StageRow, gib_text
from megatron.plan.page.marks import element, percent
from megatron.plan.timing.text import seconds_text

ROW = 26
"""Height of a bar with its margins, in pixels."""


def memory_chart(memory: MemoryByStage) -> Element:
    """Return a bar for each stage, stacked from its parts, with the device's memory as lines."""
    limits = [size for size in (memory.device_bytes, memory.usable_bytes) if size is not None]
    whole = 1.02 * max([memory.fullest.total, *limits])
    rows = [_memory_row(stage, memory, whole) for stage in memory.stages]
    return element("div", *[cell for row in rows for cell in row], class_="bars")


def _memory_row(stage: StageRow, memory: MemoryByStage, whole: float) -> Iterator[Element]:
    """Yield the name, the bar and the sum of a stage."""
    yield element("span", stage.name)
    drawing = _drawing(f"{stage.name}: {gib_text(stage.total)} GiB")
    before = 0
    for number, (name, size) in enumerate(stage.parts.items()):
        if size:
            drawing.append(_segment(before, size, whole, f"m{number}", f"{stage.name}, {name}: {gib_text(size)} GiB"))
        before += size
    for limit, kind, text in (
        (memory.usable_bytes, "usable", "usable without the reserve"),
        (memory.device_bytes, "device", memory.device),
    ):
        if limit is not None:
            title = element("title", f"{text}: {gib_text(limit)} GiB")
            x = percent(limit, whole)
            drawing.append(element("line", title, class_=kind, x1=x, x2=x, y1=0, y2=ROW))
    yield drawing
    yield element("span", f"{gib_text(stage.total)} GiB", class_="number")


def parts_chart(parts: Mapping[str, float], kinds: Sequence[str]) -> Element:
    """Return one bar of a step. `kinds`: the class of each part."""
    whole, before = sum(parts.values()), 0.0
    drawing = _drawing(f"a step: {seconds_text(whole)}")
    for kind, (name, seconds) in zip(kinds, parts.items(), strict=True):
        if seconds > 0:
            text = f"{name}: {seconds_text(seconds)}, {seconds / whole:.1%}"
            drawing.append(_segment(before, seconds, whole, kind, text))
            before += seconds
    return element("div", drawing, class_="whole")


def _drawing(title: str) -> Element:
    return element("svg", height=ROW, width="100%", role="img", aria_label=title)


def _segment(before: float, size: float, whole: float, kind: str, title: str) -> Element:
    x, width = percent(before, whole), percent(size, whole)
    return element("rect", element("title", title), class_=kind, x=x, width=width, y=4, height=ROW - 8)


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """Return the list of classes and their words, each with its colour."""
    items = []
    for kind, text in entries:
        swatch = element(
            "svg", element("rect", class_=kind, width=14, height=14), width=14, height=14, aria_hidden="true"
        )
        items.append(element("li", swatch, " ", text))
    return element("ul", *items, class_="legend")
