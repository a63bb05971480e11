"""Parts that pages have in common: the file around them, headlines, facts and tables."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from megatron.plan.page.content import Fact, Figure
from megatron.plan.page.marks import element, html_text

STYLE, SCRIPT = (Path(__file__).parent / name for name in ("page.css", "page.js"))


def whole_page(title: str, children: Iterable[Element], *, further: Path | None = None) -> str:
    """Return the text of a file with its style and its script, which opens without a network.

    `further`: a style sheet and a script beside those of all pages, by the path of either without its ending.
    """
    styles, scripts = [STYLE], [SCRIPT]
    if further is not None:
        styles.append(further.with_suffix(".css"))
        scripts.append(further.with_suffix(".js"))
    style, script = ("\n".join(path.read_text(encoding="utf-8") for path in paths) for paths in (styles, scripts))
    # nothing is loaded, and no script runs but this one, whatever the names in a config are
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    body = element("body", element("main", *children), element("script", script))
    return html_text(element("html", head, body, lang="en"))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def header(title: str, figures: Iterable[Figure]) -> Element:
    """Return the title with the headlines below it."""
    listed = element("dl", class_="figures")
    for figure in figures:
        value = element("dd", element("strong", figure.value), " ", element("span", figure.note))
        listed.append(element("div", element("dt", figure.name), value))
    return element("header", element("h1", title), listed)


def section(title: str, *children: Element) -> Element:
    return element("section", element("h2", title), *children)


def facts_table(facts: Iterable[Fact]) -> Element:
    """Return a line for each fact."""
    body = element("tbody")
    for fact in facts:
        row = element("tr", element("th", fact.name, scope="row"), element("td", fact.text))
        if not fact.name:
            row.set("class", "continued")
        body.append(row)
    return element("table", body, class_="facts")


def number_cell(text: str, value: float) -> Element:
    """Return a cell; `value`: by which the script sorts."""
    return element("td", text, class_="number", data_value=f"{value!r}")


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[Element]], *, is_sortable: bool = False
) -> Element:
    """Return a table that scrolls within itself where the page is narrower."""
    head = element("tr")
    for name, cell in zip(heads, rows[0], strict=True):
        head.append(element("th", name, scope="col", class_=cell.get("class", "")))
    body = element("tbody", *[element("tr", *row) for row in rows])
    made = element("table", element("caption", caption), element("thead", head), body)
    if is_sortable:
        made.set("class", "sortable")
    return element("div", made, class_="scroller", tabindex="0", role="group", aria_label=caption)
