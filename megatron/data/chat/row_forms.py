"""Forms in which people have rows for fine-tuning, read as conversations.

    messages           {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt           {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
    prompt_completion  {"prompt": "...", "completion": "..."}, or lists of messages; `response` for `completion` too
    alpaca             {"instruction": "...", "input": "...", "output": "..."}; Dolly's `context` and `response` too
    question_answer    {"question": "...", "answer": "..."}; `response` for `answer` too, and stack-exchange-paired's
                       `response_j`, the preferred one
    text               {"text": "..."}: no prompt, all of it is trained
    template           any columns: a template with {column} gives the prompt, and one column the answer

Without an option, the form of a row is found by its keys. A key with null is absent, as tables write it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from megatron.data.chat.columns import COLUMNS, FURTHER, LABELS, SYSTEM, Row, texts_in
from megatron.data.chat.conversation import ROW_KEYS as VARIABLE_KEYS
from megatron.data.chat.conversation import (
    TRAIN_FLAGS,
    BadRow,
    Chat,
    an_object,
    list_of,
    messages_or_text,
    parse_row,
)
from megatron.data.chat.template import Message
from megatron.data.index.indexed import DataError
from megatron.data.read.document_parser import value_at, value_of_text

PLAIN = "plain"
"""Chat template that writes contents alone, one after the other."""
AUTO, MIXED, TEMPLATE = "auto", "mixed", "template"
ROW_FORMATS = (
    AUTO, MIXED, "messages", "sharegpt", "prompt_completion", "alpaca", "question_answer", "text"
)  # fmt: skip
PROMPT_TEMPLATES = {
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{instruction}\n\n### Response:\n",
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
        "\n\n### Response:\n",
    )
}
"""Prompts by name: without and with a text in the column `input`."""

_CONVERSATIONS = {"messages": "messages", "sharegpt": "conversations"}
"""Keys of conversations, by form."""
_PAIRS = (
    ("prompt_completion", "prompt", "completion"),
    ("prompt_completion", "prompt", "response"),
    ("alpaca", "instruction", "output"),
    ("alpaca", "instruction", "response"),
    ("question_answer", "question", "answer"),
    ("question_answer", "question", "response"),
    ("question_answer", "question", "response_j"),
)
"""Form, key of the prompt and key of the answer."""
EXAMPLE = '{"messages": [...]}'

_CALL = "function_call"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    _CALL: "assistant",
}
"""ShareGPT's names of speakers."""
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


