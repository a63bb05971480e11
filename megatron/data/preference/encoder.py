"""Preferences as tokens: the prompt, which both answers share, and the answers.

The ids are TRL's: those of the prompt with the inference prompt of the template, and those of the prompt with each
answer, of which the common beginning is the prompt. A text gets the tokens that its tokenizer puts before texts, and
EOS at its end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.conversation import BadRow
from megatron.data.chat.template import ChatTemplate, TemplateFailure
from megatron.data.chat.tokenizer import ChatTokenizer, ids_before_text
from megatron.data.chat.turns import Rendered, TurnFinder
from megatron.data.index.indexed import DataError
from megatron.data.preference.formats import Preference
from megatron.data.preference.rows import Side
from megatron.data.prepare.rows import RowCounts

Ids = NDArray[np.int32]
Templates = tuple[ChatTemplate, ChatTemplate | None]
NO_IDS: Ids = np.empty(0, np.int32)


@dataclass(frozen=True)
class Pair:
    """Ids of a prompt and of the answers to it; an answer that a row lacks is empty."""

    prompt: Ids
    chosen: Ids
    rejected: Ids

    @property
    def parts(self) -> tuple[Ids, Ids, Ids]:
        return self.prompt, self.chosen, self.rejected


@dataclass
class PairCounts(RowCounts):
    """Numbers of rows by outcome. Counters are by reason."""

    num_unpaired: int = 0
    """Rows with one answer."""
    num_shortened_prompts: int = 0
    """Pairs whose last tokens of the prompt belong to the answers, with which they merge."""
    forms: Counter[str] = field(default_factory=Counter)
    """Rows by their format."""
    first_rows: dict[str, str] = field(default_factory=dict)
    """File and line of the first row of each format."""
    num_equal_scores: int = 0
    """Pairs in use whose answers have the same score."""
    num_reversed_scores: int = 0
    """Pairs in use whose rejected answer has the higher score."""
    num_other_turns: int = 0
    """Rows whose answers hold turns of others than the assistant."""
    num_repeated_prompts: int = 0
    """Rows whose answers begin with the text of the prompt."""
    num_passed_over: int = 0
    """Answers of ranked lists between the best and the worst."""
    num_without_template: int = 0
    """Rows of texts, which no template writes, where one is given."""

    def outcomes(self) -> dict[str, int]:
        """Return how many rows were changed, left out or are doubtful, by what was found."""
        counts = {
            "rows with one answer": self.num_unpaired,
            "EOS appended to answers": self.num_appended_eos,
            "prompts whose end merges with an answer": self.num_shortened_prompts,
            "pairs whose answers have the same score": self.num_equal_scores,
            "pairs whose rejected answer has the higher score": self.num_reversed_scores,
            **{f"bad, {reason}": count for reason, count in self.bad.items()},
            **{f"not written by the template, {kind}": count for kind, count in self.left_out.items()},
            "rows whose answers hold turns of others": self.num_other_turns,
            "rows whose answers begin with the prompt again": self.num_repeated_prompts,
            "answers between the best and the worst, not used": self.num_passed_over,
            "rows of texts, which --chat-template does not write without --as-chat": self.num_without_template,
            **{f"column not read, {name}": count for name, count in self.unread.items()},
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True)
class _Written:
    """A preference as texts."""

    prompt: str
    wholes: dict[str, str]
    """Prompt and answer, by the name of the answer."""
    num_appended_eos: int
    left_out: list[str]


class PreferenceEncoder:
    """Encode preferences, many at a time."""

    def __init__(self, templates: Templates | str, tokenizer: ChatTokenizer, *, append_eos: bool = True):
        """`templates`: for rows of messages, and for those with tools; a text: why there are none."""
        self.tokenizer, self._templates = tokenizer, templates
        self._append_eos = append_eos
        self._finders = () if isinstance(templates, str) else tuple(TurnFinder(one) for one in templates if one)
        self._first_ids = ids_before_text(tokenizer)

    def encode(self, rows: Sequence[Preference], counts: PairCounts) -> list[Pair | BadRow]:
        """Return for each preference its tokens, or the error. Adds to `counts`."""
        written: list[_Written | BadRow] = []
        for row in rows:
            try:
                written.append(self._chat(row) if row.is_chat else self._text(row))
            except BadRow as error:
                written.append(error)
        # of all rows in one list, as the tokenizer is fastest with many; `tokens` is read in the same order below
        texts = [text for one in written if isinstance(one, _Written) for text in (one.prompt, *one.wholes.values())]
        try:
            tokens = iter(self._tokenize(texts))
        except DataError as error:
            if len(rows) == 1:
                return [BadRow("cannot be encoded", str(error))]
            return [self.encode([row], counts)[0] for row in rows]  # one by one, to find the refused text
        results: list[Pair | BadRow] = []
        for row, one in zip(rows, written, strict=True):
            if isinstance(one, BadRow):
                results.append(one)
            else:
                prompt, *wholes = itertools.islice(tokens, 1 + len(one.wholes))
                results.append(self._pair(row, one, prompt, wholes, counts))
        return results

    def _chat(self, row: Preference) -> _Written:
        """Return prompt and answers as the template writes them. Raises BadRow, DataError."""
        first = len(row.prompt)
        prompts, wholes = set(), {}
        num_appended = 0
        left_out: list[str] = []
        for name, answer in row.answers:
            rendered = self._rendered(row, name, answer, first)
            turn = rendered.turns[first]
            assert turn is not None
            prompts.add(rendered.text[: turn[0]])
            wholes[name] = rendered.text
            # a template may end the turn by itself, with another token than EOS
            is_ended = rendered.text.rstrip().endswith(self.tokenizer.special_tokens)
            if self._append_eos and rendered.is_open and not is_ended:
                wholes[name] += self.tokenizer.eos_of_text()
                num_appended += 1
            # of both answers mostly the same, and counted once a row
            left_out = left_out or rendered.left_out
        if len(prompts) > 1:
            raise BadRow(
                "no common prompt",
                "the template writes another prompt before 'rejected' than before 'chosen'; use another template",
            )
        return _Written(prompts.pop(), wholes, num_appended, left_out)

    def _rendered(self, row: Preference, name: str, answer: Side, first: int) -> Rendered:
        """Return the prompt with an answer, and its turn that begins the answer, message `first`. Raises BadRow."""
        if isinstance(self._templates, str):
            raise BadRow("no template", f"the row has messages, and {self._templates}")
        chat = row.conversation(answer)
        finder = self._finders[-1] if "tools" in chat.variables else self._finders[0]
        try:
            return finder.find(chat.messages, chat.variables, lambda number: number == first)
        except TemplateFailure as error:
            raise BadRow(error.kind, f"{name!r}: {error}") from None

    def _text(self, row: Preference) -> _Written:
        assert isinstance(row.prompt, str)
        wholes, num_appended = {}, 0
        for name, answer in row.answers:
            assert isinstance(answer, str)
            wholes[name] = row.prompt + answer
            if self._append_eos:
                eos = self.tokenizer.eos_of_text()
                if not answer.endswith(eos):
                    wholes[name] += eos
                    num_appended += 1
        return _Written(row.prompt, wholes, num_appended, [])

    def _tokenize(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self.tokenizer.encode(texts)
        ends = np.cumsum(encoded.lengths)
        return [encoded.ids[end - length : end] for end, length in zip(ends, encoded.lengths, strict=True)]

    def _pair(
        self, row: Preference, one: _Written, prompt: Ids, wholes: Sequence[Ids], counts: PairCounts
    ) -> Pair | BadRow:
        """Return the tokens of a prompt and of what comes after it in those of prompt and answers."""
        # the ids of the prompt alone are not always a prefix of those with an answer:
        # tokens at the end of the prompt may merge with the begin of an answer, and then belong to the answers
        cut = min(_common(prompt, whole) for whole in wholes)
        shared = prompt[:cut]
        # a template writes its own beginning of a text, a plain text gets the tokenizer's
        if not row.is_chat:
            shared = np.concatenate([self._first_ids, shared])
        if not len(shared):
            return BadRow(
                "no common prompt", "the tokens of the prompt are not those that the answers begin with; write it apart"
            )
        answers = {name: whole[cut:] for name, whole in zip(one.wholes, wholes, strict=True)}
        for name, ids in answers.items():
            if not len(ids):
                return BadRow(f"empty {name}", f"{name!r} has no token after those of the prompt; write an answer")
        if len(answers) == 2 and np.array_equal(answers["chosen"], answers["rejected"]):
            return BadRow("equal answers", "'chosen' and 'rejected' have equal tokens; leave the row out")
        # only now: a bad row is counted by its reason alone
        counts.num_unpaired += len(answers) == 1
        counts.num_appended_eos += one.num_appended_eos
        counts.num_shortened_prompts += cut < len(prompt)
        counts.left_out.update(one.left_out)
        if row.scores is not None:
            counts.num_equal_scores += row.scores[0] == row.scores[1]
            counts.num_reversed_scores += row.scores[0] < row.scores[1]
        return Pair(shared, answers.get("chosen", NO_IDS), answers.get("rejected", NO_IDS))


def _common(first: Ids, second: Ids) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    # argmax of booleans is the first True, and 0 where there is none
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
