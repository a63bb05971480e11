"""Chats to samples: token ids, and which of them are trained.

A row is {"messages": [{"role": ..., "content": ...}, ...], "unmask": true or false}; other keys are left alone. By
default the loss is on what the assistant must write: everything after the generation prompt, the marker that ends the
turn included. Padding plays no part: a sample has no pad token, so the end-of-sequence token never means two things.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.template import ChatTemplate, Message, TemplateFailure
from megatron.data.chat.tokenizer import ChatTokenizer, trained
from megatron.data.chat.turns import Rendered, Span, TurnFinder
from megatron.data.indexed import DataError

ROLES = ("system", "user", "assistant", "tool")
PRETRAINING = "pretraining"
"""InstructLab's older rows: one message that holds a whole conversation as text."""

TrainOn = Literal["assistant", "all_but_system"]
TooLong = Literal["drop", "truncate", "split"]

_TURNS_OF_PRETRAINING = (
    re.compile(r"<\|(user|assistant|system)\|>\n?"),
    re.compile(r"<\|start_of_role\|>(user|assistant|system)<\|end_of_role\|>\n?"),
)
_ENDS_OF_PRETRAINING = re.compile(r"<\|endoftext\|>|<\|end_of_text\|>")


class BadRow(DataError):
    """A row that is no usable conversation. `kind` is what it is counted under."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: Sequence[Message]
    unmask: bool = False
    """Train on all that is not the system's."""


