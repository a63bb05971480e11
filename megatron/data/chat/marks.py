"""Marks: private-use characters around the texts of messages, which show where a template writes each of them.

A text that is marked is a leaf: a content or one of its parts, a reasoning, the name of a tool call, a string among its
arguments. If a render with marks is the plain render once the marks are removed, they show the span of every leaf.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from megatron.data.chat.conversation import REASONING
from megatron.data.chat.template import GENERATION_MARKS, Message

Span = tuple[int, int]
"""Characters [start, end)."""

CONTENT, REASON, CALL, CUT = "content", "reasoning", "tool call", "reasoning cut off from a content"
"""Kinds of leaves. The last has no span."""

_REASONING_FIELDS = (*REASONING, "tool_plan")
_GENERATION = re.compile(f"([{GENERATION_MARKS}])")
_CLOSING_TAG = re.compile(r"(?:</[^\s<>/]+>|\[/[^\s\[\]/]+\]|<\|[^\s<>|]+\|>)\s*")
"""Tag such as </think>, which ends reasoning in a content, with the white space behind it."""

_TAG = re.compile(r"</?[^\s<>/]+>|\[/?[^\s\[\]/]+\]")
_LAST_TAGS = re.compile(rf"(?:\s*(?:{_TAG.pattern}))+$")
_ROOM_FOR_TAGS = 64
"""Characters that a template may write around a reasoning: tags of its own, and white space."""


class Alphabet:
    """Characters of marks: the first of them and another one, two marks for each leaf."""

    def __init__(self, first: int, last: int):
        self.first = first
        self.num_leaves = (last - first + 1) // 2
        self.filler = chr(first)
        """Text that stands for a content, where that is replaced."""
        self.pattern = re.compile(f"[{chr(first)}-{chr(last)}]")
        # every mark begins with one and the same character: to find that takes a tenth of the time that a class of
        # characters takes, which were most of the time of a row
        self.mark = re.compile(f"{self.filler}(.)", re.DOTALL)


# characters above 0xFFFF double the memory of the whole text, so they come second
ALPHABETS = (Alphabet(0xE000, 0xF8FF), Alphabet(0xF0000, 0xFFFFD), Alphabet(0x100000, 0x10FFFD))


def usable_alphabets(text: str) -> Sequence[Alphabet]:
    """Return the alphabets from the first one that does not occur in a text."""
    # Python keeps this as a flag of the string: no search
    if text.isascii():
        return ALPHABETS
    numbers = (i for i, alphabet in enumerate(ALPHABETS) if not alphabet.pattern.search(text))
    return ALPHABETS[next(numbers, len(ALPHABETS)) :]


def read_generation(rendered: str) -> tuple[str, list[Span]]:
    """Return a render without its generation marks, and the spans in them; none if the marks are not in pairs."""
    pieces = _GENERATION.split(rendered)
    # split keeps the marks at odd places: even ones are text
    offsets = list(accumulate(map(len, pieces[::2])))
    # a tag within a macro or a nested one may write marks in another order
    is_paired = "".join(pieces[1::2]) == GENERATION_MARKS * (len(offsets) // 2)
    spans = [(start, end) for start, end in zip(offsets[::2], offsets[1::2], strict=False) if start < end]
    if not is_paired:
        spans = []
    return "".join(pieces[::2]), spans


@dataclass(slots=True)
class MessageSpan:
    """Span of a message in a text: of all its leaves, from the first to the last."""

    number: int
    """Number of the message."""
    start: int
    end: int
    content: Span | None = None
    by_filler: bool = False
    """Known by replacing the content, not by marks."""


class LeafSpan(NamedTuple):
    """Span of a leaf; None if it is not in the text."""

    message: int
    kind: str
    span: Span | None


@dataclass
class MessageSpans:
    """Spans of messages in a text."""

    of: list[MessageSpan | None]
    """Span of each message; None if nothing of it is in the text."""
    leaves: list[LeafSpan]

    def add(self, number: int, kind: str, start: int, end: int) -> None:
        """Add a leaf of message `number`, later than those that it has already."""
        self.leaves.append(LeafSpan(number, kind, (start, end)))
        message = self.of[number]
        if message is None:
            message = self.of[number] = MessageSpan(number, start, end)
        message.start = min(message.start, start)
        message.end = max(message.end, end)
        if kind == CONTENT:
            # parts of one content: from the first to the last of them
            first, _ = message.content or (start, end)
            message.content = (first, end)

    def content(self, number: int) -> Span | None:
        """Return the span of a message's content."""
        message = self.of[number]
        if message is None:
            return None
        return message.content

    def leaves_of(self, number: int) -> list[LeafSpan]:
        return [leaf for leaf in self.leaves if leaf.message == number]


_Leaf = tuple[int, str, str, str, str]
"""Message, kind, text, and the characters of the marks before and after it. The text has no white space around it:
templates trim."""


