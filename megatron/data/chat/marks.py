"""Marks: private-use characters around the texts of messages, which show where a template writes each of them.

A text that is marked is a leaf: a content or one of its parts, a reasoning, the name of a tool call, a string among its
arguments. If a render with marks is the plain render once the marks are removed, they show the place of every leaf.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron.data.chat.conversation import REASONING
from megatron.data.chat.template import GENERATION_MARKS, Message

Span = tuple[int, int]
"""Characters [start, end)."""

CONTENT, REASON, CALL, CUT = "content", "reasoning", "tool call", "reasoning cut off from a content"
"""Kinds of leaves. The last has no place."""

_REASONING_FIELDS = (*REASONING, "tool_plan")
_GENERATION = re.compile(f"([{GENERATION_MARKS}])")
_CLOSING_TAG = re.compile(r"(?:</[^\s<>/]+>|\[/[^\s\[\]/]+\]|<\|[^\s<>|]+\|>)\s*")
"""Tag such as </think>, which ends reasoning in a content, with the white space behind it."""

_TAG = re.compile(r"</?[^\s<>/]+>|\[/?[^\s\[\]/]+\]")
_LAST_TAGS = re.compile(rf"(?:\s*(?:{_TAG.pattern}))+$")


class Alphabet:
    """Characters that serve as marks."""

    def __init__(self, first: int, last: int):
        self.first, self.size = first, last - first + 1
        self.pattern = re.compile(f"([{chr(first)}-{chr(last)}])")


# characters above 0xFFFF double the memory of the whole text, so they come second
ALPHABETS = (Alphabet(0xE000, 0xF8FF), Alphabet(0xF0000, 0xFFFFD), Alphabet(0x100000, 0x10FFFD))


def choose_alphabet(text: str) -> int:
    """Return the number of the first alphabet that does not occur in a text; if all do, their number."""
    if text.isascii():
        return 0
    numbers = (i for i, alphabet in enumerate(ALPHABETS) if not alphabet.pattern.search(text))
    return next(numbers, len(ALPHABETS))


def read_generation(rendered: str) -> tuple[str, list[Span]]:
    """Return a render without its generation marks, and the spans in them; none if the marks are not in pairs."""
    pieces = _GENERATION.split(rendered)
    at = list(accumulate(map(len, pieces[::2])))
    is_paired = "".join(pieces[1::2]) == GENERATION_MARKS * (len(at) // 2)
    spans = [(start, end) for start, end in zip(at[::2], at[1::2], strict=False) if start < end]
    return "".join(pieces[::2]), spans if is_paired else []


@dataclass(slots=True)
class Place:
    """Place of a message in a text: of all its leaves, from the first to the last."""

    start: int
    end: int
    content: Span | None = None
    """Place of its content."""
    by_filler: bool = False
    """Found by replacing the content."""


@dataclass
class Places:
    """Places of messages in a text."""

    of: list[Place | None]
    """Place of each message; None if nothing of it was found."""
    leaves: list[tuple[int, str, Span | None]]
    """(message, kind, place) of each leaf."""


class Marked:
    """Messages with marks around the leaves of some of them."""

    def __init__(self, messages: Sequence[Message], numbers: Sequence[int], alphabet: Alphabet):
        self._alphabet = alphabet
        self.is_whole = True
        """The alphabet is large enough."""
        self.has_calls = False
        self.messages = list(messages)
        self.owners: list[tuple[int, str, str]] = []
        """(message, kind, text without surrounding white space) of each leaf."""
        for i in numbers:
            message = messages[i]
            changed = dict(message)
            content = message.get("content")
            if isinstance(content, str):
                changed["content"] = self._marked(i, CONTENT, content)
            elif isinstance(content, list):
                changed["content"] = [{**part, "text": self._marked(i, CONTENT, part["text"])} for part in content]
            if len(message) > 2 or content is None:
                self._mark_others(i, changed)
            self.messages[i] = changed

    def _mark_others(self, i: int, changed: dict[str, Any]) -> None:
        for name in _REASONING_FIELDS:
            if isinstance(changed.get(name), str):
                changed[name] = self._marked(i, REASON, changed[name])
        if changed.get("tool_calls"):
            self.has_calls = True
            calls = []
            for call in changed["tool_calls"]:
                function = call.get("function", call)
                marked = {**function, "name": self._marked(i, CALL, function["name"])}
                if "arguments" in function:
                    marked["arguments"] = self._marked_tree(i, function["arguments"])
                calls.append({**call, "function": marked} if "function" in call else marked)
            changed["tool_calls"] = calls

    def _marked_tree(self, i: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(i, CALL, value)
        if isinstance(value, dict):
            return {key: self._marked_tree(i, item) for key, item in value.items()}
        return [self._marked_tree(i, item) for item in value] if isinstance(value, list) else value

    def _marked(self, i: int, kind: str, text: str) -> str:
        core = text.strip()
        if kind == CONTENT and core[-1:] in (">", "]") and "tool_calls" in self.messages[i]:
            # a mark behind </think> would be an answer beside the calls
            core = _LAST_TAGS.sub("", core)
        number = 2 * len(self.owners)
        self.is_whole &= number + 1 < self._alphabet.size
        if not core or not self.is_whole:
            return text
        self.owners.append((i, kind, core))
        first = self._alphabet.first + number
        marked = f"{chr(first)}{core}{chr(first + 1)}"
        if len(core) == len(text):
            return marked
        begin = len(text) - len(text.lstrip())
        return f"{text[:begin]}{marked}{text[begin + len(core) :]}"

    def read(self, rendered: str, text: str) -> Places | None:
        """Return the places in `text`; None if the render is not `text` with marks."""
        pieces = self._alphabet.pattern.split(rendered)
        parts = pieces[::2]
        if "".join(parts) != text:
            return None
        marks = list(zip(pieces[1::2], accumulate(map(len, parts)), strict=False))
        at = dict(marks)
        # the result of a call may repeat its name
        first_at = dict(reversed(marks)) if self.has_calls else at
        places = Places([None] * len(self.messages), [])
        mark = self._alphabet.first - 2
        for i, kind, core in self.owners:
            mark += 2
            found = first_at if kind == CALL else at
            start, end = found.get(chr(mark)), found.get(chr(mark + 1))
            if end is None:
                places.leaves.append((i, kind, None))
                continue
            # the mark before a content is lost with reasoning in it that a template removes or writes itself
            if start is None or start > end:
                rest = _rest(core, text[:end])
                start = end - len(rest)
                before = core[: len(core) - len(rest)]
                near = text[max(0, start - len(before) - 64) : start]
                if rest and not _TAG.sub("", near).rstrip().endswith(_TAG.sub("", before).strip()):
                    places.leaves.append((i, CUT, None))
            span = start, end
            places.leaves.append((i, kind, span))
            place = places.of[i]
            if place is None:
                places.of[i] = Place(start, end, span if kind == CONTENT else None)
                continue
            place.start, place.end = min(place.start, start), max(place.end, end)
            if kind == CONTENT:
                place.content = (place.content[0] if place.content else start, end)
        return places


def _rest(core: str, text: str) -> str:
    """Return the longest part of a content that follows a closing tag and ends the text; empty if there is none."""
    rests = (core[found.end() :] for found in _CLOSING_TAG.finditer(core))
    return next((rest for rest in rests if text.endswith(rest)), "")


def is_tags_only(content: object) -> bool:
    """Return true for a text such as `<think></think>`, which is an empty reasoning."""
    return isinstance(content, str) and not _LAST_TAGS.sub("", content.strip())