@dataclass(frozen=True)
class RowReader:
    """Reader of rows as conversations. Raises DataError for options that contradict each other."""

    row_format: str = AUTO
    """The form of all rows; `auto`: found by its keys, one for each file; `mixed`: found for each row."""
    prompt_template: str | None = None
    r"""Text of a prompt with {column} for a value, `{{` for a brace, `\n` and `\t`; or the name of one."""
    answer_key: str | None = None
    """Column of the answer to a prompt of `prompt_template`."""
    takes_texts: bool = False
    """Read rows with a text alone. Only a template that writes no roles can write them."""
    ignored: tuple[str, ...] = ()
    """Columns that are left out, whatever they look like."""

    def __post_init__(self) -> None:
        if self.row_format not in ROW_FORMATS:
            raise DataError(f"row format {self.row_format!r} is unknown; the formats are {', '.join(ROW_FORMATS)}")
        if self.prompt_template is not None:
            self._check_template(self.prompt_template)
        elif self.answer_key is not None:
            raise DataError(
                f"--answer-key {self.answer_key} is the answer to a prompt of --prompt-template; give that too, "
                "such as --prompt-template '{question}'"
            )

    def _check_template(self, template: str) -> None:
        # a template of columns is a form of its own
        if self.row_format != AUTO:
            raise DataError(f"--prompt-template and --row-format {self.row_format} both say what a row is; drop one")
        if template not in PROMPT_TEMPLATES and self.answer_key is None:
            raise DataError("--prompt-template needs the column of the answer; name it with --answer-key")
        if not self._fields:
            raise DataError(f"--prompt-template {template!r} names no column; write such as 'Question: {{question}}'")
        if not all(map(_names_columns_alone, self._prompts)):
            raise DataError(
                f"--prompt-template {template!r} has a brace with more or less than the name of a column; write a "
                "column as {name}, and a brace as {{ or }}"
            )

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of a row that are read: of a table, the columns."""
        if self.prompt_template is None:
            return COLUMNS
        names = (*self._fields, self._answer_key)
        # {a.b} steps into the column a, or is the column a.b
        tops = [".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2)]
        return tuple(dict.fromkeys([*tops, *SYSTEM, *VARIABLE_KEYS[1:]]))

    @cached_property
    def _prompts(self) -> tuple[str, ...]:
        """The prompt, and the one with an input if that is another."""
        given = self.prompt_template or ""
        if given in PROMPT_TEMPLATES:
            return PROMPT_TEMPLATES[given]
        # a shell passes \n as two characters
        return (re.sub(r"\\[nt\\]", lambda escape: _ESCAPES[escape[0]], given),)

    @cached_property
    def _fields(self) -> tuple[str, ...]:
        try:
            # the parser of str.format, for its braces alone: format itself would evaluate {a.b} as an attribute
            names = [name for text in self._prompts for _, name, _, _ in string.Formatter().parse(text)]
        except ValueError as error:
            raise DataError(
                f"--prompt-template {self.prompt_template!r} cannot be read ({error}); write a column as {{name}}, and "
                "a brace as {{{{ or }}}}"
            ) from None
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def _answer_key(self) -> str:
        return self.answer_key or "output"

    def read(self, columns: Mapping[str, Any]) -> tuple[str, Chat, tuple[str, ...]]:
        """Return the form of a row, its conversation, and the columns that were not read. Raises BadRow."""
        row = Row(columns, self.ignored)
        if self.prompt_template is not None:
            return TEMPLATE, *self._by_template(row)
        form, prompt_key, answer_key = self._form_of(row)
        if form == "text":
            chat = self._text(row)
        elif form == "messages":
            chat = _chat(row, with_system(row, list_of(row["messages"], "messages")))
        elif form == "sharegpt":
            chat = _chat(row, with_system(row, of_sharegpt(row["conversations"])))
        else:
            chat = _chat(row, _of_pair(row, form, prompt_key, answer_key))
        _check_labels(row)
        if form != "text":
            return form, chat, _settled(row, chat)
        # nothing of a text alone is an answer to another text of it
        return form, chat, row.settle(texts_of(chat.messages))

    def _form_of(self, row: Row) -> tuple[str, str, str]:
        """Return the form of a row and the keys of its prompt and answer. Raises BadRow."""
        wanted = None
        if self.row_format not in (AUTO, MIXED):
            wanted = self.row_format
        # messages hold a whole conversation, beside which other columns may repeat parts of it
        for form, key in _CONVERSATIONS.items():
            if key in row and wanted in (None, form):
                return form, key, key
        # `in` and keys() do not count as reading: only the form chosen reads its columns
        pairs = [pair for pair in _PAIRS if wanted in (None, pair[0]) and row.keys() >= {*pair[1:]}]
        if len(pairs) > 1:
            raise _ambiguous(pairs)
        if pairs:
            return pairs[0]
        if "text" in row and wanted in (None, "text"):
            return "text", "text", "text"
        keys = ", ".join(map(repr, row)) or "none"
        if wanted is not None:
            raise BadRow("another form", f"the row is not of --row-format {wanted}; it has {keys}")
        raise BadRow(
            "no messages",
            f"no key 'messages', nor the keys of another known form; the row has {keys}: write it as {EXAMPLE}, or "
            "name its columns with --prompt-template and --answer-key",
        )

    def _text(self, row: Row) -> Chat:
        if not self.takes_texts:
            raise BadRow(
                "text alone",
                "the row has a 'text' and no turns, so a chat template cannot write it; pass --chat-template "
                f"{PLAIN} to train on whole texts",
            )
        # as the assistant's, so that all of it is trained
        return _chat(row, [{"role": "assistant", "content": _text_at(row, "text")}])

    def _by_template(self, row: Row) -> tuple[Chat, tuple[str, ...]]:
        """Return the conversation of a prompt by the template and an answer, and the columns that were not read."""
        # of Stanford's rows many have no `input`; another template's column that is nowhere may be misspelled
        is_known = self.prompt_template in PROMPT_TEMPLATES
        values = {name: _value(row, name, may_lack=is_known or name in row.nulls) for name in self._fields}
        template, *with_input = self._prompts
        # Stanford Alpaca's rule: the prompt has another sentence for a row without input
        if with_input and values["input"].strip():
            template = with_input[0]
        prompt = ""
        for literal, name, _, _ in string.Formatter().parse(template):
            prompt += literal
            if name:
                prompt += values[name]
        answer = _value(row, self._answer_key, may_lack=True)
        if not answer.strip():
            raise BadRow("no answer", f"{self._answer_key!r} is empty; write an answer, or leave the row out")
        messages = turn_of(prompt, answer)
        named = {name.split(".")[0] for name in (*self._fields, self._answer_key)}
        # a system text in the prompt is not written twice
        if named.isdisjoint(SYSTEM):
            messages = with_system(row, messages)
        chat = _chat(row, messages)
        _check_labels(row, named)
        row.leave_beside({*self._fields, self._answer_key})
        if is_known:
            return chat, _settled(row, chat)
        return chat, row.unread()  # who writes a template says what is read


def _names_columns_alone(template: str) -> bool:
    """Return true if braces hold nothing but names: a value is written as it is, without str.format's `{a!r:>9}`."""
    pieces = string.Formatter().parse(template)
    return all(name is None or (name and not form and not conversion) for _, name, form, conversion in pieces)


