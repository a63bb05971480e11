"""Rows of preference files, in the formats that people have them.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                  texts
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}   conversations; `messages` for `prompt` too
    {"chosen": ..., "rejected": ...}                                       the prompt is what both begin with
    {"prompt": ..., "completion": ..., "label": true}                      one answer, wanted or not

The names are TRL's; rows.py brings those of other datasets to them. A transcript of HH-RLHF is a text; a message may
stand for a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.data.chat.boundaries import common_length
from megatron.data.chat.columns import LABELS, SYSTEM, Row
from megatron.data.chat.conversation import BadRow, Chat, parse_row, train_flag
from megatron.data.chat.row_forms import check_answer, check_prompt, history_of, is_answer, texts_of, with_system
from megatron.data.chat.template import Message
from megatron.data.preference.rows import RowAnswers, Side, answers_of, prompt_of

_VARIABLES = ("tools", "functions", "documents", "chat_template_kwargs")

# HH-RLHF's transcripts: two line ends and a name begin each turn
_TURN = re.compile(r"\n\n(Human|Assistant):")
_BEGIN = re.compile(r"\s*(Human|Assistant):")
_LAST_TURN = "\n\nAssistant:"
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Preference:
    """A prompt, an answer that is preferred to another, and that other; all three texts, or all three messages.

    Of a row with one answer, the other is None.
    """

    prompt: Side
    chosen: Side | None
    rejected: Side | None
    variables: Mapping[str, Any]
    """Keys of the row that a chat template reads: tools, documents, chat_template_kwargs."""
    form: str = ""
    """Name of the row's format."""
    scores: tuple[float, float] | None = None
    """Scores of the chosen and of the rejected answer, if the row has them."""
    num_passed_over: int = 0
    """Answers of a ranked list between the best and the worst."""
    unread: tuple[str, ...] = ()
    """Columns of the row that were not read."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def answers(self) -> list[tuple[str, Side]]:
        """The answers that there are, with their names."""
        sides = {"chosen": self.chosen, "rejected": self.rejected}
        return [(name, side) for name, side in sides.items() if side is not None]

    @property
    def has_other_turns(self) -> bool:
        """True if an answer holds turns of others than the assistant."""
        return any(self._holds_others(side) for _, side in self.answers)

    def _holds_others(self, side: Side) -> bool:
        if not isinstance(side, str):
            return not all(map(is_answer, side))
        return _is_transcript(self.prompt) and _TURN.search(side) is not None

    @property
    def repeats_prompt(self) -> bool:
        """True if each answer begins with the text of the prompt, which is then there twice."""
        # the last message, which the answers are to
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1].get("content")
        if not isinstance(last, str) or not last.strip():
            return False
        begins = [next(iter(_texts(side)), "").lstrip() for _, side in self.answers]
        return all(begin.startswith(last.strip()) for begin in begins)

    def conversation(self, answer: Side) -> Chat:
        """Return prompt and answer as one conversation, checked and in one form. Raises BadRow."""
        assert not isinstance(self.prompt, str)
        assert not isinstance(answer, str)
        return parse_row({**self.variables, "messages": [*self.prompt, *answer]})


def parse_preference(columns: Mapping[str, Any], *, as_chat: bool = False, ignored: tuple[str, ...] = ()) -> Preference:
    """Return the preference in a row. `as_chat`: make messages of texts; `ignored`: columns to leave out.

    Raises BadRow.
    """
    row = Row(columns, ignored)
    # answers first: which key is the prompt, and its form, depend on them
    answers = answers_of(row)
    key, given = prompt_of(row, answers, as_chat=as_chat)
    prompt, chosen, rejected = _sides(given, answers)
    if as_chat and isinstance(prompt, str):
        prompt, chosen, rejected = _turns(prompt), _answer(chosen), _answer(rejected)
    prompt = _in_context(row, prompt, is_question=isinstance(given, str))
    # not read beside texts, which no template writes: `settle` then counts or refuses them
    variables = {} if isinstance(prompt, str) else {name: row[name] for name in _VARIABLES if name in row}
    texts = [text for side in (chosen, rejected) if side is not None for text in _texts(side)]
    preference = Preference(
        prompt,
        chosen,
        rejected,
        variables,
        _form(answers, key),
        answers.scores,
        answers.num_passed_over,
        row.settle(_texts(prompt), texts, needed=LABELS),
    )
    _check(preference)
    return preference


def _form(answers: RowAnswers, key: str) -> str:
    names = [key, *answers.keys] if key else [*answers.keys]
    if answers.keys == ("response_j", "response_k"):
        return ", ".join(names)
    return f"{', '.join(names)} ({'texts' if isinstance(answers.given, str) else 'messages'})"


def _texts(side: Side) -> list[str]:
    """Return the texts of a side. Raises BadRow for a content that is none."""
    if isinstance(side, str):
        return [side]
    try:
        return list(texts_of(side))
    except TypeError as error:
        raise BadRow(
            "missing content",
            f"the content of a message is a JSON {error}, not a string or a list of text parts; write it as text",
        ) from None


def _sides(prompt: Side | None, answers: RowAnswers) -> tuple[Side, Side | None, Side | None]:
    """Return prompt and answers, all texts or all messages. Raises BadRow."""
    chosen, rejected = answers.chosen, answers.rejected
    is_empty = not prompt.strip() if isinstance(prompt, str) else prompt == []
    if is_empty:
        raise BadRow("no prompt", "'prompt' is empty; write what the answers are to")
    if chosen is None or rejected is None:
        if prompt is None:
            raise BadRow("no prompt", "the row has a completion and no prompt; write both")
        return _like(prompt, answers.given, answers.keys[0]), chosen, rejected
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("mixed kinds", "one of 'chosen' and 'rejected' is a text and the other messages; write both alike")
    # before the common prompt is cut off: nothing would be left of either
    if chosen == rejected:
        raise BadRow("equal answers", "'chosen' and 'rejected' are equal; leave the row out")
    if prompt is None:
        return _common_prompt(chosen, rejected)
    if isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str):
        return _beside_messages(prompt, chosen, rejected)
    _like(prompt, chosen, answers.keys[0])
    return prompt, _without(prompt, chosen), _without(prompt, rejected)


def _beside_messages(prompt: str, chosen: list[Message], rejected: list[Message]) -> tuple[Side, Side, Side]:
    """Return a prompt that is a text and answers that are messages, which may begin with it. Raises BadRow."""
    cut = common_length(chosen, rejected)
    if not cut:
        return [{"role": "user", "content": prompt}], chosen, rejected
    # UltraFeedback's prompt repeats the question; others render all turns into it
    contents = [str(message.get("content") or "").strip() for message in chosen[:cut]]
    written = [content for content in contents if content]
    if not any(content in prompt or prompt.strip() in content for content in written):
        raise BadRow(
            "another prompt",
            f"'prompt', {prompt[:40]!r}, is not in the messages that 'chosen' and 'rejected' begin with; correct one "
            "of them",
        )
    return _common_prompt(chosen, rejected)


def _in_context(row: Row, prompt: Side, *, is_question: bool) -> Side:
    """Return the prompt after the row's system text and, before a question, its history. Raises BadRow."""
    names = [name for name in (*SYSTEM, "history") if row.peek(name) not in (None, "", [])]
    if isinstance(prompt, str):
        if names:
            raise BadRow(
                f"{names[0]} beside texts",
                f"texts have no place for {names[0]!r}; pass --as-chat, or write it at the beginning of 'prompt' and "
                "leave the key out",
            )
        return prompt
    turns = list(prompt)
    is_single = is_question and [turn.get("role") for turn in prompt] == ["user"]
    if is_single and "history" in names:
        turns = [*history_of(row), *turns]
    in_context: Side = with_system(row, turns)
    return in_context


