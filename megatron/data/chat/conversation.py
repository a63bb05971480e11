"""Conversations, and the rows of a chat file that hold them.

A row is {"messages": [{"role": ..., "content": ...}, ...], "unmask": true or false}; other keys are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.chat.template import Message
from megatron.data.indexed import DataError

ROLES = ("system", "user", "assistant", "tool")
PRETRAINING = "pretraining"
"""Role in InstructLab's older rows: a single message that holds a whole conversation as text."""

_TURNS_OF_PRETRAINING = (
    re.compile(r"<\|(user|assistant|system)\|>\n?"),
    re.compile(r"<\|start_of_role\|>(user|assistant|system)<\|end_of_role\|>\n?"),
)
_ENDS_OF_PRETRAINING = re.compile(r"<\|endoftext\|>|<\|end_of_text\|>")


class BadRow(DataError):
    """A row that is not a usable conversation. `kind` is the name under which it is counted."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: Sequence[Message]
    unmask: bool = False
    """Train on everything but the system messages."""


def parse_row(row: object) -> Chat:
    """Return the conversation in a row. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("not an object", 'the row is not a JSON object such as {"messages": [...]}')
    if "messages" not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise BadRow("no messages", f"no key 'messages'; the row has {keys}")
    given, unmask = row["messages"], row.get("unmask")
    if not isinstance(given, list) or not given:
        raise BadRow("no messages", "'messages' is empty; a conversation has at least one message, a list of objects")
    if unmask is not None and not isinstance(unmask, bool):
        raise BadRow("bad unmask", f"'unmask' is {unmask!r}; write true or false")
    messages: list[Message] = []
    is_pretraining = False
    for number, message in enumerate(given, start=1):
        _check_message(message, number)
        if message["role"] == PRETRAINING:
            messages += _unrolled(message["content"], number)
            is_pretraining = True
        else:
            messages.append(message)
    return Chat(messages, bool(unmask) or is_pretraining)


def _check_message(message: object, number: int) -> None:
    if not isinstance(message, dict):
        raise BadRow("bad message", f'message {number} is not an object such as {{"role": "user", "content": "..."}}')
    role, content = message.get("role"), message.get("content")
    if role not in (*ROLES, PRETRAINING):
        what = f"role {role!r} of message {number} is unknown" if "role" in message else f"message {number} has no role"
        raise BadRow("unknown role", f"{what}; the roles are {', '.join(ROLES)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        what = "is missing" if content is None else f"is a JSON {type(content).__name__}, not a string"
        raise BadRow("missing content", f"the content of message {number} ({role}) {what}; write the text, or drop it")
    if (
        role == "assistant"
        and not content.strip()
        and not (message.get("tool_calls") or message.get("reasoning_content"))
    ):
        raise BadRow("missing content", f"the content of message {number} (assistant) is empty; write what it answers")


def _unrolled(text: str, number: int) -> list[Message]:
    """Return the user and assistant messages in the text of an older row. System messages are left out."""
    found = next((pattern for pattern in _TURNS_OF_PRETRAINING if pattern.search(text)), None)
    if found is None:
        raise BadRow(
            "bad pretraining message",
            f"message {number} (pretraining) contains neither <|user|> nor <|start_of_role|>user<|end_of_role|>; write "
            "the conversation as messages of user and assistant",
        )
    parts = found.split(text)
    messages = [
        {"role": role, "content": _ENDS_OF_PRETRAINING.sub("", content)}
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return [message for message in messages if message["role"] != "system" and message["content"].strip()]


def split_exchanges(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the leading system messages, and the rest cut before each question of the user."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    exchanges: list[list[Message]] = []
    for i in range(first, len(messages)):
        is_question = messages[i]["role"] == "user" and messages[i - 1]["role"] != "user"
        if not exchanges or is_question:
            exchanges.append([])
        exchanges[-1].append(messages[i])
    return list(messages[:first]), exchanges