def _ambiguous(pairs: Sequence[tuple[str, str, str]]) -> BadRow:
    """Return an error for a row with the keys of several forms, with the option that chooses the first of them."""
    forms = ", ".join(f"{prompt!r} with {answer!r} ({form})" for form, prompt, answer in pairs)
    form, prompt, answer = pairs[0]
    # a form chooses one pair only if each has another form
    if len({form for form, _, _ in pairs}) == len(pairs):
        remedy = f"--row-format {form}"
    else:
        remedy = f"--prompt-template '{{{prompt}}}' --answer-key {answer}"
    return BadRow("ambiguous", f"the row may be read as {forms}; choose, such as with {remedy}")


def _check_labels(row: Row, named: Collection[str] = ()) -> None:
    """Raise BadRow for a label that says that the answer is not wanted. `named`: columns that the user reads."""
    for key in LABELS:
        label = row.peek(key)
        if key in named or label not in (0, 1):  # of another kind, and counted; False and True are among them
            continue
        row.note(key)
        if not label:
            raise BadRow(
                "unwanted answer",
                f"{key!r} is {str(label).lower()}, so the answer is not to be learnt; leave the row out, or train on "
                "preferences (tools/preprocess_preferences.py); where it means something else, --ignore-columns "
                f"{key}",
            )


def _settled(row: Row, chat: Chat) -> tuple[str, ...]:
    """Return the columns that were not read beside a conversation. Raises BadRow."""
    # apart: a column that only an answer repeats is not known to the model when it answers
    answers = (message for message in chat.messages if message["role"] == "assistant")
    prompt = (message for message in chat.messages if message["role"] != "assistant")
    return row.settle(texts_of(prompt), texts_of(answers))


def _chat(row: Row, messages: Any) -> Chat:
    variables = {key: row[key] for key in VARIABLE_KEYS[1:] if key in row}
    return parse_row({**variables, "messages": messages})


def _value(row: Row, key: str, *, may_lack: bool) -> str:
    """Return a text or a number under a key that the user named. Raises BadRow.

    `may_lack`: without `input` or `context` it is an empty text.
    """
    row.note(key)
    try:
        value = value_at(dict(row), key)
    except KeyError:
        value = None
    except DataError as error:
        raise BadRow("repeated key", str(error)) from None
    if value is None and may_lack and key in FURTHER:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        what = f"has {str(value)[:40]!r} as {key!r}"
        if value is None:
            what = f"has no {key!r}"
        raise BadRow(f"bad {key}", f"the row {what}, of which the template needs a text or a number")
    return str(value)


def _text_at(row: Row, key: str) -> str:
    """Return the text under a key. Raises BadRow if it is none, or empty."""
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(
            f"bad {key}", f"{key!r} is {str(value)[:40]!r}, not a text; name the columns with --prompt-template"
        )
    if not value.strip():
        raise BadRow(f"empty {key}", f"{key!r} is empty; write a text, or leave the row out")
    return value


