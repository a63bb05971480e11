"""Conversations, and the rows of a chat file that hold them.

A row is {"messages": [{"role": ..., "content": ...}, ...]}, with tools, documents, chat_template_kwargs and unmask if
it has them; columns.py and row_forms.py look after other keys. Messages become what `apply_chat_template` of
transformers gives to a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from megatron.data.chat.template import NO_VARIABLES, Message
from megatron.data.index.indexed import DataError
from megatron.data.read.document_parser import value_of_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SYSTEM_ROLES = ("system", "developer")
"""Roles that `unmask` does not train."""
PRETRAINING = "pretraining"
"""Role in InstructLab's older rows: a single message that holds a whole conversation as text."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning, each under which some templates read it."""
TRAIN_FLAGS = {"train": True, "training": True, "loss": True, "weight": True, "mask": False}
"""Keys of a message that decide whether it is trained, with the value that trains it."""
_EXCLUDING_FLAGS = {"weight", "mask"}
"""Flags that only exclude a turn: `weight: 1` trains no message of the user."""
_PARTS_FLAGS = ("train_detail", "training_detail")
"""Keys under which Axolotl trains a part of a content. Refused, since the whole turn would be trained."""
ROW_KEYS = ("messages", "unmask", "chat_template_kwargs", "tools", "functions", "documents")
"""The keys of a row that are read."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

_TURNS_OF_PRETRAINING = (
    re.compile(r"<\|(user|assistant|system)\|>\n?"),
    re.compile(r"<\|start_of_role\|>(user|assistant|system)<\|end_of_role\|>\n?"),
)
_BEGIN_OF_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*['"](role|from|content|value)['"]\s*:""")
_BRACKETS = ("[", "{")
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
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template: tools, documents, and those of chat_template_kwargs."""
    flags: tuple[bool | None, ...] = ()
    """For each message whether it is trained; None: by its role. Empty: all by their roles."""

    def is_trained(self, number: int, unmask: bool = False) -> bool:
        """Return true if message `number` is trained. `unmask`: as if the row had it."""
        if self.flags and (flag := self.flags[number]) is not None:
            return flag
        role = self.messages[number]["role"]
        return role == "assistant" or ((unmask or self.unmask) and role not in SYSTEM_ROLES)

    @property
    def ends_with_answer(self) -> bool:
        """True if the last message is the assistant's, or is trained as one."""
        return self.messages[-1]["role"] == "assistant" or self.is_trained(len(self.messages) - 1)

    def prompted(self, end: int, numbers: Sequence[int]) -> Chat:
        """Return the first `end` messages, of whose assistant messages `numbers` are trained."""
        messages = self.messages[:end]
        flags = tuple(i in numbers if message["role"] == "assistant" else None for i, message in enumerate(messages))
        return replace(self, messages=messages, flags=flags)

    def part(self, head: int, start: int, end: int) -> Chat:
        """Return the conversation of the first `head` messages and of [start, end)."""
        numbers = [*range(head), *range(start, end)]
        flags = self.flags
        if flags:  # they move with their messages
            flags = tuple(flags[i] for i in numbers)
        return replace(self, messages=[self.messages[i] for i in numbers], flags=flags)