@dataclass(frozen=True)
class Sample:
    """A conversation as the model sees it."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    """1: the token is trained. The first never is, since nothing comes before it."""

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ChatRules:
    """What becomes of conversations."""

    train_on: TrainOn = "assistant"
    """What rows without `unmask` train."""
    append_eos: bool = True
    """End the last turn with EOS where the template ends it with nothing."""
    max_length: int | None = None
    """Tokens in a sample."""
    min_length: int = 1
    too_long: TooLong = "drop"


@dataclass
class ChatCounts:
    """What became of rows. Counters are by reason."""

    num_rows: int = 0
    num_appended_eos: int = 0
    num_truncated: int = 0
    num_split: int = 0
    """Rows that became several samples."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples left out."""
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be used."""

    def add(self, other: ChatCounts) -> None:
        self.num_rows += other.num_rows
        self.num_appended_eos += other.num_appended_eos
        self.num_truncated += other.num_truncated
        self.num_split += other.num_split
        self.dropped.update(other.dropped)
        self.bad.update(other.bad)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def parse_row(row: object) -> Chat:
    """A row of a chat file. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("no object", 'the row is no JSON object such as {"messages": [...]}')
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
        raise BadRow("bad message", f'message {number} is no object such as {{"role": "user", "content": "..."}}')
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
    """The user's and the assistant's messages in the text of an older row; what is the system's is left out."""
    found = next((pattern for pattern in _TURNS_OF_PRETRAINING if pattern.search(text)), None)
    if found is None:
        raise BadRow(
            "bad pretraining message",
            f"message {number} (pretraining) has no <|user|> or <|start_of_role|>user<|end_of_role|> in it; write the "
            "conversation as messages of user and assistant",
        )
    parts = found.split(text)
    messages = [
        {"role": role, "content": _ENDS_OF_PRETRAINING.sub("", content)}
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return [message for message in messages if message["role"] != "system" and message["content"].strip()]


# ---------------------------------------------------------------------------------------------------------------------
# Samples


class ChatEncoder:
    """Conversations to samples, many at a time."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer, rules: ChatRules):
        """Raises DataError if the template writes an EOS that the tokenizer has not."""
        self.template, self.tokenizer, self.rules = template, tokenizer, rules
        self._finder = TurnFinder(template)
        if "eos_token" in template.variables:
            tokenizer.eos_of_text()

    def encode(self, chats: Sequence[Chat], counts: ChatCounts) -> list[list[Sample] | BadRow]:
        """For each conversation its samples, none if it was dropped, or what is wrong with it."""
        results: list[list[Sample] | BadRow] = []
        written: list[_Written] = []
        rows: list[int] = []
        for number, chat in enumerate(chats):
            try:
                written.append(self._write(chat))
            except BadRow as error:
                results.append(error)
            else:
                results.append([])
                rows.append(number)
        try:
            samples = self._tokenize(written)
        except DataError as error:
            if len(chats) == 1:
                return [BadRow("cannot be encoded", str(error))]
            return [self.encode([chat], counts)[0] for chat in chats]  # to find the text that is refused
        for number, sample, text in zip(rows, samples, written, strict=True):
            try:
                results[number] = self._fitted(chats[number], sample, counts)
                counts.num_appended_eos += text.has_appended_eos and bool(results[number])
            except BadRow as error:
                results[number] = error
        return results

    def _write(self, chat: Chat) -> _Written:
        """A conversation's text, and the stretches of it that are trained. Raises BadRow, DataError."""
        try:
            rendered = self._finder.find(chat.messages)
        except TemplateFailure as error:
            raise BadRow("refused by the template", str(error)) from None
        text, spans = rendered.text, [turn for turn in rendered.turns if turn]
        has_appended_eos = self.rules.append_eos and self._goes_on(rendered)
        if has_appended_eos:
            eos = self.tokenizer.eos_of_text()
            # the white space before it is then the model's to write
            spans[-1] = (spans[-1][0], len(text) + len(eos))
            text += eos
        if chat.unmask or self.rules.train_on == "all_but_system":
            for message, content in zip(chat.messages, rendered.contents, strict=True):
                if message["role"] not in ("assistant", "system") and content:
                    spans.append(content)
        return _Written(text, _joined(spans), has_appended_eos)

    def _goes_on(self, rendered: Rendered) -> bool:
        """Whether the last message is the assistant's, and nothing at its end could tell the model to stop."""
        content, turn = rendered.contents[-1], rendered.turns[-1]
        if turn is None or content is None or rendered.text[content[1] :].strip():
            return False
        return not rendered.text[content[0] : content[1]].endswith(self.tokenizer.special_tokens)

    def _tokenize(self, written: Sequence[_Written]) -> list[Sample]:
        texts = [one.text for one in written]
        encoded = self.tokenizer.encode(texts)
        mask = trained(encoded, texts, [one.spans for one in written])
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        mask[starts[encoded.lengths > 0]] = 0
        return [
            Sample(encoded.ids[start : start + length], mask[start : start + length])
            for start, length in zip(starts, encoded.lengths, strict=True)
        ]

    def _fitted(self, chat: Chat, sample: Sample, counts: ChatCounts) -> list[Sample]:
        """What is kept of a conversation. Raises BadRow if nothing of it is trained."""
        rules = self.rules
        if not sample.mask.any():
            raise BadRow(
                "nothing trained",
                "no token of the conversation is trained: it has no message of the assistant's, or the template leaves "
                "it out; add the answer, or set unmask",
            )
        if sample.length < rules.min_length:
            counts.dropped[f"shorter than {rules.min_length} tokens"] += 1
            return []
        limit = rules.max_length
        if limit is None or sample.length <= limit:
            return [sample]
        if rules.too_long == "drop":
            counts.dropped[f"longer than {limit} tokens"] += 1
            return []
        if rules.too_long == "truncate":
            pieces = [_part(sample, 0, limit)]
            counts.num_truncated += 1
        else:
            pieces = self._split(chat, sample, limit)
            counts.num_split += 1
        kept = [piece for piece in pieces if piece.mask.any() and piece.length >= rules.min_length]
        if len(kept) < len(pieces):
            what = "truncated before" if rules.too_long == "truncate" else "pieces of a split row without"
            counts.dropped[f"{what} anything trained"] += len(pieces) - len(kept)
        return kept

    def _split(self, chat: Chat, sample: Sample, limit: int) -> list[Sample]:
        """Pieces of whole exchanges, each with the system's message before it; by tokens where one is too long."""
        head, exchanges = _exchanges(chat.messages)
        pieces: list[Sample] = []
        done = 0
        try:
            while done < len(exchanges):
                # the most exchanges that fit, by halving
                fits, best = 0, None
                low, high = 1, len(exchanges) - done
                while low <= high:
                    middle = (low + high) // 2
                    messages = [*head, *(m for exchange in exchanges[done : done + middle] for m in exchange)]
                    piece = self._tokenize([self._write(Chat(messages, chat.unmask))])[0]
                    if piece.length <= limit:
                        fits, best, low = middle, piece, middle + 1
                    else:
                        high, shortest = middle - 1, piece
                if best is None:
                    pieces += _cut(shortest, limit)
                    done += 1
                else:
                    pieces.append(best)
                    done += fits
        except BadRow:  # the template does not take a part of this conversation
            return _cut(sample, limit)
        return pieces


@dataclass(frozen=True)
class _Written:
    """A conversation as text."""

    text: str
    spans: list[Span]
    has_appended_eos: bool


def _joined(spans: list[Span]) -> list[Span]:
    """In order, with those that touch or overlap made one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _part(sample: Sample, start: int, end: int) -> Sample:
    mask = sample.mask[start:end].copy()
    mask[:1] = 0
    return Sample(sample.ids[start:end], mask)


def _cut(sample: Sample, limit: int) -> list[Sample]:
    return [_part(sample, start, start + limit) for start in range(0, sample.length, limit)]


def _exchanges(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system's messages at the beginning, and the rest cut before each question."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    exchanges: list[list[Message]] = []
    for i in range(first, len(messages)):
        is_question = messages[i]["role"] == "user" and messages[i - 1]["role"] != "user"
        if not exchanges or is_question:
            exchanges.append([])
        exchanges[-1].append(messages[i])
    return list(messages[:first]), exchanges
