"""Answers and prompts of rows, under the keys of published datasets.

{"question": "...", "response_j": "...", "response_k": "..."}       lvwerra/stack-exchange-paired: j is preferred
{"system": "...", "question": "...", "chosen": ..., "rejected": ...}   Intel/orca_dpo_pairs; `input` or `query` too
{"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}   LLaMA-Factory's, of Alpaca
{"conversations": [...], "chosen": {...}, "rejected": {...}}           LLaMA-Factory's, of ShareGPT: `from`, `value`
{"messages": [..., {"role": "assistant", ...}], "label": true}         LLaMA-Factory's, for KTO; `kto_tag` too
{"prompt": "...", "chosen": [messages], ..., "score_chosen": 8.5, ...}   UltraFeedback's, binarized
{"prompt": "...", "responses": ["...", "..."], "scores": [1, 2]}       a ranked list: its best and its worst answer
{"instruction": "...", "completions": [{"response": "...", "overall_score": 8.5}, ...]}   UltraFeedback's
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.chat.columns import COLUMNS, EMPTY, FURTHER, LABELS, Row
from megatron.data.chat.conversation import BadRow, list_of, messages_or_text
from megatron.data.chat.row_forms import of_sharegpt, with_roles
from megatron.data.chat.template import Message

Side = str | list[Message]
"""A text, or messages."""
EXAMPLE = '{"prompt": ..., "chosen": ..., "rejected": ...}'

PROMPTS = ("prompt", "messages", "conversations")
"""Keys of a prompt, of which the first that a row has is read."""
QUESTIONS = ("question", "instruction", "query", "input")
"""Keys of a question, without what leads to an answer in a text."""
_FURTHER = {"instruction": FURTHER, "input": ()}
"""Keys of what belongs to a question, by its key; for others `input` alone."""
_COMPLETIONS = ("completion", "response", "output", "answer")
_RANKED = ("response_j", "response_k")
_SCORES = ("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating")
_LISTS = ("responses", "completions", "answers")
"""Keys of a list of answers."""
_LIST_SCORES = ("scores", "ratings")
"""Keys of their scores, the highest of the best."""
_ITEM_TEXTS = ("response", "answer", "completion", "text", "content")
_ITEM_SCORES = {"score": 1, "overall_score": 1, "rating": 1, "rank": -1}
"""Keys of a score in an answer, with the sign that makes it the highest of the best."""
_QUESTION_TEXT = "Question: {}\n\nAnswer: "
"""Text of a question, as TRL's and optimum-habana's scripts for stack-exchange-paired write it."""
ROW_COLUMNS = (*COLUMNS, *(key for keys in _SCORES for key in keys))
"""Columns that are read."""


@dataclass(frozen=True)
class RowAnswers:
    """The answers of a row: a pair, or one that is wanted or not."""

    keys: tuple[str, ...]
    chosen: Side | None
    rejected: Side | None
    scores: tuple[float, float] | None = None
    num_passed_over: int = 0
    """Further answers of a ranked list."""
    before: list[Message] | None = None
    """The messages before the answer, where it is the last of a conversation."""

    @property
    def given(self) -> Side:
        side = self.rejected if self.chosen is None else self.chosen
        assert side is not None
        return side


def answers_of(row: Row) -> RowAnswers:
    """Return the answers of a row. Raises BadRow."""
    # a pair before all else: such rows may have further columns, such as `messages` in UltraFeedback's
    if "chosen" in row or "rejected" in row:
        return _pair(row, "chosen", "rejected")
    if not row.keys().isdisjoint(_RANKED):
        return _pair(row, *_RANKED)
    completions = [key for key in _COMPLETIONS if key in row]
    labels = [key for key in LABELS if key in row]
    # a label alone is not enough: it may say something else of a row of another form
    has_turns = not row.keys().isdisjoint(PROMPTS[1:])
    if labels and (completions or has_turns):
        return _labelled(row, labels, completions)
    for key in _LISTS:
        # a number under such a name is a count
        if isinstance(row.peek(key), list | str):
            return _best_and_worst(row, key)
    if "completion" in row:
        raise BadRow("no label", "the row has a completion and no label; write true for a wanted one, or false")
    raise _lack(row, "chosen")


def _lack(row: Row, key: str) -> BadRow:
    names = ", ".join(map(repr, row)) or "none"
    what = f"{key!r} is null" if key in row.nulls else f"no key {key!r}"
    return BadRow(f"no {key}", f"{what}; the row has {names}: write it as {EXAMPLE}")


def _pair(row: Row, chosen: str, rejected: str) -> RowAnswers:
    for key in (chosen, rejected):
        if key not in row:
            raise _lack(row, key)
    # all are read, whichever counts: they are no columns that nothing reads
    scores = [_scores_at(row, *keys) for keys in _SCORES]
    usable = next(filter(None, scores), None)
    return RowAnswers((chosen, rejected), side_at(row, chosen), side_at(row, rejected), usable)


def _scores_at(row: Row, chosen: str, rejected: str) -> tuple[float, float] | None:
    # others, such as texts, remain columns that are not read, which is said
    if not (_is_number(row.peek(chosen)) and _is_number(row.peek(rejected))):
        return None
    return float(row[chosen]), float(row[rejected])


def _labelled(row: Row, labels: list[str], completions: list[str]) -> RowAnswers:
    """Return an answer that has a label."""
    values = [row[key] for key in labels]
    for key, label in zip(labels, values, strict=True):
        if label not in (0, 1):  # False and True are among them
            raise BadRow("bad label", f"{key!r} is {str(label)[:40]!r}; write true for a wanted completion, or false")
    # LLaMA-Factory's kto_tag may stand beside TRL's label
    if len(set(map(bool, values))) > 1:
        raise BadRow("bad label", f"{' and '.join(labels)} contradict each other; keep one")
    if len(completions) > 1:
        raise BadRow("ambiguous", f"the row has the answers {' and '.join(completions)}; leave all but one out")
    if completions:
        answer, before = side_at(row, completions[0]), None
    else:
        answer, before = _last_turn(row)
    keys = (*completions, labels[0])
    if values[0]:
        return RowAnswers(keys, answer, None, before=before)
    return RowAnswers(keys, None, answer, before=before)


def _last_turn(row: Row) -> tuple[list[Message], list[Message]]:
    """Return the last message of a conversation, and those before it. Raises BadRow."""
    key = next(key for key in PROMPTS[1:] if key in row)
    turns = side_at(row, key)
    if isinstance(turns, str) or len(turns) < 2:
        raise BadRow("no prompt", f"{key!r} has {len(turns)} messages; write a question and its answer")
    return turns[-1:], turns[:-1]


def _best_and_worst(row: Row, key: str) -> RowAnswers:
    """Return the answers with the highest and the lowest score of a list, the first of equal ones. Raises BadRow."""
    items = list_of(row[key], key)
    if not isinstance(items, list) or len(items) < 2:
        raise BadRow(f"bad {key}", f"{key!r} is {str(items)[:40]!r}; write a list of two answers or more")
    listed = next((name for name in _LIST_SCORES if name in row), None)
    if listed is None:
        scores, sides = _scored(row, items, key)
    else:
        scores, sides = list_of(row[listed], listed), items
    is_usable = isinstance(scores, list) and all(map(_is_number, scores))
    if not is_usable or len(scores) != len(sides):
        raise BadRow("bad scores", f"the scores of {key!r} are {str(scores)[:60]}; write a number for each answer")
    # checked before: a NaN would make both depend on the order
    best, worst = max(scores), min(scores)
    if best == worst:
        raise BadRow("equal scores", f"all answers of {key!r} have the score {best}, so none is preferred")
    chosen, rejected = (side_of(sides[scores.index(score)], key) for score in (best, worst))
    return RowAnswers((key,), chosen, rejected, (float(best), float(worst)), len(sides) - 2)


def _scored(row: Row, items: list[Any], key: str) -> tuple[list[Any], list[Any]]:
    """Return the scores of answers that hold them, all under one name, and their texts. Raises BadRow."""
    text, score = _shared_key(items, _ITEM_TEXTS), _shared_key(items, _ITEM_SCORES)
    if text is None or score is None:
        raise BadRow(
            "no scores",
            f"the answers of {key!r} have no scores of one name; write 'scores', a number for each, or objects of "
            "'response' and 'score'",
        )
    _note_unread(row, key, items, (text, score))
    sign = _ITEM_SCORES[score]
    values = [item[score] for item in items]
    return [value * sign if _is_number(value) else value for value in values], [item[text] for item in items]


def _note_unread(row: Row, key: str, items: Sequence[dict[str, Any]], read: Collection[str]) -> None:
    """Note the keys of the answers of a list that are not read and not empty everywhere."""
    # dict.fromkeys: each name once, in the order of the answers, where a set would have none
    for name in dict.fromkeys(name for item in items for name in item):
        values = [item.get(name) for item in items]
        if name not in read and any(value not in (None, *EMPTY) for value in values):
            row.leave(f"{key}.{name}")


def _shared_key(items: Sequence[Any], names: Iterable[str]) -> str | None:
    """Return the first name that all answers have as a key."""
    if not all(isinstance(item, dict) for item in items):
        return None
    # of all answers, since scores of two names are not on one scale
    return next((name for name in names if all(name in item for item in items)), None)


def _is_number(value: Any) -> bool:
    # True is an integer in Python, and NaN a float
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def side_at(row: Row, key: str) -> Side:
    """Return a text or a list of messages under a key. Raises BadRow."""
    if key == "conversations":
        return of_sharegpt(row[key])
    if key == "messages":
        return side_of(list_of(row[key], key), key)
    return side_of(row[key], key)


def side_of(value: Any, key: str) -> Side:
    """Return a text or a list of messages. Raises BadRow."""
    value = messages_or_text(value, key)
    # one message may stand for a list of one
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return with_roles(value)
    raise BadRow(
        f"bad {key}", f"{key!r} is {repr(value)[:40]}; write a text, or a list of messages with role and content"
    )


def prompt_of(row: Row, answers: RowAnswers, *, as_chat: bool) -> tuple[str, Side | None]:
    """Return the key and the prompt of a row; None if it is within the answers. Raises BadRow."""
    key = next((key for key in PROMPTS if key in row), None)
    if answers.before is not None:
        assert key is not None
        return key, answers.before
    if key is not None:
        return key, side_at(row, key)
    question = next((key for key in QUESTIONS if row.peek(key) not in (None, "")), None)
    if question is None:
        return "", None
    return question, _question(row, question, leaves=as_chat or not isinstance(answers.given, str))


def _question(row: Row, key: str, *, leaves: bool) -> str:
    """Return the question of a row as a prompt. `leaves`: without what leads to an answer. Raises BadRow."""
    names = (key, *_FURTHER.get(key, FURTHER[:1]))
    parts = [row[name] for name in names if row.peek(name) not in (None, "")]
    for part in parts:
        if not isinstance(part, str):
            raise BadRow(f"bad {key}", f"{key!r} or what belongs to it is {str(part)[:40]!r}; write a text")
    question = "\n\n".join(parts)  # as in conversations (row_forms.py)
    if leaves:
        return question
    if key == "question":
        return _QUESTION_TEXT.format(question)
    raise BadRow(
        "a question without a template",
        f"{key!r} is a text without what leads to an answer; pass --as-chat, which lets the chat template write it, or "
        "write all of it as 'prompt'",
    )