def parse_row(row: object) -> Chat:
    """Return the conversation in a row. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("not an object", 'the row is not a JSON object such as {"messages": [...]}')
    given = _given_messages(row)
    unmask = row.get("unmask")
    if unmask is not None and not isinstance(unmask, bool):
        raise BadRow("bad unmask", f"'unmask' is {unmask!r}; write true or false")
    messages: list[Message] = []
    flags: list[bool | None] = []
    is_pretraining = False
    for number, message in enumerate(given, start=1):
        if _is_plain(message):  # most messages: nothing to check or change
            messages.append(message)
            flags.append(None)
            continue
        _check_role(message, number)
        if message["role"] == PRETRAINING:
            messages += _unrolled(message.get("content"), number)
            is_pretraining = True
        else:
            messages.append(_checked(message, number))
            flags.append(train_flag(message, number))
    # InstructLab trains all of a conversation in its older form
    # one message unrolls to several, for which there are no flags
    if is_pretraining or flags.count(None) == len(flags):
        flags = []
    return Chat(messages, bool(unmask) or is_pretraining, _variables(row), tuple(flags))


def _given_messages(row: Mapping[str, Any]) -> list[Any]:
    if "messages" not in row:
        keys = ", ".join(map(repr, row)) or "none"
        what = f"no key 'messages'; the row has {keys}"
        raise BadRow("no messages", f'{what}; write it as {{"messages": [{{"role": "user", "content": "..."}}, ...]}}')
    given = list_of(row["messages"], "messages")
    if isinstance(given, list) and given:
        return given
    what = f"{given!r:.40}"
    if not given:
        what = "empty"
    raise BadRow("no messages", f"'messages' is {what}; a conversation has at least one message, a list of objects")


# ---------------------------------------------------------------------------------------------------------------------
# JSON within JSON: tables hold lists and objects as text


def _from_json(value: Any, what: str, kind: str, remedy: str) -> Any:
    """Return the value of JSON text, and any other value as it is. Raises BadRow."""
    # blank text is not JSON: the callers decide what it means
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return value_of_text(value)
    except orjson.JSONDecodeError as error:
        raise BadRow(kind, f"{what} is text that is not JSON ({error}); {remedy}") from None
    except DataError as error:
        raise BadRow(kind, f"{what} is JSON text: {error}") from None


def an_object(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    if isinstance(value, dict):
        return value
    return {}


def list_of(value: Any, key: str) -> Any:
    """Return the value of a column of lists, which may be JSON text. Raises BadRow for other text."""
    if not isinstance(value, str) or not value.strip():
        return value
    parsed = _from_json(value, repr(key), f"bad {key}", "write a list")
    if not isinstance(parsed, list):
        raise BadRow(f"bad {key}", f"{key!r} is JSON text of a {type(parsed).__name__}; write a list")
    return parsed


def messages_or_text(value: Any, key: str) -> Any:
    """Return the value of a column of texts or of messages: JSON text of messages as messages, all else as it is.

    Raises BadRow for text that begins as messages do and is not JSON.
    """
    # nearly all texts end here, without the cost of parsing
    if not isinstance(value, str) or not value.lstrip().startswith(_BRACKETS):
        return value
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        # a text may begin with a bracket, as a list in Markdown does
        if not _BEGIN_OF_MESSAGES.match(value):
            return value
        raise BadRow(
            f"bad {key}", f"{key!r} begins as messages do, but is not JSON ({error}); write a list of messages"
        ) from None
    messages = parsed
    if not isinstance(messages, list):
        messages = [messages]
    # an answer may itself be JSON, such as {"role": "admin"}: without both keys of a message it is a text
    if not messages or not all(isinstance(one, dict) and _speaks(one) for one in messages):
        return value
    # as `orjson.loads`, but for a key that occurs twice, which matters in messages alone
    _from_json(value, repr(key), f"bad {key}", "write a list of messages")
    return messages


def _speaks(message: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= message.keys() or {"from", "value"} <= message.keys()


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def _is_plain(message: object) -> bool:
    """Return true if a message has a role and a text only."""
    # runs for each message of a large file: plain comparisons alone
    if not isinstance(message, dict) or len(message) != 2:
        return False
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or not isinstance(content, str):
        return False
    # an empty answer needs the longer checks, which refuse it
    return role != "assistant" or bool(content.strip())


def _check_role(message: object, number: int) -> None:
    if not isinstance(message, dict):
        raise BadRow("bad message", f'message {number} is not an object such as {{"role": "user", "content": "..."}}')
    role = message.get("role")
    if role in ROLES or role == PRETRAINING:
        return
    what = f"message {number} has no role"
    if "role" in message:
        what = f"role {role!r} of message {number} is unknown"
    raise BadRow("unknown role", f"{what}; the roles are {', '.join(ROLES)}")


def _checked(message: Message, number: int) -> Message:
    """Return a message for a template: without empty keys, with calls as objects. Raises BadRow."""
    role, content = message["role"], message.get("content")
    # with role and content alone there is nothing to bring into another form
    if len(message) > 2 or content is None:
        message = _normalized(message, number)
    is_assistant = role == "assistant"
    has_more = is_assistant and ("tool_calls" in message or any(message.get(name) for name in REASONING))
    if content is None:
        if has_more:
            return message
        raise BadRow(
            "missing content", f"the content of message {number} ({role}) is missing; write the text, or drop it"
        )
    if isinstance(content, str):
        text = content.strip()
    else:
        text = _text_of_parts(content, message, number)
    # a user may say nothing, and a tool return nothing; an empty answer would teach to end at once
    if is_assistant and not has_more and not text:
        raise BadRow("missing content", f"the content of message {number} (assistant) is empty; write what it answers")
    return message


def _text_of_parts(content: object, message: Message, number: int) -> str:
    """Return the text in a list of parts, without surrounding white space. Raises BadRow."""
    where = f"the content of message {number} ({message['role']})"
    if not isinstance(content, list):
        raise BadRow(
            "missing content",
            f"{where} is a JSON {type(content).__name__}, not a string or a list of text parts; write it as text",
        )
    for part in content:
        kind = type(part).__name__
        if isinstance(part, dict):
            kind = part.get("type", "text")
        # an image or a sound that is left out would leave an answer to what the model has not seen
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRow(
                "bad content part",
                f"{where} is a JSON list, not a string or a list of text parts: one is of type {kind!r}; a part is "
                '{"type": "text", "text": "..."}',
            )
    return "".join(part["text"] for part in content).strip()


def _normalized(message: Message, number: int) -> Message:
    """Return a message as transformers gives it to a template, with tool calls in one form. Raises BadRow."""
    # templates test whether a key is there: a null of a table would be written as "None"
    changed = {key: value for key, value in message.items() if value is not None}
    reasoning = _reasoning(changed, number)
    if reasoning is not None:
        # templates of each family read one of the names
        changed |= dict.fromkeys(REASONING, reasoning)
    calls, older = (changed.pop(key, None) for key in ("tool_calls", "function_call"))
    if calls := _calls(calls, older, message["role"], number):
        changed["tool_calls"] = calls
    return changed


def _calls(given: Any, older: Any, role: str, number: int) -> list[dict[str, Any]]:
    """Return the calls in `tool_calls`, or the single one in `function_call`, its older form. Raises BadRow."""
    calls, call = (
        _from_json(value, f"{key!r} of message {number}", "bad tool call", "correct the text")
        for key, value in (("tool_calls", given), ("function_call", older))
    )
    if calls and call:
        raise BadRow("bad tool call", f"message {number} has tool_calls and function_call; keep tool_calls")
    if call:
        calls = [{"type": "function", "function": call}]
    if not calls:
        return []
    if role != "assistant" or not isinstance(calls, list):
        what = f"message {number} ({role}) has tool_calls {str(calls)[:40]!r}"
        raise BadRow("bad tool call", f"{what}; a list of calls belongs to the assistant")
    return [_checked_call(call, number) for call in calls]


def _reasoning(message: Message, number: int) -> str | None:
    """Return the reasoning of a message; None without one. Raises BadRow."""
    given = [message[name] for name in REASONING if name in message]
    for text in given:
        if not isinstance(text, str):
            raise BadRow("bad reasoning", f"the reasoning of message {number} is {text!r}; write it as text")
    texts = set(filter(None, given))
    if len(texts) > 1:
        raise BadRow("bad reasoning", f"message {number} has two reasonings under different names; keep one")
    if given:
        return next(iter(texts), "")
    return None


def _checked_call(call: object, number: int) -> dict[str, Any]:
    """Return a tool call with a name and arguments, an object or its JSON text. Raises BadRow."""
    # with or without {"function": ...} around it: both forms are common
    described = an_object(call)
    function = an_object(described.get("function", described))
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadRow(
            "bad tool call",
            f'a tool call of message {number} is {str(call)[:60]}; write {{"type": "function", "function": {{"name": '
            '"...", "arguments": {...}}}',
        )
    given = function.get("arguments")
    arguments = _from_json(given, f"'arguments' of {name} in message {number}", "bad tool call", "correct the text")
    if arguments and not isinstance(arguments, dict):
        raise BadRow(
            "bad tool call",
            f"the arguments of {name} in message {number} are {str(arguments)[:60]!r}; write a JSON object",
        )
    # JSON text stays text here: forms.py gives the template what it can write
    function = {**function, "arguments": given}
    if not arguments:
        function["arguments"] = {}
    if "function" not in described:
        return function
    return {**described, "function": function}


def train_flag(message: Message, number: int) -> bool | None:
    """Return the value of `train`, `weight` and the like; None without them. Raises BadRow."""
    part_flag = next((key for key in _PARTS_FLAGS if message.get(key)), None)
    if part_flag is not None:
        raise BadRow(
            "bad train flag",
            f"{part_flag!r} of message {number} trains a part of a content; turns are trained whole: drop it, or write "
            "true or false as 'train'",
        )
    flags: dict[str, bool] = {}
    for key, training_value in TRAIN_FLAGS.items():
        value = message.get(key)
        # a null of a table says nothing
        if value is None:
            continue
        if value not in (0, 1):  # False and True are among them
            raise BadRow(
                "bad train flag", f"{key!r} of message {number} is {str(value)[:40]!r}; write true or false, or 1 or 0"
            )
        # `mask: true` excludes, where `train: true` trains
        flags[key] = bool(value) == training_value
    if not flags:
        return None
    if len(set(flags.values())) > 1:
        raise BadRow("bad train flag", f"{' and '.join(flags)} of message {number} contradict each other; keep one")
    is_trained = next(iter(flags.values()))
    # OpenAI's weight: 1 is the default of an answer, and no request to train a message of the user
    if is_trained and flags.keys() <= _EXCLUDING_FLAGS:
        return None
    return is_trained


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _variables(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables of the template in a row. Raises BadRow."""
    if len(row) == 1:  # the messages alone, as most rows
        return NO_VARIABLES
    variables = {**_options(row)}
    if tools := _tools(row):
        variables["tools"] = tools
    if documents := _objects(row, "documents"):
        variables["documents"] = documents
    return variables or NO_VARIABLES


