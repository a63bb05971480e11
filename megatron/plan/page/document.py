"""The page: one HTML file with its style, its drawings and its script, which opens without a network.

Everything is on it without the script, which sorts the list of layouts and enlarges timelines.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from megatron.plan.page.charts import legend, memory_chart, parts_chart
from megatron.plan.page.content import Compared, LayoutRow, MemoryByStage, PageContent, gib_text
from megatron.plan.page.marks import element, html_text
from megatron.plan.page.timeline import timeline_chart
from megatron.plan.timing.text import seconds_text

FILES = Path(__file__).parent


def page_text(content: PageContent) -> str:
    """Return the text of the file."""
    style, script = ((FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # nothing is loaded, and no script runs but this one, whatever the names in a config are
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", content.title),
        element("style", style),
    )
    sections = [section for section in _sections(content) if section is not None]
    main = element("main", _header(content), *sections)
    return html_text(element("html", head, element("body", main, element("script", script)), lang="en"))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(content: PageContent) -> Element:
    figures = element("dl", class_="figures")
    for figure in content.figures:
        value = element("dd", element("strong", figure.value), " ", element("span", figure.note))
        figures.append(element("div", element("dt", figure.name), value))
    return element("header", element("h1", content.title), figures)


def _sections(content: PageContent) -> Iterator[Element | None]:
    # what a search is for; the other sections are on its first layout
    if content.layouts:
        yield _layouts_section(content)
    yield _run_section(content)
    yield _memory_section(content.memory)
    if content.parts:
        yield _parts_section(content)
    if content.timelines:
        yield _section("One step", *map(timeline_chart, content.timelines))
    if content.compared:
        yield _compared_section(content.compared, content.measured_in)


def _section(title: str, *children: Element) -> Element:
    return element("section", element("h2", title), *children)


def _run_section(content: PageContent) -> Element:
    body = element("tbody")
    for fact in content.facts:
        row = element("tr", element("th", fact.name, scope="row"), element("td", fact.text))
        if not fact.name:
            row.set("class", "continued")
        body.append(row)
    return _section("The run", element("table", body, class_="facts"))


def _memory_section(memory: MemoryByStage) -> Element:
    shown = [(f"m{number}", name) for number, name in enumerate(memory.part_names)]
    notes = element("p", _memory_text(memory))
    heads = ["stage", *memory.part_names, "total, GiB"]
    has_host = any(stage.host_bytes for stage in memory.stages)
    if has_host:
        heads.append("host")
    heads += ["peak", "holds"]
    rows = []
    for stage in memory.stages:
        sizes = [*stage.parts.values(), stage.total]
        if has_host:
            sizes.append(stage.host_bytes)
        cells = [_number(gib_text(size), size) for size in sizes]
        rows.append(
            [
                element("th", stage.name, scope="row"),
                *cells,
                element("td", stage.peak),
                element("td", stage.holds, class_="holds"),
            ]
        )
    table = _table("Memory of each rank by pipeline stage, GiB", heads, rows)
    return _section("Memory of a rank by pipeline stage", notes, legend(shown), memory_chart(memory), table)


def _memory_text(memory: MemoryByStage) -> str:
    text = f"GiB on each device at the peak of a step; {memory.fullest.name} needs most."
    if memory.device_bytes is None or memory.usable_bytes is None:
        return f"{text} The device's own memory is unknown."
    return (
        f"{text} Solid line: {gib_text(memory.device_bytes)} GiB of the {memory.device}; dashed: "
        f"{gib_text(memory.usable_bytes)} GiB, without the reserve for allocators, libraries and kernels."
    )


def _parts_section(content: PageContent) -> Element:
    whole = sum(content.parts.values())
    kinds = [f"p{number}" for number, _ in enumerate(content.parts)]
    spent = [(kind, name) for kind, (name, seconds) in zip(kinds, content.parts.items(), strict=True) if seconds > 0]
    rows = [
        [element("th", name, scope="row"), _number(seconds_text(each), each), _number(f"{each / whole:.1%}", each)]
        for name, each in content.parts.items()
        if each > 0
    ]
    table = _table("Time of a step by part", ["part", "time", "share"], rows)
    return _section("Where the time of a step goes", legend(spent), parts_chart(content.parts, kinds), table)


def _compared_section(compared: Sequence[Compared], folder: str) -> Element:
    rows = []
    for part in compared:
        cells = [_number(seconds_text(each), each) for each in (part.predicted, part.measured)]
        rows.append([element("th", part.name, scope="row"), *cells, _ratio(part.measured, part.predicted)])
    heads = ["part", "predicted", "measured", "measured / predicted"]
    table = _table("Predicted beside measured", heads, rows)
    return _section("Predicted beside measured", element("p", f"The run in {folder}."), table)


def _ratio(measured: float, predicted: float) -> Element:
    if predicted <= 0:
        return element("td", "")
    return _number(f"{measured / predicted:.2f}", measured / predicted)


def _layouts_section(content: PageContent) -> Element:
    heads = ["rank", "layout", "time of a step", "tokens/s", "MFU", "memory, GiB", "wait", "sent, GiB", "limit"]
    rows = [_layout_row(number, layout) for number, layout in enumerate(content.layouts, start=1)]
    table = _table("Layouts, the fastest first", [*heads, "command"], rows, is_sortable=True)
    children = [element("p", "Memory: of the fullest stage. Sent: by a rank in a step."), table]
    if content.refused:
        reasons = [element("li", f"{count:,}: {reason}") for reason, count in content.refused.items()]
        children.append(element("details", element("summary", "Layouts refused, by reason"), element("ul", *reasons)))
    return _section("Layouts", *children)


def _layout_row(number: int, layout: LayoutRow) -> list[Element]:
    mfu = _number("", -1) if layout.mfu is None else _number(f"{layout.mfu:.1%}", layout.mfu)
    return [
        _number(str(number), number),
        element("th", layout.title, scope="row", class_="long"),
        _number(seconds_text(layout.seconds), layout.seconds),
        _number(f"{layout.tokens_per_second:,.0f}", layout.tokens_per_second),
        mfu,
        _number(gib_text(layout.memory_bytes), layout.memory_bytes),
        _number(f"{layout.wait:.1%}", layout.wait),
        _number(gib_text(layout.sent_bytes), layout.sent_bytes),
        _long(layout.limit),
        element("td", element("details", element("summary", "show"), element("code", layout.command))),
    ]


def _number(text: str, value: float) -> Element:
    """Return a cell; `value`: by which the script sorts."""
    return element("td", text, class_="number", data_value=f"{value!r}")


def _long(text: str) -> Element:
    return element("td", text, class_="long")


def _table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[Element]], *, is_sortable: bool = False
) -> Element:
    """Return a table that scrolls within itself where the page is narrower."""
    head = element("tr")
    for name, cell in zip(heads, rows[0], strict=True):
        head.append(element("th", name, scope="col", class_=cell.get("class", "")))
    body = element("tbody", *[element("tr", *row) for row in rows])
    table = element("table", element("caption", caption), element("thead", head), body)
    if is_sortable:
        table.set("class", "sortable")
    return element("div", table, class_="scroller", tabindex="0", role="group", aria_label=caption)
