"""The page: one HTML file with its style, its drawings and its script, which opens without a network.

Everything is on it without the script, which sorts the list of layouts and enlarges timelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from megatron.plan.page.charts import legend, memory_chart, parts_chart
from megatron.plan.page.content import Compared, LayoutRow, MemoryByStage, PageContent, gib_text
from megatron.plan.page.marks import element
from megatron.plan.page.parts import facts_table, header, number_cell, section, table, whole_page
from megatron.plan.page.timeline import timeline_chart
from megatron.plan.timing.text import seconds_text


def page_text(content: PageContent) -> str:
    """Return the text of the file."""
    return whole_page(content.title, [header(content.title, content.figures), *_sections(content)])


def _sections(content: PageContent) -> Iterator[Element]:
    # what a search is for; the other sections are on its first layout
    if content.layouts:
        yield _layouts_section(content)
    yield _run_section(content)
    yield _memory_section(content.memory)
    if content.parts:
        yield _parts_section(content)
    if content.timelines:
        yield section("One step", *map(timeline_chart, content.timelines))
    if content.compared:
        yield _compared_section(content.compared, content.measured_in)


def _run_section(content: PageContent) -> Element:
    return section("The run", facts_table(content.facts))


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
        cells = [number_cell(gib_text(size), size) for size in sizes]
        rows.append(
            [
                element("th", stage.name, scope="row"),
                *cells,
                element("td", stage.peak),
                element("td", stage.holds, class_="holds"),
            ]
        )
    listed = table("Memory of each rank by pipeline stage, GiB", heads, rows)
    return section("Memory of a rank by pipeline stage", notes, legend(shown), memory_chart(memory), listed)


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
        [
            element("th", name, scope="row"),
            number_cell(seconds_text(each), each),
            number_cell(f"{each / whole:.1%}", each),
        ]
        for name, each in content.parts.items()
        if each > 0
    ]
    listed = table("Time of a step by part", ["part", "time", "share"], rows)
    return section("Where the time of a step goes", legend(spent), parts_chart(content.parts, kinds), listed)


def _compared_section(compared: Sequence[Compared], folder: str) -> Element:
    rows = []
    for part in compared:
        cells = [number_cell(seconds_text(each), each) for each in (part.predicted, part.measured)]
        rows.append([element("th", part.name, scope="row"), *cells, _ratio(part.measured, part.predicted)])
    heads = ["part", "predicted", "measured", "measured / predicted"]
    listed = table("Predicted beside measured", heads, rows)
    return section("Predicted beside measured", element("p", f"The run in {folder}."), listed)


def _ratio(measured: float, predicted: float) -> Element:
    if predicted <= 0:
        return element("td", "")
    return number_cell(f"{measured / predicted:.2f}", measured / predicted)


def _layouts_section(content: PageContent) -> Element:
    heads = ["rank", "layout", "time of a step", "tokens/s", "MFU", "memory, GiB", "wait", "sent, GiB", "limit"]
    rows = [_layout_row(number, layout) for number, layout in enumerate(content.layouts, start=1)]
    listed = table("Layouts, the fastest first", [*heads, "command"], rows, is_sortable=True)
    children = [element("p", "Memory: of the fullest stage. Sent: by a rank in a step."), listed]
    if content.refused:
        reasons = [element("li", f"{count:,}: {reason}") for reason, count in content.refused.items()]
        children.append(element("details", element("summary", "Layouts refused, by reason"), element("ul", *reasons)))
    return section("Layouts", *children)


def _layout_row(number: int, layout: LayoutRow) -> list[Element]:
    mfu = number_cell("", -1) if layout.mfu is None else number_cell(f"{layout.mfu:.1%}", layout.mfu)
    return [
        number_cell(str(number), number),
        element("th", layout.title, scope="row", class_="long"),
        number_cell(seconds_text(layout.seconds), layout.seconds),
        number_cell(f"{layout.tokens_per_second:,.0f}", layout.tokens_per_second),
        mfu,
        number_cell(gib_text(layout.memory_bytes), layout.memory_bytes),
        number_cell(f"{layout.wait:.1%}", layout.wait),
        number_cell(gib_text(layout.sent_bytes), layout.sent_bytes),
        _long(layout.limit),
        element("td", element("details", element("summary", "show"), element("code", layout.command))),
    ]


def _long(text: str) -> Element:
    return element("td", text, class_="long")