def texts_of(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the texts in the contents of messages."""
    for message in messages:
        yield from texts_in(message.get("content"))


def with_system(row: Row, messages: Any) -> Any:
    """Return the messages after the row's system text, if it has one that they do not begin with. Raises BadRow."""
    texts = [text for text in map(row.get, SYSTEM) if text]
    if not texts or not isinstance(messages, list):
        return messages
    text = texts[0]
    if len(texts) > 1 or not isinstance(text, str):
        raise BadRow("bad system", f"the system text is {str(texts)[:60]!r}; write one text as 'system'")
    if not text.strip():
        return messages
    first = an_object(next(iter(messages), None))
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    # which of both the answers were written under cannot be known
    if first.get("content") != text:
        raise BadRow("another system", "'system' differs from the first message; leave one of them out")
    return messages


def _of_pair(row: Row, form: str, prompt_key: str, answer_key: str) -> list[Message]:
    """Return the messages of a prompt and an answer. Raises BadRow."""
    # tables often hold messages as JSON text
    prompt, answer = (messages_or_text(row[key], key) for key in (prompt_key, answer_key))
    if isinstance(prompt, list) or isinstance(answer, list):
        messages = _joined(prompt, answer, prompt_key, answer_key)
    else:
        keys = [prompt_key]
        # in other forms `context` beside a prompt is refused by settle, not guessed at
        if form == "alpaca":
            keys += [key for key in FURTHER if str(row.get(key, "")).strip()]
        parts = [_text_at(row, key) for key in keys]
        last = turn_of("\n\n".join(parts), _text_at(row, answer_key))
        messages = [*history_of(row), *last]
    joined: list[Message] = with_system(row, messages)
    return joined


def turn_of(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def history_of(row: Row) -> list[Message]:
    """Return the messages of a row's earlier questions and answers. Raises BadRow."""
    turns = list_of(row.get("history"), "history")
    if not turns:
        return []
    if not isinstance(turns, list) or not all(map(_is_pair, turns)):
        raise BadRow("bad history", f"'history' is {str(turns)[:60]!r}; write a list of [question, answer]")
    return [message for question, answer in turns for message in turn_of(question, answer)]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def _joined(prompt: Any, answer: Any, prompt_key: str, answer_key: str) -> list[Message]:
    """Return the messages of a prompt and a completion that are messages. Raises BadRow."""
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise BadRow(
            "mixed kinds",
            f"one of {prompt_key!r} and {answer_key!r} is a text and the other messages; write both alike",
        )
    # TRL's conversational rows, and ShareGPT's names within them
    prompt, answer = with_roles(prompt), with_roles(answer)
    check_answer(answer, answer_key)
    check_prompt(prompt)
    # answers in the prompt are part of what is given
    return [*(_untrained(message) if is_answer(message) else message for message in prompt), *answer]


def _untrained(message: Message) -> Message:
    """Return a message that is not trained, whatever flags it has."""
    others = {key: value for key, value in message.items() if key not in TRAIN_FLAGS}
    return {**others, "train": False}


def is_answer(message: Any) -> bool:
    """Return true for a message of the assistant."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def check_answer(answer: Sequence[Any], key: str) -> None:
    """Raise BadRow for messages that do not begin and end with the assistant's."""
    for end, what in ((answer[:1], "begins"), (answer[-1:], "ends")):
        role = an_object(next(iter(end), None)).get("role", "nothing")
        if role != "assistant":
            raise BadRow(
                f"bad {key}",
                f"{key!r} {what} with {role}, not with a message of the assistant; write the answer there, and all "
                "before it as 'prompt'",
            )


def check_prompt(prompt: Sequence[Any]) -> None:
    """Raise BadRow for messages before an answer that end with the assistant's, which the answer would only follow."""
    if prompt and is_answer(prompt[-1]):
        raise BadRow(
            "begun answer",
            "the prompt ends with a message of the assistant; end it with the user's, and write what the assistant "
            "begins into the answer",
        )


def of_sharegpt(turns: Any) -> list[Message]:
    """Return the messages of a conversation of `from` and `value`; those of role and content stay. Raises BadRow."""
    turns = list_of(turns, "conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRow("no messages", '\'conversations\' is empty; write a list of {"from": ..., "value": ...}')
    return [_of_turn(turn, number) for number, turn in enumerate(turns, start=1)]


def with_roles(messages: Sequence[Any]) -> list[Any]:
    """Return messages of `from` and `value` as messages of role and content, and others as they are. Raises BadRow."""
    return [
        _of_turn(message, number) if isinstance(message, dict) and {"from", "value"} <= message.keys() else message
        for number, message in enumerate(messages, start=1)
    ]


def _of_turn(turn: Any, number: int) -> Message:
    """Return the message of a turn of `from` and `value`; one of role and content stays. Raises BadRow."""
    if isinstance(turn, dict) and "from" not in turn and "role" in turn:
        return turn
    speaker = an_object(turn).get("from")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        *speakers, last = _ROLES
        raise BadRow(
            "unknown role", f"turn {number} is from {speaker!r}; the speakers are {', '.join(speakers)} and {last}"
        )
    value = turn.get("value")
    given = {key: item for key, item in turn.items() if key not in ("from", "value")}
    # such as weight, train and loss, which count here too
    others = {key: item for key, item in given.items() if item is not None}
    is_call = speaker == _CALL
    is_other_role = others.get("role", role) != role
    contents = [value]
    if is_call:  # the value is JSON, beside which a content may only repeat it
        contents.append(None)
    if is_other_role or others.get("content", value) not in contents:
        raise BadRow(
            "two speakers",
            f"turn {number} has 'from' and 'value' beside another 'role' or 'content'; leave one of them out",
        )
    if not is_call:
        return {"role": role, "content": value, **others}
    return {"role": role, "tool_calls": _calls_in(value, number), **others}


def _calls_in(value: Any, number: int) -> list[Message]:
    try:
        calls = value_of_text(value)
    except (orjson.JSONDecodeError, AttributeError):  # not JSON, or no text
        raise BadRow("bad tool call", f"the call in turn {number} is {str(value)[:40]!r}; write it as JSON") from None
    except DataError as error:
        raise BadRow("bad tool call", f"the call in turn {number} is JSON text: {error}") from None
    if not isinstance(calls, list):  # one call, or several at once
        calls = [calls]
    return [{"type": "function", "function": call} for call in calls]