def _options(row: Mapping[str, Any]) -> Mapping[str, Any]:
    options = row.get("chat_template_kwargs")
    if not options:
        return {}
    if not isinstance(options, dict):
        raise _bad_options(f"is {str(options)[:40]!r}")
    # it would replace the row's own messages or tools in the template
    reserved = [name for name in _RESERVED if name in options]
    if reserved:
        raise _bad_options(f"holds {', '.join(reserved)}, a key of the row")
    return options


def _bad_options(what: str) -> BadRow:
    return BadRow("bad chat_template_kwargs", f"'chat_template_kwargs' {what}; write an object of options")


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools, for which `functions` is the older name."""
    tools, functions = (_objects(row, key) for key in ("tools", "functions"))
    if tools and functions:
        raise BadRow("bad tools", "the row has 'tools' and 'functions'; keep 'tools'")
    # a function of the older name is the inner part of a tool
    return tools or [{"type": "function", "function": function} for function in functions]


def _objects(row: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of objects, also from JSON text. Raises BadRow."""
    value = _from_json(row.get(key), repr(key), f"bad {key}", "write a list of objects")
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(f"bad {key}", f"{key!r} is {str(value)[:60]!r}; write a list of objects")
    return value


def _unrolled(text: object, number: int) -> list[Message]:
    """Return the user and assistant messages in the text of an older row. System messages are left out."""
    if not isinstance(text, str):
        raise BadRow("missing content", f"the content of message {number} (pretraining) is not text; write the text")
    pattern = next((pattern for pattern in _TURNS_OF_PRETRAINING if pattern.search(text)), None)
    if pattern is None:
        raise BadRow(
            "bad pretraining message",
            f"message {number} (pretraining) contains neither <|user|> nor <|start_of_role|>user<|end_of_role|>; write "
            "the conversation as messages of user and assistant",
        )
    # [before the first turn, role, content, role, content, ...]: the pattern has one group
    _, *parts = pattern.split(text)
    messages: list[Message] = []
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        # the template writes its own end; that of the text would be a second one
        content = _ENDS_OF_PRETRAINING.sub("", content)
        if role != "system" and content.strip():
            messages.append({"role": role, "content": content})
    return messages


def exchanges_of(messages: Sequence[Message]) -> list[int]:
    """Return the numbers at which the exchanges begin, after the leading system messages, and that of the end."""
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    starts = []
    for i in range(first, len(roles)):
        # several messages of the user before an answer are one question
        is_question = roles[i] == "user" and roles[i - 1] != "user"
        if i == first or is_question:
            starts.append(i)
    return [*starts, len(roles)]
