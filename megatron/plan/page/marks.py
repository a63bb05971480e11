"""Elements of an HTML page. Text and attributes are escaped where the page is written, whatever the names hold."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that HTML forbids, or that no file in UTF-8 can hold."""


def element(tag: str, *children: Element | str, **attributes: str | float) -> Element:
    """Return an element. Attributes are named as in HTML, with `_` for `-` and at the end of Python's own words."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): str(each) for name, each in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def clean(text: str) -> str:
    """Replace what a page cannot hold by the sign for it."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def html_text(root: Element) -> str:
    """Return the text of a page. The content of style and script stays as it is: it is this room's own."""
    return "<!DOCTYPE html>\n" + clean(ElementTree.tostring(root, encoding="unicode", method="html")) + "\n"


def percent(part: float, whole: float) -> str:
    """Return a length along a drawing, which is as wide as its place on the page."""
    if whole <= 0:
        return "0%"
    return f"{100 * part / whole:.3f}".rstrip("0").rstrip(".") + "%"
