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
from megatron.data.chat.locating import Locator
from megatron.data.chat.marks import CALL, CUT, REASON, MessageSpans, has_text, is_tags_only
from megatron.data.chat.template import LEFT_OUT, UNCLEAR, ChatTemplate, Message, TemplateFailure

_OWN_KEYS = {"role", "content", "id", "type", "tool_calls", "tool_call_id"}
_KNOWN_KEYS = _OWN_KEYS.union(REASONING, TRAIN_FLAGS)
"""Keys of a message that are checked elsewhere, number it, or are not for the template."""


def check_omissions(locator: Locator, spans: MessageSpans) -> list[str]:
    """Return the kinds of the texts and options that the template leaves out of whole turns.

    Raises TemplateFailure for those without which the row must not be trained.
    """
    template, text = locator.template, locator.text
    left_out = ["reasoning" for leaf in spans.leaves if leaf.kind == CUT]
    for i, message in enumerate(locator.messages):
        has_calls = "tool_calls" in message
        # a content beside calls may be left out, as many templates do; it is counted below
        if not has_calls and spans.content(i) is None and has_text(message.get("content")):
            left_out += _unwritten_content(locator, i, message)
        if (len(message) > 2 or has_calls) and message["role"] == "assistant":
            left_out += _unwritten_leaves(template, i, message, spans)
    left_out += _unread_variables(locator)
    left_out += _unwritten_keys(template, locator.messages, text)
    return left_out


def _unwritten_content(locator: Locator, i: int, message: Message) -> list[str]:
    if message["role"] == "system":
        return ["system message"]  # a template may write it in a prompt only
    # a content that is not where it was marked may be written otherwise, but not one that can be replaced unseen
    if locator.leaves_out(i):
        raise locator.template.failure(
            f"leaves out message {i + 1} ({message['role']}); give it a role that the template writes, or "
            "use another template",
            LEFT_OUT,
        )
    return []


def _unwritten_leaves(template: ChatTemplate, i: int, message: Message, spans: MessageSpans) -> list[str]:
    leaves = spans.leaves_of(i)
    left_out = []
    has_reasoning = any(has_text(message.get(name)) for name in REASONING)
    # one of the keys is enough: a reasoning stands under all names that templates read
    if has_reasoning and not any(leaf.span for leaf in leaves if leaf.kind == REASON):
        left_out.append("reasoning")
    if "tool_calls" not in message:
        return left_out
    content = message.get("content")
    if spans.content(i) is None and has_text(content) and not is_tags_only(content):
        left_out.append("content beside tool calls")
    calls = [leaf.span for leaf in leaves if leaf.kind == CALL]
    # no leaf at all: marks changed the text, so it is unknown where the calls are
    if not calls:
        raise template.failure(f"changes the tool calls of message {i + 1}; they cannot be identified", UNCLEAR)
    # a turn that lacks an argument would teach to call without it
    if not all(calls):
        what = "a part of the tool calls" if any(calls) else "the tool calls"
        raise template.failure(
            f"does not write {what} of message {i + 1}; use a template that writes tool calls", LEFT_OUT
        )
    return left_out


def _unread_variables(locator: Locator) -> list[str]:
    """Return the options that the template does not read. Raises TemplateFailure for tools and documents."""
    template, variables, text = locator.template, locator.variables, locator.text
    for tool in variables.get("tools", ()):
        name = _name_of(tool)
        # by name: the form in which a template writes a tool is its own
        if name not in text:
            raise _unwritten_variable(template, f"the tool {name}")
    unread = []
    for name in variables:
        if name in ("tools", "documents"):
            # a call may write the name of a tool that is not described
            if name not in template.variables or _writes_same_without(name, locator):
                raise _unwritten_variable(template, f"the row's {name}")
            continue
        # a name that the template uses anywhere: whether it writes the value cannot be seen
        if name in template.variables:
            continue
        unread.append(f"chat_template_kwargs {name}")
    return unread


def _writes_same_without(name: str, locator: Locator) -> bool:
    others = {key: value for key, value in locator.variables.items() if key != name}
    try:
        return locator.template.render(locator.messages, variables=others) == locator.text
    except TemplateFailure:  # it needs them
        return False


def _unwritten_variable(template: ChatTemplate, what: str) -> Exception:
    return template.failure(f"does not write {what}; use a template that does, or drop them", LEFT_OUT)


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    described = function if isinstance(function, dict) else tool
    name = described.get("name")
    return name if isinstance(name, str) else ""


def _unwritten_keys(template: ChatTemplate, messages: Sequence[Message], text: str) -> list[str]:
    """Return the kinds of further texts of messages that are left out. Raises TemplateFailure for one of a prompt."""
    left_out = []
    for number, message in enumerate(messages, start=1):
        if len(message) <= 2:  # most messages: nothing but a role and a content, or calls
            continue
        for name, value in message.items():
            if name in _KNOWN_KEYS or value in EMPTY:
                continue
            # a key that is read may steer the template without being written
            if _is_read(template, name) or _is_written(value, text):
                continue
            if looks_like_context(name):
                raise template.failure(
                    f"does not write {name!r} of message {number}; write it into the content, or use a template that "
                    "does",
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
    """Return true if the turn has all keys and values of its calls that cannot be marked."""
    for call in message["tool_calls"]:
        for value in _unmarked_values(call.get("function", call).get("arguments", {})):
            text = json.dumps(value, ensure_ascii=False)
            if isinstance(value, str):
                text = text[1:-1]
            # templates write values as JSON or as Python does
            if text not in turn and str(value) not in turn:
                return False
    return True


def _unmarked_values(value: Any) -> list[Any]:
    """Return the keys, numbers, booleans and nulls in the arguments of a call."""
    if isinstance(value, str):
        return []
    if isinstance(value, dict):
        return [*value, *(leaf for item in value.values() for leaf in _unmarked_values(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _unmarked_values(item)]
    return [value]
