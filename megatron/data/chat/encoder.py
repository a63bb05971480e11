"""Conversations encoded as samples: token ids, and a mask of the tokens that are trained.

By default the loss is on what the assistant writes: everything after the generation prompt, the end-of-turn marker
included. A sample has no padding token, so the end-of-sequence token has one meaning only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.chat.conversation import BadRow, Chat, exchanges_of
from megatron.data.chat.marks import Span
from megatron.data.chat.row_forms import MIXED
from megatron.data.chat.template import ChatTemplate, TemplateFailure
from megatron.data.chat.tokenizer import ChatTokenizer, EncodedText
from megatron.data.chat.turns import Rendered, TurnFinder
from megatron.data.index.indexed import DataError
from megatron.data.prepare.block_encoder import Counts
from megatron.data.prepare.rows import RowCounts

# the types of options take pydantic with them, a tenth of the start of a preparation
if TYPE_CHECKING:
    from megatron.options.types import TrainOn

Turns = Literal["together", "as_prompted"]
TooLong = Literal["drop", "truncate", "split", "error"]
TOO_LONG = "too long"
"""Kind of the BadRow of a conversation that may be neither cut nor left out."""


@dataclass(frozen=True)
class Sample:
    """The tokens of a conversation, or of a part of one."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    """1: the token is trained. Always 0 for the first token, which nothing precedes."""

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ChatRules:
    """Options that decide how conversations become samples."""

    train_on: TrainOn = "assistant"
    """Tokens to train in rows without `unmask`; `all`: every token of every row, whatever the row says."""
    turns: Turns = "together"
    """Turns of a conversation in one sample, or each after exactly its inference prompt, in as few as that needs."""
    append_eos: bool = True
    """Add EOS to the last turn if the template writes nothing after it."""
    max_length: int | None = None
    """Tokens in a sample."""
    min_length: int = 1
    too_long: TooLong = "drop"


@dataclass
class ChatCounts(RowCounts):
    """Numbers of rows and samples by outcome. Counters are by reason."""

    num_loss_tokens: int = 0
    """Trained tokens."""
    num_truncated: int = 0
    num_split: int = 0
    """Rows that became several samples."""
    num_cut_by_tokens: int = 0
    """Split rows of which an exchange is cut, or that the template does not write in parts."""
    num_undivided: int = 0
    """Rows that `as_prompted` leaves in one piece."""
    as_text: Counter[str] = field(default_factory=Counter)
    """Rows in which a marker of the template is not a token, by the marker."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples left out."""
    num_unanswered: int = 0
    """Conversations whose last message is not trained, nor the assistant's."""
    first_forms: dict[str, dict[str, str]] = field(default_factory=dict)
    """File -> form of rows (row_forms.py) -> place of its first row there. Between batches, of the last file alone."""
    forms: Counter[str] = field(default_factory=Counter)
    """Rows of each form."""
    num_too_long: int = 0
    """Rows that may be neither cut nor left out (too_long=error)."""
    first_too_long: str = ""
    """File and line of the first of them, and its number of tokens."""
    longest: int = 0
    """Tokens of the longest of them."""

    def check_next(self, other: Counts) -> None:
        """Raise DataError for a file whose rows are of several forms."""
        assert isinstance(other, ChatCounts)
        for name, first_rows in other.first_forms.items():
            # a file's blocks come in order, so the form of its first row is the one that it began with
            forms = dict(self.first_forms.get(name, {}))
            for form, row in first_rows.items():
                forms.setdefault(form, row)
            if len(forms) > 1:
                (begun, _), (other_form, row), *_ = forms.items()
                raise DataError(
                    f"{row}: the row is of the form {other_form}, and the file began with {begun}; separate them, or "
                    f"pass --row-format {MIXED}"
                )

    def add(self, other: Counts) -> None:
        assert isinstance(other, ChatCounts)
        # the sum of all fields, below, would add these up
        longest = max(self.longest, other.longest)
        # files are read one after another: no earlier one can have a further row
        last_file = dict(list({**self.first_forms, **other.first_forms}.items())[-1:])
        super().add(other)
        self.longest, self.first_forms = longest, last_file

    def counts_apart(self, row: BadRow, place: str) -> bool:
        if row.kind != TOO_LONG:
            return False
        self.num_too_long += 1
        self.first_too_long = self.first_too_long or f"{place}, {row}"
        return True

    def outcomes(self) -> dict[str, int]:
        """Return how many rows or samples were changed or left out, by what happened to them."""
        counts = {
            "EOS appended": self.num_appended_eos,
            "truncated": self.num_truncated,
            "split": self.num_split,
            "split within an exchange": self.num_cut_by_tokens,
            "not as prompted, as messages of others are trained": self.num_undivided,
            **{f"marker written as text, {marker}": count for marker, count in self.as_text.items()},
            **{f"dropped, {reason}": count for reason, count in self.dropped.items()},
            **{f"bad, {reason}": count for reason, count in self.bad.items()},
            **{f"not written by the template, {kind}": count for kind, count in self.left_out.items()},
            "conversations that end without an answer": self.num_unanswered,
            **{f"column not read, {name}": count for name, count in self.unread.items()},
        }
        return {name: count for name, count in counts.items() if count}


