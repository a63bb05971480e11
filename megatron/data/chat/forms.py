"""Forms of messages: lists of text parts and arguments of tool calls, as a template can write them.

A template written for one form fails on another or distorts it: it writes a list as Python does, [{'type': 'text'}],
puts JSON text in quotes again, or escapes the quotes of a call for HTML. It gets the first form that it writes well: as
in the row; with arguments as objects; with arguments as JSON text; the same with parts as lines of one text, which is
what inference servers give to such a template; the same with an empty content beside calls where there is none. A call
without "function" around its name is also given with it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.chat.template import UNCLEAR, ChatTemplate, Message, TemplateFailure
from megatron.data.read.document_parser import parts_of, value_of_text


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return value_of_text(arguments)
    return arguments


def _json_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class _Form:
    """Form in which messages are given to a template."""

    fills_content: bool
    """With an empty content where a message has none."""
    joins_parts: bool
    """With the parts of a content as lines of one text."""
    wraps_calls: bool
    """With {"function": ...} around calls."""
    convert: Callable[[Any], Any] | None
    """Change of the arguments of calls."""

    def of(self, message: Message) -> Message:
        """Return a message in this form."""
        changed = dict(message)
        if self.fills_content:  # some templates concatenate content without a test whether it is there
            changed = {"content": "", **message}
        content = message.get("content")
        if self.joins_parts and isinstance(content, list):
            changed["content"] = "\n".join(part["text"] for part in content)
        if "tool_calls" in message:
            changed["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return changed

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.wraps_calls:
            call = _with_function(call)
        if self.convert is None:
            return call
        return _converted(call, self.convert)


def _forms_of(messages: Sequence[Message]) -> list[_Form]:
    """Return the forms in which messages may be given, the most faithful first; none for texts alone."""
    has_parts = False
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        has_parts |= isinstance(message.get("content"), list)
        calls += message.get("tool_calls", ())
    if not has_parts and not calls:
        return []
    # a form that changes nothing would render the same text twice
    fills, joins, wraps = [False], [False], [False]
    conversions: list[Callable[[Any], Any] | None] = [None]
    if has_parts:
        joins.append(True)
    if calls:
        fills.append(True)
        conversions += [_object, _json_text]
    if any("function" not in call for call in calls):
        wraps.append(True)
    # the last factor varies fastest: arguments are converted before anything else of a message is changed
    return [_Form(*form) for form in itertools.product(fills, joins, wraps, conversions)]


def render_readable(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[Sequence[Message], str]:
    """Return the messages in the first form that the template writes well, and their text with generation marks.

    Raises TemplateFailure.
    """
    forms = _forms_of(messages)
    if not forms:
        return messages, template.render(messages, variables=variables, marks_generation=True)
    failures: dict[bool, TemplateFailure] = {}
    for form in forms:
        given = [form.of(message) for message in messages]
        try:
            text = template.render(given, variables=variables, marks_generation=True)
        except TemplateFailure as error:
            # of each the first: that of the form most like the row's
            failures.setdefault(form.wraps_calls, error)
            continue
        if not any(_is_distorted(message, text) for message in given):
            return given, text
    # the template's own words, for the most usual form of a call
    is_wrapped = any(form.wraps_calls for form in forms)
    raise failures.get(is_wrapped) or template.failure(
        "distorts content parts or the arguments of tool calls; use a template that supports them", UNCLEAR
    )


def _with_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call as {"type": "function", "function": {"name": ...}}."""
    function = call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call}
    # such as the id, which results of calls refer to
    others = {key: value for key, value in call.items() if key not in function}
    return {"type": "function", **others, "function": function}


def _converted(call: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _converted(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments", {}))}


def _is_distorted(message: Message, text: str) -> bool:
    """Return true if the text has a list or an object of the message as Python writes it, or JSON text escaped."""
    content = message.get("content")
    if isinstance(content, list) and any(_is_written_whole(part, text) for part in content):
        return True
    calls = message.get("tool_calls")
    if not calls:
        return False
    # Jinja escapes for HTML where a template uses its own filters
    if "&#34;" in text and "&#34;" not in _json(message):
        return True
    return any(_are_distorted(call.get("function", call).get("arguments"), text) for call in calls)


def _is_written_whole(part: Mapping[str, Any], text: str) -> bool:
    """Return true if the text has all of a content part and not only its text."""
    # a template that writes {{ message.content }} writes a list of parts as Python does
    python = repr(part)
    return any(written in text for written in (python, _json(python)[1:-1], _json(part)))


def _are_distorted(arguments: Any, text: str) -> bool:
    if isinstance(arguments, str):
        return arguments not in text and _json(arguments)[1:-1] in text
    # [1, 2] is the same in both, and proves nothing; {'a': 1} is Python's alone
    containers = [part for part in parts_of(arguments) if isinstance(part, (dict, list))]
    return any(repr(part) in text for part in containers if repr(part) != _json(part))
