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
from typing import Any

import orjson

from megatron.data.chat.template import UNCLEAR, ChatTemplate, Message, TemplateFailure


def render_readable(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[Sequence[Message], str]:
    """Return the messages in the first form that the template writes well, and their text with generation marks.

    Raises TemplateFailure.
    """
    has_parts = has_calls = has_bare_calls = False
    for message in messages:
        has_parts |= isinstance(message.get("content"), list)
        has_calls |= "tool_calls" in message
        has_bare_calls |= any("function" not in call for call in message.get("tool_calls", ()))
    if not has_parts and not has_calls:
        return messages, template.render(messages, variables=variables, marks_generation=True)
    failures: dict[bool, TemplateFailure] = {}
    fills = (False, True)[: 1 + has_calls]
    joins = (False, True)[: 1 + has_parts]
    wraps = (False, True)[: 1 + has_bare_calls]
    conversions = (None, _object, _json_text)[: 1 + 2 * has_calls]
    wrapped = [_with_functions(message) for message in messages] if has_bare_calls else messages
    for fills_content, joins_parts, is_wrapped, convert in itertools.product(fills, joins, wraps, conversions):
        given = wrapped if is_wrapped else messages
        form = [_in_form(message, joins_parts, convert, fills_content) for message in given]
        try:
            text = template.render(form, variables=variables, marks_generation=True)
        except TemplateFailure as error:
            failures.setdefault(is_wrapped, error)
            continue
        if not any(_is_distorted(message, text) for message in form):
            return form, text
    raise failures.get(has_bare_calls) or template.failure(
        "distorts content parts or the arguments of tool calls; use a template that supports them", UNCLEAR
    )


def _in_form(message: Message, joins_parts: bool, convert: Callable[[Any], Any] | None, fills_content: bool) -> Message:
    changed = {"content": "", **message} if fills_content else dict(message)
    if joins_parts and isinstance(message.get("content"), list):
        changed["content"] = "\n".join(part["text"] for part in message["content"])
    if convert and "tool_calls" in message:
        changed["tool_calls"] = [_converted(call, convert) for call in message["tool_calls"]]
    return changed


def _with_functions(message: Message) -> Message:
    """Return the message with {"type": "function", "function": {"name": ...}} for each call."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call}
        others = {key: value for key, value in call.items() if key not in function}
        calls.append({"type": "function", **others, "function": function})
    return {**message, "tool_calls": calls}


def _converted(call: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _converted(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments", {}))}


def _object(arguments: Any) -> Any:
    return orjson.loads(arguments) if isinstance(arguments, str) else arguments


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_distorted(message: Message, text: str) -> bool:
    """Return true if the text has a list or an object of the message as Python writes it, or JSON text escaped."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if any(written in text for written in (repr(part), _json(repr(part))[1:-1], _json(part))):
            return True
    calls = message.get("tool_calls")
    if not calls:
        return False
    if "&#34;" in text and "&#34;" not in _json(message):
        return True
    for call in calls:
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str):
            if arguments not in text and _json(arguments)[1:-1] in text:
                return True
        elif any(repr(value) != _json(value) and repr(value) in text for value in _containers(arguments)):
            return True
    return False


def _containers(value: Any) -> list[Any]:
    """Return all objects and lists in a JSON value."""
    if isinstance(value, dict):
        return [value, *(found for item in value.values() for found in _containers(item))]
    if isinstance(value, list):
        return [value, *(found for item in value for found in _containers(item))]
    return []