class ChatEncoder:
    """Encode conversations as samples, many at a time."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: ChatTokenizer,
        rules: ChatRules,
        tool_template: ChatTemplate | None = None,
    ):
        """Raises DataError if a template writes an EOS that the tokenizer lacks.

        `tool_template` is used for conversations with tools; None: `template`.
        """
        self.template, self.tokenizer, self.rules = template, tokenizer, rules
        self._markers_as_text = tokenizer.without_token(template.source.tokens_to_add())
        self._finder = TurnFinder(template)
        self._tool_finder = TurnFinder(tool_template) if tool_template else self._finder
        # found at the start, not at the first row: an EOS that is missing would be written as an empty text
        if "eos_token" in template.variables | self._tool_finder.template.variables:
            tokenizer.eos_of_text()

    def encode(self, chats: Sequence[Chat], counts: ChatCounts) -> list[list[Sample] | BadRow]:
        """Return for each conversation its samples (none if it was dropped), or the error. Adds to `counts`."""
        results: list[list[Sample] | BadRow] = []
        written: list[tuple[int, Chat, _Written]] = []
        for number, chat in enumerate(chats):
            try:
                parts = self._written_parts(chat)
            except BadRow as error:
                results.append(error)
                continue
            # a place for each conversation first: samples of its parts follow once all texts are encoded
            results.append([])
            written += [(number, part, text) for part, text in parts]
        try:
            # all texts at once: the tokenizers are much faster on batches
            samples = self._tokenize([text for _, _, text in written])
        except DataError as error:
            # the library does not say which text of a batch it refuses
            if len(chats) == 1:
                return [BadRow("cannot be encoded", str(error))]
            return [self.encode([chat], counts)[0] for chat in chats]  # one by one, to find the refused text
        # counted only now: those of a refused batch come a second time
        counts.num_split += _num_repeated([number for number, _, _ in written])
        for (number, part, text), sample in zip(written, samples, strict=True):
            try:
                kept = self._fitted(part, sample, counts)
            except BadRow as error:
                results[number] = error
                continue
            self._count(part, text, kept, counts)
            result = results[number]
            if isinstance(result, list):  # another part of the conversation may have failed
                result += kept
        return results

    def _count(self, chat: Chat, written: _Written, kept: Sequence[Sample], counts: ChatCounts) -> None:
        """Count what was done to a conversation of which samples are `kept`."""
        if written.has_appended_eos:
            # not of a sample whose end is cut off
            counts.num_appended_eos += any(int(sample.ids[-1]) == self.tokenizer.eos_id for sample in kept)
        counts.num_undivided += self.rules.turns == "as_prompted" and _trains_others(chat)
        counts.as_text.update(marker for marker in self._markers_as_text if marker in written.text)
        counts.left_out.update(written.left_out)

    def _written_parts(self, chat: Chat) -> list[tuple[Chat, _Written]]:
        """Return the conversations of which samples are made, as texts. Raises BadRow."""
        parts = [(chat, "")] if self.rules.turns == "together" else self._parts(chat)
        return [(part, self._write(part, prompt)) for part, prompt in parts]

    def _parts(self, chat: Chat) -> list[tuple[Chat, str]]:
        """Return the conversations of which samples are made, each with a prompt to use instead of its own, or none.

        A conversation in which other turns than the assistant's are trained stays whole. Raises BadRow.
        """
        trained = [i for i in range(len(chat.messages)) if chat.is_trained(i)]
        # messages of others have no inference prompt after which they would be generated
        if not trained or _trains_others(chat):
            return [(chat, "")]
        try:
            parts = self._finder_of(chat).prompted_parts(chat.messages, chat.variables, trained)
        except TemplateFailure as error:
            raise BadRow(error.kind, str(error)) from None
        return [(chat.prompted(part.end, part.numbers), part.prompt) for part in parts]

    def _finder_of(self, chat: Chat) -> TurnFinder:
        return self._tool_finder if "tools" in chat.variables else self._finder

    def _write(self, chat: Chat, prompt: str = "") -> _Written:
        """Return a conversation's text and its trained spans. Raises BadRow, DataError.

        `prompt` replaces what is before the trained turn, if it is not empty.
        """
        try:
            rendered = self._finder_of(chat).find(chat.messages, chat.variables, chat.is_trained)
        except TemplateFailure as error:
            raise BadRow(error.kind, str(error)) from None
        text, spans = rendered.text, rendered.trained_spans()
        # what the template writes of earlier turns differs at inference, as without their reasoning: the text before
        # the turn is replaced, and its span moves with it
        if prompt and spans:
            begin = spans[0][0]
            shift = len(prompt) - begin
            text = prompt + text[begin:]
            spans = [(start + shift, end + shift) for start, end in spans]
        # with nothing behind its answer, the model would not learn to end it
        has_appended_eos = self.rules.append_eos and self._is_open_ended(rendered)
        if has_appended_eos:
            text += self.tokenizer.eos_of_text()
            # the model then also writes the white space before it
            spans[-1] = (spans[-1][0], len(text))
        spans += self._other_spans(chat, rendered)
        return _Written(text, _merged(spans), has_appended_eos, rendered.left_out)

    def _other_spans(self, chat: Chat, rendered: Rendered) -> list[Span]:
        """Return the contents of others than the assistant that are trained, without the template's text around."""
        # the option and the row's own key mean the same
        unmask = self.rules.train_on == "all_but_system"
        if not (unmask or chat.unmask or chat.flags):
            return []
        spans = []
        for i, content in enumerate(rendered.contents):
            is_other = chat.messages[i]["role"] != "assistant"
            if content and is_other and chat.is_trained(i, unmask):
                spans.append(content)
        return spans

    def _is_open_ended(self, rendered: Rendered) -> bool:
        """Return true if the assistant has the last message and no text or special token ends its content."""
        return rendered.is_open and not rendered.text.rstrip().endswith(self.tokenizer.special_tokens)

    def _tokenize(self, written: Sequence[_Written]) -> list[Sample]:
        """Return the samples of texts, which are encoded at once."""
        texts = [one.text for one in written]
        encoded = self.tokenizer.encode(texts)
        # the template's text between the turns as well, as optimum-habana's sft.py trains
        if self.rules.train_on == "all":
            mask = np.ones(len(encoded.ids), np.uint8)
        else:
            mask = loss_mask(encoded, texts, [one.spans for one in written])
        # [texts]: first token of each in the concatenated ids
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        mask[starts[encoded.lengths > 0]] = 0  # nothing predicts the first token
        return [
            Sample(encoded.ids[start : start + length], mask[start : start + length])
            for start, length in zip(starts, encoded.lengths, strict=True)
        ]

    def _fitted(self, chat: Chat, sample: Sample, counts: ChatCounts) -> list[Sample]:
        """Return the samples kept of a conversation. Raises BadRow if none of its tokens is trained."""
        min_length, limit = self.rules.min_length, self.rules.max_length
        if not sample.mask.any():
            raise BadRow(
                "nothing trained",
                "no token of the conversation is trained: it has no assistant message, or the template leaves it out; "
                "add the answer, or set unmask",
            )
        if sample.length < min_length:
            counts.dropped[f"shorter than {min_length} tokens"] += 1
            return []
        if limit is None or sample.length <= limit:
            return [sample]
        match self.rules.too_long:
            case "error":
                counts.longest = max(counts.longest, sample.length)
                raise BadRow(TOO_LONG, f"{sample.length} tokens")
            case "drop":
                counts.dropped[f"longer than {limit} tokens"] += 1
                return []
            case "truncate":
                counts.num_truncated += 1
                # the beginning is kept: an answer without its prompt would be learnt from nothing
                return self._usable([_part(sample, 0, limit)], "truncated before anything trained", counts)
            case "split":
                pieces = self._split(chat, sample, limit, counts)
                counts.num_split += 1
                return self._usable(pieces, "pieces of a split row without anything trained", counts)

    def _usable(self, pieces: Sequence[Sample], untrained: str, counts: ChatCounts) -> list[Sample]:
        """Return the pieces of a sample that are worth training. `untrained`: why others are dropped."""
        # counted apart, by what is wrong with each, for the manifest
        trained = [piece for piece in pieces if piece.mask.any()]
        kept = [piece for piece in trained if piece.length >= self.rules.min_length]
        if len(trained) < len(pieces):
            counts.dropped[untrained] += len(pieces) - len(trained)
        if len(kept) < len(trained):
            counts.dropped[f"pieces shorter than {self.rules.min_length} tokens"] += len(trained) - len(kept)
        return kept

    def _split(self, chat: Chat, sample: Sample, limit: int, counts: ChatCounts) -> list[Sample]:
        """Return pieces of whole exchanges, each after the system messages; an exchange above `limit` is cut."""
        is_cut = False
        starts = exchanges_of(chat.messages)
        pieces: list[Sample] = []
        done, count = 0, len(starts) - 1

        def piece_of(num_exchanges: int) -> Sample:
            part = chat.part(starts[0], starts[done], starts[done + num_exchanges])
            return self._tokenize([self._write(part)])[0]

        try:
            while done < count:
                num_exchanges, piece = _most_that_fit(piece_of, count - done, limit)
                if piece.length <= limit:
                    pieces.append(piece)
                else:
                    pieces += _cut(piece, limit)
                    is_cut = True
                done += num_exchanges
        except BadRow:  # the template refuses a part of this conversation
            pieces, is_cut = _cut(sample, limit), True
        counts.num_cut_by_tokens += is_cut
        return pieces


