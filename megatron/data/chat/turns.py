"""Spans of contents and assistant turns in a rendered conversation.

A template is a program that may trim, join, reorder and leave out text, so its source shows nothing. It is rendered
twice: plainly, and with a pair of marks, private-use characters, around every content. If the text without the marks is
the plain text, they show the place of each content. An assistant turn begins at the end of the inference prompt (the
messages before it and the generation prompt) and ends at the end of the conversation rendered up to this turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.data.chat.template import MARKER, ChatTemplate, Message, TemplateFailure

# Four marks a message from the private use area; those of long conversations are from the supplementary one.
_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
_WIDE_FIRST_MARK, _WIDE_LAST_MARK = 0xF0000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}{chr(_WIDE_FIRST_MARK)}-{chr(_WIDE_LAST_MARK)}]")
_MARKS_A_MESSAGE = 4

# Ends of a header: if a turn has only the beginning of the generation prompt, that is matched up to one of these.
_HEADER_END = re.compile(r"[\s>\]:]")

_LARGEST_MEMORY = 1 << 14
"""Number of layouts remembered."""

_MARKED_FIELDS = ("content", "reasoning_content")

Span = tuple[int, int]
"""Characters [start, end)."""


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation, and the place of each message in it."""

    text: str
    contents: list[Span | None]
    """Content of each message without surrounding white space; None if empty or not in the text."""
    turns: list[Span | None]
    """Text that the model writes for each assistant message; None for others, and for those left out."""


@dataclass(frozen=True)
class _Place:
    """Place of a content, and the method by which it was found."""

    start: int
    end: int
    by_filler: bool = False


