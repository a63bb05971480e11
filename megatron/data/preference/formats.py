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

from megatron.data.chat.conversation import BadRow, Chat, parse_row
from megatron.data.chat.template import Message
from megatron.data.preference.rows import INPUT_KEYS, canonical_row, scores_of

ROW_KEYS = (
    *INPUT_KEYS,
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
    form: str = ""
    """Name of the row's format."""
    scores: tuple[float, float] | None = None
    """Scores of the chosen and of the rejected answer, if the row has them."""

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
    given = row
    form, row = canonical_row(row, as_chat=as_chat)
    if "completion" in row:
        prompt, chosen, rejected = _unpaired(row)
    else:
        for key in ("chosen", "rejected"):
            if key not in row:
                keys = ", ".join(repr(name) for name, value in given.items() if value is not None) or "none"
                lack = f"{key!r} is null" if key in given else f"no key {key!r}"
                raise BadRow(f"no {key}", f"{lack}; the row has {keys}: write it as {EXAMPLE}")
        prompt, chosen, rejected = _paired(row)
    if as_chat and isinstance(prompt, str):
        prompt, chosen, rejected = _as_chat(prompt, chosen, rejected)
    if system := row.get("system"):
        prompt = _with_system(system, prompt)
    variables = {key: row[key] for key in _VARIABLES if key in row}
    found = Preference(prompt, chosen, rejected, variables, form, scores_of(row))
    _check(found)
    return found


def _unpaired(row: Mapping[str, Any]) -> tuple[Side, Side | None, Side | None]:
    label = row.get("label")
    if label is None:
        raise BadRow("no label", "the row has a completion and no label; write true for a wanted one, or false")
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
    if prompt is None:
        return _common_prompt(chosen, rejected)
    if isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str):
        return _beside_messages(prompt, chosen, rejected)
    _check_kinds(prompt, chosen, "chosen")
    return prompt, _without(prompt, chosen), _without(prompt, rejected)


def _given_prompt(row: Mapping[str, Any]) -> Side | None:
    return _side(row["prompt"], "prompt") if "prompt" in row else None


def _beside_messages(prompt: str, chosen: list[Message], rejected: list[Message]) -> tuple[Side, Side, Side]:
    """Return a prompt that is a text and answers that are messages, which may begin with it. Raises BadRow."""
    cut = _common(chosen, rejected)
    if not cut:
        return [{"role": "user", "content": prompt}], chosen, rejected
    contents = [str(message.get("content") or "").strip() for message in chosen[:cut]]
    if not any(content and (content in prompt or prompt.strip() in content) for content in contents):
        raise BadRow(
            "another prompt",
            f"'prompt', {prompt[:40]!r}, is not in the messages that 'chosen' and 'rejected' begin with; correct one "
            "of them",
        )
    return _common_prompt(chosen, rejected)


def _with_system(system: Any, prompt: Side) -> Side:
    """Return the prompt after a message of the system. Raises BadRow."""
    if not isinstance(system, str):
        raise BadRow("bad system", f"'system' is {str(system)[:40]!r}; write a text")
    if isinstance(prompt, str):
        raise BadRow(
            "system beside texts",
            "texts have no place for 'system'; pass --as-chat, or write it at the beginning of 'prompt' and leave the "
            "key out",
        )
    if prompt and prompt[0].get("role") == "system":
        if prompt[0].get("content") != system:
            raise BadRow("another system", "'system' differs from the first message; leave one of them out")
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _side(value: Any, key: str) -> Side:
    """Return a text or a list of messages. Raises BadRow."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return value
    raise BadRow(
        f"bad {key}", f"{key!r} is {repr(value)[:40]}; write a text, or a list of messages with role and content"
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
    """Cut off what both sides begin with: of a transcript, all before the last turn of the assistant. Raises BadRow."""
    cut = _common(chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        cuts = {side.rfind(_LAST_TURN) + len(_LAST_TURN) for side in (chosen, rejected)}
        if _TURN.match(chosen) and len(cuts) == 1 and len(_LAST_TURN) <= min(cuts) <= cut:
            cut = cuts.pop()
        elif _TURN.match(chosen) and _TURN.match(rejected) and _TURN.findall(chosen[:cut])[-1:] != ["Assistant"]:
            raise BadRow(
                "no common prompt",
                "'chosen' and 'rejected' are transcripts that differ before the assistant's answer; write answers to "
                "the same turns",
            )
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


def _as_chat(prompt: str, chosen: Side | None, rejected: Side | None) -> tuple[Side, Side | None, Side | None]:
    turns: Side = _turns(prompt) if _TURN.match(prompt) else [{"role": "user", "content": prompt}]
    return turns, _answer(chosen), _answer(rejected)


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