def _trains_others(chat: Chat) -> bool:
    return any(chat.is_trained(i) for i, message in enumerate(chat.messages) if message["role"] != "assistant")


def _most_that_fit(piece_of: Callable[[int], Sample], most: int, limit: int) -> tuple[int, Sample]:
    """Return the largest number of exchanges, up to `most`, whose piece fits, by bisection; one if none fits."""
    best: tuple[int, Sample] | None = None
    # the length grows with the number of exchanges; each trial costs a render and an encoding
    low, high = 1, most
    while low <= high:
        middle = (low + high) // 2
        # rendered again: a template may write a part of a conversation otherwise than as a part of the whole
        piece = piece_of(middle)
        if piece.length <= limit:
            best, low = (middle, piece), middle + 1
        else:
            high = middle - 1
    # where none fits, the last one tried is that of a single exchange
    return best or (1, piece)


@dataclass(frozen=True)
class _Written:
    """A conversation as text."""

    text: str
    spans: list[Span]
    has_appended_eos: bool
    left_out: list[str]


def _merged(spans: list[Span]) -> list[Span]:
    """Return spans in order, with those that touch or overlap merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _part(sample: Sample, start: int, end: int) -> Sample:
    mask = sample.mask[start:end].copy()
    # the first token of a piece has nothing before it that could predict it
    mask[:1] = 0
    return Sample(sample.ids[start:end], mask)


def _cut(sample: Sample, limit: int) -> list[Sample]:
    return [_part(sample, start, start + limit) for start in range(0, sample.length, limit)]


def loss_mask(encoded: EncodedText, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> NDArray[np.uint8]:
    """Return 1 for each token that holds a character of one of its text's spans, else 0.

    `spans` are in characters of their own text; those of one text are in order and do not overlap.
    """
    # (text, start, end) of all spans of a batch: one search over all tokens instead of a loop over texts
    bounds = [(i, start, end) for i, parts in enumerate(spans) for start, end in parts if end > start]
    if not bounds:
        return np.zeros(len(encoded.ids), np.uint8)
    # spans are in characters, the tokens' offsets in bytes
    if encoded.is_bytes:
        bounds = [(i, _bytes_before(texts[i], start), _bytes_before(texts[i], end)) for i, start, end in bounds]
    numbers, starts, ends = np.array(bounds, np.int64).T  # [spans] each
    # on one axis: each text begins where the one before it ends
    bases = encoded.bases[numbers]
    # a token without text of its own, such as a dummy prefix, belongs to the character after it
    token_ends = np.maximum(encoded.ends, encoded.starts + 1)
    # a token is in a span if more spans begin before its end than end before its start
    num_begun = np.searchsorted(starts + bases, token_ends, side="left")
    num_ended = np.searchsorted(ends + bases, encoded.starts, side="right")
    mask: NDArray[np.uint8] = (num_begun > num_ended).astype(np.uint8)
    return mask


def _bytes_before(text: str, offset: int) -> int:
    """Return the bytes before a character of a text."""
    return offset if text.isascii() else len(text[:offset].encode())


def _num_repeated(numbers: Sequence[int]) -> int:
    """Return how many different numbers occur more than once."""
    return sum(count > 1 for count in Counter(numbers).values())
