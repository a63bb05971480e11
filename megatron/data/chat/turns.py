"""Spans of contents and assistant turns in a rendered conversation.

The conversation is rendered twice: plainly, and with marks that show the span of each message (locating.py). What the
model writes for a message is between the inference prompt and the end of the turn (boundaries.py), or, if the template
has generation marks, between those. A turn whose begin or end does not show is an error: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.data.chat.boundaries import Boundaries, Memory, Turn
from megatron.data.chat.forms import render_readable
from megatron.data.chat.locating import Locator
from megatron.data.chat.marks import MessageSpan, MessageSpans, Span, read_generation
from megatron.data.chat.omissions import check_omissions, holds_arguments
from megatron.data.chat.template import NO_VARIABLES, UNCLEAR, ChatTemplate, Message


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation, and the span of each message in it."""

    text: str
    contents: list[Span | None]
    """Content of each message without surrounding white space; None if empty or not in the text."""
    turns: list[Span | None]
    """Text that the model writes for each assistant message; None for others, and for those not wanted."""
    generation: dict[int, list[Span]] = field(default_factory=dict)
    """Spans in the template's generation marks for each assistant message, if the template has such marks."""
    is_open: bool = False
    """The assistant has the last message, and the template writes nothing after it."""
    left_out: list[str] = field(default_factory=list)
    """Kinds of the texts and options that the template leaves out though the turns are whole."""

    def trained_spans(self) -> list[Span]:
        """Return the spans of the turns, or of what is in the generation marks of each."""
        return [span for i, turn in enumerate(self.turns) if turn for span in self.generation.get(i, [turn])]


class PromptedPart(NamedTuple):
    """Beginning of a conversation."""

    end: int
    """Number of its messages."""
    numbers: list[int]
    """Assistant messages that follow their inference prompts."""
    prompt: str
    """Inference prompt of the last message, if the beginning is not written so; else empty."""


class TurnFinder:
    """Render conversations with one template and find their turns. Boundaries are remembered by layout."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._memory = Memory()

    def find(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        wants: Callable[[int], bool] = lambda number: True,
    ) -> Rendered:
        """Render a conversation and find the assistant messages for which `wants` is true.

        Raises TemplateFailure: the template refuses the conversation, leaves a part of it out, or hides a turn.
        """
        # from here on the messages are those that the template was given, also in renders of parts
        messages, text = render_readable(self.template, messages, variables)
        marked: list[Span] = []
        if self.template.marks_generation:
            text, marked = read_generation(text)
        locator = Locator(self.template, messages, variables, text)
        spans = locator.locate()
        # before the turns: that a text is left out says more than that a turn is not found
        left_out = check_omissions(locator, spans)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and wants(i)]
        boundaries = Boundaries(locator, spans, self._memory)
        generation: dict[int, list[Span]] = {}
        # the template's author has marked what the model writes; the ends of turns only check it
        if self.template.marks_generation:
            search = _MarkedTurns(locator, spans, boundaries, marked)
            generation = {i: search.turn(i) for i in numbers}
            turns = {i: (parts[0][0], parts[-1][1]) for i, parts in generation.items()}
        else:
            turns = _PromptedTurns(locator, spans, boundaries).turns(numbers)
        count = len(messages)
        is_open = count - 1 in turns and _is_open(locator, spans)
        contents = [span.content if span else None for span in spans.of]
        return Rendered(text, contents, [turns.get(i) for i in range(count)], generation, is_open, left_out)

    def prompted_parts(
        self, messages: Sequence[Message], variables: Mapping[str, Any], numbers: Sequence[int]
    ) -> list[PromptedPart]:
        """Return the fewest beginnings of a conversation in which all of `numbers` follow their inference prompts.

        Raises TemplateFailure.
        """
        messages, _ = render_readable(self.template, messages, variables)
        # exactly what an inference server would give the model before each answer
        prompts = {i: self.template.render(messages[:i], True, variables) if i else "" for i in numbers}
        parts: list[PromptedPart] = []
        left = list(numbers)
        while left:
            # from the end: the longest beginning holds as many of the earlier turns as possible
            last = left[-1]
            text = self.template.render(messages[: last + 1], variables=variables)
            # if not, the template writes the beginning otherwise once the answer is there: it needs its own prompt
            if text.startswith(prompts[last]):
                following = [i for i in left if text.startswith(prompts[i])]
                parts.append(PromptedPart(last + 1, following, ""))
            else:
                parts.append(PromptedPart(last + 1, [last], prompts[last]))
            left = [i for i in left if i not in parts[-1].numbers]
        return parts[::-1]


class _MarkedTurns:
    """Turns by the template's generation marks, which are checked against the begin and end of each message."""

    def __init__(self, locator: Locator, spans: MessageSpans, boundaries: Boundaries, marked: Sequence[Span]):
        """`marked`: what is in the generation marks of the text."""
        self._locator, self._spans, self._boundaries = locator, spans, boundaries
        self._marked = marked

    def turn(self, i: int) -> list[Span]:
        """Return the spans that the model writes for message i. Raises TemplateFailure."""
        own = self._boundaries.own_span(i)
        low, high = self._limits(own)
        # several: a loop of the template may mark reasoning, content and calls apart
        inside = [(start, end) for start, end in self._marked if low <= start and end <= high]
        written = [leaf.span for leaf in self._spans.leaves_of(i) if leaf.span]
        if not all(_is_within(span, inside) for span in written or [(own.start, own.end)]):
            raise self._locator.template.failure(
                f"has generation marks that do not hold message {i + 1} alone; correct the template", UNCLEAR
            )
        self._check_end(own, inside[-1][1], high)
        return inside

    def _limits(self, own: MessageSpan) -> tuple[int, int]:
        """Return the end of the message before this one, and the start of the next, in the text."""
        others = [span for span in self._spans.of if span and span is not own]
        low = max((other.end for other in others if other.end <= own.start), default=0)
        high = min((other.start for other in others if other.start >= own.end), default=len(self._locator.text))
        return low, high

    def _check_end(self, own: MessageSpan, last: int, limit: int) -> None:
        """Raise TemplateFailure if the last mark of a turn is not at its end."""
        # authors often close the tag before the end marker, and the model would not learn to stop
        shown = self._boundaries.end_before(own, limit)
        if not shown.is_shown:
            return
        end = own.end + shown.length
        if self._locator.text[min(last, end) : max(last, end)].strip():
            side = "before" if last < end else "after"
            raise self._locator.template.failure(
                f"has a generation mark {side} the end of message {own.number + 1}; move {{% endgeneration %}} to the "
                "end of the turn",
                UNCLEAR,
            )