class TurnFinder:
    """Render conversations with one template and find their turns. Results are cached by layout."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[tuple[Any, ...], Span] = {}

    def find(self, messages: Sequence[Message]) -> Rendered:
        """Render a conversation. Raises TemplateFailure, also if the assistant's text cannot be identified."""
        text = self._template.render(messages)
        places, reasoning = self._places(messages, text)
        turns: list[Span | None] = [None] * len(messages)
        layout = tuple((message["role"], *message.keys()) for message in messages)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                turns[i] = self._turn(messages, text, places, reasoning[i], i, layout)
        self._join_merged(messages, text, turns)
        return Rendered(text, [(place.start, place.end) if place else None for place in places], turns)

    # Marks

    def _places(self, messages: Sequence[Message], text: str) -> tuple[list[_Place | None], list[int | None]]:
        """Return the place of each message's content, and the start of its reasoning."""
        numbers = range(len(messages))
        if not _MARKS.search(text) and _has_marks_for(messages):
            marked = self._try_marked(messages, numbers)
            if marked is not None and _MARKS.sub("", marked) == text:
                return _read_marks(marked, len(messages))
        # the template depends on text that the marks changed: each message separately
        places: list[_Place | None] = []
        reasoning: list[int | None] = []
        for i in numbers:
            place, thought = self._place_alone(messages, text, i)
            places.append(place)
            reasoning.append(thought)
        return places, reasoning

    def _place_alone(self, messages: Sequence[Message], text: str, i: int) -> tuple[_Place | None, int | None]:
        if _MARKS.search(text) or not _has_marks_for(messages):
            return None, None
        marked = self._try_marked(messages, (i,))
        if marked is not None and _MARKS.sub("", marked) == text:
            places, reasoning = _read_marks(marked, len(messages))
            return places[i], reasoning[i]
        return self._place_by_filler(messages, text, i), None

    def _place_by_filler(self, messages: Sequence[Message], text: str, i: int) -> _Place | None:
        """Return the part of the text that changes when the content is replaced."""
        if not _is_text(messages[i].get("content")):
            return None
        filled = self._try_render(_filled(messages, i))
        if filled is None or filled.count(_filler(i)) != 1:
            return None
        before, after = filled.split(_filler(i))
        if not (text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)):
            return None
        return _Place(len(before), len(text) - len(after), by_filler=True)

    def _try_marked(self, messages: Sequence[Message], numbers: Sequence[int], **options: bool) -> str | None:
        return self._try_render(_marked(messages, numbers), **options)

    def _try_render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        """Return the text; None if the template refuses these messages."""
        try:
            return self._template.render(messages, add_generation_prompt)
        except TemplateFailure:
            return None

    # Turns

    def _turn(
        self,
        messages: Sequence[Message],
        text: str,
        places: Sequence[_Place | None],
        reasoning: int | None,
        i: int,
        layout: tuple[Any, ...],
    ) -> Span | None:
        """Return the span that the model writes for message i."""
        own = places[i]
        cap = own.start if own else None
        if reasoning is not None and (cap is None or reasoning < cap):
            cap = reasoning
        before = [j for j in range(i) if _is_before(places[j], cap)]
        # the last content that ends before this one: the reference point in other renders
        anchor = max(before, key=lambda j: places[j].end, default=None)  # type: ignore[union-attr]
        base = places[anchor].end if anchor is not None else 0  # type: ignore[union-attr]
        if own is None and not _writes_something(messages[i]):
            return None
        if own is None or cap is None:
            return self._turn_without_content(messages, text, places, anchor, i)
        later = [place.start for place in places[i + 1 :] if place and place.start >= own.end]
        limit = min(later, default=len(text))
        key = (i, anchor, layout, text[base:cap], text[own.end : limit])
        known = self._known.get(key)
        if known is None:
            start = _start_in(text[base:cap], self._prompt(messages, places, anchor, i))
            known = cap - base - start, self._end(messages, text, own, i) - own.end
            if len(self._known) < _LARGEST_MEMORY:
                self._known[key] = known
        return cap - known[0], own.end + known[1]

    def _prompt(
        self, messages: Sequence[Message], places: Sequence[_Place | None], anchor: int | None, i: int
    ) -> _Prompt:
        """Return the inference prompt for message i after the anchor."""
        earlier = messages[:i]
        with_prompt = self._try_render(earlier, add_generation_prompt=True) if earlier else None
        without = self._try_render(earlier) if earlier else None
        tail = None
        if with_prompt is not None and without is not None:
            tail = self._tail(earlier, with_prompt, places, anchor, add_generation_prompt=True)
        else:  # the template refuses the beginning alone; it may accept the whole
            with_prompt = self._try_render(messages, add_generation_prompt=True)
            without = self._try_render(messages)
        if with_prompt is None or without is None:
            return _Prompt(tail, "")
        return _Prompt(tail, with_prompt[_common(with_prompt, without) :])

    def _tail(
        self,
        messages: Sequence[Message],
        text: str,
        places: Sequence[_Place | None],
        anchor: int | None,
        add_generation_prompt: bool = False,
    ) -> str | None:
        """Return the text after the anchor's content in the render of a part of the conversation."""
        if anchor is None:
            return text
        place = places[anchor]
        assert place is not None
        if place.by_filler:
            other = self._try_render(_filled(messages, anchor), add_generation_prompt)
            parts = other.split(_filler(anchor)) if other else []
            tail = parts[1] if len(parts) == 2 else None
            return tail if tail is not None and text.endswith(tail) else None
        marked = self._try_marked(messages, (anchor,), add_generation_prompt=add_generation_prompt)
        if marked is None or _MARKS.sub("", marked) != text:
            return None
        found, _ = _read_marks(marked, len(messages))
        own = found[anchor]
        return text[own.end :] if own else None

    def _end(self, messages: Sequence[Message], text: str, own: _Place, i: int) -> int:
        """Return the end of message i, whose content has a known place."""
        upto = messages[: i + 1]
        rest = text[own.end :]
        whole = text if len(upto) == len(messages) else self._try_render(upto)
        alone: list[_Place | None] = [None] * i + [own]
        tail = rest if whole is text else None if whole is None else self._tail(upto, whole, alone, i)
        if tail is None:  # only an end marker can show the end of this turn
            marker = MARKER.match(rest.lstrip())
            return own.end + (len(rest) - len(rest.lstrip()) + marker.end() if marker else 0)
        tail = tail[: self._before_lasting_prompt(upto, tail, alone, i)]
        return own.end + len(tail[: _common(tail, rest)].rstrip())

    def _before_lasting_prompt(self, upto: Sequence[Message], tail: str, alone: Sequence[_Place | None], i: int) -> int:
        """Return the length of `tail` that belongs to turn i if a template always writes its generation prompt.

        Such a prompt shows if the text up to a turn is not a prefix of the text with a next turn. The suffix that it
        shares with the end of every other turn begins with the end-of-turn marker.
        """
        plain = self._try_render(upto)
        if plain is None or not tail.strip() or self._try_render(upto, add_generation_prompt=True) != plain:
            return len(tail)
        longer = [*upto, {"role": "user", "content": "next"}]
        followed = self._try_render(longer)
        rest = self._tail(longer, followed, alone, i) if followed is not None else None
        if rest is None or rest.startswith(tail.rstrip()):
            return len(tail)
        earlier = self._try_render(upto[:i]) if i else None
        shared_end = _common(earlier[::-1], plain[::-1]) if earlier else 0
        begin = max(len(tail) - shared_end, 0)
        certain = _common(tail, rest)
        markers = [found for found in MARKER.finditer(tail, begin) if found.end() <= certain]
        if len(markers) > 1 or (markers and not tail[: markers[0].start()].strip()):
            return markers[0].end()
        return min(begin, certain)

    def _turn_without_content(
        self, messages: Sequence[Message], text: str, places: Sequence[_Place | None], anchor: int | None, i: int
    ) -> Span | None:
        """Return a turn of tool calls only, or one whose content the template rewrites beyond recognition."""
        if i and self._try_render(messages[: i + 1]) == self._try_render(messages[:i]):
            return None  # left out
        base = places[anchor].end if anchor is not None else 0  # type: ignore[union-attr]
        end = self._end_by_anchor(messages, text, places, anchor, i)
        start = base + _start_in(text[base:end], self._prompt(messages, places, anchor, i))
        if end <= start:
            raise TemplateFailure(
                f"chat template {self._template.source.origin} rewrites message {i + 1} so that its text cannot be "
                "identified; use a template that writes contents unchanged"
            )
        return start, end

    def _end_by_anchor(
        self, messages: Sequence[Message], text: str, places: Sequence[_Place | None], anchor: int | None, i: int
    ) -> int:
        """Return the end of message i, computed from the content before it."""
        base = places[anchor].end if anchor is not None else 0  # type: ignore[union-attr]
        upto = messages[: i + 1]
        whole = text if len(upto) == len(messages) else self._try_render(upto)
        tail = None if whole is None else self._tail(upto, whole, places, anchor)
        if tail is None:
            return base
        return base + len(tail[: _common(tail, text[base:])].rstrip())

    def _join_merged(self, messages: Sequence[Message], text: str, turns: list[Span | None]) -> None:
        """Extend a turn to the next one if the template merges the two: the model also writes the text between."""
        for i in range(1, len(messages)):
            first, second = turns[i - 1], turns[i]
            if first and second and first[1] <= second[0] and not text[first[1] : second[0]].strip():
                turns[i - 1] = (first[0], second[0])


