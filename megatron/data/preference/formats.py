"""Rows of preference files, in the formats that people have them.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                  texts
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}   conversations; `messages` for `prompt` too
    {"chosen": ..., "rejected": ...}                                       the prompt is what both begin with
    {"prompt": ..., "completion": ..., "label": true}                      one answer, wanted or not

The names are TRL's. A transcript of HH-RLHF is a text; a message may stand for a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.data.chat.conversation import BadRow, Chat, parse_row
from megatron.data.chat.template import Message

ROW_KEYS = (
    "prompt",
    "messages",
    "chosen",
    "rejected",
    "completion",
    "label",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
)
"""The keys of a row that are read."""
_VARIABLES = ("tools", "functions", "documents", "chat_template_kwargs")
EXAMPLE = '{"prompt": ..., "chosen": ..., "rejected": ...}'

_TURN = re.compile(r"\n\n(Human|Assistant):")
_LAST_TURN = "\n\nAssistant:"
_ROLES = {"Human": "user", "Assistant": "assistant"}

Side = str | list[Message]
"""A text, or messages."""


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

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def answers(self) -> list[tuple[str, Side]]:
        """The answers that there are, with their names."""
        sides = {"chosen": self.chosen, "rejected": self.rejected}
        return [(name, side) for name, side in sides.items() if side is not None]

    def conversation(self, answer: Side) -> Chat:
        """Return prompt and answer as one conversation, checked and in one form. Raises BadRow."""
        assert not isinstance(self.prompt, str)
        assert not isinstance(answer, str)
        return parse_row({**self.variables, "messages": [*self.prompt, *answer]})


def parse_preference(row: Mapping[str, Any], *, as_chat: bool = False) -> Preference:
    """Return the preference in a row. `as_chat`: make messages of texts. Raises BadRow."""
    if "completion" in row:
        prompt, chosen, rejected = _unpaired(row)
    else:
        for key in ("chosen", "rejected"):
            if row.get(key) is None:
                keys = ", ".join(map(repr, row)) or "none"
                raise BadRow(f"no {key}", f"no key {key!r}; the row has {keys}: write it as {EXAMPLE}")
        prompt, chosen, rejected = _paired(row)
    found = Preference(prompt, chosen, rejected, {key: row[key] for key in _VARIABLES if row.get(key) is not None})
    if as_chat and not found.is_chat:
        found = _as_chat(found)
    _check(found)
    return found


def _unpaired(row: Mapping[str, Any]) -> tuple[Side, Side | None, Side | None]:
    label = row.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise BadRow("bad label", f"'label' is {str(label)[:40]!r}; write true for a wanted completion, or false")
    completion, prompt = _side(row["completion"], "completion"), _given_prompt(row)
    if prompt is None:
        raise BadRow("no prompt", "the row has a completion and no prompt; write both")
    _check_kinds(prompt, completion, "completion")
    return (prompt, completion, None) if label else (prompt, None, completion)


def _paired(row: Mapping[str, Any]) -> tuple[Side, Side, Side]:
    chosen, rejected = _side(row["chosen"], "chosen"), _side(row["rejected"], "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("mixed kinds", "one of 'chosen' and 'rejected' is a text and the other messages; write both alike")
    if chosen == rejected:
        raise BadRow("equal answers", "'chosen' and 'rejected' are equal; leave the row out")
    prompt = _given_prompt(row)
    if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
        return _common_prompt(chosen, rejected)  # beside conversations, a text repeats their question
    _check_kinds(prompt, chosen, "chosen")
    return prompt, _without(prompt, chosen), _without(prompt, rejected)


def _given_prompt(row: Mapping[str, Any]) -> Side | None:
    found = [key for key in ("prompt", "messages") if row.get(key) is not None]
    return _side(row[found[0]], found[0]) if found else None


def _side(value: Any, key: str) -> Side:
    """Return a text or a list of messages. Raises BadRow."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return value
    raise BadRow(
        f"bad {key}", f"{key!r} is {str(value)[:40]!r}; write a text, or a list of messages with role and content"
    )


def _check_kinds(prompt: Side, answer: Side, key: str) -> None:
    if isinstance(prompt, str) != isinstance(answer, str):
        kinds = [("a text" if isinstance(side, str) else "messages") for side in (prompt, answer)]
        raise BadRow("mixed kinds", f"the prompt is {kinds[0]} and {key!r} is {kinds[1]}; write both alike")


def _without(prompt: Side, answer: Side) -> Side:
    """Return the answer alone, where it repeats the messages of the prompt."""
    if isinstance(prompt, str) or not prompt or answer[: len(prompt)] != prompt:
        return answer
    return answer[len(prompt) :]


def _common_prompt(chosen: Side, rejected: Side) -> tuple[Side, Side, Side]:
    """Cut off what both sides begin with: of a transcript, all before the last turn of the assistant."""
    cut = _common(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        cuts = {side.rfind(_LAST_TURN) + len(_LAST_TURN) for side in (chosen, rejected)}
        if _TURN.match(chosen) and len(cuts) == 1 and len(_LAST_TURN) <= min(cuts) <= cut:
            cut = cuts.pop()
        elif cut and chosen[cut - 1] == " ":
            cut -= 1  # tokens begin with the space before a word
    if not cut:
        raise BadRow(
            "no common prompt",
            "the row has no prompt, and 'chosen' and 'rejected' begin differently; write what both answer as 'prompt'",
        )
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _common(first: Side, second: Side) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _as_chat(found: Preference) -> Preference:
    assert isinstance(found.prompt, str)
    prompt: list[Message] = [{"role": "user", "content": found.prompt}]
    if _TURN.match(found.prompt):
        prompt = _turns(found.prompt)
    return Preference(prompt, _answer(found.chosen), _answer(found.rejected), found.variables)


def _answer(text: Side | None) -> Side | None:
    if text is None:
        return None
    assert isinstance(text, str)
    return [{"role": "assistant", "content": text.strip()}]


def _turns(transcript: str) -> list[Message]:
    """Return the messages of a transcript, without the empty turn at its end that is to be answered."""
    _, *parts = _TURN.split(transcript)
    turns: list[Message] = [
        {"role": _ROLES[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _check(found: Preference) -> None:
    """Raise BadRow for a side without text, or one that is not the assistant's."""
    for name, side in found.answers:
        if isinstance(side, str):
            if not side.strip():
                raise BadRow(f"empty {name}", f"{name!r} is empty; write an answer, or leave the row out")
        elif not side or side[0].get("role") != "assistant":
            role = side[0].get("role") if side else "nothing"
            raise BadRow(
                f"bad {name}",
                f"{name!r} begins with {role}, not with a message of the assistant; write the answer there, and all "
                "before it as 'prompt'",
            )
    if not found.prompt:
        raise BadRow("no prompt", "'prompt' is empty; write what the answers are to")
