"""Begin and end of assistant turns in a rendered conversation.

A turn begins at the end of the inference prompt (the messages before it and the generation prompt) and ends at the end
of the conversation rendered up to this turn. Both follow from renders of parts of the conversation, so they are
remembered by the layout of the conversation and by the text that the template writes around the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from megatron.data.chat.locating import Locator, Render
from megatron.data.chat.marks import MessageSpan, MessageSpans
from megatron.data.chat.template import UNCLEAR, Message

_HEADER_END = re.compile(r"[\s>\]:]")
"""Last character of a header: if a turn has only the beginning of the generation prompt, that is matched up to one."""

_LARGEST_MEMORY = 1 << 14
"""Number of layouts remembered."""

Key = tuple[Any, ...]
T = TypeVar("T")


class InferencePrompt(NamedTuple):
    """Inference prompt of a turn."""

    tail: str | None
    """Everything after the anchor, the last text before the turn; None if unknown."""
    added: str
    """Text that add_generation_prompt adds."""


class TurnEnd(NamedTuple):
    length: int
    """Characters after the text of the message that belong to its turn."""
    is_shown: bool
    """The template shows the end. Else it may be anywhere."""


class Remembered(dict[Key, T]):
    """Values by layout, up to a number of them."""

    def keep(self, key: Key, value: T) -> T:
        if len(self) < _LARGEST_MEMORY:
            self[key] = value
        return value


@dataclass
class Memory:
    """Boundaries of turns that a template has written."""

    turns: Remembered[tuple[InferencePrompt, TurnEnd]] = field(default_factory=Remembered)
    ends: Remembered[TurnEnd] = field(default_factory=Remembered)
    """Those of turns whose begin is marked."""


@dataclass(slots=True)
class Turn:
    """Text that the model writes for a message."""

    start: int
    end: int
    has_start: bool
    """The inference prompt ends at `start`. Else nothing shows the begin, and `start` is the first text's."""
    has_end: bool
    """The turn ends at `end`. Else nothing shows the end."""