@dataclass(frozen=True)
class _Prompt:
    """Inference prompt of a turn."""

    tail: str | None
    """Everything after the anchor; None if unknown."""
    added: str
    """Text that add_generation_prompt adds."""


def _start_in(region: str, prompt: _Prompt) -> int:
    """Return the place in `region`, the text between two contents, at which the model starts to write."""
    if prompt.tail is not None and region.startswith(prompt.tail):
        return len(prompt.tail)
    wanted = prompt.added.lstrip()
    if not wanted:
        return len(region)
    for size in range(len(wanted), 0, -1):
        piece = wanted[:size]
        if not piece.strip():
            break
        # a header ends with a whole word or marker
        if size < len(wanted) and not _HEADER_END.match(piece[-1]) and piece != wanted.rstrip():
            continue
        found = region.rfind(piece)
        if found >= 0:
            return found + size
    return len(region)


def _is_before(place: _Place | None, cap: int | None) -> bool:
    return place is not None and (cap is None or place.end <= cap)


def _writes_something(message: Message) -> bool:
    return bool(message.get("tool_calls")) or any(_is_text(message.get(name)) for name in _MARKED_FIELDS)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])


def _has_marks_for(messages: Sequence[Message]) -> bool:
    return _MARKS_A_MESSAGE * len(messages) <= _WIDE_LAST_MARK - _WIDE_FIRST_MARK


@cache
def _marks(i: int) -> tuple[str, ...]:
    """Return the marks before and after a content, before and after its reasoning."""
    numbers = range(_MARKS_A_MESSAGE * i, _MARKS_A_MESSAGE * (i + 1))
    # wide characters double the memory of the whole text, so only long conversations use them
    base = _FIRST_MARK if numbers[-1] <= _LAST_MARK - _FIRST_MARK else _WIDE_FIRST_MARK
    return tuple(chr(base + number) for number in numbers)


def _filler(i: int) -> str:
    return _marks(i)[0]


def _filled(messages: Sequence[Message], i: int) -> list[Message]:
    return [*messages[:i], {**messages[i], "content": _filler(i)}, *messages[i + 1 :]]


def _marked(messages: Sequence[Message], numbers: Sequence[int]) -> list[Message]:
    marked = list(messages)
    for i in numbers:
        changed = dict(messages[i])
        marks = _marks(i)
        for which, name in enumerate(_MARKED_FIELDS):
            value = changed.get(name)
            if isinstance(value, str):
                core = value.strip()
                if core:
                    core = f"{marks[2 * which]}{core}{marks[2 * which + 1]}"
                    start, end = len(value) - len(value.lstrip()), len(value.rstrip())
                    changed[name] = core if end - start == len(value) else f"{value[:start]}{core}{value[end:]}"
        marked[i] = changed
    return marked


def _read_marks(marked: str, num_messages: int) -> tuple[list[_Place | None], list[int | None]]:
    """Return the place of each content, and the start of its reasoning, in the text without marks."""
    at: dict[str, int] = {}
    for number, match in enumerate(_MARKS.finditer(marked)):
        at[match[0]] = match.start() - number
    places: list[_Place | None] = []
    reasoning: list[int | None] = []
    for i in range(num_messages):
        marks = _marks(i)
        first, last = at.get(marks[0]), at.get(marks[1])
        # the mark before a content may be lost with reasoning that a template removes
        if last is not None and (first is None or first > last):
            first = last
        places.append(None if first is None or last is None else _Place(first, last))
        reasoning.append(at.get(marks[2]))
    return places, reasoning
