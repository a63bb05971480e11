"""Parts of a conversation that a template leaves out.

A tool, a document, a call, or a key of a message such as `images`, that is not written makes the row unusable: the
model would learn an answer to another prompt, or an empty one. Reasoning, a content beside calls, options and other
keys may be left out, as at inference. They are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.data.chat.columns import EMPTY, looks_like_context, texts_in
from megatron.data.chat.conversation import REASONING, TRAIN_FLAGS
from megatron.data.chat.marks import CALL, REASON, Places, is_tags_only
from megatron.data.chat.template import LEFT_OUT, UNCLEAR, ChatTemplate, Message


def unread_variables(template: ChatTemplate, variables: Mapping[str, Any], text: str) -> list[str]:
    """Return the options that the template does not read. Raises TemplateFailure for tools and documents."""
    unread = []
    for name, value in variables.items():
        if name not in ("tools", "documents"):
            unread += [f"chat_template_kwargs {name}"] * (name not in template.variables)
            continue
        missing = [tool for tool in map(_name_of, value) if tool not in text] if name == "tools" else []
        if missing or name not in template.variables:
            what = f"the tool {missing[0]}" if missing else f"the row's {name}"
            raise template.failure(f"does not write {what}; use a template that does, or drop them", LEFT_OUT)
    return unread


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = (function if isinstance(function, dict) else tool).get("name")
    return name if isinstance(name, str) else ""


def unwritten_leaves(template: ChatTemplate, i: int, message: Message, places: Places) -> list[str]:
    """Return the kinds of texts of message i that are left out. Raises TemplateFailure for a tool call."""
    leaves = [(kind, span) for number, kind, span in places.leaves if number == i]
    has_reasoning = any(has_text(message.get(name)) for name in REASONING)
    left_out = ["reasoning"] * (has_reasoning and not any(span for kind, span in leaves if kind == REASON))
    if "tool_calls" not in message:
        return left_out
    content, place = message.get("content"), places.of[i]
    if (place is None or place.content is None) and has_text(content) and not is_tags_only(content):
        left_out.append("content beside tool calls")
    calls = [span for kind, span in leaves if kind == CALL]
    if not calls:
        raise template.failure(f"changes the tool calls of message {i + 1}; they cannot be identified", UNCLEAR)
    if not all(calls):
        what = "a part of the tool calls" if any(calls) else "the tool calls"
        raise template.failure(
            f"does not write {what} of message {i + 1}; use a template that writes tool calls", LEFT_OUT
        )
    return left_out


_OWN_KEYS = {"role", "content", "name", "id", "type", "tool_calls", "tool_call_id", "function_call"}
"""Keys of a message that are checked elsewhere, or name it."""


def unwritten_keys(template: ChatTemplate, messages: Sequence[Message], text: str) -> list[str]:
    """Return the kinds of further texts of messages that are left out. Raises TemplateFailure for one of a prompt."""
    left_out = []
    further = [
        (number, name, value)
        for number, message in enumerate(messages, start=1)
        if len(message) > 2
        for name, value in message.items()
    ]
    for number, name, value in further:
        if name in _OWN_KEYS or name in REASONING or name in TRAIN_FLAGS or value in EMPTY:
            continue
        if _is_read(template, name) or _is_written(value, text):
            continue
        if looks_like_context(name):
            raise template.failure(
                f"does not write {name!r} of message {number}; write it into the content, or use a template that does",
                LEFT_OUT,
            )
        left_out.append(f"{name!r} of messages")
    return left_out


def _is_read(template: ChatTemplate, key: str) -> bool:
    """Return true if a template has the key of something: `message.key`, `message['key']`, `message.get('key')`."""
    return re.search(rf"(\.|\[\s*['\"]|get\(\s*['\"]){re.escape(key)}\b", template.source.text) is not None


def _is_written(value: Any, text: str) -> bool:
    try:
        return all(part in text for part in texts_in(value))
    except TypeError:  # a number, or holds some
        return isinstance(value, bool | int | float)


def holds_arguments(message: Message, turn: str) -> bool:
    """Return true if the turn has all keys and values that cannot be marked. Those marked are in its place."""
    for call in message["tool_calls"]:
        for value in _unmarked_values(call.get("function", call).get("arguments", {})):
            text = json.dumps(value, ensure_ascii=False)
            if (text[1:-1] if isinstance(value, str) else text) not in turn and str(value) not in turn:
                return False
    return True


def _unmarked_values(value: Any) -> list[Any]:
    """Return the keys, numbers, booleans and nulls in the arguments of a call."""
    if isinstance(value, dict):
        return [*value, *(found for item in value.values() for found in _unmarked_values(item))]
    if isinstance(value, list):
        return [found for item in value for found in _unmarked_values(item)]
    return [] if isinstance(value, str) else [value]


def has_text(value: object) -> bool:
    if isinstance(value, list):
        return any(part["text"].strip() for part in value)
    return isinstance(value, str) and bool(value.strip())