class Boundaries:
    """Boundaries of the turns of a conversation."""

    def __init__(self, locator: Locator, spans: MessageSpans, memory: Memory):
        self._locator, self._spans, self._memory = locator, spans, memory
        self._template, self._messages, self._text = locator.template, locator.messages, locator.text
        self._layout = _layout(locator.messages, locator.variables)

    def own_span(self, i: int) -> MessageSpan:
        """Return the span of message i. Raises TemplateFailure if there is none."""
        own = self._spans.of[i]
        if own is None or own.start == own.end:
            raise self._template.failure(
                f"leaves out message {i + 1}, or rewrites it beyond recognition; use a template that writes its text",
                UNCLEAR,
            )
        return own

    def turn(self, i: int) -> Turn:
        """Return what the model writes for message i. Raises TemplateFailure."""
        own = self.own_span(i)
        anchor = self._anchor(own)
        base, reference = 0, None
        if anchor is not None:
            base, reference = anchor.end, anchor.number
        later = [span.start for span in self._spans.of[i + 1 :] if span and span.start >= own.end]
        limit = min(later, default=None)
        # two conversations of one layout, with equal text around the message, have equal boundaries relative to it:
        # most rows of a file are then read without renders of their parts
        key = (i, reference, self._layout, self._text[base : own.start], self._text[own.end : limit])
        known = self._memory.turns.get(key)
        if known is None:
            known = self._memory.turns.keep(key, (self._prompt(i, anchor), self._end(own)))
        # both relative to the anchor and to the message, whose own places differ from row to row
        prompt, end = known
        start, has_start = self._start(base, own, prompt)
        return Turn(start, own.end + end.length, has_start, end.is_shown)

    def end_before(self, own: MessageSpan, limit: int) -> TurnEnd:
        """Return the end of a turn, behind which the next message begins at `limit`."""
        key = (own.number, self._layout, self._text[own.end : limit])
        known = self._memory.ends.get(key)
        if known is None:
            known = self._memory.ends.keep(key, self._end(own))
        return known

    def _anchor(self, own: MessageSpan) -> MessageSpan | None:
        """Return the earlier message that ends last before this one: the reference point in other renders."""
        anchor = None
        for span in self._spans.of[: own.number]:
            if span is None or span.end > own.start:
                continue
            # >= takes the later one of two messages that end together, as where a template merges them
            if anchor is None or span.end >= anchor.end:
                anchor = span
        return anchor

    # Begin

    def _prompt(self, i: int, anchor: MessageSpan | None) -> InferencePrompt:
        """Return the inference prompt for message i after the anchor."""
        render = self._locator.render
        earlier = self._messages[:i]
        if earlier:
            # twice: a template may write a generation prompt whatever the flag says, and only the difference is
            # certain
            with_prompt, without = render(earlier, True), render(earlier)
            if with_prompt and without:
                return InferencePrompt(self._locator.tail(with_prompt, anchor), _added(with_prompt.text, without.text))
        # the first message is the assistant's: nothing comes before it but what the template always writes
        elif alone := self._prompt_alone():
            return InferencePrompt(alone, "")
        # the template refuses the beginning alone; it may accept the whole
        whole = render(self._messages, True)
        if whole is None:
            return InferencePrompt(None, "")
        return InferencePrompt(None, _added(whole.text, self._text))

    def _prompt_alone(self) -> str:
        """Return the inference prompt without messages if the text begins with it; empty if not."""
        prompt, empty = self._locator.render([], True), self._locator.render([])
        # equal with and without the generation prompt: nothing shows where it begins
        if prompt is None or _writes_same(prompt, empty) or not self._text.startswith(prompt.text):
            return ""
        return prompt.text

    def _start(self, base: int, own: MessageSpan, prompt: InferencePrompt) -> tuple[int, bool]:
        """Return the offset at which the model starts to write, and whether the prompt shows it."""
        if prompt.tail is not None and self._text.startswith(prompt.tail, base):
            start = base + len(prompt.tail)
            # a prompt that ends behind the message cannot be its own
            if start < own.end:
                return start, True
            return own.start, False
        # what comes before is written otherwise by now: the beginning of the generation prompt
        before = self._text[base : own.start]
        # leading white space belongs to the message before, and differs where that ends otherwise
        header = prompt.added.lstrip()
        length = _end_of_header(before, header)
        if length is not None:
            return base + length, True
        # without a generation prompt, the first turn begins the text
        return own.start, not header and before.strip() in ("", self._template.bos_token)

    # End

    def _end(self, own: MessageSpan) -> TurnEnd:
        """Return the end of a turn: that of the conversation up to it, else the next end marker."""
        # from the end of the message's text: its own characters are never compared, so any content can be remembered
        rest = self._text[own.end :]
        upto = self._messages[: own.number + 1]
        # nothing follows the last message: all the rest belongs to its turn
        if len(upto) == len(self._messages):
            tail: str | None = rest
        else:
            tail = self._locator.tail(self._locator.render(upto), own)
        common = 0
        if tail is not None:
            # rstrip: a newline behind the end marker is often the template's separator of turns, not written by the
            # model
            tail = tail[: self._length_before_lasting_prompt(upto, tail, own)].rstrip()
            # the conversation up to this turn is the beginning of the whole one: its end is the turn's
            if rest.startswith(tail):
                return TurnEnd(len(tail), True)
            common = common_length(tail, rest)
        # the last turn ends otherwise: only an end marker can show the end of this one
        markers = self._template.end_marker.finditer(rest)
        marker = next((marker for marker in markers if marker.end() > common), None)
        # text before the marker would be that of another message
        if marker and not rest[common : marker.start()].strip():
            return TurnEnd(marker.end(), True)
        return TurnEnd(0, False)

    def _length_before_lasting_prompt(self, upto: Sequence[Message], tail: str, own: MessageSpan) -> int:
        """Return the length of `tail` that belongs to the turn if a template always writes its generation prompt.

        Such a prompt shows if the text up to a turn is not a prefix of the text with a next turn. The suffix that it
        shares with the end of every other turn begins with the end-of-turn marker.
        """
        render = self._locator.render
        plain = render(upto)
        if plain is None or not tail.strip() or not _writes_same(plain, render(upto, True)):
            return len(tail)
        # if the text of the turn goes on unchanged before a next message, no prompt is at its end
        followed = render([*upto, {"role": "user", "content": "next"}])
        rest = self._locator.tail(followed, own)
        if rest is None or rest.startswith(tail.rstrip()):
            return len(tail)
        shared_end = 0
        if len(upto) > 1 and (earlier := render(upto[:-1])) is not None:
            # reversed: the longest common suffix
            shared_end = common_length(earlier.text[::-1], plain.text[::-1])
        begin = max(len(tail) - shared_end, 0)
        # behind this the render with a next message differs, so it cannot belong to the turn
        certain = common_length(tail, rest)
        markers = [marker for marker in self._template.end_marker.finditer(tail, begin) if marker.end() <= certain]
        is_single_end = len(markers) == 1 and not tail[: markers[0].start()].strip()
        if is_single_end or len(markers) > 1:
            return markers[0].end()
        return min(begin, certain)


def _layout(messages: Sequence[Message], variables: Mapping[str, Any]) -> Key:
    """Return roles, keys and options: a template decides by them, beside the text that it writes."""
    # templates often branch on the presence of a key, such as tool_calls
    keys = tuple((message["role"], *message.keys()) for message in messages)
    if not variables:
        return keys, ()
    # of tools and documents their presence alone: each row has others
    options = {name: value for name, value in variables.items() if name not in ("tools", "documents")}
    return keys, (*variables, json.dumps(options, sort_keys=True))


def _writes_same(first: Render, second: Render | None) -> bool:
    return second is not None and first.text == second.text


def _added(with_prompt: str, without: str) -> str:
    """Return the generation prompt: the text that a render has after what it shares with the one without it."""
    return with_prompt[common_length(with_prompt, without) :]


def _end_of_header(text: str, header: str) -> int | None:
    """Return the offset after the longest beginning of a header that occurs in a text, at its last occurrence."""
    whole = header.rstrip()
    # the longest first: `<|start|>assistant` before `<|start|>`, which begins every turn
    for size in range(len(header), 0, -1):
        piece = header[:size]
        # white space alone occurs everywhere and shows nothing
        if not piece.strip():
            return None
        # a header ends with a whole word or marker
        is_whole = size == len(header) or piece == whole or _HEADER_END.match(piece[-1])
        if is_whole and (offset := text.rfind(piece)) >= 0:
            return offset + size
    return None


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    # one comparison in C is the usual case; the search by characters is for the first difference alone
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])