def _is_within(span: Span, wholes: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in wholes)


class _PromptedTurns:
    """Turns by their inference prompts and ends."""

    def __init__(self, locator: Locator, spans: MessageSpans, boundaries: Boundaries):
        self._locator, self._spans, self._boundaries = locator, spans, boundaries

    def turns(self, numbers: Sequence[int]) -> dict[int, Span]:
        """Return the span of each turn. Raises TemplateFailure."""
        turns: dict[int, Span] = {}
        for group, turn in self._groups(numbers):
            # all messages of a group have the span of the whole turn
            span = turn.start, turn.end
            for i in group:
                turns[i] = span
                self._check_span(i, span, group)
        return turns

    def _groups(self, numbers: Sequence[int]) -> list[tuple[list[int], Turn]]:
        """Return the turns, each with its messages: a template may merge consecutive ones into one turn."""
        groups: list[tuple[list[int], Turn]] = []
        for i in numbers:
            turn = self._boundaries.turn(i)
            if groups:
                group, last = groups[-1]
                # only neighbours: a message of the user between them would be trained as well
                if i - 1 in group and self._are_merged(last, turn):
                    groups[-1] = [*group, i], _joined(last, turn)
                    continue
                self._check_shown(group, last)
            groups.append(([i], turn))
        if groups:
            self._check_shown(*groups[-1])
        return groups

    def _are_merged(self, first: Turn, second: Turn) -> bool:
        """Return true if two consecutive assistant messages are one turn: the model also writes what is between."""
        # without an end or a begin nothing shows that the model stops between them
        is_parted = first.has_end or second.has_start
        if first.end > second.start or not is_parted:
            return True
        return not self._locator.text[first.end : second.start].strip()

    def _check_shown(self, group: Sequence[int], turn: Turn) -> None:
        if turn.has_start and turn.has_end:
            return
        side = "end" if turn.has_start else "begin"
        raise self._locator.template.failure(
            f"does not show the {side} of the turn of message {group[-1] + 1}; use a template that writes each turn "
            "between the same marks",
            UNCLEAR,
        )

    def _check_span(self, i: int, turn: Span, group: Sequence[int]) -> None:
        """Raise TemplateFailure unless a turn holds its whole message and nothing of another."""
        start, end = turn
        message, own = self._locator.messages[i], self._boundaries.own_span(i)
        is_whole = end >= own.end
        if "tool_calls" in message:
            # a content may begin with what the prompt ends with, such as <think>; a call may not
            is_whole &= start <= own.start and holds_arguments(message, self._locator.text[start:end])
        if not is_whole:
            raise self._locator.template.failure(
                f"does not write message {i + 1} in one piece; use another template", UNCLEAR
            )
        for other in self._spans.of:
            if other is None or other.number in group:
                continue
            # the model would learn to write the user's text
            if other.start < end and other.end > start:
                raise self._locator.template.failure(
                    f"writes message {other.number + 1} inside message {i + 1}; use another template", UNCLEAR
                )


def _joined(first: Turn, second: Turn) -> Turn:
    """Return the turn of two messages, which a template may write in any order."""
    # with what is known of the begin of the one and of the end of the other
    begin = min(first, second, key=lambda turn: turn.start)
    final = max(first, second, key=lambda turn: turn.end)
    return Turn(begin.start, final.end, begin.has_start, final.has_end)


def _is_open(locator: Locator, spans: MessageSpans) -> bool:
    """Return true if the template writes nothing after the last message, which is the assistant's."""
    messages, own = locator.messages, spans.of[-1]
    assert own is not None  # it has a turn
    if "tool_calls" not in messages[-1]:
        return not locator.text[own.end :].strip()
    written = len(locator.text.rstrip())
    if any(marker.end() == written for marker in locator.template.end_marker.finditer(locator.text)):
        return False
    # what follows a call may be its own end: an answer instead of it has none
    render = locator.render([*messages[:-1], {"role": "assistant", "content": "Done."}])
    if render is None:
        return False
    answered = locator.by_marks(render, (len(messages) - 1,))
    answer = answered.of[-1] if answered else None
    return answer is not None and not render.text[answer.end :].strip()
