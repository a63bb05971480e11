"""Spans of contents and assistant turns in a rendered conversation.

A template is a program that may trim, join, reorder and leave out text, so its source shows nothing. It is rendered
twice: plainly, and with marks around every text of the messages (marks.py), which show the place of each message. An
assistant turn begins at the end of the inference prompt (the messages before it and the generation prompt) and ends at
the end of the conversation rendered up to this turn. A turn whose begin or end does not show is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.data.chat.forms import render_readable
from megatron.data.chat.marks import ALPHABETS, CUT, Marked, Place, Places, Span, choose_alphabet, read_generation
from megatron.data.chat.omissions import has_text, holds_arguments, unread_variables, unwritten_keys, unwritten_leaves
from megatron.data.chat.template import LEFT_OUT, NO_VARIABLES, UNCLEAR, ChatTemplate, Message, TemplateFailure

# Ends of a header: if a turn has only the beginning of the generation prompt, that is matched up to one of these.
_HEADER_END = re.compile(r"[\s>\]:]")

_LARGEST_MEMORY = 1 << 14
"""Number of layouts remembered."""


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation, and the place of each message in it."""

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


@dataclass(frozen=True)
class _Prompt:
    """Inference prompt of a turn."""

    tail: str | None
    """Everything after the anchor; None if unknown."""
    added: str
    """Text that add_generation_prompt adds."""


@dataclass(slots=True)
class _Turn:
    start: int
    end: int
    has_start: bool
    """The inference prompt ends at `start`. Else nothing shows the begin, and `start` is the first text's."""
    has_end: bool
    """The turn ends at `end`. Else nothing shows the end."""


class PromptedPart(NamedTuple):
    """Beginning of a conversation."""

    end: int
    """Number of its messages."""
    numbers: list[int]
    """Assistant messages that follow their inference prompts."""
    prompt: str
    """Inference prompt of the last message, if the beginning is not written so; else empty."""


