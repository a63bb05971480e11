"""Spans of the messages of a conversation, in its text and in renders of its parts.

A template is a program that may trim, join, reorder and leave out text, so its source shows nothing. It is rendered
with marks around every text of the messages (marks.py), which show where it writes each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.data.chat.marks import Marked, MessageSpan, MessageSpans, has_text, usable_alphabets
from megatron.data.chat.template import UNCLEAR, ChatTemplate, Message, TemplateFailure


class Render(NamedTuple):
    """Text that a template writes for some messages."""

    messages: Sequence[Message]
    has_prompt: bool
    """With the generation prompt at its end."""
    text: str


class Locator:
    """Renders of a conversation and of its parts, and the spans of messages in them."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], text: str
    ) -> None:
        """`text`: of the whole conversation."""
        self.template = template
        self.messages, self.variables, self.text = messages, variables, text
        # characters that the text itself has cannot mark it
        self._alphabets = usable_alphabets(text)

    def render(self, messages: Sequence[Message], has_prompt: bool = False) -> Render | None:
        """Return the render; None if the template refuses these messages."""
        try:
            return Render(messages, has_prompt, self.template.render(messages, has_prompt, self.variables))
        except TemplateFailure:
            return None

    def locate(self) -> MessageSpans:
        """Return the spans of the messages in the text. Raises TemplateFailure."""
        if not self._alphabets:
            raise TemplateFailure(
                "the row has characters of all three private-use areas, which mark its texts; drop those of one",
                UNCLEAR,
            )
        whole = Render(self.messages, False, self.text)
        numbers = range(len(self.messages))
        spans = self.by_marks(whole, numbers)
        if spans is not None:
            return spans
        # by_marks compares with a render without generation marks, so both must be one text
        if self.template.marks_generation and self.render(self.messages) != whole:
            raise self.template.failure("writes other text with its generation marks; correct the template", UNCLEAR)
        # the template depends on text that the marks changed, at best of few messages: each is marked alone
        spans = MessageSpans([None] * len(self.messages), [])
        for i in numbers:
            alone = self.by_marks(whole, (i,))
            if alone is None:
                spans.of[i] = self._by_filler(i)
            else:
                spans.of[i] = alone.of[i]
                spans.leaves += alone.leaves
        return spans

    def by_marks(self, render: Render, numbers: Sequence[int]) -> MessageSpans | None:
        """Return the spans of some messages in a render by marks in them; None if marks change the text."""
        for alphabet in self._alphabets:
            marked = Marked(render.messages, numbers, alphabet)
            # the first area has marks for 3,200 texts, the others for more than 32,000 each
            if marked.is_whole:
                with_marks = self.render(marked.messages, render.has_prompt)
                if with_marks is None:
                    return None
                return marked.read(with_marks.text, render.text)
        return None

    def _by_filler(self, i: int) -> MessageSpan | None:
        """Return the span of the text that changes when the content of message i is replaced."""
        ends = self._text_around(i, Render(self.messages, False, self.text))
        if ends is None:
            return None
        before, after = ends
        start, end = len(before), len(self.text) - len(after)
        # a template that looks at the content writes other text around the filler
        if start > end or not self.text.startswith(before) or not self.text.endswith(after):
            return None
        return MessageSpan(i, start, end, (start, end), by_filler=True)

    def _text_around(self, i: int, render: Render) -> tuple[str, str] | None:
        """Return the text before and after another content of message i; None unless that is written once."""
        filled = self._filled(i, render)
        # written twice, as in a summary, it is unknown which of both is the turn
        if filled is None or filled.count(self._filler) != 1:
            return None
        before, after = filled.split(self._filler)
        return before, after

    @property
    def _filler(self) -> str:
        return self._alphabets[0].filler

    def _filled(self, i: int, render: Render) -> str | None:
        """Return the text with another content of message i; None if it has none, or the template refuses that."""
        messages = render.messages
        if not has_text(messages[i].get("content")):
            return None
        changed = [*messages[:i], {**messages[i], "content": self._filler}, *messages[i + 1 :]]
        filled = self.render(changed, render.has_prompt)
        if filled is None:
            return None
        return filled.text

    def leaves_out(self, i: int) -> bool:
        """Return true if the template does not write another content of message i either."""
        filled = self._filled(i, Render(self.messages, False, self.text))
        return filled is not None and self._filler not in filled

    def tail(self, render: Render | None, anchor: MessageSpan | None) -> str | None:
        """Return the text of a render after a message, whose span in the whole text is `anchor`; None if unknown.

        Without an anchor, it is all of the text.
        """
        if render is None:
            return None
        if anchor is None:
            return render.text
        if anchor.by_filler:
            around = self._text_around(anchor.number, render)
            # the content may have decided the text behind it
            if around is None or not render.text.endswith(around[1]):
                return None
            return around[1]
        spans = self.by_marks(render, (anchor.number,))
        if spans is None or (own := spans.of[anchor.number]) is None:
            return None
        return render.text[own.end :]
