"""Reading of a page as a browser would: its elements, and a Chromium if one is installed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "br", "img", "input", "link", "hr"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list[Node] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str, class_: str | None = None) -> list[Node]:
        found = [
            node
            for node in self.children
            if node.tag == tag and (class_ is None or class_ in node.attributes.get("class", "").split())
        ]
        return found + [node for child in self.children for node in child.all(tag, class_)]

    @property
    def text(self) -> str:
        return "".join([*self.texts, *(child.text for child in self.children)])


class Page(HTMLParser):
    """The elements of a page, each of which must end where it should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Node("page", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"not ended: {[node.tag for node in self._open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(node.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        node = self._open.pop()
        assert node.tag == tag, f"</{tag}> ends <{node.tag}>"

    def handle_data(self, data: str) -> None:
        self._open[-1].texts.append(data)

    def table(self, caption: str) -> list[list[Node]]:
        """Return the cells of the body of a table, by row."""
        (table,) = [each for each in self.root.all("table") if [head.text for head in each.all("caption")] == [caption]]
        (body,) = table.all("tbody")
        return [row.children for row in body.children]


class Browser:
    """A tab of a Chromium, driven by its debugging pipe: messages of JSON, each ended by NUL."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._received, self._number = b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            received = os.read(self._reading, 1 << 16)
            assert received, "the browser has ended"
            self._received += received
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, page: Path | str, width: int, scheme: str) -> None:
        """Open a file, or an address."""
        self._session = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next())

    def named(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Browser]:
    """Run a Chromium without a window until the block ends."""
    commands, writing = os.pipe()
    reading, answers = os.pipe()
    options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder}"
    # it reads descriptor 3, and writes descriptor 4
    script = f'exec "$0" {options} 3<&{commands} 4>&{answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, program],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(reading, writing)
    finally:
        os.close(writing)
        os.close(reading)
        process.terminate()
        process.wait(60)
