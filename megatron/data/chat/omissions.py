"""Parts of a conversation that a template leaves out.

A tool, a document or a call that is not written makes the row unusable: the model would learn an answer to another
prompt, or an empty one. Reasoning, a content beside calls, and options may be left out, as at inference. They are
counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.data.chat.conversation import REASONING
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