class TurnFinder:
    """Render conversations with one template and find their turns. Results are cached by layout."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self.known: dict[tuple[Any, ...], tuple[_Prompt, int, bool]] = {}

    def find(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        wants: Callable[[int], bool] = lambda number: True,
    ) -> Rendered:
        """Render a conversation and find the assistant messages for which `wants` is true.

        Raises TemplateFailure: the template refuses the conversation, leaves a part of it out, or hides a turn.
        """
        generation: list[Span] = []
        messages, text = render_readable(self.template, messages, variables)
        if self.template.marks_generation:
            text, generation = read_generation(text)
        return _Search(self, messages, variables, text, generation).rendered(wants)

    def prompted_parts(
        self, messages: Sequence[Message], variables: Mapping[str, Any], numbers: Sequence[int]
    ) -> list[PromptedPart]:
        """Return the fewest beginnings of a conversation in which all of `numbers` follow their inference prompts.

        Raises TemplateFailure.
        """
        messages, _ = render_readable(self.template, messages, variables)
        prompts = {i: self.template.render(messages[:i], True, variables) if i else "" for i in numbers}
        parts: list[PromptedPart] = []
        left = list(numbers)
        while left:
            last = left[-1]
            text = self.template.render(messages[: last + 1], variables=variables)
            follow = [i for i in left if text.startswith(prompts[i])] if text.startswith(prompts[last]) else []
            parts.append(PromptedPart(last + 1, follow or [last], "" if follow else prompts[last]))
            left = [i for i in left if i not in parts[-1].numbers]
        return parts[::-1]


class _Search:
    """Search for the turns of one conversation."""

    def __init__(
        self,
        finder: TurnFinder,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        text: str,
        generation: list[Span],
    ):
        self._template, self._known = finder.template, finder.known
        self._messages, self._variables, self._text = messages, variables, text
        self._generation = generation
        self._alphabet = choose_alphabet(text)

    def rendered(self, wants: Callable[[int], bool]) -> Rendered:
        places = self._find_places()
        left_out = self._check_messages(places)
        left_out += unread_variables(self._template, self._variables, self._text)
        left_out += unwritten_keys(self._template, self._messages, self._text)
        numbers = [i for i, message in enumerate(self._messages) if message["role"] == "assistant" and wants(i)]
        turns: list[Span | None] = [None] * len(self._messages)
        generation: dict[int, list[Span]] = {}
        if numbers and self._template.marks_generation:
            generation = self._marked_turns(numbers, places)
            for i, spans in generation.items():
                turns[i] = spans[0][0], spans[-1][1]
        else:
            for group in self._groups(numbers, places.of):
                for i, span in group.items():
                    turns[i] = span
                    self._check_span(i, span, group, places)
        contents = [place.content if place else None for place in places.of]
        return Rendered(
            self._text, contents, turns, generation, turns[-1] is not None and self._is_open(places.of[-1]), left_out
        )

    def _try_render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        """Return the text; None if the template refuses these messages."""
        try:
            return self._template.render(messages, add_generation_prompt, self._variables)
        except TemplateFailure:
            return None

    # Places

    def _find_places(self) -> Places:
        if self._alphabet == len(ALPHABETS):
            raise TemplateFailure(
                "the row has characters of all three private-use areas, which mark its texts; drop those of one",
                UNCLEAR,
            )
        numbers = range(len(self._messages))
        places = self._places_by_marks(self._messages, self._text, numbers)
        if places is not None:
            return places
        if self._template.marks_generation and self._try_render(self._messages) != self._text:
            raise self._template.failure("writes other text with its generation marks; correct the template", UNCLEAR)
        # the template depends on text that the marks changed: each message separately
        found = Places([None] * len(self._messages), [])
        for i in numbers:
            alone = self._places_by_marks(self._messages, self._text, (i,))
            if alone is None:
                found.of[i] = self._place_by_filler(i)
            else:
                found.of[i] = alone.of[i]
                found.leaves += alone.leaves
        return found

    def _places_by_marks(
        self, messages: Sequence[Message], text: str, numbers: Sequence[int], add_generation_prompt: bool = False
    ) -> Places | None:
        """Return places by marks in some messages, whose plain text is `text`; None if the marks change the text."""
        for alphabet in ALPHABETS[self._alphabet :]:
            marked = Marked(messages, numbers, alphabet)
            if marked.is_whole:
                rendered = self._try_render(marked.messages, add_generation_prompt)
                return None if rendered is None else marked.read(rendered, text)
        return None

    def _place_by_filler(self, i: int) -> Place | None:
        """Return the part of the text that changes when the content is replaced."""
        filled = self._filled(self._messages, i)
        if filled is None or filled.count(self._filler) != 1:
            return None
        before, after = filled.split(self._filler)
        start, end = len(before), len(self._text) - len(after)
        if not (self._text.startswith(before) and self._text.endswith(after)) or start > end:
            return None
        return Place(start, end, (start, end), by_filler=True)

    @property
    def _filler(self) -> str:
        return chr(ALPHABETS[self._alphabet].first)

    def _filled(self, messages: Sequence[Message], i: int, add_generation_prompt: bool = False) -> str | None:
        """Render with another content of message i."""
        if not has_text(messages[i].get("content")):
            return None
        changed = [*messages[:i], {**messages[i], "content": self._filler}, *messages[i + 1 :]]
        return self._try_render(changed, add_generation_prompt)

    # Text that the template leaves out

    def _check_messages(self, places: Places) -> list[str]:
        """Return the kinds of texts left out of turns. Raises TemplateFailure for a message or a tool call."""
        left_out = ["reasoning" for _, kind, _ in places.leaves if kind == CUT]
        for i, message in enumerate(self._messages):
            place = places.of[i]
            is_unwritten = (place is None or place.content is None) and has_text(message.get("content"))
            if is_unwritten and "tool_calls" not in message:
                if message["role"] == "system":  # a template may write it in a prompt only
                    left_out.append("system message")
                elif (filled := self._filled(self._messages, i)) is not None and self._filler not in filled:
                    raise self._template.failure(
                        f"leaves out message {i + 1} ({message['role']}); give it a role that the template writes, or "
                        "use another template",
                        LEFT_OUT,
                    )
            if (len(message) > 2 or "tool_calls" in message) and message["role"] == "assistant":
                left_out += unwritten_leaves(self._template, i, message, places)
        return left_out

    # Turns

    def _groups(self, numbers: Sequence[int], places: Sequence[Place | None]) -> list[dict[int, Span]]:
        """Return the spans of the turns, those in one group that the template merges into one."""
        layout = self._layout()
        groups: list[dict[int, Span]] = []
        last: _Turn | None = None
        for i in numbers:
            turn = self._turn(i, places, layout)
            if last is not None and i - 1 in groups[-1] and self._are_merged(last, turn):
                first = min(last, turn, key=lambda one: one.start)
                final = max(last, turn, key=lambda one: one.end)
                last = _Turn(first.start, final.end, first.has_start, final.has_end)
                groups[-1] = dict.fromkeys([*groups[-1], i], (last.start, last.end))
            else:
                self._check_turn(groups, last)
                last = turn
                groups.append({i: (turn.start, turn.end)})
        self._check_turn(groups, last)
        return groups

    def _layout(self) -> tuple[Any, ...]:
        """Return what the template's decisions depend on, beside the text that it writes."""
        variables = {name: value for name, value in self._variables.items() if name not in ("tools", "documents")}
        return (
            tuple((message["role"], *message.keys()) for message in self._messages),
            (*self._variables, json.dumps(variables, sort_keys=True)) if self._variables else (),
        )

    def _are_merged(self, first: _Turn, second: _Turn) -> bool:
        """Return true if two consecutive assistant messages are one turn: the model also writes what is between."""
        if first.end > second.start or not (first.has_end or second.has_start):
            return True
        return not self._text[first.end : second.start].strip()

    def _check_turn(self, groups: Sequence[dict[int, Span]], turn: _Turn | None) -> None:
        if turn is not None and not (turn.has_start and turn.has_end):
            what = "end" if turn.has_start else "begin"
            raise self._template.failure(
                f"does not show the {what} of the turn of message {max(groups[-1]) + 1}; use a template that writes "
                "each turn between the same marks",
                UNCLEAR,
            )

    def _turn(self, i: int, places: Sequence[Place | None], layout: tuple[Any, ...]) -> _Turn:
        """Return what the model writes for message i."""
        own = self._own_place(i, places)
        # the last text that ends before this one: the reference point in other renders
        base, anchor = 0, None
        for j in range(i):
            place = places[j]
            if place and base <= place.end <= own.start:
                base, anchor = place.end, j
        limit = None
        for place in places[i + 1 :]:
            if place and place.start >= own.end and (limit is None or place.start < limit):
                limit = place.start
        key = (i, anchor, layout, self._text[base : own.start], self._text[own.end : limit])
        known = self._known.get(key)
        if known is None:
            end, has_end = self._end(own, i)
            known = self._remember(key, (self._prompt(places, anchor, i), end - own.end, has_end))
        start, has_start = self._start(base, own, known[0])
        return _Turn(start, own.end + known[1], has_start, known[2])

    def _remember(self, key: tuple[Any, ...], found: tuple[_Prompt, int, bool]) -> tuple[_Prompt, int, bool]:
        if len(self._known) < _LARGEST_MEMORY:
            self._known[key] = found
        return found

    def _own_place(self, i: int, places: Sequence[Place | None]) -> Place:
        own = places[i]
        if own is None or own.start == own.end:
            raise self._template.failure(
                f"leaves out message {i + 1}, or rewrites it beyond recognition; use a template that writes its text",
                UNCLEAR,
            )
        return own

    def _prompt(self, places: Sequence[Place | None], anchor: int | None, i: int) -> _Prompt:
        """Return the inference prompt for message i after the anchor."""
        earlier = self._messages[:i]
        with_prompt = self._try_render(earlier, add_generation_prompt=True) if earlier else None
        without = self._try_render(earlier) if earlier else None
        tail = None
        if with_prompt is not None and without is not None:
            place = None if anchor is None else places[anchor]
            tail = self._tail(earlier, with_prompt, place, anchor, add_generation_prompt=True)
        elif not earlier and (alone := self._prompt_alone()):
            return _Prompt(alone, "")
        else:  # the template refuses the beginning alone; it may accept the whole
            with_prompt = self._try_render(self._messages, add_generation_prompt=True)
            without = self._text
        if with_prompt is None:
            return _Prompt(tail, "")
        return _Prompt(tail, with_prompt[_common(with_prompt, without) :])

    def _prompt_alone(self) -> str:
        """Return the inference prompt without messages if the text begins with it; empty if not."""
        alone = self._try_render([], add_generation_prompt=True) or ""
        return alone if self._text.startswith(alone) and alone != self._try_render([]) else ""

    def _tail(
        self,
        messages: Sequence[Message],
        text: str,
        place: Place | None,
        anchor: int | None,
        add_generation_prompt: bool = False,
    ) -> str | None:
        """Return the text after the anchor, whose place is known in the whole, in the render of a part of it."""
        if anchor is None or place is None:
            return text
        if place.by_filler:
            other = self._filled(messages, anchor, add_generation_prompt)
            parts = other.split(self._filler) if other else []
            tail = parts[1] if len(parts) == 2 else None
            return tail if tail is not None and text.endswith(tail) else None
        found = self._places_by_marks(messages, text, (anchor,), add_generation_prompt)
        own = found.of[anchor] if found else None
        return text[own.end :] if own else None

    def _start(self, base: int, own: Place, prompt: _Prompt) -> tuple[int, bool]:
        """Return the place at which the model starts to write, and whether the prompt shows it."""
        if prompt.tail is not None and self._text.startswith(prompt.tail, base):
            start = base + len(prompt.tail)
            return (start, True) if start < own.end else (own.start, False)
        # what comes before is written otherwise by now: the beginning of the generation prompt
        region = self._text[base : own.start]
        wanted = prompt.added.lstrip()
        for size in range(len(wanted), 0, -1):
            piece = wanted[:size]
            if not piece.strip():
                break
            # a header ends with a whole word or marker
            if size < len(wanted) and not _HEADER_END.match(piece[-1]) and piece != wanted.rstrip():
                continue
            found = region.rfind(piece)
            if found >= 0:
                return base + found + size, True
        # without a generation prompt, the first turn begins the text
        return own.start, not wanted and region.strip() in ("", self._template.bos_token)

    def _end(self, own: Place, i: int) -> tuple[int, bool]:
        """Return the end of message i, and whether the template shows it."""
        upto = self._messages[: i + 1]
        rest = self._text[own.end :]
        tail: str | None = rest
        if len(upto) < len(self._messages):
            whole = self._try_render(upto)
            tail = None if whole is None else self._tail(upto, whole, own, i)
        common = 0
        if tail is not None:
            wanted = tail[: self._before_lasting_prompt(upto, tail, own, i)].rstrip()
            if rest.startswith(wanted):
                return own.end + len(wanted), True
            common = _common(wanted, rest)
        # the last turn ends otherwise: only an end marker can show the end of this one
        for marker in self._template.end_marker.finditer(rest):
            if marker.end() > common:
                if not rest[common : marker.start()].strip():
                    return own.end + marker.end(), True
                break
        return own.end, False

    def _before_lasting_prompt(self, upto: Sequence[Message], tail: str, own: Place, i: int) -> int:
        """Return the length of `tail` that belongs to turn i if a template always writes its generation prompt.

        Such a prompt shows if the text up to a turn is not a prefix of the text with a next turn. The suffix that it
        shares with the end of every other turn begins with the end-of-turn marker.
        """
        plain = self._try_render(upto)
        if plain is None or not tail.strip() or self._try_render(upto, add_generation_prompt=True) != plain:
            return len(tail)
        longer = [*upto, {"role": "user", "content": "next"}]
        followed = self._try_render(longer)
        rest = self._tail(longer, followed, own, i) if followed is not None else None
        if rest is None or rest.startswith(tail.rstrip()):
            return len(tail)
        earlier = self._try_render(upto[:i]) if i else None
        shared_end = _common(earlier[::-1], plain[::-1]) if earlier else 0
        begin = max(len(tail) - shared_end, 0)
        certain = _common(tail, rest)
        markers = [found for found in self._template.end_marker.finditer(tail, begin) if found.end() <= certain]
        if len(markers) > 1 or (markers and not tail[: markers[0].start()].strip()):
            return markers[0].end()
        return min(begin, certain)

    def _marked_turns(self, numbers: Sequence[int], places: Places) -> dict[int, list[Span]]:
        """Return the spans of turns by the template's generation marks."""
        turns: dict[int, list[Span]] = {}
        layout = self._layout()
        for i in numbers:
            own = self._own_place(i, places.of)
            others = [place for j, place in enumerate(places.of) if place and j != i]
            low = max((other.end for other in others if other.end <= own.start), default=0)
            high = min((other.start for other in others if other.start >= own.end), default=len(self._text))
            spans = [(start, end) for start, end in self._generation if low <= start and end <= high]
            leaves = [span for number, _, span in places.leaves if number == i and span] or [(own.start, own.end)]
            if not all(any(a <= b and c <= d for a, d in spans) for b, c in leaves):
                raise self._template.failure(
                    f"has generation marks that do not hold message {i + 1} alone; correct the template", UNCLEAR
                )
            key = (i, layout, self._text[own.end : high])
            known = self._known.get(key)
            if known is None:
                end, has_end = self._end(own, i)
                known = self._remember(key, (_Prompt(None, ""), end - own.end, has_end))
            end, has_end, last = own.end + known[1], known[2], spans[-1][1]
            if has_end and self._text[min(last, end) : max(last, end)].strip():
                what = "before" if last < end else "after"
                raise self._template.failure(
                    f"has a generation mark {what} the end of message {i + 1}; move {{% endgeneration %}} to the end "
                    "of the turn",
                    UNCLEAR,
                )
            turns[i] = spans
        return turns

    def _check_span(self, i: int, span: Span, group: Mapping[int, Span], places: Places) -> None:
        """Raise TemplateFailure unless a turn holds its whole message and nothing of another."""
        start, end = span
        own = places.of[i]
        assert own is not None
        is_whole = end >= own.end and ("tool_calls" not in self._messages[i] or start <= own.start)
        if "tool_calls" in self._messages[i]:
            is_whole &= holds_arguments(self._messages[i], self._text[start:end])
        if not is_whole:
            raise self._template.failure(f"does not write message {i + 1} in one piece; use another template", UNCLEAR)
        for j, place in enumerate(places.of):
            if place and j not in group and place.start < end and place.end > start:
                raise self._template.failure(
                    f"writes message {j + 1} inside message {i + 1}; use another template", UNCLEAR
                )

    def _is_open(self, own: Place | None) -> bool:
        """Return true if the template writes nothing after the last message, which is the assistant's."""
        if own is None:
            return False
        if "tool_calls" not in self._messages[-1]:
            return not self._text[own.end :].strip()
        if any(found.end() == len(self._text.rstrip()) for found in self._template.end_marker.finditer(self._text)):
            return False
        # what follows a call may be its own end: an answer instead of it has none
        answered = [*self._messages[:-1], {"role": "assistant", "content": "Done."}]
        text = self._try_render(answered)
        places = None if text is None else self._places_by_marks(answered, text, (len(answered) - 1,))
        place = places.of[-1] if places else None
        return text is not None and place is not None and not text[place.end :].strip()


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])
