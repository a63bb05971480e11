"""Columns of a row: read, refused, or counted.

A row is read whole. A column that no reader reads is counted by its name. One that looks like a part of what an answer
is to, such as `history`, is refused: the model would learn an answer to another prompt. Such a column may be left
unread where the turns hold its text already, as `messages` often holds that of `prompt`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from megatron.data.chat.conversation import ROW_KEYS, BadRow

SYSTEM = ("system", "system_prompt")
"""Keys of a system message's text."""
FURTHER = ("input", "context")
"""Keys of a text that belongs to an instruction."""
LABELS = ("label", "kto_tag")
"""Keys that say whether an answer is wanted."""
COLUMNS = (
    *ROW_KEYS,
    *("conversations", "prompt", "instruction", "question", "query", "history", *FURTHER, *SYSTEM),
    *("completion", "response", "output", "answer", "text", "chosen", "rejected", "response_j", "response_k", *LABELS),
    *("responses", "completions", "answers", "scores", "ratings", "choices", "options"),
)
"""Columns that readers know. Their values must be usable."""

_CONTEXT = frozenset(
    "system prompt prompts instruction instructions input inputs context contexts history question questions query "
    "queries message messages conversation conversations dialog dialogue turns tool tools function functions document "
    "documents passage passages paragraph paragraphs article background knowledge evidence persona preamble premise "
    "hypothesis dialogs dialogues choices options image images audio audios video videos".split()
)
"""Last words of names of columns that hold a part of what an answer is to."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SHORTEST_PART = 16
"""Characters of a text that may be a part of a message. A shorter one must be all of it."""
EMPTY: tuple[object, ...] = ("", [], {})


@cache
def looks_like_context(name: str) -> bool:
    """Return true for a name whose last word is that of a part of a prompt: `chat_history`, but not `prompt_id`."""
    # chat_history, chatHistory and CHAT-HISTORY alike
    words = _WORD.findall(name)
    return bool(words) and words[-1].lower() in _CONTEXT


class Row(dict[str, Any]):
    """The columns of a row that are not null. It notes which of them are read, by [] or `get` but not by `in`."""

    def __init__(self, columns: Mapping[str, Any], ignored: Iterable[str] = ()):
        """`ignored`: columns that are not read, whatever they look like."""
        # tables write null for a column that a row does not have
        super().__init__({name: value for name, value in columns.items() if value is not None})
        # taken out, so that no reader finds them, but still counted by name: data left out is never silent
        self._ignored = {name: super(Row, self).pop(name) for name in ignored if name in self}
        self.nulls = [name for name, value in columns.items() if value is None]
        self._read: set[str] = set()
        self._unread_parts: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def peek(self, name: str) -> Any:
        """Return a value, or None, without reading it."""
        return super().get(name)

    def note(self, path: str) -> None:
        """Note that the column `a.b` is read, or `a`, in which it is."""
        self._read |= {path, path.split(".")[0]}

    def leave(self, path: str) -> None:
        """Note that the part `a.b` of a column that is read is not."""
        self._unread_parts.append(path)

    def leave_beside(self, read: Collection[str]) -> None:
        """Note which parts are not read of the columns of which others are, by the paths `a.b` of these."""
        self._unread_parts += _parts_beside(self, read)

    def unread(self) -> tuple[str, ...]:
        """Return the columns that are not empty and were not read."""
        others = [name for name in self if name not in self._read]
        # an empty column has lost nothing
        names = [name for name in others if self.peek(name) not in EMPTY]
        return (*names, *self._unread_parts, *self._ignored)

    def settle(
        self, prompt: Iterable[str], answers: Iterable[str] = (), *, needed: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the columns that were not read. `prompt` and `answers` are the texts of the row's turns.

        Raises BadRow for a column that is a part of what the answer is to, or is among `needed`.
        """
        unread = self.unread()
        present = [name for name in unread if name in self]  # not those that the user ignores
        # most rows have none, and then no text needs to be compared
        suspects = [name for name in present if name in needed or looks_like_context(name)]
        if not suspects:
            return unread
        turns = _Turns(_stripped(prompt), _stripped(answers))
        lost = [name for name in suspects if not turns.hold(name, self.peek(name))]
        if lost:
            used = ", ".join(repr(name) for name in self if name in self._read)
            raise BadRow(
                "more columns",
                f"the row has {', '.join(map(repr, lost))} beside {used}; write it into the prompt, or leave it out "
                f"with --ignore-columns {' '.join(lost)}",
            )
        return unread


def _parts_beside(value: Mapping[str, Any], read: Collection[str], outer: str = "") -> Iterator[str]:
    for name, inner in value.items():
        path = f"{outer}{name}"
        if path in read:
            continue
        if isinstance(inner, dict) and any(one.startswith(f"{path}.") for one in read):
            yield from _parts_beside(inner, read, f"{path}.")
        # a whole column is counted apart, and an empty part has lost nothing
        elif outer and inner not in (None, *EMPTY):
            yield path


class _Turns(NamedTuple):
    """Texts of the turns of a row."""

    prompt: list[str]
    answers: list[str]

    def hold(self, name: str, value: Any) -> bool:
        """Return true if the texts of a column are in the prompt, it renders the whole row, or is a flag or a count.

        A text that an answer alone holds is lost: the sentence to correct may be the rejected answer. Turns may hold
        answers.
        """
        # before numbers: bool is a subclass of int
        if isinstance(value, bool):
            return True
        if isinstance(value, int | float):
            # a number in a column of text, such as `input`, is a part of the prompt; elsewhere it counts or scores
            # something
            return name not in COLUMNS
        try:
            texts = _stripped(texts_in(value))
        except TypeError:
            return False
        whole = [*self.prompt, *self.answers]
        # a list of messages holds answers too, so it is compared with both sides
        are_turns = isinstance(value, list) and all(isinstance(part, dict | list) for part in value)
        known = whole if are_turns else self.prompt
        return all(_is_known(text, known) or _renders(text, whole) for text in texts)


def _stripped(texts: Iterable[str]) -> list[str]:
    return [text.strip() for text in texts if text.strip()]


def _is_known(text: str, known: Sequence[str]) -> bool:
    if text in known:
        return True
    # "yes" is in many texts without being a part of them
    return len(text) >= _SHORTEST_PART and any(text in one for one in known)


def _renders(text: str, whole: Sequence[str]) -> bool:
    """Return true for a text that holds all turns, as a column of rendered conversations does."""
    return bool(whole) and all(one in text for one in whole)


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value: of messages, those of their contents. Raises TypeError for what is not text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)
    elif isinstance(value, dict):
        # of a message its text alone: that its role is written nowhere loses nothing
        contents = [value[name] for name in ("content", "value", "text") if name in value]
        for part in contents or value.values():
            yield from texts_in(part)
    elif value is not None:
        raise TypeError(type(value).__name__)