class Marked:
    """Messages with marks around the leaves of some of them."""

    def __init__(self, messages: Sequence[Message], numbers: Sequence[int], alphabet: Alphabet):
        self._alphabet = alphabet
        self._leaves: list[_Leaf] = []
        self.is_whole = True
        """The alphabet has marks for all leaves."""
        self.messages = list(messages)
        self._has_calls = False
        # the others stay the very same objects: nothing is copied for them
        for i in numbers:
            self.messages[i] = self._marked_message(i, messages[i])

    def _marked_message(self, i: int, message: Message) -> Message:
        marked = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._marked(i, CONTENT, content)
        elif isinstance(content, list):
            marked["content"] = [{**part, "text": self._marked(i, CONTENT, part["text"])} for part in content]
        if len(message) == 2 and content is not None:  # role and content: most messages
            return marked
        for name in _REASONING_FIELDS:
            if isinstance(marked.get(name), str):
                marked[name] = self._marked(i, REASON, marked[name])
        if marked.get("tool_calls"):
            self._has_calls = True
            marked["tool_calls"] = [self._marked_call(i, call) for call in marked["tool_calls"]]
        return marked

    def _marked_call(self, i: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        marked = {**function, "name": self._marked(i, CALL, function["name"])}
        if "arguments" in function:
            marked["arguments"] = self._marked_tree(i, function["arguments"])
        if "function" not in call:
            return marked
        return {**call, "function": marked}

    def _marked_tree(self, i: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(i, CALL, value)
        if isinstance(value, dict):
            return {key: self._marked_tree(i, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked_tree(i, item) for item in value]
        return value

    def _marked(self, i: int, kind: str, text: str) -> str:
        # only what stands between white space: a template that trims would move the marks with it
        core = text.strip()
        if kind == CONTENT and core[-1:] in (">", "]") and "tool_calls" in self.messages[i]:
            # a mark behind </think> would be an answer beside the calls
            core = _LAST_TAGS.sub("", core)
        # a further leaf would have no mark, and its text no span
        self.is_whole &= len(self._leaves) < self._alphabet.num_leaves
        if not core or not self.is_whole:
            return text
        number = self._alphabet.first + 2 * len(self._leaves)
        before, after = chr(number), chr(number + 1)
        self._leaves.append((i, kind, core, before, after))
        mark = self._alphabet.filler
        marked = f"{mark}{before}{core}{mark}{after}"
        if len(core) == len(text):
            return marked
        begin = len(text) - len(text.lstrip())
        return f"{text[:begin]}{marked}{text[begin + len(core) :]}"

    def read(self, rendered: str, text: str) -> MessageSpans | None:
        """Return the spans in `text`; None if the render is not `text` with marks."""
        pieces = self._alphabet.mark.split(rendered)
        # the proof that marks changed nothing: without them the render is the plain text
        texts = pieces[::2]
        if "".join(texts) != text:
            return None
        marks = list(zip(pieces[1::2], accumulate(map(len, texts)), strict=False))
        # where a text is written several times its last place counts, which is what dict keeps
        first = last = dict(marks)
        if self._has_calls:  # the result of a call may repeat the name of the call, after it
            first = dict(reversed(marks))
        spans = MessageSpans([None] * len(self.messages), [])
        for i, kind, content, before, after in self._leaves:
            offsets = last
            if kind == CALL:
                offsets = first
            start, end = offsets.get(before), offsets.get(after)
            # the mark behind the text shows that it is written; without it the leaf is left out
            if end is None:
                spans.leaves.append(LeafSpan(i, kind, None))
                continue
            # the mark before a content is lost with reasoning in it that a template removes or writes itself
            if start is None or start > end:
                start, is_cut = _start_after_reasoning(content, text[:end])
                if is_cut:
                    spans.leaves.append(LeafSpan(i, CUT, None))
            spans.add(i, kind, start, end)
        return spans


def _start_after_reasoning(content: str, text: str) -> tuple[int, bool]:
    """Return the start of the rest of a content, which ends `text`, and whether its reasoning is cut off."""
    # from the first tag on: the longest rest of the content that ends here
    rests = (content[tag.end() :] for tag in _CLOSING_TAG.finditer(content))
    rest = next((rest for rest in rests if text.endswith(rest)), "")
    start = len(text) - len(rest)
    reasoning = content[: len(content) - len(rest)]
    written = text[max(0, start - len(reasoning) - _ROOM_FOR_TAGS) : start]
    # tags are left out of the comparison: templates write some of their own in place of them
    is_written = _TAG.sub("", written).rstrip().endswith(_TAG.sub("", reasoning).strip())
    return start, bool(rest) and not is_written


def is_tags_only(content: object) -> bool:
    """Return true for a text such as `<think></think>`, which is an empty reasoning."""
    return isinstance(content, str) and not _LAST_TAGS.sub("", content.strip())


def has_text(content: object) -> bool:
    if isinstance(content, list):
        return any(part["text"].strip() for part in content)
    return isinstance(content, str) and bool(content.strip())
