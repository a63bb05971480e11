"""Rows of preferences under the keys of published datasets, brought to the keys of TRL.

{"question": "...", "response_j": "...", "response_k": "..."}       lvwerra/stack-exchange-paired: j is preferred
{"system": "...", "question": "...", "chosen": ..., "rejected": ...}   Intel/orca_dpo_pairs; `input` or `query` too
{"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}   LLaMA-Factory's, of Alpaca
{"conversations": [...], "chosen": {...}, "rejected": {...}}           LLaMA-Factory's, of ShareGPT: `from`, `value`
{"prompt": "...", "chosen": [messages], ..., "score_chosen": 8.5, ...}   UltraFeedback's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.data.chat.conversation import BadRow

PROMPTS = ("prompt", "messages", "conversations")
"""Keys of a prompt, of which the first that a row has is read."""
QUESTIONS = ("question", "instruction", "query", "input")
"""Keys of a question, without what leads to an answer in a text."""
_ANSWERS = {"response_j": "chosen", "response_k": "rejected"}
_SCORES = ("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating")
INPUT_KEYS = (*PROMPTS, *QUESTIONS, "system", *_ANSWERS, *(key for keys in _SCORES for key in keys))
"""The keys that are read, those of TRL's answers aside."""

_QUESTION_TEXT = "Question: {}\n\nAnswer: "
"""Text of a question, as TRL's and optimum-habana's scripts for stack-exchange-paired write it."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles."""


def canonical_row(row: Mapping[str, Any], *, as_chat: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's format, and the row with `prompt`, `chosen` and `rejected`, or `completion`.

    A key with null is absent, as tables write it. `as_chat`: leave a question as it is. Raises BadRow.
    """
    found = {key: value for key, value in row.items() if value is not None}
    is_ranked = "chosen" not in found and any(key in found for key in _ANSWERS)
    if is_ranked:
        found = {_ANSWERS.get(key, key): value for key, value in found.items()}
    for key in ("prompt", "messages", "conversations", "chosen", "rejected", "completion"):
        if key in found:
            found[key] = _with_roles(found[key])
    given = [key for key in PROMPTS if key in found]
    asked = [key for key in QUESTIONS if found.get(key) not in (None, "")]
    name = given[0] if given else asked[0] if asked else ""
    form = "question, response_j, response_k" if is_ranked else _form(found, name)
    if given:
        found["prompt"] = found[given[0]]
    elif asked:
        found["prompt"] = _question(found, asked, as_chat=as_chat)
    return form, found


def scores_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the scores of the chosen and of the rejected answer, if the row has them."""
    for keys in _SCORES:
        chosen, rejected = (row.get(key) for key in keys)
        if isinstance(chosen, int | float) and isinstance(rejected, int | float):
            return float(chosen), float(rejected)
    return None


def _form(row: Mapping[str, Any], prompt: str) -> str:
    answers = [key for key in ("completion", "label", "chosen", "rejected") if key in row]
    answers = answers[:2] if "completion" in row else answers
    value = row.get(answers[0]) if answers else None
    kind = "texts" if isinstance(value, str) else "messages"
    return ", ".join([prompt, *answers] if prompt else [*answers]) + f" ({kind})"


def _question(row: Mapping[str, Any], keys: list[str], *, as_chat: bool) -> str:
    """Return the question of a row as a prompt. Raises BadRow."""
    used = [key for key in keys if key in (keys[0], "input")]
    for key in used:
        if not isinstance(row[key], str):
            raise BadRow(f"bad {key}", f"{key!r} is {str(row[key])[:40]!r}; write a text")
    question = "\n".join(row[key] for key in used)
    if as_chat or not isinstance(row.get("chosen", row.get("completion")), str):
        return question
    if keys[0] == "question":
        return _QUESTION_TEXT.format(question)
    raise BadRow(
        "a question without a template",
        f"{keys[0]!r} is a text without what leads to an answer; pass --as-chat, which lets the chat template write "
        "it, or write all of it as 'prompt'",
    )


def _with_roles(side: Any) -> Any:
    """Return messages of ShareGPT's form as messages with role and content, and all else as it is."""
    if isinstance(side, dict):
        return _with_roles([side])[0]
    if not isinstance(side, list):
        return side
    return [
        {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if isinstance(message, dict) and {"from", "value"} <= message.keys() and isinstance(message["from"], str)
        else message
        for message in side
    ]