def _like(prompt: Side, answer: Side, key: str) -> Side:
    """Return the prompt, as messages where the answer is. Raises BadRow."""
    if isinstance(prompt, str) == isinstance(answer, str):
        return prompt
    kinds = ("a text", "messages") if isinstance(prompt, str) else ("messages", "a text")
    raise BadRow("mixed kinds", f"the prompt is {kinds[0]} and {key!r} is {kinds[1]}; write both alike")


def _without(prompt: Side, answer: Side) -> Side:
    """Return the answer alone, where it repeats the messages of the prompt."""
    if isinstance(prompt, str) or not prompt or answer[: len(prompt)] != prompt:
        return answer
    return answer[len(prompt) :]


def _common_prompt(chosen: Side, rejected: Side) -> tuple[Side, Side, Side]:
    """Cut off what both sides begin with, up to where the assistant begins to answer. Raises BadRow.

    A text shows that only as a transcript.
    """
    cut = common_length(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        cut = _end_of_prompt(chosen, rejected, cut)
    elif cut and is_answer(chosen[cut - 1]):
        raise BadRow(
            "no common prompt",
            "the messages that 'chosen' and 'rejected' begin with end with the assistant's; write what both answer as "
            "'prompt'",
        )
    if not cut:
        raise BadRow(
            "no common prompt",
            "the row has no prompt, and 'chosen' and 'rejected' begin differently; write what both answer as 'prompt'",
        )
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _end_of_prompt(chosen: str, rejected: str, common: int) -> int:
    """Return the offset in two transcripts after the last header of the assistant that they share. Raises BadRow."""
    if not (_is_transcript(chosen) and _is_transcript(rejected)):
        raise BadRow(
            "no common prompt",
            "the row has no prompt, and only in transcripts of '\\n\\nHuman:' and '\\n\\nAssistant:' can be seen where "
            "the texts begin to answer; write what both answer as 'prompt'",
        )
    cuts = {side.rfind(_LAST_TURN) + len(_LAST_TURN) for side in (chosen, rejected)}
    # both answers are mostly one turn, behind the last header of each
    # an offset below the header's length is that of no header, for which rfind gives -1
    if len(cuts) == 1 and len(_LAST_TURN) <= min(cuts) <= common:
        return cuts.pop()
    # answers of several turns: they begin behind the last header that both share
    turns = list(_TURN.finditer(chosen, 0, common))
    if not turns or turns[-1][1] != "Assistant":
        raise BadRow(
            "no common prompt",
            "'chosen' and 'rejected' are transcripts that differ before the assistant's answer; write answers to the "
            "same turns",
        )
    return turns[-1].end()


def _is_transcript(text: Side) -> bool:
    if not isinstance(text, str):
        return False
    if _TURN.match(text):
        return True
    # without line ends in front, only a further turn shows that the name is none of the text's own
    return _BEGIN.match(text) is not None and _TURN.search(text) is not None


def _answer(text: Side | None) -> Side | None:
    """Return the message of an answer, and of a transcript those of its further turns."""
    if text is None:
        return None
    assert isinstance(text, str)
    # with a group in its pattern, split gives the names too: text, name, text, name, text
    first, *others = _TURN.split(text)
    return [{"role": "assistant", "content": first.strip()}, *_messages(others)]


def _turns(prompt: str) -> Side:
    """Return the messages of a transcript, without the empty turn at its end, or of a text. Raises BadRow."""
    if not _is_transcript(prompt):
        return [{"role": "user", "content": prompt}]
    # the first turn may lack the line ends in front of its name
    turns = _messages(_TURN.split("\n\n" + prompt.lstrip())[1:])
    if turns[-1]["role"] == "assistant" and turns[-1]["content"]:
        raise BadRow("begun answer", "'prompt' ends within a turn of the assistant; move what it begins to the answers")
    return turns[:-1] if turns[-1]["role"] == "assistant" else turns


def _messages(parts: list[str]) -> list[Message]:
    """Return the messages of names and texts in turn."""
    return [{"role": _ROLES[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2], strict=True)]


def _check(preference: Preference) -> None:
    """Raise BadRow for a side without text, or one that is not the assistant's."""
    for name, side in preference.answers:
        if not isinstance(side, str):
            check_answer(side, name)
            _check_flags(side, name)
        elif not side.strip():
            raise BadRow(f"empty {name}", f"{name!r} is empty; write an answer, or leave the row out")
        elif _is_transcript(preference.prompt) and _TURN.findall(side)[-1:] == ["Human"]:
            raise BadRow(f"bad {name}", f"{name!r} ends with a turn of Human; leave that out")
    if not isinstance(preference.prompt, str):
        check_prompt(preference.prompt)


def _check_flags(side: list[Message], name: str) -> None:
    """Raise BadRow for a message of an answer that is to be left out of the loss: all of an answer is compared."""
    for number, message in enumerate(side, start=1):
        if is_answer(message) and train_flag(message, number) is False:
            raise BadRow(
                "bad train flag",
                f"message {number} of {name!r} is not to be trained, but answers are compared whole; drop the flag, or "
                "move what is before the answer to 'prompt'",
            )
